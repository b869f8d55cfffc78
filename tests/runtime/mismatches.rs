//! Tests of ranks that call different operations, or call one operation with different arguments. Every rank that is
//! inside a call soon fails with the same root cause, which names the calls and the lines of the program.

use std::panic::Location;
use std::thread;
use std::time::{Duration, Instant};

use crate::util::ranks::{self, TestTransport};
use crate::util::{if_long_tests_else, retry_on_busy_machine};
use ringtrain::group::at;
use ringtrain::types::Operation;
use ringtrain::verbs::{
    AllGather, AllReduce, AllToAll, Gather, ReduceScatter, Scatter, function, scaled_sum,
};
use ringtrain::wire::Cause;
use ringtrain::{Compression, Compressor, CompressorState, Error, Group, JoinOptions, Rank, ReduceOp, Site};

type CallResult = Result<(), Error>;
type GroupCall = fn(&mut Group) -> CallResult;

/// The deadline of operations in tests whose mismatches are detected at once. No test waits for this deadline.
const LONG_DEADLINE: Duration = Duration::from_secs(20);
/// The deadlines of operations in tests that may wait for them, because only a missed deadline shows the mismatch. On a
/// busy machine, a rank may not call its operation within the first deadline.
const SHORT_DEADLINES_MS: [u64; 4] = [300, 1000, 3000, 10_000];
/// The additional time that a test may take on a busy machine.
const TIME_MARGIN: Duration = Duration::from_secs(15);
pub(super) const WORLD_SIZES: [u32; 4] = [2, 3, 4, 5];
const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

pub(super) fn world_sizes() -> &'static [u32] {
    if_long_tests_else(&WORLD_SIZES, &[2, 3])
}

/// Returns a function that sets the deadline. For some values of `n`, the number of ranks, it also selects the ring
/// algorithm, shared memory or several hosts. The reported causes must not depend on these options.
pub(super) fn set_options_for(n: u32) -> impl Fn(&mut JoinOptions) {
    move |options| {
        options.operation_timeout = LONG_DEADLINE;
        if n.is_multiple_of(2) {
            options.algorithms = "ring".parse().expect("the algorithm exists");
        }
        match n {
            3 => TestTransport::Shm.apply(options),
            5 => TestTransport::Hosts.apply(options),
            _ => {}
        }
    }
}

pub(super) fn retry_with_longer_deadlines(check: impl Fn(Duration)) {
    retry_on_busy_machine(|attempt| check(Duration::from_millis(SHORT_DEADLINES_MS[attempt as usize])));
}

/// If `first` is not an error, calls barriers until the job has failed. Returns the cause of the failure.
pub(super) fn wait_for_cause(group: &mut Group, first: CallResult) -> Cause {
    let started = Instant::now();
    let mut called = first;
    while called.is_ok() {
        assert!(started.elapsed() < TIME_MARGIN, "the job has not failed");
        called = group.barrier();
    }
    called.expect_err("the job has failed").cause().expect("the error is one of the job").clone()
}

/// Returns the cause that each rank reports if `differing_rank` calls `odd` and all other ranks call `common`.
fn causes(n: u32, differing_rank: u32, deadline: Duration, common: GroupCall, odd: GroupCall) -> Vec<Cause> {
    ranks::run_with(n, set_options_for(n), move |mut group| {
        let rank = group.rank().get();
        // After this barrier all ranks have joined. If another rank fails early, the barrier may fail.
        let joined = group.barrier();
        group.set_timeout(deadline);
        // Ranks make the call at different times.
        (0..(rank + differing_rank) % n * 50).for_each(|_| thread::yield_now());
        let started = Instant::now();
        let called =
            joined.and_then(|()| if rank == differing_rank { odd(&mut group) } else { common(&mut group) });
        let cause = wait_for_cause(&mut group, called);
        assert!(started.elapsed() < 2 * TIME_MARGIN, "the failure took {:?}", started.elapsed());
        cause
    })
}

/// Checks that all ranks report the same cause, and returns the text of this cause.
pub(super) fn common_report(what: &str, causes: &[Cause]) -> String {
    let same = causes.iter().all(|cause| *cause == causes[0]);
    assert!(same, "{what}: ranks report different causes: {causes:#?}");
    causes[0].to_string()
}

/// Returns the line number of a `site`, which must have the form `FILE:LINE` and name this file.
fn line_of_site(site: &str) -> usize {
    let line = site.strip_prefix(concat!(file!(), ":")).and_then(|line| line.parse().ok());
    line.unwrap_or_else(|| panic!("`{site}` is not a line of this file"))
}

/// `common` and `odd` are the reported sites (`FILE:LINE`) of the two calls. Checks that each site is in the
/// assertion that begins at line `start`, or in the function `all_reduce_sum`. If neither site is in that function,
/// `common` must come first.
fn assert_lines_of_calls(start: u32, common: &str, odd: &str, report: &str) {
    let source: Vec<&str> = include_str!("mismatches.rs").lines().collect();
    let start = start as usize;
    let end = start + source[start..].iter().position(|line| *line == "    );").expect("the assertion ends");
    let lines = [common, odd].map(line_of_site);
    let is_shared = |line: usize| source[line - 2].starts_with("fn all_reduce_sum(");
    for line in lines {
        assert!((start..=end).contains(&line) || is_shared(line), "line {line}: {report}");
    }
    assert!(lines[0] < lines[1] || lines.into_iter().any(is_shared), "{report}");
}

/// Checks that all ranks report both calls and the lines of both calls as a mismatch. In each job, one rank calls
/// `odd` and the other ranks call `common`. The jobs cover every world size and every choice of this rank.
#[track_caller]
fn assert_mismatch(what: &str, common: GroupCall, odd: GroupCall, expected_calls: [&str; 2]) {
    assert_mismatch_in(world_sizes(), what, common, odd, expected_calls);
}

/// Does the same as [`assert_mismatch`], but only for the given world sizes.
#[track_caller]
fn assert_mismatch_in(
    worlds: &[u32],
    what: &str,
    common: GroupCall,
    odd: GroupCall,
    expected_calls: [&str; 2],
) {
    let start = Location::caller().line();
    for &n in worlds {
        for differing_rank in 0..n {
            // The ranks send each other what they know of a failure for at most 0.5 s.
            retry_on_busy_machine(|_| {
                let causes = causes(n, differing_rank, LONG_DEADLINE, common, odd);
                let case = format!("{what}, rank {differing_rank} of {n}");
                let report = common_report(&case, &causes);
                let Cause::Mismatch { first, first_site, second_site, .. } = &causes[0] else {
                    panic!("{case}: {report}")
                };
                let is_first = first.get() == differing_rank;
                let (odd_site, site) =
                    if is_first { (first_site, second_site) } else { (second_site, first_site) };
                assert_lines_of_calls(start, site, odd_site, &report);
                let [expected_common, expected_odd] = expected_calls;
                assert!(report.contains(expected_common), "{case}: no `{expected_common}` in: {report}");
                let expected_odd = format!("rank {differing_rank} called {expected_odd}");
                assert!(report.contains(&expected_odd), "{case}: no `{expected_odd}` in: {report}");
            });
        }
    }
}

/// Checks that all ranks report both calls and the lines of both calls. The cause is a mismatch or, if no rank
/// detects a mismatch, a missed deadline.
fn assert_mismatch_or_timeout(what: &str, common: GroupCall, odd: GroupCall, expected_calls: [&str; 2]) {
    for &n in world_sizes() {
        for differing_rank in [0, n - 1] {
            retry_with_longer_deadlines(|deadline| {
                let causes = causes(n, differing_rank, deadline, common, odd);
                let case = format!("{what}, rank {differing_rank} of {n}");
                let report = common_report(&case, &causes);
                for expected in expected_calls {
                    assert!(report.contains(expected), "{case}: no `{expected}` in: {report}");
                }
                let sites = report.matches(concat!(file!(), ":")).count();
                assert!(sites >= 2, "{case}: {report}");
            });
        }
    }
}

fn all_reduce_sum(group: &mut Group, count: usize) -> CallResult {
    group.all_reduce(&mut vec![1f32; count], ReduceOp::Sum)
}

#[test]
fn different_counts_are_reported() {
    assert_mismatch(
        "count",
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        |group| group.all_reduce(&mut [0f32; 200], ReduceOp::Sum),
        ["all_reduce(sum, 100 x f32, ", "all_reduce(sum, 200 x f32, "],
    );
    assert_mismatch(
        "count of a long buffer",
        |group| group.scan(&mut vec![0u8; 1_000_000], ReduceOp::Sum),
        |group| group.scan(&mut vec![0u8; 1_000_001], ReduceOp::Sum),
        ["scan(sum, 1000000 x u8, ", "scan(sum, 1000001 x u8, "],
    );
}

#[test]
fn different_element_types_are_reported() {
    assert_mismatch(
        "dtype",
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        |group| group.all_reduce(&mut [0i32; 100], ReduceOp::Sum),
        ["all_reduce(sum, 100 x f32, ", "all_reduce(sum, 100 x i32, "],
    );
}

#[test]
fn different_operations_are_reported() {
    assert_mismatch(
        "operation",
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        |group| group.all_gather(&mut [0f32; 100]),
        ["all_reduce(sum, 100 x f32, ", "all_gather(100 x f32, "],
    );
    assert_mismatch(
        "a blocking and an asynchronous operation",
        |group| group.call(AllToAll::new()).run_from(&[0u64; 60]).map(|_| ()),
        |group| group.all_reduce_async(vec![0u64; 60], ReduceOp::BitOr)?.wait().map(|_| ()),
        ["all_to_all(60 x u64, ", "all_reduce(bor, 60 x u64, "],
    );
}

/// If one call of the program runs several operations, the reported line is still the line of that call.
#[test]
fn different_operations_within_one_call_are_reported() {
    assert_mismatch(
        "objects and a split",
        |group| group.broadcast_object(&"text".to_owned(), R0).map(|_| ()),
        |group| group.split(Some(1), 0).map(|_| ()),
        ["broadcast(root 0, 1 x u64, ", "all_gather("],
    );
    assert_mismatch(
        "gathered objects and compressed elements",
        |group| group.all_gather_object(&[0u8; 3]).map(drop),
        |group| {
            group
                .call(AllReduce::new(ReduceOp::Sum).compressed(Compression::Fp16))
                .run(&mut [0f32; 3])
                .map(drop)
        },
        ["all_gather(", "all_reduce(sum, 3 x f32, compressed as fp16, "],
    );
}

#[test]
fn different_compressions_are_reported() {
    #[track_caller]
    fn compressed(group: &mut Group, compression: Compression) -> CallResult {
        let verb = AllReduce::new(ReduceOp::Sum).compressed(compression);
        group.call(verb).run(&mut [0f32; 100]).map(drop)
    }
    assert_mismatch(
        "codec",
        |group| compressed(group, Compression::Bf16),
        |group| compressed(group, Compression::Fp16),
        [
            "all_reduce(sum, 100 x f32, compressed as bf16, ",
            "all_reduce(sum, 100 x f32, compressed as fp16, ",
        ],
    );
    assert_mismatch(
        "an earlier result with EF21 or none",
        |group| {
            let compressor = Compressor::new("ef21:int8".parse().unwrap());
            let (residual, result) = (vec![1.0; 100], vec![-1.0; 100]);
            compressor.set_state(CompressorState { residual, result, calls: 1 });
            let verb = AllReduce::new(ReduceOp::Sum).compressed(&compressor);
            group.call(verb).run(&mut [0f32; 100]).map(drop)
        },
        |group| compressed(group, "ef21:int8".parse().unwrap()),
        [
            "all_reduce(sum, 100 x f32, compressed as ef21:int8 with the result of an earlier call, ",
            "all_reduce(sum, 100 x f32, compressed as ef21:int8, ",
        ],
    );
    assert_mismatch(
        "compressed or not",
        |group| compressed(group, Compression::Bf16),
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        ["all_reduce(sum, 100 x f32, compressed as bf16, ", "all_reduce(sum, 100 x f32, "],
    );
}

#[test]
fn different_reductions_are_reported() {
    assert_mismatch(
        "reduction",
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Max),
        ["all_reduce(sum, 100 x f32, ", "all_reduce(max, 100 x f32, "],
    );
    assert_mismatch(
        "factor",
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        |group| group.call(AllReduce::new(scaled_sum(0.5))).run(&mut [0f32; 100]).map(drop),
        ["all_reduce(sum, 100 x f32, ", "all_reduce(premulsum, 100 x f32, "],
    );
    // This test leaves out the world of 5 ranks, which uses several hosts. On several hosts only one of the two calls
    // is hierarchical, so no rank learns what rank 0 called.
    assert_mismatch_in(
        &WORLD_SIZES[..3],
        "function",
        |group| {
            group.call(AllReduce::new(function(|a: &f32, b: &f32| a + b))).run(&mut [0f32; 100]).map(drop)
        },
        |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
        ["all_reduce(custom, 100 x f32, ", "all_reduce(sum, 100 x f32, "],
    );
}

/// If each of two ranks expects data from the other as the root, neither detects the mismatch before the deadline.
#[test]
fn different_roots_are_reported() {
    assert_mismatch_or_timeout(
        "root of a broadcast",
        |group| group.broadcast(&mut [0f32; 100], R0),
        |group| group.broadcast(&mut [0f32; 100], R1),
        ["broadcast(root 0, 100 x f32, ", "broadcast(root 1, 100 x f32, "],
    );
    assert_mismatch_or_timeout(
        "root of a scatter",
        |group| group.call(Scatter::from(R0).count(100)).run_from(&[0f32; 100]).map(|_| ()),
        |group| group.call(Scatter::from(R1).count(100)).run_from(&[0f32; 100]).map(|_| ()),
        ["scatter(root 0, 100 x f32, ", "scatter(root 1, 100 x f32, "],
    );
    assert_mismatch_or_timeout(
        "root of a gather",
        |group| group.call(Gather::to(R0)).run_from(&[0f32; 10]).map(|_| ()),
        |group| group.call(Gather::to(R1)).run_from(&[0f32; 10]).map(|_| ()),
        ["gather(root 0, ", "gather(root 1, "],
    );
    assert_mismatch_or_timeout(
        "root of a reduction",
        |group| group.reduce(&mut [0f32; 10], ReduceOp::Sum, R0),
        |group| group.reduce(&mut [0f32; 10], ReduceOp::Sum, R1),
        ["reduce(sum, root 0, 10 x f32, ", "reduce(sum, root 1, 10 x f32, "],
    );
}

/// Returns the lengths of all parts and of this rank's part. The first part gets `shift` elements of the second.
fn uneven_counts(group: &Group, shift: usize) -> (Vec<usize>, usize) {
    let mut counts = vec![10; group.size().as_usize()];
    counts[0] += shift;
    counts[1] -= shift;
    let own = counts[group.rank().index()];
    (counts, own)
}

#[test]
fn different_uneven_parts_are_reported() {
    let parts = "uneven parts ";
    assert_mismatch(
        "parts of an all_gather",
        |group| {
            let (counts, own) = uneven_counts(group, 1);
            group.call(AllGather::new().counts(&counts)).run_from(&vec![0u8; own]).map(|_| ())
        },
        |group| {
            let (counts, own) = uneven_counts(group, 2);
            group.call(AllGather::new().counts(&counts)).run_from(&vec![0u8; own]).map(|_| ())
        },
        [parts, "all_gather("],
    );
    assert_mismatch(
        "uneven and even parts of a reduce_scatter",
        |group| {
            let (counts, _) = uneven_counts(group, 1);
            group
                .call(ReduceScatter::new(ReduceOp::Sum).counts(&counts))
                .run_from(&vec![0u8; counts.len() * 10])
                .map(|_| ())
        },
        |group| {
            let count = group.size().as_usize() * 10;
            group.reduce_scatter(&mut vec![0u8; count], ReduceOp::Sum).map(|_| ())
        },
        [parts, "reduce_scatter(sum, "],
    );
    assert_mismatch(
        "parts of a scatter",
        |group| {
            let (counts, _) = uneven_counts(group, 1);
            group.call(Scatter::from(R0).counts(&counts)).run_from(&vec![0u8; counts.len() * 10]).map(|_| ())
        },
        |group| {
            let (counts, _) = uneven_counts(group, 2);
            group.call(Scatter::from(R0).counts(&counts)).run_from(&vec![0u8; counts.len() * 10]).map(|_| ())
        },
        [parts, "scatter(root 0, "],
    );
}

/// Rank 1 sends a different count than its peers expect. In an uneven all-to-all the counts may differ between ranks,
/// so the ranks cannot detect the mismatch by comparing the counts in frame headers.
#[test]
fn different_counts_of_an_uneven_all_to_all_are_reported() {
    const CALL_LINE: u32 = line!() + 4;
    fn exchange(group: &mut Group, count: usize) -> CallResult {
        let counts = vec![count; group.size().as_usize()];
        let input = vec![0u8; counts.iter().sum()];
        group.call(AllToAll::new().counts(&counts, &counts)).run_from(&input).map(drop)
    }
    for (common, odd) in [(10, 11), (11, 10), (300_000, 10), (10, 300_000)] {
        for &n in world_sizes() {
            let causes = ranks::run_with(n, set_options_for(n), move |mut group| {
                let count = if group.rank() == R1 { odd } else { common };
                // After this barrier all ranks have joined. If another rank fails early, the barrier may fail.
                let joined = group.barrier();
                let called = joined.and_then(|()| exchange(&mut group, count));
                wait_for_cause(&mut group, called)
            });
            let report = common_report(&format!("{common} elements, but {odd} on rank 1 of {n}"), &causes);
            let Cause::Mismatch {
                first,
                first_contract,
                first_site,
                second,
                second_contract,
                second_site,
                ..
            } = &causes[0]
            else {
                panic!("{report}")
            };
            for (rank, contract, site) in
                [(first, first_contract, first_site), (second, second_contract, second_site)]
            {
                let count = if *rank == R1 { odd } else { common };
                assert_eq!(
                    (contract.operation, contract.count),
                    (Operation::AllToAll, count as u64),
                    "{report}"
                );
                assert_eq!(*site, format!("{}:{CALL_LINE}", file!()), "{report}");
            }
            assert!(*first == R1 || *second == R1, "{report}");
        }
    }
}

#[test]
fn a_different_order_of_two_calls_is_reported() {
    assert_mismatch(
        "order",
        |group| {
            group.broadcast(&mut [0u8; 4], R0)?;
            all_reduce_sum(group, 10)
        },
        |group| {
            all_reduce_sum(group, 10)?;
            group.broadcast(&mut [0u8; 4], R0)
        },
        ["broadcast(root 0, 4 x u8, ", "all_reduce(sum, 10 x f32, "],
    );
}

#[test]
fn an_additional_call_is_reported() {
    assert_mismatch(
        "an additional barrier",
        |group| {
            all_reduce_sum(group, 10)?;
            all_reduce_sum(group, 10)
        },
        |group| {
            group.barrier()?;
            all_reduce_sum(group, 10)
        },
        ["all_reduce(sum, 10 x f32, ", "barrier("],
    );
}

/// A binding to another language uses [`at`] to report the file and line of the program's own call.
#[test]
fn lines_that_a_binding_passes_are_reported() {
    let passed_and_found_sites = |causes: &[Cause]| {
        let report = common_report("a line that a binding passes", causes);
        let Cause::Mismatch { first, first_site, second_site, .. } = &causes[0] else { panic!("{report}") };
        assert!(report.contains("train.py:12"), "{report}");
        let (one, other) = (first_site.clone(), second_site.clone());
        if *first == R1 { (one, other) } else { (other, one) }
    };
    let calls_with_site: [GroupCall; 2] = [
        |group| at(Site::new("train.py", 12), || group.all_reduce(&mut [0f32; 200], ReduceOp::Sum)),
        |group| {
            let begun =
                at(Site::new("train.py", 12), || group.all_reduce_async(vec![0f32; 200], ReduceOp::Sum));
            begun?.wait().map(|_| ())
        },
    ];
    for &n in world_sizes() {
        for odd in calls_with_site {
            let common: GroupCall = |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum);
            let (passed_site, found_site) = passed_and_found_sites(&causes(n, 1, LONG_DEADLINE, common, odd));
            assert_eq!(passed_site, "train.py:12", "{n} ranks");
            assert!(found_site.starts_with(concat!(file!(), ":")), "{n} ranks: {found_site}");
        }
        let send: GroupCall = |group| at(Site::new("send.py", 3), || group.send(&[0u8; 10], R1, 6));
        let receive: GroupCall =
            |group| at(Site::new("train.py", 12), || group.receive(&mut [0u8; 9], R0, 6)).map(|_| ());
        let sites = passed_and_found_sites(&causes(n, 1, LONG_DEADLINE, send, receive));
        assert_eq!(sites, ("train.py:12".to_owned(), "send.py:3".to_owned()), "{n} ranks");
    }
}
