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
use crate::codec::Compression;
use crate::group::Error;
use crate::train::TrainError;
use crate::train::buckets::{Buckets, PassRuntime};
use crate::train::gradient_work::GradientWork;
use crate::train::model::LossSums;
use crate::train::runtime::{Runtime, Values};
use crate::types::WorldSize;

/// The strategy `allreduce`.
pub(crate) struct SynchronousStrategy {
    compression: Compression,
    /// The buckets that are reduced during the backward pass. If `None`, the ranks reduce all gradients after the
    /// backward pass.
    buckets: Option<Buckets>,
}

impl SynchronousStrategy {
    /// Creates the strategy for a model of `parameter_count` parameters. `bucket_bytes` is the size of a bucket of
    /// gradients.
    pub(crate) fn new(
        size: WorldSize,
        parameter_count: usize,
        bucket_bytes: Option<usize>,
        compression: Compression,
    ) -> Self {
        // A single bucket has no advantage, because its all-reduce could start only after the backward pass.
        let is_divided =
            |&bytes: &usize| size != WorldSize::ONE && bytes < size_of::<f32>() * parameter_count;
        let bytes = bucket_bytes.filter(is_divided);
        Self { compression, buckets: bytes.map(|bytes| Buckets::new(bytes, compression)) }
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
        if let Some(buckets) = &mut self.buckets {
            return buckets.differentiate(runtime, work);
        }
        let weight = 1.0 / work.batch_len as f32;
        let ranks = PassRuntime::new(runtime);
        let sums = work.differentiate(weight, &ranks, (usize::MAX, |_, _: &mut [f32]| {}))?;
        Ok(ranks.into_result(sums)?)
    }

    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        Replica { parameters, gradients, optimizer }: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        let mut totals = own_totals.to_array();
        if let Some(buckets) = &mut self.buckets {
            buckets.flush(runtime, gradients)?;
            let pending = runtime.start_sum_of_totals(totals.to_vec())?;
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
            totals.copy_from_slice(&pending.wait()?);
        } else {
            runtime.combine(Values::Vector(gradients, self.compression))?;
            runtime.combine(Values::Totals(&mut totals))?;
            optimizer.step(parameters, gradients);
        }
        Ok(Some(StepTotals::from_array(totals)))
    }

    fn bucket_bytes(&self) -> Option<usize> {
        self.buckets.as_ref().map(|buckets| buckets.elements_per_bucket() * size_of::<f32>())
    }
}
