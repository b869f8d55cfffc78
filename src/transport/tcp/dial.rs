//! A connection that this rank opens.

use std::time::Duration;

use mio::Token;
use mio::net::TcpStream;

use crate::transport::handshake::{DialError, DialProgress};
use crate::transport::incoming::HANDSHAKE_TIMEOUT;
use crate::types::Rank;
use crate::wire::cause::NO_ANSWER_TEXT;
use crate::wire::handshake::{Dialer, StreamId};

/// The time within which a peer's machine must accept a TCP connection. The handshake may be complete much later.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Dial {
    pub(super) peer: Rank,
    /// The number of the connection, and the number of connections that the link will have.
    pub(super) stream_id: StreamId,
    pub(super) stream: TcpStream,
    pub(super) token: Token,
    pub(super) handshake: Dialer,
    pub(super) began: Duration,
    /// The time by which the peer's machine must accept the connection; `None` once it has done so.
    pub(super) deadline: Option<Duration>,
}

/// Why a connection could not be opened. If this rank was too slow in the handshake, it should dial again.
pub(super) struct DialFailure {
    pub(super) why: String,
    pub(super) was_too_slow: bool,
}

impl Dial {
    pub(super) fn is_late(&self, now: Duration) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Opens the connection as far as possible without blocking. Returns whether the peer has accepted it. If the deadline has
    /// passed, the connection may still have been established while this rank was outside the library.
    pub(super) fn advance(&mut self, now: Duration) -> Result<bool, DialFailure> {
        match self.handshake.advance(&mut self.stream) {
            Ok(DialProgress::Connecting) if self.is_late(now) => {
                let why = format!("{NO_ANSWER_TEXT} {} s", CONNECT_TIMEOUT.as_secs());
                Err(DialFailure { why, was_too_slow: false })
            }
            Ok(DialProgress::Connecting) => Ok(false),
            Ok(DialProgress::Pending) => {
                self.deadline = None;
                Ok(false)
            }
            Ok(DialProgress::Ready) => Ok(true),
            Err(error) => {
                // If this rank made no call to the library for a long time, the peer has closed the connection.
                let was_too_slow =
                    matches!(error, DialError::Closed(_)) && now >= self.began + HANDSHAKE_TIMEOUT;
                Err(DialFailure { why: format!("no connection: {error}"), was_too_slow })
            }
        }
    }
}
