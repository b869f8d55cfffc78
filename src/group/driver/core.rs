//! The pump and what became of its operations: everything that one lock guards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::OperationOutput;
use super::hierarchical::ActiveHierarchical;
use super::shm::ShmTask;
use super::shm_counters::ShmCounters;
use crate::engine::{Failure, OpId, Timestamp};
use crate::group::link_driver::{Finished, LinkDriver, PollOutcome};
use crate::group::{Error, Statistics};
use crate::reduce::Kernels;
use crate::transport::tcp::TcpTransport;
use crate::types::Rank;

/// How long a failed operation may take to tell the peers why, and to hear what they know.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);

/// The pump and what became of its operations.
pub(super) struct Core {
    pub(super) link_driver: LinkDriver<TcpTransport>,
    pub(super) state: JobState,
    /// Operations under way; whether somebody waits for each or it is left to the progress thread.
    pub(super) pending: BTreeSet<OpId>,
    pub(super) outcomes: BTreeMap<OpId, Result<OperationOutput, Error>>,
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
    pub(super) shm_tasks: BTreeMap<OpId, ShmTask>,
    /// Operations by hosts, and which block of which of them each part that is under way belongs to.
    pub(super) hierarchical_operations: BTreeMap<OpId, ActiveHierarchical>,
    pub(super) stage_of: BTreeMap<OpId, (OpId, usize)>,
    /// The job has failed, and everybody has been told: for those who do not want to take the lock to know.
    pub(super) has_failed: Arc<AtomicBool>,
    /// What is done at desks without the lock.
    pub(super) shm_counters: Arc<ShmCounters>,
}

pub(super) enum JobState {
    Running,
    /// Telling the peers, until then.
    Failing(Timestamp),
    Failed(Error),
}

/// What a look at the pump has come to.
pub(super) enum PollProgress {
    /// Something that others may wait for has happened.
    Progress,
    Busy,
    Blocked,
}

impl Core {
    pub(super) fn new(link_driver: LinkDriver<TcpTransport>) -> Self {
        Self {
            link_driver,
            state: JobState::Running,
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
            shm_tasks: BTreeMap::new(),
            hierarchical_operations: BTreeMap::new(),
            stage_of: BTreeMap::new(),
            has_failed: Arc::new(AtomicBool::new(false)),
            shm_counters: Arc::default(),
        }
    }

    pub(super) fn poll(&mut self, now: Timestamp) -> PollProgress {
        match &self.state {
            JobState::Failed(_) => {
                return if self.settle_failed(now) { PollProgress::Progress } else { PollProgress::Blocked };
            }
            JobState::Failing(deadline) => {
                let is_over = now >= *deadline;
                if !self.link_driver.notify() && !is_over {
                    return PollProgress::Blocked;
                }
                // The cause has been sent: does each host acknowledge it?
                self.check_links();
                self.left_over.extend(self.link_driver.release());
                let error = match self.link_driver.failure() {
                    Some(Failure { cause, reported_by }) => {
                        Error::Failed { cause: cause.clone(), reported_by: *reported_by }
                    }
                    None => return PollProgress::Blocked,
                };
                self.state = JobState::Failed(error);
                self.has_failed.store(true, Ordering::Release);
                self.settle_failed(now);
                return PollProgress::Progress;
            }
            JobState::Running => {}
        }
        let heard = (self.link_driver.arrivals(), self.link_driver.wake_events());
        if self.link_driver.poll_timeout().is_some_and(|due| now >= due) {
            self.check_links();
        }
        let poll = self.link_driver.poll(now);
        // A message is what a probe waits for, and an alert who sleeps at a desk.
        let mut is_progress = (self.link_driver.arrivals(), self.link_driver.wake_events()) != heard;
        if !self.shm_tasks.is_empty() {
            is_progress |= self.poll_shm_operations(now);
            // Peers that sleep and have to see what was posted are told before this rank sleeps itself.
            self.link_driver.send_control_frames();
        }
        while let Some(Finished { operation, memory, envelope, kernels }) = self.link_driver.take_finished() {
            self.left_over.extend(kernels);
            self.end(operation, now, OperationOutput { memory, envelope });
            is_progress = true;
        }
        match poll {
            // Of a failure that was found at a desk the pump did not know.
            _ if self.link_driver.failure().is_some() => {
                self.state = JobState::Failing(now + NOTIFY_TIMEOUT);
                PollProgress::Busy
            }
            _ if is_progress => PollProgress::Progress,
            PollOutcome::Busy => PollProgress::Busy,
            PollOutcome::Blocked | PollOutcome::Failed(_) => PollProgress::Blocked,
        }
    }

    /// Tells the engine which hosts do not acknowledge data.
    fn check_links(&mut self) {
        let count = self.link_driver.settings().hosts.len() as u32;
        for peer in (0..count).map(Rank::new) {
            if self.link_driver.transport().is_unacknowledged(peer) {
                self.link_driver.engine_mut().report_unacknowledged(peer);
            }
        }
    }

    /// An operation has ended well, or a part of one.
    pub(super) fn end(&mut self, id: OpId, now: Timestamp, outcome: OperationOutput) {
        let OperationOutput { memory, envelope } = outcome;
        if let Err(memory) = self.stage_finished(now, id, memory) {
            self.statistics.operations += 1;
            self.settle(id, now, Ok(OperationOutput { memory, envelope }));
        }
    }

    /// Ends what is pending after the failure; whether there was anything.
    fn settle_failed(&mut self, now: Timestamp) -> bool {
        let JobState::Failed(error) = &self.state else { return false };
        let error = error.clone();
        let tasks = std::mem::take(&mut self.shm_tasks);
        self.left_over.extend(tasks.into_values().filter_map(ShmTask::give_up));
        self.abandon_hierarchical();
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
        let is_cancelled = self.link_driver.cancel(id);
        if is_cancelled {
            self.pending.remove(&id);
            self.unattended.remove(&id);
            self.rest(now);
        }
        is_cancelled
    }

    pub(super) fn settle(&mut self, id: OpId, now: Timestamp, outcome: Result<OperationOutput, Error>) {
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
            self.shm_counters.is_counted.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        let failing = match self.state {
            JobState::Failing(deadline) => Some(deadline),
            _ => None,
        };
        let transport = self.link_driver.transport().next_deadline();
        failing.into_iter().chain(self.link_driver.poll_timeout()).chain(transport).min()
    }
}
