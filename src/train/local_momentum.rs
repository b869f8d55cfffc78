//! What a rank does with its own gradient before the ranks sum compressed values: it clips the gradient and applies
//! [`CompressedMomentum`].

use std::ops::Range;

use super::bucket_ranges::overlap;
use super::clipping;
use super::compression_plan::{CompressionPlan, PlannedTensor};
use super::compression_schedule::{CompressedMomentum, CompressionSchedule};
use crate::codec::Compression;
use crate::types::WorldSize;

/// The momentum of one rank, for the parameters that it holds.
pub(crate) struct LocalMomentum {
    schedule: CompressionSchedule,
    /// The number of ranks that sum.
    ranks: f32,
    /// The largest norm of the gradient of this rank. Lin et al. divide the largest norm of the sum by the root of the number of
    /// ranks: if the gradients of the ranks are independent, the norm of their sum is larger by this factor.
    clip_norm: Option<f32>,
    /// The velocity of each parameter. Empty without [`CompressionSchedule::has_velocities`].
    pub(crate) velocity: Vec<f32>,
    /// The ranges of the parameters that are trained. Running statistics have no momentum.
    trained: Vec<Range<usize>>,
    /// The ranges of which a sum has only some elements.
    sparse: Vec<Range<usize>>,
}

/// What [`LocalMomentum::apply`] reads: a value for each parameter that the rank holds.
#[derive(Clone, Copy)]
pub(crate) struct MomentumInputs<'a> {
    pub(crate) parameters: &'a [f32],
    /// The first moment of Adam. Unused with momentum correction.
    pub(crate) first_moment: &'a [f32],
}

impl LocalMomentum {
    /// Creates the momentum of a rank, if `plan` asks for it. `ranks` is the number of ranks that sum, and `clip_norm` the
    /// largest norm of the sum.
    pub(crate) fn new(plan: &CompressionPlan, (ranks, clip_norm): (WorldSize, Option<f32>)) -> Option<Self> {
        let schedule = plan.schedule;
        schedule.momentum?;
        let count = plan.tensors.last().map_or(0, |tensor| tensor.range.end);
        let ranges = |filter: fn(&PlannedTensor) -> bool| {
            plan.tensors.iter().filter(|tensor| filter(tensor)).map(|tensor| tensor.range.clone()).collect()
        };
        let ranks = ranks.get() as f32;
        Some(Self {
            schedule,
            ranks,
            clip_norm: clip_norm.map(|norm| norm / ranks.sqrt()),
            velocity: if schedule.has_velocities() { vec![0.0; count] } else { Vec::new() },
            trained: ranges(|tensor| !tensor.is_statistic),
            sparse: ranges(|tensor| {
                matches!(tensor.compression, Compression::TopK(_) | Compression::RandomK(_))
            }),
        })
    }

    /// Returns whether the rank needs its whole gradient in step `step` before it can start a sum.
    pub(crate) fn needs_whole_gradient(&self, step: u64) -> bool {
        self.clip_norm.is_some() && self.schedule.momentum_at(step).is_some()
    }

    /// Clips the whole gradient of this rank, and applies the momentum to it.
    pub(crate) fn clip_and_apply(&mut self, step: u64, gradients: &mut [f32], inputs: MomentumInputs<'_>) {
        if let Some(norm_max) = self.clip_norm.filter(|_| self.needs_whole_gradient(step)) {
            let square = |range: &Range<usize>| clipping::euclidean_norm(&gradients[range.clone()]).powi(2);
            let norm = self.trained.iter().map(square).sum::<f64>().sqrt();
            for range in &self.trained {
                clipping::scale_to_norm(&mut gradients[range.clone()], norm, norm_max);
            }
        }
        self.apply(step, 0..gradients.len(), gradients, inputs);
    }

    /// Replaces the elements `range` of this rank's gradient by what the ranks sum in step `step`: with momentum correction, by
    /// the velocity, and with a frozen variance, by this rank's part of the new first moment.
    pub(crate) fn apply(
        &mut self,
        step: u64,
        range: Range<usize>,
        gradients: &mut [f32],
        MomentumInputs { parameters, first_moment }: MomentumInputs<'_>,
    ) {
        let Some(rule) = self.schedule.momentum_at(step) else { return };
        for part in self.trained.iter().map(|trained| overlap(trained, &range)) {
            let gradients = &mut gradients[part.clone()];
            match rule {
                CompressedMomentum::Corrected { momentum, is_nesterov, weight_decay } => {
                    // The sum over the ranks has the whole weight decay.
                    let decay = weight_decay / self.ranks;
                    if decay != 0.0 {
                        gradients
                            .iter_mut()
                            .zip(&parameters[part.clone()])
                            .for_each(|(g, p)| *g += decay * p);
                    }
                    let velocity = self.velocity[part].iter_mut();
                    for (g, v) in gradients.iter_mut().zip(velocity) {
                        *v = momentum * *v + *g;
                        *g = if is_nesterov { *g + momentum * *v } else { *v };
                    }
                }
                CompressedMomentum::FrozenVariance { beta_1, one_minus_beta_1 } => {
                    // All ranks have the same first moment.
                    let kept = beta_1 / self.ranks;
                    for (g, m) in gradients.iter_mut().zip(&first_moment[part]) {
                        *g = kept * m + one_minus_beta_1 * *g;
                    }
                }
            }
        }
    }

    /// Handles the sums of `range`. The velocity of an element that the ranks have applied starts again at 0 on all ranks,
    /// because the older gradients in it are stale (momentum factor masking).
    pub(crate) fn reset_applied(&mut self, range: &Range<usize>, sums: &[f32]) {
        if self.velocity.is_empty() {
            return;
        }
        for part in self.sparse.iter().map(|sparse| overlap(sparse, range)) {
            let sums = &sums[part.start - range.start..part.end - range.start];
            for (v, sum) in self.velocity[part].iter_mut().zip(sums) {
                *v = if *sum == 0.0 { *v } else { 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::compression_memory::MemoryNeeds;

    /// Returns the plan of four parameters: two of which top-k sends some, an exact one, and a running statistic.
    fn plan(momentum: CompressedMomentum) -> CompressionPlan {
        let tensor = |range: Range<usize>, compression: &str| PlannedTensor {
            matrix: (1, range.len()),
            is_statistic: range.start == 3,
            compression: compression.parse().unwrap(),
            range,
        };
        CompressionPlan {
            tensors: vec![tensor(0..2, "topk:0.5"), tensor(2..3, "none"), tensor(3..4, "none")],
            seed: 0,
            memory: MemoryNeeds::default(),
            schedule: CompressionSchedule { warmup_steps: 0, momentum: Some(momentum) },
        }
    }

    /// The optimizer's first moment is 8 for each parameter, and each parameter is 10.
    fn apply(local: &mut LocalMomentum, gradients: [f32; 4]) -> [f32; 4] {
        let mut gradients = gradients;
        let inputs = MomentumInputs { parameters: &[10.0; 4], first_moment: &[8.0; 4] };
        local.clip_and_apply(0, &mut gradients, inputs);
        gradients
    }

    #[test]
    fn the_velocity_of_applied_elements_starts_again_at_0() {
        let corrected =
            |is_nesterov| CompressedMomentum::Corrected { momentum: 0.5, is_nesterov, weight_decay: 0.4 };
        let ranks = WorldSize::new(4).unwrap();
        for (is_nesterov, expected) in [(false, [5.0, 3.0, 5.0, 2.0]), (true, [5.5, 4.5, 5.5, 2.0])] {
            let mut local = LocalMomentum::new(&plan(corrected(is_nesterov)), (ranks, None)).unwrap();
            // The weight decay adds 0.4 / 4 * 10 = 1. In the first step, the velocity is 4.
            apply(&mut local, [3.0, 3.0, 3.0, 3.0]);
            local.reset_applied(&(1..4), &[7.0, 7.0, 7.0]);
            assert_eq!(local.velocity, [4.0, 0.0, 4.0, 0.0]);
            // The gradient is 2 + 1.
            assert_eq!(apply(&mut local, [2.0, 2.0, 2.0, 2.0]), expected);
            assert_eq!(local.velocity, [5.0, 3.0, 5.0, 0.0]);
        }
    }

    #[test]
    fn a_rank_clips_its_gradient_to_its_part_of_the_norm() {
        let frozen = CompressedMomentum::FrozenVariance { beta_1: 0.75, one_minus_beta_1: 0.25 };
        let ranks = WorldSize::new(4).unwrap();
        let mut local = LocalMomentum::new(&plan(frozen), (ranks, Some(2.0))).unwrap();
        assert!(local.needs_whole_gradient(0));
        // The norm of the trained gradients is 3, and its limit is 1. Each rank has a quarter of 0.75 * 8.
        let found = apply(&mut local, [2.0, -2.0, 1.0, 9.0]);
        for (found, expected) in found.iter().zip([1.5 + 0.5 / 3.0, 1.5 - 0.5 / 3.0, 1.5 + 0.25 / 3.0, 9.0]) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }
}
