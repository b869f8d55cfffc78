//! Tests of the engine over a simulated network in virtual time, for thousands of seeds, with and without faults.
//!
//! All ranks run the same random program: collectives and messages, several at once, in the group of all ranks and in
//! smaller groups. The last call is a barrier. Some, all or none of the links carry checksums. Some ranks share hosts, and have
//! queues to each other in simulated shared memory. On every network, a rank that
//! reports success has the right result, unless a bit was flipped on a link without checksums.
//! Every rank ends before its deadline. If a rank fails before the last barrier, no rank completes this barrier.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::job::{MemoryFault, MemoryFaultKind};
use super::program::{OPERATIONS, SimCall};
use super::rank::{OPERATION_TIMEOUT, SimCounts, SimEnd};
use super::scenario::{Scenario, SimRun};
use super::{has_many_seeds, network_count_divisor, seeds};
use crate::engine::EAGER_BYTES;
use crate::simulation::memory::THREADS_MAX;
use crate::simulation::network::Fault;
use crate::types::{Algorithm, Operation, ReduceOp};
use crate::wire::Cause;
use crate::{Rank, WorldSize};

/// Checks that a random program completes on a network without faults.
pub(super) fn check_without_faults(seed: u64) {
    check_run_without_faults(&Scenario::random(seed, false), seed);
}

/// Checks that the program of a scenario completes on its network, which has no faults.
pub(super) fn check_run_without_faults(scenario: &Scenario, seed: u64) -> SimRun {
    let run = scenario.run_and_observe(seed);
    assert!(is_on_time(&run), "seed {seed}: {:?} at {:?}", run.outcomes, run.ended_at);
    assert_eq!(run.sleepless_times, 0, "seed {seed}: a rank that can do nothing does not sleep");
    run
}

/// Returns whether all ranks succeed before the first deadline. A rank whose wake byte is lost wakes up at a deadline.
fn is_on_time(run: &SimRun) -> bool {
    run.outcomes.iter().all(|outcome| *outcome == SimEnd::Success) && run.ended_at < OPERATION_TIMEOUT
}

#[test]
fn every_program_completes_on_a_network_without_faults() {
    let run = |seed| check_run_without_faults(&Scenario::random(seed, false), seed).counts;
    let counts = seeds(4000).map(run).fold(SimCounts::default(), SimCounts::add);
    println!("{counts:?}");
    let SimCounts { in_shared_memory, blocking, short, hierarchical, compressed, .. } = counts;
    let all = [in_shared_memory, blocking, short, hierarchical, compressed];
    assert!(!has_many_seeds() || all.iter().all(|count| *count > 0));
}

/// Checks a program of messages between ranks of one host.
pub(super) fn check_messages_of_a_host(seed: u64) -> SimCounts {
    let mut scenario = Scenario::random(seed, false);
    let mut random = StdRng::seed_from_u64(seed);
    scenario.hosts = vec![scenario.world.ranks().take(THREADS_MAX).collect()];
    scenario.checked_links.iter_mut().for_each(|links| links.fill(false));
    (scenario.memory_use.has_queues, scenario.memory_use.queue_size) = (true, (16, 4096));
    if random.random_bool(0.8) {
        // A rank that waits for each call receives most messages without an operation, also long ones.
        (scenario.running_max, scenario.segment_bytes) = (1, 4096);
    }
    scenario.program.clear();
    for _ in 0..30 {
        let call = SimCall::random_call_of(Operation::Message, &mut random, &scenario.groups);
        // An entry of a message has at most 1 KiB.
        let count = if random.random_bool(0.3) { 5 * call.count } else { call.count % 20 };
        scenario.program.push(SimCall { count, ..call });
    }
    scenario.program.push(SimCall::BARRIER);
    check_run_without_faults(&scenario, seed).counts
}

#[test]
fn messages_with_and_without_operations_arrive_in_order() {
    let counts = seeds(2000).map(check_messages_of_a_host).fold(SimCounts::default(), SimCounts::add);
    println!("{counts:?}");
    assert!(!has_many_seeds() || (counts.direct_receives > 0 && counts.divided_messages > 0));
}

/// Returns a scenario whose ranks are on one host and call only collectives in shared memory.
fn collectives_of_a_host(seed: u64) -> Scenario {
    let mut scenario = Scenario::random(seed, false);
    let mut random = StdRng::seed_from_u64(seed);
    scenario.world = WorldSize::new(random.random_range(2..=THREADS_MAX as u32)).unwrap();
    scenario.groups = vec![scenario.world.ranks().collect()];
    scenario.checked_links = vec![vec![false; THREADS_MAX]; THREADS_MAX];
    scenario.hosts = scenario.groups.clone();
    scenario.memory_use.slot_bytes.get_or_insert(256);
    let collectives = OPERATIONS.iter().filter(|&&operation| operation != Operation::Message);
    let collectives: Vec<Operation> = collectives.copied().collect();
    scenario.program.clear();
    for _ in 0..random.random_range(2..10) {
        let operation = collectives[random.random_range(0..collectives.len())];
        scenario.program.push(SimCall::random_call_of(operation, &mut random, &scenario.groups));
    }
    scenario.program.push(SimCall::BARRIER);
    scenario.preemption = 0.3;
    scenario
}

/// Checks collectives of the ranks of one host, which often take turns while another rank falls asleep.
pub(super) fn check_collectives_of_a_host(seed: u64) {
    check_run_without_faults(&collectives_of_a_host(seed), seed);
}

#[test]
fn a_rank_that_waits_in_shared_memory_does_not_miss_a_post() {
    seeds(5_000).for_each(check_collectives_of_a_host);
}

/// Checks that all ranks of a host fail if one of them stops between two accesses to shared memory, and that no rank waits for
/// ever. Returns whether a rank failed.
pub(super) fn check_stopped_rank_of_a_host(seed: u64) -> bool {
    let mut scenario = collectives_of_a_host(seed);
    let mut random = StdRng::seed_from_u64(seed);
    let rank = Rank::new(random.random_range(0..scenario.world.get()));
    let access = random.random_range(0..500);
    scenario.memory_faults = vec![MemoryFault { rank, access, kind: MemoryFaultKind::Stall }];
    has_failed(&scenario.run(seed))
}

#[test]
fn ranks_that_wait_in_shared_memory_for_a_stopped_rank_fail_at_the_deadline() {
    let failed = seeds(5_000).filter(|&seed| check_stopped_rank_of_a_host(seed)).count();
    assert!(!has_many_seeds() || failed > 0);
}

/// The wake bytes of each line of the source are lost. This test also shows that the test above can fail.
#[test]
fn each_wake_byte_is_needed() {
    let run = |seed, lost_wakes| {
        let mut scenario = Scenario::random(seed, false);
        scenario.hosts = vec![scenario.world.ranks().take(THREADS_MAX).collect()];
        (scenario.memory_use.has_queues, scenario.memory_use.queue_size) = (true, (4, 256));
        scenario.config.lost_wakes = lost_wakes;
        scenario.run_and_observe(seed)
    };
    let sites: BTreeSet<_> = (0..4).flat_map(|seed| run(seed, None).wake_sites).collect();
    assert_eq!(sites.len(), 2, "{sites:?}");
    for site in sites {
        assert!(
            (0..200).any(|seed| !is_on_time(&run(seed, Some(site)))),
            "no seed needs the wake byte of {site}"
        );
    }
}

/// A word of shared memory changes, as if a rank wrote wrong words. No rank panics, and every rank ends.
pub(super) fn check_wrong_words(seed: u64) -> bool {
    let mut scenario = Scenario::random(seed, false);
    let mut random = StdRng::seed_from_u64(seed);
    scenario.hosts = vec![scenario.world.ranks().take(THREADS_MAX).collect()];
    for _ in 0..random.random_range(1..4) {
        scenario.add_memory_fault(MemoryFaultKind::Corrupt, &mut random);
    }
    has_failed(&scenario.run(seed))
}

#[test]
fn wrong_words_in_shared_memory_make_no_rank_panic_or_wait_for_ever() {
    let networks = seeds(1000);
    let count = networks.end - networks.start;
    let failed = networks.filter(|&seed| check_wrong_words(seed)).count() as u64;
    assert!(!has_many_seeds() || failed > 0 && failed < count, "{failed} of {count} programs failed");
}

/// One rank calls another collective than the others.
pub(super) fn check_wrong_calls(seed: u64) {
    let mut scenario = Scenario::random(seed, false);
    let mut random = StdRng::seed_from_u64(seed);
    let odd_rank = Rank::new(random.random_range(0..scenario.world.get()));
    let index = random.random_range(0..scenario.program.len() - 1);
    let operations = OPERATIONS.len() - 1;
    let call = SimCall::random_call_of(
        OPERATIONS[random.random_range(0..operations)],
        &mut random,
        &scenario.groups[..1],
    );
    scenario.program[index] = call;
    scenario.odd_call = Some((odd_rank, index));
    check_that_odd_rank_is_named(&scenario, seed);
}

/// One rank calls another collective than the others, on several hosts. The other calls are equal, so their blocks differ only
/// in their numbers and lengths.
pub(super) fn check_wrong_call_between_equal_ones(seed: u64) {
    let mut scenario = Scenario::random(seed, false);
    let mut random = StdRng::seed_from_u64(seed);
    scenario.world = WorldSize::new(random.random_range(3..=6)).unwrap();
    scenario.groups = vec![scenario.world.ranks().collect()];
    scenario.checked_links = vec![vec![false; 6]; 6];
    // The ranks of the second host share no memory in some scenarios.
    let (low, high) = scenario.groups[0].split_at(2);
    scenario.hosts = vec![low.to_vec()];
    scenario.hosts.extend((high.len() > 1 && random.random_bool(0.5)).then(|| high.to_vec()));
    scenario.memory_use.slot_bytes.get_or_insert(256);
    let operations = [Operation::AllReduce, Operation::Reduce, Operation::Broadcast];
    let operation = operations[random.random_range(0..operations.len())];
    let call = SimCall::random_call_of(operation, &mut random, &scenario.groups);
    let odd_rank = Rank::new(random.random_range(0..scenario.world.get()));
    let index = random.random_range(0..3);
    scenario.program = vec![call; 4];
    scenario.program.push(SimCall::BARRIER);
    if random.random_bool(0.8) {
        // The odd rank calls an all-gather of one element, in which most ranks wait before they send anything.
        scenario.program[index] = SimCall::BARRIER;
    }
    scenario.running_max = 4;
    scenario.odd_call = Some((odd_rank, index));
    check_that_odd_rank_is_named(&scenario, seed);
}

/// Checks that ranks fail if one of them calls another collective than the others, and that each error names this rank. All ranks
/// fail, unless they notice the wrong call only during the last barrier.
fn check_that_odd_rank_is_named(scenario: &Scenario, seed: u64) {
    let (odd_rank, index) = scenario.odd_call.expect("one rank makes another call");
    // If the ranks name different roots, it is possible that each rank waits for a message, and no rank sends one.
    let may_time_out =
        scenario.program[index].operation.has_root() && !scenario.shares_memory(&scenario.groups[0]);
    let outcomes = scenario.run(seed);
    assert!(
        has_failed(&outcomes),
        "seed {seed}: no rank noticed that rank {odd_rank} calls another operation"
    );
    let barrier = scenario.program.len() - 1;
    let failed_early = has_failed_before(&outcomes, barrier);
    let mut mismatches = BTreeMap::new();
    for outcome in &outcomes {
        let SimEnd::Failed { failure, .. } = outcome else {
            assert!(*outcome == SimEnd::Success && !failed_early, "seed {seed}: {outcomes:?}");
            continue;
        };
        let names_odd_rank = match &failure.cause {
            Cause::Mismatch { first, second, .. } => [*first, *second].contains(&odd_rank),
            Cause::Timeout { .. } => may_time_out,
            _ => false,
        };
        assert!(names_odd_rank, "seed {seed}: rank {odd_rank} calls another operation: {failure:?}");
        if let Cause::Mismatch { first, first_site, second, second_site, .. } = &failure.cause
            && failed_early
        {
            for (rank, site) in [(first, first_site), (second, second_site)] {
                // The engine may not know a short call that the rank has completed.
                let is_in_call =
                    matches!(outcomes[rank.index()], SimEnd::Failed { call, .. } if call == index);
                assert!(!site.is_empty() || !is_in_call, "seed {seed}: {failure:?}");
            }
            let same_ranks = mismatches.entry((first, second)).or_insert(&failure.cause);
            assert_eq!(*same_ranks, &failure.cause, "seed {seed}");
        }
    }
    // In a larger world, not every rank has a link to every other rank.
    assert!(scenario.world.get() > 3 || mismatches.len() <= 1, "seed {seed}: {mismatches:?}");
}

#[test]
fn a_rank_that_calls_another_collective_is_named() {
    seeds(2000).for_each(check_wrong_calls);
}

#[test]
fn a_rank_that_calls_another_collective_between_equal_ones_is_named() {
    seeds(2000).for_each(check_wrong_call_between_equal_ones);
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
            let call = SimCall::random_call_of(operation, &mut random, &scenario.groups);
            SimCall { algorithm, count: 2 * EAGER_BYTES * 5 / 4 / 8, ..call }
        };
        scenario.program = cases.map(call).into_iter().chain([SimCall::BARRIER]).collect();
        scenario.segment_bytes = 4096;
        scenario.memory_use.queue_size = (16, 4096);
        scenario.memory_use.slot_bytes = None;
        scenario.config.bandwidth = 200_000_000;
        scenario.config.window_bytes = 64 << 10;
        scenario.config.piece_bytes_max = 16 << 10;
        let outcomes = scenario.run(seed);
        assert!(outcomes.iter().all(|outcome| *outcome == SimEnd::Success), "seed {seed}: {outcomes:?}");
    }
}

/// Checks that no rank completes the last barrier after another rank failed. The simulation also checks every result, and that
/// no rank waits forever. Returns whether a rank failed.
pub(super) fn check_last_barrier(seed: u64) -> bool {
    let scenario = Scenario::random(seed, true);
    let barrier = scenario.program.len() - 1;
    let outcomes = scenario.run(seed);
    let failed_early = has_failed_before(&outcomes, barrier);
    let succeeded = outcomes.iter().filter(|outcome| **outcome == SimEnd::Success).count();
    if failed_early {
        assert_eq!(succeeded, 0, "seed {seed}: some ranks completed the barrier: {outcomes:?}");
    }
    has_failed(&outcomes)
}

/// Returns whether a rank failed before the call with this index.
fn has_failed_before(outcomes: &[SimEnd], index: usize) -> bool {
    outcomes.iter().any(|outcome| matches!(outcome, SimEnd::Failed { call, .. } if *call < index))
}

fn has_failed(outcomes: &[SimEnd]) -> bool {
    outcomes.iter().any(|outcome| matches!(outcome, SimEnd::Failed { .. }))
}

#[test]
fn no_rank_completes_the_last_barrier_after_another_rank_failed() {
    let networks = seeds(5_000);
    let count = networks.end - networks.start;
    let failed = networks.filter(|&seed| check_last_barrier(seed)).count() as u64;
    let completed = count - failed;
    // Faults must cause failures in some programs, but not in all.
    println!("{completed} programs completed, {failed} failed");
    let min = 1000 / network_count_divisor();
    assert!(!has_many_seeds() || completed > min && failed > min, "{completed} completed, {failed} failed");
}

/// Checks a program that repeats a single operation on a network with faults. The simulation checks every result, and that no
/// rank waits forever. Returns whether a rank failed.
pub(super) fn check_operation(operation: Operation, seed: u64) -> bool {
    let mut scenario = Scenario::random(seed, true);
    let mut random = StdRng::seed_from_u64(seed);
    for call in scenario.program.iter_mut().rev().skip(1) {
        *call = SimCall::random_call_of(operation, &mut random, &scenario.groups);
    }
    has_failed(&scenario.run(seed))
}

#[test]
fn every_operation_gives_right_results_or_fails_on_faulty_networks() {
    for operation in OPERATIONS {
        let failed = seeds(1000).filter(|&seed| check_operation(operation, seed)).count() as u64;
        let per_mille = failed * network_count_divisor();
        assert!(
            !has_many_seeds() || (100..900).contains(&per_mille),
            "{operation}: {per_mille} of 1000 failed"
        );
    }
}

/// Checks that the error of every rank names a rank that was killed, if there are no other faults. Returns the number of ranks
/// that failed.
pub(super) fn check_survivors(seed: u64) -> u64 {
    let mut scenario = Scenario::random(seed, false);
    let mut random = StdRng::seed_from_u64(seed);
    let mut victim = Rank::new(random.random_range(0..scenario.world.get()));
    scenario.config.faults =
        vec![Fault::Kill { rank: victim, at: Duration::from_micros(random.random_range(0..4000)) }];
    if seed.is_multiple_of(2) {
        // The rank is killed between two accesses to shared memory.
        scenario.config.faults.clear();
        victim = scenario.add_memory_fault(MemoryFaultKind::Kill, &mut random);
    }
    let mut named = 0;
    for outcome in scenario.run(seed) {
        let SimEnd::Failed { failure, .. } = outcome else { continue };
        let Cause::PeerLost { rank, ref host, .. } = failure.cause else {
            panic!("seed {seed}: {failure:?}");
        };
        assert_eq!((rank, host.as_str()), (victim, format!("host{victim}").as_str()), "seed {seed}");
        named += 1;
    }
    named
}

#[test]
fn survivors_name_the_rank_that_died() {
    let named: u64 = seeds(1000).map(check_survivors).sum();
    assert!(!has_many_seeds() || named > 1000 / network_count_divisor(), "only {named} failures");
}

/// A rank stops without closing its links. At the deadline, the errors of all other ranks name this rank.
#[test]
fn a_stopped_rank_is_named_at_the_deadline() {
    let mut scenario = Scenario::random(1, false);
    scenario.world = WorldSize::new(4).unwrap();
    scenario.program = vec![
        SimCall {
            group: 0,
            operation: Operation::AllReduce,
            op: ReduceOp::Sum,
            count: 100,
            root: Rank::ZERO,
            algorithm: Algorithm::Ring,
            is_compressed: false,
        },
        SimCall::BARRIER,
    ];
    scenario.groups = vec![scenario.world.ranks().collect()];
    scenario.checked_links = vec![vec![true; 4]; 4];
    scenario.hosts = vec![scenario.groups[0].clone()];
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
