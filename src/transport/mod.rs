//! Moves bytes between this rank and its peers, and knows no collectives.

pub mod handshake;
pub mod listener;
pub mod poller;
mod refusal_log;
pub(crate) mod scheduling;
pub mod shm;
pub mod sim;
pub mod tcp;

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use crate::types::Rank;

/// What became of an attempt to move bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Moved {
    /// This many bytes were moved, at least one.
    Bytes(usize),
    /// Nothing could be moved now, and nothing can before the transport has learnt of an event.
    Blocked,
    /// The link is gone and will not come back; the text says how.
    Lost(String),
    /// What the peer has sent is not what a link carries; the text says what is wrong. It is told once: what is received
    /// afterwards means nothing.
    Corrupt(String),
}

/// Links to peers, opened when they are needed, each an ordered stream of bytes both ways.
///
/// Nothing here blocks; time is an argument everywhere.
pub trait Transport {
    /// Makes sure that a link to `peer` exists or is being opened.
    fn connect(&mut self, now: Duration, peer: Rank);

    /// Whether bytes can pass on the link to `peer`: it has been opened and is not known to be lost.
    fn is_open(&self, peer: Rank) -> bool;

    /// Sends as much of the parts, one after another, as the link takes at once.
    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> Moved;

    /// Receives as much as has arrived, into the parts one after another.
    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> Moved;

    /// Says that nothing more will be sent on a link; what the peer sends still arrives.
    fn finish(&mut self, peer: Rank);

    /// A peer that has opened a link of its own accord since the last call.
    fn take_incoming(&mut self) -> Option<Rank>;

    /// How bytes travel, as benchmarks print it.
    fn name(&self) -> &'static str;
}
