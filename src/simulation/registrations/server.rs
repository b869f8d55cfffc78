//! The process that serves the simulated rendezvous, as `rendezvous/server.rs` does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use mio::Token;
use rand::RngExt as _;

use super::{StartScenario, identity, name_of_rank};
use crate::Rank;
use crate::rendezvous::registry::{NoticeAudience, RankRegistry};
use crate::rendezvous::{Checksums, Member, NoticeReceiver, Roster, SharedSettings, StartError};
use crate::simulation::sockets::{EndId, SharedSocketNetwork, SimulatedSocket};
use crate::transport::incoming::{IncomingConnections, PENDING_HANDSHAKES_MAX};

/// The most connections of one rank, and the most bytes in the buffers of one connection.
const CLIENTS_PER_RANK_MAX: usize = 3;
const CLIENT_BYTES_MAX: usize = 24 << 10;
/// How long the server tries to send its last messages.
const LAST_SEND_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct SimulatedServer {
    /// The connections; `None` after the end of the process.
    open: Option<OpenServer>,
    /// The connections that the kernel has accepted.
    pub(super) backlog: Vec<(SimulatedSocket, SocketAddr)>,
    /// The ends with events that this process has not handled.
    pub(super) events: BTreeSet<EndId>,
    has_launcher: bool,
    limit: usize,
    killed_at: Option<Duration>,
    /// The ranks that have died, and when the launcher learns this.
    deaths: Vec<(Duration, Rank)>,
    /// The result, and the time of the result.
    pub(super) result: Option<(Duration, Result<Roster, StartError>)>,
    /// When each rank registered.
    pub(super) registered_at: BTreeMap<Rank, Duration>,
    /// When the process ended.
    pub(super) closed_at: Option<Duration>,
}

struct OpenServer {
    incoming: IncomingConnections<SimulatedSocket>,
    registry: RankRegistry<SimulatedSocket>,
    has_sent_all: bool,
}

/// Returns the registration of rank 0, which serves the rendezvous.
pub(super) fn own_member() -> Member {
    let shared = SharedSettings {
        segment_bytes: 1024,
        checksums: Checksums::Auto,
        processors: 1,
        streams: 1,
        timeline: false,
    };
    Member {
        host: "host0".into(),
        machine: "m".into(),
        address: SocketAddr::from(([10, 0, 0, 1], 4000)),
        shared,
    }
}

impl SimulatedServer {
    pub(super) fn new(scenario: &StartScenario) -> Self {
        let audience = if scenario.has_launcher {
            NoticeAudience::Launcher(NoticeReceiver::LowestRank)
        } else {
            NoticeAudience::AllRanks
        };
        let mut registry = RankRegistry::new(scenario.world, scenario.start_timeout, audience);
        if !scenario.has_launcher {
            registry.register_rank(Duration::ZERO, Rank::ZERO, own_member());
        }
        let own_rank = (!scenario.has_launcher).then_some(Rank::ZERO);
        let incoming = IncomingConnections::new(identity(scenario.world, own_rank));
        Self {
            open: Some(OpenServer { incoming, registry, has_sent_all: false }),
            backlog: Vec::new(),
            events: BTreeSet::new(),
            has_launcher: scenario.has_launcher,
            limit: scenario.world.as_usize() * CLIENTS_PER_RANK_MAX,
            killed_at: scenario.server_killed_at,
            deaths: Vec::new(),
            result: None,
            registered_at: BTreeMap::new(),
            closed_at: None,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Returns whether the start has succeeded or failed, or the process has been killed.
    pub(super) fn has_decided(&self) -> bool {
        self.result.is_some() || !self.is_open()
    }

    /// A launcher learns at the time `at` that the process of a rank has died.
    pub(super) fn rank_died(&mut self, rank: Rank, at: Duration) {
        if self.has_launcher {
            self.deaths.push((at, rank));
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let open = self.open.as_ref()?;
        let registry = match &self.result {
            None => open.registry.next_deadline(),
            Some((at, _)) => (!open.has_sent_all).then_some(*at + LAST_SEND_TIMEOUT),
        };
        let deaths = self.deaths.iter().map(|death| death.0);
        let deadlines = registry.into_iter().chain(open.incoming.next_deadline()).chain(self.killed_at);
        deadlines.chain(deaths).min()
    }

    fn close(&mut self, now: Duration) {
        self.open = None;
        self.backlog.clear();
        self.closed_at = Some(now);
    }

    pub(super) fn step(&mut self, now: Duration, network: &SharedSocketNetwork, seed: u64) {
        if self.killed_at.is_some_and(|at| at <= now) && self.is_open() {
            self.close(now);
        }
        let events = std::mem::take(&mut self.events);
        let Some(OpenServer { incoming, registry, has_sent_all }) = &mut self.open else { return };
        let mut of_clients = Vec::new();
        for token in events.into_iter().map(Token) {
            if incoming.is_pending(token) {
                incoming.continue_handshake(now, token);
            } else {
                of_clients.push(token);
            }
        }
        incoming.expire(now);
        for (socket, address) in self.backlog.drain(..) {
            let nonce = network.borrow_mut().random.random();
            incoming.add(now, Token(socket.id), socket, address, nonce);
        }
        let dead = self.deaths.extract_if(.., |death| death.0 <= now).next();
        if self.result.is_none() {
            let served = match dead {
                Some((_, rank)) => Err(registry.fail_for_lost_rank(rank, "it was killed".into())),
                None => registry.serve(now, incoming, of_clients, &name_of_rank),
            };
            for rank in registry.registered_ranks() {
                self.registered_at.entry(rank).or_insert(now);
            }
            let (clients, bytes) = registry.state_size();
            assert!(clients <= self.limit, "seed {seed}: the rendezvous has {clients} connections");
            assert!(
                bytes <= clients * CLIENT_BYTES_MAX,
                "seed {seed}: {bytes} bytes for {clients} connections"
            );
            if let Err(error) = served {
                if self.has_launcher
                    && let Some(reply) = registry.failure_reply()
                {
                    incoming.reply_to_late_ranks(now, reply);
                }
                self.result = Some((now, Err(error)));
            } else if let Some(roster) = registry.roster() {
                incoming.reply_to_late_ranks(now, registry.start_job(roster.clone()));
                self.result = Some((now, Ok(roster)));
            }
            let streams = incoming.streams().count();
            assert!(streams <= PENDING_HANDSHAKES_MAX, "seed {seed}: {streams} incoming connections");
        }
        let Some((at, result)) = &self.result else { return };
        *has_sent_all |= registry.send_last_messages(incoming) || now >= *at + LAST_SEND_TIMEOUT;
        // Rank 0 replies to late ranks if the job has started. A launcher replies if the start has failed.
        if *has_sent_all && result.is_ok() == self.has_launcher {
            self.close(now);
        }
    }
}
