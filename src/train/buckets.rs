//! Reduces gradients in buckets while the backward pass is still running.
//!
//! The backward pass goes from the last parameter to the first, and the all-reduce of a bucket starts as soon as all
//! gradients of the bucket are final. Li et al. describe this method in "`PyTorch` Distributed: experiences on
//! accelerating data parallel training", VLDB 13 (2020).
//!
//! Bucket boundaries depend only on the number of parameters and on the sizes of buckets, so all ranks use the same
//! boundaries. The boundaries do not depend on the ranges in which the backward pass reports gradients, because these
//! ranges may differ between ranks: a rank without samples reports whole layers.
//!
//! A bucket is a [`RangeSum`]: its tensors may have different compressions.
//!
//! The first step allocates a buffer for each bucket with [`Group::alloc`](crate::Group::alloc). Ranks on the same
//! host reduce buffers from `alloc` in place.
//!
//! With `--shard-optimizer`, a bucket is reduced by a reduce-scatter, and a rank gets only the sums of its chunk.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

use super::TrainError;
use super::bucket_ranges::BucketSizes;
use super::compression_memory::{CompressionMemory, MemoryNeeds};
use super::compression_plan::CompressionPlan;
use super::gradient_work::GradientWork;
use super::local_momentum::{LocalMomentum, MomentumInputs};
use super::model::{LossSums, SumOverRanks};
use super::range_sum::RangeSum;
use super::runtime::{Runtime, SumTarget, Values};
use super::strategies::Replica;
use crate::group::{AutoReport, Error};

/// Divides the gradients of each step into buckets and reduces them.
pub(crate) struct Buckets {
    sizes: BucketSizes,
    /// In the order in which the backward pass fills the buckets.
    sums: Vec<RangeSum>,
    /// The number of buckets whose sums have started in this step.
    started: usize,
    /// The start of the gradients that are final in this step.
    ready_from: usize,
    parameter_count: usize,
    plan: CompressionPlan,
    target: SumTarget,
    momentum: Option<LocalMomentum>,
    /// The number of steps before the current one.
    step: u64,
}

impl Buckets {
    /// Creates buckets for the parameters of `plan`. `target` says which sums of each bucket this rank gets.
    pub(crate) fn new(plan: &CompressionPlan, sizes: BucketSizes, target: SumTarget) -> Self {
        let parameter_count = plan.tensors.last().map_or(0, |tensor| tensor.range.end);
        Self {
            sizes,
            sums: Self::sums(plan, sizes, target),
            started: 0,
            ready_from: parameter_count,
            parameter_count,
            plan: plan.clone(),
            target,
            momentum: None,
            step: 0,
        }
    }

    fn sums(plan: &CompressionPlan, sizes: BucketSizes, target: SumTarget) -> Vec<RangeSum> {
        let parameter_count = plan.tensors.last().map_or(0, |tensor| tensor.range.end);
        let bucket = |(range, number)| RangeSum::new(plan, range, (target, number));
        sizes.ranges(parameter_count).zip(0..).map(bucket).collect()
    }

    /// Creates a single bucket, for the sums of a whole vector.
    pub(crate) fn single(plan: &CompressionPlan) -> Self {
        Self::new(plan, BucketSizes::whole(usize::MAX), SumTarget::Everything)
    }

    /// Divides the gradients into buckets of other sizes, between two steps. All ranks must call this function after the same
    /// step. What this rank remembers of the earlier sums belongs to parameters and not to buckets, so nothing is lost.
    pub(crate) fn divide(&mut self, sizes: BucketSizes) {
        if sizes == self.sizes {
            return;
        }
        let memory = self.memory();
        self.sizes = sizes;
        // Free the buffers of the earlier buckets first.
        self.sums.clear();
        self.sums = Self::sums(&self.plan, sizes, self.target);
        // The codecs stay the same, so no results become residuals.
        self.sums.iter_mut().for_each(|bucket| bucket.set_memory(&memory, false));
    }

    /// Sets the momentum that this rank applies to its gradients before the sums.
    pub(crate) fn with_momentum(mut self, momentum: Option<LocalMomentum>) -> Self {
        self.momentum = momentum;
        self
    }

    /// Begins step `step` of the run, counted from 0.
    pub(crate) fn begin_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Returns whether this rank needs its whole gradient before it can start a sum, so that
    /// [`differentiate`](Self::differentiate) does not apply to this step.
    pub(crate) fn need_whole_gradient(&self) -> bool {
        self.momentum.as_ref().is_some_and(|momentum| momentum.needs_whole_gradient(self.step))
    }

    /// Applies the momentum to the whole gradient of this rank, before the first sum. Not after
    /// [`differentiate`](Self::differentiate).
    pub(crate) fn apply_momentum(&mut self, replica: &mut Replica<'_>) {
        if let Some(momentum) = &mut self.momentum {
            let Replica { parameters, gradients, optimizer } = replica;
            let first_moment = optimizer.state.first().map_or(&[][..], Vec::as_slice);
            momentum.clip_and_apply(self.step, gradients, MomentumInputs { parameters, first_moment });
        }
    }

    /// Computes the gradient of this rank's samples. Applies the momentum to gradients as soon as they are final, and starts the
    /// sum of each bucket as soon as all gradients of the bucket are final.
    pub(crate) fn differentiate(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let weight = 1.0 / work.batch_len as f32;
        let ranks = PassRuntime::new(runtime);
        let inputs = MomentumInputs { parameters: work.parameters, first_moment: work.first_moment };
        let sums = work.differentiate(
            weight,
            &ranks,
            (self.sizes.first.min(self.sizes.others), |range, gradients: &mut [f32]| {
                if let Some(momentum) = &mut self.momentum {
                    momentum.apply(self.step, range.clone(), gradients, inputs);
                }
                ranks.call_unless_failed(|runtime| self.add_gradients(runtime, &range, gradients));
            }),
        )?;
        Ok(ranks.into_result(sums)?)
    }

    /// Returns the codecs that `auto` has chosen.
    pub(crate) fn codec_choices(&self) -> Vec<AutoReport> {
        self.sums.iter().flat_map(RangeSum::codec_choices).collect()
    }

    /// Returns the size of a full bucket in bytes. Returns `None` if there is only one bucket.
    pub(crate) fn bytes(&self) -> Option<usize> {
        (self.sums.len() > 1).then_some(self.sizes.bytes())
    }

    /// Returns whether each bucket is summed by a single reduce-scatter: see [`RangeSum::is_single_chunk`].
    pub(crate) fn are_single_chunks(&self) -> bool {
        self.sums.iter().all(RangeSum::is_single_chunk)
    }

    /// Adds a range of final gradients, and starts the sum of each bucket that is now full. `range.end` must be the
    /// `range.start` of the previous call.
    fn add_gradients(
        &mut self,
        runtime: &mut dyn Runtime,
        range: &Range<usize>,
        gradients: &[f32],
    ) -> Result<(), Error> {
        self.ready_from = range.start;
        while let Some(bucket) = self.sums.get_mut(self.started)
            && bucket.range().start >= self.ready_from
        {
            bucket.start(runtime, gradients, self.step)?;
            self.started += 1;
        }
        Ok(())
    }

    /// Starts the sums of the remaining buckets. All gradients must be final.
    pub(crate) fn flush(&mut self, runtime: &mut dyn Runtime, gradients: &[f32]) -> Result<(), Error> {
        self.add_gradients(runtime, &(0..0), gradients)?;
        (self.started, self.ready_from) = (0, self.parameter_count);
        // The second steps of the first buckets run while the first steps of later buckets are still in progress.
        self.sums.iter_mut().try_for_each(|bucket| bucket.advance(runtime))
    }

    /// Waits for the sums of all buckets, in the order in which the sums were started. Calls `on_reduced` with the
    /// ranges and the sums of each bucket while later buckets are still being reduced. When this function returns, the
    /// contents of `gradients` are unspecified.
    pub(crate) fn wait_for_all_buckets(
        &mut self,
        gradients: &mut [f32],
        mut on_reduced: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        let Self { sums, momentum, .. } = self;
        sums.iter_mut().try_for_each(|bucket| {
            bucket.wait(gradients, |range, sums| {
                if let Some(momentum) = momentum {
                    momentum.reset_applied(&range, sums);
                }
                on_reduced(range, sums);
            })
        })
    }

    /// Waits for all buckets and writes their sums to `gradients`.
    pub(crate) fn wait_and_write_sums(&mut self, gradients: &mut [f32]) -> Result<(), Error> {
        self.sums.iter_mut().try_for_each(|bucket| bucket.wait_and_write(gradients))?;
        if let Some(momentum) = &mut self.momentum {
            momentum.reset_applied(&(0..gradients.len()), gradients);
        }
        Ok(())
    }

    /// Replaces `vector` by its sums over all ranks.
    pub(crate) fn sum(&mut self, runtime: &mut dyn Runtime, vector: &mut [f32]) -> Result<(), Error> {
        if let [bucket] = self.sums.as_slice()
            && bucket.is_exact()
        {
            return runtime.combine(Values::Vector(vector));
        }
        self.flush(runtime, vector)?;
        self.wait_and_write_sums(vector)
    }

    /// Returns what the ranks remember from one sum to the next.
    pub(crate) fn memory_needs(&self) -> MemoryNeeds {
        self.plan.memory
    }

    /// Returns what this rank remembers of the earlier sums.
    pub(crate) fn memory(&self) -> CompressionMemory {
        let MemoryNeeds { residuals, velocities, results, factors, .. } = self.plan.memory;
        let zeros_if = |needs| vec![0.0; if needs { self.parameter_count } else { 0 }];
        let mut memory = CompressionMemory {
            results: zeros_if(results),
            factors: zeros_if(factors),
            residuals: if residuals { vec![zeros_if(true)] } else { Vec::new() },
            velocities: Vec::new(),
            calls: 0,
        };
        if let Some(momentum) = self.momentum.as_ref().filter(|_| velocities) {
            memory.velocities.push(momentum.velocity.clone());
        }
        self.sums.iter().for_each(|bucket| bucket.copy_memory_to(&mut memory));
        memory
    }

    /// Replaces what this rank remembers. `adds_results` is true on one of the ranks that sum together; see
    /// [`RangeSum::set_memory`].
    pub(crate) fn set_memory(&mut self, memory: &CompressionMemory, adds_results: bool) {
        self.sums.iter_mut().for_each(|bucket| bucket.set_memory(memory, adds_results));
        if let (Some(momentum), Some(velocity)) = (&mut self.momentum, memory.velocities.first()) {
            momentum.velocity.clone_from(velocity);
        }
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
    use crate::codec::Compression;
    use crate::group::Group;
    use crate::train::compression_plan::ModelTensor;
    use crate::train::compression_rules::CompressionRules;

    /// Error feedback belongs to elements, and the matrices of `PowerSGD` to tensors. So another division must keep both.
    #[test]
    fn another_division_keeps_what_the_rank_remembers() {
        for codec in ["topk:0.1", "onebit", "powersgd:2"] {
            let compression: Compression = codec.parse().unwrap();
            let tensor = |start: usize, shape: &[usize]| ModelTensor {
                name: format!("tensor at {start}"),
                shape: shape.to_vec(),
                is_statistic: false,
                own_range: start..start + shape.iter().product::<usize>(),
            };
            let tensors = vec![tensor(0, &[40, 50]), tensor(2000, &[40]), tensor(2040, &[30, 40])];
            let plan = CompressionPlan::new((compression, &CompressionRules::default()), tensors, (true, 7))
                .unwrap();
            let sizes = |bytes| BucketSizes::new(Some(bytes), 3240);
            let mut buckets = Buckets::new(&plan, sizes(1000), SumTarget::Everything);
            let is_encoded = |index: &usize| !(2000..2040).contains(index);
            let value = |index: usize| if is_encoded(&index) { 1.0 + index as f32 } else { 0.0 };
            let residual: Vec<f32> = (0..3240).map(value).collect();
            let memory = CompressionMemory { residuals: vec![residual], calls: 9, ..buckets.memory() };
            buckets.set_memory(&memory, true);
            let memory = buckets.memory();
            assert_eq!((memory.calls, memory.residuals[0][3239]), (9, 3240.0), "{codec}");
            for bytes in [4000, 20_000, 100, 1000] {
                buckets.divide(sizes(bytes));
                assert_eq!(buckets.sums.len(), 12960_usize.div_ceil(bytes), "{codec}, {bytes}");
                assert!(buckets.memory() == memory, "{codec}, {bytes}");
            }
        }
    }

    /// With EF21, the sum of the residuals of all ranks and of the results is what was not sent. So with another codec, one rank
    /// adds the results to its residual.
    #[test]
    fn another_codec_keeps_what_was_not_sent_with_ef21() {
        let vector = |factor: f32| (0..2000).map(|index| factor * index as f32).collect::<Vec<_>>();
        let memory = CompressionMemory {
            residuals: vec![vector(-1.0)],
            results: vector(3.0),
            calls: 9,
            ..CompressionMemory::default()
        };
        for (codec, adds_results, residual, result) in [
            ("ef21:topk:0.1", true, -1.0, Some(3.0)),
            ("ef21:onebit", false, -1.0, Some(3.0)),
            ("topk:0.1", true, 2.0, None),
            ("topk:0.1", false, -1.0, None),
            ("powersgd:2", true, 2.0, None),
            ("powersgd:2", false, -1.0, None),
        ] {
            let tensor = ModelTensor {
                name: "layers.0.weight".into(),
                shape: vec![40, 50],
                is_statistic: false,
                own_range: 0..2000,
            };
            let codec_and_rules = (codec.parse().unwrap(), &CompressionRules::default());
            let plan = CompressionPlan::new(codec_and_rules, vec![tensor], (true, 7)).unwrap();
            let mut buckets = Buckets::new(&plan, BucketSizes::new(Some(1000), 2000), SumTarget::Everything);
            buckets.set_memory(&memory, adds_results);
            let found = buckets.memory();
            assert_eq!(found.residuals, [vector(residual)], "{codec}, {adds_results}");
            assert_eq!(found.results, result.map_or_else(Vec::new, vector), "{codec}");
        }
    }

    /// Regression test: before the fix, bucket boundaries depended on the ranges in which a rank reports gradients. A rank
    /// without samples reports a layer as one range, but other ranks report several ranges. So the ranks started
    /// all-reduces of different lengths, and the job failed.
    #[test]
    fn bucket_boundaries_do_not_depend_on_how_gradients_are_reported() {
        let gradients: Vec<f32> = (0..1000).map(|value| value as f32).collect();
        let mut boundaries = Vec::new();
        for range_elements in [1, 7, 64, 100, 1000] {
            let mut group = Group::solo();
            let sizes = BucketSizes::new(Some(64 * size_of::<f32>()), 1000);
            let mut buckets = Buckets::new(&CompressionPlan::exact(1000), sizes, SumTarget::Everything);
            // The second step must have the same boundaries as the first.
            for _ in 0..2 {
                let mut end = gradients.len();
                while end > 0 {
                    let start = end.saturating_sub(range_elements);
                    buckets.add_gradients(&mut group, &(start..end), &gradients).unwrap();
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
        }
        assert_eq!(boundaries[0].last(), Some(&(0..40)));
        assert!(boundaries.iter().all(|found| *found == boundaries[0]), "{boundaries:?}");
    }
}
