//! The lengths, roots, partitions and buffers with which schedules are proved.

use super::{SymbolicValue, proof_limits};
use crate::schedule::partition::Partition;
use crate::types::{Rank, WorldSize};

/// Returns the lengths to test, in elements.
pub(super) fn tested_lengths(world: WorldSize) -> Vec<usize> {
    let n = world.as_usize();
    let mut lengths = vec![0, 1, n - 1, n, n + 1, 2 * n + 1, 3 * n - 1, proof_limits().count_max];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Returns the roots to test: the first rank, the last rank and ranks between them.
pub(super) fn tested_roots(world: WorldSize) -> Vec<Rank> {
    let mut roots: Vec<Rank> =
        [0, 1, 5, world.get() - 1].map(|shift| world.rank_after(Rank::ZERO, shift)).into();
    roots.sort_unstable();
    roots.dedup();
    roots
}

/// Returns a buffer that contains the contribution of `rank` to every element.
pub(super) fn own_contribution(_: WorldSize, rank: Rank, count: usize) -> Vec<SymbolicValue> {
    (0..count).map(|element| SymbolicValue::contribution(rank, element)).collect()
}

/// Returns a buffer in which every element is the reduction of the contributions of all ranks.
pub(super) fn all_contributions(world: WorldSize, count: usize) -> Vec<SymbolicValue> {
    (0..count).map(|element| SymbolicValue::from_first_ranks(world.get(), element)).collect()
}

/// Returns the partition of test case number `case`. In even cases, the lengths of the parts differ by at most one. In
/// odd cases, one rank has all elements, or the parts grow with the rank and the first parts are often empty.
pub(super) fn tested_partition(count: usize, world: WorldSize, case: usize) -> Partition {
    let n = world.as_usize();
    let upto = |index: usize| count * index.pow(2) / n.pow(2);
    let counts: Vec<usize> = match (case % 2, (n + count) % 3) {
        (0, _) => return Partition::even(count, world),
        (_, 0) => (0..n).map(|index| if index == count % n { count } else { 0 }).collect(),
        (_, _) => (0..n).map(|index| upto(index + 1) - upto(index)).collect(),
    };
    Partition::from_counts(&counts).expect("the sum of the counts fits a usize")
}

/// Returns a buffer for the parts of all ranks, which contains only the part of `rank`.
pub(super) fn own_part(partition: &Partition, rank: Rank) -> Vec<SymbolicValue> {
    let own = partition.range(rank);
    let value = |element| {
        if own.contains(&element) {
            SymbolicValue::contribution(rank, element)
        } else {
            SymbolicValue::UNSPECIFIED
        }
    };
    (0..partition.total()).map(value).collect()
}

/// Returns a buffer that contains the parts of all ranks.
pub(super) fn every_part(partition: &Partition, world: WorldSize) -> Vec<SymbolicValue> {
    let part = |rank| partition.range(rank).map(move |element| SymbolicValue::contribution(rank, element));
    world.ranks().flat_map(part).collect()
}
