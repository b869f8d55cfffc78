//! Which blocks of the data belong to a rank.

use std::ops::Range;

use crate::group::Group;

/// The blocks that a rank reads: every `ranks`-th block, starting with block number `rank`. A block consists of consecutive
/// rows of a table or consecutive samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlocksOfRank {
    /// The number of this rank.
    pub(crate) rank: usize,
    /// The number of ranks that share the blocks.
    pub(crate) ranks: usize,
}

impl BlocksOfRank {
    /// All blocks.
    pub(crate) const ALL: Self = Self { rank: 0, ranks: 1 };

    /// Returns the blocks of this rank of `group`.
    pub(crate) fn of_rank(group: &Group) -> Self {
        Self { rank: group.rank().index(), ranks: group.size().as_usize() }
    }

    /// Returns whether the rank reads the block with this number.
    pub(crate) fn contains(self, block: usize) -> bool {
        block % self.ranks == self.rank
    }

    /// Divides `count` rows or bytes among the ranks, and returns the range of this rank. The lengths of the ranges of two
    /// ranks differ by at most one. If `count` is not 0, the range of the last rank is not empty.
    pub(crate) fn range_of(self, count: u64) -> Range<u64> {
        let bound = |rank: usize| (u128::from(count) * rank as u128 / self.ranks as u128) as u64;
        bound(self.rank)..bound(self.rank + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranges_of_the_ranks_cover_all_rows_in_order() {
        for rows in [0, 1, 5, 1_000_003, u64::MAX] {
            for ranks in 1..9 {
                let ranges: Vec<_> =
                    (0..ranks).map(|rank| BlocksOfRank { rank, ranks }.range_of(rows)).collect();
                assert_eq!((ranges[0].start, ranges[ranks - 1].end), (0, rows));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                let sizes = ranges.iter().map(|range| range.end - range.start);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
                assert!(rows == 0 || !ranges[ranks - 1].is_empty());
            }
        }
    }
}
