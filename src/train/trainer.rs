//! The step loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ndarray::s;

use super::agree::all_succeeded;
use super::batches::{Batches, part};
use super::buckets::Buckets;
use super::checkpoint::{self, Identity, State};
use super::config::Config;
use super::data::{Samples, Targets};
use super::model::Workspace;
use super::optimizer::Optimizer;
use super::plan::{Plan, spread};
use super::progress::Observer;
use super::report::EpochRecord;
use super::{Phase, TrainError};
use crate::group::Group;
use crate::types::{Rank, ReduceOp, WorldSize};

/// The fewest samples that are evaluated at once, however small the batch is.
const EVALUATION_ROWS_MIN: usize = 256;

/// One rank's training loop.
pub(crate) struct Trainer<'a> {
    config: &'a Config,
    plan: &'a Plan,
    identity: Identity,
    stop: &'a AtomicBool,
    optimizer: Optimizer,
    /// Parameters, position and history; the optimiser's vectors move here only to be saved.
    pub(crate) state: State,
    gradients: Vec<f32>,
    /// How gradients travel while others are still computed; `None` to reduce them after the backward pass.
    buckets: Option<Buckets>,
    workspace: Workspace,
    /// Whether a rank was asked to stop. All ranks learn it in the same step or in the same block of an evaluation.
    pub(crate) stopped: bool,
    /// Seconds and samples of this process's steps.
    pub(crate) step_seconds: f64,
    pub(crate) step_samples: u64,
}

/// Figures over a set of samples.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Metrics {
    /// Mean loss.
    pub(crate) loss: f64,
    /// Right answers, 0 to 1; `None` for regression.
    pub(crate) accuracy: Option<f64>,
    /// `None` for classification and where all targets are the same.
    pub(crate) r2: Option<f64>,
}

impl<'a> Trainer<'a> {
    /// A trainer that starts, or goes on, from `state`, which is the same on all ranks.
    pub(crate) fn new(
        config: &'a Config,
        plan: &'a Plan,
        mut state: State,
        group: &Group,
        stop: &'a AtomicBool,
    ) -> Self {
        let count = plan.network.parameter_count();
        let mut optimizer =
            Optimizer::new(config.rule, config.learning_rate(&plan.model), config.weight_decay, count);
        optimizer.steps = state.position.steps_total;
        if !state.optimizer.is_empty() {
            optimizer.state = std::mem::take(&mut state.optimizer);
        }
        // A single bucket would only leave when everything is ready, and be handed to another thread for nothing.
        let bytes = config.bucket_bytes.filter(|&bytes| group.size() != WorldSize::ONE && bytes < 4 * count);
        let batch = config.batch_size.min(plan.dataset.train.len()).div_ceil(group.size().as_usize());
        Self {
            config,
            plan,
            identity: plan.identity(config),
            stop,
            optimizer,
            state,
            gradients: vec![0.0; count],
            buckets: bytes.map(|bytes| Buckets::new(bytes, config.compression)),
            workspace: plan.network.workspace(batch.max(EVALUATION_ROWS_MIN)),
            stopped: false,
            step_seconds: 0.0,
            step_samples: 0,
        }
    }

    /// Bytes of a bucket, if gradients travel in buckets.
    pub(crate) fn bucket_bytes(&self) -> Option<usize> {
        self.buckets.as_ref().map(|buckets| buckets.elements() * size_of::<f32>())
    }

    /// Trains until the last epoch is done or a rank is asked to stop.
    pub(crate) fn train(&mut self, group: &mut Group, observer: &mut dyn Observer) -> Result<(), TrainError> {
        while self.state.position.epoch < self.config.epochs && !self.stopped {
            self.epoch(group, observer)?;
        }
        Ok(())
    }

    /// Mean loss of the current epoch's samples so far; between two epochs, of the last one.
    pub(crate) fn running_loss(&self) -> f64 {
        let position = self.state.position;
        match self.state.history.last() {
            Some(record) if position.samples == 0 => record.train_loss,
            _ => position.loss_sum / position.samples.max(1) as f64,
        }
    }

    /// Trains through an epoch, or through the rest of one, tests and saves. After a stop signal it saves without testing: the
    /// launcher kills ranks that take too long to end.
    fn epoch(&mut self, group: &mut Group, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let (config, plan) = (self.config, self.plan);
        let start = self.state.position;
        let batches = Batches::new(config.seed, start.epoch, plan.dataset.train.len(), config.batch_size);
        observer.epoch_started(start.epoch + 1, config.epochs, start.step, batches.count() as u64);
        let clock = Instant::now();
        let mut samples = 0;
        for index in start.step as usize..batches.count() {
            let batch = batches.batch(index);
            let loss = self.step(group, batch)?;
            samples += batch.len() as u64;
            observer.step_taken(loss / batch.len() as f64, samples as f64 / clock.elapsed().as_secs_f64());
            if self.stopped {
                break;
            }
        }
        let seconds = clock.elapsed().as_secs_f64();
        self.step_seconds += seconds;
        self.step_samples += samples;
        let train_loss = self.running_loss();
        let position = &mut self.state.position;
        if position.step < batches.count() as u64 {
            observer.epoch_ended(config.epochs, None);
            return self.save(group);
        }
        (position.epoch, position.step, position.loss_sum, position.samples) =
            (position.epoch + 1, 0, 0.0, 0);
        let test = self.evaluate(group, &plan.dataset.test)?;
        let regression = matches!(plan.dataset.test.targets, Targets::Numbers(_));
        let record = EpochRecord {
            epoch: start.epoch + 1,
            train_loss,
            test_loss: test.map(|metrics| metrics.loss),
            test_accuracy: test.and_then(|metrics| metrics.accuracy),
            test_r2: test.and_then(|metrics| metrics.r2),
            test_rmse: test.filter(|_| regression).map(|metrics| metrics.loss.sqrt()),
            samples_per_second: samples as f64 / seconds.max(f64::MIN_POSITIVE),
            seconds,
        };
        observer.epoch_ended(config.epochs, Some(&record));
        self.state.history.push(record);
        self.save(group)
    }

    /// One step on a global batch. Returns the sum of its losses.
    fn step(&mut self, group: &mut Group, batch: &[u32]) -> Result<f64, TrainError> {
        let plan = self.plan;
        let mine = batch[part(batch.len(), group.rank(), group.size())].iter().map(|&sample| sample as usize);
        let train = &plan.dataset.train;
        let input = self.workspace.input.slice_mut(s![..mine.len(), ..]);
        train.features.gather(mine.clone(), plan.standardizer.as_ref(), input);
        let slice = self.buckets.as_ref().map_or(usize::MAX, Buckets::elements);
        let mut sent = Ok(());
        let outcome = plan.network.differentiate(
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
        position.loss_sum += shared[0];
        position.samples += batch.len() as u64;
        self.stopped = shared[1] > 0.0;
        Ok(shared[0])
    }

    /// 1 if this rank was asked to stop: ranks add their flags up.
    fn stop_flag(&self) -> f64 {
        f64::from(u8::from(self.stop.load(Ordering::Relaxed)))
    }

    /// Stops the job on all ranks: this one's loss is no number.
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
        // Whichever rank was first, every rank ends with an error; this one has the better words for its own.
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
        // Rank 0's part is the longest. All ranks take as many blocks, if with fewer samples.
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
            samples.features.gather(rows.clone(), self.plan.standardizer.as_ref(), input);
            let network = &self.plan.network;
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
            // All ranks hold the same sum and return together; none is left waiting.
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

    /// Saves a checkpoint, if one is asked for; all ranks return the same result.
    fn save(&mut self, group: &mut Group) -> Result<(), TrainError> {
        // The parameters are the same on all ranks, so all come to the same answer.
        if !self.state.parameters.iter().all(|value| value.is_finite()) {
            let steps = self.state.position.steps_total;
            let message = format!("a parameter is not finite after step {steps} on all ranks; lower --lr");
            return Err(TrainError::Diverged(message));
        }
        let Some(place) = &self.config.checkpoint else { return Ok(()) };
        let mut saved = Ok(());
        if group.rank() == Rank::ZERO {
            self.state.optimizer = std::mem::take(&mut self.optimizer.state);
            saved = checkpoint::save(&place.directory, &self.plan.network, &self.identity, &self.state);
            self.optimizer.state = std::mem::take(&mut self.state.optimizer);
        }
        all_succeeded(group, Phase::Storage, saved.map_err(TrainError::from))
    }
}
