//! A part of training in the timeline: what the training thread of a rank does, and for how long.

use std::time::Duration;

/// What the training thread does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SpanKind {
    /// Gathers the samples of a batch, also from other ranks.
    Data,
    /// Computes the loss and the gradient.
    ForwardBackward,
    /// Ends the step: sums gradients over the ranks and updates the parameters.
    SumAndUpdate,
    /// Computes new parameters.
    Optimizer,
    /// Waits for other ranks.
    Wait,
    /// Computes the metrics of the test set or the validation set.
    Evaluation,
    /// Prepares a checkpoint.
    Checkpoint,
}

impl SpanKind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::ForwardBackward => "forward and backward",
            Self::SumAndUpdate => "sum and update",
            Self::Optimizer => "optimizer",
            Self::Wait => "wait",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
        }
    }
}

/// A part of training.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) kind: SpanKind,
    /// The step, counted from 1; `None` before the first step.
    pub(crate) step: Option<u64>,
    pub(crate) begun: Duration,
    pub(crate) ended: Duration,
}
