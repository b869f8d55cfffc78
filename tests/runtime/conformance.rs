//! Compares the results of every collective with a naive reference, in blocking and asynchronous calls, for every
//! reduction, world size, length and transport. The tests use only a few element types. The kernels' tests and
//! `bench_results` cover every type with every reduction. All values are small, so that every result is exact in any
//! order of the operands.

mod algorithms;
mod forms;
mod functions;
use std::ops::Range;

use crate::util::ranks::{self, TestTransport};
use crate::util::{if_long_tests_else, runs_long_tests};
use half::bf16;
use ringtrain::group::Checksums;
use ringtrain::verbs::{
    AllGather, AllToAll, Broadcast, Exscan, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use ringtrain::{DType, Element, F32Loc, Group, I64Loc, JoinOptions, Rank, ReduceOp};

const WORLD_SIZES: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];
const LONG_COUNT: usize = 300_007;

/// Returns the number of elements of a long buffer.
fn long_count() -> usize {
    if runs_long_tests() { LONG_COUNT } else { LONG_COUNT / 6 }
}

/// An element type of plain numbers.
trait Number: Element {
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
}

macro_rules! numbers {
    ($($ty:ty: $from:expr, $to:expr);+ $(;)?) => { $( impl Number for $ty {
        fn from_f64(value: f64) -> Self { let from: fn(f64) -> Self = $from; from(value) }
        fn to_f64(self) -> f64 { let to: fn(Self) -> f64 = $to; to(self) }
    } )+ };
}

numbers! {
    bf16: bf16::from_f64, bf16::to_f64;
    f32: |v| v as f32, f64::from;
    f64: |v| v, |v| v;
    u8: |v| v as u8, f64::from;
    i32: |v| v as i32, f64::from;
    i64: |v| v as i64, |v| v as f64;
}

/// A reduction to check. `value(rank, index)` returns the element at `index` of the contribution of `rank`.
/// `expected(ranks, index)` returns the result at `index` of the reduction over `ranks`.
struct ReductionCase<'a, T> {
    op: ReduceOp,
    value: &'a dyn Fn(u32, usize) -> T,
    expected: &'a dyn Fn(Range<u32>, usize) -> T,
}

/// Returns a small value that differs between ranks. For products the value is mostly 1, so that the
/// products stay exact.
fn contributed_value<T: Number>(op: ReduceOp, rank: u32, index: usize) -> T {
    let is_signed = T::DTYPE != DType::U8;
    let mixed = (index as i64 * 7 + i64::from(rank) * 13) % 11 - 5;
    T::from_f64(match op {
        ReduceOp::Product if (index + rank as usize).is_multiple_of(5) => 2.0,
        ReduceOp::Product => 1.0,
        _ if is_signed => mixed as f64,
        _ => mixed.unsigned_abs() as f64,
    })
}

fn expected_reduction<T: Number>(op: ReduceOp, ranks: Range<u32>, index: usize) -> T {
    let truth = |is_true| if is_true { 1.0 } else { 0.0 };
    let n = f64::from(ranks.end - ranks.start);
    let mut values = ranks.map(|rank| contributed_value::<T>(op, rank, index).to_f64());
    T::from_f64(match op {
        ReduceOp::Sum | ReduceOp::PreMulSum => values.sum(),
        ReduceOp::Product => values.product(),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
        // The conversion to an integer truncates, as the library's division of integers does.
        ReduceOp::Average => values.sum::<f64>() / n,
        ReduceOp::BitAnd => values.fold(-1, |bits, value| bits & value as i64) as f64,
        ReduceOp::BitOr => values.fold(0, |bits, value| bits | value as i64) as f64,
        ReduceOp::BitXor => values.fold(0, |bits, value| bits ^ value as i64) as f64,
        ReduceOp::LogicalAnd => truth(values.all(|value| value != 0.0)),
        ReduceOp::LogicalOr => truth(values.any(|value| value != 0.0)),
        ReduceOp::LogicalXor => truth(values.filter(|&value| value != 0.0).count() % 2 == 1),
        ReduceOp::MinLoc | ReduceOp::MaxLoc | ReduceOp::Custom => unreachable!("no reductions of numbers"),
    })
}

/// Returns the lengths of `n` parts. Some lengths are 0, and the sum of all lengths is `count`.
fn uneven_counts(n: usize, count: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..n).map(|rank| count / n * (rank % 3) / 2).collect();
    counts[n / 2] += count - counts.iter().sum::<usize>();
    counts
}

fn part_range(counts: &[usize], rank: Rank) -> Range<usize> {
    let start = counts[..rank.index()].iter().sum();
    start..start + counts[rank.index()]
}

/// Compares the elements one by one, so that a failure names the rank and the element instead of printing a million
/// elements.
#[track_caller]
fn assert_elements<T: Element>(
    found: &[T],
    expected: impl ExactSizeIterator<Item = T>,
    what: &str,
    group: &Group,
) {
    let (n, rank, count) = (group.size(), group.rank(), expected.len());
    assert_eq!(found.len(), count, "{what}, {} elements, rank {rank} of {n}", T::DTYPE);
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(*found, expected, "{what} of {count} x {}, rank {rank} of {n}, [{index}]", T::DTYPE);
    }
}

/// Checks all collectives that reduce. The asynchronous operations are in progress while this function calls the
/// blocking operations.
fn check_reduction<T: Element>(group: &mut Group, count: usize, case: &ReductionCase<'_, T>) {
    let ReductionCase { op, value, expected } = *case;
    let (n, rank) = (group.size().get(), group.rank());
    let root = Rank::new(count as u32 % n);
    let own: Vec<T> = (0..count).map(|index| value(rank.get(), index)).collect();
    let all = || (0..count).map(|index| expected(0..n, index));
    let counts = uneven_counts(n as usize, count);
    let (even_part, uneven_part) = (group.chunk(count, rank), part_range(&counts, rank));
    let of_part = |part: &Range<usize>| part.clone().map(|index| expected(0..n, index));

    let all_reduced = group.all_reduce_async(own.clone(), op).unwrap();
    let reduced = group.call(Reduce::to(root, op)).start(own.clone()).unwrap();
    let scattered = group.call(ReduceScatter::new(op)).start(own.clone()).unwrap();
    let unevenly = group.call(ReduceScatter::new(op).counts(&counts)).start_from(&own).unwrap();

    let mut buffer = own.clone();
    group.all_reduce(&mut buffer, op).unwrap();
    assert_elements(&buffer, all(), &format!("all_reduce {op}"), group);
    buffer.clone_from(&own);
    group.reduce(&mut buffer, op, root).unwrap();
    if rank == root {
        assert_elements(&buffer, all(), &format!("reduce {op}"), group);
    }
    buffer.clone_from(&own);
    assert_eq!(group.reduce_scatter(&mut buffer, op).unwrap(), even_part);
    assert_elements(&buffer[even_part.clone()], of_part(&even_part), &format!("reduce_scatter {op}"), group);
    let found = group.call(ReduceScatter::new(op).counts(&counts)).run_from(&own).unwrap();
    assert_elements(&found, of_part(&uneven_part), &format!("reduce_scatter_uneven {op}"), group);

    let found = unevenly.wait().unwrap();
    assert_elements(&found, of_part(&uneven_part), &format!("reduce_scatter_uneven_async {op}"), group);
    assert_elements(&all_reduced.wait().unwrap(), all(), &format!("all_reduce_async {op}"), group);
    let found = scattered.wait().unwrap();
    assert_elements(
        &found[even_part.clone()],
        of_part(&even_part),
        &format!("reduce_scatter_async {op}"),
        group,
    );
    let found = reduced.wait().unwrap();
    if rank == root {
        assert_elements(&found, all(), &format!("reduce_async {op}"), group);
    }
}

/// Checks `scan` and `exscan`.
fn check_scans<T: Element>(group: &mut Group, count: usize, case: &ReductionCase<'_, T>) {
    let ReductionCase { op, value, expected } = *case;
    let rank = group.rank().get();
    let own: Vec<T> = (0..count).map(|index| value(rank, index)).collect();
    let upto = |end: u32| (0..count).map(move |index| expected(0..end, index));
    let scanned = group.call(Scan::new(op)).start(own.clone()).unwrap();
    let exscanned = group.call(Exscan::new(op)).start_from(&own).unwrap();
    let mut buffer = own.clone();
    group.scan(&mut buffer, op).unwrap();
    assert_elements(&buffer, upto(rank + 1), &format!("scan {op}"), group);
    for (found, what) in [
        (group.call(Exscan::new(op)).run_from(&own).unwrap(), "exscan"),
        (exscanned.wait().unwrap(), "exscan_async"),
    ] {
        let expected: Vec<T> = if rank == 0 { Vec::new() } else { upto(rank).collect() };
        assert_elements(&found, expected.into_iter(), &format!("{what} {op}"), group);
    }
    assert_elements(&scanned.wait().unwrap(), upto(rank + 1), &format!("scan_async {op}"), group);
}

/// Checks the collectives without a root that only move elements.
fn check_unrooted_data_movement<T: Element>(
    group: &mut Group,
    count: usize,
    value: &dyn Fn(u32, usize) -> T,
) {
    let (size, rank) = (group.size(), group.rank());
    let n = size.as_usize();
    let own: Vec<T> = (0..count).map(|index| value(rank.get(), index)).collect();
    let counts = uneven_counts(n, count);
    let uneven_part = part_range(&counts, rank);

    let mut chunks = own.clone();
    let gathered = group.call(AllGather::new()).start(own.clone()).unwrap();
    let unevenly =
        group.call(AllGather::new().counts(&counts)).start_from(&own[uneven_part.clone()]).unwrap();
    group.all_gather(&mut chunks).unwrap();
    let owner = |index| size.ranks().find(|&owner| group.chunk(count, owner).contains(&index)).unwrap();
    let expected: Vec<T> = (0..count).map(|index| value(owner(index).get(), index)).collect();
    assert_elements(&chunks, expected.iter().copied(), "all_gather", group);
    assert_elements(&gathered.wait().unwrap(), expected.into_iter(), "all_gather_async", group);

    let of_part = |owner: Rank| part_range(&counts, owner).map(move |index| value(owner.get(), index));
    let expected: Vec<T> = size.ranks().flat_map(of_part).collect();
    let found = group.call(AllGather::new().counts(&counts)).run_from(&own[uneven_part.clone()]).unwrap();
    assert_elements(&found, expected.iter().copied(), "all_gather_uneven", group);
    assert_elements(&unevenly.wait().unwrap(), expected.iter().copied(), "all_gather_uneven_async", group);
    let mut output = vec![T::zeroed(); count];
    output[uneven_part.clone()].copy_from_slice(&own[uneven_part.clone()]);
    assert_eq!(group.call(AllGather::new().counts(&counts)).run(&mut output).unwrap(), 0..count);
    assert_elements(&output, expected.into_iter(), "all_gather_uneven in place", group);
    // Every rank receives a whole buffer of each rank, so the buffer is kept short.
    let short = &own[..count.min(100)];
    let expected: Vec<T> =
        size.ranks().flat_map(|owner| (0..short.len()).map(move |index| value(owner.get(), index))).collect();
    assert_elements(
        &group.call(AllGather::new()).run_from(short).unwrap(),
        expected.into_iter(),
        "all_gather_from",
        group,
    );
}

/// Checks broadcast, scatter and gather.
fn check_rooted_data_movement<T: Element>(group: &mut Group, count: usize, value: &dyn Fn(u32, usize) -> T) {
    let (size, rank) = (group.size(), group.rank());
    let root = Rank::new((count as u32 + 1) % size.get());
    let (is_root, counts) = (rank == root, uneven_counts(size.as_usize(), count));
    let own: Vec<T> = (0..count).map(|index| value(rank.get(), index)).collect();
    let of_root = |range: Range<usize>| range.map(|index| value(root.get(), index));

    let told = group.call(Broadcast::from(root)).start(own.clone()).unwrap();
    let scattered = group
        .call(Scatter::from(root).count(count))
        .start_from(if is_root { &own[..] } else { &[] })
        .unwrap();
    let each = count / size.as_usize();
    let gathered = group.call(Gather::to(root)).start_from(&own[..each]).unwrap();

    let mut buffer = own.clone();
    group.broadcast(&mut buffer, root).unwrap();
    assert_elements(&buffer, of_root(0..count), "broadcast", group);
    let chunk = group.chunk(count, rank);
    let found =
        group.call(Scatter::from(root).count(count)).run_from(if is_root { &own[..] } else { &[] }).unwrap();
    assert_elements(&found, of_root(chunk.clone()), "scatter", group);
    let own_part = part_range(&counts, rank);
    let found = group
        .call(Scatter::from(root).counts(&counts))
        .run_from(if is_root { &own[..] } else { &[] })
        .unwrap();
    assert_elements(&found, of_root(own_part.clone()), "scatter_uneven", group);

    let of = |owner: Rank, range: Range<usize>| range.map(move |index| value(owner.get(), index));
    let even: Vec<T> = size.ranks().filter(|_| is_root).flat_map(|owner| of(owner, 0..each)).collect();
    let found = group.call(Gather::to(root)).run_from(&own[..each]).unwrap();
    assert_elements(&found, even.iter().copied(), "gather", group);
    let parts = size.ranks().filter(|_| is_root).flat_map(|owner| of(owner, part_range(&counts, owner)));
    let parts: Vec<T> = parts.collect();
    let found = group.call(Gather::to(root).counts(&counts)).run_from(&own[own_part]).unwrap();
    assert_elements(&found, parts.into_iter(), "gather_uneven", group);

    assert_elements(&gathered.wait().unwrap(), even.into_iter(), "gather_async", group);
    assert_elements(&told.wait().unwrap(), of_root(0..count), "broadcast_async", group);
    assert_elements(&scattered.wait().unwrap(), of_root(chunk), "scatter_async", group);
}

/// Checks the collectives in which every rank sends a part to every rank, also to itself.
fn check_exchanges<T: Element>(group: &mut Group, count: usize, value: &dyn Fn(u32, usize) -> T) {
    let (size, rank) = (group.size(), group.rank());
    let n = size.as_usize();
    // Returns the elements that rank `from` sends to rank `to`.
    let of_pair = |from: Rank, to: Rank, count: usize| {
        (0..count).map(move |index| value(from.get() * 31 + to.get(), index))
    };
    let each = count / n;
    let own: Vec<T> = size.ranks().flat_map(|to| of_pair(rank, to, each)).collect();
    let expected: Vec<T> = size.ranks().flat_map(|from| of_pair(from, rank, each)).collect();
    let handle = group.call(AllToAll::new()).start_from(&own).unwrap();
    let barrier = group.barrier_async().unwrap();
    assert_elements(
        &group.call(AllToAll::new()).run_from(&own).unwrap(),
        expected.iter().copied(),
        "all_to_all",
        group,
    );
    // Parts of different lengths, some of them empty.
    let length = |from: Rank, to: Rank| (from.index() * 2 + to.index()) % 3 * each;
    let counts: Vec<usize> = size.ranks().map(|to| length(rank, to)).collect();
    let from_counts: Vec<usize> = size.ranks().map(|from| length(from, rank)).collect();
    let uneven: Vec<T> = size.ranks().flat_map(|to| of_pair(rank, to, length(rank, to))).collect();
    let unevenly = group.call(AllToAll::new().counts(&counts, &from_counts)).start_from(&uneven).unwrap();
    let parts: Vec<T> = size.ranks().flat_map(|from| of_pair(from, rank, length(from, rank))).collect();
    let found = group.call(AllToAll::new().counts(&counts, &from_counts)).run_from(&uneven).unwrap();
    assert_elements(&found, parts.iter().copied(), "all_to_all_uneven", group);
    assert_elements(&unevenly.wait().unwrap(), parts.into_iter(), "all_to_all_uneven_async", group);
    barrier.wait().unwrap();
    assert_elements(&handle.wait().unwrap(), expected.into_iter(), "all_to_all_async", group);
    group.barrier().unwrap();
}

fn tested_lengths(n: u32) -> [usize; 5] {
    [0, 1, n as usize - 1, n as usize + 1, if runs_long_tests() { 1000 } else { 400 }]
}

/// Checks one element type with every reduction that is defined on it.
fn check_numbers<T: Number>(group: &mut Group) {
    check_reductions::<T>(group, ReduceOp::ALL);
}

/// Checks one element type with the given reductions, except reductions that are not defined on the type.
fn check_reductions<T: Number>(group: &mut Group, reductions: &[ReduceOp]) {
    let n = group.size().get();
    for count in tested_lengths(n) {
        for &op in reductions.iter().filter(|op| op.applies_to(T::DTYPE) && **op != ReduceOp::Custom) {
            let case = ReductionCase {
                op,
                value: &|rank, index| contributed_value::<T>(op, rank, index),
                expected: &|ranks, index| expected_reduction::<T>(op, ranks, index),
            };
            check_reduction(group, count, &case);
            if op != ReduceOp::Average {
                check_scans(group, count, &case);
            }
        }
        check_data_movement::<T>(group, count, &|rank, index| contributed_value(ReduceOp::Sum, rank, index));
    }
}

fn check_data_movement<T: Element>(group: &mut Group, count: usize, value: &dyn Fn(u32, usize) -> T) {
    check_unrooted_data_movement(group, count, value);
    check_rooted_data_movement(group, count, value);
    check_exchanges(group, count, value);
}

/// Checks one type of values with an index. The lowest index decides ties between ranks.
fn check_values_with_index<T: Element>(group: &mut Group, make: fn(i64, u64) -> T) {
    let pair = |rank: u32, index: usize| {
        let mixed = (index as i64 * 5 + i64::from(rank) * 7) % 3 - 1;
        (mixed, u64::from(rank * 5 % 8))
    };
    for count in tested_lengths(group.size().get()) {
        for op in [ReduceOp::MinLoc, ReduceOp::MaxLoc] {
            let sign = if op == ReduceOp::MinLoc { 1 } else { -1 };
            let case = ReductionCase {
                op,
                value: &|rank, index| {
                    let (value, place) = pair(rank, index);
                    make(value, place)
                },
                expected: &|ranks, index| {
                    let best = ranks.map(|rank| pair(rank, index)).min_by_key(|one| (sign * one.0, one.1));
                    let (value, place) = best.expect("there is a rank");
                    make(value, place)
                },
            };
            check_reduction(group, count, &case);
            check_scans(group, count, &case);
            check_data_movement(group, count, case.value);
        }
    }
}

/// Runs `work` on `n` ranks over sockets, then in shared memory, then on several hosts.
fn run_on_every_transport(n: u32, work: impl Fn(Group) + Send + Sync + Copy + 'static) {
    for transport in TestTransport::ALL {
        ranks::run_with(n, |options| transport.apply(options), work);
    }
}

#[test]
fn every_collective_is_right_for_every_reduction() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
        run_on_every_transport(n, |mut group| {
            check_numbers::<bf16>(&mut group);
            // `small_segments_with_checksums_give_right_results` has `i64` in the short tests.
            if runs_long_tests() {
                check_numbers::<u8>(&mut group);
                check_numbers::<i64>(&mut group);
            }
        });
    }
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[1, 5]) {
        run_on_every_transport(n, |mut group| check_numbers::<f32>(&mut group));
    }
}

/// Each segment has 1000 bytes and a checksum. Segments do not end where chunks end.
#[test]
fn small_segments_with_checksums_give_right_results() {
    let adjust = |options: &mut JoinOptions| {
        options.segment_bytes = 1000;
        options.checksums = Checksums::On;
    };
    ranks::run_with(3, adjust, |mut group| {
        check_numbers::<bf16>(&mut group);
        check_numbers::<i64>(&mut group);
    });
}

#[test]
#[ignore = "runs with tools/test --full"]
fn every_collective_is_right_for_values_with_an_index() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
        run_on_every_transport(n, |mut group| {
            check_values_with_index(&mut group, |value, index| F32Loc::new(value as f32, index as u32));
            check_values_with_index(&mut group, I64Loc::new);
        });
    }
}

#[test]
fn every_collective_is_right_for_long_buffers() {
    fn check<T: Number>(group: &mut Group, op: ReduceOp) {
        let value = |rank, index| contributed_value::<T>(op, rank, index);
        let case = ReductionCase {
            op,
            value: &value,
            expected: &|ranks, index| expected_reduction::<T>(op, ranks, index),
        };
        check_reduction(group, long_count(), &case);
        check_scans(group, long_count(), &case);
        check_data_movement(group, long_count(), &value);
    }
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
        run_on_every_transport(n, |mut group| {
            check::<f32>(&mut group, ReduceOp::Sum);
            if runs_long_tests() {
                check::<u8>(&mut group, ReduceOp::Max);
            }
        });
    }
}

/// The forms of a collective take the same input, but in different buffers: for example `all_reduce`,
/// `all_reduce_from` and `all_reduce_into`.
#[test]
#[ignore = "runs with tools/test --full"]
fn every_form_of_every_collective_is_right() {
    fn check<T: Number>(group: &mut Group, op: ReduceOp, counts: &[usize]) {
        for &count in counts {
            let value = |rank, index| contributed_value::<T>(op, rank, index);
            let case = ReductionCase {
                op,
                value: &value,
                expected: &|ranks, index| expected_reduction::<T>(op, ranks, index),
            };
            forms::check_reduction_forms(group, count, &case);
            if op != ReduceOp::Average {
                forms::check_scan_forms(group, count, &case);
            }
            forms::check_data_movement_forms(group, count, &value);
        }
    }
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
        run_on_every_transport(n, |mut group| {
            let lengths = tested_lengths(group.size().get());
            check::<f32>(&mut group, ReduceOp::Average, &lengths);
            check::<bf16>(&mut group, ReduceOp::Max, &lengths);
            check::<u8>(&mut group, ReduceOp::LogicalOr, &lengths);
            check::<i64>(&mut group, ReduceOp::Sum, &lengths);
            check::<f32>(&mut group, ReduceOp::Min, &[long_count() / 4]);
            forms::check_refusals(&mut group);
        });
    }
}

/// Rounded sums depend on the order of the operands. All ranks must still get the same bits, with
/// blocking and with asynchronous calls.
#[test]
fn rounded_sums_have_the_same_bits_on_every_rank() {
    for n in WORLD_SIZES {
        // The test uses only sockets, because collectives in shared memory always reduce in rank order.
        let results = ranks::run(n, |mut group| {
            let rank = group.rank().get() as f32;
            let own: Vec<f32> = (0..70_001).map(|i| ((i as f32) * 0.37 + rank * 1.7).sin() * 1e3).collect();
            let handle = group.all_reduce_async(own.clone(), ReduceOp::Sum).unwrap();
            let mut blocking = own;
            group.all_reduce(&mut blocking, ReduceOp::Sum).unwrap();
            let bits = |sums: Vec<f32>| sums.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let blocking = bits(blocking);
            assert!(bits(handle.wait().unwrap()) == blocking);
            blocking
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "n={n}");
    }
}
