//! Cross-entropy with smoothed targets and with class weights.

use std::sync::Arc;

use ndarray::ArrayViewMut1;

use crate::train::portable_math::ln;

/// The constants of a cross-entropy with label smoothing and class weights. With label smoothing s, class weights w,
/// K classes and probabilities p, the loss of a sample of class y is
/// `w_y ((1 - s) (-ln p_y) + s / K sum_k (-ln p_k))`.
///
/// Label smoothing works as in `PyTorch`'s `CrossEntropyLoss` (Szegedy et al. 2016). Class weights work like
/// scikit-learn's `class_weight`: they multiply the losses of samples, and the mean loss is the sum divided by the
/// number of samples.
#[derive(Clone, PartialEq, Debug)]
pub struct CrossEntropyOptions {
    /// The label smoothing s.
    smoothing: f32,
    /// The weight of each class.
    weights: Arc<[f32]>,
}

impl CrossEntropyOptions {
    /// Creates the constants. `smoothing` is at least 0 and below 1. `weights` holds one number for each class. Each
    /// number is finite and at least 0.
    pub fn new(smoothing: f32, weights: Vec<f32>) -> Self {
        Self { smoothing, weights: weights.into() }
    }

    /// Returns the weights of the classes.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Returns the largest weight of a class.
    pub(crate) fn weight_max(&self) -> f32 {
        self.weights.iter().copied().fold(0.0, f32::max)
    }

    /// Returns the loss of a sample of class `class`. `cross_entropy` is -ln p of `class`, and `mean_over_classes` is
    /// the mean of -ln p over all classes.
    pub(crate) fn loss(&self, class: usize, cross_entropy: f64, mean_over_classes: f64) -> f64 {
        let smoothing = f64::from(self.smoothing);
        f64::from(self.weights[class]) * ((1.0 - smoothing) * cross_entropy + smoothing * mean_over_classes)
    }

    /// Replaces the `probabilities` of a sample of class `class` by `weight` times the derivative of the sample's
    /// loss with respect to the outputs.
    pub(crate) fn differentiate(&self, mut probabilities: ArrayViewMut1<'_, f32>, class: usize, weight: f32) {
        let weight = weight * self.weights[class];
        let share = self.smoothing / probabilities.len() as f32;
        probabilities.mapv_inplace(|probability| weight * (probability - share));
        probabilities[class] -= weight * (1.0 - self.smoothing);
    }

    /// Returns the mean loss of the best constant prediction for a set with `counts[c]` samples of each class c. This
    /// loss is the entropy of the smoothed and weighted targets.
    pub(crate) fn constant_prediction_loss(&self, counts: &[u64]) -> f64 {
        let smoothing = f64::from(self.smoothing);
        let masses: Vec<f64> = counts
            .iter()
            .zip(&*self.weights)
            .map(|(&count, &weight)| count as f64 * f64::from(weight))
            .collect();
        let total: f64 = masses.iter().sum();
        let share = smoothing * total / counts.len() as f64;
        let targets =
            masses.iter().map(|mass| (1.0 - smoothing) * mass + share).filter(|&target| target > 0.0);
        let loss: f64 = targets.map(|target| -target * ln(target / total)).sum();
        loss / counts.iter().sum::<u64>().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constant_loss_is_the_loss_of_the_best_constant_prediction() {
        let counts = [5, 0, 3];
        for (smoothing, weights) in
            [(0.0, [1.0; 3]), (0.3, [1.0; 3]), (0.0, [2.0, 1.0, 0.5]), (0.2, [2.0, 1.0, 0.0])]
        {
            let options = CrossEntropyOptions::new(smoothing, weights.to_vec());
            let mean_loss = |probabilities: [f64; 3]| {
                let logs = probabilities.map(|probability| -probability.max(1e-300).ln());
                let mean = logs.iter().sum::<f64>() / 3.0;
                let losses =
                    (0..3).map(|class| counts[class] as f64 * options.loss(class, logs[class], mean));
                losses.sum::<f64>() / 8.0
            };
            // Find the lowest mean loss over a grid of constant predictions.
            let mut best = f64::INFINITY;
            for first in 0..=200 {
                for second in 0..=200 - first {
                    let (first, second) = (f64::from(first) / 200.0, f64::from(second) / 200.0);
                    best = best.min(mean_loss([first, second, 1.0 - first - second]));
                }
            }
            let found = options.constant_prediction_loss(&counts);
            assert!(found <= best + 1e-9 && found > best - 1e-3, "{smoothing} {weights:?}: {found} {best}");
        }
    }
}
