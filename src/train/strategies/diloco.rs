//! `DiLoCo`, distributed low-communication training. Each rank takes H steps alone. Then the ranks average the
//! changes of their parameters. The negative of this average is the gradient of an outer optimizer with Nesterov
//! momentum:
//!
//! `g = -(w_1 c_1 + ... + w_n c_n)`, `v = m v + g`, `s = s - r (g + m v)`
//!
//! Here `c_i` is the sum of the H steps of rank i, s holds the parameters after the last outer step, v is the outer
//! velocity, m the outer momentum, and r the outer learning rate. `w_i` is the share of rank i in the samples that all
//! ranks have processed in these H steps. With m = 0 and r = 1 the method is local SGD.
//!
//! The ranks take D more steps while they average. Rank i starts these steps from an estimate `e_i`: the result of the
//! outer step if the changes of all ranks were `c_i`. When rank i knows s, it adds `s - e_i` to its parameters. With one
//! rank, the estimate has no error, so the parameters do not depend on D. With m = 0 and r = 1 this is `CoCoD-SGD`.
//!
//! The running statistics of batch normalization are averaged without momentum, as with local SGD, because momentum
//! could make a variance negative. So could the error of an estimate. So with a delay, each rank keeps its own
//! statistics until the ranks agree on their parameters.
//!
//! Sources: Douillard et al., "`DiLoCo`: distributed low-communication training of language models", 2023; for the
//! steps during an average, Shen et al., "Faster distributed deep net training: computation and communication
//! decoupled stochastic gradient descent", IJCAI 2019; for the estimate, Kale et al., "Eager updates for overlapped
//! communication and computation in `DiLoCo`", 2025.

use std::num::NonZeroU32;
use std::ops::Range;

use super::local_training::{AveragingRule, add_differences};

/// The outer learning rate, as in the paper.
const OUTER_LEARNING_RATE: f32 = 0.7;
/// The outer momentum, as in the paper.
const OUTER_MOMENTUM: f32 = 0.9;

/// The strategy `diloco`.
pub(crate) struct DiLoCo {
    /// The number of steps between two outer steps.
    steps: NonZeroU32,
    /// The number of steps that the ranks take while they average their changes.
    delay: u32,
    /// The outer velocity, the same on all ranks. 0 for running statistics.
    velocity: Vec<f32>,
    /// The ranges of the parameters that are running statistics of batch normalization.
    statistics: Vec<Range<usize>>,
    /// The ranges of all other parameters.
    trained: Vec<Range<usize>>,
}

impl DiLoCo {
    /// Creates the strategy for a model of `parameter_count` parameters. `statistics` are the ranges of the running
    /// statistics, in increasing order.
    pub(crate) fn new(
        (steps, delay): (NonZeroU32, u32),
        parameter_count: usize,
        statistics: Vec<Range<usize>>,
    ) -> Self {
        let starts = std::iter::once(0).chain(statistics.iter().map(|range| range.end));
        let ends = statistics.iter().map(|range| range.start).chain([parameter_count]);
        let trained = starts.zip(ends).map(|(start, end)| start..end).collect();
        Self { steps, delay, velocity: vec![0.0; parameter_count], statistics, trained }
    }
}

impl AveragingRule for DiLoCo {
    fn is_due_after_step(&self, steps: u64) -> bool {
        steps.is_multiple_of(self.steps.get().into())
    }

    fn is_due_after_epoch(&self, _: u64) -> bool {
        true
    }

    fn delay(&self) -> u32 {
        self.delay
    }

    /// In a world of one rank, the outer step still applies the outer momentum to the changes of the parameters.
    fn changes_single_rank(&self) -> bool {
        true
    }

    fn update(&mut self, start: &mut [f32], change: &[f32]) {
        for range in self.trained.iter().cloned() {
            let changes = start[range.clone()].iter_mut().zip(&change[range.clone()]);
            for ((s, c), v) in changes.zip(&mut self.velocity[range]) {
                (*s, *v) = outer_step(*s, *v, *c);
            }
        }
        for index in self.statistics.iter().cloned().flatten() {
            start[index] += change[index];
        }
    }

    fn estimate(&self, parameters: &mut [f32], start: &[f32]) {
        for range in self.trained.iter().cloned() {
            let own = parameters[range.clone()].iter_mut().zip(&start[range.clone()]);
            for ((p, s), v) in own.zip(&self.velocity[range]) {
                (*p, _) = outer_step(*s, *v, *p - s);
            }
        }
    }

    fn correct(&self, parameters: &mut [f32], estimate: &[f32], start: &[f32]) {
        for range in self.trained.iter().cloned() {
            add_differences(&mut parameters[range.clone()], &estimate[range.clone()], &start[range]);
        }
    }

    fn state(&mut self) -> Vec<&mut Vec<f32>> {
        vec![&mut self.velocity]
    }
}

/// Returns a parameter and its velocity after an outer step.
fn outer_step(start: f32, velocity: f32, change: f32) -> (f32, f32) {
    let gradient = -change;
    let velocity = OUTER_MOMENTUM * velocity + gradient;
    (start - OUTER_LEARNING_RATE * (gradient + OUTER_MOMENTUM * velocity), velocity)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers were computed by hand with the formulas of `torch.optim.SGD(lr=0.7, momentum=0.9,
    /// nesterov=True)`. The gradients are -1 and -2.
    #[test]
    fn the_outer_steps_are_those_of_sgd_with_nesterov_momentum() {
        let mut diloco = DiLoCo::new((NonZeroU32::MIN, 1), 2, std::iter::once(1..2).collect());
        let mut start = [10.0, 10.0];
        diloco.update(&mut start, &[1.0, 1.0]);
        assert!((start[0] - 11.33).abs() < 1e-5, "{start:?}");
        diloco.update(&mut start, &[2.0, -2.0]);
        assert!((start[0] - 14.557).abs() < 1e-5, "{start:?}");
        assert_eq!(start[1], 9.0, "the second value is a running statistic, which has no momentum");
    }

    /// The running statistic is the second of the two parameters.
    #[test]
    fn each_rank_keeps_its_own_running_statistics_during_an_average() {
        let mut diloco = DiLoCo::new((NonZeroU32::MIN, 1), 2, std::iter::once(1..2).collect());
        let mut parameters = [11.0, 1.0];
        diloco.estimate(&mut parameters, &[10.0, 5.0]);
        assert!((parameters[0] - 11.33).abs() < 1e-5 && parameters[1] == 1.0, "{parameters:?}");
        diloco.correct(&mut parameters, &[11.0, 1.0], &[12.0, 9.0]);
        assert!((parameters[0] - 12.33).abs() < 1e-5 && parameters[1] == 1.0, "{parameters:?}");
        diloco.update(&mut [10.0, 5.0], &[1.0, 1.0]);
        assert_eq!(diloco.velocity, [-1.0, 0.0], "running statistics have no velocity");
    }
}
