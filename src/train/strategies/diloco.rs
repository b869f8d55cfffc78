//! `DiLoCo`, distributed low-communication training. Each rank takes H steps alone. Then the ranks average the
//! changes of their parameters. The negative of this average is the gradient of an outer optimizer with Nesterov
//! momentum:
//!
//! `g = -(w_1 (p_1 - s) + ... + w_n (p_n - s))`, `v = m v + g`, `p_i = s - r (g + m v)` on all ranks.
//!
//! Here s holds the parameters after the last outer step, v is the outer velocity, m the outer momentum, and r the
//! outer learning rate. `w_i` is the share of rank i in the samples that all ranks have processed since the last
//! outer step. With m = 0 and r = 1 the method is local SGD. The running statistics of batch normalization are
//! averaged without momentum, as with local SGD, because momentum could make a variance negative.
//!
//! Source: Douillard et al., "`DiLoCo`: distributed low-communication training of language models", 2023.

use std::num::NonZeroU32;
use std::ops::Range;

use super::local_training::AveragingRule;

/// The outer learning rate, as in the paper.
const OUTER_LEARNING_RATE: f32 = 0.7;
/// The outer momentum, as in the paper.
const OUTER_MOMENTUM: f32 = 0.9;

/// The strategy `diloco`.
pub(crate) struct DiLoCo {
    /// The number of steps between two outer steps.
    steps: NonZeroU32,
    /// The outer velocity, the same on all ranks.
    velocity: Vec<f32>,
    /// The ranges of the parameters that are running statistics of batch normalization.
    statistics: Vec<Range<usize>>,
}

impl DiLoCo {
    /// Creates the strategy for a model of `parameter_count` parameters. `statistics` are the ranges of the running
    /// statistics.
    pub(crate) fn new(steps: NonZeroU32, parameter_count: usize, statistics: Vec<Range<usize>>) -> Self {
        Self { steps, velocity: vec![0.0; parameter_count], statistics }
    }
}

impl AveragingRule for DiLoCo {
    fn is_due_after_step(&self, steps: u64) -> bool {
        steps.is_multiple_of(self.steps.get().into())
    }

    fn is_due_after_epoch(&self, _: u64) -> bool {
        true
    }

    /// In a world of one rank, the outer step still applies the outer momentum to the changes of the parameters.
    fn changes_single_rank(&self) -> bool {
        true
    }

    fn update(&mut self, parameters: &mut [f32], start: &[f32], change: &[f32]) {
        let old = start.iter().zip(change).zip(&mut self.velocity);
        for (p, ((s, c), v)) in parameters.iter_mut().zip(old) {
            let gradient = -c;
            *v = OUTER_MOMENTUM * *v + gradient;
            *p = s - OUTER_LEARNING_RATE * (gradient + OUTER_MOMENTUM * *v);
        }
        for index in self.statistics.iter().cloned().flatten() {
            (parameters[index], self.velocity[index]) = (start[index] + change[index], 0.0);
        }
    }

    fn state(&mut self) -> Vec<&mut Vec<f32>> {
        vec![&mut self.velocity]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers were computed by hand with the formulas of `torch.optim.SGD(lr=0.7, momentum=0.9,
    /// nesterov=True)`. The gradients are -1 and -2.
    #[test]
    fn the_outer_steps_are_those_of_sgd_with_nesterov_momentum() {
        let mut diloco = DiLoCo::new(1.try_into().unwrap(), 2, std::iter::once(1..2).collect());
        let mut parameters = [0.0, 0.0];
        diloco.update(&mut parameters, &[10.0, 10.0], &[1.0, 1.0]);
        assert!((parameters[0] - 11.33).abs() < 1e-5, "{parameters:?}");
        diloco.update(&mut parameters, &[11.33, 11.0], &[2.0, -2.0]);
        assert!((parameters[0] - 14.557).abs() < 1e-5, "{parameters:?}");
        assert_eq!(parameters[1], 9.0, "the second value is a running statistic, which has no momentum");
    }
}
