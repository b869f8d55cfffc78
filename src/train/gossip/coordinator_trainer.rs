//! The duties of the coordinator's training thread: it tests and saves the model during the run, and averages the
//! parameters at the end.

use std::collections::BTreeSet;
use std::time::Instant;

use super::GossipContext;
use super::coordinator::GossipProgress;
use super::worker::Worker;
use crate::group::{Group, Statistics};
use crate::train::TrainError;
use crate::train::checkpoint::{Position, TrainingState};
use crate::train::partition::ModelPartition;
use crate::train::peer_link::{LinkFailure, PeerLink};
use crate::train::progress::Observer;
use crate::train::report::GossipReport;
use crate::train::run::{Summary, conclude_run};
use crate::train::step_times::StepTimes;
use crate::train::summary_words::encode_summary;
use crate::train::trainer::Trainer;
use crate::types::{Rank, WorldSize};

/// Tests and saves the model on the coordinator.
pub(super) struct CoordinatorTrainer<'a> {
    context: &'a GossipContext<'a>,
    trainer: Trainer<'a>,
    /// The position at which the run started.
    start: Position,
    /// The number of completed epochs at the last record.
    epochs_recorded: u64,
    /// All batches below this number were shown to the observer, or were done before this rank became the coordinator.
    batches_shown: u64,
    /// The times of this rank's steps since the last record.
    pub(super) step_times: StepTimes,
    /// The time of the last record, and the number of samples that the ranks had processed at that time.
    last_record: (Instant, u64),
    /// The lost ranks that a warning to the user has named.
    announced_lost_ranks: BTreeSet<Rank>,
    /// Whether the observer has been told that the current epoch has started.
    has_begun_epoch: bool,
}

impl<'a> CoordinatorTrainer<'a> {
    /// Creates the trainer of a run that started from `state`. All parts below the number `first_part` are done.
    pub(super) fn new(
        context: &'a GossipContext<'a>,
        state: TrainingState,
        first_part: u64,
    ) -> Result<Self, TrainError> {
        let start = state.position;
        let first_batch = first_part / u64::from(context.size.get());
        let (config, setup) = (context.config, context.setup);
        let partition = ModelPartition::new(config.strategy, &setup.network, (Rank::ZERO, WorldSize::ONE))
            .map_err(TrainError::Options)?;
        let group_and_partition = (&mut Group::solo(), partition);
        Ok(Self {
            context,
            trainer: Trainer::new(config, setup, state, group_and_partition, context.stop)?,
            start,
            epochs_recorded: first_batch / context.batches_per_epoch,
            batches_shown: first_batch,
            step_times: StepTimes::default(),
            last_record: (Instant::now(), 0),
            announced_lost_ranks: BTreeSet::new(),
            has_begun_epoch: false,
        })
    }

    /// Shows the progress to the observer. If an epoch is complete, tests and saves the model. The last epoch is an
    /// exception: [`conclude_run`](Self::conclude_run) tests and saves the final model.
    pub(super) fn record_progress(
        &mut self,
        worker: &Worker<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let settings = &self.context.setup.settings;
        self.announce_lost_ranks(observer);
        self.context.shared.coordinator.check_quorum_of_reachable_ranks()?;
        if self.context.is_stopping() {
            self.context.shared.coordinator.stop();
        }
        let progress = self.context.shared.coordinator.progress();
        self.show_progress(&progress, observer);
        let epochs_done = self.done_batches(&progress) / self.context.batches_per_epoch;
        let epochs_to_record =
            epochs_done / settings.epochs_between_records * settings.epochs_between_records;
        if progress.is_finished || epochs_to_record >= settings.epochs {
            return Ok(());
        }
        if epochs_to_record <= self.epochs_recorded {
            return self.save_if_due(worker, &progress, observer);
        }
        self.copy_worker_state(worker);
        self.save_and_test(epochs_to_record, 0, &progress, observer)?;
        if self.trainer.is_out_of_patience() {
            self.context.shared.coordinator.stop();
        }
        Ok(())
    }

    /// Returns the number of the first batch that has a part that is not done. Batches count from 0, across epochs.
    fn done_batches(&self, progress: &GossipProgress) -> u64 {
        progress.done_before / u64::from(self.context.size.get())
    }

    fn announce_lost_ranks(&mut self, observer: &mut dyn Observer) {
        for (rank, problem) in self.context.shared.coordinator.lost_ranks() {
            if self.announced_lost_ranks.insert(rank) {
                observer.warning(&format!("rank {rank} is lost: {problem}"));
            }
        }
    }

    fn show_progress(&mut self, progress: &GossipProgress, observer: &mut dyn Observer) {
        let settings = &self.context.setup.settings;
        let per_record = settings.epochs_between_records;
        let batches = self.done_batches(progress);
        if !self.has_begun_epoch {
            let last_epoch = (self.epochs_recorded + 1).next_multiple_of(per_record).min(settings.epochs);
            let first_batch = (last_epoch - 1) / per_record * per_record * self.context.batches_per_epoch;
            let steps = last_epoch * self.context.batches_per_epoch - first_batch;
            let steps_done = batches.saturating_sub(first_batch).min(steps);
            observer.epoch_started(last_epoch, settings.epochs, steps_done, steps);
            self.has_begun_epoch = true;
            self.batches_shown = batches;
        }
        for batch in self.batches_shown..batches {
            let rate = self.trainer.learning_rate();
            observer.step_taken(&self.context.describe_step((self.start, batch), progress.last_loss, rate));
        }
        self.batches_shown = self.batches_shown.max(batches);
    }

    /// Copies this rank's parameters and the state of its optimizer to the trainer.
    fn copy_worker_state(&mut self, worker: &Worker<'_>) {
        let (parameters, optimizer) = self.trainer.parameters_and_optimizer();
        self.context.shared.replica.copy_to(parameters);
        optimizer.state.clone_from(&worker.optimizer.state);
        optimizer.steps = worker.optimizer.steps;
    }

    /// Saves a checkpoint of this rank's replica within an epoch if one is due. The position is that of the first batch that
    /// is not done.
    fn save_if_due(
        &mut self,
        worker: &Worker<'_>,
        progress: &GossipProgress,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let batches = self.done_batches(progress);
        let steps_total = self.context.steps_total_after(self.start, batches);
        if !self.trainer.can_save_now(steps_total, observer) {
            return Ok(());
        }
        self.copy_worker_state(worker);
        let (epoch, step) =
            (batches / self.context.batches_per_epoch, batches % self.context.batches_per_epoch);
        let (loss_sum, samples) =
            if step == 0 { (0.0, 0) } else { self.context.shared.coordinator.epoch_losses(epoch) };
        self.trainer.state.position =
            Position { epoch, step, steps_total, momentum_start: 0, loss_sum, samples };
        self.trainer.save_if_due(&mut Group::solo(), observer)
    }

    /// Saves a checkpoint after `step` batches of `epoch`, which counts from 0. If `step` is 0, also tests the model
    /// and adds a record of the previous epoch.
    fn save_and_test(
        &mut self,
        epoch: u64,
        step: u64,
        progress: &GossipProgress,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let batches = epoch * self.context.batches_per_epoch + step;
        let is_epoch_complete = step == 0 && epoch > self.epochs_recorded;
        let (epoch_sum, epoch_samples) = self.context.shared.coordinator.epoch_losses(if step == 0 {
            epoch.saturating_sub(1)
        } else {
            epoch
        });
        let (loss_sum, samples) = if step == 0 { (0.0, 0) } else { (epoch_sum, epoch_samples) };
        let steps_total = self.context.steps_total_after(self.start, batches);
        self.trainer.state.position =
            Position { epoch, step, steps_total, momentum_start: 0, loss_sum, samples };
        let loss = epoch_sum / epoch_samples.max(1) as f64;
        let now = (Instant::now(), progress.samples);
        let (since, samples_before) = std::mem::replace(&mut self.last_record, now);
        let seconds = now.0.duration_since(since).as_secs_f64();
        let losses = (loss, progress.samples - samples_before);
        let times = (seconds, std::mem::take(&mut self.step_times));
        self.epochs_recorded = self.epochs_recorded.max(epoch);
        self.has_begun_epoch = false;
        self.trainer.record_worker_steps(&mut Group::solo(), losses, times, (is_epoch_complete, observer))
    }

    /// Averages the parameters of all ranks that are not lost, tests and saves the model, and publishes the results for
    /// the other ranks.
    pub(super) fn conclude_run(
        &mut self,
        worker: &Worker<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Summary, TrainError> {
        let context = self.context;
        let coordinator = &context.shared.coordinator;
        let own = context.shared.replica.with_parameters(|parameters| parameters.to_vec());
        coordinator.add_final_parameters(context.own_rank, &own);
        for rank in coordinator.wait_for_final_parameters(context.timeout) {
            let problem = "it did not send its final parameters before the deadline (--timeout)";
            let link = context.link(rank);
            context.shared.record_lost_link(link, LinkFailure::Lost(problem.into()));
        }
        self.announce_lost_ranks(observer);
        coordinator.check_quorum_of_final_parameters()?;
        self.copy_worker_state(worker);
        coordinator.write_average_parameters(self.trainer.parameters_and_optimizer().0);
        let progress = coordinator.progress();
        self.show_progress(&progress, observer);
        let batches = self.done_batches(&progress);
        let (epoch, step) = (batches / context.batches_per_epoch, batches % context.batches_per_epoch);
        self.trainer.stopped = epoch < context.setup.settings.epochs && !self.trainer.is_out_of_patience();
        self.save_and_test(epoch, step, &progress, observer)?;
        self.trainer.restore_and_save_best_parameters(&mut Group::solo(), observer)?;
        let summary = self.evaluate_and_report(worker, &progress, observer)?;
        coordinator.publish_results(encode_summary(&summary)?);
        for rank in coordinator.wait_for_connection_ends(context.timeout) {
            observer.warning(&format!("rank {rank} did not close its connection in time"));
        }
        Ok(summary)
    }

    /// Evaluates the final model, and writes the report and the model file.
    fn evaluate_and_report(
        &mut self,
        worker: &Worker<'_>,
        progress: &GossipProgress,
        observer: &mut dyn Observer,
    ) -> Result<Summary, TrainError> {
        let context = self.context;
        let ranks = context.size.ranks().map(Rank::get);
        let report = GossipReport {
            coordinator: context.own_rank.get(),
            steps: ranks.zip(progress.steps.iter().copied()).collect(),
            averages: worker.averages.completed,
            lost_ranks: context.shared.coordinator.lost_ranks().iter().map(|(rank, _)| rank.get()).collect(),
        };
        let bytes_sent = context.links.iter().map(PeerLink::bytes_sent).sum();
        let run = (context.config, context.setup, &mut self.trainer);
        let start = (context.started, Statistics::default());
        conclude_run(&mut Group::solo(), run, start, observer, |summary| {
            summary.world_size = context.size.get();
            summary.bytes_sent = bytes_sent;
            summary.gossip = Some(report);
        })
    }
}
