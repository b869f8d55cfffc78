//! `--shard-optimizer`: synchronous data parallelism in which each rank holds the state of the optimizer for only a
//! part of the parameters. A reduce-scatter sums the gradients before each step of the optimizer, and an all-gather
//! copies the new parameters after the step. Together, they send as many bytes as the all-reduce of `allreduce`.
//!
//! Source: Rajbhandari et al., "`ZeRO`: memory optimizations toward training trillion parameter models", SC 2020, stage 1.

use super::{ParameterAgreement, Replica, ShardStep, StepTotals, Strategy};
use crate::group::Error;
use crate::train::TrainError;
use crate::train::bucket_ranges::BucketSizes;
use crate::train::buckets::Buckets;
use crate::train::clipping;
use crate::train::compression_plan::CompressionPlan;
use crate::train::gradient_work::GradientWork;
use crate::train::model::LossSums;
use crate::train::runtime::{Runtime, SumTarget, Values};

/// The strategy `allreduce` with `--shard-optimizer`, on several ranks.
pub(crate) struct ShardedOptimizer {
    step: ShardStep,
    buckets: Buckets,
}

impl ShardedOptimizer {
    pub(crate) fn new(step: ShardStep, plan: &CompressionPlan, sizes: BucketSizes) -> Self {
        Self { step, buckets: Buckets::new(plan, sizes, SumTarget::OwnChunk) }
    }
}

impl Strategy for ShardedOptimizer {
    fn parameter_agreement(&self) -> ParameterAgreement {
        ParameterAgreement::EveryStep
    }

    fn compute_local_gradient(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        self.buckets.differentiate(runtime, work)
    }

    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        let Self { step, buckets } = self;
        let Replica { parameters, gradients, optimizer } = replica;
        buckets.flush(runtime, gradients)?;
        let pending = runtime.start_sum_of_totals(own_totals.to_array().to_vec())?;
        step.begin(optimizer);
        if let Some(norm_max) = optimizer.clip_norm {
            buckets.wait_and_write_sums(gradients)?;
            let chunks = step.chunks();
            let mut squares = [0.0];
            for (chunk, start) in &chunks {
                for part in optimizer.clipped_parts(*start, &mut gradients[chunk.clone()]) {
                    squares[0] += clipping::euclidean_norm(part).powi(2);
                }
            }
            runtime.combine(Values::Totals(&mut squares))?;
            let norm = squares[0].sqrt();
            for (chunk, start) in chunks {
                let sums = &mut gradients[chunk.clone()];
                for part in optimizer.clipped_parts(start, sums) {
                    clipping::scale_to_norm(part, norm, norm_max);
                }
                step.update(chunk, parameters, sums, optimizer);
            }
        } else if buckets.are_single_chunks() {
            buckets.wait_for_all_buckets(gradients, |chunk, sums| {
                step.update(chunk, parameters, sums, optimizer);
            })?;
        } else {
            // The parts of a chunk arrive in several sums.
            buckets.wait_and_write_sums(gradients)?;
            for (chunk, _) in step.chunks() {
                let sums = &mut gradients[chunk.clone()];
                step.update(chunk, parameters, sums, optimizer);
            }
        }
        step.finish(runtime, replica)?;
        Ok(Some(StepTotals::from_totals(&pending.wait()?)))
    }

    fn bucket_bytes(&self) -> Option<usize> {
        self.buckets.bytes()
    }

    fn compressed_sums(&mut self) -> Option<&mut Buckets> {
        Some(&mut self.buckets)
    }
}
