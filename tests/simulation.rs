//! The engine over a simulated network in virtual time: thousands of seeds, with and without faults.
//!
//! Each rank runs the same program of collectives. Whatever the network does, a rank that reports success has the right
//! result, every rank ends before its deadline, and nobody passes the closing barrier if anybody failed before it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::engine::{Failure, Settings, Timestamp};
use ringtrain::group::pump::{Pump, Turn};
use ringtrain::schedule::partition::{self, Partition};
use ringtrain::schedule::{self, Schedule};
use ringtrain::transport::sim::{Fault, SimConfig, SimNetwork, SimTransport};
use ringtrain::types::{Algorithm, Contract, DType, Operation, ReduceOp};
use ringtrain::wire::Cause;
use ringtrain::{Rank, WorldSize};

/// Virtual time that one operation may take.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Virtual time that a failed or finished rank spends on its last words.
const FAREWELL: Duration = Duration::from_secs(1);

/// Elements that an all-reduce takes at a time: long buffers take several blocks, the last of them uneven.
const BLOCK: usize = 50;

/// One collective of the program, the same on every rank.
#[derive(Clone, Copy, Debug)]
struct Call {
    operation: Operation,
    op: ReduceOp,
    count: usize,
    root: Rank,
}

impl Call {
    fn random(random: &mut StdRng, world: WorldSize) -> Self {
        let operations = [
            Operation::AllReduce,
            Operation::ReduceScatter,
            Operation::AllGather,
            Operation::Broadcast,
            Operation::Barrier,
        ];
        let operation = operations[random.random_range(0..operations.len())];
        let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max];
        Self {
            operation,
            op: ops[random.random_range(0..ops.len())],
            count: if operation == Operation::Barrier { 0 } else { random.random_range(0..120) },
            root: Rank::new(random.random_range(0..world.get())),
        }
    }

    const BARRIER: Self =
        Self { operation: Operation::Barrier, op: ReduceOp::Sum, count: 0, root: Rank::ZERO };

    fn contract(self) -> Contract {
        let reduces = matches!(self.operation, Operation::AllReduce | Operation::ReduceScatter);
        let is_barrier = self.operation == Operation::Barrier;
        Contract {
            operation: self.operation,
            dtype: if is_barrier { DType::U8 } else { DType::F64 },
            reduction: reduces.then_some(self.op),
            algorithm: if is_barrier { Algorithm::Dissemination } else { Algorithm::Ring },
            root: if self.operation == Operation::Broadcast { self.root } else { Rank::ZERO },
            count: self.count as u64,
        }
    }

    fn schedule(self, world: WorldSize, rank: Rank) -> Schedule {
        match self.operation {
            Operation::AllReduce => schedule::all_reduce(world, rank, self.count, BLOCK),
            Operation::ReduceScatter => {
                schedule::reduce_scatter(world, rank, &Partition::even(self.count, world))
            }
            Operation::AllGather => schedule::all_gather(world, rank, &Partition::even(self.count, world)),
            Operation::Broadcast => schedule::broadcast(world, rank, self.root, self.count),
            Operation::Barrier => schedule::barrier(world, rank),
        }
    }

    fn value(rank: Rank, index: usize) -> f64 {
        f64::from(rank.get() + 1) * 64.0 + (index % 7) as f64
    }

    fn initial(self, rank: Rank) -> Vec<f64> {
        (0..self.count).map(|index| Self::value(rank, index)).collect()
    }

    /// Whether `buffer` is what this call should leave on `rank`.
    fn is_right(self, world: WorldSize, rank: Rank, buffer: &[f64]) -> bool {
        let reduced = |index| {
            let values = world.ranks().map(|rank| Self::value(rank, index));
            match self.op {
                ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
                ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Average => values.sum::<f64>() / f64::from(world.get()),
                // No other is drawn.
                _ => values.sum(),
            }
        };
        let own = partition::chunk(self.count, world, rank);
        (0..self.count).all(|index| match self.operation {
            Operation::AllReduce => buffer[index] == reduced(index),
            Operation::ReduceScatter => !own.contains(&index) || buffer[index] == reduced(index),
            Operation::AllGather => world
                .ranks()
                .find(|&owner| partition::chunk(self.count, world, owner).contains(&index))
                .is_some_and(|owner| buffer[index] == Self::value(owner, index)),
            Operation::Broadcast => buffer[index] == Self::value(self.root, index),
            Operation::Barrier => true,
        })
    }
}

/// One rank walking through its program.
struct Walker {
    rank: Rank,
    world: WorldSize,
    pump: Pump<SimTransport>,
    program: Vec<Call>,
    /// The call that is running, or the one past the end.
    at: usize,
    buffer: Vec<f64>,
    is_running: bool,
    /// When it computes until, before its next call.
    busy_until: Timestamp,
    state: State,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Walking,
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
            State::Parting { outcome, until } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.buffer);
                let is_done = self.pump.part(bytes) || now >= *until;
                if is_done {
                    self.state = State::Ended(outcome.clone());
                }
            }
            State::Ended(_) => {}
        }
    }

    fn walk(&mut self, now: Timestamp, random: &mut StdRng, compute_max: Duration) {
        while now >= self.busy_until {
            if !self.is_running {
                let Some(call) = self.program.get(self.at).copied() else {
                    self.state = State::Parting { outcome: Outcome::Success, until: now + FAREWELL };
                    return;
                };
                self.buffer = call.initial(self.rank);
                let schedule = call.schedule(self.world, self.rank);
                if let Err(failure) = self.pump.begin(now, call.contract(), schedule, OPERATION_TIMEOUT) {
                    return self.fail(now, failure);
                }
                self.is_running = true;
            }
            match self.pump.turn(now, bytemuck::cast_slice_mut(&mut self.buffer)) {
                Turn::Blocked => return,
                Turn::Failed(failure) => return self.fail(now, failure),
                Turn::Complete => {
                    let call = self.program[self.at];
                    assert!(
                        call.is_right(self.world, self.rank, &self.buffer),
                        "rank {} {call:?}",
                        self.rank
                    );
                    self.is_running = false;
                    self.at += 1;
                    self.busy_until = now + compute_max.mul_f64(random.random_range(0.0..1.0));
                }
            }
        }
    }

    fn fail(&mut self, now: Timestamp, failure: Failure) {
        let outcome = Outcome::Failed { at: self.at, failure };
        self.state = State::Parting { outcome, until: now + FAREWELL };
    }

    fn next_event(&self, now: Timestamp) -> Option<Timestamp> {
        let at = match &self.state {
            State::Walking if self.busy_until > now => Some(self.busy_until),
            State::Walking => self.pump.poll_timeout(),
            State::Parting { until, .. } => Some(*until),
            State::Ended(_) => None,
        };
        at.filter(|&at| at > now)
    }
}

/// Everything that one seed decides.
struct Scenario {
    world: WorldSize,
    program: Vec<Call>,
    config: SimConfig,
    segment_bytes: usize,
    compute_max: Duration,
}

impl Scenario {
    fn random(seed: u64, with_faults: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let world = WorldSize::new(random.random_range(2..=6)).unwrap();
        let mut program: Vec<Call> =
            (0..random.random_range(1..5)).map(|_| Call::random(&mut random, world)).collect();
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
        Self { world, program, config, segment_bytes, compute_max }
    }

    fn run(&self, seed: u64) -> Vec<Outcome> {
        let network = SimNetwork::new(self.config.clone());
        let mut random = StdRng::seed_from_u64(seed ^ 0x5eed);
        let mut walkers: Vec<Walker> = self.world.ranks().map(|rank| self.walker(rank, &network)).collect();
        // Each call and each farewell is bounded, and so is the whole.
        let limit = (OPERATION_TIMEOUT + FAREWELL) * (self.program.len() as u32 + 2);
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
            group: 0,
            segment_bytes: self.segment_bytes,
            checks_payloads: true,
            hosts: self.world.ranks().map(|rank| format!("host{rank}")).collect(),
        };
        let mut pump = Pump::new(settings, SimTransport::new(Rc::clone(network), rank));
        pump.connect(Duration::ZERO, self.world.after(rank, 1));
        pump.connect(Duration::ZERO, self.world.before(rank, 1));
        Walker {
            rank,
            world: self.world,
            pump,
            program: self.program.clone(),
            at: 0,
            buffer: Vec::new(),
            is_running: false,
            busy_until: Duration::ZERO,
            state: State::Walking,
        }
    }
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

/// The seeds from 0 on, or the one that `SIM_SEED` names, to look at it alone.
fn seeds(count: u64) -> Range<u64> {
    let one = std::env::var("SIM_SEED").ok();
    one.map_or(0..count, |seed| {
        let seed = seed.parse().expect("SIM_SEED is a number");
        seed..seed + 1
    })
}

#[test]
fn a_sound_network_always_completes() {
    for seed in seeds(2000) {
        let scenario = Scenario::random(seed, false);
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
    let is_alone = completed + failed == 1;
    assert!(is_alone || completed > 1000 && failed > 1000, "{completed} completed, {failed} failed");
}

/// With one killed rank and nothing else wrong, all survivors of a ring name it and nobody else.
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
    assert!(named > 1000 || seeds(1000).count() == 1, "only {named} failures seen");
}

/// A stopped rank is found by the deadline, and everybody who waits says whom for.
#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    let mut scenario = Scenario::random(1, false);
    scenario.world = WorldSize::new(4).unwrap();
    scenario.program = vec![
        Call { operation: Operation::AllReduce, op: ReduceOp::Sum, count: 100, root: Rank::ZERO },
        Call::BARRIER,
    ];
    scenario.config.faults = vec![Fault::Stall { rank: Rank::new(2), at: Duration::ZERO }];
    let mut causes = BTreeSet::new();
    for outcome in scenario.run(1) {
        if let Outcome::Failed { failure, .. } = outcome {
            assert!(matches!(failure.cause, Cause::Timeout { .. }), "{failure:?}");
            causes.insert(failure.cause.to_string());
        }
    }
    assert!(causes.iter().all(|cause| cause.contains("waits for rank")), "{causes:?}");
    assert!(!causes.is_empty());
}
