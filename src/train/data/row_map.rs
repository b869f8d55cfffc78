//! Which rank holds which rows of a data set.

use std::ops::Range;

use super::BlocksOfRank;

/// Which rank holds which rows of a data set. A row is a sample. Rows are numbered from 0 in the order of the files. The
/// rows are divided into blocks. Block i belongs to the rank i modulo the number of ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RowMap {
    /// This rank's share of the blocks.
    share: BlocksOfRank,
    /// The first row of each block, followed by the number of rows.
    starts: Vec<usize>,
    /// For each block, the number of rows in earlier blocks of the same rank.
    held_before: Vec<usize>,
    /// For sparse rows, the number of stored values of each row. Empty if the rows are not sparse.
    value_counts: Vec<u32>,
}

impl RowMap {
    /// Creates the map of a data set. Entry i of `block_rows` is the number of rows of block i.
    pub(crate) fn new(share: BlocksOfRank, block_rows: &[u64]) -> Self {
        let mut starts = vec![0];
        starts.extend(block_rows.iter().scan(0, |end, &rows| {
            *end += rows as usize;
            Some(*end)
        }));
        Self::from_starts(share, starts)
    }

    /// Creates the map of a data set with this number of rows. Each rank holds the rows of its
    /// [`range_of`](BlocksOfRank::range_of).
    pub(crate) fn of_consecutive_rows(share: BlocksOfRank, rows: usize) -> Self {
        let end = |rank| BlocksOfRank { rank, ..share }.range_of(rows as u64).end as usize;
        Self::from_starts(share, [0].into_iter().chain((0..share.ranks).map(end)).collect())
    }

    /// Creates a map from the share of this rank and the field `starts`.
    fn from_starts(share: BlocksOfRank, starts: Vec<usize>) -> Self {
        let mut held = vec![0; share.ranks];
        let blocks = starts.windows(2).enumerate();
        let held_before = blocks
            .map(|(block, bounds)| {
                let held = &mut held[block % share.ranks];
                std::mem::replace(held, *held + bounds[1] - bounds[0])
            })
            .collect();
        Self { share, starts, held_before, value_counts: Vec::new() }
    }

    /// Returns the map of sparse rows. Entry i of `value_counts` is the number of stored values of row i.
    pub(crate) fn with_value_counts(self, value_counts: Vec<u32>) -> Self {
        Self { value_counts, ..self }
    }

    /// Returns the number of stored values of a sparse row. Returns 0 if the rows are not sparse.
    pub(crate) fn value_count(&self, row: usize) -> usize {
        self.value_counts.get(row).map_or(0, |&count| count as usize)
    }

    /// Returns the number of stored values of all sparse rows.
    pub(crate) fn total_value_count(&self) -> usize {
        self.value_counts.iter().map(|&count| count as usize).sum()
    }

    /// Returns whether the rows belong to several ranks.
    pub(crate) fn has_several_ranks(&self) -> bool {
        self.share.ranks > 1
    }

    /// Returns the number of rows of all ranks.
    pub(crate) fn rows(&self) -> usize {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Returns the map of a data set that has only the rows in `chosen`. These rows get new numbers, counted from 0.
    /// `chosen` must be sorted.
    pub(crate) fn restrict_to_rows(&self, chosen: &[usize]) -> Self {
        let starts = self.starts.iter().map(|&start| chosen.partition_point(|&row| row < start)).collect();
        let value_counts = if self.value_counts.is_empty() { &[][..] } else { chosen };
        let value_counts = value_counts.iter().map(|&row| self.value_counts[row]).collect();
        Self::from_starts(self.share, starts).with_value_counts(value_counts)
    }

    /// Returns the rank that holds a row, and the index of the row among the rows of that rank.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub(crate) fn holder_and_index(&self, row: usize) -> (usize, usize) {
        let block = self.starts.partition_point(|&start| start <= row) - 1;
        (block % self.share.ranks, self.held_before[block] + row - self.starts[block])
    }

    /// Returns the rows in `range` that this rank holds, as a range of indices into [`held_rows`](Self::held_rows).
    pub(crate) fn indices_of_held_range(&self, range: Range<usize>) -> Range<usize> {
        let held_before = |bound: usize| -> usize {
            let begun = self.starts[..self.held_before.len()].partition_point(|&start| start < bound);
            let last_own = (0..begun).rev().find(|block| block % self.share.ranks == self.share.rank);
            last_own.map_or(0, |block| {
                self.held_before[block] + bound.min(self.starts[block + 1]) - self.starts[block]
            })
        };
        held_before(range.start)..held_before(range.end)
    }

    /// Returns the numbers of the rows that this rank holds.
    pub(crate) fn held_rows(&self) -> impl Iterator<Item = usize> {
        self.blocks_of_rank(self.share.rank).flatten()
    }

    /// Returns the blocks of a rank, as ranges of rows.
    fn blocks_of_rank(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        let blocks = self.starts.windows(2).map(|bounds| bounds[0]..bounds[1]);
        blocks.skip(rank).step_by(self.share.ranks)
    }

    /// Returns the rows in `chosen` that this rank holds, as indices into [`held_rows`](Self::held_rows). `chosen`
    /// must be sorted.
    pub(crate) fn indices_of_held_rows(&self, chosen: &[usize]) -> Vec<usize> {
        let mut own = Vec::new();
        let mut rows_before = 0;
        for block in self.blocks_of_rank(self.share.rank) {
            let [start, end] =
                [block.start, block.end].map(|bound| chosen.partition_point(|&row| row < bound));
            own.extend(chosen[start..end].iter().map(|row| row - block.start + rows_before));
            rows_before += block.len();
        }
        own
    }

    /// Returns the number of rows that each rank holds.
    pub(crate) fn row_counts_of_ranks(&self) -> Vec<usize> {
        (0..self.share.ranks).map(|rank| self.blocks_of_rank(rank).map(|block| block.len()).sum()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_belongs_to_the_rank_of_its_block() {
        let block_rows = [3, 0, 2, 4, 1];
        let chosen = [0, 2, 3, 5, 8, 9];
        for ranks in 1..=6 {
            let value_counts: Vec<u32> = (0..10).map(|row| 3 * row).collect();
            let map = |rank| {
                RowMap::new(BlocksOfRank { rank, ranks }, &block_rows).with_value_counts(value_counts.clone())
            };
            let (mut rows, mut kept) = (Vec::new(), Vec::new());
            for rank in 0..ranks {
                let own: Vec<usize> = map(rank).held_rows().collect();
                assert!(
                    own.iter().enumerate().all(|(index, &row)| map(0).holder_and_index(row) == (rank, index))
                );
                for range in [0..10, 0..3, 2..4, 4..9, 5..5] {
                    let indices = map(rank).indices_of_held_range(range.clone());
                    let expected = own.iter().copied().filter(|row| range.contains(row));
                    assert!(own[indices].iter().copied().eq(expected), "{range:?}");
                }
                kept.extend(map(rank).indices_of_held_rows(&chosen).into_iter().map(|index| own[index]));
                rows.extend(own);
            }
            rows.sort_unstable();
            assert!(rows.into_iter().eq(0..10), "{ranks}");
            kept.sort_unstable();
            assert_eq!(kept, chosen, "{ranks}");
            let part = map(0).restrict_to_rows(&chosen);
            assert!((0..6).all(|row| part.value_count(row) == 3 * chosen[row]) && part.rows() == 6);
            assert_eq!(part.total_value_count(), 3 * 27);
            assert_eq!(map(0).row_counts_of_ranks().iter().sum::<usize>(), 10);
        }
    }
}
