//! Checkpoints of the step loop.

use std::time::{Duration, Instant};

use super::Trainer;
use crate::group::Group;
use crate::train::checkpoint::{CheckpointWriter, TrainingState};
use crate::train::progress::Observer;
use crate::train::rank_checks::check_all_succeeded;
use crate::train::report::EpochRecord;
use crate::train::strategies::Agreement;
use crate::train::{Phase, TrainError};
use crate::types::{ReduceOp, WorldSize};

/// A save at the end of an epoch waits at most this long for the previous write.
const PREVIOUS_WAIT_MAX: Duration = Duration::from_secs(10);
/// The end of a run waits at most this long for its last checkpoint.
const LAST_WAIT_MAX: Duration = Duration::from_mins(10);

impl Trainer<'_> {
    /// Starts to save a checkpoint after an epoch that is reported, after a stop signal, or at the end of a run.
    /// `is_recorded` says whether the last record in the history is that of the current parameters. Only rank 0
    /// saves. A save that fails does not end the run: see [`finish_saving`](Self::finish_saving).
    pub(super) fn save(
        &mut self,
        group: &Group,
        is_recorded: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        // The parameters are the same on all ranks, so all ranks return the same result.
        if !self.state.parameters.iter().all(|value| value.is_finite()) {
            let steps = self.state.position.steps_total;
            let message = format!("a parameter is not finite after step {steps} on all ranks; lower --lr");
            return Err(TrainError::Diverged(message));
        }
        let is_best = is_recorded && self.is_best_record();
        let Some(writer) = &mut self.writer else { return Ok(()) };
        // The other ranks wait for rank 0 in the next step, and this wait has a deadline.
        let notice = writer.wait(PREVIOUS_WAIT_MAX.min(group.timeout() / 4));
        show(observer, notice);
        let notice = if writer.is_writing() {
            writer.skip(self.state.position.steps_total, Instant::now())
        } else {
            self.begin_save(is_best)
        };
        show(observer, notice);
        Ok(())
    }

    /// Saves a checkpoint within an epoch if one is due. If the previous write is still in progress, the save begins
    /// after a later step.
    pub(crate) fn save_if_due(&mut self, observer: &mut dyn Observer) {
        // If a parameter is not finite, the next test of the loss or of the parameters ends the run.
        if self.strategy.agreement() == Agreement::EveryStep
            && !self.stopped
            && self.can_save_now(self.state.position.steps_total, observer)
            && self.state.parameters.iter().all(|value| value.is_finite())
        {
            show(observer, self.begin_save(false));
        }
    }

    /// Returns whether a save within an epoch is due and no other write is in progress. `steps_total` is the number
    /// of steps that the run has taken.
    pub(crate) fn can_save_now(&mut self, steps_total: u64, observer: &mut dyn Observer) -> bool {
        let Some(writer) = &mut self.writer else { return false };
        show(observer, writer.wait(Duration::ZERO));
        !writer.is_writing() && writer.is_due(steps_total, Instant::now())
    }

    /// Copies the state and starts to write the copy. Returns a line for the user if the write cannot start.
    fn begin_save(&mut self, is_best: bool) -> Option<String> {
        self.state.optimizer = std::mem::take(&mut self.optimizer.state);
        self.state.strategy = self.strategy.state().into_iter().map(std::mem::take).collect();
        let begin = |writer: &mut CheckpointWriter, state: &TrainingState| {
            writer.begin(state, is_best, Instant::now())
        };
        let notice = self.writer.as_mut().and_then(|writer| begin(writer, &self.state));
        self.optimizer.state = std::mem::take(&mut self.state.optimizer);
        for (vector, saved) in self.strategy.state().into_iter().zip(self.state.strategy.drain(..)) {
            *vector = saved;
        }
        notice
    }

    /// Waits until the last checkpoint of the run is written. If the last save failed, tries once more. All ranks
    /// call this function and return the same result.
    ///
    /// # Errors
    ///
    /// The last checkpoint cannot be written.
    pub(crate) fn finish_saving(
        &mut self,
        group: &mut Group,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        if self.config.checkpoint.is_none() {
            return Ok(());
        }
        let started = Instant::now();
        // Rank 0 takes part in an all-reduce after each interval, so that the other ranks do not miss their deadline.
        let interval = PREVIOUS_WAIT_MAX.min(group.timeout() / 4);
        let mut may_retry = true;
        loop {
            let is_open =
                self.continue_saving(interval, &mut may_retry, observer) && started.elapsed() < LAST_WAIT_MAX;
            let mut open = [u64::from(is_open)];
            if group.size() != WorldSize::ONE {
                group.all_reduce(&mut open, ReduceOp::Max)?;
            }
            if open == [0] {
                break;
            }
        }
        let result = self.writer.as_mut().map_or(Ok(()), CheckpointWriter::take_error);
        check_all_succeeded(group, Phase::Storage, result.map_err(TrainError::from))
    }

    /// Waits for the write that is in progress, at most for `timeout`. If the last save has failed and `may_retry` is true,
    /// starts another save and sets `may_retry` to false. Returns whether a write is still in progress.
    fn continue_saving(
        &mut self,
        timeout: Duration,
        may_retry: &mut bool,
        observer: &mut dyn Observer,
    ) -> bool {
        let Some(writer) = &mut self.writer else { return false };
        show(observer, writer.wait(timeout));
        if !writer.is_writing() && writer.has_failed() && std::mem::take(may_retry) {
            show(observer, self.begin_save(false));
        }
        self.writer.as_ref().is_some_and(CheckpointWriter::is_writing)
    }

    /// Returns whether the last record in the history is better than all records before it.
    fn is_best_record(&self) -> bool {
        let has_validation = self.setup.validation.is_some();
        let has_test = !self.setup.dataset.test.is_empty();
        let loss = |record: &EpochRecord| match (has_validation, has_test) {
            (true, _) => record.validation_loss,
            (_, true) => record.test_loss,
            _ => Some(record.train_loss),
        };
        let Some((last, earlier)) = self.state.history.split_last() else { return false };
        loss(last).is_some_and(|last| earlier.iter().filter_map(loss).all(|earlier| last < earlier))
    }
}

/// Shows a line of the writer to the user, if there is one.
fn show(observer: &mut dyn Observer, line: Option<String>) {
    if let Some(line) = line {
        observer.notice(&line);
    }
}
