//! The first server (rank 0): holds a shard, hands out batches, tests and saves the model.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::coordinator::{BatchCoordinator, RunStart};
use super::run_progress::{AwaitedProgress, FinishedStep, RunFailure};
use super::{RunContext, create_shard, refusal_reason};
use crate::codec::Compression;
use crate::group::{Group, Statistics};
use crate::train::TrainError;
use crate::train::checkpoint::{CheckpointSettings, TrainingState};
use crate::train::compression_reach::CompressionReach;
use crate::train::parameter_server::{
    Links, MessageCodecs, ParameterServerError, ServerClient, ShardServer, StalenessCounts,
};
use crate::train::partition::ModelPartition;
use crate::train::peer_link::PeerLink;
use crate::train::progress::{CompletedStep, Observer};
use crate::train::report::ServerReport;
use crate::train::run::{Summary, conclude_run};
use crate::train::summary_words::encode_summary;
use crate::train::trainer::Trainer;
use crate::types::{Rank, WorldSize};

/// How often the first server checks whether it has received a stop signal, and shows the progress of the run. If its main thread
/// woke up after each update, it would take the processors from the workers of this host.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// At the end of an asynchronous run, the first server waits at most this long for pushes that are in progress.
const LAST_PUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the first server until the end of the run. The run starts from `state`.
pub(super) fn run_first_server(
    context: &RunContext<'_>,
    links: Links,
    state: TrainingState,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let (config, setup) = (context.config, context.setup);
    let partition = ModelPartition::new(config.strategy, &setup.network, (Rank::ZERO, WorldSize::ONE))
        .map_err(TrainError::Options)?;
    let Links { clients: client_links, servers: server_links } = links;
    let clients: Vec<Rank> = client_links.iter().map(|link| link.peer).collect();
    let other_server_count = clients.iter().filter(|&&rank| context.layout.is_server(rank)).count();
    let start = RunStart {
        position: state.position,
        done_ahead: &state.done_ahead,
        batches_per_epoch: setup.dataset.train.len().div_ceil(setup.settings.batch_size) as u64,
        epochs: setup.settings.epochs,
    };
    let coordinator =
        Arc::new(BatchCoordinator::new(&start, clients, other_server_count, context.is_synchronous));
    let handler = Arc::clone(&coordinator);
    let server = ShardServer::new(create_shard(context, Rank::ZERO, &state), context.update_mode, handler);
    let server = server.with_codecs(MessageCodecs::new(context.compression));
    let mut first_server = FirstServer {
        context,
        server: &server,
        coordinator: &coordinator,
        other_servers: ServerClient::new(server_links, &context.layout, context.is_synchronous),
        batches_per_epoch: start.batches_per_epoch,
        first_version: start.position.steps_total,
        trainer: Trainer::new(config, setup, state, (&mut Group::solo(), partition), context.stop)?,
        announced: BTreeSet::new(),
        last_snapshot: (Instant::now(), 0),
        snapshot_counts: (Vec::new(), StalenessCounts::default()),
    };
    let result = std::thread::scope(|scope| {
        for (client, link) in client_links.iter().enumerate() {
            let server = &server;
            scope.spawn(move || server.serve(client, link));
        }
        let result =
            first_server.train(observer).and_then(|()| first_server.conclude_run(&client_links, observer));
        let result = result.and_then(|summary| Ok((encode_summary(&summary)?, summary)));
        match &result {
            Ok((words, _)) => {
                coordinator.publish_results(words.clone());
                first_server.other_servers.close();
            }
            Err(error) => {
                server.refuse_further_requests(refusal_reason(error), &error.to_string());
                first_server.other_servers.abort(&error.to_string());
            }
        }
        for client in coordinator.wait_for_link_ends(context.link_end_timeout(&result)) {
            let link = &client_links[client];
            observer.warning(&format!("rank {} did not close its connection in time", link.peer));
            link.abort("the run has ended");
        }
        result.map(|(_, summary)| summary)
    });
    // Each close waits for the rank at the other end. To avoid a deadlock, every rank first closes its links with the
    // first server, then its links with the second server, and so on.
    drop(client_links);
    drop(first_server);
    result
}

/// The state of the first server's main thread.
struct FirstServer<'r, 'a> {
    context: &'r RunContext<'a>,
    server: &'r ShardServer<'a>,
    coordinator: &'r BatchCoordinator,
    /// The connections with the other servers.
    other_servers: ServerClient,
    batches_per_epoch: u64,
    /// The number of steps before this run.
    first_version: u64,
    trainer: Trainer<'a>,
    /// The lost workers that a warning to the user has named.
    announced: BTreeSet<Rank>,
    /// The time of the last snapshot, and the number of samples that the workers had processed at that time.
    last_snapshot: (Instant, u64),
    /// The number of applied gradients of each worker, and the staleness of all gradients, at the last snapshot.
    snapshot_counts: (Vec<u64>, StalenessCounts),
}

impl FirstServer<'_, '_> {
    /// Waits until the workers have trained the model. After each epoch that has a record in the report, tests and
    /// saves the model.
    fn train(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let epochs = self.context.setup.settings.epochs;
        let mut solo = Group::solo();
        // If a stop signal ended the previous run during an evaluation, its checkpoint lacks the last validation loss.
        self.trainer.compute_missing_validation_loss(&mut solo)?;
        loop {
            let epoch = self.trainer.state.position.epoch;
            if epoch >= epochs || self.trainer.is_out_of_patience() {
                break;
            }
            let per_record = self.context.setup.settings.epochs_between_records;
            let record_epoch = (epoch + 1).next_multiple_of(per_record).min(epochs);
            self.wait_for_epochs(record_epoch, observer)?;
            let is_complete = self.trainer.state.position.epoch >= record_epoch;
            let now = (Instant::now(), self.coordinator.applied_samples());
            let previous = std::mem::replace(&mut self.last_snapshot, now);
            let (samples, seconds) = (now.1 - previous.1, now.0.duration_since(previous.0).as_secs_f64());
            let position = self.trainer.state.position;
            let loss_epoch = match position.step {
                _ if is_complete => record_epoch - 1,
                0 => position.epoch.saturating_sub(1),
                _ => position.epoch,
            };
            let loss = self.coordinator.epoch_loss(loss_epoch);
            let times = (seconds, self.coordinator.take_step_times());
            self.trainer.record_worker_steps(&mut solo, (loss, samples), times, (is_complete, observer))?;
            if !is_complete {
                self.trainer.stopped = true;
                break;
            }
        }
        self.coordinator.stop_run();
        self.coordinator.allow_lost_clients();
        self.trainer.restore_and_save_best_parameters(&mut solo, observer)
    }

    /// Waits until all batches of the first `epoch_count` epochs are done, or until the run stops. Then takes a snapshot
    /// of the model.
    fn wait_for_epochs(&mut self, epoch_count: u64, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let epochs = self.context.setup.settings.epochs;
        let end_batch = epoch_count.saturating_mul(self.batches_per_epoch);
        let position = self.trainer.state.position;
        let first_batch = position.epoch * self.batches_per_epoch + position.step;
        let per_record = self.context.setup.settings.epochs_between_records;
        // The first batch after the previous record.
        let start_batch = (epoch_count - 1) / per_record * per_record * self.batches_per_epoch;
        let batches_done = first_batch - start_batch.min(first_batch);
        observer.epoch_started(epoch_count, epochs, batches_done, end_batch - start_batch);
        self.coordinator.continue_until_done(end_batch);
        let mut batches = first_batch;
        let steps_before = position.steps_total;
        let (mut pause, mut version) = (None, position.steps_total);
        loop {
            let awaited = AwaitedProgress {
                batches: pause.unwrap_or(end_batch).min(end_batch),
                updates: self.updates_until_save(version),
            };
            let progress = self.coordinator.wait_for_progress(awaited, batches, CHECK_INTERVAL);
            version = self.server.with_shard(|shard| shard.version());
            self.announce_lost_workers(observer);
            if let Some(failure) = progress.failure {
                return Err(self.describe_failure(failure));
            }
            for done in batches..progress.batches.min(end_batch) {
                let Some(step) = progress.step_of_batch(done) else { break };
                observer.step_taken(&self.describe_step(steps_before + done - first_batch, step));
            }
            batches = batches.max(progress.batches);
            if self.context.stop.load(Ordering::Relaxed) {
                self.coordinator.stop_run();
            }
            if batches >= end_batch || progress.is_finished {
                self.wait_until_no_push(progress.is_finished)?;
                return self.take_snapshot();
            }
            if self.context.config.checkpoint.as_ref().is_some_and(CheckpointSettings::is_periodic)
                && self.save_if_due((progress.batches, version), &mut pause, observer)?
            {
                self.coordinator.continue_until_done(end_batch);
            }
        }
    }

    /// Returns how many gradients this server will have applied in this run when the next checkpoint after `version` steps is
    /// due. Returns `u64::MAX` if no checkpoint is due after a number of steps.
    fn updates_until_save(&self, version: u64) -> u64 {
        let Some(every) = self.context.config.checkpoint.as_ref().and_then(|settings| settings.steps) else {
            return u64::MAX;
        };
        let steps = (version + 1).next_multiple_of(every.get()) - self.first_version;
        let gradients_per_step =
            if self.context.is_synchronous { self.context.layout.workers().count() as u64 } else { 1 };
        steps.saturating_mul(gradients_per_step)
    }

    /// Saves a checkpoint within an epoch if one is due. Returns whether the save has begun. `batches` is the number
    /// of batches that are done, and `version` the number of steps. A synchronous run must pause before the save. So a first
    /// call sets `pause` to the number of batches that will be done at the pause, and a call during the pause saves.
    fn save_if_due(
        &mut self,
        (batches, version): (u64, u64),
        pause: &mut Option<u64>,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        if pause.is_none() && !self.trainer.can_save_now(version, observer) {
            return Ok(false);
        }
        if self.context.is_synchronous {
            let pause_batches = *pause.get_or_insert_with(|| self.coordinator.pause_after_this_batch());
            if batches < pause_batches {
                return Ok(false);
            }
            self.wait_until_no_push(false)?;
            *pause = None;
        }
        self.take_snapshot()?;
        self.trainer.save_if_due(&mut Group::solo(), observer)?;
        Ok(true)
    }

    /// Describes the step that follows the first `steps_before` steps of the run.
    fn describe_step(&self, steps_before: u64, step: FinishedStep) -> CompletedStep {
        let setup = self.context.setup;
        CompletedStep {
            steps_total: steps_before + 1,
            loss: step.loss,
            learning_rate: setup.learning_rates.rate_at_step(self.trainer.learning_rate(), steps_before),
            samples: setup.settings.batch_size.min(setup.dataset.train.len()) as u64,
            completed_at: step.time,
        }
    }

    /// Waits until no push is in progress. A push updates one server after the other, so during a push the servers hold
    /// parameters of different steps. An asynchronous run waits only at its end, and at most for [`LAST_PUSH_TIMEOUT`].
    fn wait_until_no_push(&self, is_finished: bool) -> Result<(), TrainError> {
        if !self.context.is_synchronous {
            if is_finished {
                self.coordinator.wait_until_no_push(LAST_PUSH_TIMEOUT);
            }
            return Ok(());
        }
        let deadline = Instant::now() + self.context.timeout;
        while let Some(worker) = self.coordinator.wait_until_no_push(CHECK_INTERVAL) {
            if self.context.stop.load(Ordering::Relaxed) {
                self.coordinator.stop_run();
            }
            if Instant::now() > deadline {
                let problem = "it did not answer before the deadline (--timeout)".into();
                return Err(ParameterServerError::WorkerLost { worker, problem }.into());
            }
        }
        match self.coordinator.failure() {
            Some(failure) => Err(self.describe_failure(failure)),
            None => Ok(()),
        }
    }

    /// Warns the user of lost workers that no earlier warning has named.
    fn announce_lost_workers(&mut self, observer: &mut dyn Observer) {
        if self.context.is_synchronous {
            // A lost worker ends a synchronous run with an error that names the worker.
            return;
        }
        for (rank, problem) in self.coordinator.lost_workers() {
            if self.announced.insert(rank) {
                observer.warning(&format!(
                    "rank {rank}, a worker, is lost: {problem}; the other workers continue"
                ));
            }
        }
    }

    fn describe_failure(&self, failure: RunFailure) -> TrainError {
        match failure {
            RunFailure::ServerLost { server, problem } => {
                ParameterServerError::ServerLost { server, problem }.into()
            }
            RunFailure::WorkerLost { worker, problem } => {
                ParameterServerError::WorkerLost { worker, problem }.into()
            }
            RunFailure::AllWorkersLost { worker, problem } => {
                ParameterServerError::AllWorkersLost { worker, problem }.into()
            }
            RunFailure::Diverged { worker, loss, batch } => TrainError::Diverged(format!(
                "the loss is {} in batch {} (epoch {}, batch {} of this epoch) on rank {worker}; {}",
                if loss.is_nan() { "NaN" } else { "infinite" },
                batch + 1,
                batch / self.batches_per_epoch + 1,
                batch % self.batches_per_epoch + 1,
                self.trainer.advise_after_divergence(),
            )),
        }
    }

    /// Copies the parameters, the state of the optimizer and the position of the run from all servers to the trainer.
    fn take_snapshot(&mut self) -> Result<(), TrainError> {
        let (coordinator, trainer) = (self.coordinator, &mut self.trainer);
        self.server.with_shard(|shard| {
            let (parameters, optimizer) = trainer.parameters_and_optimizer();
            parameters[shard.range.clone()].copy_from_slice(&shard.parameters);
            for (vector, part) in optimizer.state.iter_mut().zip(&shard.optimizer.state) {
                vector[shard.range.clone()].copy_from_slice(part);
            }
            optimizer.steps = shard.version();
            (trainer.state.position, trainer.state.done_ahead) =
                coordinator.position_and_done_batches(shard.version());
            self.snapshot_counts = (coordinator.updates_by_worker(), shard.staleness.clone());
        });
        let (parameters, optimizer) = self.trainer.parameters_and_optimizer();
        self.other_servers.pull(parameters)?;
        self.other_servers.pull_optimizer_state(&mut optimizer.state)?;
        Ok(())
    }

    /// Evaluates the final model, and writes the report and the model file.
    fn conclude_run(
        &mut self,
        clients: &[PeerLink],
        observer: &mut dyn Observer,
    ) -> Result<Summary, TrainError> {
        let context = self.context;
        let zero = Statistics::default();
        let (updates, staleness) = std::mem::take(&mut self.snapshot_counts);
        let servers: Vec<u32> = context.layout.servers().map(Rank::get).collect();
        let workers: Vec<u32> = context.layout.workers().map(Rank::get).collect();
        let accepted: u64 = staleness.accepted.iter().sum();
        let server_report = ServerReport {
            updates: workers.iter().copied().zip(updates).collect(),
            lost_workers: self.coordinator.lost_workers().iter().map(|(rank, _)| rank.get()).collect(),
            servers,
            dropped: staleness.dropped,
            staleness_mean: staleness.sum as f64 / accepted.max(1) as f64,
            staleness_max: staleness.max,
            staleness: staleness.accepted,
        };
        if !context.is_synchronous {
            observer.notice(&server_report.describe_staleness());
        }
        let bytes_sent = clients.iter().map(PeerLink::bytes_sent).sum();
        let mut solo = Group::solo();
        let run = (context.config, context.setup, &mut self.trainer);
        conclude_run(&mut solo, run, (context.started, zero), observer, |report| {
            report.world_size = context.size.get();
            report.bytes_sent = bytes_sent;
            report.parameter_server = Some(server_report);
            if let Some(compressed) = &mut report.compressed {
                let is_exact = context.compression == Compression::None;
                compressed.reach =
                    if is_exact { CompressionReach::SharedMemory } else { CompressionReach::Full };
            }
        })
    }
}
