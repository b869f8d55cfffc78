//! The batches of an epoch, and each rank's part of a batch.
//!
//! For each epoch, all ranks draw the same permutation of the training set. Batch `b` is the `b`-th block of
//! `batch_size` samples of this permutation (the last block may be shorter). Each rank processes one contiguous part
//! of every batch. Batches do not depend on the world size, and every sample is used exactly once per epoch.
//!
//! If samples are read from a disk, random access is slow. The permutation is then a shuffle in blocks: the blocks of
//! samples are shuffled, and then the samples of each *window* of several blocks. To process a window, the ranks read
//! whole blocks.

use std::ops::Range;

use super::random;
use crate::types::{Rank, WorldSize};

/// The size in bytes of the features of a block, in a shuffle in blocks.
const BLOCK_BYTES: usize = 1 << 20;
/// The number of blocks of a window, in a shuffle in blocks.
const WINDOW_BLOCKS: usize = 64;

/// The size of the blocks in a shuffle in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShuffleBlocks {
    /// The number of samples in a block; at least 1. The last block may have fewer samples.
    pub block_samples: u32,
}

impl ShuffleBlocks {
    /// Returns the blocks for samples whose features have `bytes` bytes: a window has about 64 MiB.
    pub fn for_sample_bytes(bytes: usize) -> Self {
        Self { block_samples: (BLOCK_BYTES / bytes.max(1)).max(1) as u32 }
    }

    /// Returns the samples of a block.
    fn samples(self, block: u32, sample_count: u32) -> Range<u32> {
        let start = block * self.block_samples;
        start..sample_count.min(start.saturating_add(self.block_samples))
    }
}

/// A part of an epoch whose samples are shuffled together.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ShuffleWindow {
    /// The number of samples of this window and all earlier windows.
    end: usize,
    /// The ranges of the samples of this window.
    blocks: Vec<Range<u32>>,
}

/// The order of the samples in an epoch, and the batch size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batches {
    order: Vec<u32>,
    batch_size: usize,
    /// The windows of a shuffle in blocks. Empty for other orders.
    windows: Vec<ShuffleWindow>,
}

impl Batches {
    /// Returns the batches of epoch `epoch` (counted from 0) of a training set with `sample_count` samples. If one batch
    /// holds all samples, the samples are not shuffled. If there are `blocks`, the order is a shuffle in blocks (see the
    /// module).
    ///
    /// # Panics
    ///
    /// If `batch_size` is 0, or if `sample_count` does not fit 32 bits. Earlier checks of the configuration and of the
    /// data set exclude both cases.
    pub fn new(
        seed: u64,
        epoch: u64,
        sample_count: usize,
        (batch_size, blocks): (usize, Option<ShuffleBlocks>),
    ) -> Self {
        assert!(batch_size > 0, "a batch holds at least one sample");
        let sample_count = u32::try_from(sample_count).expect("data sets are limited to 2^31 samples");
        let mut stream = random::random_stream("epoch", seed, epoch);
        let mut windows = Vec::new();
        let order = match blocks {
            _ if batch_size >= sample_count as usize => (0..sample_count).collect(),
            None => random::permutation(&mut stream, sample_count),
            Some(blocks) => {
                let mut order = Vec::with_capacity(sample_count as usize);
                let block_order =
                    random::permutation(&mut stream, sample_count.div_ceil(blocks.block_samples));
                for window in block_order.chunks(WINDOW_BLOCKS) {
                    let start = order.len();
                    let window: Vec<Range<u32>> =
                        window.iter().map(|&block| blocks.samples(block, sample_count)).collect();
                    order.extend(window.iter().cloned().flatten());
                    random::shuffle(&mut stream, &mut order[start..]);
                    windows.push(ShuffleWindow { end: order.len(), blocks: window });
                }
                order
            }
        };
        Self { order, batch_size, windows }
    }

    /// Returns the number of the window that contains the first sample of batch `index`. Returns 0 if the order is not a
    /// shuffle in blocks.
    pub(crate) fn window_of_batch(&self, index: usize) -> usize {
        let position = index * self.batch_size;
        self.windows.partition_point(|window| window.end <= position)
    }

    /// Returns the samples of window `number`, as ranges. Returns no ranges if there is no such window.
    pub(crate) fn blocks_of_window(&self, number: usize) -> &[Range<u32>] {
        self.windows.get(number).map_or(&[], |window| &window.blocks)
    }

    /// Returns the number of batches.
    pub fn count(&self) -> usize {
        self.order.len().div_ceil(self.batch_size)
    }

    /// Returns the samples that all ranks together process in batch `index`. The slice is empty if `index` is not
    /// below [`count`](Self::count).
    pub fn batch(&self, index: usize) -> &[u32] {
        self.order.chunks(self.batch_size).nth(index).unwrap_or_default()
    }
}

/// Divides `len` items among the ranks, and returns the range of items that `rank` processes. For example, 5 items on
/// 2 ranks give the ranges 0..3 and 3..5. If there are fewer items than ranks, some ranges are empty.
pub fn range_of_rank(len: usize, rank: Rank, world: WorldSize) -> Range<usize> {
    divide(len, rank.index(), world.as_usize())
}

/// Divides `len` items into `count` parts like [`range_of_rank`], and returns the range of part `index`.
pub(super) fn divide(len: usize, index: usize, count: usize) -> Range<usize> {
    let (each, longer) = (len / count, len % count);
    let start = index * each + index.min(longer);
    start..start + each + usize::from(index < longer)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// If a sample were used twice or never, the result would depend on the number of ranks.
        #[test]
        fn all_ranks_together_use_every_sample_once_per_epoch(
            ranks in 1_u32..=9, samples in 1_usize..400, batch_size in 1_usize..70, seed: u64, epoch in 0_u64..5,
            block_samples in 0_u32..5
        ) {
            let world = WorldSize::new(ranks).unwrap();
            let blocks = Some(ShuffleBlocks { block_samples }).filter(|_| block_samples > 0);
            let batches = Batches::new(seed, epoch, samples, (batch_size, blocks));
            let mut uses = vec![0; samples];
            for index in 0..batches.count() {
                let batch = batches.batch(index);
                let mut end = 0;
                for rank in world.ranks() {
                    let part = range_of_rank(batch.len(), rank, world);
                    prop_assert_eq!(part.start, end);
                    prop_assert!(part.len() <= batch.len().div_ceil(ranks as usize));
                    end = part.end;
                    batch[part].iter().for_each(|&sample| uses[sample as usize] += 1);
                }
                prop_assert_eq!(end, batch.len());
            }
            prop_assert!(uses.iter().all(|&n| n == 1));
            prop_assert!(batches.batch(batches.count()).is_empty());
        }
    }

    #[test]
    fn two_epochs_visit_the_samples_in_different_orders() {
        for blocks in [None, Some(ShuffleBlocks { block_samples: 3 })] {
            assert_ne!(Batches::new(1, 0, 100, (10, blocks)), Batches::new(1, 1, 100, (10, blocks)));
        }
    }

    #[test]
    fn a_shuffle_in_blocks_needs_few_blocks_at_a_time() {
        let (block_samples, sample_count) = (7, 7 * 150 + 3);
        let batches = Batches::new(1, 2, sample_count, (10, Some(ShuffleBlocks { block_samples })));
        assert_eq!(batches.windows.len(), 3);
        let mut start = 0;
        for (number, window) in batches.windows.iter().enumerate() {
            let samples = &batches.order[start..window.end];
            let blocks = batches.blocks_of_window(number);
            assert!(blocks.len() <= WINDOW_BLOCKS);
            assert_eq!(samples.len(), blocks.iter().map(Range::len).sum::<usize>());
            assert!(samples.iter().all(|sample| blocks.iter().any(|block| block.contains(sample))));
            assert!(!samples.is_sorted(), "the samples of a window are shuffled");
            assert_eq!(batches.window_of_batch(start.div_ceil(10)), number);
            start = window.end;
        }
        assert_eq!(start, sample_count);
        assert!(batches.blocks_of_window(3).is_empty());
        let unshuffled = Batches::new(1, 2, 5, (5, Some(ShuffleBlocks { block_samples })));
        assert_eq!((unshuffled.batch(0), unshuffled.window_of_batch(0)), (&[0, 1, 2, 3, 4][..], 0));
    }
}
