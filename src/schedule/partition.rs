//! Divides a buffer into one chunk for each rank, and a chunk into segments, which are sent one after another.

use std::ops::Range;

use crate::types::{Rank, WorldSize};

/// Returns the chunk of `rank` in a buffer of `count` elements. Chunks are contiguous and in rank order. The lengths
/// of two chunks differ by at most one, and the first `count % world` chunks are longer than the rest.
pub fn chunk(count: usize, world: WorldSize, rank: Rank) -> Range<usize> {
    let (base, longer) = (count / world.as_usize(), count % world.as_usize());
    let index = rank.index();
    let start = index * base + index.min(longer);
    start..start + base + usize::from(index < longer)
}

/// How a buffer is divided into one part for each rank. Parts are contiguous, in rank order and of any lengths.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partition(Parts);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Parts {
    /// As many elements are divided as evenly as possible among the ranks. Calls often make these, so they need no memory.
    Even(usize, WorldSize),
    /// The index at which each part begins, followed by the index at which the last part ends.
    Bounds(Vec<usize>),
}

impl Partition {
    /// Divides `count` elements as evenly as possible: the part of each rank is its [`chunk`].
    pub fn even(count: usize, world: WorldSize) -> Self {
        Self(Parts::Even(count, world))
    }

    /// Returns a partition with `count` elements for each rank. Panics if the number of all elements overflows a `usize`.
    pub fn of_equal_parts(count: usize, world: WorldSize) -> Self {
        let total = count.checked_mul(world.as_usize());
        Self::even(total.expect("the length of the buffer must fit a usize"), world)
    }

    /// Returns the partition whose parts have these lengths, one for each rank, or `None` if their sum overflows.
    pub fn from_counts(counts: &[usize]) -> Option<Self> {
        let mut bounds = vec![0usize];
        for &count in counts {
            bounds.push(bounds.last()?.checked_add(count)?);
        }
        Some(Self(Parts::Bounds(bounds)))
    }

    /// Returns the range of the elements of `rank`. Panics if the partition has no part for this rank.
    pub fn range(&self, rank: Rank) -> Range<usize> {
        match &self.0 {
            Parts::Even(count, world) => {
                assert!(world.contains(rank), "the partition must have a part for the rank");
                chunk(*count, *world, rank)
            }
            Parts::Bounds(bounds) => bounds[rank.index()]..bounds[rank.index() + 1],
        }
    }

    pub fn total(&self) -> usize {
        match &self.0 {
            Parts::Even(count, _) => *count,
            Parts::Bounds(bounds) => bounds.last().copied().unwrap_or(0),
        }
    }
}

/// Divides a range into blocks of `length` elements. The last block may be shorter. An empty range has one empty block, so that
/// the ranks exchange a message and can detect that the range of a peer is not empty. Panics if `length` is 0.
pub(super) fn blocks(range: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    (range.start..end.max(range.start + 1)).step_by(length).map(move |start| start..end.min(start + length))
}

/// Returns the range that begins `start` elements later.
pub(super) fn shifted(range: &Range<usize>, start: usize) -> Range<usize> {
    start + range.start..start + range.end
}

/// Returns the segment of at most `segment_len` elements that starts after the first `sent` elements of `range`.
pub fn segment(range: &Range<usize>, sent: usize, segment_len: usize) -> Range<usize> {
    let start = range.start + sent;
    start..range.end.min(start + segment_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_whose_sum_overflows_are_refused() {
        assert_eq!(Partition::from_counts(&[1, usize::MAX]), None);
        assert_eq!(Partition::from_counts(&[]).map(|no_ranks| no_ranks.total()), Some(0));
    }
}
