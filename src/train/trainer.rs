//! The training loop of a rank: epochs, tests and records.

mod evaluation;
mod saving;
mod steps;
mod worker_steps;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(crate) use self::evaluation::Metrics;
use super::TrainError;
use super::batch_exchange::ReceivedWindow;
use super::bucket_options::BucketBytes;
use super::bucket_trial::{BucketReport, BucketTrial};
use super::checkpoint::{CheckpointWriter, Position, TrainingState};
use super::config::Config;
use super::convergence;
use super::data::Task;
use super::early_stopping::BestParameters;
use super::gradient_work::micro_batch_rows;
use super::model::Workspace;
use super::optimizer::Optimizer;
use super::partition::ModelPartition;
use super::progress::Observer;
use super::rank_checks::ReplicaHash;
use super::report::EpochRecord;
use super::setup::Setup;
use super::slowest_rank::SlowestRankSearch;
use super::step_times::{StepTimer, StepTimes};
use super::strategies::{self, ParameterAgreement, Replica, Strategy};
use crate::group::Group;
use crate::types::{Rank, WorldSize};

/// The training loop of one rank.
pub(crate) struct Trainer<'a> {
    config: &'a Config,
    setup: &'a Setup,
    /// Writes checkpoints. `Some` only on rank 0 of a run that saves checkpoints.
    writer: Option<CheckpointWriter>,
    /// True after this rank has received a stop signal.
    stop: &'a AtomicBool,
    optimizer: Optimizer,
    /// The parameters, the position in the run and the history. Except while a checkpoint is saved, `state.optimizer`
    /// and `state.strategy` are empty: the fields `optimizer` and `strategy` hold these vectors.
    pub(crate) state: TrainingState,
    gradients: Vec<f32>,
    strategy: Box<dyn Strategy>,
    /// Chooses the sizes of buckets. `Some` only with `--bucket-bytes auto`.
    bucket_trial: Option<BucketTrial>,
    /// The parameters that this rank holds. `gradients` and the vectors of `state` have one value for each of these
    /// parameters. The vectors of `optimizer` have one value for each parameter of `partition.optimizer_partition()`.
    partition: ModelPartition,
    /// Memory for the whole model. Has no rows if the strategy divides the model, because the strategy then has its
    /// own memory.
    workspace: Workspace,
    /// The samples that this rank received in the previous epoch. `Some` only if each epoch is a single batch, because
    /// the next epoch then needs the same samples.
    whole_batch: Option<ReceivedWindow>,
    /// The number of samples that an evaluation processes at once.
    evaluation_rows: usize,
    /// Whether any rank has received a stop signal. All ranks set this flag after the same step or after the same
    /// block of an evaluation.
    pub(crate) stopped: bool,
    /// Whether the run saves a checkpoint within the epoch: after the current step if the ranks hold parts of the state, or
    /// after the next average if their parameters differ until then. The same on all ranks, and not used in other runs.
    is_save_due: bool,
    /// The hash of the parameters at the end of an epoch, if the ranks have not compared it yet.
    unchecked_hash: Option<ReplicaHash>,
    /// The sum of the losses of this rank that are not yet in `state.position.loss_sum`. 0 if the strategy exchanges
    /// losses in every step.
    local_loss: f64,
    /// The mean loss of the last completed epoch.
    epoch_loss: f64,
    /// The duration in seconds of all steps that this process took.
    pub(crate) step_seconds: f64,
    /// The number of samples that all ranks together processed in the steps that this process took.
    pub(crate) step_samples: u64,
    /// Measures the times of the steps since the last epoch record.
    timer: StepTimer,
    /// The times for computation, communication and data, summed over all steps that this process took. With a parameter
    /// server, summed over the steps of all workers.
    pub(crate) step_times: StepTimes,
    /// Finds the slowest rank. `Some` only if the run exchanges the times of steps.
    slowest_rank: Option<SlowestRankSearch>,
}

impl<'a> Trainer<'a> {
    /// Creates a trainer that continues from `state`. All ranks pass the same state, but its vectors have values only
    /// for this rank's part of the model. All ranks must call this function.
    pub(crate) fn new(
        config: &'a Config,
        setup: &'a Setup,
        mut state: TrainingState,
        (group, partition): (&mut Group, ModelPartition),
        stop: &'a AtomicBool,
    ) -> Result<Self, TrainError> {
        let count = partition.own_parameter_count();
        let optimizer_partition = partition.optimizer_partition();
        let state_count = optimizer_partition.own_parameter_count();
        let rate = state.learning_rate.expect("the run has decided on a learning rate");
        let schedule = setup.compression_schedule;
        let (rule, decay) = schedule.rule_after_sum(setup.settings.rule, config.weight_decay);
        let mut optimizer = Optimizer::new(rule, rate, decay, state_count);
        optimizer.variance_steps = schedule.variance_steps();
        optimizer.steps = state.position.steps_total;
        optimizer.momentum_start = state.position.momentum_start;
        optimizer.clip_norm = config.recipe.clip_norm;
        optimizer.set_tensors(&setup.network.parameter_tensors(), |tensor| {
            Some(optimizer_partition.own_range_of_tensor(tensor))
        });
        if !state.optimizer.is_empty() {
            optimizer.state = std::mem::take(&mut state.optimizer);
        }
        if config.recipe.patience().is_none() {
            state.best = None;
        } else if state.best.is_none() {
            let Position { epoch, step, .. } = state.position;
            let record = state.history.last().filter(|record| (record.epoch, 0) == (epoch, step));
            state.best = Some(BestParameters::new(&state.parameters, record));
        }
        let mut strategy = strategies::create(config, setup, &partition, group)?;
        for (vector, saved) in strategy.state().into_iter().zip(std::mem::take(&mut state.strategy)) {
            *vector = saved;
        }
        if let Some(sums) = strategy.compressed_sums() {
            let is_first_replica = partition.place().replica == Rank::ZERO;
            sums.set_memory(&std::mem::take(&mut state.compression), is_first_replica);
        }
        let measures_buckets =
            config.bucket_bytes == Some(BucketBytes::Auto) && group.size() != WorldSize::ONE;
        let bucket_trial =
            if measures_buckets { BucketTrial::new(count, schedule.warmup_steps) } else { None };
        let writer = config.checkpoint.as_ref().filter(|_| group.rank() == Rank::ZERO).map(|settings| {
            let content = (setup.network.clone(), setup.identity(config));
            CheckpointWriter::new(settings, content, state.position.steps_total, Instant::now())
        });
        let exchanges_times = config.exchange_step_times && group.size() != WorldSize::ONE;
        let (training_rows, evaluation_rows) = rows_at_once(config, setup, group);
        let workspace_rows = if partition.is_undivided() { training_rows.max(evaluation_rows) } else { 0 };
        Ok(Self {
            config,
            setup,
            writer,
            stop,
            optimizer,
            epoch_loss: state.history.last().map_or(0.0, |record| record.train_loss),
            state,
            gradients: vec![0.0; count],
            strategy,
            bucket_trial,
            workspace: setup.network.allocate_workspace(workspace_rows),
            whole_batch: None,
            evaluation_rows,
            partition,
            stopped: false,
            is_save_due: false,
            unchecked_hash: None,
            local_loss: 0.0,
            step_seconds: 0.0,
            step_samples: 0,
            timer: StepTimer::start(group),
            step_times: StepTimes::default(),
            slowest_rank: exchanges_times.then(SlowestRankSearch::new),
        })
    }

    /// Returns the learning rate without the factors of the schedule and of the warm-up.
    pub(crate) fn learning_rate(&self) -> f32 {
        self.state.learning_rate.unwrap_or_default()
    }

    /// Returns what the user can change if the run diverges.
    pub(crate) fn advise_after_divergence(&self) -> String {
        let advice = self.config.recipe.advise_after_divergence(self.learning_rate());
        if self.config.standardize { advice } else { advice + ", or do not pass --no-standardize" }
    }

    /// Returns the size in bytes of the optimizer's state on this rank.
    pub(crate) fn optimizer_state_bytes(&self) -> usize {
        self.optimizer.state.iter().map(|vector| size_of_val(vector.as_slice())).sum()
    }

    /// Returns the size in bytes of a bucket. Returns `None` if gradients are not reduced in buckets.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.strategy.bucket_bytes()
    }

    /// Returns what `--bucket-bytes auto` has measured and chosen.
    pub(crate) fn bucket_report(&self) -> Option<BucketReport> {
        self.bucket_trial.as_ref().map(BucketTrial::report)
    }

    /// Trains until the last epoch is completed, the loss no longer falls, or a rank receives a stop signal. If the run
    /// keeps its best parameters and was not stopped, replaces the parameters by the best parameters at the end.
    pub(crate) fn train(&mut self, group: &mut Group, observer: &mut dyn Observer) -> Result<(), TrainError> {
        // If a stop signal ended the previous run during an evaluation, its checkpoint lacks the last validation loss.
        self.compute_missing_validation_loss(group)?;
        while self.state.position.epoch < self.setup.settings.epochs
            && !self.stopped
            && !self.has_converged()
            && !self.is_out_of_patience()
        {
            self.train_until_next_record(group, observer)?;
        }
        if let (Some(best), false) = (&mut self.state.best, self.stopped) {
            best.swap_parameters(&mut self.state.parameters);
            self.save(group, false, observer)?;
        }
        Ok(())
    }

    /// Returns whether the run ends because of `--patience`: the validation loss no longer falls.
    pub(crate) fn is_out_of_patience(&self) -> bool {
        let (Some(patience), Some(best)) = (self.config.recipe.patience(), &self.state.best) else {
            return false;
        };
        best.record.records_since >= patience
    }

    /// Computes the validation loss of the last record, if the run holds out samples and this loss is missing.
    pub(crate) fn compute_missing_validation_loss(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let setup = self.setup;
        let (Some(validation), Some(record)) = (&setup.validation, self.state.history.last()) else {
            return Ok(());
        };
        if record.validation_loss.is_some() {
            return Ok(());
        }
        let Some(metrics) = self.evaluate(group, validation, None)? else { return Ok(()) };
        let TrainingState { best, history, parameters, .. } = &mut self.state;
        if let Some(record) = history.last_mut() {
            record.validation_loss = Some(metrics.loss);
            if let Some(best) = best {
                best.keep_if_lowest_loss(metrics.loss, record.epoch, parameters);
            }
        }
        Ok(())
    }

    /// Returns whether the run ends because the training loss no longer falls.
    pub(crate) fn has_converged(&self) -> bool {
        self.setup.settings.stops_when_converged
            && convergence::has_converged(&self.state.history, self.setup.constant_prediction_loss())
    }

    /// Returns the mean loss of the samples that the run has already used in the current epoch. Between two epochs,
    /// returns the mean loss of the last epoch.
    pub(crate) fn running_loss(&self) -> f64 {
        let Position { loss_sum, samples, .. } = self.state.position;
        if samples > 0 { loss_sum / samples as f64 } else { self.epoch_loss }
    }

    /// Trains until the end of the next epoch that gets a record. Then tests the model and saves a checkpoint. After a stop
    /// signal, saves a checkpoint at once, because the launcher kills ranks that take too long to end.
    fn train_until_next_record(
        &mut self,
        group: &mut Group,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let setup = self.setup;
        let (settings, train) = (&setup.settings, &setup.dataset.train);
        let record_epoch = (self.state.position.epoch + 1).next_multiple_of(settings.epochs_between_records);
        let record_epoch = record_epoch.min(settings.epochs);
        let steps = (train.len().div_ceil(settings.batch_size)) as u64;
        let previous_record_epoch =
            (record_epoch - 1) / settings.epochs_between_records * settings.epochs_between_records;
        let Position { epoch, step, .. } = self.state.position;
        let steps_of_epochs = |epochs: u64| epochs.saturating_mul(steps);
        observer.epoch_started(
            record_epoch,
            settings.epochs,
            steps_of_epochs(epoch - previous_record_epoch).saturating_add(step),
            steps_of_epochs(record_epoch - previous_record_epoch),
        );
        self.timer = StepTimer::start(group);
        let mut samples = 0;
        while self.state.position.epoch < record_epoch && !self.stopped {
            let Position { epoch, step, .. } = self.state.position;
            samples += self.take_steps(group, (epoch, step), observer)?;
            let is_complete = self.state.position.step >= steps;
            if is_complete {
                let (strategy, mut replica) = self.strategy_and_replica();
                strategy.after_epoch(group, &mut replica, epoch + 1)?;
            }
            if self.stopped || epoch + 1 == record_epoch {
                self.agree_on_parameters(group)?;
            }
            if is_complete {
                self.begin_epoch(epoch + 1);
                observer.adjust_parameters(&mut self.state.parameters);
                if self.strategy.parameter_agreement() == ParameterAgreement::EveryStep {
                    self.unchecked_hash = self.replica_hash();
                }
                if epoch + 1 < record_epoch {
                    self.save_if_due(group, observer)?;
                }
            }
        }
        let times = self.timer.times_since_start(group);
        self.step_times.add(&times);
        self.step_seconds += times.seconds();
        self.step_samples += samples;
        // Compare the hashes before the parameters are tested and saved.
        if let Some(replica) = self.unchecked_hash.take().or_else(|| self.replica_hash()) {
            replica.check_replicas_equal(group)?;
        }
        let is_recorded = self.state.position.epoch == record_epoch;
        if is_recorded {
            let record = self.test_and_make_record(group, samples, (times.seconds(), times))?;
            self.state.history.push(record);
            self.compute_missing_validation_loss(group)?;
        }
        observer.epoch_ended(settings.epochs, self.state.history.last().filter(|_| is_recorded));
        self.save(group, is_recorded, observer)
    }

    /// Tests the model and returns the record of the epochs since the last record. In these epochs, the ranks
    /// processed `samples` samples in `seconds` seconds. `step_times` are the times of this rank's steps.
    fn test_and_make_record(
        &mut self,
        group: &mut Group,
        samples: u64,
        (seconds, step_times): (f64, StepTimes),
    ) -> Result<EpochRecord, TrainError> {
        let dataset = &self.setup.dataset;
        let test = self.evaluate(group, &dataset.test, None)?;
        Ok(EpochRecord {
            epoch: self.state.position.epoch,
            train_loss: self.epoch_loss,
            test_loss: test.map(|metrics| metrics.loss),
            test_accuracy: test.and_then(|metrics| metrics.accuracy),
            test_r2: test.and_then(|metrics| metrics.r2),
            test_perplexity: test.and_then(|metrics| metrics.perplexity),
            test_rmse: test.filter(|_| dataset.task() == Task::Regression).map(|metrics| metrics.loss.sqrt()),
            validation_loss: None,
            samples_per_second: samples as f64 / seconds.max(f64::MIN_POSITIVE),
            seconds,
            step_times: Some(step_times),
        })
    }

    /// Moves the position to the start of an epoch.
    fn begin_epoch(&mut self, epoch: u64) {
        self.epoch_loss = self.running_loss();
        self.local_loss = 0.0;
        let Position { steps_total, momentum_start, .. } = self.state.position;
        self.state.position = Position { epoch, steps_total, momentum_start, ..Position::default() };
    }

    /// Returns the strategy, and the model and optimizer that the strategy updates.
    fn strategy_and_replica(&mut self) -> (&mut dyn Strategy, Replica<'_>) {
        let replica = Replica {
            parameters: &mut self.state.parameters,
            gradients: &mut self.gradients,
            optimizer: &mut self.optimizer,
        };
        (self.strategy.as_mut(), replica)
    }

    /// Returns a hash of the parameters. Returns `None` if no other rank holds the same parameters.
    fn replica_hash(&self) -> Option<ReplicaHash> {
        let place = self.partition.place();
        let several = place.replicas != WorldSize::ONE;
        several.then(|| ReplicaHash::new(self.state.position.epoch, place, &self.state.parameters))
    }

    /// Returns 1 if this rank has received a stop signal, and 0 if not. The sum over all ranks is the number of ranks that
    /// have received a stop signal.
    fn stop_flag(&self) -> f64 {
        f64::from(u8::from(self.stop.load(Ordering::Relaxed)))
    }
}

/// Returns two numbers. The first number is the largest number of samples that this rank processes at once in a step.
/// The second number is the number of samples that an evaluation processes at once, and is the same on all ranks.
fn rows_at_once(config: &Config, setup: &Setup, group: &Group) -> (usize, usize) {
    let train = &setup.dataset.train;
    let (batch_size, evaluation_rows) = (setup.settings.batch_size, setup.network.evaluation_rows());
    if let Some(shards) = config.recipe.logical_shards() {
        let rank_and_size = (group.rank(), group.size());
        return (
            shards.pass_rows(rank_and_size, batch_size.min(train.len()), config.micro_batches),
            evaluation_rows,
        );
    }
    let part = match batch_size {
        size if size < train.len() => size.div_ceil(group.size().as_usize()),
        _ => train.longest_part(group.size()),
    };
    let rows = micro_batch_rows(part, config.micro_batches);
    (rows, rows.max(evaluation_rows))
}
