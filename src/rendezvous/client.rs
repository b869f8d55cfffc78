//! A rank's side of the rendezvous. The rank tries to connect until the rendezvous answers. The rank then registers,
//! and waits for the roster: the list of all ranks and their addresses.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::message::{self, FromRank, ToRank};
use super::server::FIRST_NOTICE_DELAY;
use super::{Member, Roster, StartError};
use crate::transport::handshake::{DialError, Identity, advance_handshake, random_nonce};
use crate::transport::incoming::HANDSHAKE_TIMEOUT;
use crate::types::{Rank, WorldSize};
use crate::wire::handshake::{ConnectionPurpose, Dialer, Introduction, StreamId};

/// The pause between two attempts to reach the rendezvous, which may not have been started yet.
const CONNECT_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The timeout of one attempt to connect.
const CONNECT_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a rank waits for the answer to [`FromRank::Ask`]. A rank sends `Ask` when the rank's start timeout is
/// over.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What a rank needs to register.
pub struct Registration<'a> {
    /// The identity of this process in the handshake with the rendezvous.
    pub identity: &'a Identity,
    /// The rank of this process.
    pub rank: Rank,
    /// The number of ranks of the job.
    pub world: WorldSize,
    /// The address of the rendezvous.
    pub address: SocketAddr,
    /// The name of the process that serves the rendezvous, for errors.
    pub server_name: String,
    /// The time from the call of [`register`] within which the rendezvous must answer and all ranks must register.
    pub start_timeout: Duration,
}

/// Registers this rank and returns the roster once all ranks have registered. `listen` receives the local address of
/// the connection to the rendezvous, opens the listening socket, and returns the [`Member`] to register. `name`
/// formats a rank for errors.
///
/// # Errors
///
/// [`StartError`], which names the missing ranks or the problem between this rank and the rendezvous.
pub fn register(
    registration: &Registration<'_>,
    listen: impl FnOnce(IpAddr) -> Result<Member, StartError>,
    name: impl Fn(Rank) -> String,
) -> Result<Roster, StartError> {
    let started = Instant::now();
    let mut stream = registration.connect(started)?;
    let local =
        stream.local_addr().map_err(|error| registration.rendezvous_lost_error(&error.to_string()))?;
    let member = listen(local.ip())?;
    registration.send(&mut stream, &FromRank::Register(member))?;
    let mut received_bytes = Vec::new();
    let deadline = started + registration.start_timeout;
    while let Some(answer) = registration.receive(&mut stream, &mut received_bytes, deadline)? {
        if let ToRank::Waiting(absent) = answer {
            log::warn!("{}", absent.describe_wait(&name, started.elapsed()));
        } else {
            return registration.interpret_answer(answer, &name);
        }
    }
    // The start timeout of this rank is over. The rendezvous may still wait for ranks, because another rank may have
    // a longer start timeout.
    registration.send(&mut stream, &FromRank::Ask)?;
    match registration.receive(&mut stream, &mut received_bytes, Instant::now() + ANSWER_TIMEOUT)? {
        Some(answer) => registration.interpret_answer(answer, &name),
        None => Err(registration.rendezvous_lost_error("it did not say which ranks are missing")),
    }
}

impl Registration<'_> {
    /// Dials until the rendezvous answers and the handshake is complete.
    fn connect(&self, started: Instant) -> Result<TcpStream, StartError> {
        let (from, to, stream) = (self.rank, Rank::ZERO, StreamId::ONLY);
        let introduction = Introduction { purpose: ConnectionPurpose::Rendezvous, from, to, stream };
        let mut has_warned = false;
        loop {
            let detail = match TcpStream::connect_timeout(&self.address, CONNECT_ATTEMPT_TIMEOUT) {
                Ok(stream) => match self.handshake(stream, introduction) {
                    Ok(stream) => return Ok(stream),
                    Err(DialError::Handshake(source)) => {
                        return Err(StartError::Handshake {
                            server_name: self.server_name.clone(),
                            address: self.address,
                            source,
                        });
                    }
                    Err(DialError::Io(error)) => error.to_string(),
                },
                Err(error) => error.to_string(),
            };
            if started.elapsed() + CONNECT_RETRY_PAUSE >= self.start_timeout {
                return Err(StartError::NoRendezvous {
                    server_name: self.server_name.clone(),
                    address: self.address,
                    detail,
                    timeout: self.start_timeout,
                });
            }
            if !has_warned && started.elapsed() >= FIRST_NOTICE_DELAY {
                has_warned = true;
                let (server_name, address, timeout) =
                    (&self.server_name, self.address, self.start_timeout.as_secs_f32());
                log::warn!(
                    "waiting for {server_name} at {address}, which does not answer ({detail}); giving up after {timeout} s"
                );
            }
            std::thread::sleep(CONNECT_RETRY_PAUSE);
        }
    }

    fn handshake(&self, mut stream: TcpStream, introduction: Introduction) -> Result<TcpStream, DialError> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        let Identity { secret, job, .. } = self.identity;
        let mut handshake = Dialer::new(secret.clone(), job, introduction, random_nonce());
        if advance_handshake(&mut stream, &mut handshake)? {
            return Ok(stream);
        }
        let detail = "it accepted the connection and did not answer";
        Err(DialError::Io(io::Error::new(io::ErrorKind::TimedOut, detail)))
    }

    fn send(&self, stream: &mut TcpStream, message: &FromRank) -> Result<(), StartError> {
        stream
            .write_all(&message::encode(message))
            .map_err(|error| self.rendezvous_lost_error(&error.to_string()))
    }

    /// Receives the next message. Returns `None` at the deadline. Between two calls, `received_bytes` holds
    /// the received bytes that have not been decoded.
    fn receive(
        &self,
        stream: &mut TcpStream,
        received_bytes: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<Option<ToRank>, StartError> {
        let bytes_max = message::to_rank_bytes_max(self.world);
        let mut bytes = [0; 4096];
        loop {
            if let Some(message) = message::decode(received_bytes, bytes_max)
                .map_err(|error| self.rendezvous_lost_error(&error))?
            {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            stream
                .set_read_timeout(Some(left))
                .map_err(|error| self.rendezvous_lost_error(&error.to_string()))?;
            match stream.read(&mut bytes) {
                Ok(0) => return Err(self.rendezvous_lost_error("it closed the connection")),
                Ok(count) => received_bytes.extend_from_slice(&bytes[..count]),
                Err(error) if is_timeout_or_signal(&error) => {}
                Err(error) => return Err(self.rendezvous_lost_error(&error.to_string())),
            }
        }
    }

    /// Converts the last answer of the rendezvous to a result.
    fn interpret_answer(&self, answer: ToRank, name: &dyn Fn(Rank) -> String) -> Result<Roster, StartError> {
        match answer {
            ToRank::Ready(roster) if roster.members.len() == self.world.as_usize() => Ok(roster),
            ToRank::Ready(_) => Err(self.rendezvous_lost_error(
                "the number of ranks in its roster is not the world size of this rank",
            )),
            ToRank::Missing(absent) | ToRank::Waiting(absent) => {
                let missing = absent.describe(name);
                Err(StartError::Missing { missing, timeout: self.start_timeout })
            }
            ToRank::TimedOut { absent, timeout_ms } => Err(StartError::Missing {
                missing: absent.describe(name),
                timeout: Duration::from_millis(timeout_ms),
            }),
            ToRank::Refused { reason } => Err(StartError::Refused(reason)),
            ToRank::Lost { rank, host, detail } => Err(StartError::PeerLost { rank, host, detail }),
        }
    }

    /// Creates the error for a rendezvous that ended or broke the protocol.
    fn rendezvous_lost_error(&self, detail: &str) -> StartError {
        let detail = detail.to_owned();
        StartError::RendezvousLost { server_name: self.server_name.clone(), address: self.address, detail }
    }
}

/// Returns whether a read ended because of its timeout or a signal. The connection then still works.
fn is_timeout_or_signal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}
