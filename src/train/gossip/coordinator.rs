//! The coordinator assigns the parts of batches to ranks, sums the losses, and averages the parameters of all ranks at
//! the end of the run.
//!
//! The coordinator is the lowest rank that is not lost. Every rank has a [`PartCoordinator`], because every rank may
//! become the coordinator. A [`PartCoordinator`] assigns parts only after [`PartCoordinator::take_over`].

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::GossipError;
use super::message::{PartReply, PartRequest};
use super::quorum::check_quorum;
use crate::train::batch_queue::{Assignment, BatchQueue};
use crate::train::peer_link::LinkFailure;
use crate::types::Rank;

/// The coordinator answers a request after at most this time. If there is no result yet, the answer is
/// [`Answer::Wait`], and the requesting rank asks again.
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(400);

/// The coordinator's view of a run. Ranks that are not the coordinator use it only to record lost ranks.
pub(super) struct PartCoordinator {
    own_rank: Rank,
    state: Mutex<PartCoordinatorState>,
    /// Notified when the state changes.
    changed: Condvar,
    /// The number of parts of a batch: the number of ranks at the start of the run.
    parts_per_batch: u64,
    batches_per_epoch: u64,
}

struct PartCoordinatorState {
    /// The parts of all batches. `None` while this rank is not the coordinator.
    queue: Option<BatchQueue>,
    /// For each epoch, the sum of the losses of its samples so far, and the number of these samples.
    losses: BTreeMap<u64, (f64, u64)>,
    /// The number of samples in all parts that were done while this rank is the coordinator.
    samples: u64,
    /// The mean loss of the part that was done last.
    last_loss: f64,
    /// The number of parts that each rank has done.
    steps: Vec<u64>,
    /// `connection_ends[rank]` says how the connection with a rank ended. `None` if the connection is open.
    connection_ends: Vec<Option<PeerConnectionEnd>>,
    /// The sum of the final parameters of the ranks that have sent them.
    parameter_sum: Vec<f64>,
    /// Whether each rank has sent its final parameters.
    has_sent_parameters: Vec<bool>,
    /// Why the run failed.
    failure: Option<(FailureKind, String)>,
    /// The encoded results of the run. `None` until the run is complete.
    results: Option<Vec<u32>>,
}

/// How the connection with another rank, the peer, ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PeerConnectionEnd {
    /// The peer has received the results of the run and closed the connection.
    Closed,
    /// The peer is lost, ended the connection, or sent an invalid message.
    Failed(LinkFailure),
}

/// The kind of error that ended a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FailureKind {
    /// An error of none of the following kinds.
    Other,
    /// The training diverged.
    Diverged,
    /// The coordinator cannot write a file.
    Storage,
}

/// The answer to a request.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Answer<T> {
    /// The request is done. Holds its result.
    Done(T),
    /// There is no result yet. The requesting rank asks again.
    Wait,
    /// The run has failed.
    Failed(FailureKind, String),
}

/// The progress of a run.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct GossipProgress {
    /// All parts below this number are done.
    pub(super) done_before: u64,
    /// The number of samples in all parts that were done while this rank is the coordinator.
    pub(super) samples: u64,
    /// The mean loss of the part that was done last.
    pub(super) last_loss: f64,
    /// The number of parts that each rank has done.
    pub(super) steps: Vec<u64>,
    /// Whether all parts are done.
    pub(super) is_finished: bool,
}

impl FailureKind {
    pub(super) fn to_number(self) -> u64 {
        match self {
            Self::Other => 0,
            Self::Diverged => 1,
            Self::Storage => 2,
        }
    }

    pub(super) fn from_number(number: u64) -> Self {
        match number {
            1 => Self::Diverged,
            2 => Self::Storage,
            _ => Self::Other,
        }
    }
}

impl PartCoordinatorState {
    /// Describes how each connection that is not open ended.
    fn describe_connection_ends(&self) -> String {
        let ends = self.connection_ends.iter().enumerate().filter_map(|(rank, end)| match end {
            Some(PeerConnectionEnd::Failed(failure)) => Some(format!("rank {rank}: {}", failure.problem())),
            Some(PeerConnectionEnd::Closed) => Some(format!("rank {rank}: it has completed the run")),
            None => None,
        });
        ends.collect::<Vec<_>>().join("; ")
    }
}

impl PartCoordinator {
    /// Creates the coordinator of the rank `own_rank` for a run on `ranks` ranks.
    pub(super) fn new(own_rank: Rank, ranks: usize, batches_per_epoch: u64) -> Self {
        let state = PartCoordinatorState {
            queue: None,
            losses: BTreeMap::new(),
            samples: 0,
            last_loss: 0.0,
            steps: vec![0; ranks],
            connection_ends: vec![None; ranks],
            parameter_sum: Vec::new(),
            has_sent_parameters: vec![false; ranks],
            failure: None,
            results: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { own_rank, state, changed, parts_per_batch: ranks as u64, batches_per_epoch }
    }

    /// Returns this rank.
    pub(super) fn own_rank(&self) -> Rank {
        self.own_rank
    }

    fn lock(&self) -> MutexGuard<'_, PartCoordinatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the state changes, at most for `timeout`.
    pub(super) fn wait_for_change(&self, timeout: Duration) {
        drop(self.changed.wait_timeout(self.lock(), timeout).unwrap_or_else(PoisonError::into_inner));
    }

    /// Makes this rank the coordinator. It then assigns the parts `first..end` to ranks, except for the parts in
    /// `done_ahead`, which are already done. `losses` holds the sum of the losses and the number of samples so far in
    /// the epoch that contains `first`.
    pub(super) fn take_over(
        &self,
        (first, end): (u64, u64),
        done_ahead: impl IntoIterator<Item = u64>,
        losses: (f64, u64),
    ) {
        let mut state = self.lock();
        let ranks = state.connection_ends.len();
        state.losses = BTreeMap::from([(self.epoch_of_part(first), losses)]);
        state.queue = Some(BatchQueue::new(first, end.max(first), ranks, done_ahead));
        self.changed.notify_all();
    }

    /// Returns the number of the epoch that contains a part. Epochs count from 0.
    fn epoch_of_part(&self, part: u64) -> u64 {
        part / self.parts_per_batch / self.batches_per_epoch
    }

    /// Returns the rank of the coordinator, the lowest rank that is not lost.
    pub(super) fn coordinator_rank(&self) -> Rank {
        let state = self.lock();
        let lower_rank = state.connection_ends[..self.own_rank.index()].iter().position(Option::is_none);
        lower_rank.map_or(self.own_rank, |rank| Rank::new(rank as u32))
    }

    /// Records how the connection with a rank ended. Only the first call for a rank is recorded. The unfinished part of
    /// `rank` goes to another rank.
    pub(super) fn record_connection_end(&self, rank: Rank, end: PeerConnectionEnd) {
        let mut state = self.lock();
        state.connection_ends[rank.index()].get_or_insert(end);
        if let Some(queue) = &mut state.queue {
            queue.give_back(rank.index());
        }
        self.changed.notify_all();
    }

    /// Returns whether the connection with a rank has ended.
    pub(super) fn has_connection_ended(&self, rank: Rank) -> bool {
        self.lock().connection_ends[rank.index()].is_some()
    }

    /// Returns each lost rank and the cause of its loss.
    pub(super) fn lost_ranks(&self) -> Vec<(Rank, String)> {
        let state = self.lock();
        let lost = state.connection_ends.iter().enumerate().filter_map(|(rank, end)| match end {
            Some(PeerConnectionEnd::Failed(failure)) => {
                Some((Rank::new(rank as u32), failure.problem().to_owned()))
            }
            _ => None,
        });
        lost.collect()
    }

    /// Returns why the connection with a rank has failed. Returns `None` if it is open or was closed.
    pub(super) fn link_failure(&self, rank: Rank) -> Option<LinkFailure> {
        match &self.lock().connection_ends[rank.index()] {
            Some(PeerConnectionEnd::Failed(failure)) => Some(failure.clone()),
            Some(PeerConnectionEnd::Closed) | None => None,
        }
    }

    /// Checks that this rank and the ranks that it can reach are a quorum, so that they may continue the run.
    pub(super) fn check_quorum_of_reachable_ranks(&self) -> Result<(), GossipError> {
        let state = self.lock();
        let is_failed = |end: &Option<PeerConnectionEnd>| matches!(end, Some(PeerConnectionEnd::Failed(_)));
        check_quorum(
            self.own_rank,
            &state.connection_ends.iter().map(|end| !is_failed(end)).collect::<Vec<_>>(),
            || state.describe_connection_ends(),
        )
    }

    /// Checks that the ranks that have sent their final parameters are a quorum, so that they may complete the run.
    pub(super) fn check_quorum_of_final_parameters(&self) -> Result<(), GossipError> {
        let state = self.lock();
        check_quorum(self.own_rank, &state.has_sent_parameters, || state.describe_connection_ends())
    }

    /// Answers a request for a part. If no part is free, waits at most [`ANSWER_WAIT_MAX`] for a part.
    pub(super) fn answer_part_request(&self, rank: Rank, request: PartRequest) -> Answer<PartReply> {
        let until = Instant::now() + ANSWER_WAIT_MAX;
        let is_not_coordinator_yet =
            |state: &mut PartCoordinatorState| state.queue.is_none() && state.failure.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), ANSWER_WAIT_MAX, is_not_coordinator_yet);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_accepted = self.complete_part(&mut state, rank, request);
        loop {
            let PartCoordinatorState { queue, failure, .. } = &mut *state;
            if let Some((kind, message)) = failure {
                return Answer::Failed(*kind, message.clone());
            }
            let Some(queue) = queue else { return Answer::Wait };
            // A rank that has just computed a part is not idle. It must first apply the gradient, so reply at once.
            let is_idle = request.done.is_none();
            let timeout = until.saturating_duration_since(Instant::now());
            let assignment = queue.assign_batch(rank.index(), is_idle && timeout.is_zero());
            let done_before = queue.first_not_done();
            if assignment != Assignment::Wait || !is_idle || timeout.is_zero() {
                self.changed.notify_all();
                return Answer::Done(PartReply { is_accepted, assignment, done_before });
            }
            (state, _) = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records the part that `rank` has computed. Returns `false` if the request names no part, or if another rank has
    /// already done the part.
    fn complete_part(&self, state: &mut PartCoordinatorState, rank: Rank, request: PartRequest) -> bool {
        let Some(queue) = &mut state.queue else { return false };
        if request.is_stopping {
            queue.shorten_to_multiple_of(self.parts_per_batch);
        }
        let Some(done) =
            request.done.filter(|done| queue.is_assigned_and_not_done(rank.index(), done.number))
        else {
            return false;
        };
        queue.complete(rank.index());
        let (loss, samples) = state.losses.entry(self.epoch_of_part(done.number)).or_default();
        *loss += done.loss;
        *samples = samples.saturating_add(done.samples);
        state.samples = state.samples.saturating_add(done.samples);
        state.steps[rank.index()] += 1;
        if done.samples > 0 {
            state.last_loss = done.loss / done.samples as f64;
        }
        true
    }

    /// Makes the run end when the batches in progress are complete.
    pub(super) fn stop(&self) {
        if let Some(queue) = &mut self.lock().queue {
            queue.shorten_to_multiple_of(self.parts_per_batch);
        }
        self.changed.notify_all();
    }

    /// Ends the run with an error on all ranks. Later calls have no effect.
    pub(super) fn fail(&self, kind: FailureKind, message: &str) {
        self.lock().failure.get_or_insert_with(|| (kind, message.to_owned()));
        self.changed.notify_all();
    }

    /// Returns the progress of the run.
    pub(super) fn progress(&self) -> GossipProgress {
        let state = self.lock();
        GossipProgress {
            done_before: state.queue.as_ref().map_or(0, BatchQueue::first_not_done),
            samples: state.samples,
            last_loss: state.last_loss,
            steps: state.steps.clone(),
            is_finished: state.queue.as_ref().is_some_and(BatchQueue::is_finished),
        }
    }

    /// Returns the sum of the losses and the number of samples of an epoch so far, and deletes the losses of all
    /// earlier epochs. `epoch` counts from 0.
    pub(super) fn epoch_losses(&self, epoch: u64) -> (f64, u64) {
        let mut state = self.lock();
        state.losses = state.losses.split_off(&epoch);
        state.losses.get(&epoch).copied().unwrap_or_default()
    }

    /// Adds the final parameters of a rank to the sum. Returns [`Answer::Wait`] while some parts are not done. A second
    /// call for the same rank has no effect.
    pub(super) fn add_final_parameters(&self, rank: Rank, parameters: &[f32]) -> Answer<()> {
        let mut state = self.lock();
        if let Some((kind, message)) = &state.failure {
            return Answer::Failed(*kind, message.clone());
        }
        if !state.queue.as_ref().is_some_and(BatchQueue::is_finished) {
            return Answer::Wait;
        }
        if !std::mem::replace(&mut state.has_sent_parameters[rank.index()], true) {
            state.parameter_sum.resize(parameters.len(), 0.0);
            state.parameter_sum.iter_mut().zip(parameters).for_each(|(sum, &value)| *sum += f64::from(value));
        }
        self.changed.notify_all();
        Answer::Done(())
    }

    /// Returns the ranks that have not sent their final parameters.
    pub(super) fn ranks_left_out(&self) -> Vec<Rank> {
        let state = self.lock();
        let left_out = state.has_sent_parameters.iter().enumerate().filter(|(_, has_sent)| !**has_sent);
        left_out.map(|(rank, _)| Rank::new(rank as u32)).collect()
    }

    /// Waits at most for `timeout` until all other ranks with an open connection have sent their final parameters. Returns
    /// the ranks whose parameters are missing.
    pub(super) fn wait_for_final_parameters(&self, timeout: Duration) -> Vec<Rank> {
        let missing = |state: &PartCoordinatorState| -> Vec<Rank> {
            let ranks = state.has_sent_parameters.iter().zip(&state.connection_ends).enumerate();
            let missing =
                ranks.filter(|(_, (has_sent_parameters, end))| !**has_sent_parameters && end.is_none());
            missing.map(|(rank, _)| Rank::new(rank as u32)).filter(|&rank| rank != self.own_rank).collect()
        };
        let is_waiting = |state: &mut PartCoordinatorState| !missing(state).is_empty();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_waiting);
        missing(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Writes the average of the final parameters to `target`.
    pub(super) fn write_average_parameters(&self, target: &mut [f32]) {
        let state = self.lock();
        let count = state
            .has_sent_parameters
            .iter()
            .filter(|&&has_sent_parameters| has_sent_parameters)
            .count()
            .max(1) as f64;
        target.iter_mut().zip(&state.parameter_sum).for_each(|(value, sum)| *value = (sum / count) as f32);
    }

    /// Makes the results of the run available to the other ranks.
    pub(super) fn publish_results(&self, words: Vec<u32>) {
        self.lock().results = Some(words);
        self.changed.notify_all();
    }

    /// Waits at most [`ANSWER_WAIT_MAX`] for the results of the run, and returns these results.
    pub(super) fn wait_for_results(&self) -> Answer<Vec<u32>> {
        let is_missing =
            |state: &mut PartCoordinatorState| state.results.is_none() && state.failure.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), ANSWER_WAIT_MAX, is_missing);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match (&state.failure, &state.results) {
            (Some((kind, message)), _) => Answer::Failed(*kind, message.clone()),
            (None, Some(words)) => Answer::Done(words.clone()),
            (None, None) => Answer::Wait,
        }
    }

    /// Waits at most for `timeout` until the connections with all other ranks have ended. Returns the ranks whose connections
    /// are still open.
    pub(super) fn wait_for_connection_ends(&self, timeout: Duration) -> Vec<Rank> {
        let open = |state: &PartCoordinatorState| -> Vec<Rank> {
            let open = state.connection_ends.iter().enumerate().filter(|(_, end)| end.is_none());
            open.map(|(rank, _)| Rank::new(rank as u32)).filter(|&rank| rank != self.own_rank).collect()
        };
        let is_open = |state: &mut PartCoordinatorState| !open(state).is_empty();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_open);
        open(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }
}
