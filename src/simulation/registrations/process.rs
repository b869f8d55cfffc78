//! The processes that connect to the simulated rendezvous.

use std::io::{self, Read as _, Write as _};
use std::time::Duration;

use rand::RngExt as _;

use super::server::SimulatedServer;
use super::{ProcessPlan, name_of_rank};
use crate::Rank;
use crate::rendezvous::registration::{RankRegistration, RegistrationStep};
use crate::rendezvous::{Checksums, Member, Registration, Roster, SharedSettings, StartError};
use crate::simulation::sockets::{Cut, EndId, SharedSocketNetwork, SimulatedSocket, open_connection};
use crate::transport::handshake::DialProgress;
use crate::wire::handshake::{ConnectionPurpose, Dialer, Introduction, StreamId};

/// The behaviour of a process that connects to the rendezvous.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProcessKind {
    /// A rank of the job. If the rank is started twice, there are two such processes.
    Member,
    /// Registers, and then sends an invalid message.
    BrokenMember,
    /// Dies after its handshake, before it registers.
    DiesUnregistered,
    /// Completes the handshake, and then sends nothing.
    Silent,
    /// Completes the handshake, and then sends bytes that are not a message.
    InvalidMessage,
    /// Completes the handshake, and then sends a message that is longer than the limit.
    LongMessage,
    /// Completes the handshake, and then asks again and again which ranks are missing, and does not read the answers.
    AsksWithoutReading,
    /// Completes the handshake, and then registers a host with a very long name.
    LongHost,
    /// Opens a connection for a link, although the job has not started.
    OpensLink,
    WrongSecret,
    WrongJob,
    WrongWorld,
    /// Sends random bytes.
    Stranger,
}

impl ProcessKind {
    /// The processes that are no ranks of the job.
    pub(super) const OTHERS: [Self; 11] = [
        Self::DiesUnregistered,
        Self::Silent,
        Self::InvalidMessage,
        Self::LongMessage,
        Self::AsksWithoutReading,
        Self::LongHost,
        Self::OpensLink,
        Self::WrongSecret,
        Self::WrongJob,
        Self::WrongWorld,
        Self::Stranger,
    ];

    /// Returns whether the process runs the code of a rank until it has an answer.
    pub(super) fn is_complete_rank(self) -> bool {
        matches!(self, Self::Member | Self::WrongSecret | Self::WrongJob | Self::WrongWorld)
    }

    /// Returns whether the rendezvous accepts the process.
    pub(super) fn knows_secret(self) -> bool {
        !matches!(self, Self::WrongSecret | Self::WrongJob | Self::WrongWorld | Self::Stranger)
    }

    /// Returns what the process sends after its handshake.
    fn bytes_after_handshake(self, plan: &ProcessPlan) -> Vec<u8> {
        let frame = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let register = |host: String| {
            let member = serde_json::to_string(&member(plan, host)).expect("a member can be encoded");
            frame(&format!(r#"{{"register":{member}}}"#))
        };
        match self {
            Self::BrokenMember => [register(plan.host()), frame("{}")].concat(),
            Self::InvalidMessage => frame(&"?".repeat(3000)),
            Self::LongMessage => vec![0xFF; 100],
            Self::AsksWithoutReading => frame(r#""ask""#).repeat(600),
            Self::LongHost => register("x".repeat(2000)),
            _ => Vec::new(),
        }
    }
}

fn member(plan: &ProcessPlan, host: String) -> Member {
    let shared = SharedSettings {
        segment_bytes: 1024,
        checksums: Checksums::Auto,
        processors: 1,
        streams: 1,
        timeline: false,
    };
    Member { host, machine: "m".into(), address: plan.address, shared }
}

/// The end of a process.
#[derive(Debug)]
pub(super) enum ProcessEnd {
    Registered(Result<Roster, StartError>),
    /// The process was killed, or is no rank and has sent everything.
    Died,
}

pub(super) struct RegisteringProcess<'a> {
    pub(super) plan: &'a ProcessPlan,
    behaviour: Behaviour<'a>,
    cut: Option<Cut>,
    /// The number of this process's end of its last connection.
    last_end: Option<EndId>,
    /// The time at which the process continues without an event of its connection.
    pub(super) wakes_at: Option<Duration>,
    /// When and how the process ended.
    pub(super) end: Option<(Duration, ProcessEnd)>,
    /// Whether the launcher has learned that the process has died.
    is_reported: bool,
}

enum Behaviour<'a> {
    Rank(RankRegistration<'a, SimulatedSocket>),
    /// Completes a handshake, and sends the bytes that it has not sent yet.
    Other(Option<(SimulatedSocket, Option<Dialer>, Vec<u8>)>),
    Ended,
}

impl<'a> RegisteringProcess<'a> {
    pub(super) fn new(plan: &'a ProcessPlan, registration: &'a Registration<'a>) -> Self {
        let behaviour = if plan.kind.is_complete_rank() || plan.kind == ProcessKind::DiesUnregistered {
            Behaviour::Rank(RankRegistration::new(registration))
        } else {
            Behaviour::Other(None)
        };
        let wakes_at = Some(plan.began);
        Self { plan, behaviour, cut: plan.cut, last_end: None, wakes_at, end: None, is_reported: false }
    }

    pub(super) fn last_end(&self) -> Option<EndId> {
        self.last_end
    }

    /// Returns the rank of the process if the process has died since the last call.
    pub(super) fn take_death(&mut self) -> Option<Rank> {
        let has_died =
            matches!(self.end, Some((_, ProcessEnd::Died))) && self.plan.kind == ProcessKind::Member;
        (has_died && !std::mem::replace(&mut self.is_reported, true)).then_some(self.plan.rank)
    }

    fn finish(&mut self, now: Duration, end: ProcessEnd) {
        self.end = Some((now, end));
        self.behaviour = Behaviour::Ended;
        self.wakes_at = None;
    }

    /// Continues, if the process is not busy and has not ended.
    pub(super) fn step(
        &mut self,
        now: Duration,
        network: &SharedSocketNetwork,
        server: &mut SimulatedServer,
    ) {
        let plan = self.plan;
        if self.end.is_some() || now < plan.began {
            return;
        }
        if plan.killed_at.is_some_and(|at| at <= now) {
            return self.finish(now, ProcessEnd::Died);
        }
        // A process connects before it becomes busy.
        if now < plan.busy_until && self.last_end.is_some() {
            self.wakes_at = Some(plan.killed_at.unwrap_or(plan.busy_until).min(plan.busy_until));
            return;
        }
        match &mut self.behaviour {
            Behaviour::Rank(_) => self.step_rank(now, network, server),
            Behaviour::Other(_) => self.step_other(now, network, server),
            Behaviour::Ended => {}
        }
    }

    /// Opens a connection to the rendezvous.
    fn dial(
        &mut self,
        network: &SharedSocketNetwork,
        server: &mut SimulatedServer,
    ) -> io::Result<SimulatedSocket> {
        if !server.is_open() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = open_connection(network, self.cut.take());
        self.last_end = Some(ours.id);
        server.backlog.push((theirs, self.plan.address));
        Ok(ours)
    }

    fn step_rank(&mut self, now: Duration, network: &SharedSocketNetwork, server: &mut SimulatedServer) {
        let plan = self.plan;
        let since = now.saturating_sub(plan.began);
        loop {
            let Behaviour::Rank(registration) = &mut self.behaviour else { return };
            match registration.advance(since, &name_of_rank) {
                RegistrationStep::Dial => {
                    let stream = self.dial(network, server);
                    let nonce = network.borrow_mut().random.random();
                    let Behaviour::Rank(registration) = &mut self.behaviour else { return };
                    registration.dial(since, stream, nonce);
                }
                RegistrationStep::Register(_) if plan.kind == ProcessKind::DiesUnregistered => {
                    return self.finish(now, ProcessEnd::Died);
                }
                RegistrationStep::Register(_) => registration.register(since, &member(plan, plan.host())),
                RegistrationStep::Wait { until } => {
                    let until = plan.began + until;
                    self.wakes_at = Some(plan.killed_at.map_or(until, |at| at.min(until)));
                    return;
                }
                RegistrationStep::End(result) => return self.finish(now, ProcessEnd::Registered(result)),
            }
        }
    }

    fn step_other(&mut self, now: Duration, network: &SharedSocketNetwork, server: &mut SimulatedServer) {
        let plan = self.plan;
        self.wakes_at = plan.killed_at;
        if let Behaviour::Other(None) = self.behaviour {
            let Ok(socket) = self.dial(network, server) else { return self.finish(now, ProcessEnd::Died) };
            let random = &mut network.borrow_mut().random;
            let mut noise = vec![0; random.random_range(0..300)];
            random.fill(&mut noise[..]);
            let purpose = match plan.kind {
                ProcessKind::OpensLink => ConnectionPurpose::Link,
                _ => ConnectionPurpose::Rendezvous,
            };
            let introduction =
                Introduction { purpose, from: plan.rank, to: Rank::ZERO, stream: StreamId::ONLY };
            let handshake = plan.identity.dialer(introduction, random.random());
            let state = match plan.kind {
                ProcessKind::Stranger => (socket, None, noise),
                kind => (socket, Some(handshake), kind.bytes_after_handshake(plan)),
            };
            self.behaviour = Behaviour::Other(Some(state));
        }
        let Behaviour::Other(Some((socket, handshake, bytes))) = &mut self.behaviour else { return };
        if let Some(progress) = handshake.as_mut().map(|handshake| handshake.advance(socket)) {
            match progress {
                Ok(DialProgress::Connecting | DialProgress::Pending) => return,
                Ok(DialProgress::Ready) => *handshake = None,
                Err(_) => return self.finish(now, ProcessEnd::Died),
            }
        }
        while !bytes.is_empty() {
            match socket.write(bytes) {
                Ok(count) => drop(bytes.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.finish(now, ProcessEnd::Died),
            }
        }
        if plan.kind == ProcessKind::AsksWithoutReading {
            return;
        }
        let mut received = [0; 256];
        loop {
            match socket.read(&mut received) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                _ => return self.finish(now, ProcessEnd::Died),
            }
        }
    }
}
