//! Performs [handshakes](crate::wire::handshake) on connections.

use std::io::{self, Read, Write};

use mio::net::TcpStream;

use crate::types::Rank;
use crate::wire::Secret;
use crate::wire::handshake::{Dialer, Handshake, HandshakeError, Introduction, Job, NONCE_BYTES};

/// The secret, the job and the rank of this process, for handshakes.
#[derive(Clone, Debug)]
pub struct Identity {
    pub secret: Secret,
    pub job: Job,
    /// This process's rank; `None` for a launcher's rendezvous.
    pub rank: Option<Rank>,
}

impl Identity {
    /// Creates a handshake in which this process introduces itself with `introduction`. `nonce` must be random.
    pub fn dialer(&self, introduction: Introduction, nonce: [u8; NONCE_BYTES]) -> Dialer {
        Dialer::new(self.secret.clone(), &self.job, introduction, nonce)
    }
}

pub enum DialProgress {
    /// The peer's machine has not accepted the connection yet.
    Connecting,
    Pending,
    /// The peer has accepted the connection.
    Ready,
}

#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The network failed, or the other end refused the connection.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The other end closed the connection before the handshake was complete.
    #[error("{0}")]
    Closed(io::Error),
    /// The other end is not the expected process.
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
}

/// A connection that this rank opens without blocking.
pub trait DialedStream: Read + Write {
    /// Returns whether the peer's machine has accepted the connection, or an error if it cannot be established.
    fn is_established(&self) -> io::Result<bool>;
}

impl DialedStream for TcpStream {
    fn is_established(&self) -> io::Result<bool> {
        if let Ok(Some(error)) = self.take_error() {
            return Err(error);
        }
        match self.peer_addr() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Dialer {
    /// Sends and receives as much of the handshake as is possible without blocking.
    pub(crate) fn advance(&mut self, stream: &mut impl DialedStream) -> Result<DialProgress, DialError> {
        if !stream.is_established()? {
            return Ok(DialProgress::Connecting);
        }
        match advance_handshake(stream, self) {
            Ok(is_complete) => Ok(if is_complete { DialProgress::Ready } else { DialProgress::Pending }),
            Err(DialError::Io(error)) if is_closed_by_peer(&error) => Err(DialError::Closed(error)),
            Err(error) => Err(error),
        }
    }
}

fn is_closed_by_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Sends and receives a handshake's messages. Returns whether the handshake is complete; if not, more data must arrive. Each
/// message fits into any socket buffer, and the two sides send in turn, so a write that would block is an error. The last
/// message is the acceptor's verdict. The caller sends a verdict that accepts the connection.
pub(crate) fn advance_handshake<S: Read + Write>(
    stream: &mut S,
    handshake: &mut dyn Handshake,
) -> Result<bool, DialError> {
    loop {
        let wanted = handshake.wanted_bytes();
        if wanted == 0 {
            return Ok(true);
        }
        let output = handshake.take_output();
        if !output.is_empty() {
            stream.write_all(&output)?;
        }
        let mut bytes = [0; 256];
        let wanted = wanted.min(bytes.len());
        match stream.read(&mut bytes[..wanted]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => {
                if let Err(error) = handshake.feed(&bytes[..count]) {
                    // Tell the peer the reason. The error of the handshake is more important than one of this write.
                    let _ = stream.write_all(&handshake.take_output());
                    return Err(error.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
