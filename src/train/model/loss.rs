//! Losses, and their derivatives with respect to the model's outputs.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2};

use super::layer::CONTIGUITY_MESSAGE;
use super::{CrossEntropyOptions, OwnLoss};
use crate::train::data::Targets;
use crate::train::portable_math::{exp, ln};

/// The scale of the output of a regression model. The output predicts (target - mean) / deviation.
///
/// Reported losses compare predictions and targets in the unit of the targets.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TargetScale {
    /// The mean of the training targets.
    pub mean: f64,
    /// The standard deviation of the training targets; never 0.
    pub deviation: f64,
}

impl TargetScale {
    /// The scale of a model that predicts unscaled targets.
    pub const IDENTITY: Self = Self { mean: 0.0, deviation: 1.0 };

    /// Returns the scale that converts values with this mean and this variance to mean 0 and deviation 1. If all
    /// values are the same, the scale has the deviation 1.
    pub fn new(mean: f64, variance: f64) -> Self {
        let deviation = variance.sqrt();
        let usable = deviation.is_finite() && deviation > 1e-12 * mean.abs();
        Self { mean, deviation: if usable { deviation } else { 1.0 } }
    }
}

/// The function that training minimizes.
#[derive(Clone, PartialEq, Debug)]
pub enum Loss {
    /// The squared error. For a target in meters, the loss is in square meters.
    SquaredError(TargetScale),
    /// The cross-entropy of the softmax of the outputs, in nats.
    CrossEntropy,
    /// The cross-entropy with label smoothing and class weights.
    WeightedCrossEntropy(CrossEntropyOptions),
    /// The mean cross-entropy of the next tokens of a window, in nats for each token. For each position of a window,
    /// the outputs contain one number for each token of the vocabulary.
    NextToken,
    /// A loss of the program.
    Own(OwnLoss),
}

/// The results of an evaluation, summed over samples.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LossSums {
    /// The sum of the losses.
    pub loss: f64,
    /// The number of samples for which the output of the right class is the largest. 0 if the model predicts numbers or
    /// tokens.
    pub correct: u64,
}

impl LossSums {
    /// Adds the sums over other samples.
    pub(crate) fn add(&mut self, other: Self) {
        self.loss += other.loss;
        self.correct += other.correct;
    }
}

impl Loss {
    /// Returns the scale of the target. Returns `None` if the model predicts classes or tokens.
    pub(crate) fn target_scale(&self) -> Option<TargetScale> {
        match self {
            Self::SquaredError(scale) => Some(*scale),
            Self::Own(own) => own.scale,
            Self::CrossEntropy | Self::WeightedCrossEntropy(_) | Self::NextToken => None,
        }
    }

    /// Sums the losses of the samples with the indices `rows`. Row i of `outputs` is the output for the i-th index.
    pub(crate) fn evaluate(
        &self,
        outputs: &ArrayView2<'_, f32>,
        targets: &Targets,
        rows: impl Iterator<Item = usize>,
    ) -> LossSums {
        let mut total = LossSums::default();
        let mut derivatives =
            if matches!(self, Self::Own(_)) { vec![0.0; outputs.ncols()] } else { Vec::new() };
        for (output, row) in outputs.rows().into_iter().zip(rows) {
            match (self, targets) {
                (Self::Own(own), _) => {
                    let values = output.to_slice().expect(CONTIGUITY_MESSAGE);
                    total.loss += own.differentiate(values, (targets, row), &mut derivatives);
                    if let Targets::Classes(classes) = targets {
                        total.correct += u64::from(is_first_maximum(&output, classes[row] as usize));
                    }
                }
                (Self::SquaredError(scale), Targets::Numbers(values)) => {
                    total.loss += (scale.mean + scale.deviation * f64::from(output[0]) - values[row]).powi(2);
                }
                (Self::CrossEntropy | Self::WeightedCrossEntropy(_), Targets::Classes(classes)) => {
                    let class = classes[row] as usize;
                    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let sum: f64 = output.iter().map(|&value| exp(f64::from(value - max))).sum();
                    let cross_entropy = ln(sum) - f64::from(output[class] - max);
                    total.loss += if let Self::WeightedCrossEntropy(options) = self {
                        let distances: f64 = output.iter().map(|&value| f64::from(value - max)).sum();
                        options.loss(class, cross_entropy, ln(sum) - distances / output.len() as f64)
                    } else {
                        cross_entropy
                    };
                    total.correct += u64::from(is_first_maximum(&output, class));
                }
                (Self::NextToken, Targets::NextTokens(windows)) => {
                    let tokens = windows.next_tokens(row);
                    let outputs = output.exact_chunks(output.len() / tokens.len());
                    let losses = outputs
                        .into_iter()
                        .zip(tokens)
                        .map(|(output, &token)| next_token_loss(&output, token));
                    total.loss += losses.sum::<f64>() / tokens.len() as f64;
                }
                _ => unreachable!("the loss was chosen to match the targets"),
            }
        }
        total
    }

    /// Replaces `outputs` by `weight` times the derivative of the sum of the losses with respect to the outputs. For
    /// regression, the loss in this function is (output - scaled target)².
    pub(crate) fn differentiate(
        &self,
        mut outputs: ArrayViewMut2<'_, f32>,
        targets: &Targets,
        rows: impl Iterator<Item = usize>,
        weight: f32,
    ) {
        let mut derivatives =
            if matches!(self, Self::Own(_)) { vec![0.0; outputs.ncols()] } else { Vec::new() };
        for (mut output, row) in outputs.rows_mut().into_iter().zip(rows) {
            match (self, targets) {
                (Self::Own(own), _) => {
                    let values = output.as_slice_mut().expect(CONTIGUITY_MESSAGE);
                    own.differentiate(values, (targets, row), &mut derivatives);
                    values
                        .iter_mut()
                        .zip(&derivatives)
                        .for_each(|(value, derivative)| *value = weight * derivative);
                }
                (Self::SquaredError(scale), Targets::Numbers(values)) => {
                    let scaled_target = (values[row] - scale.mean) / scale.deviation;
                    output[0] = 2.0 * weight * (f64::from(output[0]) - scaled_target) as f32;
                }
                (Self::WeightedCrossEntropy(options), Targets::Classes(classes)) => {
                    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    output.mapv_inplace(|value| exp(f64::from(value - max)) as f32);
                    let factor = 1.0 / output.sum();
                    output.mapv_inplace(|value| value * factor);
                    options.differentiate(output, classes[row] as usize, weight);
                }
                (Self::CrossEntropy, Targets::Classes(classes)) => {
                    differentiate_cross_entropy(&mut output, classes[row] as usize, weight);
                }
                (Self::NextToken, Targets::NextTokens(windows)) => {
                    let tokens = windows.next_tokens(row);
                    let weight = weight / tokens.len() as f32;
                    let vocabulary = output.len() / tokens.len();
                    for (mut output, &token) in output.exact_chunks_mut(vocabulary).into_iter().zip(tokens) {
                        differentiate_cross_entropy(&mut output, token.into(), weight);
                    }
                }
                _ => unreachable!("the loss was chosen to match the targets"),
            }
        }
    }
}

/// Returns whether `output[index]` is the largest value. If several elements have the largest value, only the first of them
/// counts, as in numpy's argmax.
fn is_first_maximum(output: &ArrayView1<'_, f32>, index: usize) -> bool {
    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    output.iter().position(|&value| value == max) == Some(index)
}

/// Replaces the outputs in `output` by `weight` times the derivatives of the cross-entropy.
fn differentiate_cross_entropy(output: &mut ArrayViewMut1<'_, f32>, class: usize, weight: f32) {
    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    output.mapv_inplace(|value| exp(f64::from(value - max)) as f32);
    let factor = weight / output.sum();
    output.mapv_inplace(|value| value * factor);
    output[class] -= weight;
}

/// Returns the cross-entropy at one position of a text. `output` holds the outputs, and `token` is the next token.
fn next_token_loss(output: &ArrayView1<'_, f32>, token: u16) -> f64 {
    let max = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = output.iter().map(|&value| exp(f64::from(value - max))).sum();
    ln(sum) - f64::from(output[usize::from(token)] - max)
}
