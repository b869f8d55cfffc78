//! The batches of an epoch, and each rank's part of a batch.
//!
//! For each epoch, all ranks draw the same permutation of the training set. Batch `b` is the `b`-th block of
//! `batch_size` samples of this permutation (the last block may be shorter). Each rank processes one contiguous part
//! of every batch. Batches do not depend on the world size, and every sample is used exactly once per epoch.

use std::ops::Range;

use super::random;
use crate::types::{Rank, WorldSize};

/// The order of the samples in an epoch, and the batch size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batches {
    order: Vec<u32>,
    batch_size: usize,
}

impl Batches {
    /// Returns the batches of epoch `epoch` (counted from 0) of a training set with `sample_count` samples. If one batch
    /// holds all samples, the samples are not shuffled.
    ///
    /// # Panics
    ///
    /// If `batch_size` is 0, or if `sample_count` does not fit 32 bits. Earlier checks of the configuration and of the
    /// data set exclude both cases.
    pub fn new(seed: u64, epoch: u64, sample_count: usize, batch_size: usize) -> Self {
        assert!(batch_size > 0, "a batch holds at least one sample");
        let sample_count = u32::try_from(sample_count).expect("data sets are limited to 2^31 samples");
        let order = if batch_size >= sample_count as usize {
            (0..sample_count).collect()
        } else {
            random::permutation(&mut random::random_stream("epoch", seed, epoch), sample_count)
        };
        Self { order, batch_size }
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
            ranks in 1_u32..=9, samples in 1_usize..400, batch_size in 1_usize..70, seed: u64, epoch in 0_u64..5
        ) {
            let world = WorldSize::new(ranks).unwrap();
            let batches = Batches::new(seed, epoch, samples, batch_size);
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
        assert_ne!(Batches::new(1, 0, 100, 10), Batches::new(1, 1, 100, 10));
    }
}
