//! Reports the progress of a run to the caller.

use std::time::Instant;

use super::measurements::RankMeasurements;
use super::report::EpochRecord;

/// Receives the events of a run on this rank.
pub trait Observer {
    /// Called with a line of text for the user.
    fn notice(&mut self, line: &str);
    /// Called with a warning for the user.
    fn warning(&mut self, text: &str) {
        self.notice(&format!("warning: {text}"));
    }
    /// Called when an epoch begins. `epoch` counts from 1 to `epochs`. The epoch has `steps` steps. `steps_done` is
    /// 0, or the number of these steps that a resumed run took before the checkpoint.
    ///
    /// Some runs report several epochs at once, for example if each epoch has only one step. `epoch` is then the last
    /// of these epochs. `steps` and `steps_done` count the steps of all reported epochs.
    fn epoch_started(&mut self, epoch: u64, epochs: u64, steps_done: u64, steps: u64);
    /// Called before each step. `samples` holds the rows of the training set that this rank processes in this step.
    /// `epoch` and `batch` count from 0. This function is not called with a parameter server.
    fn batch_started(&mut self, _epoch: u64, _batch: u64, _samples: &[u32]) {}
    /// Called after each step. With a parameter server, called for several steps one after the other, up to 50 ms later, or after
    /// rank 0 has tested the model.
    fn step_taken(&mut self, step: &CompletedStep);
    /// Called after [`step_taken`](Self::step_taken), with what this rank has measured. Not called with a parameter server and
    /// with gossip.
    fn measured(&mut self, _measurements: &RankMeasurements<'_>) {}
    /// Called at the end of an epoch. `epochs` is the number of epochs in the run. `record` is `None` if a signal
    /// stopped the epoch.
    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>);
    /// Called at the end of each epoch, before the parameters are tested and saved. A program can change the
    /// parameters here, for example to clip them. All ranks must make the same changes. Otherwise the run fails.
    fn adjust_parameters(&mut self, _parameters: &mut [f32]) {}
}

/// A step that the ranks have completed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CompletedStep {
    /// The number of steps since the run began, including this step and the steps before a resumption.
    pub steps_total: u64,
    /// The mean loss of the samples that all ranks process in this step. If the ranks do not exchange losses in every
    /// step, this is the mean loss of this rank's samples.
    pub loss: f64,
    /// The learning rate of this step.
    pub learning_rate: f32,
    /// The number of samples that all ranks together processed in this step.
    pub samples: u64,
    /// The time at the end of the step.
    pub completed_at: Instant,
}

/// An observer that does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct SilentObserver;

impl Observer for SilentObserver {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {}
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}
