//! The pump and what became of its operations: everything that one lock guards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Outcome;
use super::journey::Travelling;
use super::local::Task;
use super::tally::Tally;
use crate::engine::{Failure, OpId, Timestamp};
use crate::group::pump::{Finished, Pump, Turn};
use crate::group::{Error, Statistics};
use crate::reduce::Kernels;
use crate::transport::tcp::TcpTransport;

/// How long a failed operation may take to tell the peers why, and to hear what they know.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);

/// The pump and what became of its operations.
pub(super) struct Core {
    pub(super) pump: Pump<TcpTransport>,
    pub(super) state: State,
    /// Operations under way; whether somebody waits for each or it is left to the progress thread.
    pub(super) pending: BTreeSet<OpId>,
    pub(super) outcomes: BTreeMap<OpId, Result<Outcome, Error>>,
    /// Operations whose outcome nobody wants any more.
    pub(super) forgotten: BTreeSet<OpId>,
    pub(super) is_polled: bool,
    /// Threads that wait for something to change and have not been told that it has.
    pub(super) waiters: usize,
    /// How often they have been told.
    pub(super) changes: u64,
    /// What operations leave behind that may be a program's own: dropped by whoever gives up the lock next.
    pub(super) left_over: Vec<Kernels>,
    /// Those of the pending ones that the progress thread is to drive.
    pub(super) unattended: BTreeSet<OpId>,
    pub(super) is_closing: bool,
    pub(super) busy_since: Option<Timestamp>,
    pub(super) statistics: Statistics,
    /// Operations at desks that go on by themselves.
    pub(super) desk_tasks: BTreeMap<OpId, Task>,
    /// Operations by hosts, and which block of which of them each part that is under way belongs to.
    pub(super) journeys: BTreeMap<OpId, Travelling>,
    pub(super) stages: BTreeMap<OpId, (OpId, usize)>,
    /// The job has failed, and everybody has been told: for those who do not want to take the lock to know.
    pub(super) has_failed: Arc<AtomicBool>,
    /// What is done at desks without the lock.
    pub(super) tally: Arc<Tally>,
}

pub(super) enum State {
    Running,
    /// Telling the peers, until then.
    Failing(Timestamp),
    Failed(Error),
}

/// What a look at the pump has come to.
pub(super) enum Step {
    /// Something that others may wait for has happened.
    Progress,
    Busy,
    Blocked,
}

impl Core {
    pub(super) fn new(pump: Pump<TcpTransport>) -> Self {
        Self {
            pump,
            state: State::Running,
            pending: BTreeSet::new(),
            outcomes: BTreeMap::new(),
            forgotten: BTreeSet::new(),
            is_polled: false,
            waiters: 0,
            changes: 0,
            left_over: Vec::new(),
            unattended: BTreeSet::new(),
            is_closing: false,
            busy_since: None,
            statistics: Statistics::default(),
            desk_tasks: BTreeMap::new(),
            journeys: BTreeMap::new(),
            stages: BTreeMap::new(),
            has_failed: Arc::new(AtomicBool::new(false)),
            tally: Arc::default(),
        }
    }

    pub(super) fn turn(&mut self, now: Timestamp) -> Step {
        match &self.state {
            State::Failed(_) => return if self.settle_failed(now) { Step::Progress } else { Step::Blocked },
            State::Failing(deadline) => {
                let is_over = now >= *deadline;
                if !self.pump.notify() && !is_over {
                    return Step::Blocked;
                }
                self.left_over.extend(self.pump.release());
                let error = match self.pump.failure() {
                    Some(Failure { cause, reported_by }) => {
                        Error::Failed { cause: cause.clone(), reported_by: *reported_by }
                    }
                    None => return Step::Blocked,
                };
                self.state = State::Failed(error);
                self.has_failed.store(true, Ordering::Release);
                self.settle_failed(now);
                return Step::Progress;
            }
            State::Running => {}
        }
        let heard = (self.pump.arrivals(), self.pump.alerts());
        let turn = self.pump.turn(now);
        // A message is what a probe waits for, and an alert who sleeps at a desk.
        let mut is_progress = (self.pump.arrivals(), self.pump.alerts()) != heard;
        if !self.desk_tasks.is_empty() {
            is_progress |= self.look_at_desks(now);
            // Peers that sleep and have to see what was posted are told before this rank sleeps itself.
            self.pump.tell();
        }
        while let Some(Finished { operation, memory, envelope, kernels }) = self.pump.take_finished() {
            self.left_over.extend(kernels);
            self.end(operation, now, Outcome { memory, envelope });
            is_progress = true;
        }
        match turn {
            // Of a failure that was found at a desk the pump did not know.
            _ if self.pump.failure().is_some() => {
                self.state = State::Failing(now + NOTIFY_TIMEOUT);
                Step::Busy
            }
            _ if is_progress => Step::Progress,
            Turn::Busy => Step::Busy,
            Turn::Blocked | Turn::Failed(_) => Step::Blocked,
        }
    }

    /// An operation has ended well, or a part of one.
    pub(super) fn end(&mut self, id: OpId, now: Timestamp, outcome: Outcome) {
        let Outcome { memory, envelope } = outcome;
        if let Err(memory) = self.has_come(now, id, memory) {
            self.statistics.operations += 1;
            self.settle(id, now, Ok(Outcome { memory, envelope }));
        }
    }

    /// Ends what is pending after the failure; whether there was anything.
    fn settle_failed(&mut self, now: Timestamp) -> bool {
        let State::Failed(error) = &self.state else { return false };
        let error = error.clone();
        let tasks = std::mem::take(&mut self.desk_tasks);
        self.left_over.extend(tasks.into_values().filter_map(Task::give_up));
        self.give_up_journeys();
        let pending: Vec<OpId> = self.pending.iter().copied().collect();
        for &id in &pending {
            self.settle(id, now, Err(error.clone()));
        }
        !pending.is_empty()
    }

    /// Nobody wants the outcome any more. A receive without a message ends at once.
    pub(super) fn forget(&mut self, id: OpId, now: Timestamp) {
        if self.outcomes.remove(&id).is_none() && self.pending.contains(&id) && !self.cancel(id, now) {
            self.forgotten.insert(id);
        }
    }

    /// Ends a receive that has found no message yet; whether it was one.
    pub(super) fn cancel(&mut self, id: OpId, now: Timestamp) -> bool {
        let is_cancelled = self.pump.cancel(id);
        if is_cancelled {
            self.pending.remove(&id);
            self.unattended.remove(&id);
            self.rest(now);
        }
        is_cancelled
    }

    pub(super) fn settle(&mut self, id: OpId, now: Timestamp, outcome: Result<Outcome, Error>) {
        self.pending.remove(&id);
        self.unattended.remove(&id);
        if !self.forgotten.remove(&id) {
            self.outcomes.insert(id, outcome);
        }
        self.rest(now);
    }

    /// Takes note if nothing is under way any more.
    fn rest(&mut self, now: Timestamp) {
        if self.pending.is_empty()
            && let Some(since) = self.busy_since.take()
        {
            self.statistics.communication += now.saturating_sub(since);
            self.tally.is_counted.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        let failing = match self.state {
            State::Failing(deadline) => Some(deadline),
            _ => None,
        };
        let transport = self.pump.transport().next_deadline();
        failing.into_iter().chain(self.pump.poll_timeout()).chain(transport).min()
    }
}
