//! Moves bytes between this rank and its peers. The code in this module is independent of the collectives.

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

pub mod handshake;
pub mod incoming;
pub mod listener;
pub mod local_links;
pub mod poller;
mod refusal_log;
pub(crate) mod scheduling;
pub mod tcp;

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use crate::types::Rank;

/// The number of bytes that a send or a receive on a link has moved. After 0, try again when the transport has handled an event.
pub type TransferResult = Result<usize, TransferError>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TransferError {
    /// The link is lost and will not be opened again; the text says why.
    Lost(String),
    /// The peer has sent invalid data; the text says what is wrong. A link returns this once. Later bytes are meaningless.
    Corrupt(String),
}

/// Sockets that carry links to peers. A link is an ordered stream of bytes in each direction.
///
/// No method blocks, and no method reads a clock: the caller passes the current time.
pub trait SocketTransport {
    /// Begins to open a link to `peer`, unless the link exists or is already being opened.
    fn connect(&mut self, now: Duration, peer: Rank);

    /// Returns whether the link to `peer` has been opened and is not known to be lost.
    fn is_open(&self, peer: Rank) -> bool;

    /// Sends the bytes of `parts` in order, as many as possible without blocking.
    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> TransferResult;

    /// Copies the bytes that have arrived into `parts`, and fills each part before the next one.
    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> TransferResult;

    /// Closes the sending direction of the link to `peer`. Data from the peer can still be received.
    fn close_sending(&mut self, peer: Rank);

    /// Returns whether the peer's machine has yet to acknowledge bytes. If this rank closes the link, they may be lost.
    fn has_unacknowledged_bytes(&self, _peer: Rank) -> bool {
        false
    }

    /// Returns a peer that has opened a link without a request of this rank, if there is one. Reports each link once.
    fn take_incoming_link(&mut self) -> Option<Rank>;

    /// Sends one byte to `peer`, whose thread sleeps until its socket has data. If the link is lost, does nothing. Does not
    /// depend on events that this rank has not handled. Knows the line of its caller, because tests lose the bytes of a line.
    #[track_caller]
    fn wake(&mut self, peer: Rank);

    /// Returns when the sockets must be served again, even if there is no event.
    fn next_deadline(&self) -> Option<Duration>;

    /// Returns whether the kernel has sent data to `peer` again, and the host of `peer` has not answered since then. If
    /// only the peer's program hangs, its host still answers.
    fn is_retransmission_unanswered(&self, peer: Rank) -> bool;
}
