//! The core of the driver: the state that one lock guards, which is the link driver and the results of its operations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::core_lock::{DrivenCore, PollProgress};
use super::link_stages::{BlockId, LinkStages};
use super::poll_time::PollTime;
use super::tasks::{OperationOutput, RoundsKey, ShmTask, StagedCollective, Submission, operation_start};
use crate::engine::{Envelope, Failure, NOTIFY_TIMEOUT, OpId, OperationRequest, Timestamp};
use crate::observe::event::{EventNumber, EventStatus};
use crate::observe::recorder::Recorder;
use crate::reduce::{self, Kernels};
use crate::runtime::deferred_drop::{self, Deferred};
use crate::runtime::error::Error;
use crate::runtime::failure_report::FailureReporter;
use crate::runtime::host_rounds::HostRounds;
use crate::runtime::link_driver::LinkDriver;
use crate::runtime::measurements::{ShmCounters, Statistics};
use crate::runtime::memory::Memory;
use crate::schedule::Schedule;
use crate::schedule::hierarchy::{Block, CollectiveStage};
use crate::shm::{RoundsMemory, Segment};
use crate::transport::SocketTransport;
use crate::transport::tcp::TcpTransport;
use crate::types::{Algorithm, Rank, SortedMap, SortedSet};

/// The links go over the sockets `S`, and through queues in memory of the kind `M` between ranks of one host.
pub(crate) struct Core<S = TcpTransport, M = Segment> {
    pub(crate) link_driver: LinkDriver<S, M>,
    /// After a failure of the job: until this time, this rank tells the peers and receives their reports. `None` until the core
    /// has noticed the failure. The engine of the link driver has the failure itself.
    notify_until: Option<Timestamp>,
    pub(crate) active_ids: SortedSet<OpId>,
    /// The results of ended operations that no thread has taken.
    pub(crate) results: SortedMap<OpId, Result<OperationOutput, Error>>,
    /// Active operations whose handles were dropped. Their results are discarded.
    pub(super) dropped_handles: SortedSet<OpId>,
    pub(super) poll_time: PollTime,
    /// The number of attempts to send or receive without an operation, modulo a limit. It also chooses which messages are timed.
    pub(super) direct_messages: u32,
    /// The active operations that the progress thread drives, because no other thread waits for them.
    pub(super) background: SortedSet<OpId>,
    pub(super) busy_since: Option<Timestamp>,
    pub(super) statistics: Statistics,
    /// The active operations in shared memory that the core executes.
    pub(super) shm_tasks: BTreeMap<OpId, ShmTask>,
    pub(crate) rounds: BTreeMap<RoundsKey, Box<HostRounds<M>>>,
    /// They have parts of buffers, so they must be dropped before the owners of the buffers in `staged_collectives`.
    pub(super) link_stages: LinkStages,
    pub(super) staged_collectives: BTreeMap<OpId, StagedCollective>,
    /// For each active stage of such a collective: the collective and the index of its block.
    pub(super) stage_of: BTreeMap<OpId, BlockId>,
    /// Whether the job has failed and the peers have been told. Threads read this flag without the lock.
    pub(super) has_failed: Arc<AtomicBool>,
    /// Statistics of operations in shared memory that run without the lock.
    pub(super) shm_counters: Arc<ShmCounters>,
    pub(super) recorded: BTreeMap<OpId, EventNumber>,
    /// Reports the failure of the job to `ringrun`; `None` if `ringrun` did not start the job.
    failure_reporter: Option<FailureReporter>,
}

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    pub(crate) fn new(link_driver: LinkDriver<S, M>, failure_reporter: Option<FailureReporter>) -> Self {
        Self {
            link_driver,
            notify_until: None,
            active_ids: SortedSet::default(),
            results: SortedMap::default(),
            dropped_handles: SortedSet::default(),
            poll_time: PollTime::default(),
            direct_messages: 0,
            background: SortedSet::default(),
            busy_since: None,
            statistics: Statistics::default(),
            shm_tasks: BTreeMap::new(),
            rounds: BTreeMap::new(),
            staged_collectives: BTreeMap::new(),
            stage_of: BTreeMap::new(),
            link_stages: LinkStages::default(),
            has_failed: Arc::new(AtomicBool::new(false)),
            shm_counters: Arc::default(),
            recorded: BTreeMap::new(),
            failure_reporter,
        }
    }

    pub(crate) fn adapt_polling(&mut self) {
        self.poll_time.is_adaptive = true;
    }

    /// Begins an operation. If `is_awaited` is false, the progress thread drives it. Returns `None` if the job has failed.
    pub(crate) fn begin(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        submission: Submission,
        is_awaited: bool,
    ) -> Option<OpId> {
        let start = || operation_start(&request, submission.direction(), now);
        let event = self.recorder().map(|recorder| recorder.submit(&start()));
        let begun = match submission {
            Submission::Collective(blocks, buffer, encoding)
                if request.contract.algorithm == Algorithm::Hierarchy || encoding.is_some() =>
            {
                self.begin_staged(now, request, (blocks, encoding), buffer)
            }
            Submission::Collective(blocks, buffer, _) => {
                self.begin_single_stage(now, request, blocks, buffer)
            }
            Submission::Send(to, memory) => self.link_driver.send_message(now, request, to, memory),
            Submission::Receive(pattern, memory) => {
                self.link_driver.receive_message(now, request, pattern, memory)
            }
        };
        // If the core could not begin the operation, the job has failed, and the operation in its record is still active.
        let id = begun.ok()?;
        if let (Some(recorder), Some(event)) = (self.recorder(), event) {
            recorder.begin(event, recorder.now());
        }
        self.recorded.extend(event.map(|event| (id, event)));
        self.active_ids.insert(id);
        self.busy_since.get_or_insert(now);
        self.shm_counters.does_core_count.store(true, Ordering::Relaxed);
        if !is_awaited {
            self.background.insert(id);
        }
        Some(id)
    }

    fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.link_driver.operations.meter.recorder()
    }

    fn begin_single_stage(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        mut blocks: Vec<Block>,
        (memory, kernels): (Memory, Option<Kernels>),
    ) -> Result<OpId, Failure> {
        let stage = blocks.pop().and_then(|mut block| block.stages.pop());
        match stage.unwrap_or_else(|| CollectiveStage::OverLinks(Schedule::default())) {
            CollectiveStage::OverLinks(schedule) => {
                let contract_and_site = (request.contract, request.site);
                let number = self.link_driver.assign_number(request.group, contract_and_site)?;
                self.link_driver.begin(now, request, number, schedule, (memory, kernels))
            }
            CollectiveStage::OnHost(memory_number, spec) => {
                let task = self.new_shm_task((request, None), memory_number, (&spec, kernels), memory)?;
                self.begin_shm_task(now, request, task)
            }
            CollectiveStage::Encoded(_) => unreachable!("an exchange of encoded elements has an encoding"),
        }
    }

    /// After a failure: tells the peers, at most until the time `until`. Then fails all active operations.
    fn poll_after_failure(&mut self, now: Timestamp, until: Timestamp) -> PollProgress {
        if let Some(error) = self.error() {
            let has_failed_any = self.fail_active_operations(now, &error);
            return if has_failed_any { PollProgress::Progress } else { PollProgress::Blocked };
        }
        if !self.link_driver.notify_peers() && now < until {
            return PollProgress::Blocked;
        }
        // The cause has been sent. Now the transport knows which hosts do not acknowledge data.
        self.link_driver.report_unacknowledged_links();
        self.link_driver.release();
        let operation = self.link_driver.engine.failed_operation();
        if let (Some(failure), Some(reporter)) = (self.link_driver.engine.failure(), &self.failure_reporter) {
            reporter.report_cause(&failure.cause, operation);
        }
        self.write_flight_record();
        self.has_failed.store(true, Ordering::Release);
        if let Some(error) = self.error() {
            self.fail_active_operations(now, &error);
        }
        PollProgress::Progress
    }

    /// Returns the error of all operations, if the job has failed and the peers have been told.
    pub(crate) fn error(&self) -> Option<Error> {
        self.link_driver.engine.failure().filter(|_| self.has_failed.load(Ordering::Relaxed)).map(Error::from)
    }

    /// Returns whether the core has noticed no failure of the job.
    pub(super) fn is_running(&self) -> bool {
        self.notify_until.is_none()
    }

    /// Writes the last operations of this rank after a failure of the job, if the flight recorder is on.
    fn write_flight_record(&self) {
        let (Some(recorder), Some(failure)) = (self.recorder(), self.link_driver.engine.failure()) else {
            return;
        };
        let mut awaited: BTreeMap<EventNumber, BTreeSet<Rank>> = BTreeMap::new();
        for (id, ranks) in self.link_driver.engine.awaited_ranks() {
            let whole = self.stage_of.get(&id).map_or(id, |&(whole, _)| whole);
            if let Some(&event) = self.recorded.get(&whole) {
                awaited.entry(event).or_default().extend(ranks);
            }
        }
        let awaited: Vec<(EventNumber, Vec<Rank>)> =
            awaited.into_iter().map(|(event, ranks)| (event, ranks.into_iter().collect())).collect();
        recorder.write_failure(&Error::from(failure).to_string(), &awaited);
    }

    pub(super) fn handle_success(
        &mut self,
        id: OpId,
        now: Timestamp,
        (memory, envelope): (Memory, Option<Envelope>),
    ) {
        if let Err(memory) = self.handle_stage_success(now, id, memory) {
            self.statistics.operations += 1;
            self.record_result(id, now, Ok(OperationOutput { memory, envelope, ended: now }));
        }
    }

    fn fail_active_operations(&mut self, now: Timestamp, error: &Error) -> bool {
        self.abandon_shm();
        // The parts of the buffers were dropped before.
        self.stage_of.clear();
        self.link_stages = LinkStages::default();
        self.staged_collectives.clear();
        let active_ids: Vec<OpId> = self.active_ids.iter().copied().collect();
        for &id in &active_ids {
            self.record_result(id, now, Err(error.clone()));
        }
        !active_ids.is_empty()
    }

    /// Discards the result of an operation, because its handle was dropped. Cancels a receive that has not matched a message.
    pub(crate) fn discard_result(&mut self, id: OpId, now: Timestamp) {
        if self.results.remove(&id).is_none() && self.active_ids.contains(&id) && !self.cancel(id, now) {
            self.dropped_handles.insert(id);
        }
    }

    /// Cancels the operation if it is a receive that has not matched a message, and returns true. Otherwise returns false.
    pub(crate) fn cancel(&mut self, id: OpId, now: Timestamp) -> bool {
        let is_cancelled = self.link_driver.cancel(id);
        if is_cancelled {
            self.deactivate(id, now, EventStatus::Cancelled);
        }
        is_cancelled
    }

    /// Stores the result of an operation that has ended, unless its handle was dropped.
    pub(super) fn record_result(&mut self, id: OpId, now: Timestamp, result: Result<OperationOutput, Error>) {
        self.deactivate(id, now, if result.is_ok() { EventStatus::Completed } else { EventStatus::Failed });
        if !self.dropped_handles.remove(&id) {
            self.results.insert(id, result);
        }
    }

    pub(super) fn deactivate(&mut self, id: OpId, now: Timestamp, status: EventStatus) {
        let event = self.recorded.remove(&id);
        if let (Some(recorder), Some(event)) = (self.recorder(), event) {
            recorder.finish(event, status);
        }
        self.active_ids.remove(&id);
        self.background.remove(&id);
        // A caller counts the time of its own operation.
        let is_adopted = |id| self.shm_tasks.get(id).is_some_and(|task| task.spun_round.is_some());
        if self.active_ids.iter().all(is_adopted)
            && let Some(since) = self.busy_since.take()
        {
            self.statistics.communication += now.saturating_sub(since);
            self.shm_counters.does_core_count.store(false, Ordering::Relaxed);
        }
    }
}

impl<S: SocketTransport + 'static, M: RoundsMemory + 'static> DrivenCore for Core<S, M> {
    type OpId = OpId;
    type Deferred = Deferred;

    fn begin_locking() {
        assert!(
            !reduce::is_reducing(),
            "a reduction function must not use groups or handles, and must not drop them"
        );
        debug_assert!(!deferred_drop::holds_lock(), "a thread must not lock two cores, or one core twice");
        deferred_drop::record_lock_taken();
    }

    fn take_deferred(&mut self) -> Self::Deferred {
        deferred_drop::record_lock_released()
    }

    fn has_deferred_drops(&self) -> bool {
        deferred_drop::has_deferred_drops()
    }

    fn poll(&mut self, now: Timestamp) -> PollProgress {
        if let Some(until) = self.notify_until {
            return self.poll_after_failure(now, until);
        }
        let had_failed = self.link_driver.engine.failure().is_some();
        let events_before = self.link_driver.engine.event_count();
        if self.link_driver.engine.poll_timeout().is_some_and(|due| now >= due) {
            self.link_driver.report_unacknowledged_links();
        }
        let can_move_more = self.link_driver.poll(now);
        // A probe waits for a message, and a thread that sleeps in shared memory waits for a wake frame.
        let mut is_progress = self.link_driver.engine.event_count() != events_before;
        if !self.shm_tasks.is_empty() && !had_failed {
            for id in self.shm_tasks.keys().copied().collect::<Vec<_>>() {
                is_progress |= self.poll_shm_operation(id, now);
            }
            // Sleeping peers must learn of the new posts before this rank sleeps itself.
            self.link_driver.send_control_frames();
        }
        while let Some((id, memory, envelope)) = self.link_driver.take_completed() {
            self.handle_success(id, now, (memory, envelope));
            is_progress = true;
        }
        let has_begun = self.poll_link_stages(now);
        // The failure may have been detected in shared memory, after the link driver was polled.
        if self.link_driver.engine.failure().is_some() {
            self.notify_until = Some(now + NOTIFY_TIMEOUT);
            return PollProgress::Progress;
        }
        match can_move_more || has_begun {
            _ if is_progress => PollProgress::Progress,
            true => PollProgress::Busy,
            false => PollProgress::Blocked,
        }
    }

    fn take_wake_bytes(&mut self) -> bool {
        self.link_driver.transport.take_wake_bytes()
    }

    fn prepare_to_sleep(&mut self) -> bool {
        // After a failure this rank waits only for reports of the peers, and these reports come over links.
        self.is_running() && (self.mark_asleep() || self.link_driver.engine.failure().is_some())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let notify_until = self.notify_until.filter(|_| !self.has_failed.load(Ordering::Relaxed));
        let transport_deadline = self.link_driver.transport.sockets.next_deadline();
        notify_until.into_iter().chain(self.link_driver.engine.poll_timeout()).chain(transport_deadline).min()
    }

    fn is_active(&self, id: OpId) -> bool {
        self.active_ids.contains(&id)
    }

    fn background(&mut self) -> &mut SortedSet<OpId> {
        &mut self.background
    }
}
