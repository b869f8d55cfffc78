//! The steps of an epoch.

use std::time::{Duration, Instant};

use super::Trainer;
use crate::group::Group;
use crate::observe::step::set_step;
use crate::observe::training_thread::{SpanKind, span};
use crate::train::TrainError;
use crate::train::batch_exchange::{BatchExchange, LocalBatch};
use crate::train::batches::Batches;
use crate::train::bucket_trial::TrialAction;
use crate::train::checkpoint::Position;
use crate::train::gradient_work::GradientWork;
use crate::train::measurements::RankMeasurements;
use crate::train::model::StepSeed;
use crate::train::progress::{CompletedStep, Observer};
use crate::train::rank_checks::{ReplicaHash, abort_if_failed};
use crate::train::slowest_rank::SlowestRankSearch;
use crate::train::strategies::{ParameterAgreement, RankRequests, StepTotals};
use crate::types::ReduceOp;

impl Trainer<'_> {
    /// Takes the steps of an epoch from step `first_step` on, until the epoch ends or the run is stopped. Saves
    /// checkpoints that become due. Returns the number of samples that all ranks together processed.
    pub(super) fn take_steps(
        &mut self,
        group: &mut Group,
        (epoch, first_step): (u64, u64),
        observer: &mut dyn Observer,
    ) -> Result<u64, TrainError> {
        let shuffle_start = Instant::now();
        let batch_size = self.setup.settings.batch_size;
        let train = &self.setup.dataset.train;
        let order = (batch_size, self.setup.shuffle_blocks);
        let batches = Batches::new(self.config.seed, epoch, train.len(), order);
        self.timer.add_data_time(shuffle_start);
        let place = self.partition.place();
        let shards = self.config.recipe.logical_shards();
        let mut exchange = BatchExchange::new(train, batches, (place, shards), self.whole_batch.take());
        let mut samples = 0;
        for index in first_step as usize..exchange.batches.count() {
            let exchange_start = (Instant::now(), group.statistics().exposed);
            let data_span = span(SpanKind::Data);
            let local_batch = exchange.local_batch(group, index)?;
            drop(data_span);
            self.timer.add_exchange_time(exchange_start, group);
            observer.batch_started(epoch, index as u64, local_batch.row_numbers);
            let requests_save = self.requests_save(observer);
            let batch_len = local_batch.batch_len;
            let step_start = Instant::now();
            let loss = self.step(group, &local_batch, requests_save)?;
            self.advance_bucket_trial(group, step_start.elapsed(), observer)?;
            samples += batch_len as u64;
            self.timer.count_step();
            observer.step_taken(&CompletedStep {
                steps_total: self.state.position.steps_total,
                loss,
                learning_rate: self.optimizer.learning_rate,
                samples: batch_len as u64,
                completed_at: Instant::now(),
            });
            self.report_measurements(group, observer)?;
            if self.stopped {
                break;
            }
            // Do not save after the last step of an epoch: the caller first begins the next epoch, and saves if a save is due.
            if index + 1 < exchange.batches.count() {
                self.save_if_due(group, observer)?;
            }
        }
        self.whole_batch = exchange.into_whole_batch();
        Ok(samples)
    }

    /// Passes the measurements of the run so far to the observer. Also searches for the slowest rank, if the run does so.
    fn report_measurements(
        &mut self,
        group: &mut Group,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        if let Some(search) = &mut self.slowest_rank {
            search.continue_after_step(group, |group| {
                self.timer.times_since_start(group).plus(&self.step_times)
            })?;
        }
        let slowest = self.slowest_rank.as_ref().and_then(SlowestRankSearch::slowest);
        let timer = (&self.timer, &self.step_times);
        observer.measured(&RankMeasurements { group, timer, slowest });
        Ok(())
    }

    /// Handles the time of a step on this rank, and divides the gradients into other buckets if [`BucketTrial`] says so.
    fn advance_bucket_trial(
        &mut self,
        group: &mut Group,
        time: Duration,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let Some(trial) = &mut self.bucket_trial else { return Ok(()) };
        let sizes = match trial.handle_step(self.state.position.steps_total, time) {
            TrialAction::Continue => return Ok(()),
            TrialAction::Divide(sizes) => sizes,
            TrialAction::Compare(mut seconds) => {
                group.all_reduce(&mut seconds, ReduceOp::Max)?;
                let sizes = trial.handle_times(&seconds);
                observer.notice(&trial.report().to_string());
                sizes
            }
        };
        if let Some(sums) = self.strategy.compressed_sums() {
            sums.divide(sizes);
        }
        Ok(())
    }

    /// Takes one step, in which this rank processes `local_batch`. Returns the mean loss over the samples of all ranks.
    /// If the ranks do not exchange losses in every step, returns the mean loss over the samples of this rank.
    /// `requests_save` is the result of [`requests_save`](Self::requests_save).
    fn step(
        &mut self,
        group: &mut Group,
        local_batch: &LocalBatch<'_>,
        requests_save: bool,
    ) -> Result<f64, TrainError> {
        let setup = self.setup;
        let batch_len = local_batch.batch_len;
        let step = self.state.position.steps_total;
        set_step(step);
        if let Some(sums) = self.strategy.compressed_sums() {
            sums.begin_step(step);
        }
        // With compressed momentum, each rank clips its own gradient.
        let clips_sum = setup.compression_schedule.momentum_at(step).is_none();
        self.optimizer.clip_norm = self.config.recipe.clip_norm.filter(|_| clips_sum);
        let work = GradientWork {
            network: &setup.network,
            parameters: &self.state.parameters,
            first_moment: self.optimizer.state.first().map_or(&[], Vec::as_slice),
            gradients: &mut self.gradients,
            workspace: &mut self.workspace,
            samples: local_batch.samples,
            standardizer: setup.standardizer.as_ref(),
            indices: local_batch.indices,
            batch_len,
            micro_batches: self.config.micro_batches,
            step: StepSeed { seed: self.config.seed, step },
            data_time: &mut self.timer.data_time,
        };
        let gradient_span = span(SpanKind::ForwardBackward);
        let outcome = self.strategy.compute_local_gradient(group, work);
        drop(gradient_span);
        let outcome = abort_if_failed(group, outcome)?;
        if !outcome.loss.is_finite() {
            return Err(self.abort_diverged_run(group, outcome.loss));
        }
        let own_totals = StepTotals {
            loss: outcome.loss,
            stop_flags: self.stop_flag(),
            save_flags: f64::from(u8::from(requests_save)),
            differences: self
                .unchecked_hash
                .as_ref()
                .map_or([0.0; 2], ReplicaHash::terms_that_cancel_if_equal),
        };
        self.optimizer.learning_rate = setup.learning_rates.rate_at_step(self.learning_rate(), step);
        let (strategy, mut replica) = self.strategy_and_replica();
        let update_span = span(SpanKind::SumAndUpdate);
        let totals = strategy.take_step(group, &mut replica, own_totals)?;
        drop(update_span);
        let position = &mut self.state.position;
        position.step += 1;
        position.steps_total += 1;
        position.momentum_start = self.optimizer.momentum_start;
        position.samples += batch_len as u64;
        let Some(totals) = totals else {
            self.local_loss += own_totals.loss;
            self.average_or_exchange_requests(group, requests_save)?;
            return Ok(own_totals.loss / local_batch.indices.len().max(1) as f64);
        };
        if let Some(replica) = self.unchecked_hash.take().filter(|_| totals.differences != [0.0; 2]) {
            replica.check_replicas_equal(group)?;
        }
        self.stopped = totals.stop_flags > 0.0;
        self.is_save_due = totals.save_flags > 0.0;
        self.state.position.loss_sum += totals.loss;
        Ok(totals.loss / batch_len as f64)
    }

    /// Ends a step after which the ranks exchange no totals. If a save within the epoch is due and the ranks average their
    /// parameters after this step, the ranks agree on their whole state. If not, the strategy may average as usual.
    fn average_or_exchange_requests(
        &mut self,
        group: &mut Group,
        requests_save: bool,
    ) -> Result<(), TrainError> {
        let Position { step, steps_total, .. } = self.state.position;
        let save_steps = self.config.checkpoint.as_ref().and_then(|checkpoint| checkpoint.steps);
        self.is_save_due |= save_steps.is_some_and(|every| steps_total.is_multiple_of(every.get()));
        if self.is_save_due && self.strategy.averages_after_step(step) {
            return self.agree_on_parameters(group);
        }
        let own = RankRequests { stop: self.stop_flag() > 0.0, save: requests_save };
        let (strategy, mut replica) = self.strategy_and_replica();
        let requests = strategy.after_step(group, &mut replica, (step, own))?;
        self.stopped = requests.stop;
        self.is_save_due |= requests.save;
        Ok(())
    }

    /// Makes the parameters the same on all ranks, and sums the losses over all ranks. Does nothing if the strategy
    /// does both in every step.
    pub(super) fn agree_on_parameters(&mut self, group: &mut Group) -> Result<(), TrainError> {
        if self.strategy.parameter_agreement() == ParameterAgreement::EveryStep {
            return Ok(());
        }
        let (strategy, mut replica) = self.strategy_and_replica();
        strategy.agree_on_parameters(group, &mut replica)?;
        let mut sums = [std::mem::take(&mut self.local_loss), self.stop_flag()];
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        self.state.position.loss_sum += sums[0];
        self.stopped |= sums[1] > 0.0;
        Ok(())
    }

    /// Aborts the job on all ranks, because the loss on this rank is not finite. Returns the error.
    fn abort_diverged_run(&self, group: &mut Group, loss: f64) -> TrainError {
        let position = self.state.position;
        let value = if loss.is_nan() { "NaN" } else { "infinite" };
        let message = format!(
            "the loss is {value} at step {} (epoch {}, step {} of this epoch) on rank {}; {}",
            position.steps_total + 1,
            position.epoch + 1,
            position.step + 1,
            group.rank(),
            self.advise_after_divergence(),
        );
        // If another rank has aborted the job first, `abort` fails. Ignore the error of `abort`, so that this rank
        // returns its own message.
        let _ = group.abort(&message);
        TrainError::Diverged(message)
    }
}
