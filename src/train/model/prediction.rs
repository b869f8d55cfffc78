//! The predictions of a model.

use ndarray::ArrayView1;

use super::TargetScale;

/// The prediction for a row.
#[derive(Clone, PartialEq, Debug)]
pub enum Prediction {
    /// The predicted number, in the unit of the target.
    Number(f64),
    /// A predicted class.
    Class {
        /// The index of the most probable class. If several classes are equally probable, the index of the first one.
        class: usize,
        /// The probability of each class.
        probabilities: Vec<f64>,
    },
}

impl Prediction {
    /// Converts the outputs of a network for a row. `scale` is the scale of the target, or `None` if the network predicts
    /// classes.
    pub(crate) fn from_outputs(outputs: &ArrayView1<'_, f32>, scale: Option<TargetScale>) -> Self {
        if let Some(TargetScale { mean, deviation }) = scale {
            return Self::Number(mean + deviation * f64::from(outputs[0]));
        }
        let max = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = outputs.iter().map(|&value| f64::from(value - max).exp()).collect();
        let sum: f64 = powers.iter().sum();
        // Extremely large inputs can cause NaN. `max` ignores NaN. If all outputs are NaN, the prediction is class 0.
        let class = outputs.iter().position(|&value| value == max).unwrap_or_default();
        Self::Class { class, probabilities: powers.iter().map(|power| power / sum).collect() }
    }
}
