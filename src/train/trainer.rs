//! The step loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ndarray::s;

use super::agree::{self, all_succeeded};
use super::batches::{Batches, part};
use super::buckets::Buckets;
use super::checkpoint::{self, Position, RunIdentity, TrainingState};
use super::config::Config;
use super::convergence;
use super::data::{Samples, Targets, Task};
use super::model::Workspace;
use super::optimizer::Optimizer;
use super::progress::Observer;
use super::report::EpochRecord;
use super::setup::{Setup, spread};
use super::{Phase, TrainError};
use crate::group::Group;
use crate::types::{Rank, ReduceOp, WorldSize};

/// The fewest samples that are evaluated at once, also with small batches.
const EVALUATION_ROWS_MIN: usize = 256;

/// One rank's training loop.
pub(crate) struct Trainer<'a> {
    config: &'a Config,
    setup: &'a Setup,
    identity: RunIdentity,
    stop: &'a AtomicBool,
    optimizer: Optimizer,
    /// Parameters, position and history. The optimiser's vectors are moved here only to be saved.
    pub(crate) state: TrainingState,
    gradients: Vec<f32>,
    /// Reduces gradients while others are still computed; `None` to reduce all after the backward pass.
    buckets: Option<Buckets>,
    workspace: Workspace,
    /// Whether a rank was asked to stop. All ranks learn it in the same step or in the same block of an evaluation.
    pub(crate) stopped: bool,
    /// Mean loss of the last epoch that was completed.
    epoch_loss: f64,
    /// Seconds and samples of this process's steps.
    pub(crate) step_seconds: f64,
    pub(crate) step_samples: u64,
}

/// Figures over a set of samples.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Metrics {
    /// Mean loss.
    pub(crate) loss: f64,
    /// Share of correct predictions, 0 to 1; `None` for regression.
    pub(crate) accuracy: Option<f64>,
    /// Coefficient of determination; `None` for classification and if all targets are the same.
    pub(crate) r2: Option<f64>,
}

impl<'a> Trainer<'a> {
    /// A trainer that starts or goes on from `state`, which is the same on all ranks.
    pub(crate) fn new(
        config: &'a Config,
        setup: &'a Setup,
        mut state: TrainingState,
        group: &Group,
        stop: &'a AtomicBool,
    ) -> Self {
        let count = setup.network.parameter_count();
        let rate = state.learning_rate.expect("the run has decided on a learning rate");
        let mut optimizer = Optimizer::new(setup.settings.rule, rate, config.weight_decay, count);
        optimizer.steps = state.position.steps_total;
        optimizer.momentum_start = state.position.momentum_start;
        if !state.optimizer.is_empty() {
            optimizer.state = std::mem::take(&mut state.optimizer);
        }
        // A single bucket would be sent only when all gradients are ready: it would hide nothing.
        let bytes = config.bucket_bytes.filter(|&bytes| group.size() != WorldSize::ONE && bytes < 4 * count);
        let batch =
            setup.settings.batch_size.min(setup.dataset.train.len()).div_ceil(group.size().as_usize());
        Self {
            config,
            setup,
            identity: setup.identity(config),
            stop,
            optimizer,
            epoch_loss: state.history.last().map_or(0.0, |record| record.train_loss),
            state,
            gradients: vec![0.0; count],
            buckets: bytes.map(|bytes| Buckets::new(bytes, config.compression)),
            workspace: setup.network.workspace(batch.max(EVALUATION_ROWS_MIN)),
            stopped: false,
            step_seconds: 0.0,
            step_samples: 0,
        }
    }

    /// The learning rate.
    pub(crate) fn learning_rate(&self) -> f32 {
        self.optimizer.learning_rate
    }

    /// Bytes of a bucket, if gradients are reduced in buckets.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.buckets.as_ref().map(|buckets| buckets.elements() * size_of::<f32>())
    }

    /// Trains until the last epoch is done, the loss no longer falls, or a rank is asked to stop.
    pub(crate) fn train(&mut self, group: &mut Group, observer: &mut dyn Observer) -> Result<(), TrainError> {
        while self.state.position.epoch < self.setup.settings.epochs && !self.stopped && !self.converged() {
            self.train_to_record(group, observer)?;
        }
        Ok(())
    }

    /// Whether the run ends because the loss no longer falls.
    pub(crate) fn converged(&self) -> bool {
        self.setup.settings.stops_when_converged
            && convergence::has_converged(&self.state.history, self.setup.constant_loss())
    }

    /// Mean loss of the current epoch's samples so far; between two epochs, of the last one.
    pub(crate) fn running_loss(&self) -> f64 {
        let Position { loss_sum, samples, .. } = self.state.position;
        if samples > 0 { loss_sum / samples as f64 } else { self.epoch_loss }
    }

    /// Trains to the end of the epoch that is recorded next, tests and saves. After a stop signal it saves without testing: the
    /// launcher kills ranks that take too long to end.
    fn train_to_record(&mut self, group: &mut Group, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let setup = self.setup;
        let (settings, train) = (&setup.settings, &setup.dataset.train);
        let last = (self.state.position.epoch + 1).next_multiple_of(settings.epochs_per_record);
        let last = last.min(settings.epochs);
        let steps = (train.len().div_ceil(settings.batch_size)) as u64;
        let first = (last - 1) / settings.epochs_per_record * settings.epochs_per_record;
        let Position { epoch, step, .. } = self.state.position;
        observer.epoch_started(last, settings.epochs, (epoch - first) * steps + step, (last - first) * steps);
        let clock = Instant::now();
        let mut samples = 0;
        while self.state.position.epoch < last && !self.stopped {
            let Position { epoch, step, .. } = self.state.position;
            let batches = Batches::new(self.config.seed, epoch, train.len(), settings.batch_size);
            for index in step as usize..batches.count() {
                let batch = batches.batch(index);
                let loss = self.step(group, batch)?;
                samples += batch.len() as u64;
                let rate = samples as f64 / clock.elapsed().as_secs_f64();
                observer.step_taken(loss / batch.len() as f64, rate);
                if self.stopped {
                    break;
                }
            }
            if self.state.position.step == steps {
                self.epoch_loss = self.running_loss();
                let Position { steps_total, momentum_start, .. } = self.state.position;
                self.state.position =
                    Position { epoch: epoch + 1, steps_total, momentum_start, ..Position::default() };
            }
        }
        let seconds = clock.elapsed().as_secs_f64();
        self.step_seconds += seconds;
        self.step_samples += samples;
        observer.adjust_parameters(&mut self.state.parameters);
        agree::check_replicas(group, self.state.position.epoch, &self.state.parameters)?;
        let mut record = None;
        if self.state.position.epoch == last {
            let test = self.evaluate(group, &setup.dataset.test)?;
            let rate = samples as f64 / seconds.max(f64::MIN_POSITIVE);
            record = Some(EpochRecord {
                epoch: last,
                train_loss: self.epoch_loss,
                test_loss: test.map(|metrics| metrics.loss),
                test_accuracy: test.and_then(|metrics| metrics.accuracy),
                test_r2: test.and_then(|metrics| metrics.r2),
                test_rmse: test
                    .filter(|_| setup.dataset.task() == Task::Regression)
                    .map(|metrics| metrics.loss.sqrt()),
                samples_per_second: rate,
                seconds,
            });
        }
        observer.epoch_ended(settings.epochs, record.as_ref());
        self.state.history.extend(record);
        self.save(group)
    }

    /// One step on a global batch. Returns the sum of its losses.
    fn step(&mut self, group: &mut Group, batch: &[u32]) -> Result<f64, TrainError> {
        let setup = self.setup;
        let mine = batch[part(batch.len(), group.rank(), group.size())].iter().map(|&sample| sample as usize);
        let train = &setup.dataset.train;
        let input = self.workspace.input.slice_mut(s![..mine.len(), ..]);
        train.features.gather(mine.clone(), setup.standardizer.as_ref(), input);
        let slice = self.buckets.as_ref().map_or(usize::MAX, Buckets::elements);
        let mut sent = Ok(());
        let outcome = setup.network.differentiate(
            &self.state.parameters,
            &mut self.gradients,
            &mut self.workspace,
            (&train.targets, mine),
            1.0 / batch.len() as f32,
            (slice, |range, gradients: &mut [f32]| {
                if let (Some(buckets), Ok(())) = (&mut self.buckets, &sent) {
                    sent = buckets.add(group, range, gradients);
                }
            }),
        );
        if !outcome.loss.is_finite() {
            return Err(self.diverged(group, outcome.loss));
        }
        sent?;
        let mut shared = [outcome.loss, self.stop_flag()];
        if let Some(buckets) = &mut self.buckets {
            buckets.flush(group, &self.gradients)?;
            let figures = group.all_reduce_async(shared.to_vec(), ReduceOp::Sum)?;
            let (optimizer, parameters) = (&mut self.optimizer, &mut self.state.parameters);
            optimizer.begin();
            buckets.drain(&mut self.gradients, |range, gradients| {
                optimizer.update(range, parameters, gradients);
            })?;
            optimizer.finish(parameters);
            shared.copy_from_slice(&figures.wait()?);
        } else {
            let compression = self.config.compression;
            group.all_reduce_compressed(&mut self.gradients, ReduceOp::Sum, compression)?;
            group.all_reduce(&mut shared, ReduceOp::Sum)?;
            self.optimizer.step(&mut self.state.parameters, &mut self.gradients);
        }
        let position = &mut self.state.position;
        position.step += 1;
        position.steps_total += 1;
        position.momentum_start = self.optimizer.momentum_start;
        position.loss_sum += shared[0];
        position.samples += batch.len() as u64;
        self.stopped = shared[1] > 0.0;
        Ok(shared[0])
    }

    /// 1 if this rank was asked to stop. The ranks sum their flags.
    fn stop_flag(&self) -> f64 {
        f64::from(u8::from(self.stop.load(Ordering::Relaxed)))
    }

    /// Stops the job on all ranks, because the loss on this one is not finite.
    fn diverged(&self, group: &mut Group, loss: f64) -> TrainError {
        let position = self.state.position;
        let what = if loss.is_nan() { "NaN" } else { "infinite" };
        let message = format!(
            "the loss is {what} at step {} (epoch {}, step {} of it) on rank {}; lower --lr (it is {}){}",
            position.steps_total + 1,
            position.epoch + 1,
            position.step + 1,
            group.rank(),
            self.optimizer.learning_rate,
            if self.config.standardize { "" } else { ", or leave --no-standardize out" },
        );
        // Every rank ends with an error. If another rank aborted first, this one still reports its own message.
        let _ = group.abort(&message);
        TrainError::Diverged(message)
    }

    /// Figures over `samples`, computed by all ranks together. `None` if there are no samples or a rank was asked to stop,
    /// which ends the evaluation after the current block.
    pub(crate) fn evaluate(
        &mut self,
        group: &mut Group,
        samples: &Samples,
    ) -> Result<Option<Metrics>, TrainError> {
        let mine = part(samples.len(), group.rank(), group.size());
        // All ranks evaluate as many blocks as rank 0, whose part is the longest; their last blocks may be empty.
        let longest = part(samples.len(), Rank::ZERO, group.size()).len();
        let block = self.workspace.input.nrows();
        let mut sums = [0.0; 3];
        for index in 0..longest.div_ceil(block) {
            if self.stopped {
                return Ok(None);
            }
            let start = mine.end.min(mine.start + index * block);
            let rows = start..mine.end.min(start + block);
            let input = self.workspace.input.slice_mut(s![..rows.len(), ..]);
            samples.features.gather(rows.clone(), self.setup.standardizer.as_ref(), input);
            let network = &self.setup.network;
            let outcome =
                network.evaluate(&self.state.parameters, &mut self.workspace, &samples.targets, rows);
            let mut shared = [outcome.loss, outcome.correct as f64, self.stop_flag()];
            group.all_reduce(&mut shared, ReduceOp::Sum)?;
            sums.iter_mut().zip(shared).for_each(|(sum, value)| *sum += value);
            self.stopped = sums[2] > 0.0;
        }
        if self.stopped || samples.is_empty() {
            return Ok(None);
        }
        let [loss, correct, _] = sums;
        if !loss.is_finite() {
            // All ranks hold the same sum, so they return together.
            let steps = self.state.position.steps_total;
            let rate = self.optimizer.learning_rate;
            let message =
                format!("the loss is {loss} after step {steps} on all ranks; lower --lr (it is {rate})");
            return Err(TrainError::Diverged(message));
        }
        let count = samples.len() as f64;
        let spread = spread(samples);
        Ok(Some(Metrics {
            loss: loss / count,
            accuracy: matches!(samples.targets, Targets::Classes(_)).then_some(correct / count),
            r2: (spread > 0.0).then(|| 1.0 - loss / spread),
        }))
    }

    /// Saves a checkpoint if the configuration asks for one. All ranks return the same result.
    fn save(&mut self, group: &mut Group) -> Result<(), TrainError> {
        // The parameters are the same on all ranks, so all ranks return the same result.
        if !self.state.parameters.iter().all(|value| value.is_finite()) {
            let steps = self.state.position.steps_total;
            let message = format!("a parameter is not finite after step {steps} on all ranks; lower --lr");
            return Err(TrainError::Diverged(message));
        }
        let Some(target) = &self.config.checkpoint else { return Ok(()) };
        let mut saved = Ok(());
        if group.rank() == Rank::ZERO {
            self.state.optimizer = std::mem::take(&mut self.optimizer.state);
            saved = checkpoint::save(&target.directory, &self.setup.network, &self.identity, &self.state);
            self.optimizer.state = std::mem::take(&mut self.state.optimizer);
        }
        all_succeeded(group, Phase::Storage, saved.map_err(TrainError::from))
    }
}
