//! How compression changes during a run: the warm-up, and the momentum that ranks apply before they compress.

use super::optimizer::Rule;
use super::portable_math::{exp, ln};
use crate::codec::Compression;
use crate::types::Fraction;

/// The number of fractions that top-k and random-k send in the warm-up, one after the other. With the fraction 0.001, these are
/// 25%, 6.3%, 1.6% and 0.4%, as in the paper of Deep Gradient Compression.
const WARMUP_STAGES: u64 = 4;

/// How the compression of a run changes with its steps.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct CompressionSchedule {
    /// The number of steps of the warm-up.
    pub(crate) warmup_steps: u64,
    /// The momentum that ranks apply before the sum. `None` leaves the momentum to the optimizer.
    pub(crate) momentum: Option<CompressedMomentum>,
}

/// The momentum that each rank applies to its own gradient, before the ranks compress and sum.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum CompressedMomentum {
    /// Momentum correction. The velocity of an element starts again at 0 when the element is sent. The optimizer only subtracts
    /// the sums times the learning rate.
    ///
    /// Source: Lin et al., "Deep Gradient Compression: reducing the communication bandwidth for distributed training", ICLR 2018.
    Corrected {
        /// The fraction of the velocity that each step keeps.
        momentum: f32,
        /// Whether a rank sends `gradient + momentum * velocity`, as Nesterov's momentum does.
        is_nesterov: bool,
        /// The weight decay, which belongs to the gradient.
        weight_decay: f32,
    },
    /// Adam. After the warm-up, whose sums are exact, the second moment stays the same, and the ranks sum the first moment.
    ///
    /// Source: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed", ICML 2021.
    FrozenVariance {
        /// The decay rate of the first moment.
        beta_1: f32,
        /// 1 - `beta_1`, rounded once.
        one_minus_beta_1: f32,
    },
}

impl CompressionSchedule {
    /// Returns the compression in step `step`, counted from 0, of a tensor whose compression after the warm-up is `full`.
    pub(crate) fn compression_at(&self, step: u64, full: Compression) -> Compression {
        let fraction_at = |full: Fraction| {
            let stage = u128::from(step) * u128::from(WARMUP_STAGES) / u128::from(self.warmup_steps);
            let exponent = (stage + 1) as f64 / (WARMUP_STAGES + 1) as f64;
            Fraction::new(exp(ln(full.value()) * exponent)).unwrap_or(full)
        };
        match full {
            _ if step >= self.warmup_steps => full,
            _ if matches!(self.momentum, Some(CompressedMomentum::FrozenVariance { .. })) => {
                Compression::None
            }
            Compression::TopK(fraction) => Compression::TopK(fraction_at(fraction)),
            Compression::RandomK(fraction) => Compression::RandomK(fraction_at(fraction)),
            _ => full,
        }
    }

    /// Returns the momentum that ranks apply before the sum in step `step`, counted from 0.
    pub(crate) fn momentum_at(&self, step: u64) -> Option<CompressedMomentum> {
        match self.momentum {
            Some(CompressedMomentum::FrozenVariance { .. }) if step < self.warmup_steps => None,
            momentum => momentum,
        }
    }

    /// Returns whether each rank has a velocity of its own.
    pub(crate) fn has_velocities(&self) -> bool {
        matches!(self.momentum, Some(CompressedMomentum::Corrected { .. }))
    }

    /// Returns the number of steps in which Adam learns its second moment.
    pub(crate) fn variance_steps(&self) -> u64 {
        match self.momentum {
            Some(CompressedMomentum::FrozenVariance { .. }) => self.warmup_steps,
            _ => u64::MAX,
        }
    }

    /// Returns the rule and the weight decay with which the optimizer applies the sums.
    pub(crate) fn rule_after_sum(&self, rule: Rule, weight_decay: f32) -> (Rule, f32) {
        if self.has_velocities() { (Rule::Sgd, 0.0) } else { (rule, weight_decay) }
    }

    /// Returns the value of the entry of a checkpoint that a resumed run must not change.
    pub(crate) fn identity(&self) -> String {
        match self.momentum {
            None => NO_MOMENTUM.into(),
            Some(CompressedMomentum::Corrected { .. }) => "corrected".into(),
            Some(CompressedMomentum::FrozenVariance { .. }) => {
                format!("variance frozen after {} steps", self.warmup_steps)
            }
        }
    }
}

/// The value of [`CompressionSchedule::identity`] for runs whose optimizer applies the momentum.
pub(crate) const NO_MOMENTUM: &str = "none";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fractions_fall_by_a_constant_factor() {
        let full: Compression = "topk:0.001".parse().unwrap();
        let schedule = CompressionSchedule { warmup_steps: 8, momentum: None };
        let found: Vec<String> =
            (0..10).map(|step| schedule.compression_at(step, full).to_string()).collect();
        let stages = ["topk:0.251189", "topk:0.063096", "topk:0.015849", "topk:0.003981", "topk:0.001"];
        for (step, found) in found.iter().enumerate() {
            assert_eq!(found, stages[step / 2], "{step}");
        }
        for (steps, step, codec, expected) in [
            (2, 0, "randomk:0.00001", "randomk:0.1"),
            (2, 1, "randomk:0.00001", "randomk:0.001"),
            (u64::MAX, u64::MAX - 1, "topk:0.00001", "topk:0.0001"),
            (8, 0, "topk:1", "topk:1"),
            (8, 0, "int8", "int8"),
            (8, 0, "none", "none"),
        ] {
            let schedule = CompressionSchedule { warmup_steps: steps, momentum: None };
            let found = schedule.compression_at(step, codec.parse().unwrap()).to_string();
            assert_eq!(found, expected, "{codec}, step {step} of {steps}");
        }
    }
}
