//! Optimizers compute new parameters from gradients. Optimizers use no random numbers, so the parameters stay the same on all
//! ranks, bit for bit.

mod kernels;
mod rule;

use std::ops::Range;

use self::kernels::{AdamStep, LarsStep, MomentumStep};
pub use self::rule::{AdamOptions, Rule};
use super::bucket_ranges::overlap;
use super::clipping;
use super::model::ParameterTensor;
use crate::observe::training_thread::{SpanKind, span};

/// An optimizer and its state.
#[derive(Clone, PartialEq, Debug)]
pub struct Optimizer {
    /// The rule.
    pub rule: Rule,
    /// The learning rate of the next step. A caller with a schedule changes the rate before each step.
    pub learning_rate: f32,
    /// The weight decay, also of biases. For a parameter p, [`Rule::AdamW`] subtracts `learning_rate * weight_decay *
    /// p` from p. [`Rule::Lamb`] and [`Rule::Lars`] add `weight_decay * p` to the step before scaling. All other rules
    /// add `weight_decay * p` to the gradient of p (L2 regularization), as `PyTorch` does.
    pub weight_decay: f32,
    /// The maximum norm of the gradients of a step. [`step`](Self::step) scales gradients with a larger norm.
    /// [`update_range`](Self::update_range) does not scale gradients.
    pub clip_norm: Option<f32>,
    /// The number of steps taken.
    pub steps: u64,
    /// The number of steps in which [`Rule::Adam`] and [`Rule::AdamW`] update the second moment. In later steps, the second
    /// moment stays the same, and the caller passes new first moments in place of gradients: `beta_1 m + (1 - beta_1) g`, for
    /// the first moment m and the gradient g (Tang et al., "1-bit Adam", ICML 2021). Elements whose second moment is 0 are
    /// then not updated.
    pub variance_steps: u64,
    /// The value of `steps` when the momentum of [`Rule::Accelerated`] was last reset to 0.
    pub momentum_start: u64,
    /// The dot product of velocity and gradient in the current step.
    ascent: f64,
    /// The range of each tensor in the vector of all parameters, in increasing order. Used by [`Rule::Lamb`] and
    /// [`Rule::Lars`]. After [`new`](Self::new), all parameters are one tensor.
    pub tensors: Vec<Range<usize>>,
    /// The ranges of running statistics, in increasing order. A step only subtracts the gradient of a running
    /// statistic from its value. The learning rate, weight decay, clipping and the state do not apply to running statistics.
    pub statistics: Vec<Range<usize>>,
    /// The gradients of the current step. Only [`Rule::Lars`] needs them at the end of the step. With the other
    /// rules, this is empty.
    gradients: Vec<f32>,
    /// The state vectors, in the order of [`Rule::state_names`]. Each has one value per parameter.
    pub state: Vec<Vec<f32>>,
}

impl Optimizer {
    /// Creates an optimizer that has not taken a step.
    pub fn new(rule: Rule, learning_rate: f32, weight_decay: f32, parameter_count: usize) -> Self {
        let state = vec![vec![0.0; parameter_count]; rule.state_names().len()];
        Self {
            rule,
            learning_rate,
            weight_decay,
            clip_norm: None,
            steps: 0,
            variance_steps: u64::MAX,
            momentum_start: 0,
            ascent: 0.0,
            tensors: std::iter::once(0..parameter_count).collect(),
            statistics: Vec::new(),
            gradients: Vec::new(),
            state,
        }
    }

    /// Sets [`tensors`](Self::tensors) and [`statistics`](Self::statistics). `locate` returns the range of a tensor in the
    /// vector of this optimizer, or `None` if this optimizer does not update the tensor.
    pub(crate) fn set_tensors(
        &mut self,
        tensors: &[ParameterTensor],
        locate: impl Fn(&Range<usize>) -> Option<Range<usize>>,
    ) {
        let select = |is_statistic| {
            let selected = tensors.iter().filter(move |tensor| tensor.is_statistic == is_statistic);
            selected.filter_map(|tensor| locate(&tensor.range)).collect()
        };
        (self.tensors, self.statistics) = (select(false), select(true));
    }

    /// Clips the gradients and takes a step. May change `gradients`.
    pub fn step(&mut self, parameters: &mut [f32], gradients: &mut [f32]) {
        if let Some(norm_max) = self.clip_norm {
            self.clip_gradients(gradients, norm_max);
        }
        self.begin_step();
        self.update_range(0..parameters.len(), parameters, gradients);
        self.finish_step(parameters);
    }

    /// Begins a step. Then call [`update_range`](Self::update_range) with ranges that together hold every parameter
    /// once, and at last [`finish_step`](Self::finish_step).
    pub fn begin_step(&mut self) {
        self.steps += 1;
        self.ascent = 0.0;
    }

    /// Clips the gradients. The gradients of running statistics do not count in the norm, and clipping does not
    /// change them.
    fn clip_gradients(&self, gradients: &mut [f32], norm_max: f32) {
        let mut changes = Vec::new();
        for range in &self.statistics {
            changes.extend_from_slice(&gradients[range.clone()]);
            gradients[range.clone()].fill(0.0);
        }
        clipping::clip_to_norm(gradients, norm_max);
        let mut rest = changes.as_slice();
        for range in &self.statistics {
            let (own, others) = rest.split_at(range.len());
            gradients[range.clone()].copy_from_slice(own);
            rest = others;
        }
    }

    /// Divides gradients into the slices before, between and after running statistics: only these slices are clipped.
    /// `gradients[0]` is the gradient of the parameter `start`.
    pub(crate) fn clipped_parts<'a>(&self, start: usize, gradients: &'a mut [f32]) -> Vec<&'a mut [f32]> {
        let all = start..start + gradients.len();
        let (mut rest, mut position) = (gradients, start);
        let mut parts = Vec::new();
        for statistics in &self.statistics {
            let statistics = overlap(statistics, &all);
            if !statistics.is_empty() {
                let (before, after) = rest.split_at_mut(statistics.start - position);
                parts.push(before);
                rest = &mut after[statistics.len()..];
                position = statistics.end;
            }
        }
        parts.push(rest);
        parts
    }

    /// Updates the parameters in `range`. `gradients[0]` is the gradient of the first parameter in `range`. May
    /// change `gradients`.
    ///
    /// # Panics
    ///
    /// If `range` exceeds the parameters or the state vectors, or if `gradients` does not have the length of `range`.
    pub fn update_range(&mut self, range: Range<usize>, parameters: &mut [f32], gradients: &mut [f32]) {
        assert_eq!(gradients.len(), range.len(), "there must be one gradient for each parameter");
        let _span = span(SpanKind::Optimizer);
        let mut rest = gradients;
        let mut start = range.start;
        for index in 0..self.statistics.len() {
            let statistics = overlap(&self.statistics[index], &(start..range.end));
            if !statistics.is_empty() {
                let (trained, after) = rest.split_at_mut(statistics.start - start);
                let (changes, after) = after.split_at_mut(statistics.len());
                self.update_trained_range(start..statistics.start, parameters, trained);
                parameters[statistics.clone()].iter_mut().zip(changes).for_each(|(p, change)| *p -= *change);
                (start, rest) = (statistics.end, after);
            }
        }
        self.update_trained_range(start..range.end, parameters, rest);
    }

    /// Updates the parameters in `range`, which has no running statistics.
    fn update_trained_range(&mut self, range: Range<usize>, parameters: &mut [f32], gradients: &mut [f32]) {
        let parameters = &mut parameters[range.clone()];
        let (rate, decay) = (self.learning_rate, self.weight_decay);
        let is_frozen = self.steps > self.variance_steps;
        match self.rule {
            _ if decay == 0.0 => {}
            Rule::AdamW(_) => kernels::decay_weights(parameters, rate, decay),
            Rule::Lamb(_) | Rule::Lars { .. } => {}
            rule => {
                // A new first moment has the factor 1 - beta_1.
                let options = rule.adam_options().filter(|_| is_frozen);
                let decay = options.map_or(decay, |options| decay * (1.0 - options.beta_1) as f32);
                gradients.iter_mut().zip(&*parameters).for_each(|(g, p)| *g += decay * p);
            }
        }
        match (self.rule, self.state.as_mut_slice()) {
            (Rule::Sgd, _) => parameters.iter_mut().zip(&*gradients).for_each(|(p, g)| *p -= rate * g),
            (Rule::Momentum { momentum }, [velocity]) => {
                MomentumStep { momentum, rate }.apply(parameters, gradients, &mut velocity[range]);
            }
            (Rule::Nesterov { momentum }, [velocity]) => {
                MomentumStep { momentum, rate }.apply_nesterov(parameters, gradients, &mut velocity[range]);
            }
            (Rule::Accelerated, [velocity]) => {
                let momentum = accelerated_momentum(self.steps - 1 - self.momentum_start);
                let step = MomentumStep { momentum, rate };
                self.ascent += step.begin_accelerated_step(parameters, gradients, &mut velocity[range]);
            }
            (Rule::Adam(options) | Rule::AdamW(options), [first, second]) => {
                let (first, second) = (&mut first[range.clone()], &mut second[range]);
                if is_frozen {
                    let step =
                        AdamStep::with_frozen_variance(options, rate, (self.steps, self.variance_steps));
                    step.apply_frozen(parameters, gradients, (first, second));
                } else {
                    let step = AdamStep::new(options, rate, self.steps);
                    step.update_moments(gradients, first, second);
                    step.apply(parameters, first, second);
                }
            }
            (Rule::Lamb(options), [first, second]) => {
                let step = AdamStep::new(options, rate, self.steps);
                step.update_moments(gradients, &mut first[range.clone()], &mut second[range]);
            }
            (Rule::Lars { .. }, [velocity]) => {
                self.gradients.resize(velocity.len(), 0.0);
                self.gradients[range].copy_from_slice(gradients);
            }
            _ => unreachable!("the state has as many vectors as the rule names"),
        }
    }

    /// Finishes a step. [`Rule::Accelerated`] moves all parameters along the velocity here. [`Rule::Lamb`] and
    /// [`Rule::Lars`] take their whole step here, because the step depends on the norm of each tensor.
    pub fn finish_step(&mut self, parameters: &mut [f32]) {
        let sums = self.sums_for_end_of_step(parameters);
        self.finish_step_with_sums(parameters, &sums);
    }

    /// Returns the sums that the end of a step needs, for example the sum of the squares of each tensor. If each rank
    /// holds a part of the parameters, the ranks add their sums and call
    /// [`finish_step_with_sums`](Self::finish_step_with_sums). All ranks return the same number of sums.
    pub(crate) fn sums_for_end_of_step(&self, parameters: &[f32]) -> Vec<f64> {
        let tensors = || self.tensors.iter().cloned();
        match (self.rule, self.state.as_slice()) {
            (Rule::Accelerated, _) => vec![self.ascent],
            (Rule::Lamb(options), [first, second]) => {
                let step = AdamStep::new(options, self.learning_rate, self.steps);
                let squares = |tensor: Range<usize>| {
                    let moments = (&first[tensor.clone()], &second[tensor.clone()]);
                    step.lamb_squares(&parameters[tensor], moments, self.weight_decay)
                };
                tensors().flat_map(squares).collect()
            }
            (Rule::Lars { .. }, _) => tensors()
                .flat_map(|tensor| [&parameters[tensor.clone()], &self.gradients[tensor]])
                .map(kernels::sum_of_squares)
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Finishes a step with the sums over all parameters: see [`sums_for_end_of_step`](Self::sums_for_end_of_step).
    pub(crate) fn finish_step_with_sums(&mut self, parameters: &mut [f32], sums: &[f64]) {
        let (rate, decay) = (self.learning_rate, self.weight_decay);
        let tensors = self.tensors.iter().cloned().zip(sums.as_chunks().0);
        match (self.rule, self.state.as_mut_slice()) {
            (Rule::Accelerated, [_]) => self.finish_accelerated_step(parameters, sums[0]),
            (Rule::Lamb(options), [first, second]) => {
                let step = AdamStep::new(options, rate, self.steps);
                for (tensor, &squares) in tensors {
                    let moments = (&first[tensor.clone()], &second[tensor.clone()]);
                    step.apply_lamb(&mut parameters[tensor], moments, decay, squares);
                }
            }
            (Rule::Lars { momentum }, [velocity]) => {
                let step = LarsStep { momentum, rate, decay };
                for (tensor, &squares) in tensors {
                    let velocity = &mut velocity[tensor.clone()];
                    let gradients = &self.gradients[tensor.clone()];
                    step.apply(&mut parameters[tensor], gradients, velocity, squares);
                }
            }
            _ => {}
        }
    }

    /// Moves all parameters along the velocity. `ascent` is the dot product of the velocity and the gradient of all
    /// parameters. If `ascent` is positive, the velocity points uphill, and the momentum starts again at 0.
    fn finish_accelerated_step(&mut self, parameters: &mut [f32], ascent: f64) {
        if ascent > 0.0 {
            self.momentum_start = self.steps;
        }
        let momentum = accelerated_momentum(self.steps - self.momentum_start);
        parameters.iter_mut().zip(&self.state[0]).for_each(|(p, v)| *p += momentum * v);
    }
}

/// Returns the momentum of [`Rule::Accelerated`]. `steps` counts from the last step with momentum 0.
fn accelerated_momentum(steps: u64) -> f32 {
    (steps as f64 / (steps as f64 + 3.0)) as f32
}

/// Returns `base` to the power of `exponent`. Does not use `powi`, whose rounding may differ between hosts.
pub(crate) fn power(base: f64, mut exponent: u64) -> f64 {
    let mut square = base;
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
mod reference_steps;

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
    fn each_rule_gives_the_expected_parameters() {
        let cases: [(Rule, f32, f32, [f64; 3]); 7] = [
            (Rule::Sgd, 0.1, 0.0, [0.8, 0.64, 0.512]),
            (Rule::Sgd, 0.1, 0.5, [0.75, 0.5625, 0.421_875]),
            (Rule::Momentum { momentum: 0.9 }, 0.1, 0.0, [0.8, 0.46, 0.062]),
            (Rule::Momentum { momentum: 0.0 }, 0.1, 0.0, [0.8, 0.64, 0.512]),
            (Rule::Nesterov { momentum: 0.0 }, 0.1, 0.0, [0.8, 0.64, 0.512]),
            // Each step subtracts lr g from the parameter, which gives 0.8, 0.6 and 0.416. Then the step adds momentum * v,
            // with the momentum 0.25, 0.4 and 0.5.
            (Rule::Accelerated, 0.1, 0.0, [0.75, 0.52, 0.324]),
            (Rule::Adam(AdamOptions::DEFAULT), 0.1, 0.0, [0.9, 0.800_412, 0.701_586_5]),
        ];
        for (rule, rate, decay, expected) in cases {
            let found = minimize_square(rule, rate, decay, 3);
            for (found, expected) in found.iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() < 2e-6, "{rule:?}: {found} {expected}");
            }
        }
    }

    /// The step must not depend on the buckets in which gradients arrive, and a tensor of zeros must move.
    #[test]
    fn lamb_scales_the_step_of_each_tensor_to_the_norm_of_the_tensor() {
        let rule = Rule::Lamb(AdamOptions::DEFAULT);
        let mut expected = [3.0, 4.0, 0.0, 0.0, -7.0];
        let mut found = expected;
        let gradients = [1.0, -1.0, 2.0, 3.0, 0.5];
        let mut whole = Optimizer::new(rule, 0.1, 0.0, 5);
        whole.tensors = vec![0..2, 2..4, 4..5];
        let mut parts = whole.clone();
        whole.step(&mut expected, &mut gradients.clone());
        parts.begin_step();
        for range in [3..5, 1..3, 0..1] {
            parts.update_range(range.clone(), &mut found, &mut gradients[range].to_vec());
        }
        parts.finish_step(&mut found);
        assert_eq!(found, expected);
        // Each element of Adam's first step is 1 or -1. The tensor (3, 4) has the norm 5, and the norm of its Adam
        // step is sqrt 2.
        let step = 0.1 * 5.0 / 2.0_f32.sqrt();
        for (found, expected) in found.iter().zip([3.0 - step, 4.0 + step, -0.1, -0.1, -7.7]) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }

    /// Weight decay, clipping, the learning rate and the state of the optimizer must not apply to running statistics.
    /// This must hold for every division of the gradients into ranges.
    #[test]
    fn running_statistics_change_by_exactly_their_gradient() {
        let adam = AdamOptions::DEFAULT;
        for rule in [Rule::Sgd, Rule::Momentum { momentum: 0.9 }, Rule::AdamW(adam), Rule::Lamb(adam)] {
            let gradients = [0.5, -100.0, 200.0, 1.0, 0.25, 300.0];
            let mut whole = Optimizer::new(rule, 0.1, 0.5, 6);
            whole.clip_norm = Some(0.75);
            (whole.tensors, whole.statistics) = (vec![0..1, 3..5], vec![1..3, 5..6]);
            let mut without = Optimizer::new(rule, 0.1, 0.5, 3);
            without.clip_norm = whole.clip_norm;
            without.tensors = vec![0..1, 1..3];
            let mut parts = Optimizer { clip_norm: None, ..whole.clone() };
            let (mut found, mut expected, mut in_parts) = ([1.0; 6], [1.0; 3], [1.0; 6]);
            for _ in 0..3 {
                let mut clipped = gradients;
                parts.clip_gradients(&mut clipped, 0.75);
                parts.begin_step();
                for range in [4..6, 2..4, 1..2, 0..1] {
                    parts.update_range(range.clone(), &mut in_parts, &mut clipped[range].to_vec());
                }
                parts.finish_step(&mut in_parts);
                whole.step(&mut found, &mut gradients.clone());
                without.step(&mut expected, &mut [0.5, 1.0, 0.25]);
            }
            assert_eq!(found, [expected[0], 301.0, -599.0, expected[1], expected[2], -899.0], "{rule:?}");
            assert_eq!(in_parts, found, "{rule:?}");
        }
    }

    /// Two optimizers hold parts of the tensors and add their sums. Their parameters must equal those of one
    /// optimizer that holds all tensors. A tensor of zeros must change.
    #[test]
    fn optimizers_of_parts_take_the_step_of_one_optimizer_if_they_add_their_sums() {
        for rule in
            [Rule::Lamb(AdamOptions::DEFAULT), Rule::Lars { momentum: 0.5 }, Rule::Accelerated, Rule::Sgd]
        {
            let (mut expected, gradients) = ([3.0, 4.0, 0.0, 0.0, -7.0], [1.0, -1.0, 2.0, 3.0, 0.5]);
            let mut whole = Optimizer::new(rule, 0.1, 0.1, 5);
            whole.tensors = vec![0..2, 2..4, 4..5];
            let mut parts =
                [(0..1, vec![0..1, 1..1, 1..1]), (1..5, vec![0..1, 1..3, 3..4])].map(|(range, tensors)| {
                    let mut part = Optimizer::new(rule, 0.1, 0.1, range.len());
                    part.tensors = tensors;
                    (range.clone(), part, expected[range].to_vec())
                });
            for _ in 0..3 {
                whole.step(&mut expected, &mut gradients.clone());
                let mut sums: Vec<f64> = Vec::new();
                for (range, part, parameters) in &mut parts {
                    part.begin_step();
                    let own = &mut gradients[range.clone()].to_vec();
                    part.update_range(0..range.len(), parameters, own);
                    let own = part.sums_for_end_of_step(parameters);
                    sums.resize(own.len(), 0.0);
                    sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                }
                for (_, part, parameters) in &mut parts {
                    part.finish_step_with_sums(parameters, &sums);
                }
                let found = parts.iter().flat_map(|(_, _, parameters)| parameters);
                for (found, expected) in found.zip(expected) {
                    assert!((found - expected).abs() < 1e-6, "{rule:?}: {found} {expected}");
                }
                assert!(expected[2] < 0.0, "{rule:?}: {expected:?}");
            }
        }
    }

    /// Computes in f64 what the optimizer must do if the second moment stays the same after 3 of 9 steps. The gradient of the
    /// second parameter is 0 until then.
    #[test]
    fn steps_with_a_frozen_variance_follow_the_formulas() {
        let options = AdamOptions { beta_1: 0.8, beta_2: 0.99, epsilon: 1e-3 };
        let mut optimizer = Optimizer::new(Rule::Adam(options), 0.1, 0.5, 2);
        optimizer.variance_steps = 3;
        let (mut parameters, mut expected, [mut m, mut v]) = ([1.0_f32, 0.0], 1.0_f64, [0.0_f64; 2]);
        for t in 1..10 {
            let gradient = f64::from(t * t);
            let g = gradient + 0.5 * expected;
            m = 0.8 * m + 0.2 * g;
            if t <= 3 {
                v = 0.99 * v + 0.01 * g * g;
            }
            let root = (v / (1.0 - 0.99_f64.powi(t.min(3)))).sqrt();
            expected -= 0.1 * m / (1.0 - 0.8_f64.powi(t)) / (root + 1e-3);
            let first = optimizer.state[0][0];
            let passed = if t <= 3 { gradient as f32 } else { 0.8 * first + 0.2 * gradient as f32 };
            optimizer.step(&mut parameters, &mut [passed, if t <= 3 { 0.0 } else { 1e-3 }]);
            assert!((f64::from(parameters[0]) - expected).abs() < 1e-5, "{t}: {parameters:?} {expected}");
            assert_eq!((parameters[1], optimizer.state[0][1]), (0.0, 0.0), "{t}");
        }
    }

    #[test]
    fn power_equals_powi_and_accepts_the_largest_exponent() {
        assert_eq!(power(0.5, 0), 1.0);
        assert_eq!(power(0.5, 13), 0.5_f64.powi(13));
        assert!(power(0.999, u64::MAX) == 0.0);
    }
}
