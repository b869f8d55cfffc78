//! The training loop of one rank with the strategy `gossip`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::averaging::AveragesInProgress;
use super::coordinator::Answer;
use super::coordinator_trainer::CoordinatorTrainer;
use super::error::{coordinator_failed_error, failure_kind};
use super::message::{
    DonePart, GossipRequestKind, HEADER_WORDS, Message, PartReply, PartRequest, TEXT_WORDS_MAX,
};
use super::requests::FinalReply;
use super::service::DONE_PARTS_WORDS_MAX;
use super::{GossipContext, GossipError};
use crate::train::TrainError;
use crate::train::assigned_batches::AssignedBatches;
use crate::train::batch_queue::Assignment;
use crate::train::batches::range_of_rank;
use crate::train::checkpoint::TrainingState;
use crate::train::gradient_work::{GradientWork, micro_batch_rows};
use crate::train::model::{LossSums, OneRank, StepSeed, Workspace};
use crate::train::optimizer::Optimizer;
use crate::train::peer_link::{LinkFailure, PeerLink};
use crate::train::progress::Observer;
use crate::train::random;
use crate::train::run::Summary;
use crate::train::step_times::PartTimer;
use crate::train::summary_words::{REPORT_WORDS_MAX, decode_summary};
use crate::train::text_words::encode_text;
use crate::types::Rank;

/// A new coordinator asks each rank which parts of batches are done. It waits for this time between two requests to the
/// same rank.
const TAKEOVER_PAUSE: Duration = Duration::from_millis(50);

/// The training loop of one rank. Every rank has a worker, also the coordinator.
pub(super) struct Worker<'a> {
    pub(super) context: &'a GossipContext<'a>,
    /// The state at the start of the run, without the parameters and without the state of the optimizer.
    start: TrainingState,
    pub(super) optimizer: Optimizer,
    /// A copy of the parameters with which the gradient is computed.
    snapshot: Vec<f32>,
    gradients: Vec<f32>,
    workspace: Workspace,
    batches: AssignedBatches<'a>,
    pub(super) averages: AveragesInProgress,
    /// The number of steps that this rank has taken.
    steps: u64,
    /// `Some` if this rank is the coordinator.
    coordinator_trainer: Option<CoordinatorTrainer<'a>>,
    /// Measures the times of this rank's steps.
    timer: PartTimer,
    /// The last coordinator from which this rank has requested a part.
    last_coordinator: Rank,
    /// When this rank began to wait for a new coordinator that does not assign parts yet.
    waiting_since: Option<Instant>,
}

impl<'a> Worker<'a> {
    /// Creates the worker of a run that starts from `start`. The parameters of `start` are already in the shared replica.
    pub(super) fn new(context: &'a GossipContext<'a>, mut start: TrainingState) -> Self {
        let (config, setup) = (context.config, context.setup);
        let count = setup.network.parameter_count();
        let rate = start.learning_rate.unwrap_or_default();
        let mut optimizer = Optimizer::new(setup.settings.rule, rate, config.weight_decay, count);
        optimizer.steps = start.position.steps_total;
        optimizer.clip_norm = config.recipe.clip_norm;
        optimizer.set_tensors(&setup.network.parameter_tensors(), |tensor| Some(tensor.clone()));
        if !start.optimizer.is_empty() {
            optimizer.state = std::mem::take(&mut start.optimizer);
        }
        let part_len =
            setup.settings.batch_size.min(setup.dataset.train.len()).div_ceil(context.size.as_usize());
        let random = random::random_stream("gossip", config.seed, context.own_rank.get().into());
        Self {
            context,
            start,
            optimizer,
            snapshot: vec![0.0; count],
            gradients: vec![0.0; count],
            workspace: setup.network.allocate_workspace(micro_batch_rows(part_len, config.micro_batches)),
            batches: AssignedBatches::new(config.seed, setup),
            averages: AveragesInProgress::new(Arc::clone(context.links), Arc::clone(context.shared), random),
            steps: 0,
            coordinator_trainer: None,
            timer: PartTimer::start(),
            last_coordinator: Rank::ZERO,
            waiting_since: None,
        }
    }

    /// Takes steps until the end of the run, and returns its results.
    pub(super) fn run(&mut self, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
        let result = self.run_until_end(observer);
        if self.coordinator_trainer.is_some()
            && let Err(error) = &result
        {
            let coordinator = &self.context.shared.coordinator;
            coordinator.fail(failure_kind(error), &error.to_string());
            coordinator.wait_for_connection_ends(self.context.timeout_after_run(&result));
        }
        result
    }

    fn run_until_end(&mut self, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
        let shared = self.context.shared;
        let mut computed_part: Option<DonePart> = None;
        loop {
            let coordinator = shared.coordinator.coordinator_rank();
            self.record_coordinator(coordinator)?;
            if coordinator == self.context.own_rank && self.coordinator_trainer.is_none() {
                self.become_coordinator()?;
            }
            let request = PartRequest { done: computed_part, is_stopping: self.context.is_stopping() };
            self.timer.skip();
            let reply = self.request_part(coordinator, request)?;
            self.timer.end_wait();
            if let Some(part) = computed_part.take().filter(|_| reply.is_accepted) {
                self.apply_gradient(&part);
                if self.coordinator_trainer.is_none() {
                    self.show_step(&part, observer);
                }
            }
            shared.done_parts.forget_before(reply.done_before);
            self.averages.apply_arrived_replies();
            self.timer.end_computation(Duration::ZERO);
            if let Some(mut trainer) = self.coordinator_trainer.take() {
                trainer.step_times.add(&self.timer.take_times());
                let recorded = trainer.record_progress(self, observer);
                self.coordinator_trainer = Some(trainer);
                recorded?;
            }
            match reply.assignment {
                Assignment::Batch(number) => {
                    computed_part = Some(self.compute_gradient(coordinator, number, observer)?);
                }
                Assignment::Wait => {}
                Assignment::Finished => {
                    if let Some(summary) = self.end_run(coordinator, observer)? {
                        return Ok(summary);
                    }
                }
            }
        }
    }

    /// Shows a step to the observer, on a rank that is not the coordinator.
    fn show_step(&self, part: &DonePart, observer: &mut dyn Observer) {
        let batch = part.number / u64::from(self.context.size.get());
        let loss = part.loss / part.samples.max(1) as f64;
        let rate = self.start.learning_rate.unwrap_or_default();
        observer.step_taken(&self.context.describe_step((self.start.position, batch), loss, rate));
    }

    /// Records that rank `coordinator` is now the coordinator. Returns an error if the previous coordinator has aborted
    /// the connection, because then the run has failed or continues without this rank.
    fn record_coordinator(&mut self, coordinator: Rank) -> Result<(), TrainError> {
        let previous = std::mem::replace(&mut self.last_coordinator, coordinator);
        if previous == coordinator {
            return Ok(());
        }
        match self.context.shared.coordinator.link_failure(previous) {
            Some(LinkFailure::Aborted(problem)) => {
                Err(GossipError::CoordinatorFailed { coordinator: previous, problem }.into())
            }
            Some(LinkFailure::Lost(_)) | None => Ok(()),
        }
    }

    /// Requests a part of a batch. If the coordinator is lost or has no part, returns a reply with
    /// [`Assignment::Wait`].
    fn request_part(&mut self, coordinator: Rank, request: PartRequest) -> Result<PartReply, TrainError> {
        let answer = if coordinator == self.context.own_rank {
            Some(self.context.shared.coordinator.answer_part_request(coordinator, request))
        } else {
            self.context.shared.request_part(self.context.link(coordinator), request)?
        };
        let is_waiting = answer == Some(Answer::Wait);
        self.waiting_since = self.waiting_since.filter(|_| is_waiting);
        match answer {
            Some(Answer::Done(reply)) => return Ok(reply),
            Some(Answer::Failed(kind, problem)) => {
                return Err(coordinator_failed_error(coordinator, kind, problem));
            }
            Some(Answer::Wait) => {
                let since = *self.waiting_since.get_or_insert_with(Instant::now);
                // The new coordinator may itself wait for one takeover timeout before it assigns parts.
                if since.elapsed() > 2 * self.context.takeover_timeout() {
                    return Err(self.coordinator_unreachable_error(coordinator, Rank::ZERO));
                }
            }
            None => {}
        }
        Ok(PartReply { is_accepted: false, assignment: Assignment::Wait, done_before: 0 })
    }

    /// Returns the error for a coordinator that this rank cannot reach, although rank `other` can.
    fn coordinator_unreachable_error(&self, other: Rank, coordinator: Rank) -> TrainError {
        let failure = self.context.shared.coordinator.link_failure(coordinator);
        let problem = failure.map_or_else(String::new, |failure| failure.problem().to_owned());
        GossipError::CutOff { coordinator, other, problem }.into()
    }

    /// Computes the gradient of a part of a batch with the current parameters.
    fn compute_gradient(
        &mut self,
        coordinator: Rank,
        number: u64,
        observer: &mut dyn Observer,
    ) -> Result<DonePart, TrainError> {
        let GossipContext { config, setup, shared, batches_per_epoch, .. } = *self.context;
        self.timer.skip();
        let data_start = Instant::now();
        let ranks = u64::from(self.context.size.get());
        let (batch, owner) = (number / ranks, Rank::new((number % ranks) as u32));
        let (epoch, step) = (batch / batches_per_epoch, batch % batches_per_epoch);
        let batch_indices = self.batches.batch(epoch, step);
        let indices = &batch_indices[range_of_rank(batch_indices.len(), owner, self.context.size)];
        observer.batch_started(epoch, step, indices);
        let (samples, positions) = setup.dataset.train.held.load_batch(indices)?;
        let mut data_time = data_start.elapsed();
        shared.replica.copy_to(&mut self.snapshot);
        let work = GradientWork {
            network: &setup.network,
            parameters: &self.snapshot,
            first_moment: &[],
            gradients: &mut self.gradients,
            workspace: &mut self.workspace,
            samples: &samples,
            standardizer: setup.standardizer.as_ref(),
            indices: &positions,
            batch_len: batch_indices.len(),
            micro_batches: config.micro_batches,
            step: StepSeed { seed: config.seed, step: number },
            data_time: &mut data_time,
        };
        let weight = 1.0 / indices.len().max(1) as f32;
        let own_rank = self.context.own_rank;
        let outcome = work.differentiate(weight, &OneRank, (usize::MAX, |_, _: &mut [f32]| {}));
        self.timer.end_computation(data_time);
        let message = match outcome {
            Ok(LossSums { loss, .. }) if loss.is_finite() => {
                return Ok(DonePart { number, loss, samples: indices.len() as u64 });
            }
            Ok(LossSums { loss, .. }) => format!(
                "the loss is {} in batch {} (epoch {}, batch {} of this epoch) on rank {own_rank}; {}",
                if loss.is_nan() { "NaN" } else { "infinite" },
                batch + 1,
                epoch + 1,
                step + 1,
                config.recipe.advise_after_divergence(self.start.learning_rate.unwrap_or_default()),
            ),
            Err(error) => format!("{error} (on rank {own_rank})"),
        };
        if coordinator != own_rank {
            let text = encode_text(&message, TEXT_WORDS_MAX);
            let numbers = [message.len() as u64, 0, 0, 0];
            let request = Message::new(GossipRequestKind::Diverged as u32, numbers, &text).encode();
            self.context.shared.send_request(self.context.link(coordinator), request, HEADER_WORDS)?;
        }
        Err(TrainError::Diverged(message))
    }

    /// Takes a step with the gradient of a part. After every `steps_between_averages` steps, starts an average with a
    /// random rank.
    fn apply_gradient(&mut self, part: &DonePart) {
        let shared = self.context.shared;
        let batch = part.number / u64::from(self.context.size.get());
        let rate = self.start.learning_rate.unwrap_or_default();
        self.optimizer.learning_rate = self.context.setup.learning_rates.rate_at_step(rate, batch);
        let Self { optimizer, gradients, .. } = self;
        if part.samples > 0 {
            shared.replica.with_parameters(|parameters| optimizer.step(parameters, gradients));
            self.timer.count_step();
        }
        shared.done_parts.add(part.number);
        self.steps += 1;
        if self.steps.is_multiple_of(self.context.steps_between_averages) {
            self.averages.start_average();
        }
    }

    /// Ends the run on this rank: sends its final parameters to the coordinator, and returns the results of the run.
    /// Returns `None` if the coordinator is lost and the run continues.
    fn end_run(
        &mut self,
        coordinator: Rank,
        observer: &mut dyn Observer,
    ) -> Result<Option<Summary>, TrainError> {
        let shared = self.context.shared;
        self.averages.wait_for_all_replies();
        shared.replica.set_refuses_averages(true);
        if let Some(mut trainer) = self.coordinator_trainer.take() {
            let summary = trainer.conclude_run(self, observer);
            self.coordinator_trainer = Some(trainer);
            return summary.map(Some);
        }
        let link = self.context.link(coordinator);
        let count = self.snapshot.len();
        match shared.send_final_parameters(link, count + 1 + REPORT_WORDS_MAX)? {
            FinalReply::Results(words) => {
                let Some(summary) = decode_summary(&words, count) else {
                    let problem = "its results have an unknown format".into();
                    return Err(GossipError::CoordinatorFailed { coordinator, problem }.into());
                };
                let close = Message::new(GossipRequestKind::Close as u32, [0; 4], &[]).encode();
                shared.send_request(link, close, HEADER_WORDS)?;
                return Ok(Some(summary));
            }
            FinalReply::Failed(kind, problem) => {
                return Err(coordinator_failed_error(coordinator, kind, problem));
            }
            FinalReply::CoordinatorLost => {}
        }
        shared.replica.set_refuses_averages(false);
        Ok(None)
    }

    /// Makes this rank the coordinator. If an earlier coordinator is lost, first asks each higher rank which parts it
    /// has done.
    fn become_coordinator(&mut self) -> Result<(), TrainError> {
        let GossipContext { setup, shared, batches_per_epoch, own_rank: own, .. } = *self.context;
        let ranks = u64::from(self.context.size.get());
        let position = self.start.position;
        let mut first_part = (position.epoch * batches_per_epoch + position.step) * ranks;
        let end_part = setup.settings.epochs.saturating_mul(batches_per_epoch).saturating_mul(ranks);
        let (done_before, mut done) = shared.done_parts.snapshot();
        first_part = first_part.max(done_before);
        if own != Rank::ZERO {
            let lost: Vec<String> =
                shared.coordinator.lost_ranks().iter().map(|(rank, _)| rank.to_string()).collect();
            log::warn!(
                "lost ranks: {}; rank {own} now hands out batches, tests and saves the model",
                lost.join(", ")
            );
            for link in self.context.links.iter().filter(|link| link.peer > own) {
                let Some((done_before, parts)) = self.ask_for_done_parts(link)? else { continue };
                first_part = first_part.max(done_before);
                done.extend(parts);
            }
            shared.coordinator.check_quorum_of_reachable_ranks()?;
        }
        let mut state = std::mem::take(&mut self.start);
        self.start.position = state.position;
        self.start.learning_rate = state.learning_rate;
        state.parameters.resize(self.snapshot.len(), 0.0);
        shared.replica.copy_to(&mut state.parameters);
        let is_start_of_run = first_part / ranks == position.epoch * batches_per_epoch + position.step;
        let losses = if is_start_of_run { (position.loss_sum, position.samples) } else { (0.0, 0) };
        shared.coordinator.take_over((first_part, end_part), done, losses);
        self.coordinator_trainer = Some(CoordinatorTrainer::new(self.context, state, first_part)?);
        Ok(())
    }

    /// Asks another rank which parts it has done. Repeats the request until that rank also knows that the old
    /// coordinator is lost. Returns the number below which all parts are done, and the other parts that the asked rank has
    /// done. Returns `None` if the asked rank is lost.
    fn ask_for_done_parts(&self, link: &PeerLink) -> Result<Option<(u64, Vec<u64>)>, TrainError> {
        let (shared, own) = (self.context.shared, self.context.own_rank);
        let until = Instant::now() + self.context.takeover_timeout();
        while !shared.coordinator.has_connection_ended(link.peer) {
            let request = Message::new(GossipRequestKind::DoneParts as u32, [0; 4], &[]).encode();
            let Some(Answer::Done(reply)) =
                shared.send_request(link, request, HEADER_WORDS + DONE_PARTS_WORDS_MAX)?
            else {
                continue;
            };
            let [done_before, reported_coordinator, ..] = reply.numbers;
            if reported_coordinator >= u64::from(own.get()) {
                let parts =
                    reply.payload.chunks_exact(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32);
                return Ok(Some((done_before, parts.collect())));
            }
            if Instant::now() > until {
                let coordinator =
                    self.context.size.ranks().nth(reported_coordinator as usize).unwrap_or(Rank::ZERO);
                return Err(self.coordinator_unreachable_error(link.peer, coordinator));
            }
            shared.coordinator.wait_for_change(TAKEOVER_PAUSE);
        }
        Ok(None)
    }
}
