//! Optimizers compute new parameters from gradients. Optimizers use no random numbers, so the parameters stay the same on all
//! ranks, bit for bit.

use std::ops::Range;

/// The rule by which parameters are updated. `PyTorch`'s `SGD` and `Adam` have the same definitions and defaults. In the
/// formulas, p is a parameter, g its gradient, v its velocity, and lr the learning rate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// p -= lr g.
    Sgd,
    /// v = momentum v + g; p -= lr v.
    Momentum {
        /// The fraction of the velocity that each step keeps: at least 0 and below 1.
        momentum: f32,
    },
    /// Nesterov's accelerated gradient: v = m v - lr g; p += m' v - lr g, where m' is the momentum of the next step. The
    /// momentum grows with the number of steps k as k / (k + 3), and is reset to 0 when v points uphill (O'Donoghue and
    /// Candès 2015). Use this rule for convex losses with the whole training set as one batch. The rule then needs no tuning,
    /// because the learning rate is 1 / (the largest curvature).
    Nesterov,
    /// Adam (Kingma and Ba 2015) with betas 0.9 and 0.999 and epsilon 1e-8.
    Adam,
}

impl Rule {
    /// Returns the name of the rule on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Momentum { .. } => "momentum",
            Self::Nesterov => "nesterov",
            Self::Adam => "adam",
        }
    }

    /// Returns the names of the state vectors that the rule keeps between steps.
    pub fn state_names(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &[],
            Self::Momentum { .. } | Self::Nesterov => &["optimizer.velocity"],
            Self::Adam => &["optimizer.first_moment", "optimizer.second_moment"],
        }
    }
}

const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.999;
const EPSILON: f32 = 1e-8;

/// Returns the momentum of Nesterov's rule `steps` steps after the momentum was 0.
fn nesterov_momentum(steps: u64) -> f32 {
    (steps as f64 / (steps as f64 + 3.0)) as f32
}

/// An optimizer and its state.
#[derive(Clone, PartialEq, Debug)]
pub struct Optimizer {
    /// The rule.
    pub rule: Rule,
    /// The learning rate.
    pub learning_rate: f32,
    /// The factor of L2 regularization: each step adds `weight_decay` times a parameter to its gradient, for biases too.
    /// `PyTorch`'s `SGD` and `Adam` do the same; `AdamW` does not.
    pub weight_decay: f32,
    /// The number of steps taken.
    pub steps: u64,
    /// The value of `steps` when Nesterov's momentum was last reset to 0.
    pub momentum_start: u64,
    /// The dot product of velocity and gradient in the current step. This product is positive if the velocity points uphill.
    ascent: f64,
    /// The vectors named by [`Rule::state_names`], each as long as the parameters.
    pub state: Vec<Vec<f32>>,
}

impl Optimizer {
    /// Creates an optimizer that has not taken a step.
    pub fn new(rule: Rule, learning_rate: f32, weight_decay: f32, parameter_count: usize) -> Self {
        let state = vec![vec![0.0; parameter_count]; rule.state_names().len()];
        Self { rule, learning_rate, weight_decay, steps: 0, momentum_start: 0, ascent: 0.0, state }
    }

    /// Takes a step. Adds the weight decay to `gradients`.
    pub fn step(&mut self, parameters: &mut [f32], gradients: &mut [f32]) {
        self.begin();
        self.update(0..parameters.len(), parameters, gradients);
        self.finish(parameters);
    }

    /// Begins a step. Call [`update`](Self::update) once for every parameter, then [`finish`](Self::finish).
    pub fn begin(&mut self) {
        self.steps += 1;
        self.ascent = 0.0;
    }

    /// Updates the parameters in `range`. `gradients` holds the gradients of these parameters only. Adds the weight decay to
    /// `gradients`.
    ///
    /// # Panics
    ///
    /// If `range` exceeds the parameters or the state vectors, or if its length differs from the length of `gradients`.
    pub fn update(&mut self, range: Range<usize>, parameters: &mut [f32], gradients: &mut [f32]) {
        assert_eq!(gradients.len(), range.len(), "there must be one gradient for each parameter");
        let parameters = &mut parameters[range.clone()];
        if self.weight_decay != 0.0 {
            let decay = self.weight_decay;
            gradients.iter_mut().zip(&*parameters).for_each(|(g, p)| *g += decay * p);
        }
        let rate = self.learning_rate;
        match (self.rule, self.state.as_mut_slice()) {
            (Rule::Sgd, _) => parameters.iter_mut().zip(&*gradients).for_each(|(p, g)| *p -= rate * g),
            (Rule::Momentum { momentum }, [velocity]) => {
                for ((p, g), v) in parameters.iter_mut().zip(&*gradients).zip(&mut velocity[range]) {
                    *v = momentum * *v + g;
                    *p -= rate * *v;
                }
            }
            (Rule::Nesterov, [velocity]) => {
                let momentum = nesterov_momentum(self.steps - 1 - self.momentum_start);
                for ((p, g), v) in parameters.iter_mut().zip(&*gradients).zip(&mut velocity[range]) {
                    *v = momentum * *v - rate * g;
                    *p -= rate * g;
                    self.ascent += f64::from(*v) * f64::from(*g);
                }
            }
            (Rule::Adam, [first, second]) => {
                let step_size = (f64::from(rate) / (1.0 - power(BETA_1, self.steps))) as f32;
                let second_root = (1.0 - power(BETA_2, self.steps)).sqrt() as f32;
                let state = first[range.clone()].iter_mut().zip(&mut second[range]);
                for ((p, g), (m, v)) in parameters.iter_mut().zip(&*gradients).zip(state) {
                    *m = BETA_1 * *m + (1.0 - BETA_1) * g;
                    *v = BETA_2 * *v + (1.0 - BETA_2) * g * g;
                    *p -= step_size * *m / (v.sqrt() / second_root + EPSILON);
                }
            }
            _ => unreachable!("the state has as many vectors as the rule names"),
        }
    }

    /// Finishes a step: Nesterov's rule moves all parameters along the velocity.
    pub fn finish(&mut self, parameters: &mut [f32]) {
        if self.rule != Rule::Nesterov {
            return;
        }
        if self.ascent > 0.0 {
            self.momentum_start = self.steps;
        }
        let momentum = nesterov_momentum(self.steps - self.momentum_start);
        parameters.iter_mut().zip(&self.state[0]).for_each(|(p, v)| *p += momentum * v);
    }
}

/// Returns `base` to the power of `exponent`, computed by squaring, because `powi` may round differently on different hosts.
fn power(base: f32, mut exponent: u64) -> f64 {
    let mut square = f64::from(base);
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Minimizes p^2 from p = 1, and returns p after each step.
    fn minimize_square(rule: Rule, learning_rate: f32, weight_decay: f32, steps: usize) -> Vec<f32> {
        let mut optimizer = Optimizer::new(rule, learning_rate, weight_decay, 1);
        let mut parameters = [1.0_f32];
        (0..steps)
            .map(|_| {
                let mut gradients = [2.0 * parameters[0]];
                optimizer.step(&mut parameters, &mut gradients);
                parameters[0]
            })
            .collect()
    }

    /// The expected numbers were computed from the formulas by hand.
    #[test]
    fn each_rule_gives_the_expected_sequence() {
        let cases: [(Rule, f32, f32, [f64; 3]); 6] = [
            (Rule::Sgd, 0.1, 0.0, [0.8, 0.64, 0.512]),
            (Rule::Sgd, 0.1, 0.5, [0.75, 0.5625, 0.421_875]),
            (Rule::Momentum { momentum: 0.9 }, 0.1, 0.0, [0.8, 0.46, 0.062]),
            (Rule::Momentum { momentum: 0.0 }, 0.1, 0.0, [0.8, 0.64, 0.512]),
            // Each step first subtracts lr g from the parameter, which gives 0.8, 0.6 and 0.416 in the three steps. The
            // step then adds m' v, where m' is 0.25, 0.4 and 0.5.
            (Rule::Nesterov, 0.1, 0.0, [0.75, 0.52, 0.324]),
            (Rule::Adam, 0.1, 0.0, [0.9, 0.800_412, 0.701_586_5]),
        ];
        for (rule, rate, decay, expected) in cases {
            let found = minimize_square(rule, rate, decay, 3);
            for (found, expected) in found.iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 2e-6, "{rule:?}: {found} {expected}");
            }
        }
    }

    #[test]
    fn power_gives_the_expected_values() {
        assert_eq!(power(0.5, 0), 1.0);
        assert_eq!(power(0.5, 13), 0.5_f64.powi(13));
        assert!(power(BETA_2, u64::MAX) == 0.0);
    }
}
