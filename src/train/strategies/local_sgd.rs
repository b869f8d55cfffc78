//! Local SGD. Each rank takes H steps alone, then the ranks average their parameters:
//!
//! `p_i(t+1) = p_i(t) - update(g_i(t))` on rank i, and after H steps `p_i = w_1 p_1 + ... + w_n p_n` on all ranks.
//!
//! The weight `w_i` is the share of rank i in the samples that all ranks have processed since the last average.
//!
//! Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019. `FedAvg` has the same weights:
//! `McMahan` et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.

use std::num::NonZeroU32;

use super::local_training::AveragingRule;

/// The strategy `local-sgd`.
pub(crate) struct LocalSgd {
    /// The number of steps between two averages.
    pub(crate) steps: NonZeroU32,
}

impl AveragingRule for LocalSgd {
    fn is_due_after_step(&self, steps: u64) -> bool {
        steps.is_multiple_of(self.steps.get().into())
    }

    fn is_due_after_epoch(&self, _: u64) -> bool {
        true
    }
}
