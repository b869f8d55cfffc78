//! The logical shards of a run with `--reproducible`. Each batch is divided into a fixed number of shards, and each rank
//! processes consecutive shards. The gradient of a shard has the same bits on every rank, and the gradients of the shards
//! are added in the order of a [summation tree](super::summation_tree). So the sum does not depend on the number of ranks.

use std::num::NonZeroU32;
use std::ops::Range;

use super::batches::{divide, range_of_rank};
use super::summation_tree::{largest_nodes_within, split_nodes};
use crate::types::{Rank, WorldSize, counted};

/// The default number of logical shards. A run has at most as many ranks as shards.
pub const SHARDS_DEFAULT: NonZeroU32 = NonZeroU32::new(8).unwrap();
/// The maximum number of logical shards.
pub const SHARDS_MAX: u32 = 1024;

/// The number of logical shards into which each batch is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogicalShards {
    count: usize,
}

impl LogicalShards {
    pub(crate) fn new(count: NonZeroU32) -> Self {
        Self { count: count.get() as usize }
    }

    /// Returns the number of shards.
    pub(crate) fn count(self) -> usize {
        self.count
    }

    /// Returns an error if there are more ranks than shards.
    pub(crate) fn check_world_size(self, size: WorldSize) -> Result<(), String> {
        if size.as_usize() <= self.count {
            return Ok(());
        }
        Err(format!(
            "--reproducible divides each batch into {}, but the job has {size} ranks; start at most {}, or start a new run \
             with --shards {size}",
            counted(self.count, "shard"),
            counted(self.count, "rank")
        ))
    }

    /// Returns the shards that `rank` processes.
    pub(crate) fn shards_of_rank(self, rank: Rank, size: WorldSize) -> Range<usize> {
        divide(self.count, rank.index(), size.as_usize())
    }

    /// Returns the samples of `shards` in a batch of `len` samples, as a range of indices.
    pub(crate) fn samples(self, shards: Range<usize>, len: usize) -> Range<usize> {
        let start = |shard: usize| divide(len, shard, self.count).start;
        let end = if shards.end == self.count { len } else { start(shards.end) };
        if shards.is_empty() { end..end } else { start(shards.start)..end }
    }

    /// Returns the largest nodes of the summation tree that contain only shards of `rank`. `rank` computes the sums of
    /// these nodes without other ranks.
    pub(crate) fn nodes_of_rank(self, rank: Rank, size: WorldSize) -> Vec<Range<usize>> {
        largest_nodes_within(self.shards_of_rank(rank, size), self.count)
    }

    /// Divides the shards of `rank` into nodes of the summation tree. The rank computes the gradient of each node in
    /// one pass. There are at least `micro_batches` nodes, or one node for each shard if the rank has fewer shards.
    pub(crate) fn passes(
        self,
        (rank, size): (Rank, WorldSize),
        micro_batches: NonZeroU32,
    ) -> Vec<Range<usize>> {
        split_nodes(self.nodes_of_rank(rank, size), micro_batches.get() as usize)
    }

    /// Returns the number of samples in the largest pass of a rank for a batch of `len` samples: at least 1.
    pub(crate) fn pass_rows(
        self,
        rank_and_size: (Rank, WorldSize),
        len: usize,
        micro_batches: NonZeroU32,
    ) -> usize {
        let passes = self.passes(rank_and_size, micro_batches).into_iter();
        passes.map(|node| self.samples(node, len).len()).max().unwrap_or(1).max(1)
    }

    /// Returns the rows of each shard in the pass over `node`. Row 0 is the first sample of `node`. `len` is the
    /// number of samples in the batch.
    pub(crate) fn row_groups(self, node: Range<usize>, len: usize) -> Vec<Range<usize>> {
        let first = self.samples(node.clone(), len).start;
        let rows = |shard| self.samples(shard..shard + 1, len);
        node.map(|shard| rows(shard).start - first..rows(shard).end - first).collect()
    }
}

/// Returns the part of a batch of `len` samples that a rank processes. With logical shards, this part holds all samples
/// of the rank's shards. Without logical shards, this part is the [`range_of_rank`].
pub(crate) fn part_of_batch(
    len: usize,
    (rank, size): (Rank, WorldSize),
    shards: Option<LogicalShards>,
) -> Range<usize> {
    match shards {
        Some(shards) => shards.samples(shards.shards_of_rank(rank, size), len),
        None => range_of_rank(len, rank, size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each number of ranks, the passes of all ranks together use each sample of a batch once, in order.
    #[test]
    fn ranks_and_passes_divide_the_samples() {
        for count in [1, 3, 8, 13] {
            let shards = LogicalShards::new(NonZeroU32::new(count).unwrap());
            for len in [1, 5, 8, 29, 128] {
                for (ranks, micro_batches) in [(1, 1), (2, 1), (3, 4), (8, 2)] {
                    let (size, micro_batches) =
                        (WorldSize::new(ranks).unwrap(), NonZeroU32::new(micro_batches).unwrap());
                    if shards.check_world_size(size).is_err() {
                        assert!(ranks > count);
                        continue;
                    }
                    let mut end = 0;
                    for rank in size.ranks() {
                        let of_rank = shards.samples(shards.shards_of_rank(rank, size), len);
                        assert_eq!(of_rank.start, end);
                        for node in shards.passes((rank, size), micro_batches) {
                            let samples = shards.samples(node.clone(), len);
                            assert_eq!(samples.start, end);
                            let groups = shards.row_groups(node, len);
                            assert_eq!(groups.iter().map(Range::len).sum::<usize>(), samples.len());
                            let rows = shards.pass_rows((rank, size), len, micro_batches);
                            assert!(samples.len() <= rows);
                            end = samples.end;
                        }
                        assert_eq!(of_rank.end, end);
                    }
                    assert_eq!(end, len);
                }
            }
        }
    }
}
