//! Model averaging. Each rank trains alone for K epochs, or until the end of the run. Then the ranks average their
//! parameters:
//!
//! `p_i = w_1 p_1 + ... + w_n p_n` on all ranks, where `w_i` is the share of rank i in the samples that all ranks
//! have processed since the last average.
//!
//! Source: Zinkevich et al., "Parallelized stochastic gradient descent", NIPS 2010 (one average at the end);
//! "Distributed training strategies for the structured perceptron", NAACL 2010 (an average after each epoch).

use std::num::NonZeroU32;

use super::local_training::AveragingRule;

/// The strategy `model-average`.
pub(crate) struct ModelAverage {
    /// The number of epochs between two averages. If `None`, the ranks average only when the trainer needs equal
    /// parameters: at the end of the run, and after a stop signal.
    pub(crate) epochs: Option<NonZeroU32>,
}

impl AveragingRule for ModelAverage {
    fn is_due_after_step(&self, _: u64) -> bool {
        false
    }

    fn is_due_after_epoch(&self, epochs: u64) -> bool {
        self.epochs.is_some_and(|between| epochs.is_multiple_of(between.get().into()))
    }
}
