//! Losses, and their derivatives with respect to the model's outputs.

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::train::data::Targets;

/// The unit in which a regression model computes: its output is (target - mean) / deviation.
///
/// Losses are reported in the target's own unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scale {
    /// The training targets' mean.
    pub mean: f64,
    /// Their standard deviation; never 0.
    pub deviation: f64,
}

impl Scale {
    /// No change of unit.
    pub const IDENTITY: Self = Self { mean: 0.0, deviation: 1.0 };

    /// The scale that brings `values` to mean 0 and deviation 1. If all values are the same, the deviation is left at 1.
    pub fn fit(values: &[f64]) -> Self {
        let count = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / count;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
        let usable = deviation.is_finite() && deviation > 1e-12 * mean.abs();
        Self { mean, deviation: if usable { deviation } else { 1.0 } }
    }
}

/// What training minimises.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Loss {
    /// Squared difference from the target, in the target's unit squared.
    SquaredError(Scale),
    /// Cross-entropy of the softmax of the outputs, in nats.
    CrossEntropy,
}

/// Sums over samples.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LossSums {
    /// The sum of the losses.
    pub loss: f64,
    /// Samples whose largest output is their class; 0 for regression.
    pub correct: u64,
}

impl Loss {
    /// Sums the losses of the samples with indices `rows`, whose model outputs are the rows of `outputs`, in order.
    pub(crate) fn evaluate(
        self,
        outputs: &ArrayView2<'_, f32>,
        targets: &Targets,
        rows: impl Iterator<Item = usize>,
    ) -> LossSums {
        let mut total = LossSums::default();
        for (output, row) in outputs.rows().into_iter().zip(rows) {
            match (self, targets) {
                (Self::SquaredError(scale), Targets::Numbers(values)) => {
                    total.loss += (scale.mean + scale.deviation * f64::from(output[0]) - values[row]).powi(2);
                }
                (Self::CrossEntropy, Targets::Classes(classes)) => {
                    let class = classes[row] as usize;
                    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let sum: f64 = output.iter().map(|&value| f64::from(value - max).exp()).sum();
                    total.loss += sum.ln() - f64::from(output[class] - max);
                    // Of equal outputs the first is chosen, as in numpy's argmax.
                    let choice = output.iter().position(|&value| value == max);
                    total.correct += u64::from(choice == Some(class));
                }
                _ => unreachable!("the loss is chosen by the targets"),
            }
        }
        total
    }

    /// Replaces `outputs` by `weight` times the derivative of the sum of the losses; for a regression, in units of its scale.
    pub(crate) fn differentiate(
        self,
        mut outputs: ArrayViewMut2<'_, f32>,
        targets: &Targets,
        rows: impl Iterator<Item = usize>,
        weight: f32,
    ) {
        for (mut output, row) in outputs.rows_mut().into_iter().zip(rows) {
            match (self, targets) {
                (Self::SquaredError(scale), Targets::Numbers(values)) => {
                    let wanted = (values[row] - scale.mean) / scale.deviation;
                    output[0] = 2.0 * weight * (f64::from(output[0]) - wanted) as f32;
                }
                (Self::CrossEntropy, Targets::Classes(classes)) => {
                    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    output.mapv_inplace(|value| (value - max).exp());
                    let factor = weight / output.sum();
                    output.mapv_inplace(|value| value * factor);
                    output[classes[row] as usize] -= weight;
                }
                _ => unreachable!("the loss is chosen by the targets"),
            }
        }
    }
}
