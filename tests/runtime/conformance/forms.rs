//! Checks the forms of each collective: `.._from`, `.._into` and `.._in_place`. The forms differ in which buffers
//! hold the input and the result.

use std::ops::Range;

use ringtrain::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, Exscan, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use ringtrain::{Element, Group, Rank, ReduceOp};

use super::{ReductionCase, assert_elements, part_range, uneven_counts};

/// Checks the forms of the reductions that leave the input unchanged.
pub(super) fn check_reduction_forms<T: Element>(
    group: &mut Group,
    count: usize,
    case: &ReductionCase<'_, T>,
) {
    let ReductionCase { op, value, expected } = *case;
    let (n, rank) = (group.size().get(), group.rank());
    let root = Rank::new(count as u32 % n);
    let own: Vec<T> = (0..count).map(|index| value(rank.get(), index)).collect();
    let filler = vec![T::zeroed(); count];
    let all: Vec<T> = (0..count).map(|index| expected(0..n, index)).collect();
    let (chunk, counts) = (group.chunk(count, rank), uneven_counts(n as usize, count));
    let uneven_part = part_range(&counts, rank);

    let all_reduced = group.call(AllReduce::new(op)).start_from(&own).unwrap();
    let reduced = group.call(Reduce::to(root, op)).start_from(&own).unwrap();
    let scattered = group.call(ReduceScatter::new(op)).start_from(&own).unwrap();
    let check = |group: &Group, found: &[T], range: Range<usize>, what: &str| {
        assert_elements(found, all[range].iter().copied(), what, group);
    };
    let found = group.call(AllReduce::new(op)).run_from(&own).unwrap();
    check(group, &found, 0..count, "all_reduce_from");
    let mut output = filler.clone();
    group.call(AllReduce::new(op)).run_into(&own, &mut output).unwrap();
    check(group, &output, 0..count, "all_reduce_into");
    let of_root = if rank == root { 0..count } else { 0..0 };
    let found = group.call(Reduce::to(root, op)).run_from(&own).unwrap();
    check(group, &found, of_root.clone(), "reduce_from");
    let mut output = filler[of_root.clone()].to_vec();
    group.call(Reduce::to(root, op)).run_into(&own, &mut output).unwrap();
    check(group, &output, of_root.clone(), "reduce_into");
    let found = group.call(ReduceScatter::new(op)).run_from(&own).unwrap();
    check(group, &found, chunk.clone(), "reduce_scatter_from");
    let mut output = filler[chunk.clone()].to_vec();
    group.call(ReduceScatter::new(op)).run_into(&own, &mut output).unwrap();
    check(group, &output, chunk.clone(), "reduce_scatter_into");
    let mut output = filler[uneven_part.clone()].to_vec();
    group.call(ReduceScatter::new(op).counts(&counts)).run_into(&own, &mut output).unwrap();
    check(group, &output, uneven_part, "reduce_scatter_uneven_into");

    check(group, &scattered.wait().unwrap(), chunk, "reduce_scatter_from_async");
    check(group, &reduced.wait().unwrap(), of_root, "reduce_from_async");
    check(group, &all_reduced.wait().unwrap(), 0..count, "all_reduce_from_async");
}

pub(super) fn check_scan_forms<T: Element>(group: &mut Group, count: usize, case: &ReductionCase<'_, T>) {
    let ReductionCase { op, value, expected } = *case;
    let rank = group.rank().get();
    let own: Vec<T> = (0..count).map(|index| value(rank, index)).collect();
    let upto = |end: u32| (0..count).map(move |index| expected(0..end, index));
    let scanned = group.call(Scan::new(op)).start_from(&own).unwrap();
    assert_elements(&group.call(Scan::new(op)).run_from(&own).unwrap(), upto(rank + 1), "scan_from", group);
    let mut output = vec![T::zeroed(); count];
    group.call(Scan::new(op)).run_into(&own, &mut output).unwrap();
    assert_elements(&output, upto(rank + 1), "scan_into", group);
    // In an exscan the first rank has no result, and its output buffer is left unchanged.
    let before: Vec<T> = if rank == 0 { own.clone() } else { upto(rank).collect() };
    output.clone_from(&own);
    group.call(Exscan::new(op)).run_into(&own, &mut output).unwrap();
    assert_elements(&output, before.iter().copied(), "exscan_into", group);
    output.clone_from(&own);
    group.call(Exscan::new(op)).run(&mut output).unwrap();
    assert_elements(&output, before.into_iter(), "exscan_in_place", group);
    assert_elements(&scanned.wait().unwrap(), upto(rank + 1), "scan_from_async", group);
}

/// Checks all forms of gather, all-gather, scatter, broadcast and all-to-all.
pub(super) fn check_data_movement_forms<T: Element>(
    group: &mut Group,
    count: usize,
    value: &dyn Fn(u32, usize) -> T,
) {
    check_gathers(group, count, value);
    check_scatters(group, count, value);
    check_exchanges(group, count, value);
}

fn check_gathers<T: Element>(group: &mut Group, count: usize, value: &dyn Fn(u32, usize) -> T) {
    let (size, rank) = (group.size(), group.rank());
    let root = Rank::new(count as u32 % size.get());
    let (n, is_root) = (size.as_usize(), rank == root);
    let own: Vec<T> = (0..count).map(|index| value(rank.get(), index)).collect();
    let counts = uneven_counts(n, count);
    let elements_of = |owner: Rank, range: Range<usize>| range.map(move |index| value(owner.get(), index));
    let uneven_output: Vec<T> =
        size.ranks().flat_map(|owner| elements_of(owner, part_range(&counts, owner))).collect();
    let chunks: Vec<T> =
        size.ranks().flat_map(|owner| elements_of(owner, group.chunk(count, owner))).collect();
    let own_part = &own[part_range(&counts, rank)];

    // Every rank receives the whole buffer of every other rank, so use only the first elements of the buffer.
    let short = &own[..count.min(100)];
    let even: Vec<T> = size.ranks().flat_map(|owner| elements_of(owner, 0..short.len())).collect();
    let gathered = group.call(AllGather::new()).start_from(short).unwrap();
    let to_root = group.call(Gather::to(root).counts(&counts)).start_from(own_part).unwrap();
    let mut output = vec![T::zeroed(); even.len()];
    group.call(AllGather::new()).run_into(short, &mut output).unwrap();
    assert_elements(&output, even.iter().copied(), "all_gather_into", group);
    let mut output = vec![T::zeroed(); count];
    group.call(AllGather::new().counts(&counts)).run_into(own_part, &mut output).unwrap();
    assert_elements(&output, uneven_output.iter().copied(), "all_gather_uneven_into", group);

    let of_root = |all: &Vec<T>| if is_root { all.clone() } else { Vec::new() };
    let root_output = |all: &Vec<T>| vec![T::zeroed(); if is_root { all.len() } else { 0 }];
    let mut output = root_output(&even);
    group.call(Gather::to(root)).run_into(short, &mut output).unwrap();
    assert_elements(&output, of_root(&even).into_iter(), "gather_into", group);
    let mut output = root_output(&uneven_output);
    group.call(Gather::to(root).counts(&counts)).run_into(own_part, &mut output).unwrap();
    assert_elements(&output, of_root(&uneven_output).into_iter(), "gather_uneven_into", group);
    let mut output = own.clone();
    group.call(Gather::to(root)).run(&mut output).unwrap();
    let expected = if is_root { chunks } else { own };
    assert_elements(&output, expected.into_iter(), "gather_in_place", group);

    let found = to_root.wait().unwrap();
    assert_elements(&found, of_root(&uneven_output).into_iter(), "gather_uneven_async", group);
    assert_elements(&gathered.wait().unwrap(), even.into_iter(), "all_gather_from_async", group);
}

fn check_scatters<T: Element>(group: &mut Group, count: usize, value: &dyn Fn(u32, usize) -> T) {
    let (size, rank) = (group.size(), group.rank());
    let root = Rank::new((count as u32 + 1) % size.get());
    let counts = uneven_counts(size.as_usize(), count);
    let own: Vec<T> = (0..count).map(|index| value(rank.get(), index)).collect();
    let of_root = |range: Range<usize>| range.map(|index| value(root.get(), index));
    let input = if rank == root { &own[..] } else { &[] };
    let (chunk, uneven_part) = (group.chunk(count, rank), part_range(&counts, rank));

    let from_root = group.call(Broadcast::from(root).count(count)).start_from(input).unwrap();
    let scattered = group.call(Scatter::from(root).counts(&counts)).start_from(input).unwrap();
    let found = group.call(Broadcast::from(root).count(count)).run_from(input).unwrap();
    assert_elements(&found, of_root(0..count), "broadcast_from", group);
    let mut output = vec![T::zeroed(); chunk.len()];
    group.call(Scatter::from(root).count(count)).run_into(input, &mut output).unwrap();
    assert_elements(&output, of_root(chunk.clone()), "scatter_into", group);
    let mut output = vec![T::zeroed(); uneven_part.len()];
    group.call(Scatter::from(root).counts(&counts)).run_into(input, &mut output).unwrap();
    assert_elements(&output, of_root(uneven_part.clone()), "scatter_uneven_into", group);
    let mut output = own.clone();
    assert_eq!(group.call(Scatter::from(root)).run(&mut output).unwrap(), chunk);
    let mut expected = own;
    expected.splice(chunk.clone(), of_root(chunk));
    assert_elements(&output, expected.into_iter(), "scatter_in_place", group);
    assert_elements(&scattered.wait().unwrap(), of_root(uneven_part), "scatter_uneven_async", group);
    assert_elements(&from_root.wait().unwrap(), of_root(0..count), "broadcast_from_async", group);
}

fn check_exchanges<T: Element>(group: &mut Group, count: usize, value: &dyn Fn(u32, usize) -> T) {
    let (size, rank) = (group.size(), group.rank());
    let of_pair = |from: Rank, to: Rank, count: usize| {
        (0..count).map(move |index| value(from.get() * 31 + to.get(), index))
    };
    let each = count / size.as_usize();
    let own: Vec<T> = size.ranks().flat_map(|to| of_pair(rank, to, each)).collect();
    let expected: Vec<T> = size.ranks().flat_map(|from| of_pair(from, rank, each)).collect();
    let mut output = vec![T::zeroed(); own.len()];
    group.call(AllToAll::new()).run_into(&own, &mut output).unwrap();
    assert_elements(&output, expected.iter().copied(), "all_to_all_into", group);
    output.clone_from(&own);
    group.call(AllToAll::new()).run(&mut output).unwrap();
    assert_elements(&output, expected.into_iter(), "all_to_all_in_place", group);
    let length = |from: Rank, to: Rank| (from.index() * 2 + to.index()) % 3 * each;
    let counts: Vec<usize> = size.ranks().map(|to| length(rank, to)).collect();
    let from_counts: Vec<usize> = size.ranks().map(|from| length(from, rank)).collect();
    let uneven: Vec<T> = size.ranks().flat_map(|to| of_pair(rank, to, length(rank, to))).collect();
    let parts: Vec<T> = size.ranks().flat_map(|from| of_pair(from, rank, length(from, rank))).collect();
    let mut output = vec![T::zeroed(); parts.len()];
    group.call(AllToAll::new().counts(&counts, &from_counts)).run_into(&uneven, &mut output).unwrap();
    assert_elements(&output, parts.into_iter(), "all_to_all_uneven_into", group);
}

/// Checks that a call fails if an output has the wrong length or a count exceeds the address space, and that the
/// group can still be used.
pub(super) fn check_refusals(group: &mut Group) {
    let n = group.size().as_usize();
    let mut long = vec![0f64; 2 * n + 1];
    let own = vec![1f64; n];
    let invalid = |result: Result<(), ringtrain::Error>| {
        assert!(matches!(result, Err(ringtrain::Error::InvalidCounts(_))), "{result:?}");
    };
    invalid(group.call(AllReduce::new(ReduceOp::Sum)).run_into(&own, &mut long));
    invalid(group.call(ReduceScatter::new(ReduceOp::Sum)).run_into(&own, &mut long));
    invalid(group.call(Scan::new(ReduceOp::Sum)).run_into(&own, &mut long));
    invalid(group.call(Exscan::new(ReduceOp::Sum)).run_into(&own, &mut long));
    invalid(group.call(AllGather::new()).run_into(&own[..1], &mut long));
    invalid(group.call(AllToAll::new()).run_into(&own, &mut long));
    invalid(group.call(Scatter::from(Rank::ZERO).count(n)).run_into(&own, &mut long));
    for huge in [usize::MAX, isize::MAX as usize / 8 + 1] {
        let mut counts = vec![0; n];
        counts[n - 1] = huge;
        counts[group.rank().index()] = if group.rank().index() == n - 1 { huge } else { 1 };
        let input = &own[..1];
        invalid(group.call(AllGather::new().counts(&counts)).run_from(input).map(|_| ()));
        invalid(group.call(Gather::to(Rank::ZERO).counts(&counts)).run_from(input).map(|_| ()));
        invalid(group.call(Scatter::from(Rank::ZERO).counts(&counts)).run_from(input).map(|_| ()));
        invalid(group.call(ReduceScatter::new(ReduceOp::Sum).counts(&counts)).run_from(input).map(|_| ()));
        invalid(group.call(AllToAll::new().counts(&counts, &counts)).run_from(input).map(|_| ()));
    }
    group.barrier().unwrap();
}
