//! A rank's registration at the rendezvous. The rank tries to connect until the rendezvous answers. The rank then registers,
//! and waits for the roster: the list of all ranks and their addresses.
//!
//! This module opens no sockets and reads no clock, so the simulation runs it with simulated connections. `client.rs` adds
//! the socket and the clock.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::message::{self, FromRank, ToRank};
use super::registry::FIRST_NOTICE_DELAY;
use super::{Member, Roster, StartError};
use crate::transport::handshake::{DialError, DialProgress, DialedStream, Identity};
use crate::transport::incoming::HANDSHAKE_TIMEOUT;
use crate::types::{Rank, WorldSize};
use crate::wire::handshake::{ConnectionPurpose, Dialer, Introduction, NONCE_BYTES, StreamId};

/// The pause between two attempts to reach the rendezvous, which may not have been started yet.
const CONNECT_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The timeout of one attempt to connect.
const CONNECT_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a rank waits for the answer to [`FromRank::Ask`]. A rank sends `Ask` when the rank's start timeout is
/// over.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

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
    /// The time from the call of [`register`](super::register) within which the rendezvous must answer and all ranks must
    /// register.
    pub start_timeout: Duration,
}

impl Registration<'_> {
    /// Creates the error for a rendezvous that ended or broke the protocol.
    pub(super) fn lost_error(&self, detail: &str) -> StartError {
        let detail = detail.to_owned();
        StartError::RendezvousLost { server_name: self.server_name.clone(), address: self.address, detail }
    }

    /// Creates the error for a rendezvous that has not answered within the start timeout.
    fn no_answer_error(&self, detail: &str) -> StartError {
        StartError::NoRendezvous {
            server_name: self.server_name.clone(),
            address: self.address,
            detail: detail.to_owned(),
            timeout: self.start_timeout,
        }
    }

    /// Converts the last answer of the rendezvous to a result.
    fn interpret_answer(&self, answer: ToRank, name: &dyn Fn(Rank) -> String) -> Result<Roster, StartError> {
        match answer {
            ToRank::Ready(roster) if roster.members.len() == self.world.as_usize() => Ok(roster),
            ToRank::Ready(_) => {
                Err(self.lost_error("the number of ranks in its roster is not the world size of this rank"))
            }
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
}

/// What the owner of a [`RankRegistration`] does next.
pub(crate) enum RegistrationStep<'s, S> {
    /// Open a connection to the rendezvous, and call [`RankRegistration::dial`].
    Dial,
    /// The rendezvous has accepted this connection. Call [`RankRegistration::register`].
    Register(&'s S),
    /// Call [`RankRegistration::advance`] when the connection has an event, or at the time `until`.
    Wait { until: Duration },
    /// The registration has ended.
    End(Result<Roster, StartError>),
}

/// A rank's registration, from the first attempt to connect until the rank has the roster or an error. All times begin at
/// the first call.
pub(crate) struct RankRegistration<'a, S> {
    registration: &'a Registration<'a>,
    state: RegistrationState<S>,
    has_warned: bool,
    /// The error of the last attempt to connect.
    last_error: String,
}

/// The progress of a registration.
enum RegistrationState<S> {
    /// There is no connection. The next attempt to connect begins at this time.
    Disconnected { dial_at: Duration },
    /// The connection or its handshake is in progress.
    Dialing { stream: S, handshake: Dialer, is_established: bool, give_up_at: Duration },
    /// The handshake is complete.
    Connected(S),
    /// The rank has sent its registration.
    Registered(ServerConnection<S>),
}

/// The connection of a rank that has registered.
struct ServerConnection<S> {
    stream: S,
    received: Vec<u8>,
    unsent: Vec<u8>,
    has_asked: bool,
    deadline: Duration,
}

impl<'a, S: DialedStream> RankRegistration<'a, S> {
    pub(crate) fn new(registration: &'a Registration<'a>) -> Self {
        let state = RegistrationState::Disconnected { dial_at: Duration::ZERO };
        Self { registration, state, has_warned: false, last_error: String::new() }
    }

    /// Begins a handshake on a new connection, or handles the error of an attempt to open one. `nonce` must be random.
    pub(crate) fn dial(&mut self, now: Duration, stream: io::Result<S>, nonce: [u8; NONCE_BYTES]) {
        let Registration { identity, rank, .. } = *self.registration;
        let (purpose, to, stream_id) = (ConnectionPurpose::Rendezvous, Rank::ZERO, StreamId::ONLY);
        let introduction = Introduction { purpose, from: rank, to, stream: stream_id };
        match stream {
            Ok(stream) => {
                let handshake = identity.dialer(introduction, nonce);
                let give_up_at = now + CONNECT_ATTEMPT_TIMEOUT;
                self.state =
                    RegistrationState::Dialing { stream, handshake, is_established: false, give_up_at };
            }
            Err(error) => self.disconnect(now, error.to_string()),
        }
    }

    /// Sends the registration of this rank.
    pub(crate) fn register(&mut self, now: Duration, member: &Member) {
        let connecting = RegistrationState::Disconnected { dial_at: now };
        if let RegistrationState::Connected(stream) = std::mem::replace(&mut self.state, connecting) {
            self.state = RegistrationState::Registered(ServerConnection {
                stream,
                received: Vec::new(),
                unsent: message::encode(&FromRank::Register(member.clone())),
                has_asked: false,
                deadline: self.registration.start_timeout,
            });
        }
    }

    /// Does everything that is possible without blocking. `name(rank)` returns a rank's name for messages.
    pub(crate) fn advance(
        &mut self,
        now: Duration,
        name: &dyn Fn(Rank) -> String,
    ) -> RegistrationStep<'_, S> {
        let registration = self.registration;
        if let RegistrationState::Dialing { .. } = self.state
            && let Some(error) = self.advance_handshake(now)
        {
            return RegistrationStep::End(Err(error));
        }
        match &mut self.state {
            RegistrationState::Disconnected { dial_at } if *dial_at >= registration.start_timeout => {
                RegistrationStep::End(Err(registration.no_answer_error(&self.last_error)))
            }
            RegistrationState::Disconnected { dial_at } if now >= *dial_at => RegistrationStep::Dial,
            RegistrationState::Disconnected { dial_at } => RegistrationStep::Wait { until: *dial_at },
            RegistrationState::Dialing { give_up_at, .. } => {
                RegistrationStep::Wait { until: (*give_up_at).min(registration.start_timeout) }
            }
            RegistrationState::Connected(stream) => RegistrationStep::Register(stream),
            RegistrationState::Registered(connection) => match connection.advance(registration, now, name) {
                Ok(None) => RegistrationStep::Wait { until: connection.deadline },
                Ok(Some(answer)) => RegistrationStep::End(registration.interpret_answer(answer, name)),
                Err(detail) => RegistrationStep::End(Err(registration.lost_error(&detail))),
            },
        }
    }

    /// Continues to connect. Returns the error that ends the registration.
    fn advance_handshake(&mut self, now: Duration) -> Option<StartError> {
        let RegistrationState::Dialing { stream, handshake, is_established, give_up_at } = &mut self.state
        else {
            return None;
        };
        let registration = self.registration;
        let no_answer = match handshake.advance(stream) {
            Ok(DialProgress::Connecting) => "connection timed out",
            Ok(DialProgress::Pending) => {
                if !std::mem::replace(is_established, true) {
                    *give_up_at = now + HANDSHAKE_TIMEOUT;
                }
                "it accepted the connection and did not answer"
            }
            Ok(DialProgress::Ready) => {
                let connecting = RegistrationState::Disconnected { dial_at: now };
                if let RegistrationState::Dialing { stream, .. } =
                    std::mem::replace(&mut self.state, connecting)
                {
                    self.state = RegistrationState::Connected(stream);
                }
                return None;
            }
            Err(DialError::Closed(error) | DialError::Io(error)) => {
                self.disconnect(now, error.to_string());
                return None;
            }
            Err(DialError::Handshake(source)) => {
                let (server_name, address) = (registration.server_name.clone(), registration.address);
                return Some(StartError::Handshake { server_name, address, source });
            }
        };
        if now >= registration.start_timeout || now >= *give_up_at {
            self.disconnect(now, no_answer.to_owned());
        }
        None
    }

    /// Closes the connection, and schedules the next attempt to connect.
    fn disconnect(&mut self, now: Duration, detail: String) {
        let Registration { server_name, address, start_timeout, .. } = self.registration;
        if !self.has_warned && now >= FIRST_NOTICE_DELAY {
            self.has_warned = true;
            let timeout = start_timeout.as_secs_f32();
            log::warn!(
                "waiting for {server_name} at {address}, which does not answer ({detail}); giving up after {timeout} s"
            );
        }
        self.last_error = detail;
        self.state = RegistrationState::Disconnected { dial_at: now + CONNECT_RETRY_PAUSE };
    }
}

impl<S: DialedStream> ServerConnection<S> {
    /// Sends and receives as much as is possible without blocking. Returns the last answer of the rendezvous, or `None` if
    /// it has not arrived. At the deadline, asks which ranks are missing: the rendezvous may wait longer than this rank.
    ///
    /// # Errors
    ///
    /// A text that says how the rendezvous was lost. In this text, "it" means the rendezvous.
    fn advance(
        &mut self,
        registration: &Registration<'_>,
        now: Duration,
        name: &dyn Fn(Rank) -> String,
    ) -> Result<Option<ToRank>, String> {
        // The answer may have arrived although the connection has ended.
        let is_sent = self.send_unsent();
        if let Some(answer) = self.receive(registration, now, name)? {
            return Ok(Some(answer));
        }
        is_sent?;
        if now < self.deadline {
            return Ok(None);
        }
        if self.has_asked {
            return Err("it did not say which ranks are missing".into());
        }
        self.has_asked = true;
        self.deadline = now + ANSWER_TIMEOUT;
        self.unsent.extend_from_slice(&message::encode(&FromRank::Ask));
        self.send_unsent()?;
        Ok(None)
    }

    fn send_unsent(&mut self) -> Result<(), String> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Receives messages until the last answer of the rendezvous. Logs notices about missing ranks.
    fn receive(
        &mut self,
        registration: &Registration<'_>,
        now: Duration,
        name: &dyn Fn(Rank) -> String,
    ) -> Result<Option<ToRank>, String> {
        let bytes_max = message::to_rank_bytes_max(registration.world);
        let mut bytes = [0; 4096];
        loop {
            match message::decode(&mut self.received, bytes_max)? {
                Some(ToRank::Waiting(absent)) if !self.has_asked => {
                    log::warn!("{}", absent.describe_wait(name, now));
                    continue;
                }
                Some(answer) => return Ok(Some(answer)),
                None => {}
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}
