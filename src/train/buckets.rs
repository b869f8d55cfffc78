//! Reduces gradients in buckets while the backward pass is still running.
//!
//! The backward pass goes from the last parameter to the first, and the all-reduce of a bucket starts as soon as all
//! gradients of the bucket are final. Li et al. describe this method in "`PyTorch` Distributed: experiences on
//! accelerating data parallel training", VLDB 13 (2020).
//!
//! Bucket boundaries depend only on the number of parameters and on the bucket size, so all ranks use the same
//! boundaries. The boundaries do not depend on the ranges in which the backward pass reports gradients, because these
//! ranges may differ between ranks: a rank without samples reports whole layers.
//!
//! The first step allocates a buffer for each bucket with [`Group::alloc`](crate::Group::alloc). Ranks on the same
//! host reduce buffers from `alloc` in place.
//!
//! With `--shard-optimizer`, a bucket is reduced by a reduce-scatter, and a rank gets only the sums of its chunk.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use super::TrainError;
use super::gradient_work::GradientWork;
use super::model::{LossSums, SumOverRanks};
use super::partition::chunk_of_bucket;
use super::runtime::{PendingSum, Runtime, SumBuffer, SumTarget, Values};
use crate::codec::Compression;
use crate::group::Error;

/// The default size of a bucket in bytes: see `docs/results/training-and-python.md`.
pub const BUCKET_BYTES: usize = 1 << 20;

/// Divides the gradients of each step into buckets and reduces them.
pub(crate) struct Buckets {
    /// The number of elements in a full bucket.
    elements: usize,
    /// Says which sums this rank gets.
    target: SumTarget,
    compression: Compression,
    /// The range of gradients that are final and not yet in a bucket. The backward pass lowers the start of the range.
    ready: Range<usize>,
    /// The buckets that are being reduced, in the order in which their reductions started. Each bucket has the range
    /// of gradients whose sums this rank gets.
    in_flight: VecDeque<(Range<usize>, PendingSum)>,
    /// The buffers of earlier steps, in the order of the buckets, so that a buffer holds the same range of gradients
    /// in every step.
    free_buffers: VecDeque<SumBuffer>,
}

impl Buckets {
    /// Creates buckets. Each bucket holds `bytes` bytes of gradients of the type `f32`. The last bucket of a step may
    /// be shorter.
    pub(crate) fn new(bytes: usize, compression: Compression) -> Self {
        Self::with_target((bytes / size_of::<f32>()).max(1), SumTarget::Everything, compression)
    }

    /// Creates buckets of `elements` gradients. From each bucket, a rank gets only the sums of its own chunk.
    pub(crate) fn with_own_chunks(elements: usize, compression: Compression) -> Self {
        Self::with_target(elements, SumTarget::OwnChunk, compression)
    }

    fn with_target(elements: usize, target: SumTarget, compression: Compression) -> Self {
        Self {
            elements,
            target,
            compression,
            ready: 0..0,
            in_flight: VecDeque::new(),
            free_buffers: VecDeque::new(),
        }
    }

    /// Computes the gradient of this rank's samples. Starts the sum of each bucket as soon as all gradients of the
    /// bucket are final.
    pub(crate) fn differentiate(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let weight = 1.0 / work.batch_len as f32;
        let ranks = PassRuntime::new(runtime);
        let sums = work.differentiate(
            weight,
            &ranks,
            (self.elements, |range, gradients: &mut [f32]| {
                ranks.call_unless_failed(|runtime| self.add_gradients(runtime, range, gradients));
            }),
        )?;
        Ok(ranks.into_result(sums)?)
    }

    /// Returns the number of elements in a full bucket.
    pub(crate) fn elements_per_bucket(&self) -> usize {
        self.elements
    }

    /// Adds a range of final gradients, and starts the sum of each bucket that is now full. `range.end` must be the
    /// `range.start` of the previous call.
    fn add_gradients(
        &mut self,
        runtime: &mut dyn Runtime,
        range: Range<usize>,
        gradients: &[f32],
    ) -> Result<(), Error> {
        self.ready = if self.ready.is_empty() { range } else { range.start..self.ready.end };
        while self.ready.len() >= self.elements {
            let bucket = self.ready.end - self.elements..self.ready.end;
            self.ready.end = bucket.start;
            self.start_sum_of_range(runtime, bucket, gradients)?;
        }
        Ok(())
    }

    /// Starts the sum of the remaining gradients, which do not fill a bucket.
    pub(crate) fn flush(&mut self, runtime: &mut dyn Runtime, gradients: &[f32]) -> Result<(), Error> {
        let rest = std::mem::replace(&mut self.ready, 0..0);
        if rest.is_empty() { Ok(()) } else { self.start_sum_of_range(runtime, rest, gradients) }
    }

    /// Waits for the sums of all buckets, in the order in which the sums were started. Calls `on_reduced` with the
    /// range and the sums of each bucket while later buckets are still being reduced. When this function returns, the
    /// contents of `gradients` are unspecified.
    pub(crate) fn wait_for_all_buckets(
        &mut self,
        gradients: &mut [f32],
        mut on_reduced: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        while let Some((range, bucket)) = self.in_flight.pop_front() {
            let target = &mut gradients[range.clone()];
            self.free_buffers.push_back(bucket.wait(target, |sums| on_reduced(range, sums))?);
        }
        Ok(())
    }

    /// Waits for all buckets and writes their sums to `gradients`.
    pub(crate) fn wait_and_write_sums(&mut self, gradients: &mut [f32]) -> Result<(), Error> {
        while let Some((range, bucket)) = self.in_flight.pop_front() {
            self.free_buffers.push_back(bucket.wait_into(&mut gradients[range])?);
        }
        Ok(())
    }

    /// Starts to sum the gradients of `range` over all ranks.
    fn start_sum_of_range(
        &mut self,
        runtime: &mut dyn Runtime,
        range: Range<usize>,
        gradients: &[f32],
    ) -> Result<(), Error> {
        let target_and_format = (self.target, self.compression);
        let bucket =
            runtime.start_sum(&gradients[range.clone()], target_and_format, self.free_buffers.pop_front())?;
        let summed = match self.target {
            SumTarget::Everything => range,
            SumTarget::OwnChunk => chunk_of_bucket(&range, runtime.rank_and_size()),
        };
        self.in_flight.push_back((summed, bucket));
        Ok(())
    }
}

/// Lets layers and buckets use one [`Runtime`] in turn during a forward and backward pass. Keeps the first
/// error of a call.
pub(crate) struct PassRuntime<'a> {
    /// The runtime, and the first error of a call.
    runtime: RefCell<(&'a mut dyn Runtime, Result<(), Error>)>,
}

impl<'a> PassRuntime<'a> {
    pub(crate) fn new(runtime: &'a mut dyn Runtime) -> Self {
        Self { runtime: RefCell::new((runtime, Ok(()))) }
    }

    /// Calls `call` if all earlier calls succeeded.
    pub(crate) fn call_unless_failed(&self, call: impl FnOnce(&mut dyn Runtime) -> Result<(), Error>) {
        let (runtime, result) = &mut *self.runtime.borrow_mut();
        if result.is_ok() {
            *result = call(*runtime);
        }
    }

    /// Ends the pass. Returns the first error of a call, or `sums` (the sums of the losses) if no call failed.
    pub(crate) fn into_result(self, sums: LossSums) -> Result<LossSums, Error> {
        // If the loss is not finite, ignore a failed call: the caller ends the job with an error about the loss.
        if sums.loss.is_finite() {
            self.runtime.into_inner().1?;
        }
        Ok(sums)
    }
}

impl SumOverRanks for PassRuntime<'_> {
    fn sum_over_ranks(&self, values: &mut [f64]) {
        self.call_unless_failed(|runtime| runtime.combine(Values::Totals(values)));
    }
}

impl fmt::Debug for PassRuntime<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PassRuntime").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Group;

    /// Regression test: before the fix, bucket boundaries depended on the ranges in which a rank reports gradients. A rank
    /// without samples reports a layer as one range, but other ranks report several ranges. So the ranks started
    /// all-reduces of different lengths, and the job failed.
    #[test]
    fn bucket_boundaries_do_not_depend_on_how_gradients_are_reported() {
        let gradients: Vec<f32> = (0..1000).map(|value| value as f32).collect();
        let mut boundaries = Vec::new();
        for range_elements in [1, 7, 64, 100, 1000] {
            let mut group = Group::solo();
            let mut buckets = Buckets::new(64 * size_of::<f32>(), Compression::None);
            let mut end = gradients.len();
            while end > 0 {
                let start = end.saturating_sub(range_elements);
                buckets.add_gradients(&mut group, start..end, &gradients).unwrap();
                end = start;
            }
            buckets.flush(&mut group, &gradients).unwrap();
            let mut found = Vec::new();
            buckets
                .wait_for_all_buckets(&mut gradients.clone(), |range, sums| {
                    assert_eq!(*sums, gradients[range.clone()]);
                    found.push(range);
                })
                .unwrap();
            boundaries.push(found);
        }
        assert_eq!(boundaries[0].last(), Some(&(0..40)));
        assert!(boundaries.iter().all(|found| *found == boundaries[0]), "{boundaries:?}");
    }
}
