//! The coordinator of the first server: hands out batches to workers, sums the losses and records lost workers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::run_progress::{AwaitedProgress, FinishedStep, RunFailure, TrainingProgress};
use super::work_messages::{WorkReply, WorkRequest};
use crate::train::batch_queue::{Assignment, BatchQueue};
use crate::train::checkpoint::Position;
use crate::train::parameter_server::{LinkOutcome, PushOrNote, PushOutcome, RequestHandler, StrategyNote};
use crate::train::step_times::StepTimes;
use crate::types::Rank;

/// If no batch is free, the first server delays the reply to an idle worker by at most this time.
const BATCH_REPLY_DELAY_MAX: Duration = Duration::from_millis(400);

/// The coordinator remembers this many steps.
const RECENT_STEPS_MAX: usize = 16_384;

/// The batches and the workers of a run, as the first server knows them.
pub(super) struct BatchCoordinator {
    state: Mutex<RunState>,
    /// Notified after a change of `state` if a thread waits for a change.
    changed: Condvar,
    /// Notified when the run has reached the awaited progress.
    progressed: Condvar,
    /// Notified when the results of the run are published.
    published: Condvar,
    /// The ranks of the first server's clients, by client number: first the other servers, then the workers.
    clients: Vec<Rank>,
    /// The number of clients that are servers.
    other_server_count: usize,
    batches_per_epoch: u64,
    is_synchronous: bool,
}

struct RunState {
    queue: BatchQueue,
    /// The number of samples whose gradients were applied.
    applied_samples: u64,
    /// For each epoch: the sum of the losses, and the number of samples, whose gradients were applied.
    losses: BTreeMap<u64, (f64, u64)>,
    /// The number of applied gradients of each worker.
    updates: Vec<u64>,
    /// How the link of each client ended, or `None` while the link is open.
    outcomes: Vec<Option<LinkOutcome>>,
    /// In a synchronous run: what all workers do next.
    next_assignment: Assignment,
    /// A synchronous run pauses when this number of batches is done. During the pause, all servers have taken the same
    /// number of steps, and the first server copies the parameters of all servers.
    pause_at: u64,
    /// `has_no_push[worker]` is true if the worker has no push in progress and waits for a reply.
    has_no_push: Vec<bool>,
    /// The number of workers whose gradients of the current synchronous step have been applied.
    applied_in_step: usize,
    /// The sum of the losses of these gradients, and the number of their samples.
    loss_in_step: (f64, u64),
    /// The last steps, in the order in which they were finished.
    recent_steps: VecDeque<FinishedStep>,
    /// The number of threads that wait for `changed`.
    waiting_threads: usize,
    /// The progress for which the first server's main thread waits.
    awaited_progress: Option<AwaitedProgress>,
    /// The times of the steps of all workers since the last record.
    step_times: StepTimes,
    /// The reason for which the run failed.
    failure: Option<RunFailure>,
    /// Whether the first server has taken its last snapshot. After the last snapshot, a lost client is not an error.
    allows_lost_clients: bool,
    /// The results of the run in 4-byte words, after the first server has published them.
    results: Option<Vec<u32>>,
}

impl RunState {
    /// Returns whether the run has come so far, or has ended.
    fn has_reached(&self, awaited: AwaitedProgress) -> bool {
        self.queue.first_not_done() >= awaited.batches
            || self.updates.iter().sum::<u64>() >= awaited.updates
            || self.queue.is_finished()
            || self.failure.is_some()
    }
}

/// Where a run begins.
pub(super) struct RunStart<'a> {
    pub(super) position: Position,
    /// The batches after `position` that are already done.
    pub(super) done_ahead: &'a [u64],
    pub(super) batches_per_epoch: u64,
    pub(super) epochs: u64,
}

impl BatchCoordinator {
    /// Creates the coordinator of a run. `clients` holds the ranks of the first server's clients. The first
    /// `other_server_count` of these ranks are servers.
    pub(super) fn new(
        start: &RunStart<'_>,
        clients: Vec<Rank>,
        other_server_count: usize,
        is_synchronous: bool,
    ) -> Self {
        let RunStart { position, done_ahead, batches_per_epoch, epochs } = *start;
        let workers = clients.len() - other_server_count;
        let first_batch = position.epoch * batches_per_epoch + position.step;
        let end = epochs.saturating_mul(batches_per_epoch);
        let mut queue =
            BatchQueue::new(first_batch, end.max(first_batch), workers, done_ahead.iter().copied());
        let next_assignment = if is_synchronous { queue.assign_batch(0, false) } else { Assignment::Wait };
        let state = RunState {
            queue,
            losses: BTreeMap::from([(position.epoch, (position.loss_sum, position.samples))]),
            applied_samples: 0,
            updates: vec![0; workers],
            outcomes: vec![None; clients.len()],
            next_assignment,
            pause_at: end,
            has_no_push: vec![false; workers],
            applied_in_step: 0,
            loss_in_step: (0.0, 0),
            recent_steps: VecDeque::new(),
            waiting_threads: 0,
            awaited_progress: None,
            step_times: StepTimes::default(),
            failure: None,
            allows_lost_clients: false,
            results: None,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            progressed: Condvar::new(),
            published: Condvar::new(),
            clients,
            other_server_count,
            batches_per_epoch,
            is_synchronous,
        }
    }

    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the threads that wait for a change, and the main thread if the run has come as far as it waits for. Most updates
    /// wake no thread, and then a notification would only cost time.
    fn wake_waiters(&self, state: &mut RunState) {
        if state.waiting_threads > 0 {
            self.changed.notify_all();
        }
        if state.awaited_progress.is_some_and(|awaited| state.has_reached(awaited)) {
            state.awaited_progress = None;
            self.progressed.notify_one();
        }
    }

    /// Waits for changes while `condition` is true, at most for `timeout`. Returns whether the condition is still true.
    fn wait_while<'s>(
        &'s self,
        mut state: MutexGuard<'s, RunState>,
        timeout: Duration,
        condition: impl FnMut(&mut RunState) -> bool,
    ) -> (MutexGuard<'s, RunState>, bool) {
        state.waiting_threads += 1;
        let waited = self.changed.wait_timeout_while(state, timeout, condition);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting_threads -= 1;
        (state, timeout.timed_out())
    }

    /// Stops the run: workers get no more batches.
    pub(super) fn stop_run(&self) {
        let mut state = self.lock();
        state.queue.stop();
        if state.next_assignment == Assignment::Wait {
            state.next_assignment = Assignment::Finished;
        }
        self.wake_waiters(&mut state);
    }

    /// Stores the results of the run, so that the clients can fetch the results.
    pub(super) fn publish_results(&self, words: Vec<u32>) {
        self.lock().results = Some(words);
        self.published.notify_all();
    }

    /// Waits until the run has come as far as `awaited` says, the run has ended, or `timeout` has passed. Returns the
    /// progress of the run. The caller has seen the batches below `seen`.
    pub(super) fn wait_for_progress(
        &self,
        awaited: AwaitedProgress,
        seen: u64,
        timeout: Duration,
    ) -> TrainingProgress {
        let must_wait = |state: &mut RunState| {
            let must_wait = !state.has_reached(awaited);
            state.awaited_progress = must_wait.then_some(awaited);
            must_wait
        };
        let waited = self.progressed.wait_timeout_while(self.lock(), timeout, must_wait);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.awaited_progress = None;
        let batches = state.queue.first_not_done();
        let unseen = batches.saturating_sub(seen).min(state.recent_steps.len() as u64) as usize;
        TrainingProgress {
            batches,
            steps: state.recent_steps.range(state.recent_steps.len() - unseen..).copied().collect(),
            is_finished: state.queue.is_finished(),
            failure: state.failure.clone(),
        }
    }

    /// Returns the failure that has ended the run.
    pub(super) fn failure(&self) -> Option<RunFailure> {
        self.lock().failure.clone()
    }

    /// Returns the workers that were lost, and the problem of each lost worker.
    pub(super) fn lost_workers(&self) -> Vec<(Rank, String)> {
        let state = self.lock();
        let workers = state.outcomes.iter().zip(&self.clients).skip(self.other_server_count);
        let lost_workers = workers.filter_map(|(outcome, &rank)| match outcome {
            Some(LinkOutcome::Lost(problem)) => Some((rank, problem.clone())),
            _ => None,
        });
        lost_workers.collect()
    }

    /// Continues a paused synchronous run. The run pauses again when `batches` batches are done.
    pub(super) fn continue_until_done(&self, batches: u64) {
        let mut state = self.lock();
        state.pause_at = batches;
        if self.is_synchronous && state.next_assignment == Assignment::Wait {
            state.next_assignment = state.queue.assign_batch(0, false);
            state.has_no_push.fill(false);
        }
        self.wake_waiters(&mut state);
    }

    /// Makes a synchronous run pause after the batch that is in progress. Returns the number of batches that will be
    /// done at the pause.
    pub(super) fn pause_after_this_batch(&self) -> u64 {
        let mut state = self.lock();
        state.pause_at = state.pause_at.min(state.queue.first_not_done() + 1);
        state.pause_at
    }

    /// Waits until no worker has a push in progress. After `timeout`, returns a worker whose push is still in
    /// progress. The run must have paused or ended.
    pub(super) fn wait_until_no_push(&self, timeout: Duration) -> Option<Rank> {
        let find_busy = |state: &RunState| {
            let workers = state.has_no_push.iter().zip(&state.outcomes[self.other_server_count..]);
            let mut workers = workers.zip(&self.clients[self.other_server_count..]);
            workers
                .find(|((has_no_push, outcome), _)| !**has_no_push && outcome.is_none())
                .map(|(_, &rank)| rank)
        };
        let is_busy = |state: &mut RunState| state.failure.is_none() && find_busy(state).is_some();
        let (state, has_timed_out) = self.wait_while(self.lock(), timeout, is_busy);
        if has_timed_out { find_busy(&state) } else { None }
    }

    /// Records that the first server has taken its last snapshot. From now on, a lost client is not an error.
    pub(super) fn allow_lost_clients(&self) {
        self.lock().allows_lost_clients = true;
    }

    /// Returns the position of the run, and the batches after this position that are done. The caller must hold the
    /// lock of the shard, so that the parameters do not change before the caller has copied them.
    pub(super) fn position_and_done_batches(&self, steps_total: u64) -> (Position, Vec<u64>) {
        let state = self.lock();
        let batches = state.queue.first_not_done();
        let (epoch, step) = (batches / self.batches_per_epoch, batches % self.batches_per_epoch);
        let (loss_sum, samples) = state.losses.get(&epoch).copied().unwrap_or_default();
        let position = Position { epoch, step, steps_total, momentum_start: 0, loss_sum, samples };
        (position, state.queue.done_ahead())
    }

    /// Returns the mean loss of the samples of `epoch` whose gradients were applied. Deletes the losses of earlier epochs.
    /// `epoch` counts from 0.
    pub(super) fn epoch_loss(&self, epoch: u64) -> f64 {
        let mut state = self.lock();
        state.losses = state.losses.split_off(&epoch);
        let (loss, samples) = state.losses.get(&epoch).copied().unwrap_or_default();
        loss / samples.max(1) as f64
    }

    /// Returns the number of samples whose gradients were applied.
    pub(super) fn applied_samples(&self) -> u64 {
        self.lock().applied_samples
    }

    /// Returns the times of the steps of all workers since the last call.
    pub(super) fn take_step_times(&self) -> StepTimes {
        std::mem::take(&mut self.lock().step_times)
    }

    /// Returns the number of applied gradients of each worker.
    pub(super) fn updates_by_worker(&self) -> Vec<u64> {
        self.lock().updates.clone()
    }

    /// Waits at most `timeout` until the links of all clients have ended. Returns the clients whose links are still
    /// open.
    pub(super) fn wait_for_link_ends(&self, timeout: Duration) -> Vec<usize> {
        let is_open = |state: &mut RunState| state.outcomes.contains(&None);
        let (state, _) = self.wait_while(self.lock(), timeout, is_open);
        (0..state.outcomes.len()).filter(|&client| state.outcomes[client].is_none()).collect()
    }

    /// Returns the client's index among the workers. Returns `None` if the client is a server.
    fn worker_index(&self, client: usize) -> Option<usize> {
        client.checked_sub(self.other_server_count)
    }

    /// Returns what a worker does next. If no batch is free, an idle worker waits up to [`BATCH_REPLY_DELAY_MAX`].
    fn assign_batch(&self, worker: usize, is_idle: bool) -> Assignment {
        let deadline = Instant::now() + BATCH_REPLY_DELAY_MAX;
        let mut state = self.lock();
        if self.is_synchronous {
            if is_idle && state.next_assignment == Assignment::Wait {
                state.has_no_push[worker] = true;
                self.wake_waiters(&mut state);
                let is_paused = |state: &mut RunState| state.next_assignment == Assignment::Wait;
                (state, _) = self.wait_while(state, BATCH_REPLY_DELAY_MAX, is_paused);
            }
            return state.next_assignment;
        }
        loop {
            let timeout = deadline.saturating_duration_since(Instant::now());
            let assignment = state.queue.assign_batch(worker, is_idle && timeout.is_zero());
            if assignment != Assignment::Wait || !is_idle || timeout.is_zero() {
                // This worker may have given back a batch, which another worker can now take.
                self.wake_waiters(&mut state);
                return assignment;
            }
            state.waiting_threads += 1;
            (state, _) = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner);
            state.waiting_threads -= 1;
        }
    }

    /// Waits at most [`BATCH_REPLY_DELAY_MAX`] for the results of the run, and returns the length of the results in
    /// words.
    fn wait_for_results_length(&self) -> Option<usize> {
        let is_missing = |state: &mut RunState| state.results.is_none();
        let waited = self.published.wait_timeout_while(self.lock(), BATCH_REPLY_DELAY_MAX, is_missing);
        waited.unwrap_or_else(PoisonError::into_inner).0.results.as_ref().map(Vec::len)
    }

    /// Ends the run because of a failure. If the run has already failed, keeps the first failure.
    fn end_failed_run(&self, state: &mut RunState, failure: RunFailure) {
        state.failure.get_or_insert(failure);
        state.queue.stop();
        state.next_assignment = Assignment::Finished;
        self.wake_waiters(state);
    }
}

impl RequestHandler for BatchCoordinator {
    fn wants_gradient(&self, client: usize, note: &StrategyNote) -> bool {
        let batch = WorkRequest::decode(note).batch;
        self.worker_index(client)
            .is_some_and(|worker| self.lock().queue.is_assigned_and_not_done(worker, batch))
    }

    fn record_push_outcome(&self, client: usize, note: &StrategyNote, outcome: PushOutcome) {
        let Some(worker) = self.worker_index(client) else { return };
        let request = WorkRequest::decode(note);
        let mut state = self.lock();
        state.step_times.add(&request.times);
        let PushOutcome::Applied { .. } = outcome else {
            state.queue.give_back(worker);
            return;
        };
        let (loss, samples) = state.losses.entry(request.batch / self.batches_per_epoch).or_default();
        *loss += request.loss;
        *samples = samples.saturating_add(request.samples);
        state.applied_samples = state.applied_samples.saturating_add(request.samples);
        state.updates[worker] += 1;
        state.loss_in_step.0 += request.loss;
        state.loss_in_step.1 = state.loss_in_step.1.saturating_add(request.samples);
        state.applied_in_step += 1;
        if request.is_stopping {
            state.queue.stop();
        }
        let is_step_complete = !self.is_synchronous || state.applied_in_step == state.updates.len();
        if is_step_complete {
            state.applied_in_step = 0;
            let (loss, samples) = std::mem::take(&mut state.loss_in_step);
            if state.recent_steps.len() == RECENT_STEPS_MAX {
                state.recent_steps.pop_front();
            }
            let step = FinishedStep { time: Instant::now(), loss: loss / samples.max(1) as f64 };
            state.recent_steps.push_back(step);
        }
        if !self.is_synchronous {
            state.queue.complete(worker);
        } else if is_step_complete {
            // In a synchronous run, all workers compute the same batch. The queue records this batch for worker 0
            // only.
            state.queue.complete(0);
            let pauses = state.queue.first_not_done() == state.pause_at && !state.queue.is_finished();
            state.next_assignment =
                if pauses { Assignment::Wait } else { state.queue.assign_batch(0, false) };
        }
        self.wake_waiters(&mut state);
    }

    fn reply_note(&self, client: usize, kind: PushOrNote, note: &StrategyNote) -> StrategyNote {
        let request = WorkRequest::decode(note);
        let worker = self.worker_index(client);
        if request.is_stopping {
            self.stop_run();
        }
        if let (Some(worker), true) = (worker, request.awaits_end) {
            let mut state = self.lock();
            state.has_no_push[worker] = true;
            self.wake_waiters(&mut state);
        }
        let Some(worker) = worker.filter(|_| !request.awaits_end) else {
            let reply = self
                .wait_for_results_length()
                .map_or(WorkReply::Work(Assignment::Wait), WorkReply::Published);
            return reply.encode();
        };
        if request.has_diverged {
            let failure = RunFailure::Diverged {
                worker: self.clients[client],
                loss: request.loss,
                batch: request.batch,
            };
            self.end_failed_run(&mut self.lock(), failure);
        }
        WorkReply::Work(self.assign_batch(worker, kind == PushOrNote::Note)).encode()
    }

    fn published_results(&self) -> Option<Vec<u32>> {
        self.lock().results.clone()
    }

    fn record_link_end(&self, client: usize, outcome: &LinkOutcome) {
        let mut state = self.lock();
        state.outcomes[client] = Some(outcome.clone());
        let worker = self.worker_index(client);
        if let Some(worker) = worker.filter(|_| !self.is_synchronous) {
            state.queue.give_back(worker);
        }
        if let (LinkOutcome::Lost(problem), false) = (outcome, state.allows_lost_clients) {
            let (rank, problem) = (self.clients[client], problem.clone());
            let all_ended = state.outcomes[self.other_server_count..].iter().all(Option::is_some);
            match worker {
                None => self.end_failed_run(&mut state, RunFailure::ServerLost { server: rank, problem }),
                Some(_) if self.is_synchronous => {
                    self.end_failed_run(&mut state, RunFailure::WorkerLost { worker: rank, problem });
                }
                Some(_) if all_ended && !state.queue.is_finished() => {
                    self.end_failed_run(&mut state, RunFailure::AllWorkersLost { worker: rank, problem });
                }
                Some(_) => {}
            }
        }
        self.wake_waiters(&mut state);
    }
}

#[cfg(test)]
mod tests;
