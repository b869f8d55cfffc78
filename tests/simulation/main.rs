//! The engine over a simulated network in virtual time: thousands of seeds, with and without faults.
//!
//! Each rank runs the same program of collectives and messages on the world and on parts of it, several of them at a time.
//! With any network, a rank that reports success has the right result, every rank ends before its deadline, and
//! no rank passes the closing barrier if one failed before it.

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
use ringtrain::group::link_driver::{LinkDriver, OperationBuffers, PollOutcome};
use ringtrain::group::memory::Memory;
use ringtrain::transport::sim::{Fault, SimConfig, SimNetwork, SimTransport};
use ringtrain::types::{Algorithm, Operation, ReduceOp};
use ringtrain::wire::Cause;
use ringtrain::{Rank, WorldSize};

/// One in so many networks is simulated: all of them under `tools/test --full`, and one in 1000 under Miri, which takes
/// seconds for each and looks for undefined behaviour rather than for a rare order of events.
fn one_in() -> u64 {
    if cfg!(miri) {
        1000
    } else if std::env::var_os("TEST_FULL").is_some() {
        1
    } else {
        5
    }
}

/// Virtual time that one operation may take.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Virtual time in which a failed rank tells its peers why and hears what they know.
const NOTIFY: Duration = Duration::from_millis(500);
/// Virtual time that a failed or finished rank spends on its last words.
const FAREWELL: Duration = Duration::from_secs(1);

/// One rank walking through its program.
struct Walker {
    rank: Rank,
    link_driver: LinkDriver<SimTransport>,
    program: Vec<Call>,
    groups: Vec<Members>,
    /// The next call to begin.
    at: usize,
    /// The calls under way, by their operations.
    running: BTreeMap<OpId, usize>,
    /// How many may be under way at a time.
    window: usize,
    /// When it computes until, before its next call.
    busy_until: Timestamp,
    state: State,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Walking,
    /// Tells the others why it failed, and hears what they know, until then.
    Failing {
        at: usize,
        until: Timestamp,
    },
    /// Says its last words until then.
    Parting {
        outcome: Outcome,
        until: Timestamp,
    },
    Ended(Outcome),
}

#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Success,
    Failed { at: usize, failure: Failure },
    Killed,
}

impl Walker {
    fn step(&mut self, now: Timestamp, random: &mut StdRng, compute_max: Duration) {
        match &self.state {
            State::Walking => self.walk(now, random, compute_max),
            State::Failing { at, until } => {
                let at = *at;
                if self.link_driver.notify() || now >= *until {
                    self.link_driver.release();
                    let failure = self.link_driver.failure().expect("it has failed").clone();
                    let outcome = Outcome::Failed { at, failure };
                    self.state = State::Parting { outcome, until: now + FAREWELL };
                }
            }
            State::Parting { outcome, until } => {
                let is_done = self.link_driver.part() || now >= *until;
                if is_done {
                    self.state = State::Ended(outcome.clone());
                }
            }
            State::Ended(_) => {}
        }
    }

    fn walk(&mut self, now: Timestamp, random: &mut StdRng, compute_max: Duration) {
        if now < self.busy_until && self.running.is_empty() {
            // It computes: it neither reads nor answers a request for a link.
            return;
        }
        loop {
            while now >= self.busy_until && self.running.len() < self.window && self.at < self.program.len() {
                // The closing barrier closes everything before it.
                if self.at + 1 == self.program.len() && !self.running.is_empty() {
                    break;
                }
                if !self.begin(now) {
                    return self.fail(now);
                }
                self.at += 1;
            }
            let poll = self.link_driver.poll(now);
            let mut is_progress = false;
            while let Some(finished) = self.link_driver.take_finished() {
                let at = self.running.remove(&finished.operation).expect("it was begun");
                self.check(self.program[at], finished.memory);
                self.busy_until = now + compute_max.mul_f64(random.random_range(0.0..1.0));
                is_progress = true;
            }
            match poll {
                PollOutcome::Failed(_) => return self.fail(now),
                _ if self.running.is_empty() && self.at == self.program.len() => {
                    self.state = State::Parting { outcome: Outcome::Success, until: now + FAREWELL };
                    return;
                }
                PollOutcome::Busy => {}
                PollOutcome::Blocked if is_progress && now >= self.busy_until => {}
                PollOutcome::Blocked => return,
            }
        }
    }

    /// This rank's place in a call's group, and the group's size.
    fn place(&self, call: Call) -> Option<(WorldSize, Rank)> {
        let members = &self.groups[call.group];
        let place = members.iter().position(|&member| member == self.rank)?;
        Some((WorldSize::new(members.len() as u32)?, Rank::new(place as u32)))
    }

    /// Begins the next call, if this rank takes part in it; whether that went well.
    fn begin(&mut self, now: Timestamp) -> bool {
        let call = self.program[self.at];
        let Some((world, rank)) = self.place(call) else { return true };
        let begin = call.begin(OPERATION_TIMEOUT);
        let member = |rank: Rank| self.groups[call.group][rank.index()];
        let memory = || Memory::owned(call.initial(world, rank));
        let begun = if call.operation == Operation::Message {
            if world == WorldSize::ONE {
                return true;
            }
            let to = world.after(call.root, 1);
            if rank == call.root {
                self.link_driver.send_message(now, begin, member(to), memory())
            } else if rank == to {
                let source = Some(member(call.root));
                let pattern = Pattern { group: call.group as u32, source, tag: Some(0) };
                self.link_driver.receive_message(now, begin, pattern, Memory::later::<f64>())
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
            let work = OperationBuffers { memory: memory(), kernels: call.kernels(), divisor: world.get() };
            self.link_driver.begin(now, begin, schedule, work)
        };
        begun.is_ok_and(|id| {
            self.running.insert(id, self.at);
            true
        })
    }

    fn check(&self, call: Call, memory: Memory) {
        let (world, rank) = self.place(call).expect("a member");
        // Operations may finish in any order, so their numbers say nothing; their results do.
        let buffer = memory.into_elements::<f64>();
        assert!(call.is_right(world, rank, &buffer), "rank {} {call:?} {buffer:?}", self.rank);
    }

    fn fail(&mut self, now: Timestamp) {
        let at = self.running.values().copied().min().unwrap_or(self.at);
        self.state = State::Failing { at, until: now + NOTIFY };
        self.link_driver.notify();
    }

    fn next_event(&self, now: Timestamp) -> Option<Timestamp> {
        let at = match &self.state {
            State::Walking if self.busy_until > now => {
                Some(self.link_driver.poll_timeout().map_or(self.busy_until, |at| at.min(self.busy_until)))
            }
            State::Walking => self.link_driver.poll_timeout(),
            State::Failing { until, .. } | State::Parting { until, .. } => Some(*until),
            State::Ended(_) => None,
        };
        at.filter(|&at| at > now)
    }
}

/// Everything that one seed decides.
struct Scenario {
    world: WorldSize,
    groups: Vec<Members>,
    program: Vec<Call>,
    window: usize,
    config: SimConfig,
    segment_bytes: usize,
    compute_max: Duration,
}

impl Scenario {
    fn random(seed: u64, with_faults: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let world = WorldSize::new(random.random_range(2..=6)).unwrap();
        let groups = groups(&mut random, world);
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
        let window = random.random_range(1..5);
        Self { world, groups, program, window, config, segment_bytes, compute_max }
    }

    fn run(&self, seed: u64) -> Vec<Outcome> {
        let network = SimNetwork::new(self.config.clone());
        let mut random = StdRng::seed_from_u64(seed ^ 0x5eed);
        let mut walkers: Vec<Walker> = self.world.ranks().map(|rank| self.walker(rank, &network)).collect();
        // Each call and each farewell is bounded, and so is the whole.
        let limit = (OPERATION_TIMEOUT + NOTIFY + FAREWELL) * (self.program.len() as u32 + 2);
        loop {
            let now = network.borrow().now();
            assert!(now < limit, "seed {seed}: not over after {now:?} of virtual time");
            let moved_before = network.borrow().bytes_moved();
            for walker in &mut walkers {
                let (killed, stalled) =
                    (network.borrow().is_killed(walker.rank), network.borrow().is_stalled(walker.rank));
                if killed && !matches!(walker.state, State::Ended(_)) {
                    walker.state = State::Ended(Outcome::Killed);
                }
                if !stalled {
                    walker.step(now, &mut random, self.compute_max);
                }
            }
            let is_over = |walker: &Walker| {
                matches!(walker.state, State::Ended(_)) || network.borrow().is_stalled(walker.rank)
            };
            if walkers.iter().all(is_over) {
                break;
            }
            if network.borrow().bytes_moved() != moved_before {
                // What one rank read may have made room for another, in the same moment.
                continue;
            }
            let awake = walkers.iter().filter(|walker| !network.borrow().is_stalled(walker.rank));
            let next = awake.filter_map(|walker| walker.next_event(now)).min();
            let next = next.into_iter().chain(network.borrow().next_event()).min();
            let next = next.unwrap_or_else(|| panic!("seed {seed}: a rank waits for nothing, for ever"));
            network.borrow_mut().advance(next);
        }
        walkers
            .into_iter()
            .map(|walker| match walker.state {
                State::Ended(outcome) => outcome,
                // A stopped process has no outcome, as a killed one has none.
                _ => Outcome::Killed,
            })
            .collect()
    }

    fn walker(&self, rank: Rank, network: &Rc<RefCell<SimNetwork>>) -> Walker {
        let settings = Settings {
            rank,
            world: self.world,
            segment_bytes: self.segment_bytes,
            checked_links: vec![true; self.world.as_usize()],
            hosts: self.world.ranks().map(|rank| format!("host{rank}")).collect(),
        };
        let mut link_driver = LinkDriver::new(settings, SimTransport::new(Rc::clone(network), rank));
        // A program begins when the ring is closed.
        for neighbour in [self.world.after(rank, 1), self.world.before(rank, 1)] {
            network.borrow_mut().open(rank, neighbour);
            link_driver.connect(Duration::ZERO, neighbour);
        }
        Walker {
            rank,
            link_driver,
            program: self.program.clone(),
            groups: self.groups.clone(),
            at: 0,
            running: BTreeMap::new(),
            window: self.window,
            busy_until: Duration::ZERO,
            state: State::Walking,
        }
    }
}

/// The world, its two halves, and its ranks in another order.
fn groups(random: &mut StdRng, world: WorldSize) -> Vec<Members> {
    let all: Members = world.ranks().collect();
    let (low, high) = all.split_at(random.random_range(0..=all.len()));
    let mut groups = vec![all.clone(), low.to_vec(), high.to_vec(), all.iter().rev().copied().collect()];
    groups.retain(|members| !members.is_empty());
    groups
}

fn random_fault(random: &mut StdRng, world: WorldSize) -> Fault {
    let at = Duration::from_micros(random.random_range(0..8000));
    let a = Rank::new(random.random_range(0..world.get()));
    let b = world.after(a, 1);
    let (from, to) = if random.random_bool(0.5) { (a, b) } else { (b, a) };
    match random.random_range(0..4) {
        0 => Fault::Kill { rank: a, at },
        1 => Fault::Cut { a, b, at },
        2 => Fault::Corrupt { from, to, at },
        _ => Fault::Stall { rank: a, at },
    }
}

/// The one seed that is looked at alone.
fn lone_seed() -> Option<u64> {
    std::env::var("SIM_SEED").ok().map(|seed| seed.parse().expect("SIM_SEED is a number"))
}

/// The seeds from 0 on, or the one that `SIM_SEED` names.
fn seeds(count: u64) -> Range<u64> {
    lone_seed().map_or(0..count.div_ceil(one_in()), |seed| seed..seed + 1)
}

/// Whether enough networks are simulated to count their outcomes.
fn are_many() -> bool {
    !cfg!(miri) && lone_seed().is_none()
}

#[test]
fn a_sound_network_always_completes() {
    for seed in seeds(2000) {
        let scenario = Scenario::random(seed, false);
        let outcomes = scenario.run(seed);
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Success), "seed {seed}: {outcomes:?}");
    }
}

/// Where a receive waits for another one, what a peer may send before that is stored, and the rest comes when this rank has
/// said that it is ready: in a double tree block by block.
#[test]
fn long_messages_complete_where_receives_wait_for_each_other() {
    let ways = [
        (Operation::AllReduce, Algorithm::DoubleTree),
        (Operation::Reduce, Algorithm::DoubleTree),
        (Operation::AllReduce, Algorithm::Direct),
        (Operation::Reduce, Algorithm::Tree),
    ];
    for seed in seeds(8) {
        let mut scenario = Scenario::random(seed, false);
        let mut random = StdRng::seed_from_u64(seed);
        let call = |(operation, algorithm)| {
            let call = Call::of(operation, &mut random, &scenario.groups);
            Call { algorithm, count: 2 * EAGER_BYTES * 5 / 4 / 8, ..call }
        };
        scenario.program = ways.map(call).into_iter().chain([Call::BARRIER]).collect();
        scenario.segment_bytes = 4096;
        scenario.config.bandwidth = 200_000_000;
        scenario.config.window_bytes = 64 << 10;
        scenario.config.piece_bytes_max = 16 << 10;
        let outcomes = scenario.run(seed);
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Success), "seed {seed}: {outcomes:?}");
    }
}

/// Never a wrong result (the walkers check), never a hang (the limit), and no rank that goes on alone.
#[test]
fn ten_thousand_faulty_networks_fail_on_every_rank_or_on_none() {
    let (mut completed, mut failed) = (0, 0);
    for seed in seeds(10_000) {
        let scenario = Scenario::random(seed, true);
        let barrier = scenario.program.len() - 1;
        let outcomes = scenario.run(seed);
        let broken_before_barrier =
            outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed { at, .. } if *at < barrier));
        let succeeded = outcomes.iter().filter(|outcome| **outcome == Outcome::Success).count();
        if broken_before_barrier {
            assert_eq!(succeeded, 0, "seed {seed}: some went on alone: {outcomes:?}");
        }
        if outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed { .. })) {
            failed += 1;
        } else {
            completed += 1;
        }
    }
    // Faults that always or never hit would test nothing.
    println!("{completed} completed, {failed} failed");
    let least = 1000 / one_in();
    assert!(!are_many() || completed > least && failed > least, "{completed} completed, {failed} failed");
}

/// The same for each operation alone, with up to a thousand faulty networks each.
#[test]
fn every_operation_survives_faulty_networks() {
    for operation in program::OPERATIONS {
        let mut failed = 0;
        for seed in seeds(1000) {
            let mut scenario = Scenario::random(seed, true);
            let mut random = StdRng::seed_from_u64(seed);
            for call in scenario.program.iter_mut().rev().skip(1) {
                *call = Call::of(operation, &mut random, &scenario.groups);
            }
            let outcomes = scenario.run(seed);
            failed += u64::from(outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed { .. })));
        }
        let per_mille = failed * one_in();
        assert!(!are_many() || (100..900).contains(&per_mille), "{operation}: {per_mille} of 1000 failed");
    }
}

/// With one killed rank and nothing else wrong, all survivors of a ring name it and no other rank.
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
            let Outcome::Failed { failure, .. } = outcome else { continue };
            let Cause::PeerLost { rank, ref host, .. } = failure.cause else {
                panic!("seed {seed}: {failure:?}");
            };
            assert_eq!((rank, host.as_str()), (victim, format!("host{victim}").as_str()), "seed {seed}");
            named += 1;
        }
    }
    assert!(!are_many() || named > 1000 / one_in(), "only {named} failures seen");
}

/// A stopped rank is found by the deadline, and every rank that waits names it.
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
        if let Outcome::Failed { failure, .. } = outcome {
            assert!(matches!(failure.cause, Cause::Timeout { .. }), "{failure:?}");
            causes.insert(failure.cause.to_string());
        }
    }
    assert_eq!(causes.len(), 1, "all report the same: {causes:#?}");
    assert!(causes.iter().all(|cause| cause.contains("all other ranks wait for rank 2 ")), "{causes:?}");
}
