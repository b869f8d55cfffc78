//! Operations in shared memory. The calling thread polls the shared memory for a short time. Then the thread sleeps until a
//! socket has data: a peer that posts elements for a sleeping rank sends a wake frame to this rank. So a sleeping thread also
//! notices that a peer has exited or that the job has failed.

use std::mem;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use super::Driver;
use super::blocking::{BlockingCollective, FUNCTION_PANICKED, SleepDecision, record_calls, report_mismatch};
use super::core::{Core, PollProgress};
use super::shm_counters::OperationTimer;
use super::tasks::{AwaitedPosts, CoreRounds, OperationOutput, ShmTask};
use super::threads::ThreadedDriver as _;
use crate::engine::{Failure, OpId, OperationRequest, Timestamp};
use crate::runtime::error::Error;
use crate::runtime::host_rounds::{HostRounds, ShmPoll, ShmRequest};
use crate::runtime::link_io::catch_reduction_panic;
use crate::runtime::memory::{BufferAccess, Memory};
use crate::runtime::profile::ProfilePart;
use crate::shm::RoundsMemory;
use crate::transport::local_links::SocketTransport;
use crate::types::Rank;

/// The number of times that a thread polls shared memory before it also yields its processor between the polls. So many polls
/// take a few microseconds.
const SPINS_BEFORE_YIELD: u32 = 500;

impl Driver {
    /// Runs an operation in shared memory, and waits until it is complete. `members` are the world ranks that share
    /// the memory.
    pub(crate) fn run_in_shared_memory(
        &self,
        host_rounds: &mut HostRounds,
        members: &[Rank],
        request: OperationRequest,
        shm_request: ShmRequest,
        mut memory: BufferAccess<'_>,
    ) -> Result<(), Error> {
        if self.shared.has_failed.load(Ordering::Acquire) {
            return Err(self.shared.fail(self.shared.lock()));
        }
        let mut collective = BlockingCollective::new(host_rounds, request, shm_request);
        let mut timer = OperationTimer::new(collective.sequence(), memory.len());
        let result = loop {
            let poll = collective.poll((&mut *host_rounds, members), &mut memory);
            if collective.has_sleeping_peers() {
                self.wake_peers(&mut collective);
            }
            match poll {
                Some(ShmPoll::Done) => break Ok(()),
                Some(ShmPoll::Waits) => {}
                poll => {
                    let mut core = self.shared.lock();
                    collective.fail((&mut *host_rounds, members), &mut core, poll.as_ref());
                    break Err(self.shared.fail(core));
                }
            }
            let is_ready = || collective.is_ready(host_rounds);
            if self.shared.meter.time(ProfilePart::Wait, || self.shared.spin_until(&mut timer, is_ready)) {
                continue;
            }
            if let Err(error) = self.sleep_until_posted(&mut collective, (&mut *host_rounds, members)) {
                break Err(error);
            }
        };
        if result.is_err() {
            collective.stop_exposing(host_rounds, &memory);
        }
        if let Some(id) = collective.engine_id() {
            self.shared.lock().link_driver.engine_mut().end_external(id);
        }
        self.shared.shm_counters.count(&timer, result.is_ok());
        result
    }

    /// Wakes sleeping peers at once, because this thread may not poll the link driver for a while.
    fn wake_peers(&self, collective: &mut BlockingCollective) {
        let mut core = self.shared.lock();
        collective.wake_peers(&mut core);
        if matches!(self.shared.poll(&mut core, self.shared.now()), PollProgress::Progress) {
            core.wake_waiters();
        }
        self.shared.wake_socket_waiter(&core);
    }

    /// Sleeps until the ranks have posted for which the collective waits.
    fn sleep_until_posted(
        &self,
        collective: &mut BlockingCollective,
        (host_rounds, members): (&mut HostRounds, &[Rank]),
    ) -> Result<(), Error> {
        let mut interrupt_check = self.shared.next_interrupt_check(self.shared.now());
        let mut core = self.shared.lock();
        loop {
            match collective.fall_asleep((&mut *host_rounds, members), &mut core, self.shared.now()) {
                SleepDecision::Posted => {
                    self.shared.pass_on_driving(&mut core);
                    return Ok(());
                }
                SleepDecision::Failed => return Err(self.shared.fail(core)),
                SleepDecision::Allowed => {}
            }
            core = self.shared.drive(core, self.shared.now(), interrupt_check);
            if interrupt_check.is_some_and(|interrupt_check| self.shared.now() >= interrupt_check) {
                drop(core);
                if let Some(why) = self.shared.check_interrupt() {
                    return Err(self.abort(why));
                }
                interrupt_check = self.shared.next_interrupt_check(self.shared.now());
                core = self.shared.lock();
            }
        }
    }
}

/// The message of a job that fails because of an error in this library: a group must hand over its rounds before an operation.
const NO_ROUNDS: &str = "a group began an operation without its shared memory";

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    /// Adds an operation to the shared memory with this number. The group must have handed over its rounds.
    pub(super) fn new_shm_task(
        &mut self,
        request: OperationRequest,
        memory_number: usize,
        shm_request: ShmRequest,
        memory: Memory,
    ) -> Result<ShmTask, Failure> {
        let key = (request.group, memory_number);
        let Some(CoreRounds { host_rounds, .. }) = self.rounds.get_mut(&key) else {
            return Err(self.link_driver.abort(NO_ROUNDS));
        };
        let shm_operation = host_rounds.add_operation((request.contract, request.site), shm_request);
        // With the record, the engine detects a rank of this host that calls a different operation.
        record_calls(self.link_driver.engine_mut(), request.group, host_rounds);
        Ok(ShmTask { key, shm_operation, memory })
    }

    /// Begins an operation in shared memory.
    pub(super) fn begin_shm_task(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        task: ShmTask,
    ) -> Result<OpId, Failure> {
        let sequence = task.shm_operation.sequence();
        let id = self.link_driver.engine_mut().begin_external(now, request, sequence)?;
        self.shm_tasks.insert(id, task);
        Ok(id)
    }

    /// Returns the rounds that a group has handed over, if no operation uses them.
    pub(crate) fn take_rounds(&mut self, group: u32) -> Option<Box<HostRounds<M>>> {
        let key = (group, 0);
        if self.rounds.get(&key)?.host_rounds.is_busy() {
            return None;
        }
        self.rounds.remove(&key).map(|rounds| rounds.host_rounds)
    }

    /// Records that a group was dropped. Drops its rounds when no operation uses them any more.
    pub(crate) fn retire_group(&mut self, group: u32) {
        self.link_driver.engine_mut().retire_group(group);
        self.rounds
            .range_mut((group, 0)..=(group, usize::MAX))
            .for_each(|(_, rounds)| rounds.is_retired = true);
        self.drop_retired_rounds();
    }

    fn drop_retired_rounds(&mut self) {
        self.rounds.retain(|_, rounds| !rounds.is_retired || rounds.host_rounds.is_busy());
    }

    /// After a failure: ends all operations in shared memory, so that peers no longer access their buffers.
    pub(super) fn abandon_shm(&mut self) {
        for ShmTask { key, shm_operation, mut memory } in mem::take(&mut self.shm_tasks).into_values() {
            if let Some(CoreRounds { host_rounds, .. }) = self.rounds.get_mut(&key) {
                host_rounds.stop_exposing(&shm_operation, &memory.access());
            }
            self.deferred_kernels.extend(shm_operation.into_kernels());
        }
        self.rounds.clear();
    }

    /// Continues the operations in `shm_tasks`. Returns whether any of them has ended.
    pub(super) fn poll_shm_operations(&mut self, now: Timestamp) -> bool {
        let ids: Vec<OpId> = self.shm_tasks.keys().copied().collect();
        let mut has_ended = false;
        for id in ids {
            let Self { shm_tasks, rounds, link_driver, .. } = self;
            let Some(ShmTask { key, shm_operation, memory }) = shm_tasks.get_mut(&id) else { continue };
            let Some(CoreRounds { host_rounds, members, .. }) = rounds.get_mut(key) else { continue };
            if !host_rounds.is_oldest(shm_operation) {
                continue;
            }
            let engine = link_driver.engine_mut();
            let poll = catch_reduction_panic(|| {
                host_rounds.poll(shm_operation, &mut memory.access(), |rank| {
                    engine.send_wake_frame(members[rank.index()]);
                })
            });
            match poll {
                Ok(ShmPoll::Waits) => {}
                Ok(ShmPoll::Mismatch(own_call, rank, contract)) => {
                    report_mismatch(engine, key.0, own_call, (members[rank.index()], contract));
                }
                Ok(ShmPoll::Invalid(rank, what)) => engine.report_misbehavior(members[rank.index()], what),
                Ok(ShmPoll::Done) => {
                    engine.end_external(id);
                    if let Some(ShmTask { memory, shm_operation, .. }) = self.shm_tasks.remove(&id) {
                        self.deferred_kernels.extend(shm_operation.into_kernels());
                        self.handle_success(id, now, OperationOutput { memory, envelope: None });
                        has_ended = true;
                    }
                }
                Err(_) => {
                    link_driver.abort(FUNCTION_PANICKED);
                }
            }
        }
        if has_ended {
            self.drop_retired_rounds();
        }
        has_ended
    }

    /// Returns the posts in shared memory for which this rank waits. Returns no posts if the progress thread drives operations,
    /// because the progress thread must not poll.
    pub(super) fn awaited_posts(&self) -> Vec<AwaitedPosts<M>> {
        if !self.background.is_empty() || !self.is_running() {
            return Vec::new();
        }
        let awaited = |task: &ShmTask| {
            let CoreRounds { host_rounds, .. } = self.rounds.get(&task.key)?;
            let (round, ranks) = host_rounds
                .is_oldest(&task.shm_operation)
                .then(|| host_rounds.awaited_round_and_ranks(&task.shm_operation))?;
            Some(AwaitedPosts { posts: host_rounds.rounds().posts().clone(), round, ranks })
        };
        self.shm_tasks.values().filter_map(awaited).collect()
    }

    /// Sets the sleep flag of this rank in every shared memory in which the core waits. Returns true if there is work, so that
    /// the thread must not sleep.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        // After a failure this rank waits only for reports of the peers, and these reports come over links.
        if !self.is_running() {
            return false;
        }
        let mut is_ready = false;
        for (&id, ShmTask { key, shm_operation, .. }) in &self.shm_tasks {
            let Some(CoreRounds { host_rounds, members, .. }) = self.rounds.get(key) else { continue };
            if !host_rounds.is_oldest(shm_operation) {
                continue;
            }
            self.link_driver.engine_mut().set_awaited_ranks(
                id,
                host_rounds.awaited_ranks(shm_operation).map(|rank| members[rank.index()]).collect(),
            );
            host_rounds.rounds().mark_asleep();
            is_ready |= host_rounds.is_ready(shm_operation);
        }
        // `set_awaited_ranks` fails the job if an awaited rank has left.
        is_ready || self.link_driver.failure().is_some()
    }
}

impl super::shared::DriverShared {
    /// Calls `is_ready` for a short time until it returns true, and returns whether it has returned true. If there are fewer
    /// processors than ranks, the thread yields from the start, because the awaited rank may need this processor.
    pub(super) fn spin_until(&self, timer: &mut OperationTimer, is_ready: impl Fn() -> bool) -> bool {
        if self.has_own_processor {
            for _ in 0..SPINS_BEFORE_YIELD {
                if is_ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        // Yield from here on even if each rank should have a processor: another process may need this one.
        timer.mark_long();
        let started = Instant::now();
        loop {
            if is_ready() {
                return true;
            }
            thread::yield_now();
            if started.elapsed() >= self.shm_spin_time {
                return false;
            }
        }
    }
}
