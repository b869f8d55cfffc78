//! Synchronous data parallelism. The ranks sum their gradients in every step, and every rank takes the same step:
//!
//! `p -= update(1/B * (g_1 + ... + g_n))`
//!
//! Here B is the number of samples that all ranks together use in the step, and `g_i` is the sum of the gradients of
//! the samples of rank i. So a run on several ranks gives the same parameters as a run in a single process, except for
//! rounding. After every step, the parameters and the optimizer are the same on all ranks, bit for bit. Batch
//! normalization uses the statistics of the whole batch. The ranks sum these statistics during the forward and the
//! backward pass.
//!
//! Source: Li et al., "`PyTorch` Distributed: experiences on accelerating data parallel training", VLDB 13 (2020).

use super::{ParameterAgreement, Replica, StepTotals, Strategy};
use crate::group::Error;
use crate::train::TrainError;
use crate::train::bucket_ranges::BucketSizes;
use crate::train::buckets::{Buckets, PassRuntime};
use crate::train::compression_plan::CompressionPlan;
use crate::train::gradient_work::GradientWork;
use crate::train::local_momentum::LocalMomentum;
use crate::train::model::LossSums;
use crate::train::runtime::{Runtime, SumTarget, Values};
use crate::types::WorldSize;

/// The strategy `allreduce`.
pub(crate) struct SynchronousStrategy {
    buckets: Buckets,
    /// Whether there is only one rank, which sums nothing.
    is_alone: bool,
}

impl SynchronousStrategy {
    /// Creates the strategy for the parameters of `plan`, with the momentum that is applied before the sums. `sizes` are the
    /// sizes of the buckets that are reduced during the backward pass. If there is a single bucket, it is reduced after the
    /// backward pass.
    pub(crate) fn new(
        size: WorldSize,
        (plan, momentum): (&CompressionPlan, Option<LocalMomentum>),
        sizes: BucketSizes,
    ) -> Self {
        let buckets = Buckets::new(plan, sizes, SumTarget::Everything).with_momentum(momentum);
        Self { buckets, is_alone: size == WorldSize::ONE }
    }

    /// Returns whether the ranks reduce gradients in buckets.
    fn has_buckets(&self) -> bool {
        !self.is_alone && self.buckets.bytes().is_some()
    }

    /// Returns whether the ranks reduce gradients during the backward pass of the current step.
    fn overlaps(&self) -> bool {
        self.has_buckets() && !self.buckets.need_whole_gradient()
    }
}

impl Strategy for SynchronousStrategy {
    fn parameter_agreement(&self) -> ParameterAgreement {
        ParameterAgreement::EveryStep
    }

    fn compute_local_gradient(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        if self.overlaps() {
            return self.buckets.differentiate(runtime, work);
        }
        let weight = 1.0 / work.batch_len as f32;
        let ranks = PassRuntime::new(runtime);
        let sums = work.differentiate(weight, &ranks, (usize::MAX, |_, _: &mut [f32]| {}))?;
        Ok(ranks.into_result(sums)?)
    }

    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        if !self.overlaps() {
            self.buckets.apply_momentum(replica);
        }
        let Replica { parameters, gradients, optimizer } = replica;
        let totals = own_totals.to_array().to_vec();
        let buckets = &mut self.buckets;
        if self.is_alone {
            optimizer.step(parameters, gradients);
            return Ok(Some(own_totals));
        }
        if buckets.bytes().is_none() {
            buckets.sum(runtime, gradients)?;
            let mut totals = totals;
            runtime.combine(Values::Totals(&mut totals))?;
            optimizer.step(parameters, gradients);
            return Ok(Some(StepTotals::from_totals(&totals)));
        }
        buckets.flush(runtime, gradients)?;
        let pending = runtime.start_sum_of_totals(totals)?;
        if optimizer.clip_norm.is_some() {
            // Clipping needs the norm of the whole gradient, so wait for all buckets first.
            buckets.wait_and_write_sums(gradients)?;
            optimizer.step(parameters, gradients);
        } else {
            optimizer.begin_step();
            buckets.wait_for_all_buckets(gradients, |range, gradients| {
                optimizer.update_range(range, parameters, gradients);
            })?;
            optimizer.finish_step(parameters);
        }
        Ok(Some(StepTotals::from_totals(&pending.wait()?)))
    }

    fn bucket_bytes(&self) -> Option<usize> {
        if self.has_buckets() { self.buckets.bytes() } else { None }
    }

    fn compressed_sums(&mut self) -> Option<&mut Buckets> {
        Some(&mut self.buckets)
    }
}
