//! Tests of the engine over a simulated network in virtual time, for thousands of seeds, with and without faults.
//!
//! All ranks run the same random program: collectives and messages, several at once, in the group of all ranks and in
//! smaller groups. The last call is a barrier. On every network, a rank that reports success has the right result.
//! Every rank ends before its deadline. If a rank fails before the last barrier, no rank completes this barrier.

mod program;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use program::{Call, Members};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::engine::{EAGER_BYTES, Failure, OpId, Pattern, Settings, Timestamp};
use ringtrain::group::link_driver::{BufferAndReduction, LinkDriver, PollOutcome};
use ringtrain::group::memory::Memory;
use ringtrain::transport::sim::{Fault, SimConfig, SimNetwork, SimTransport};
use ringtrain::types::{Algorithm, Operation, ReduceOp};
use ringtrain::wire::Cause;
use ringtrain::{Rank, WorldSize};

/// Each test divides its number of networks by this divisor. Miri takes seconds for each network, but a few networks
/// are enough to find undefined behaviour.
fn network_count_divisor() -> u64 {
    if cfg!(miri) {
        1000
    } else if std::env::var_os("TEST_FULL").is_some() {
        1
    } else {
        100
    }
}

const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);
/// The virtual time in which a failed rank exchanges the cause of the failure with its peers.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);
/// The virtual time in which a failed or finished rank sends its remaining messages and closes its links.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

struct SimulatedRank {
    rank: Rank,
    link_driver: LinkDriver<SimTransport>,
    program: Vec<Call>,
    groups: Vec<Members>,
    /// The index of the next call to begin.
    next_call: usize,
    /// For each operation in progress, the index of its call.
    running: BTreeMap<OpId, usize>,
    /// The largest number of calls that run at the same time.
    running_max: usize,
    /// The time until which the rank computes before its next call.
    busy_until: Timestamp,
    state: SimState,
}

#[derive(Clone, Debug, PartialEq)]
enum SimState {
    Running,
    /// Until the time `until`, the failed rank exchanges the cause of the failure with its peers.
    Failing {
        call: usize,
        until: Timestamp,
    },
    /// Until the time `until`, the rank sends its remaining messages and closes its links.
    Closing {
        outcome: SimEnd,
        until: Timestamp,
    },
    Ended(SimEnd),
}

#[derive(Clone, Debug, PartialEq)]
enum SimEnd {
    Success,
    Failed { call: usize, failure: Failure },
    Killed,
}

impl SimulatedRank {
    fn step(&mut self, now: Timestamp, random: &mut StdRng, compute_max: Duration) {
        match &self.state {
            SimState::Running => self.run_program(now, random, compute_max),
            SimState::Failing { call, until } => {
                let call = *call;
                if self.link_driver.notify_peers() || now >= *until {
                    self.link_driver.release();
                    let failure = self.link_driver.failure().expect("the link driver has failed").clone();
                    let outcome = SimEnd::Failed { call, failure };
                    self.state = SimState::Closing { outcome, until: now + CLOSE_TIMEOUT };
                }
            }
            SimState::Closing { outcome, until } => {
                let is_done = self.link_driver.disconnect() || now >= *until;
                if is_done {
                    self.state = SimState::Ended(outcome.clone());
                }
            }
            SimState::Ended(_) => {}
        }
    }

    fn run_program(&mut self, now: Timestamp, random: &mut StdRng, compute_max: Duration) {
        if now < self.busy_until && self.running.is_empty() {
            // While the rank computes, it reads no messages and accepts no links.
            return;
        }
        loop {
            let calls = self.program.len();
            while now >= self.busy_until && self.running.len() < self.running_max && self.next_call < calls {
                // The last barrier begins when all other calls have ended.
                if self.next_call + 1 == calls && !self.running.is_empty() {
                    break;
                }
                if !self.begin_next_call(now) {
                    return self.start_failing(now);
                }
                self.next_call += 1;
            }
            let poll = self.link_driver.poll(now);
            let mut is_progress = false;
            while let Some(finished) = self.link_driver.take_completed() {
                let call = self.running.remove(&finished.operation).expect("the operation has begun");
                self.check_result(self.program[call], finished.memory);
                self.busy_until = now + compute_max.mul_f64(random.random_range(0.0..1.0));
                is_progress = true;
            }
            match poll {
                PollOutcome::Failed(_) => return self.start_failing(now),
                _ if self.running.is_empty() && self.next_call == calls => {
                    self.state = SimState::Closing { outcome: SimEnd::Success, until: now + CLOSE_TIMEOUT };
                    return;
                }
                PollOutcome::Busy => {}
                PollOutcome::Blocked if is_progress && now >= self.busy_until => {}
                PollOutcome::Blocked => return,
            }
        }
    }

    /// Returns the size of a call's group and this rank's rank in the group, or `None` if this rank is no member.
    fn rank_in_group(&self, call: Call) -> Option<(WorldSize, Rank)> {
        let members = &self.groups[call.group];
        let rank = members.iter().position(|&member| member == self.rank)?;
        Some((WorldSize::new(members.len() as u32)?, Rank::new(rank as u32)))
    }

    /// Begins the next call, if this rank is a member of the call's group. Returns false if the call fails at once.
    fn begin_next_call(&mut self, now: Timestamp) -> bool {
        let call = self.program[self.next_call];
        let Some((world, rank)) = self.rank_in_group(call) else { return true };
        let begin = call.to_begin(OPERATION_TIMEOUT);
        let member = |rank: Rank| self.groups[call.group][rank.index()];
        let memory = || Memory::owned(call.initial_buffer(world, rank));
        let begun = if call.operation == Operation::Message {
            if world == WorldSize::ONE {
                return true;
            }
            let to = world.rank_after(call.root, 1);
            if rank == call.root {
                self.link_driver.send_message(now, begin, member(to), memory())
            } else if rank == to {
                let source = Some(member(call.root));
                let pattern = Pattern { group: call.group as u32, source, tag: Some(0) };
                self.link_driver.receive_message(now, begin, pattern, Memory::allocated_on_match::<f64>())
            } else {
                return true;
            }
        } else {
            let mut schedule = call.schedule(world, rank);
            for step in &mut schedule.steps {
                if let Some(send) = &mut step.send {
                    send.peer = member(send.peer);
                }
                if let Some(receive) = &mut step.receive {
                    receive.peer = member(receive.peer);
                }
            }
            let buffers =
                BufferAndReduction { memory: memory(), kernels: call.kernels(), divisor: world.get() };
            self.link_driver.begin(now, begin, schedule, buffers)
        };
        begun.is_ok_and(|id| {
            self.running.insert(id, self.next_call);
            true
        })
    }

    fn check_result(&self, call: Call, memory: Memory) {
        let (world, rank) = self.rank_in_group(call).expect("the rank is a member of the group");
        let buffer = memory.into_elements::<f64>();
        assert!(call.is_right_result(world, rank, &buffer), "rank {} {call:?} {buffer:?}", self.rank);
    }

    fn start_failing(&mut self, now: Timestamp) {
        let call = self.running.values().copied().min().unwrap_or(self.next_call);
        self.state = SimState::Failing { call, until: now + NOTIFY_TIMEOUT };
        self.link_driver.notify_peers();
    }

    fn next_event(&self, now: Timestamp) -> Option<Timestamp> {
        let at = match &self.state {
            SimState::Running if self.busy_until > now => {
                Some(self.link_driver.poll_timeout().map_or(self.busy_until, |at| at.min(self.busy_until)))
            }
            SimState::Running => self.link_driver.poll_timeout(),
            SimState::Failing { until, .. } | SimState::Closing { until, .. } => Some(*until),
            SimState::Ended(_) => None,
        };
        at.filter(|&at| at > now)
    }
}

/// The parameters of a simulation. The seed of the simulation determines all parameters.
struct Scenario {
    world: WorldSize,
    groups: Vec<Members>,
    program: Vec<Call>,
    running_max: usize,
    config: SimConfig,
    segment_bytes: usize,
    compute_max: Duration,
}

impl Scenario {
    fn random(seed: u64, with_faults: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let world = WorldSize::new(random.random_range(2..=6)).unwrap();
        let groups = random_groups(&mut random, world);
        let mut program: Vec<Call> =
            (0..random.random_range(1..8)).map(|_| Call::random(&mut random, &groups)).collect();
        program.push(Call::BARRIER);
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
            faults,
        };
        let segment_bytes = 8 * random.random_range(1..40);
        let compute_max = Duration::from_micros(random.random_range(0..300));
        let running_max = random.random_range(1..5);
        Self { world, groups, program, running_max, config, segment_bytes, compute_max }
    }

    fn run(&self, seed: u64) -> Vec<SimEnd> {
        let network = SimNetwork::new(self.config.clone());
        let mut random = StdRng::seed_from_u64(seed ^ 0x5eed);
        let mut ranks: Vec<_> = self.world.ranks().map(|rank| self.new_rank(rank, &network)).collect();
        // Each call has a time limit, and so has the whole simulation.
        let limit = (OPERATION_TIMEOUT + NOTIFY_TIMEOUT + CLOSE_TIMEOUT) * (self.program.len() as u32 + 2);
        loop {
            let now = network.borrow().now();
            assert!(now < limit, "seed {seed}: the program has not ended after {now:?} of virtual time");
            let moved_before = network.borrow().bytes_moved();
            for rank in &mut ranks {
                let (killed, stalled) =
                    (network.borrow().is_killed(rank.rank), network.borrow().is_stalled(rank.rank));
                if killed && !matches!(rank.state, SimState::Ended(_)) {
                    rank.state = SimState::Ended(SimEnd::Killed);
                }
                if !stalled {
                    rank.step(now, &mut random, self.compute_max);
                }
            }
            let is_over = |rank: &SimulatedRank| {
                matches!(rank.state, SimState::Ended(_)) || network.borrow().is_stalled(rank.rank)
            };
            if ranks.iter().all(is_over) {
                break;
            }
            if network.borrow().bytes_moved() != moved_before {
                // Continue at the same virtual time: a rank that reads bytes makes room for further bytes.
                continue;
            }
            let awake = ranks.iter().filter(|rank| !network.borrow().is_stalled(rank.rank));
            let next = awake.filter_map(|rank| rank.next_event(now)).min();
            let next = next.into_iter().chain(network.borrow().next_event()).min();
            let next = next.unwrap_or_else(|| panic!("seed {seed}: a rank waits, but no event can wake it"));
            network.borrow_mut().advance(next);
        }
        ranks
            .into_iter()
            .map(|rank| match rank.state {
                SimState::Ended(outcome) => outcome,
                // A rank that a fault has stopped does not end. Count it as killed.
                _ => SimEnd::Killed,
            })
            .collect()
    }

    fn new_rank(&self, rank: Rank, network: &Rc<RefCell<SimNetwork>>) -> SimulatedRank {
        let settings = Settings {
            rank,
            world: self.world,
            segment_bytes: self.segment_bytes,
            checked_links: vec![true; self.world.as_usize()],
            host_names: self.world.ranks().map(|rank| format!("host{rank}")).collect(),
        };
        let mut link_driver = LinkDriver::new(settings, SimTransport::new(Rc::clone(network), rank));
        // Open the links to both neighbours on the ring before the program begins.
        for neighbour in [self.world.rank_after(rank, 1), self.world.rank_before(rank, 1)] {
            network.borrow_mut().open_link(rank, neighbour);
            link_driver.connect(Duration::ZERO, neighbour);
        }
        SimulatedRank {
            rank,
            link_driver,
            program: self.program.clone(),
            groups: self.groups.clone(),
            next_call: 0,
            running: BTreeMap::new(),
            running_max: self.running_max,
            busy_until: Duration::ZERO,
            state: SimState::Running,
        }
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

/// Returns the seed in the variable `SIM_SEED`. If `SIM_SEED` is set, the tests simulate only this seed.
fn seed_of_environment() -> Option<u64> {
    std::env::var("SIM_SEED").ok().map(|seed| seed.parse().expect("SIM_SEED must be a number"))
}

/// Returns the seeds to simulate: only `SIM_SEED` if it is set, or else `count / network_count_divisor()` seeds.
fn seeds(count: u64) -> Range<u64> {
    seed_of_environment().map_or(0..count.div_ceil(network_count_divisor()), |seed| seed..seed + 1)
}

/// Returns whether a test simulates so many networks that some programs certainly complete and some certainly fail.
fn has_many_seeds() -> bool {
    !cfg!(miri) && seed_of_environment().is_none()
}

#[test]
fn every_program_completes_on_a_network_without_faults() {
    for seed in seeds(2000) {
        let scenario = Scenario::random(seed, false);
        let outcomes = scenario.run(seed);
        assert!(outcomes.iter().all(|outcome| *outcome == SimEnd::Success), "seed {seed}: {outcomes:?}");
    }
}

/// The receiver stores only the first part of each message. The sender sends the rest of the message later.
#[test]
fn long_messages_complete_if_a_receive_waits_for_an_earlier_receive() {
    let cases = [
        (Operation::AllReduce, Algorithm::DoubleTree),
        (Operation::Reduce, Algorithm::DoubleTree),
        (Operation::AllReduce, Algorithm::Direct),
        (Operation::Reduce, Algorithm::Tree),
    ];
    for seed in seeds(8) {
        let mut scenario = Scenario::random(seed, false);
        let mut random = StdRng::seed_from_u64(seed);
        let call = |(operation, algorithm)| {
            let call = Call::random_call_of(operation, &mut random, &scenario.groups);
            Call { algorithm, count: 2 * EAGER_BYTES * 5 / 4 / 8, ..call }
        };
        scenario.program = cases.map(call).into_iter().chain([Call::BARRIER]).collect();
        scenario.segment_bytes = 4096;
        scenario.config.bandwidth = 200_000_000;
        scenario.config.window_bytes = 64 << 10;
        scenario.config.piece_bytes_max = 16 << 10;
        let outcomes = scenario.run(seed);
        assert!(outcomes.iter().all(|outcome| *outcome == SimEnd::Success), "seed {seed}: {outcomes:?}");
    }
}

/// The simulation also checks every result, and that no rank waits forever.
#[test]
fn no_rank_completes_the_last_barrier_after_another_rank_failed() {
    let (mut completed, mut failed) = (0, 0);
    for seed in seeds(10_000) {
        let scenario = Scenario::random(seed, true);
        let barrier = scenario.program.len() - 1;
        let outcomes = scenario.run(seed);
        let failed_early =
            outcomes.iter().any(|outcome| matches!(outcome, SimEnd::Failed { call, .. } if *call < barrier));
        let succeeded = outcomes.iter().filter(|outcome| **outcome == SimEnd::Success).count();
        if failed_early {
            assert_eq!(succeeded, 0, "seed {seed}: some ranks completed the barrier: {outcomes:?}");
        }
        if outcomes.iter().any(|outcome| matches!(outcome, SimEnd::Failed { .. })) {
            failed += 1;
        } else {
            completed += 1;
        }
    }
    // Faults must cause failures in some programs, but not in all.
    println!("{completed} programs completed, {failed} failed");
    let min = 1000 / network_count_divisor();
    assert!(!has_many_seeds() || completed > min && failed > min, "{completed} completed, {failed} failed");
}

/// Each program repeats a single operation. The simulation checks every result, and that no rank waits forever.
#[test]
fn every_operation_gives_right_results_or_fails_on_faulty_networks() {
    for operation in program::OPERATIONS {
        let mut failed = 0;
        for seed in seeds(1000) {
            let mut scenario = Scenario::random(seed, true);
            let mut random = StdRng::seed_from_u64(seed);
            for call in scenario.program.iter_mut().rev().skip(1) {
                *call = Call::random_call_of(operation, &mut random, &scenario.groups);
            }
            let outcomes = scenario.run(seed);
            failed += u64::from(outcomes.iter().any(|outcome| matches!(outcome, SimEnd::Failed { .. })));
        }
        let per_mille = failed * network_count_divisor();
        assert!(
            !has_many_seeds() || (100..900).contains(&per_mille),
            "{operation}: {per_mille} of 1000 failed"
        );
    }
}

/// If a rank is killed and there are no other faults, the error of every other rank names the killed rank.
#[test]
fn survivors_name_the_rank_that_died() {
    let mut named = 0;
    for seed in seeds(1000) {
        let mut scenario = Scenario::random(seed, false);
        let mut random = StdRng::seed_from_u64(seed);
        let victim = Rank::new(random.random_range(0..scenario.world.get()));
        scenario.config.faults =
            vec![Fault::Kill { rank: victim, at: Duration::from_micros(random.random_range(0..4000)) }];
        for outcome in scenario.run(seed) {
            let SimEnd::Failed { failure, .. } = outcome else { continue };
            let Cause::PeerLost { rank, ref host, .. } = failure.cause else {
                panic!("seed {seed}: {failure:?}");
            };
            assert_eq!((rank, host.as_str()), (victim, format!("host{victim}").as_str()), "seed {seed}");
            named += 1;
        }
    }
    assert!(!has_many_seeds() || named > 1000 / network_count_divisor(), "only {named} failures");
}

/// A rank stops without closing its links. At the deadline, the errors of all other ranks name this rank.
#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    let mut scenario = Scenario::random(1, false);
    scenario.world = WorldSize::new(4).unwrap();
    scenario.program = vec![
        Call {
            group: 0,
            operation: Operation::AllReduce,
            op: ReduceOp::Sum,
            count: 100,
            root: Rank::ZERO,
            algorithm: Algorithm::Ring,
        },
        Call::BARRIER,
    ];
    scenario.groups = vec![scenario.world.ranks().collect()];
    scenario.config.faults = vec![Fault::Stall { rank: Rank::new(2), at: Duration::ZERO }];
    let mut causes = BTreeSet::new();
    for outcome in scenario.run(1) {
        if let SimEnd::Failed { failure, .. } = outcome {
            assert!(matches!(failure.cause, Cause::Timeout { .. }), "{failure:?}");
            causes.insert(failure.cause.to_string());
        }
    }
    assert_eq!(causes.len(), 1, "ranks report different causes: {causes:#?}");
    assert!(causes.iter().all(|cause| cause.contains("all other ranks wait for rank 2 ")), "{causes:?}");
}
