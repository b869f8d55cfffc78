//! The part of the parameters that a server holds.

use std::ops::Range;

use crate::train::optimizer::Optimizer;

/// Each value of staleness below this number has its own count. All other values have one common count.
const SEPARATE_STALENESS_COUNTS: usize = 1023;

/// [`Shard::push_and_replace`] updates and copies so many parameters at a time (8 KiB).
const COPIED_BLOCK: usize = 2048;

/// How a server treats gradients that were computed with old parameters.
///
/// The staleness of a gradient is the number of updates of the shard between the pull of the parameters and the push
/// of the gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StalenessRule {
    /// The maximum staleness: the server drops gradients with a larger staleness.
    pub(crate) max: u64,
    /// Whether the server divides the learning rate by the staleness of the gradient. Gradients with a staleness of 0
    /// or 1 keep the full rate. Source: Zhang et al., "Staleness-aware async-SGD for distributed deep learning",
    /// IJCAI 2016.
    pub(crate) scales_rate: bool,
}

/// What a server did with a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PushOutcome {
    /// The server updated the parameters.
    Applied {
        /// The staleness of the gradient.
        staleness: u64,
    },
    /// The server dropped the gradient because of its staleness.
    Stale {
        /// The staleness of the gradient.
        staleness: u64,
    },
    /// The server dropped the gradient because the run needs no more gradients. A [`ParameterServer`] never returns
    /// this variant.
    ///
    /// [`ParameterServer`]: crate::train::ParameterServer
    Unwanted,
}

/// The number of gradients with each staleness.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct StalenessCounts {
    /// `accepted[s]` is the number of accepted gradients with a staleness of s. The count with index
    /// [`SEPARATE_STALENESS_COUNTS`] also includes all larger values.
    pub(crate) accepted: Vec<u64>,
    /// The number of gradients that were dropped because of their staleness.
    pub(crate) dropped: u64,
    /// The sum of the staleness of all accepted gradients.
    pub(crate) sum: u64,
    /// The largest staleness of an accepted gradient.
    pub(crate) max: u64,
}

impl StalenessCounts {
    fn count_accepted(&mut self, staleness: u64) {
        let index = staleness.min(SEPARATE_STALENESS_COUNTS as u64) as usize;
        if self.accepted.len() <= index {
            self.accepted.resize(index + 1, 0);
        }
        self.accepted[index] += 1;
        self.sum += staleness;
        self.max = self.max.max(staleness);
    }
}

/// A part of the parameters, and the state of the optimizer for this part.
pub(crate) struct Shard<'a> {
    /// The range of this shard in the vector of all parameters.
    pub(crate) range: Range<usize>,
    pub(crate) parameters: Vec<f32>,
    pub(crate) optimizer: Optimizer,
    /// `rate(n)` is the learning rate of the update that follows n updates.
    rate: Box<dyn Fn(u64) -> f32 + Send + 'a>,
    pub(crate) staleness: StalenessCounts,
}

impl<'a> Shard<'a> {
    /// Creates a shard that holds the parameters in `range`. The state vectors of `optimizer` must have the length of
    /// `range`.
    pub(crate) fn new(
        range: Range<usize>,
        parameters: Vec<f32>,
        optimizer: Optimizer,
        rate: Box<dyn Fn(u64) -> f32 + Send + 'a>,
    ) -> Self {
        assert_eq!(range.len(), parameters.len(), "a shard holds the parameters of its range");
        Self { range, parameters, optimizer, rate, staleness: StalenessCounts::default() }
    }

    /// Returns the number of updates so far.
    pub(crate) fn version(&self) -> u64 {
        self.optimizer.steps
    }

    /// Applies a gradient that was computed with version `pulled_version` of the parameters, unless the gradient is too
    /// stale for `rule`. May change `gradient`.
    pub(crate) fn push(
        &mut self,
        gradient: &mut [f32],
        pulled_version: u64,
        rule: StalenessRule,
    ) -> PushOutcome {
        self.push_update(pulled_version, rule, |optimizer, parameters| optimizer.step(parameters, gradient))
    }

    /// Does the same as [`push`](Self::push), and replaces the gradient by the new parameters, unless the gradient is too stale.
    /// Copies each block of parameters while it and its gradient are still in the first-level cache, if the optimizer does not
    /// change the parameters again at the end of the step.
    pub(crate) fn push_and_replace(
        &mut self,
        gradient: &mut [f32],
        pulled_version: u64,
        rule: StalenessRule,
    ) -> PushOutcome {
        self.push_update(pulled_version, rule, |optimizer, parameters| {
            if optimizer.clip_norm.is_some() || !optimizer.rule.updates_elements_independently() {
                optimizer.step(parameters, gradient);
                gradient.copy_from_slice(parameters);
                return;
            }
            optimizer.begin_step();
            let mut start = 0;
            for block in gradient.chunks_mut(COPIED_BLOCK) {
                let range = start..start + block.len();
                start = range.end;
                optimizer.update_range(range.clone(), parameters, block);
                block.copy_from_slice(&parameters[range]);
            }
            optimizer.finish_step(parameters);
        })
    }

    /// Updates only the parameters in `ranges`, and the optimizer state of these parameters. The ranges must be
    /// ascending and must not overlap. `gradients` holds the gradients of all ranges, in the order of `ranges`,
    /// computed with version `pulled_version` of the parameters.
    pub(crate) fn push_ranges(
        &mut self,
        ranges: &[Range<usize>],
        gradients: &mut [f32],
        pulled_version: u64,
        rule: StalenessRule,
    ) -> PushOutcome {
        self.push_update(pulled_version, rule, |optimizer, parameters| {
            optimizer.begin_step();
            let mut rest = gradients;
            for range in ranges {
                let (gradient, others) = rest.split_at_mut(range.len());
                optimizer.update_range(range.clone(), parameters, gradient);
                rest = others;
            }
            optimizer.finish_step(parameters);
        })
    }

    /// Calls `update` unless a gradient for version `pulled_version` is too stale for `rule`. Counts the staleness of the
    /// gradient.
    fn push_update(
        &mut self,
        pulled_version: u64,
        rule: StalenessRule,
        update: impl FnOnce(&mut Optimizer, &mut [f32]),
    ) -> PushOutcome {
        // If the client sends a version that does not exist yet, the staleness is 0.
        let staleness = self.version().saturating_sub(pulled_version);
        if staleness > rule.max {
            self.staleness.dropped += 1;
            return PushOutcome::Stale { staleness };
        }
        self.staleness.count_accepted(staleness);
        let mut rate = (self.rate)(self.version());
        if rule.scales_rate {
            rate /= staleness.max(1) as f32;
        }
        self.optimizer.learning_rate = rate;
        update(&mut self.optimizer, &mut self.parameters);
        PushOutcome::Applied { staleness }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::optimizer::{AdamOptions, Rule};

    fn make_shard(rule: Rule, parameters: &[f32]) -> Shard<'static> {
        let optimizer = Optimizer::new(rule, 0.0, 0.0, parameters.len());
        Shard::new(
            0..parameters.len(),
            parameters.to_vec(),
            optimizer,
            Box::new(|version| 1.0 / (1 << version) as f32),
        )
    }

    const ANY_STALENESS: StalenessRule = StalenessRule { max: u64::MAX, scales_rate: false };

    #[test]
    fn the_rate_follows_the_number_of_updates_and_the_staleness() {
        let mut plain = make_shard(Rule::Sgd, &[8.0]);
        let mut aware = make_shard(Rule::Sgd, &[8.0]);
        let scaling = StalenessRule { scales_rate: true, ..ANY_STALENESS };
        // The learning rates of the four updates are 1, 1/2, 1/4 and 1/8. All gradients are for version 0, so their
        // staleness is 0, 1, 2 and 3.
        for (expected_plain, expected_aware) in
            [(7.0, 7.0), (6.5, 6.5), (6.25, 6.375), (6.125, 6.375 - 0.125 / 3.0)]
        {
            plain.push(&mut [1.0], 0, ANY_STALENESS);
            aware.push(&mut [1.0], 0, scaling);
            assert_eq!(plain.parameters, [expected_plain]);
            assert!((aware.parameters[0] - expected_aware).abs() < 1e-6, "{:?}", aware.parameters);
        }
        assert_eq!(
            plain.staleness,
            StalenessCounts { accepted: vec![1, 1, 1, 1], dropped: 0, sum: 6, max: 3 }
        );
    }

    #[test]
    fn a_push_can_replace_the_gradient_by_the_new_parameters() {
        let adam = AdamOptions::DEFAULT;
        for rule in [Rule::Sgd, Rule::Nesterov { momentum: 0.9 }, Rule::Adam(adam), Rule::Lamb(adam)] {
            // The last block is shorter than the others.
            let initial: Vec<f32> = (0..2 * COPIED_BLOCK + 5).map(|index| index as f32 * 0.01).collect();
            let (mut copied, mut plain) = (make_shard(rule, &initial), make_shard(rule, &initial));
            for version in 0..2 {
                let gradient: Vec<f32> = initial.iter().map(|value| (value + version as f32).sin()).collect();
                let mut replaced = gradient.clone();
                copied.push_and_replace(&mut replaced, version, ANY_STALENESS);
                plain.push(&mut gradient.clone(), version, ANY_STALENESS);
                assert_eq!(copied.parameters, plain.parameters, "{rule:?}");
                assert_eq!(copied.optimizer, plain.optimizer, "{rule:?}");
                assert_eq!(replaced, plain.parameters, "{rule:?}");
            }
            let mut kept = initial.clone();
            let fresh = StalenessRule { max: 0, ..ANY_STALENESS };
            let outcome = copied.push_and_replace(&mut kept, 0, fresh);
            assert_eq!((outcome, kept), (PushOutcome::Stale { staleness: 2 }, initial));
        }
    }

    #[test]
    fn a_gradient_with_too_large_a_staleness_changes_nothing() {
        let mut shard = make_shard(Rule::Momentum { momentum: 0.9 }, &[1.0]);
        let rule = StalenessRule { max: 1, scales_rate: false };
        assert_eq!(shard.push(&mut [0.5], 0, rule), PushOutcome::Applied { staleness: 0 });
        assert_eq!(shard.push(&mut [0.5], 0, rule), PushOutcome::Applied { staleness: 1 });
        let before = (shard.parameters.clone(), shard.optimizer.clone());
        assert_eq!(shard.push(&mut [0.5], 0, rule), PushOutcome::Stale { staleness: 2 });
        assert_eq!((shard.parameters.clone(), shard.optimizer.clone()), before);
        assert_eq!((shard.version(), shard.staleness.dropped), (2, 1));
        // The server accepts a gradient for the current version 2.
        assert_eq!(shard.push(&mut [0.5], 2, rule), PushOutcome::Applied { staleness: 0 });
    }

    #[test]
    fn a_push_of_ranges_equals_a_dense_push_with_zeros_elsewhere() {
        let (mut sparse, mut dense) = (make_shard(Rule::Sgd, &[1.0; 6]), make_shard(Rule::Sgd, &[1.0; 6]));
        sparse.push_ranges(&[1..3, 5..6], &mut [0.1, 0.2, 0.3], 0, ANY_STALENESS);
        dense.push(&mut [0.0, 0.1, 0.2, 0.0, 0.0, 0.3], 0, ANY_STALENESS);
        assert_eq!(sparse.parameters, dense.parameters);
    }

    #[test]
    fn all_very_large_values_of_staleness_have_one_common_count() {
        let mut counts = StalenessCounts::default();
        counts.count_accepted(SEPARATE_STALENESS_COUNTS as u64);
        counts.count_accepted(u64::MAX / 2);
        assert_eq!(counts.accepted.len(), SEPARATE_STALENESS_COUNTS + 1);
        assert_eq!((counts.accepted[SEPARATE_STALENESS_COUNTS], counts.max), (2, u64::MAX / 2));
    }
}
