//! Saves checkpoints during the step loop and at the end of the run.

use std::time::{Duration, Instant};

use super::Trainer;
use crate::group::{AutoReport, Error, Group};
use crate::observe::training_thread::{SpanKind, span};
use crate::train::checkpoint::{CheckpointWriter, TrainingState};
use crate::train::compression_memory::{CompressionMemory, MemoryNeeds};
use crate::train::early_stopping::BestParameters;
use crate::train::partition::ModelPartition;
use crate::train::progress::Observer;
use crate::train::rank_checks::check_all_succeeded;
use crate::train::report::EpochRecord;
use crate::train::strategies::ParameterAgreement;
use crate::train::{RunPhase, TrainError};
use crate::types::{ReduceOp, WorldSize};

/// A save at the end of an epoch waits at most this long for the previous write.
const PREVIOUS_WRITE_WAIT_MAX: Duration = Duration::from_secs(10);
/// At the end of a run, the ranks wait at most this long until the last checkpoint is written.
const LAST_CHECKPOINT_WAIT_MAX: Duration = Duration::from_mins(10);

/// What the ranks do next while rank 0 writes the last checkpoint. The ranks all-reduce the maximum, so a later variant
/// takes precedence over an earlier variant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastCheckpointAction {
    /// End the run: the write has ended, or the ranks have waited long enough.
    End,
    /// Wait for the write.
    Wait,
    /// Write once more, because the write failed.
    Retry,
}

impl Trainer<'_> {
    /// Starts to save a checkpoint after an epoch that has a record, after a stop signal, or at the end of a run.
    /// `is_recorded` is true if the last record of the history belongs to the current parameters. Only rank 0 saves.
    /// A save that fails does not end the run: see [`finish_saving`](Self::finish_saving). All ranks must call this
    /// function.
    pub(super) fn save(
        &mut self,
        group: &mut Group,
        is_recorded: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let _span = span(SpanKind::Checkpoint);
        self.check_finite(group)?;
        self.is_save_due = false;
        let collected = self.collect_state(group)?;
        let is_best = is_recorded && self.is_best_record();
        let Some(writer) = &mut self.writer else { return Ok(()) };
        // The wait is short, because the other ranks meanwhile wait for rank 0, and their operations have a deadline.
        let notice = writer.wait(PREVIOUS_WRITE_WAIT_MAX.min(group.timeout() / 4));
        show_checkpoint_line(observer, notice);
        let notice = if writer.is_writing() {
            writer.record_skipped_save(self.state.position.steps_total, is_best, Instant::now())
        } else {
            self.begin_save(collected.as_ref(), is_best)
        };
        show_checkpoint_line(observer, notice);
        Ok(())
    }

    /// Returns an error if a parameter of the model is not finite. All ranks return the same result.
    fn check_finite(&self, group: &mut Group) -> Result<(), TrainError> {
        let is_finite = self.state.parameters.iter().all(|value| value.is_finite());
        let steps = self.state.position.steps_total;
        let advice = self.advise_after_divergence();
        let message = || format!("a parameter is not finite after step {steps} on all ranks; {advice}");
        let own_result = if is_finite { Ok(()) } else { Err(TrainError::Diverged(message())) };
        // If every rank holds the whole model, `own_result` is the same on all ranks.
        if self.partition.is_undivided() {
            own_result
        } else {
            check_all_succeeded(group, RunPhase::Training, own_result)
        }
    }

    /// Returns whether all ranks take part in a save, because they hold parts of the state, or what they have not sent.
    fn saves_together(&mut self) -> bool {
        !self.partition.has_whole_state() || self.memory_needs().any()
    }

    /// Returns what the ranks remember of compressed sums.
    /// Returns the codecs that `--compression auto` has chosen for the buffers of this rank.
    pub(crate) fn codec_choices(&mut self) -> Vec<AutoReport> {
        self.strategy.compressed_sums().map_or_else(Vec::new, |sums| sums.codec_choices())
    }

    fn memory_needs(&mut self) -> MemoryNeeds {
        self.strategy.compressed_sums().map_or(MemoryNeeds::default(), |sums| sums.memory_needs())
    }

    /// Returns whether this rank asks the other ranks to save a checkpoint within the epoch. The trainer calls this function
    /// before each step. Only rank 0 asks, and only if the other ranks take part in a save, or if their parameters differ
    /// until an average.
    pub(super) fn requests_save(&mut self, observer: &mut dyn Observer) -> bool {
        match self.strategy.parameter_agreement() {
            ParameterAgreement::EveryStep => {
                let next = self.state.position.steps_total + 1;
                self.saves_together() && self.can_save_now(next, observer)
            }
            // Each rank counts the steps itself, so that the steps with a save do not depend on the time of a message.
            ParameterAgreement::OnRequest => {
                !self.is_save_due
                    && self.can_begin_write(observer)
                    && self.writer.as_ref().is_some_and(|writer| writer.is_interval_over(Instant::now()))
            }
        }
    }

    /// Saves a checkpoint within an epoch if one is due. If the previous write is still in progress, the save begins
    /// after a later step. If the ranks have averaged their parameters for this save, it is left out instead, so that the
    /// steps of the averages do not depend on the speed of the disk. All ranks must call this function.
    pub(crate) fn save_if_due(
        &mut self,
        group: &mut Group,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let together = self.saves_together();
        let is_due = match self.strategy.parameter_agreement() {
            ParameterAgreement::EveryStep if together => std::mem::take(&mut self.is_save_due),
            ParameterAgreement::EveryStep => self.can_save_now(self.state.position.steps_total, observer),
            ParameterAgreement::OnRequest => {
                self.strategy.has_equal_parameters() && std::mem::take(&mut self.is_save_due)
            }
        };
        if !is_due || self.stopped {
            return Ok(());
        }
        let collected = self.collect_state(group)?;
        // If a parameter is not finite, do not save: a later check ends the run with an error.
        let parameters = &collected.as_ref().unwrap_or(&self.state).parameters;
        if parameters.iter().all(|value| value.is_finite()) && self.can_begin_write(observer) {
            show_checkpoint_line(observer, self.begin_save(collected.as_ref(), false));
        }
        Ok(())
    }

    /// Returns whether a save within an epoch is due after `steps_total` steps of the run, and no other write is in
    /// progress.
    pub(crate) fn can_save_now(&mut self, steps_total: u64, observer: &mut dyn Observer) -> bool {
        self.can_begin_write(observer)
            && self.writer.as_ref().is_some_and(|writer| writer.is_due(steps_total, Instant::now()))
    }

    /// Returns whether this rank writes checkpoints, and no write is in progress.
    fn can_begin_write(&mut self, observer: &mut dyn Observer) -> bool {
        let Some(writer) = &mut self.writer else { return false };
        show_checkpoint_line(observer, writer.wait(Duration::ZERO));
        !writer.is_writing()
    }

    /// Copies the state and starts to write the copy. Returns a line for the user if the write cannot start. If the
    /// ranks hold parts of the state, `collected` is the whole state.
    fn begin_save(&mut self, collected: Option<&TrainingState>, is_best: bool) -> Option<String> {
        let writer = self.writer.as_mut()?;
        if let Some(state) = collected {
            return writer.begin_save(state, is_best, Instant::now());
        }
        self.state.optimizer = std::mem::take(&mut self.optimizer.state);
        self.state.strategy = self.strategy.state().into_iter().map(std::mem::take).collect();
        let begin = |writer: &mut CheckpointWriter, state: &TrainingState| {
            writer.begin_save(state, is_best, Instant::now())
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
        // Rank 0 takes part in an all-reduce after each interval, so that no other rank reaches its deadline.
        let interval = PREVIOUS_WRITE_WAIT_MAX.min(group.timeout() / 4);
        let mut may_retry = true;
        loop {
            let may_wait = started.elapsed() < LAST_CHECKPOINT_WAIT_MAX;
            let mut next = [self.wait_for_last_write(interval, may_wait, may_retry, observer) as u64];
            if group.size() != WorldSize::ONE {
                group.all_reduce(&mut next, ReduceOp::Max)?;
            }
            if next == [LastCheckpointAction::End as u64] {
                break;
            }
            if next == [LastCheckpointAction::Retry as u64] {
                may_retry = false;
                let collected = self.collect_state(group)?;
                show_checkpoint_line(observer, self.begin_save(collected.as_ref(), false));
            }
        }
        let result = self.writer.as_mut().map_or(Ok(()), CheckpointWriter::take_error);
        check_all_succeeded(group, RunPhase::Storage, result.map_err(TrainError::from))
    }

    /// Waits at most `timeout` for the write that is in progress. Returns what this rank proposes to do next. If
    /// `may_wait` is false, this is always [`LastCheckpointAction::End`]. If `may_retry` is false, this is never
    /// [`LastCheckpointAction::Retry`].
    fn wait_for_last_write(
        &mut self,
        timeout: Duration,
        may_wait: bool,
        may_retry: bool,
        observer: &mut dyn Observer,
    ) -> LastCheckpointAction {
        let Some(writer) = &mut self.writer else { return LastCheckpointAction::End };
        show_checkpoint_line(observer, writer.wait(timeout));
        match (writer.is_writing(), writer.has_failed()) {
            _ if !may_wait => LastCheckpointAction::End,
            (true, _) => LastCheckpointAction::Wait,
            (false, true) if may_retry => LastCheckpointAction::Retry,
            (false, _) => LastCheckpointAction::End,
        }
    }

    /// Gathers the parts of the state on rank 0, if the ranks take part in a save and save checkpoints. Returns
    /// the whole state on rank 0, and `None` in all other cases. All ranks must call this function.
    fn collect_state(&mut self, group: &mut Group) -> Result<Option<TrainingState>, Error> {
        if !self.saves_together() || self.config.checkpoint.is_none() {
            return Ok(None);
        }
        let compression = self.collect_compression_memory(group)?;
        let partition = &self.partition;
        let parameters = partition.gather_on_rank_0(group, &self.state.parameters)?;
        let mut gather_all = |partition: &ModelPartition, vectors: Vec<&Vec<f32>>| {
            let gathered = vectors.into_iter().map(|vector| partition.gather_on_rank_0(group, vector));
            gathered
                .collect::<Result<Vec<_>, Error>>()
                .map(|gathered| gathered.into_iter().flatten().collect())
        };
        let optimizer: Vec<Vec<f32>> =
            gather_all(partition.optimizer_partition(), self.optimizer.state.iter().collect())?;
        let strategy = self.strategy.state().into_iter().map(|vector| &*vector).collect();
        let strategy = gather_all(partition, strategy)?;
        let best = match &self.state.best {
            Some(best) => {
                let parameters = partition.gather_on_rank_0(group, &best.parameters)?;
                parameters.map(|parameters| BestParameters { record: best.record, parameters })
            }
            None => None,
        };
        Ok(parameters.map(|parameters| TrainingState {
            position: self.state.position,
            learning_rate: self.state.learning_rate,
            parameters,
            optimizer,
            best,
            strategy,
            compression,
            done_ahead: Vec::new(),
            history: self.state.history.clone(),
        }))
    }

    /// Returns what all ranks remember of compressed sums, on rank 0. All ranks must call this function.
    fn collect_compression_memory(&mut self, group: &mut Group) -> Result<CompressionMemory, Error> {
        let needs = self.memory_needs();
        let Some(own) = self.strategy.compressed_sums().filter(|_| needs.any()).map(|sums| sums.memory())
        else {
            return Ok(CompressionMemory::default());
        };
        let mut all = CompressionMemory { calls: own.calls, ..CompressionMemory::default() };
        for (vectors, all) in [(&own.residuals, &mut all.residuals), (&own.velocities, &mut all.velocities)] {
            for vector in vectors {
                for replica in self.partition.place().replicas.ranks() {
                    all.extend(self.partition.gather_replica_on_rank_0(group, vector, replica)?);
                }
            }
        }
        let common = [
            (needs.results, &own.results, &mut all.results),
            (needs.factors, &own.factors, &mut all.factors),
        ];
        for (is_needed, own, all) in common {
            if is_needed {
                *all = self.partition.gather_on_rank_0(group, own)?.unwrap_or_default();
            }
        }
        Ok(all)
    }

    /// Moves the parameters of the model out of this trainer. If each rank holds only a part of the model, returns the
    /// whole model on rank 0, and this rank's part on each other rank. All ranks must call this function.
    pub(crate) fn take_parameters(&mut self, group: &mut Group) -> Result<Vec<f32>, TrainError> {
        let own = std::mem::take(&mut self.state.parameters);
        if self.partition.is_undivided() {
            return Ok(own);
        }
        Ok(self.partition.gather_on_rank_0(group, &own)?.unwrap_or(own))
    }

    /// Returns whether the last record in the history has a lower loss than all records before it. Compares the
    /// validation losses if the run holds out samples. If there is only a test set, compares the test losses. In all other
    /// runs, compares the training losses.
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

/// If the checkpoint writer has returned a line, shows this line to the user.
fn show_checkpoint_line(observer: &mut dyn Observer, line: Option<String>) {
    if let Some(line) = line {
        if let Some(text) = line.strip_prefix("warning: ") {
            observer.warning(text);
        } else {
            observer.notice(&line);
        }
    }
}
