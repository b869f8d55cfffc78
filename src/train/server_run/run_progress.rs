//! How far a run has come, and why it has failed.

use std::time::Instant;

use crate::types::Rank;

/// The reason for which a run failed.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum RunFailure {
    /// The loss of a worker was not finite.
    Diverged { worker: Rank, loss: f64, batch: u64 },
    /// A server was lost.
    ServerLost { server: Rank, problem: String },
    /// A worker was lost in a synchronous run.
    WorkerLost { worker: Rank, problem: String },
    /// All workers were lost in an asynchronous run. `worker` was lost last.
    AllWorkersLost { worker: Rank, problem: String },
}

/// The progress of a run.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct TrainingProgress {
    /// All batches below this number are done.
    pub(super) batches: u64,
    /// The last steps, at most one for each batch that the caller has not seen.
    pub(super) steps: Vec<FinishedStep>,
    /// Whether all batches are done, or the run was stopped.
    pub(super) is_finished: bool,
    pub(super) failure: Option<RunFailure>,
}

/// A step of the run. In a synchronous run, it is the update with the gradients of all workers. Otherwise, it is the update with
/// one gradient.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct FinishedStep {
    pub(super) time: Instant,
    /// The mean loss of the samples.
    pub(super) loss: f64,
}

impl TrainingProgress {
    /// Returns the step of a batch that is done. The workers of an asynchronous run complete the batches in another order, so it
    /// may be the step of a batch nearby. If the coordinator does not remember the step, returns the first one that it
    /// remembers.
    pub(super) fn step_of_batch(&self, batch: u64) -> Option<FinishedStep> {
        let steps_since = self.batches.saturating_sub(batch) as usize;
        self.steps.get(self.steps.len().saturating_sub(steps_since)).copied()
    }
}

/// How far a run must have come before the first server's main thread has work.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwaitedProgress {
    /// All batches below this number are done.
    pub(super) batches: u64,
    /// This many gradients were applied.
    pub(super) updates: u64,
}
