//! The program on the first server: hands out batches, sums losses and counts lost workers.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::note::{WorkReply, WorkRequest};
use super::tickets::{Assignment, Tickets};
use crate::train::checkpoint::Position;
use crate::train::parameter_server::{AnswerTo, Handler, LinkEnd, Note, PushOutcome};
use crate::types::Rank;

/// A request that has to wait is answered after this time at the latest. The client then asks again.
const ANSWER_MAX: Duration = Duration::from_millis(400);

/// The state of a run, as the first server knows it.
pub(super) struct BatchCoordinator {
    state: Mutex<RunState>,
    /// Notified when the state changes in a way for which a thread may wait.
    changed: Condvar,
    /// The ranks of the clients, in the order of their numbers. The first clients are the other servers.
    clients: Vec<Rank>,
    /// The number of clients that are servers.
    other_servers: usize,
    batches_per_epoch: u64,
    is_synchronous: bool,
}

struct RunState {
    tickets: Tickets,
    /// The number of samples whose gradients were applied.
    samples: u64,
    /// The sum of the losses and the number of samples, by epoch.
    losses: BTreeMap<u64, (f64, u64)>,
    /// The number of gradients of each worker that were applied.
    updates: Vec<u64>,
    /// How each client's link ended.
    ends: Vec<Option<LinkEnd>>,
    /// What all workers do next, in a synchronous run.
    next: Assignment,
    /// A synchronous run pauses when this number of batches is done, so that all servers have the same version.
    pause_at: u64,
    /// Whether each worker has no push in progress, and waits for work or for the end of the run.
    quiet: Vec<bool>,
    /// The number of workers whose gradients of the current synchronous step have been applied.
    applied_in_step: usize,
    /// The mean loss of the last applied gradient.
    last_loss: f64,
    /// Why the run failed.
    failure: Option<RunFailure>,
    /// Whether the first server has taken its last snapshot, and needs no client any more.
    needs_no_client: bool,
    publication: Option<Vec<u32>>,
}

/// Why a run failed.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum RunFailure {
    /// The loss of a worker was not finite.
    Diverged {
        worker: Rank,
        loss: f64,
        batch: u64,
    },
    /// A server was lost.
    ServerLost {
        server: Rank,
        problem: String,
    },
    /// A worker was lost in a synchronous run.
    WorkerLost {
        worker: Rank,
        problem: String,
    },
    AllWorkersLost {
        worker: Rank,
        problem: String,
    },
}

/// The progress of a run.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Progress {
    /// The number of batches that are done without a gap.
    pub(super) batches: u64,
    /// The number of gradients that were applied.
    pub(super) updates: u64,
    pub(super) last_loss: f64,
    pub(super) is_finished: bool,
    pub(super) failure: Option<RunFailure>,
    /// The workers that were lost so far, and why.
    pub(super) lost: Vec<(Rank, String)>,
}

/// Where a run begins.
pub(super) struct Start<'a> {
    pub(super) position: Position,
    /// The batches after `position` that are already done.
    pub(super) done_ahead: &'a [u64],
    pub(super) batches_per_epoch: u64,
    pub(super) epochs: u64,
}

impl BatchCoordinator {
    /// Creates the coordinator of a run. `clients` holds the ranks of the clients of the first server; the first
    /// `other_servers` of these clients are servers.
    pub(super) fn new(
        start: &Start<'_>,
        clients: Vec<Rank>,
        other_servers: usize,
        is_synchronous: bool,
    ) -> Self {
        let Start { position, done_ahead, batches_per_epoch, epochs } = *start;
        let workers = clients.len() - other_servers;
        let first = position.epoch * batches_per_epoch + position.step;
        let end = epochs.saturating_mul(batches_per_epoch);
        let mut tickets = Tickets::new(first, end.max(first), workers, done_ahead.iter().copied());
        let next = if is_synchronous { tickets.take(0, false) } else { Assignment::Wait };
        let state = RunState {
            tickets,
            losses: BTreeMap::from([(position.epoch, (position.loss_sum, position.samples))]),
            samples: 0,
            updates: vec![0; workers],
            ends: vec![None; clients.len()],
            next,
            pause_at: end,
            quiet: vec![false; workers],
            applied_in_step: 0,
            last_loss: 0.0,
            failure: None,
            needs_no_client: false,
            publication: None,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            clients,
            other_servers,
            batches_per_epoch,
            is_synchronous,
        }
    }

    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out no more batches.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.tickets.stop();
        if state.next == Assignment::Wait {
            state.next = Assignment::Finished;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Makes `words` available to the clients.
    pub(super) fn publish(&self, words: Vec<u32>) {
        self.lock().publication = Some(words);
        self.changed.notify_all();
    }

    /// Waits until more updates than `updates` have been applied, the run has ended, or `timeout` has passed.
    pub(super) fn wait(&self, updates: u64, timeout: Duration) -> Progress {
        let is_quiet = |state: &mut RunState| {
            let applied: u64 = state.updates.iter().sum();
            applied == updates && !state.tickets.is_finished() && state.failure.is_none()
        };
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_quiet);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let lost = state.ends.iter().zip(&self.clients).skip(self.other_servers).filter_map(
            |(end, &rank)| match end {
                Some(LinkEnd::Lost(problem)) => Some((rank, problem.clone())),
                _ => None,
            },
        );
        Progress {
            batches: state.tickets.done_before(),
            updates: state.updates.iter().sum(),
            last_loss: state.last_loss,
            is_finished: state.tickets.is_finished(),
            failure: state.failure.clone(),
            lost: lost.collect(),
        }
    }

    /// Makes a synchronous run pause when `batches` batches are done, and continues the run if it pauses.
    pub(super) fn continue_until(&self, batches: u64) {
        let mut state = self.lock();
        state.pause_at = batches;
        if self.is_synchronous && state.next == Assignment::Wait {
            state.next = state.tickets.take(0, false);
            state.quiet.fill(false);
        }
        self.changed.notify_all();
    }

    /// Waits until no worker has a push in progress, at most for `timeout`. The run must pause or have ended. Returns a worker
    /// whose push is still in progress.
    pub(super) fn wait_until_quiet(&self, timeout: Duration) -> Option<Rank> {
        let find_busy = |state: &RunState| {
            let workers = state.quiet.iter().zip(&state.ends[self.other_servers..]);
            let mut workers = workers.zip(&self.clients[self.other_servers..]);
            workers.find(|((quiet, end), _)| !**quiet && end.is_none()).map(|(_, &rank)| rank)
        };
        let is_busy = |state: &mut RunState| state.failure.is_none() && find_busy(state).is_some();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_busy);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() { find_busy(&state) } else { None }
    }

    /// Notes that the first server has taken its last snapshot. The loss of a client is no failure from now on.
    pub(super) fn release_clients(&self) {
        self.lock().needs_no_client = true;
    }

    /// Returns the position of the run and the batches after this position that are done. Call this function while the
    /// shard is locked, so that the position fits the parameters.
    pub(super) fn position(&self, steps_total: u64) -> (Position, Vec<u64>) {
        let state = self.lock();
        let batches = state.tickets.done_before();
        let (epoch, step) = (batches / self.batches_per_epoch, batches % self.batches_per_epoch);
        let (loss_sum, samples) = state.losses.get(&epoch).copied().unwrap_or_default();
        let position = Position { epoch, step, steps_total, momentum_start: 0, loss_sum, samples };
        (position, state.tickets.done_ahead())
    }

    /// Returns the mean loss of the samples of an epoch (counted from 0) so far, and forgets all epochs before it.
    pub(super) fn epoch_loss(&self, epoch: u64) -> f64 {
        let mut state = self.lock();
        state.losses = state.losses.split_off(&epoch);
        let (loss, samples) = state.losses.get(&epoch).copied().unwrap_or_default();
        loss / samples.max(1) as f64
    }

    /// Returns the number of samples whose gradients were applied.
    pub(super) fn samples(&self) -> u64 {
        self.lock().samples
    }

    /// Returns the number of applied gradients of each worker.
    pub(super) fn updates(&self) -> Vec<u64> {
        self.lock().updates.clone()
    }

    /// Waits until the links of all clients have ended, at most for `timeout`. Returns the numbers of the clients whose links
    /// have not ended.
    pub(super) fn wait_for_ends(&self, timeout: Duration) -> Vec<usize> {
        let is_open = |state: &mut RunState| state.ends.contains(&None);
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_open);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (0..state.ends.len()).filter(|&client| state.ends[client].is_none()).collect()
    }

    /// Returns the number of the worker among the workers; `None` if the client is a server.
    fn worker(&self, client: usize) -> Option<usize> {
        client.checked_sub(self.other_servers)
    }

    /// Returns what a worker does next. An idle worker waits for a batch that another worker may give back.
    fn assign(&self, worker: usize, is_idle: bool) -> Assignment {
        let until = Instant::now() + ANSWER_MAX;
        let mut state = self.lock();
        if self.is_synchronous {
            if is_idle && state.next == Assignment::Wait {
                state.quiet[worker] = true;
                self.changed.notify_all();
                let is_paused = |state: &mut RunState| state.next == Assignment::Wait;
                let waited = self.changed.wait_timeout_while(state, ANSWER_MAX, is_paused);
                (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            }
            return state.next;
        }
        loop {
            let timeout = until.saturating_duration_since(Instant::now());
            let assignment = state.tickets.take(worker, is_idle && timeout.is_zero());
            if assignment != Assignment::Wait || !is_idle || timeout.is_zero() {
                // A batch that this worker gave back, or the end of the run, may concern others.
                self.changed.notify_all();
                return assignment;
            }
            (state, _) = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the publication. Returns its number of words, if it is available.
    fn await_publication(&self) -> Option<usize> {
        let is_missing = |state: &mut RunState| state.publication.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), ANSWER_MAX, is_missing);
        waited.unwrap_or_else(PoisonError::into_inner).0.publication.as_ref().map(Vec::len)
    }

    fn fail(&self, state: &mut RunState, failure: RunFailure) {
        state.failure.get_or_insert(failure);
        state.tickets.stop();
        state.next = Assignment::Finished;
        self.changed.notify_all();
    }
}

impl Handler for BatchCoordinator {
    fn wants(&self, client: usize, note: &Note) -> bool {
        let batch = WorkRequest::decode(note).batch;
        self.worker(client).is_some_and(|worker| self.lock().tickets.is_open(worker, batch))
    }

    fn pushed(&self, client: usize, note: &Note, outcome: PushOutcome) {
        let Some(worker) = self.worker(client) else { return };
        let request = WorkRequest::decode(note);
        let mut state = self.lock();
        let PushOutcome::Applied { .. } = outcome else {
            state.tickets.give_back(worker);
            return;
        };
        let (loss, samples) = state.losses.entry(request.batch / self.batches_per_epoch).or_default();
        *loss += request.loss;
        *samples = samples.saturating_add(request.samples);
        state.samples = state.samples.saturating_add(request.samples);
        state.updates[worker] += 1;
        state.last_loss = request.loss / request.samples.max(1) as f64;
        state.applied_in_step += 1;
        if request.is_stopping {
            state.tickets.stop();
        }
        if !self.is_synchronous {
            state.tickets.complete(worker);
        } else if state.applied_in_step == state.updates.len() {
            // In a synchronous run, worker 0 stands for all workers.
            state.applied_in_step = 0;
            state.tickets.complete(0);
            let pauses = state.tickets.done_before() == state.pause_at && !state.tickets.is_finished();
            state.next = if pauses { Assignment::Wait } else { state.tickets.take(0, false) };
        }
        self.changed.notify_all();
    }

    fn answer(&self, client: usize, kind: AnswerTo, note: &Note) -> Note {
        let request = WorkRequest::decode(note);
        let worker = self.worker(client);
        if request.is_stopping {
            self.stop();
        }
        if let (Some(worker), true) = (worker, request.awaits_end) {
            self.lock().quiet[worker] = true;
            self.changed.notify_all();
        }
        let Some(worker) = worker.filter(|_| !request.awaits_end) else {
            let reply =
                self.await_publication().map_or(WorkReply::Work(Assignment::Wait), WorkReply::Published);
            return reply.encode();
        };
        if request.has_diverged {
            let failure = RunFailure::Diverged {
                worker: self.clients[client],
                loss: request.loss,
                batch: request.batch,
            };
            self.fail(&mut self.lock(), failure);
        }
        WorkReply::Work(self.assign(worker, kind == AnswerTo::Note)).encode()
    }

    fn publication(&self) -> Option<Vec<u32>> {
        self.lock().publication.clone()
    }

    fn ended(&self, client: usize, end: &LinkEnd) {
        let mut state = self.lock();
        state.ends[client] = Some(end.clone());
        let worker = self.worker(client);
        if let Some(worker) = worker.filter(|_| !self.is_synchronous) {
            state.tickets.give_back(worker);
        }
        if let (LinkEnd::Lost(problem), false) = (end, state.needs_no_client) {
            let (rank, problem) = (self.clients[client], problem.clone());
            let all_ended = state.ends[self.other_servers..].iter().all(Option::is_some);
            match worker {
                None => self.fail(&mut state, RunFailure::ServerLost { server: rank, problem }),
                Some(_) if self.is_synchronous => {
                    self.fail(&mut state, RunFailure::WorkerLost { worker: rank, problem });
                }
                Some(_) if all_ended && !state.tickets.is_finished() => {
                    self.fail(&mut state, RunFailure::AllWorkersLost { worker: rank, problem });
                }
                Some(_) => {}
            }
        }
        self.changed.notify_all();
    }
}
