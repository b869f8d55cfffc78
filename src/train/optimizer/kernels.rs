//! The loops of the optimizers. In each loop, p is a parameter, g is the gradient of p, and m and v are the optimizer
//! state of p. All slices of a call have the same length.

use super::{AdamOptions, power};

/// Multiplies each parameter by 1 - `rate` * `decay`.
pub(super) fn decay_weights(parameters: &mut [f32], rate: f32, decay: f32) {
    let factor = (1.0 - f64::from(rate) * f64::from(decay)) as f32;
    for p in parameters {
        *p *= factor;
    }
}

/// The coefficients of one step of [`Rule::Momentum`](super::Rule::Momentum) and its variants.
pub(super) struct MomentumStep {
    pub(super) momentum: f32,
    pub(super) rate: f32,
}

impl MomentumStep {
    /// Takes the step of [`Rule::Momentum`](super::Rule::Momentum).
    pub(super) fn apply(&self, parameters: &mut [f32], gradients: &[f32], velocity: &mut [f32]) {
        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            *v = self.momentum * *v + g;
            *p -= self.rate * *v;
        }
    }

    /// Takes the step of [`Rule::Nesterov`](super::Rule::Nesterov).
    pub(super) fn apply_nesterov(&self, parameters: &mut [f32], gradients: &[f32], velocity: &mut [f32]) {
        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            *v = self.momentum * *v + g;
            *p -= self.rate * (g + self.momentum * *v);
        }
    }

    /// Takes the first half of the step of [`Rule::Accelerated`](super::Rule::Accelerated): updates the velocity, and
    /// subtracts the gradients, times the learning rate, from the parameters. Returns the dot product of the new
    /// velocity and the gradients.
    pub(super) fn begin_accelerated_step(
        &self,
        parameters: &mut [f32],
        gradients: &[f32],
        velocity: &mut [f32],
    ) -> f64 {
        let mut ascent = 0.0;
        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            *v = self.momentum * *v - self.rate * g;
            *p -= self.rate * g;
            ascent += f64::from(*v) * f64::from(*g);
        }
        ascent
    }
}

/// The coefficients of one step of Adam, computed in f64 and then rounded, as in `PyTorch`. In f32, 1 - 0.999 would
/// have a relative error of 5e-5.
pub(super) struct AdamStep {
    beta_1: f32,
    beta_2: f32,
    one_minus_beta_1: f32,
    one_minus_beta_2: f32,
    epsilon: f32,
    rate: f32,
    /// `1 - beta_1^step`. Dividing the first moment by this number removes the bias.
    first_bias: f32,
    /// The learning rate divided by `first_bias`.
    step_size: f32,
    /// `sqrt(1 - beta_2^step)`. Dividing the root of the second moment by this number removes the bias.
    second_root: f32,
}

impl AdamStep {
    /// `step` counts from 1.
    pub(super) fn new(options: AdamOptions, rate: f32, step: u64) -> Self {
        let AdamOptions { beta_1, beta_2, epsilon } = options;
        Self {
            beta_1: beta_1 as f32,
            beta_2: beta_2 as f32,
            one_minus_beta_1: (1.0 - beta_1) as f32,
            one_minus_beta_2: (1.0 - beta_2) as f32,
            epsilon: epsilon as f32,
            rate,
            first_bias: (1.0 - power(beta_1, step)) as f32,
            step_size: (f64::from(rate) / (1.0 - power(beta_1, step))) as f32,
            second_root: (1.0 - power(beta_2, step)).sqrt() as f32,
        }
    }

    /// Updates the moments of the gradients.
    pub(super) fn update_moments(&self, gradients: &[f32], first: &mut [f32], second: &mut [f32]) {
        for ((g, m), v) in gradients.iter().zip(first).zip(second) {
            *m = self.beta_1 * *m + self.one_minus_beta_1 * g;
            *v = self.beta_2 * *v + self.one_minus_beta_2 * g * g;
        }
    }

    /// Takes the step of Adam. Call [`update_moments`](Self::update_moments) first.
    pub(super) fn apply(&self, parameters: &mut [f32], first: &[f32], second: &[f32]) {
        for ((p, m), v) in parameters.iter_mut().zip(first).zip(second) {
            *p -= self.step_size * m / (v.sqrt() / self.second_root + self.epsilon);
        }
    }

    /// Takes the step of LAMB on one tensor. The step is Adam's step plus `decay` times the parameters, scaled to the
    /// norm of the parameters. Norms are summed in f64 in a fixed order, so all ranks compute the same norms.
    pub(super) fn apply_lamb(&self, parameters: &mut [f32], first: &[f32], second: &[f32], decay: f32) {
        let direction = |p: f32, m: f32, v: f32| {
            m / self.first_bias / (v.sqrt() / self.second_root + self.epsilon) + decay * p
        };
        let (mut parameter_sum, mut step_sum) = (0.0_f64, 0.0_f64);
        for ((&p, &m), &v) in parameters.iter().zip(first).zip(second) {
            let step = f64::from(direction(p, m, v));
            parameter_sum += f64::from(p) * f64::from(p);
            step_sum += step * step;
        }
        // The step of a tensor of zeros, such as an initial bias, is not scaled: its norm would be 0.
        let is_scaled = parameter_sum > 0.0 && step_sum > 0.0;
        let ratio = if is_scaled { (parameter_sum / step_sum).sqrt() } else { 1.0 };
        let factor = (f64::from(self.rate) * ratio) as f32;
        for ((p, &m), &v) in parameters.iter_mut().zip(first).zip(second) {
            *p -= factor * direction(*p, m, v);
        }
    }
}
