//! The loops of the optimizers. In each loop, p is a parameter, g is the gradient of p, and m and v are the optimizer
//! state of p. All slices of a call have the same length.

use super::{AdamOptions, power};

/// Multiplies each parameter by 1 - `rate` * `decay`. `rate` is the learning rate, and `decay` is the weight decay.
pub(super) fn decay_weights(parameters: &mut [f32], rate: f32, decay: f32) {
    let factor = (1.0 - f64::from(rate) * f64::from(decay)) as f32;
    for p in parameters {
        *p *= factor;
    }
}

/// The coefficients of one step of [`Rule::Momentum`](super::Rule::Momentum) and its variants.
pub(super) struct MomentumStep {
    pub(super) momentum: f32,
    /// The learning rate.
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
    /// The learning rate.
    rate: f32,
    /// `1 - beta_1^step`. Dividing the first moment by this number removes the bias.
    bias_correction_1: f32,
    /// The learning rate divided by `bias_correction_1`.
    step_size: f32,
    /// `sqrt(1 - beta_2^step)`. Dividing the root of the second moment by this number removes the bias.
    bias_correction_2_root: f32,
}

impl AdamStep {
    /// Computes the coefficients of step number `step`, which counts from 1.
    pub(super) fn new(options: AdamOptions, rate: f32, step: u64) -> Self {
        let AdamOptions { beta_1, beta_2, epsilon } = options;
        Self {
            beta_1: beta_1 as f32,
            beta_2: beta_2 as f32,
            one_minus_beta_1: (1.0 - beta_1) as f32,
            one_minus_beta_2: (1.0 - beta_2) as f32,
            epsilon: epsilon as f32,
            rate,
            bias_correction_1: (1.0 - power(beta_1, step)) as f32,
            step_size: (f64::from(rate) / (1.0 - power(beta_1, step))) as f32,
            bias_correction_2_root: (1.0 - power(beta_2, step)).sqrt() as f32,
        }
    }

    /// Computes the coefficients of step number `step`, if the second moment has not changed since step `variance_steps`.
    pub(super) fn with_frozen_variance(
        options: AdamOptions,
        rate: f32,
        (step, variance_steps): (u64, u64),
    ) -> Self {
        let bias_correction_2_root = Self::new(options, rate, variance_steps).bias_correction_2_root;
        Self { bias_correction_2_root, ..Self::new(options, rate, step) }
    }

    /// Replaces the first moment by `new_first`, and takes the step of Adam. Skips elements whose second moment is 0: all their
    /// gradients were 0, so the sums of lossy encodings would be noise that is divided by epsilon.
    pub(super) fn apply_frozen(
        &self,
        parameters: &mut [f32],
        new_first: &[f32],
        (first, second): (&mut [f32], &[f32]),
    ) {
        for ((m, new), v) in first.iter_mut().zip(new_first).zip(second) {
            *m = if *v == 0.0 { 0.0 } else { *new };
        }
        self.apply(parameters, first, second);
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
            *p -= self.step_size * m / (v.sqrt() / self.bias_correction_2_root + self.epsilon);
        }
    }

    /// Returns the step of LAMB for one parameter, without the learning rate and before the step is scaled: Adam's
    /// step plus `decay` times the parameter.
    fn lamb_direction(&self, (p, m, v): (f32, f32, f32), decay: f32) -> f32 {
        m / self.bias_correction_1 / (v.sqrt() / self.bias_correction_2_root + self.epsilon) + decay * p
    }

    /// Returns two sums over one tensor or a part of a tensor: the sum of the squared parameters, and the sum of the
    /// squared elements of LAMB's step. The sums are computed in f64 in a fixed order, so equal values give equal sums
    /// on all ranks.
    pub(super) fn lamb_squares(
        &self,
        parameters: &[f32],
        (first, second): (&[f32], &[f32]),
        decay: f32,
    ) -> [f64; 2] {
        let (mut parameter_sum, mut step_sum) = (0.0_f64, 0.0_f64);
        for ((&p, &m), &v) in parameters.iter().zip(first).zip(second) {
            let step = f64::from(self.lamb_direction((p, m, v), decay));
            parameter_sum += f64::from(p) * f64::from(p);
            step_sum += step * step;
        }
        [parameter_sum, step_sum]
    }

    /// Takes the step of LAMB on one tensor or on a part of a tensor, scaled to the norm of the parameters. The last
    /// argument holds the sums of [`lamb_squares`](Self::lamb_squares) over the whole tensor.
    pub(super) fn apply_lamb(
        &self,
        parameters: &mut [f32],
        (first, second): (&[f32], &[f32]),
        decay: f32,
        [parameter_sum, step_sum]: [f64; 2],
    ) {
        // If all parameters are 0, as in an initial bias, a scaled step would be 0. In this case, do not scale the step.
        let is_scaled = parameter_sum > 0.0 && step_sum > 0.0;
        let ratio = if is_scaled { (parameter_sum / step_sum).sqrt() } else { 1.0 };
        let factor = (f64::from(self.rate) * ratio) as f32;
        for ((p, &m), &v) in parameters.iter_mut().zip(first).zip(second) {
            *p -= factor * self.lamb_direction((*p, m, v), decay);
        }
    }
}

/// The trust coefficient of the LARS paper. With a learning rate of 1 and without momentum, the norm of a tensor's
/// step is at most this number times the norm of the tensor.
const LARS_TRUST_COEFFICIENT: f64 = 0.001;

/// The coefficients of one step of [`Rule::Lars`](super::Rule::Lars).
pub(super) struct LarsStep {
    pub(super) momentum: f32,
    /// The learning rate.
    pub(super) rate: f32,
    /// The weight decay.
    pub(super) decay: f32,
}

impl LarsStep {
    /// Takes the step on one tensor or on a part of a tensor. `parameter_sum` is the sum of the squared parameters of the
    /// whole tensor, and `gradient_sum` the sum of its squared gradients.
    pub(super) fn apply(
        &self,
        parameters: &mut [f32],
        gradients: &[f32],
        velocity: &mut [f32],
        [parameter_sum, gradient_sum]: [f64; 2],
    ) {
        let (parameter_norm, gradient_norm) = (parameter_sum.sqrt(), gradient_sum.sqrt());
        // If all parameters are 0, as in an initial bias, a scaled step would be 0. In this case, do not scale the step.
        let ratio = if parameter_norm > 0.0 && gradient_norm > 0.0 {
            parameter_norm / (gradient_norm + f64::from(self.decay) * parameter_norm)
        } else {
            1.0
        };
        let factor = (f64::from(self.rate) * LARS_TRUST_COEFFICIENT * ratio) as f32;
        for ((p, g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
            *v = self.momentum * *v + factor * (g + self.decay * *p);
            *p -= *v;
        }
    }
}

/// Returns the sum of the squares, computed in f64 in a fixed order.
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value) * f64::from(value)).sum()
}
