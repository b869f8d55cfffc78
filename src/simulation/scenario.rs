//! A simulated job: its ranks, their program and the network. The seed determines everything.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::engine::{DISCONNECT_TIMEOUT, NOTIFY_TIMEOUT, Settings};
use crate::runtime::driver::Core;
use crate::runtime::link_driver::LinkDriver;
use crate::simulation::hosts::{MemoryUse, SimGroup, SimulatedHost};
use crate::simulation::job::{MemoryFault, MemoryFaultKind, SimulatedJob};
use crate::simulation::memory::THREADS_MAX;
use crate::simulation::network::{Fault, SimConfig, SimNetwork, SimTransport, WakeSite};
use crate::simulation::program::{Members, SimCall};
use crate::simulation::rank::{
    HostMemory, OPERATION_TIMEOUT, SimCounts, SimEnd, SimRankState, SimulatedRank,
};
use crate::transport::local_links::LinkTransport;
use crate::wire::Cause;
use crate::{Rank, WorldSize};

/// The parameters of a simulation. The seed of the simulation determines all parameters.
pub(crate) struct Scenario {
    pub(crate) world: WorldSize,
    pub(crate) groups: Vec<Members>,
    pub(crate) program: Vec<SimCall>,
    pub(crate) running_max: usize,
    pub(crate) config: SimConfig,
    pub(crate) segment_bytes: usize,
    /// For each pair of ranks, whether the payloads on their link carry checksums.
    pub(crate) checked_links: Vec<Vec<bool>>,
    pub(crate) compute_max: Duration,
    /// The ranks of each host whose ranks share memory.
    pub(crate) hosts: Vec<Members>,
    pub(crate) memory_use: MemoryUse,
    pub(crate) memory_faults: Vec<MemoryFault>,
    /// How probable it is that another rank takes a turn before an access to shared memory.
    pub(crate) preemption: f64,
    /// The rank that makes another call than the others, and the index of this call.
    pub(crate) odd_call: Option<(Rank, usize)>,
}

/// What happened in a simulation.
pub(crate) struct SimRun {
    pub(crate) outcomes: Vec<SimEnd>,
    /// The virtual time at which the last rank ended.
    pub(crate) ended_at: Duration,
    /// How often a rank that could do nothing did not sleep.
    pub(crate) sleepless_times: u64,
    /// How often the ranks did what not all programs do.
    pub(crate) counts: SimCounts,
    /// The lines of the source that have sent wake bytes.
    pub(crate) wake_sites: BTreeSet<WakeSite>,
}

impl Scenario {
    pub(crate) fn random(seed: u64, with_faults: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let world = WorldSize::new(random.random_range(2..=6)).unwrap();
        let groups = random_groups(&mut random, world);
        let mut program: Vec<SimCall> =
            (0..random.random_range(1..8)).map(|_| SimCall::random(&mut random, &groups)).collect();
        program.push(SimCall::BARRIER);
        let mut faults = Vec::new();
        if with_faults {
            for _ in 0..random.random_range(1..=2) {
                faults.push(random_fault(&mut random, world));
            }
        }
        let config = SimConfig {
            seed: random.random_range(0..u64::MAX),
            latency: Duration::from_micros(random.random_range(1..200)),
            jitter: Duration::from_micros(random.random_range(0..500)),
            bandwidth: random.random_range(1_000_000..100_000_000),
            window_bytes: random.random_range(64..4096),
            piece_bytes_max: random.random_range(1..600),
            wake_delay: Duration::ZERO,
            lost_wakes: None,
            faults,
        };
        let segment_bytes = 8 * random.random_range(1..40);
        let compute_max = Duration::from_micros(random.random_range(0..300));
        let running_max = random.random_range(1..5);
        let checked_links = random_checked_links(&mut random, world);
        let mut scenario = Self {
            world,
            groups,
            program,
            running_max,
            config,
            segment_bytes,
            checked_links,
            compute_max,
            hosts: random_hosts(&mut random, world),
            memory_use: random_memory_use(&mut random),
            memory_faults: Vec::new(),
            preemption: 0.05,
            odd_call: None,
        };
        scenario.config.wake_delay = Duration::from_micros([0, 100, 5000][random.random_range(0..3)]);
        if with_faults && random.random_bool(0.3) {
            let kinds = [MemoryFaultKind::Kill, MemoryFaultKind::Stall];
            scenario.add_memory_fault(kinds[random.random_range(0..2)], &mut random);
        }
        scenario
    }

    /// Adds a fault at a random access of a random rank to shared memory. If the rank shares no memory, the fault does not
    /// happen.
    pub(crate) fn add_memory_fault(&mut self, kind: MemoryFaultKind, random: &mut StdRng) -> Rank {
        let rank = Rank::new(random.random_range(0..self.world.get()));
        self.memory_faults.push(MemoryFault { rank, access: random.random_range(0..2000), kind });
        rank
    }

    /// Runs the job. Returns how each rank has ended.
    pub(crate) fn run(&self, seed: u64) -> Vec<SimEnd> {
        self.run_and_observe(seed).outcomes
    }

    /// Runs the job. Returns how each rank has ended, and what happened.
    pub(crate) fn run_and_observe(&self, seed: u64) -> SimRun {
        let network = SimNetwork::new(self.config.clone());
        let new_host =
            |(ranks, n): (&Members, u64)| SimulatedHost::new(ranks, &self.groups, self.memory_use, seed ^ n);
        let hosts: Vec<SimulatedHost> = self.hosts.iter().zip(0..).map(new_host).collect();
        let host_of = |rank: Rank| {
            hosts.iter().find_map(|host| Some((host, host.ranks.iter().position(|&member| member == rank)?)))
        };
        let ranks = self.world.ranks();
        let job = Rc::new(SimulatedJob {
            seed,
            network: Rc::clone(&network),
            ranks: ranks.map(|rank| RefCell::new(self.new_rank(rank, &network, host_of(rank)))).collect(),
            memories: self
                .world
                .ranks()
                .map(|rank| host_of(rank).map(|(host, thread)| (Arc::clone(&host.memory), thread)))
                .collect(),
            faults: self.memory_faults.clone(),
            preemption: self.preemption,
            compute_max: self.compute_max,
            sleepless_times: Cell::new(0),
            random: RefCell::new(StdRng::seed_from_u64(seed ^ 0x5eed)),
            running: RefCell::default(),
            accesses: vec![Cell::new(0); self.world.as_usize()],
        });
        // Each call has a time limit, and so has the whole simulation.
        let limit =
            (OPERATION_TIMEOUT + NOTIFY_TIMEOUT + DISCONNECT_TIMEOUT) * (self.program.len() as u32 + 2);
        let ended_at = job.run(limit);
        if !self.corrupts_memory() {
            let races: Vec<String> = hosts.iter().filter_map(|host| host.memory.race()).collect();
            assert!(races.is_empty(), "seed {seed}: {races:?}");
        }
        let outcomes: Vec<SimEnd> = job.ranks.iter().map(|rank| rank.borrow().end()).collect();
        // The core catches the panics of reduction functions, and aborts the job.
        let is_aborted = |end: &SimEnd| match end {
            SimEnd::Failed { failure, .. } => matches!(failure.cause, Cause::Aborted { .. }),
            SimEnd::Success | SimEnd::Killed => false,
        };
        assert!(!outcomes.iter().any(is_aborted), "seed {seed}: {outcomes:?}");
        let wake_sites = network.borrow().wake_sites().clone();
        SimRun {
            outcomes,
            ended_at,
            wake_sites,
            counts: job
                .ranks
                .iter()
                .map(|rank| rank.borrow().counts)
                .fold(SimCounts::default(), SimCounts::add),
            sleepless_times: job.sleepless_times.get(),
        }
    }

    /// Returns whether the ranks of a group share memory for their collectives.
    pub(crate) fn shares_memory(&self, group: &[Rank]) -> bool {
        let is_on = |host: &Members| group.iter().all(|rank| host.contains(rank));
        self.memory_use.slot_bytes.is_some() && self.hosts.iter().any(is_on)
    }

    /// Returns the calls of a rank.
    fn program_of(&self, rank: Rank) -> impl Iterator<Item = SimCall> {
        self.program.iter().enumerate().map(move |(index, &call)| {
            if self.odd_call == Some((rank, index)) { call.other_call(self.world) } else { call }
        })
    }

    /// Returns a number for the host of each rank. A rank that shares no memory is alone on its host.
    fn host_ids(&self) -> Vec<u32> {
        let alone = self.hosts.len() as u32;
        let host_of = |rank: Rank| self.hosts.iter().position(|host| host.contains(&rank));
        self.world.ranks().map(|rank| host_of(rank).map_or(alone + rank.get(), |host| host as u32)).collect()
    }

    fn corrupts_memory(&self) -> bool {
        self.memory_faults.iter().any(|fault| fault.kind == MemoryFaultKind::Corrupt)
    }

    /// Returns whether the network flips a bit on a link without checksums, or a word of shared memory changes.
    fn may_change_results(&self) -> bool {
        self.corrupts_memory() || self.config.faults.iter().any(|fault| {
            matches!(fault, Fault::Corrupt { from, to, .. } if !self.checked_links[from.index()][to.index()])
        })
    }

    fn new_rank(
        &self,
        rank: Rank,
        network: &Rc<RefCell<SimNetwork>>,
        host: Option<(&SimulatedHost, usize)>,
    ) -> SimulatedRank {
        let settings = Settings {
            rank,
            segment_bytes: self.segment_bytes,
            checked_links: self.checked_links[rank.index()].clone(),
            host_names: self.world.ranks().map(|rank| format!("host{rank}")).collect(),
        };
        let mut transport = LinkTransport::new(SimTransport::new(Rc::clone(network), rank), self.world);
        if let Some((SimulatedHost { queues: Some((memory, layout)), ranks, .. }, own)) = host {
            transport.add_queues(memory, *layout, ranks, own);
        }
        let signals = transport.signals();
        let mut link_driver = LinkDriver::new(settings, transport);
        // Open the links to both neighbours on the ring and to the ranks of the host before the program begins.
        let neighbours = [self.world.rank_after(rank, 1), self.world.rank_before(rank, 1)];
        let same_host = host.map_or(&[][..], |(host, _)| &host.ranks[..]);
        for neighbour in
            neighbours.into_iter().chain(same_host.iter().copied().filter(|&other| other != rank))
        {
            network.borrow_mut().open_link(rank, neighbour);
            link_driver.connect(Duration::ZERO, neighbour);
        }
        let mut random = StdRng::seed_from_u64(self.config.seed ^ u64::from(rank.get()));
        let change_over_at = Duration::from_micros(random.random_range(0..2000));
        let mut core = Core::new(link_driver, None);
        core.rounds.extend(host.into_iter().flat_map(|(host, _)| host.rounds_of(rank)));
        let host = host.map(|(host, thread)| HostMemory {
            memory: Arc::clone(&host.memory),
            thread,
            signals,
            change_over_at,
        });
        let host_ids = self.host_ids();
        let new_group = |members: &Members| SimGroup::new(members, &host_ids, rank, self.memory_use);
        let groups: Vec<SimGroup> = self.groups.iter().map(new_group).collect();
        SimulatedRank {
            rank,
            network: Rc::clone(network),
            core,
            host,
            sleep: None,
            random,
            program: self.program_of(rank).map(|call| groups[call.group].with_algorithm(call)).collect(),
            groups,
            next_call: 0,
            running: BTreeMap::new(),
            dropped: BTreeMap::new(),
            blocking: None,
            adopted: None,
            rounds: BTreeMap::new(),
            retired: BTreeSet::new(),
            running_max: self.running_max,
            counts: SimCounts::default(),
            busy_until: Duration::ZERO,
            checks_results: !self.may_change_results(),
            state: SimRankState::Running,
        }
    }
}

fn random_memory_use(random: &mut StdRng) -> MemoryUse {
    // Slots of one element for each rank, slots after headers, and slots in ring buffers and exchange buffers.
    let slot_bytes = [32, 256, 8704][random.random_range(0..3)];
    MemoryUse {
        has_queues: random.random_bool(0.8),
        queue_size: [(4, 256), (8, 512), (16, 4096)][random.random_range(0..3)],
        slot_bytes: random.random_bool(0.7).then_some(slot_bytes),
        chunk_bytes: [32, 512][random.random_range(0..2)],
    }
}

/// Returns groups of all ranks, of the lower ranks, of the higher ranks, and of all ranks in reverse order.
fn random_groups(random: &mut StdRng, world: WorldSize) -> Vec<Members> {
    let all: Members = world.ranks().collect();
    let (low, high) = all.split_at(random.random_range(0..=all.len()));
    let mut groups = vec![all.clone(), low.to_vec(), high.to_vec(), all.iter().rev().copied().collect()];
    groups.retain(|members| !members.is_empty());
    groups
}

/// Returns which links carry checksums: none, about half of them, or all. Both ends of a link have the same setting.
fn random_checked_links(random: &mut StdRng, world: WorldSize) -> Vec<Vec<bool>> {
    let share = [0.0, 0.5, 1.0][random.random_range(0..3)];
    let count = world.as_usize();
    let mut checked_links = vec![vec![false; count]; count];
    for (low, high) in (0..count).flat_map(|high| (0..high).map(move |low| (low, high))) {
        let is_checked = random.random_bool(share);
        checked_links[low][high] = is_checked;
        checked_links[high][low] = is_checked;
    }
    checked_links
}

/// Divides the ranks among hosts. Returns the ranks of each host with several ranks.
fn random_hosts(random: &mut StdRng, world: WorldSize) -> Vec<Members> {
    let mut hosts = vec![Members::new(); random.random_range(0..4)];
    for rank in world.ranks() {
        let index = random.random_range(0..4);
        if let Some(host) = hosts.get_mut(index).filter(|host| host.len() < THREADS_MAX) {
            host.push(rank);
        }
    }
    if let [host] = &mut hosts[..] {
        *host = world.ranks().take(THREADS_MAX).collect();
    }
    hosts.retain(|host| host.len() > 1);
    hosts
}

fn random_fault(random: &mut StdRng, world: WorldSize) -> Fault {
    let at = Duration::from_micros(random.random_range(0..8000));
    let a = Rank::new(random.random_range(0..world.get()));
    let b = world.rank_after(a, 1);
    let (from, to) = if random.random_bool(0.5) { (a, b) } else { (b, a) };
    match random.random_range(0..4) {
        0 => Fault::Kill { rank: a, at },
        1 => Fault::Cut { a, b, at },
        2 => Fault::Corrupt { from, to, at },
        _ => Fault::Stall { rank: a, at },
    }
}
