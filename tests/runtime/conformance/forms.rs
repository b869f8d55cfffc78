//! Checks the forms of each collective: `.._from`, `.._into` and `.._in_place`. The forms differ in which buffers
//! hold the input and the result.

use std::ops::Range;

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

    let all_reduced = group.all_reduce_from_async(&own, op).unwrap();
    let reduced = group.reduce_from_async(&own, op, root).unwrap();
    let scattered = group.reduce_scatter_from_async(&own, op).unwrap();
    let check = |group: &Group, found: &[T], range: Range<usize>, what: &str| {
        assert_elements(found, all[range].iter().copied(), what, group);
    };
    let found = group.all_reduce_from(&own, op).unwrap();
    check(group, &found, 0..count, "all_reduce_from");
    let mut output = filler.clone();
    group.all_reduce_into(&own, &mut output, op).unwrap();
    check(group, &output, 0..count, "all_reduce_into");
    let of_root = if rank == root { 0..count } else { 0..0 };
    let found = group.reduce_from(&own, op, root).unwrap();
    check(group, &found, of_root.clone(), "reduce_from");
    let mut output = filler[of_root.clone()].to_vec();
    group.reduce_into(&own, &mut output, op, root).unwrap();
    check(group, &output, of_root.clone(), "reduce_into");
    let found = group.reduce_scatter_from(&own, op).unwrap();
    check(group, &found, chunk.clone(), "reduce_scatter_from");
    let mut output = filler[chunk.clone()].to_vec();
    group.reduce_scatter_into(&own, &mut output, op).unwrap();
    check(group, &output, chunk.clone(), "reduce_scatter_into");
    let mut output = filler[uneven_part.clone()].to_vec();
    group.reduce_scatter_uneven_into(&own, &mut output, &counts, op).unwrap();
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
    let scanned = group.scan_from_async(&own, op).unwrap();
    assert_elements(&group.scan_from(&own, op).unwrap(), upto(rank + 1), "scan_from", group);
    let mut output = vec![T::zeroed(); count];
    group.scan_into(&own, &mut output, op).unwrap();
    assert_elements(&output, upto(rank + 1), "scan_into", group);
    // In an exscan the first rank has no result, and its output buffer is left unchanged.
    let before: Vec<T> = if rank == 0 { own.clone() } else { upto(rank).collect() };
    output.clone_from(&own);
    group.exscan_into(&own, &mut output, op).unwrap();
    assert_elements(&output, before.iter().copied(), "exscan_into", group);
    output.clone_from(&own);
    group.exscan_in_place(&mut output, op).unwrap();
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
    let gathered = group.all_gather_from_async(short).unwrap();
    let to_root = group.gather_uneven_async(own_part, &counts, root).unwrap();
    let mut output = vec![T::zeroed(); even.len()];
    group.all_gather_into(short, &mut output).unwrap();
    assert_elements(&output, even.iter().copied(), "all_gather_into", group);
    let mut output = vec![T::zeroed(); count];
    group.all_gather_uneven_into(own_part, &mut output, &counts).unwrap();
    assert_elements(&output, uneven_output.iter().copied(), "all_gather_uneven_into", group);

    let of_root = |all: &Vec<T>| if is_root { all.clone() } else { Vec::new() };
    let root_output = |all: &Vec<T>| vec![T::zeroed(); if is_root { all.len() } else { 0 }];
    let mut output = root_output(&even);
    group.gather_into(short, &mut output, root).unwrap();
    assert_elements(&output, of_root(&even).into_iter(), "gather_into", group);
    let mut output = root_output(&uneven_output);
    group.gather_uneven_into(own_part, &mut output, &counts, root).unwrap();
    assert_elements(&output, of_root(&uneven_output).into_iter(), "gather_uneven_into", group);
    let mut output = own.clone();
    group.gather_in_place(&mut output, root).unwrap();
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

    let from_root = group.broadcast_from_async(input, count, root).unwrap();
    let scattered = group.scatter_uneven_async(input, &counts, root).unwrap();
    let found = group.broadcast_from(input, count, root).unwrap();
    assert_elements(&found, of_root(0..count), "broadcast_from", group);
    let mut output = vec![T::zeroed(); chunk.len()];
    group.scatter_into(input, &mut output, count, root).unwrap();
    assert_elements(&output, of_root(chunk.clone()), "scatter_into", group);
    let mut output = vec![T::zeroed(); uneven_part.len()];
    group.scatter_uneven_into(input, &mut output, &counts, root).unwrap();
    assert_elements(&output, of_root(uneven_part.clone()), "scatter_uneven_into", group);
    let mut output = own.clone();
    assert_eq!(group.scatter_in_place(&mut output, root).unwrap(), chunk);
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
    group.all_to_all_into(&own, &mut output).unwrap();
    assert_elements(&output, expected.iter().copied(), "all_to_all_into", group);
    output.clone_from(&own);
    group.all_to_all_in_place(&mut output).unwrap();
    assert_elements(&output, expected.into_iter(), "all_to_all_in_place", group);
    let length = |from: Rank, to: Rank| (from.index() * 2 + to.index()) % 3 * each;
    let counts: Vec<usize> = size.ranks().map(|to| length(rank, to)).collect();
    let from_counts: Vec<usize> = size.ranks().map(|from| length(from, rank)).collect();
    let uneven: Vec<T> = size.ranks().flat_map(|to| of_pair(rank, to, length(rank, to))).collect();
    let parts: Vec<T> = size.ranks().flat_map(|from| of_pair(from, rank, length(from, rank))).collect();
    let mut output = vec![T::zeroed(); parts.len()];
    group.all_to_all_uneven_into(&uneven, &mut output, &counts, &from_counts).unwrap();
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
    invalid(group.all_reduce_into(&own, &mut long, ReduceOp::Sum));
    invalid(group.reduce_scatter_into(&own, &mut long, ReduceOp::Sum));
    invalid(group.scan_into(&own, &mut long, ReduceOp::Sum));
    invalid(group.exscan_into(&own, &mut long, ReduceOp::Sum));
    invalid(group.all_gather_into(&own[..1], &mut long));
    invalid(group.all_to_all_into(&own, &mut long));
    invalid(group.scatter_into(&own, &mut long, n, Rank::ZERO));
    for huge in [usize::MAX, isize::MAX as usize / 8 + 1] {
        let mut counts = vec![0; n];
        counts[n - 1] = huge;
        counts[group.rank().index()] = if group.rank().index() == n - 1 { huge } else { 1 };
        let input = &own[..1];
        invalid(group.all_gather_uneven(input, &counts).map(|_| ()));
        invalid(group.gather_uneven(input, &counts, Rank::ZERO).map(|_| ()));
        invalid(group.scatter_uneven(input, &counts, Rank::ZERO).map(|_| ()));
        invalid(group.reduce_scatter_uneven(input, &counts, ReduceOp::Sum).map(|_| ()));
        invalid(group.all_to_all_uneven(input, &counts, &counts).map(|_| ()));
    }
    group.barrier().unwrap();
}
