//! Runs collectives of the ranks of a host on [`SimMemory`], with other ranks between any two accesses. The ranks sleep whenever
//! they can. The tests show that no result is wrong, no two ranks access the same bytes at the same time, and no wake-up is lost.
//! They also kill ranks, let operations fail, let ranks call different operations, and change each line that accesses the memory.

mod buffers;
mod disturbance;
mod programs;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use self::buffers::{RankBuffers, register_buffer};
use self::disturbance::{Disturbance, with_failed_rank, with_killed_rank, with_odd_rank};
use self::programs::{add_all_reduces, random_program};
use super::memory::{AccessKind, AccessSite, Mutation, SimMemory, THREADS_MAX};
use super::program::SimCall;
use crate::runtime::buffer::BufferAccess;
use crate::runtime::host_rounds::operation::ShmOperation;
use crate::runtime::host_rounds::short::ShortResult;
use crate::runtime::host_rounds::{HostRounds, Patience, ShmFailure};
use crate::runtime::measurements::Meter;
use crate::shm::{RoundsMemory as _, RoundsSize, ShmRounds};
use crate::types::{Algorithm, Operation, Rank, WorldSize};

/// Ranks that need more turns make no progress.
const TURNS_MAX: usize = 50_000;
/// A rank that does not sleep more often without progress does not sleep although it can do nothing.
const REFUSALS_MAX: usize = 3;
/// How probable it is that another rank takes a turn before an access.
const PREEMPTION: f64 = 0.15;
/// The number of seeds among which one must fail if the source is wrong.
const FAILING_SEEDS: u64 = 1_000;
/// The source of the lines that access the memory.
const ROUNDS_SOURCE: &str = include_str!("../shm/rounds.rs");
/// The lines that may be skipped: the ranks only send more wake frames than they have to, or do not find wrong words.
const MAY_BE_SKIPPED: [&str; 3] = [
    "self.memory.load(self.header_offset(rank, round), Ordering::Relaxed) >> PLACE_BITS > round",
    "self.posts.memory.store(self.posts.sleep_flag(self.rank), 0, Ordering::Relaxed);",
    "&& memory.swap(sleep_flag, 0, Ordering::Relaxed) != 0",
];
/// The lines that may be relaxed: before a rank writes its payload, it also compares the headers of all other ranks.
const MAY_BE_RELAXED: [&str; 1] =
    ["self.memory.load(self.header_offset(rank, round), Ordering::Acquire) >> PLACE_BITS >= round"];

#[derive(Clone, Copy, PartialEq, Debug)]
enum HostRankStatus {
    Works,
    FallsAsleep,
    Sleeps,
    Completed,
    /// The rank has found that this rank called another operation.
    FoundMismatch(Rank),
    Killed,
    /// An operation of the rank has failed.
    Failed,
}

/// The ranks of a host.
struct SimHost {
    memory: Arc<SimMemory>,
    world: WorldSize,
    /// A rank in the middle of a turn is borrowed.
    ranks: Vec<RefCell<RoundsRank>>,
    status: Vec<Cell<HostRankStatus>>,
    wake_ups: Vec<Cell<usize>>,
    accesses: Vec<Cell<u64>>,
    kill: Option<(usize, u64)>,
    failure: Option<(usize, u64)>,
    /// How probable it is that a rank uses a registered buffer for a call.
    registered_share: f64,
    /// A rank that takes few turns, so that others are far ahead of it.
    slow_rank: Option<usize>,
    random: RefCell<StdRng>,
    problem: RefCell<Option<String>>,
}

struct RoundsRank {
    host_rounds: HostRounds<SimMemory>,
    program: Vec<SimCall>,
    /// The operation in progress.
    running: Option<ShmOperation>,
    buffers: RankBuffers,
    /// The index of the current call.
    call: usize,
    /// How often the rank has not fallen asleep since its last progress.
    refusals: usize,
}

impl SimHost {
    #[expect(clippy::arc_with_non_send_sync, reason = "all ranks are simulated in one thread")]
    fn new(seed: u64, disturbance: Disturbance) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let ranks = random.random_range(2..=THREADS_MAX);
        // Slots of one element for each rank, slots after headers, and slots in ring buffers and exchange buffers.
        let slot_bytes = [32, 256, 8704][random.random_range(0..3)];
        let size = RoundsSize { ranks, slot_bytes };
        let memory = Arc::new(SimMemory::new(size.bytes(), seed));
        memory.set_mutation(disturbance.mutation);
        let world = WorldSize::new(ranks as u32).unwrap();
        let mut program = random_program(&mut random, world, slot_bytes);
        let mut buffers_random = StdRng::seed_from_u64(seed ^ 0xBF);
        let registered_share =
            if cfg!(miri) { 0.0 } else { [0.0, 0.6, 1.0][buffers_random.random_range(0..3)] };
        if registered_share > 0.0 {
            add_all_reduces(&mut program, &mut buffers_random);
        }
        let odd_index = random.random_range(0..program.len() - 1);
        let is_other_root = random.random_bool(0.5);
        let new_rank = |rank: usize| {
            let mut program = program.clone();
            let call = &mut program[odd_index];
            match disturbance.odd_rank {
                Some(_) if is_other_root => {
                    (call.operation, call.root) = (Operation::Broadcast, Rank::ZERO);
                    if disturbance.odd_rank == Some(rank) {
                        call.root = Rank::new(1);
                    }
                }
                Some(odd_rank) if odd_rank == rank => {
                    (call.operation, call.count) = (Operation::AllGather, call.count + 1);
                }
                _ => {}
            }
            let rounds = ShmRounds::new(Arc::clone(&memory), size, rank);
            let host_rounds = HostRounds::new(rounds, world.ranks().collect(), Meter::default());
            let buffers = RankBuffers::default();
            RoundsRank { host_rounds, program, running: None, buffers, call: 0, refusals: 0 }
        };
        let mut rounds_ranks: Vec<RoundsRank> = (0..ranks).map(new_rank).collect();
        let elements = 2 * program.iter().map(|call| call.count + 1).max().unwrap_or_default() + ranks;
        let buffer_count = if registered_share > 0.0 { buffers_random.random_range(1..3) } else { 0 };
        for _ in 0..buffer_count {
            let ranks = rounds_ranks.iter_mut().map(|rank| (&mut rank.host_rounds, &mut rank.buffers));
            register_buffer(&memory, elements, ranks.collect());
        }
        Self {
            world,
            ranks: rounds_ranks.into_iter().map(RefCell::new).collect(),
            memory,
            status: vec![Cell::new(HostRankStatus::Works); ranks],
            wake_ups: vec![Cell::new(0); ranks],
            accesses: vec![Cell::new(0); ranks],
            kill: disturbance.kill.filter(|(rank, _)| *rank < ranks),
            failure: disturbance.failure,
            registered_share,
            slow_rank: random.random_bool(0.4).then(|| random.random_range(0..ranks)),
            random: RefCell::new(random),
            problem: RefCell::default(),
        }
    }

    fn can_run(&self, rank: usize) -> bool {
        self.ranks[rank].try_borrow_mut().is_ok()
            && match self.status[rank].get() {
                HostRankStatus::Works | HostRankStatus::FallsAsleep => true,
                HostRankStatus::Sleeps => self.wake_ups[rank].get() > 0,
                HostRankStatus::Completed
                | HostRankStatus::FoundMismatch(_)
                | HostRankStatus::Killed
                | HostRankStatus::Failed => false,
            }
    }

    /// Lets a random rank take a turn. Returns false if no rank can do anything.
    fn run_any(&self) -> bool {
        let mut ranks: Vec<usize> = (0..self.ranks.len()).filter(|&rank| self.can_run(rank)).collect();
        if ranks.len() > 1 && self.random.borrow_mut().random_bool(0.98) {
            ranks.retain(|rank| Some(*rank) != self.slow_rank);
        }
        if ranks.is_empty() {
            return false;
        }
        let rank = ranks[self.random.borrow_mut().random_range(0..ranks.len())];
        let turn = self.memory.run_as(rank, || catch_unwind(AssertUnwindSafe(|| self.take_turn(rank))));
        // A rank that is killed in the middle of a turn reads wrong values until the end of the turn.
        match turn {
            _ if self.status[rank].get() == HostRankStatus::Killed => {}
            Ok(status) => self.status[rank].set(status),
            Err(_) => self.note("a rank panicked"),
        }
        true
    }

    fn take_turn(&self, rank: usize) -> HostRankStatus {
        let mut state = self.ranks[rank].borrow_mut();
        let fails_now = |(failing, accesses)| failing == rank && accesses <= self.accesses[rank].get();
        if state.running.is_some() && self.failure.is_some_and(fails_now) {
            state.return_buffer();
            return HostRankStatus::Failed;
        }
        match self.status[rank].get() {
            HostRankStatus::FallsAsleep => {
                let RoundsRank { host_rounds, running, refusals, .. } = &mut *state;
                let operation = running.as_ref().expect("the rank waits for an operation");
                host_rounds.rounds.mark_asleep();
                if !host_rounds.is_ready(operation) {
                    return HostRankStatus::Sleeps;
                }
                host_rounds.rounds.mark_awake();
                *refusals += 1;
                if *refusals > REFUSALS_MAX {
                    self.note("a rank that can do nothing does not sleep");
                }
                HostRankStatus::Works
            }
            HostRankStatus::Sleeps => {
                self.wake_ups[rank].set(0);
                HostRankStatus::FallsAsleep
            }
            _ => self.work(rank, &mut state),
        }
    }

    /// Continues the current call.
    fn work(&self, rank: usize, state: &mut RoundsRank) -> HostRankStatus {
        let own = Rank::new(rank as u32);
        let RoundsRank { host_rounds, program, running, buffers, call, refusals } = state;
        let current = program[*call];
        if running.is_none() {
            let mut request = current.to_begin(Duration::ZERO);
            // The buffers of rounds have no slots, so the programs have no one-shot algorithms.
            if current.count.is_multiple_of(3) {
                request.contract.algorithm = Algorithm::OneShot;
            }
            let spec = current.spec(self.world, own).expect("a collective has a description");
            let share = (self.registered_share, &self.random);
            buffers.begin(current.initial_buffer(self.world, own), share, &self.memory);
            let mut has_posted = false;
            let short_call = host_rounds.short_call(&spec, request.contract, current.kernels(self.world));
            let tries = self.random.borrow_mut().random_bool(0.5);
            if let Some(short_call) = short_call.filter(|_| tries) {
                let mut bytes: BufferAccess<'_> =
                    bytemuck::cast_slice_mut::<_, u8>(buffers.elements_mut()).into();
                let wake = |sleeper| self.wake(rank, sleeper);
                let patience = Patience { looks: 1, yields: false };
                match host_rounds.run_short(&short_call, request.site, &mut bytes, (patience, wake)) {
                    ShortResult::Complete => return self.end_call(rank, state),
                    ShortResult::NotBegun => {}
                    ShortResult::Posted => has_posted = true,
                }
            }
            let kernels = (current.kernels(self.world), has_posted);
            *running = Some(host_rounds.add_operation((&request, None), &spec, kernels));
        }
        let operation = running.as_mut().expect("the call has begun");
        let awaited = host_rounds.awaited_round_and_ranks(operation);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(buffers.elements_mut());
        let poll =
            host_rounds.poll(operation, &mut BufferAccess::from(bytes), |sleeper| self.wake(rank, sleeper));
        if matches!(poll, Ok(Poll::Pending)) && host_rounds.awaited_round_and_ranks(operation) != awaited {
            *refusals = 0;
        }
        match poll.map_err(|failure| *failure) {
            Ok(Poll::Ready(())) => self.end_call(rank, state),
            Ok(Poll::Pending) if self.random.borrow_mut().random_bool(0.3) => HostRankStatus::Works,
            Ok(Poll::Pending) => HostRankStatus::FallsAsleep,
            Err(ShmFailure::Mismatch(_, other, _)) => {
                // A killed rank reads wrong headers, and nothing returns to its program.
                if self.status[rank].get() != HostRankStatus::Killed {
                    state.return_buffer();
                }
                HostRankStatus::FoundMismatch(other)
            }
            Err(ShmFailure::Invalid(..)) => {
                self.note("a rank posted invalid values");
                HostRankStatus::Works
            }
            Err(ShmFailure::Panicked) => {
                if self.status[rank].get() != HostRankStatus::Killed {
                    self.note("a rank panicked");
                }
                HostRankStatus::Works
            }
        }
    }

    /// Checks the result of the current call, which is complete.
    fn end_call(&self, rank: usize, state: &mut RoundsRank) -> HostRankStatus {
        let elements = state.buffers.elements_mut();
        self.memory.before_access_in_place(bytemuck::cast_slice(elements), false);
        let current = state.program[state.call];
        let is_right = current.is_right_result(self.world, Rank::new(rank as u32), elements);
        if !is_right && self.status[rank].get() != HostRankStatus::Killed {
            self.note(&format!("rank {rank} has a wrong result of {current:?}"));
        }
        (state.running, state.call, state.refusals) = (None, state.call + 1, 0);
        if state.call == state.program.len() { HostRankStatus::Completed } else { HostRankStatus::Works }
    }

    fn wake(&self, rank: usize, sleeper: Rank) {
        if self.status[rank].get() != HostRankStatus::Killed {
            self.wake_ups[sleeper.index()].set(1);
        }
    }

    /// Called before each access to the memory.
    fn before_access(&self) {
        let rank = self.memory.thread();
        let access = self.accesses[rank].get();
        self.accesses[rank].set(access + 1);
        if self.kill == Some((rank, access)) {
            self.status[rank].set(HostRankStatus::Killed);
            self.memory.end_thread(rank);
        }
        let preempts = self.random.borrow_mut().random_bool(PREEMPTION);
        if preempts {
            self.run_any();
        }
    }

    /// Runs the ranks until none can do anything. The end of a killed rank wakes all other ranks.
    fn run(&self) {
        let mut has_woken = self.kill.is_none();
        for _ in 0..TURNS_MAX {
            if self.problem.borrow().is_some() || self.memory.race().is_some() {
                return;
            }
            if self.run_any() {
                continue;
            }
            if has_woken {
                return;
            }
            has_woken = true;
            self.memory.settle();
            self.wake_ups.iter().for_each(|wake_ups| wake_ups.set(1));
        }
        self.note("the ranks make no progress");
    }

    /// Returns whether the ranks for which a rank sleeps, directly or through other ranks that wait, include one of `culprits`.
    fn waits_for(&self, rank: usize, culprits: &BTreeSet<usize>) -> bool {
        let (mut reached, mut next) = (BTreeSet::new(), vec![rank]);
        while let Some(rank) = next.pop() {
            let state = self.ranks[rank].borrow();
            if let (HostRankStatus::Sleeps, Some(operation)) = (self.status[rank].get(), &state.running) {
                let awaited = || state.host_rounds.awaited_ranks(operation);
                let awaited = self.memory.run_as(rank, awaited);
                next.extend(awaited.into_iter().map(Rank::index).filter(|&awaited| reached.insert(awaited)));
            }
        }
        !reached.is_disjoint(culprits)
    }

    /// Returns what is wrong after the ranks have run.
    fn check(&self, odd_rank: Option<usize>) -> Result<(), String> {
        if let Some(problem) = self.problem.borrow().clone().or_else(|| self.memory.race()) {
            return Err(problem);
        }
        self.memory.settle();
        let status: Vec<HostRankStatus> = self.status.iter().map(Cell::get).collect();
        let has_failed = |status: &HostRankStatus| {
            matches!(status, HostRankStatus::Failed | HostRankStatus::FoundMismatch(_))
        };
        let has_ended = |status: &HostRankStatus| has_failed(status) || *status == HostRankStatus::Killed;
        let culprits: BTreeSet<usize> =
            status.iter().enumerate().filter(|(_, status)| has_ended(status)).map(|(rank, _)| rank).collect();
        let has_completed = status.contains(&HostRankStatus::Completed);
        if let Some(odd_rank) = odd_rank {
            let names = |(rank, status): (usize, &HostRankStatus)| match status {
                HostRankStatus::FoundMismatch(other) => rank == odd_rank || other.index() == odd_rank,
                _ => true,
            };
            if has_completed || culprits.is_empty() || !status.iter().enumerate().all(names) {
                return Err(format!("rank {odd_rank} called another operation: {status:?}"));
            }
        } else if status.iter().any(|status| matches!(status, HostRankStatus::FoundMismatch(_))) {
            return Err(format!("all ranks called the same operations: {status:?}"));
        }
        for (rank, status) in status.iter().enumerate() {
            if has_failed(status) && !self.ranks[rank].borrow_mut().buffers.is_unchanged_since_failure() {
                return Err(format!("a rank has written to the buffer that rank {rank} got back"));
            }
            let waits_for_itself = || self.waits_for(rank, &BTreeSet::from([rank]));
            if *status == HostRankStatus::Sleeps && (!self.waits_for(rank, &culprits) || waits_for_itself()) {
                return Err(format!("a wake-up is lost, or rank {rank} waits for a wrong rank"));
            }
        }
        Ok(())
    }

    fn note(&self, problem: &str) {
        self.problem.borrow_mut().get_or_insert(problem.into());
    }
}

impl RoundsRank {
    /// Ends the operation in progress after a failure. The program gets its buffer back, and uses it.
    fn return_buffer(&mut self) {
        let Self { host_rounds, running, buffers, .. } = self;
        let operation = running.as_ref().expect("an operation has failed");
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(buffers.elements_mut());
        host_rounds.stop_exposing(operation, &BufferAccess::from(bytes));
        buffers.use_after_failure();
    }
}

/// Runs the ranks of a host. Returns the lines that have accessed the memory and the statuses, or what went wrong.
fn run_host(
    seed: u64,
    disturbance: Disturbance,
) -> Result<(BTreeMap<AccessSite, AccessKind>, Vec<HostRankStatus>), String> {
    let host = Rc::new(SimHost::new(seed, disturbance));
    let weak = Rc::downgrade(&host);
    host.memory.set_on_access(Some(Box::new(move || {
        if let Some(host) = weak.upgrade() {
            host.before_access();
        }
    })));
    host.run();
    host.memory.set_on_access(None);
    host.check(disturbance.odd_rank)?;
    Ok((host.memory.sites(), host.status.iter().map(Cell::get).collect()))
}

/// Runs a seed, which must pass. Returns whether all ranks have completed their programs.
fn check_seed(seed: u64, disturbance: fn(&mut StdRng) -> Disturbance) -> bool {
    let disturbance = disturbance(&mut StdRng::seed_from_u64(seed ^ 0xD15));
    let (_, status) = run_host(seed, disturbance).unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
    status.iter().all(|status| *status == HostRankStatus::Completed)
}

/// Runs many seeds, all of which must pass. Returns how many runs all ranks completed.
fn check_seeds(count: u64, disturbance: fn(&mut StdRng) -> Disturbance) -> u64 {
    let count = if cfg!(miri) { 2 } else { count };
    (0..count).filter(|&seed| check_seed(seed, disturbance)).count() as u64
}

/// Checks the runs of a seed: without a disturbance, with a killed rank, with an operation that fails, and with a rank that calls
/// another operation.
pub(super) fn check_rounds(seed: u64) {
    assert!(check_seed(seed, |_| Disturbance::default()));
    check_seed(seed, with_killed_rank);
    check_seed(seed, with_failed_rank);
    assert!(!check_seed(seed, with_odd_rank));
}

#[test]
fn no_result_is_wrong_and_no_wake_up_is_lost() {
    let completed = check_seeds(200, |_| Disturbance::default());
    assert!(cfg!(miri) || completed == 200, "{completed}");
}

#[test]
fn all_ranks_wait_for_a_killed_rank() {
    let completed = check_seeds(300, with_killed_rank);
    assert!(cfg!(miri) || completed < 150, "{completed}");
}

#[test]
fn no_rank_writes_to_the_buffer_of_an_operation_that_has_failed() {
    let completed = check_seeds(400, with_failed_rank);
    assert!(cfg!(miri) || completed < 200, "{completed}");
}

#[test]
fn a_rank_that_calls_another_operation_is_found() {
    assert_eq!(check_seeds(300, with_odd_rank), 0);
}

/// Each release, acquire and fence is relaxed, and each load, store, swap, read and write is skipped. This test also shows that
/// the other tests can fail.
#[test]
#[cfg_attr(miri, ignore = "Miri would need hours")]
fn each_line_that_accesses_the_memory_is_needed() {
    let sites: BTreeMap<AccessSite, AccessKind> =
        (0..20).flat_map(|seed| run_host(seed, Disturbance::default()).unwrap().0).collect();
    let (mut needed, mut unneeded) = (0, Vec::new());
    for (site, kind) in sites {
        let text = ROUNDS_SOURCE.lines().nth(site.line() as usize - 1).unwrap().trim();
        let may_be_relaxed = !kind.is_ordered || MAY_BE_RELAXED.contains(&text);
        let relaxed = (!may_be_relaxed).then_some(Mutation::Relax);
        let skipped = (!kind.is_fence && !MAY_BE_SKIPPED.contains(&text)).then_some(Mutation::Skip);
        for mutation in relaxed.into_iter().chain(skipped) {
            let disturbance = Disturbance { mutation: Some((site, mutation)), ..Disturbance::default() };
            let is_found = (0..FAILING_SEEDS).any(|seed| run_host(seed, disturbance).is_err());
            needed += usize::from(is_found);
            if !is_found {
                unneeded.push(format!("{mutation:?} line {}: {text}", site.line()));
            }
        }
    }
    assert!(unneeded.is_empty(), "no seed fails with these changes: {unneeded:#?}");
    assert!(needed >= 13, "only {needed} changes were tested");
}
