//! Tests how ranks register at the rendezvous, in simulated networks and virtual time.
//!
//! The ranks of a job connect to a launcher's rendezvous, or to rank 0. Ranks may be late, slow or killed, and the network may
//! cut connections at any byte. Other processes have wrong options, or a rank that another process has, or they know the
//! secret and break the protocol. The ranks get the same roster, or each rank gets an error that names the cause.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

mod checks;
mod process;
mod server;

pub(crate) use self::checks::check_registrations;
use self::process::{ProcessEnd, ProcessKind, RegisteringProcess};
use self::server::SimulatedServer;
use super::sockets::{Cut, EndId, SocketNetwork};
use crate::rendezvous::Registration;
use crate::simulation::{has_many_seeds, seeds};
use crate::transport::handshake::Identity;
use crate::wire::Secret;
use crate::wire::handshake::Job;
use crate::{Rank, WorldSize};

/// The virtual time by which every process must have ended.
const END: Duration = Duration::from_mins(5);
/// A process that needs more steps waits for a time that is over.
const STEPS_MAX: usize = 100_000;
/// More time than the network needs for all messages of a rank.
const NETWORK_TIME: Duration = Duration::from_secs(2);

/// What a seed determines before the processes run.
pub(super) struct StartScenario {
    pub(super) world: WorldSize,
    /// Whether a launcher serves the rendezvous. Otherwise, rank 0 serves it.
    pub(super) has_launcher: bool,
    /// The start timeout of the rendezvous.
    pub(super) start_timeout: Duration,
    /// The time at which the process that serves the rendezvous is killed.
    pub(super) server_killed_at: Option<Duration>,
    processes: Vec<ProcessPlan>,
}

/// A process that connects.
#[derive(Debug)]
pub(super) struct ProcessPlan {
    pub(super) kind: ProcessKind,
    pub(super) rank: Rank,
    identity: Identity,
    pub(super) address: SocketAddr,
    /// The length of the name of the process's host.
    pub(super) host_bytes: usize,
    pub(super) began: Duration,
    /// The time until which the process does not answer.
    pub(super) busy_until: Duration,
    pub(super) killed_at: Option<Duration>,
    /// Where the network cuts the first connection of the process.
    pub(super) cut: Option<Cut>,
    start_timeout: Duration,
}

impl ProcessPlan {
    pub(super) fn host(&self) -> String {
        format!("host{}{}", self.address.ip(), "x".repeat(self.host_bytes))
    }

    /// Returns the time at which the start timeout of the process is over.
    fn deadline(&self) -> Duration {
        self.began + self.start_timeout
    }

    fn registration(&self, world: WorldSize) -> Registration<'_> {
        Registration {
            identity: &self.identity,
            rank: self.rank,
            world,
            address: SocketAddr::from(([10, 0, 0, 1], 4000)),
            server_name: "the rendezvous".into(),
            start_timeout: self.start_timeout,
        }
    }
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).expect("the secret is long enough")
}

pub(super) fn identity(world: WorldSize, rank: Option<Rank>) -> Identity {
    let job = Job { id: [7; 16], world: world.get(), peers_digest: [3; 32] };
    Identity { secret: secret("the secret of this simulated job"), job, rank }
}

pub(super) fn name_of_rank(rank: Rank) -> String {
    format!("rank {rank}")
}

impl StartScenario {
    fn random(random: &mut StdRng) -> Self {
        let world = WorldSize::new(random.random_range(2..=5)).unwrap();
        let has_launcher = random.random_bool(0.5);
        let seconds =
            |random: &mut StdRng, max: u64| Duration::from_millis(random.random_range(0..max * 1000));
        let start_timeout = Duration::from_secs(1) + seconds(random, 30);
        let dialers: Vec<Rank> = world.ranks().skip(usize::from(!has_launcher)).collect();
        let any_rank = |random: &mut StdRng| dialers[random.random_range(0..dialers.len())];
        let mut kinds: Vec<(ProcessKind, Rank)> =
            dialers.iter().map(|&rank| (ProcessKind::Member, rank)).collect();
        if random.random_bool(0.1) {
            let broken = random.random_range(0..kinds.len());
            kinds[broken].0 = ProcessKind::BrokenMember;
        }
        if random.random_bool(0.1) {
            kinds.remove(random.random_range(0..kinds.len()));
        }
        let second = random.random_bool(0.3).then(|| any_rank(random));
        kinds.extend(second.map(|rank| (ProcessKind::Member, rank)));
        // A rank may have few connections that are not registered.
        let mut crowded: BTreeSet<Rank> = second.into_iter().collect();
        for kind in ProcessKind::OTHERS {
            let rank = any_rank(random);
            if random.random_bool(0.1) && (!kind.knows_secret() || crowded.insert(rank)) {
                kinds.push((kind, rank));
            }
        }
        let window = [1, 3000, 20_000][random.random_range(0..3)];
        let has_disturbances = random.random_bool(0.5);
        let plan = |(index, (kind, rank)): (usize, (ProcessKind, Rank))| {
            let chance = |random: &mut StdRng, p: f64| has_disturbances && random.random_bool(p);
            let began = Duration::from_millis(random.random_range(0..window));
            let busy = if random.random_bool(0.1) { seconds(random, 20) } else { Duration::ZERO };
            let cut = chance(random, 0.1).then(|| Cut {
                is_to_dialer: random.random_bool(0.5),
                after_bytes: random.random_range(0..600),
                is_reported: random.random_bool(0.7),
            });
            let mut identity = identity(world, Some(rank));
            match kind {
                ProcessKind::WrongSecret => identity.secret = secret("another secret of this test"),
                ProcessKind::WrongJob => identity.job.id = [9; 16],
                ProcessKind::WrongWorld => identity.job.world += 1,
                _ => {}
            }
            ProcessPlan {
                kind,
                rank,
                identity,
                address: SocketAddr::from(([10, 0, 0, 10 + index as u8], 4000)),
                host_bytes: if random.random_bool(0.2) { random.random_range(0..700) } else { 5 },
                began,
                busy_until: began + busy,
                killed_at: chance(random, 0.1).then(|| began + seconds(random, 10)),
                cut,
                start_timeout: if chance(random, 0.2) { seconds(random, 20) } else { start_timeout },
            }
        };
        let processes = kinds.into_iter().enumerate().map(plan).collect();
        let server_killed_at = (has_disturbances && random.random_bool(0.05)).then(|| seconds(random, 20));
        Self { world, has_launcher, start_timeout, server_killed_at, processes }
    }

    /// Returns whether all ranks register in time.
    fn must_start(&self) -> bool {
        let is_disturbed = |plan: &ProcessPlan| plan.cut.is_some() || plan.killed_at.is_some();
        let is_broken = |plan: &ProcessPlan| plan.kind == ProcessKind::BrokenMember;
        let members = || self.processes.iter().filter(|plan| plan.kind == ProcessKind::Member);
        let ranks: BTreeSet<Rank> = members().map(|plan| plan.rank).collect();
        let ready = members().map(|plan| plan.busy_until).max().unwrap_or_default() + NETWORK_TIME;
        let first = if self.has_launcher { members().map(|plan| plan.began).min() } else { None };
        self.server_killed_at.is_none()
            && ranks.len() == self.world.as_usize() - usize::from(!self.has_launcher)
            && !members().any(is_disturbed)
            && !self.processes.iter().any(is_broken)
            && members().all(|plan| ready < plan.began + plan.start_timeout)
            && ready < first.unwrap_or_default() + self.start_timeout
    }
}

/// How a process has ended.
struct ProcessOutcome<'a> {
    plan: &'a ProcessPlan,
    at: Duration,
    end: ProcessEnd,
}

/// Runs all processes until they have ended.
fn run(scenario: &StartScenario, seed: u64) -> (Vec<ProcessOutcome<'_>>, SimulatedServer) {
    let network = SocketNetwork::new(StdRng::seed_from_u64(seed));
    network.borrow_mut().window_bytes = if seed.is_multiple_of(2) { 4096 } else { 1 << 20 };
    let registrations: Vec<Registration<'_>> =
        scenario.processes.iter().map(|plan| plan.registration(scenario.world)).collect();
    let mut processes: Vec<RegisteringProcess<'_>> = scenario
        .processes
        .iter()
        .zip(&registrations)
        .map(|(plan, registration)| RegisteringProcess::new(plan, registration))
        .collect();
    let mut server = SimulatedServer::new(scenario);
    let mut process_of_end: BTreeMap<EndId, usize> = BTreeMap::new();
    for step in 0.. {
        assert!(step < STEPS_MAX, "seed {seed}: the processes make no progress");
        let now = network.borrow().now;
        let mut changed = BTreeSet::new();
        for event in network.borrow_mut().take_events() {
            match process_of_end.get(&event) {
                Some(&index) => changed.insert(index),
                None => server.events.insert(event),
            };
        }
        for (index, process) in processes.iter_mut().enumerate() {
            if changed.contains(&index) || process.wakes_at.is_some_and(|at| at <= now) {
                process.step(now, &network, &mut server);
                process_of_end.extend(process.last_end().map(|end| (end, index)));
            }
            if let Some(rank) = process.take_death() {
                server.rank_died(rank, now + NETWORK_TIME);
            }
        }
        server.step(now, &network, seed);
        let wakes = processes.iter().filter_map(|process| process.wakes_at);
        let Some(next) = wakes.chain(server.next_deadline()).chain(network.borrow().next_event()).min()
        else {
            break;
        };
        assert!(next < END, "seed {seed}: a process has not ended");
        network.borrow_mut().now = next.max(now);
    }
    assert!(
        server.has_decided() || server.registered_at.is_empty(),
        "seed {seed}: the rendezvous waits without a deadline"
    );
    let now = network.borrow().now;
    let outcomes = processes.into_iter().zip(&scenario.processes).map(|(process, plan)| {
        assert!(
            process.end.is_some() || !plan.kind.is_complete_rank(),
            "seed {seed}: a rank has no deadline"
        );
        let (at, end) = process.end.unwrap_or((now, ProcessEnd::Died));
        ProcessOutcome { plan, at, end }
    });
    (outcomes.collect(), server)
}

#[test]
fn all_ranks_get_the_same_roster_or_an_error_that_names_the_cause() {
    let networks = seeds(100_000);
    let count = networks.end - networks.start;
    let started = networks.filter(|&seed| check_registrations(seed)).count() as u64;
    assert!(
        !has_many_seeds() || (count / 10..count * 9 / 10).contains(&started),
        "{started} of {count} jobs start"
    );
}
