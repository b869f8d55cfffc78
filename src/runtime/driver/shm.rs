//! Operations in shared memory that the core executes when it is polled. A waiting thread looks at the posts of other ranks for a
//! short time, and then sleeps until a socket has data: a peer that posts for a sleeping rank sends a wake frame. So a sleeping
//! thread also notices that a peer has exited or that the job has failed.

use std::mem;
use std::task::Poll;

use super::blocking::{fail_because, record_calls};
use super::core::Core;
use super::tasks::{AdoptedOperation, AwaitedPosts, ShmTask};
use crate::engine::{Failure, OpId, OperationRequest, Timestamp};
use crate::observe::event::{EventNumber, EventStatus};
use crate::reduce::Kernels;
use crate::runtime::host_rounds::HostRounds;
use crate::runtime::memory::Memory;
use crate::schedule::CollectiveSpec;
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;

/// The message of a job that fails because of an error in this library: a group must hand over its rounds before an operation.
const NO_ROUNDS: &str = "a group began an operation without its shared memory";

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    /// Adds an operation to a shared memory, whose rounds the group has handed over. See [`HostRounds::add_operation`].
    pub(super) fn new_shm_task(
        &mut self,
        (request, number): (OperationRequest, Option<u64>),
        memory_number: usize,
        (spec, kernels): (&CollectiveSpec, Option<Kernels>),
        memory: Memory,
    ) -> Result<ShmTask, Failure> {
        let key = (request.group, memory_number);
        let Some(host_rounds) = self.rounds.get_mut(&key) else {
            return Err(self.link_driver.engine.abort(NO_ROUNDS));
        };
        let shm_operation = host_rounds.add_operation((&request, number), spec, (kernels, false));
        // With the record, the engine detects a rank of this host that calls a different operation.
        record_calls(&mut self.link_driver.engine, request.group, host_rounds);
        Ok(ShmTask { key, shm_operation, memory, spun_round: None })
    }

    pub(super) fn begin_shm_task(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        task: ShmTask,
    ) -> Result<OpId, Failure> {
        let sequence = task.shm_operation.sequence();
        let id = self.link_driver.engine.begin_external(now, request, sequence)?;
        self.shm_tasks.insert(id, task);
        Ok(id)
    }

    /// Takes over an operation that its caller has executed, while the caller waits for the posts of other ranks. After a failure
    /// of the job, the operation fails when the core is polled.
    pub(crate) fn adopt(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        (mut host_rounds, shm_operation, memory): AdoptedOperation<M>,
        event: Option<EventNumber>,
    ) -> OpId {
        let engine = &mut self.link_driver.engine;
        record_calls(engine, request.group, &mut host_rounds);
        let begun = engine.begin_external(now, request, shm_operation.sequence());
        let id = begun.unwrap_or_else(|_| engine.new_id());
        engine.set_awaited_ranks(id, host_rounds.awaited_ranks(&shm_operation));
        let key = (request.group, 0);
        let spun_round = Some(host_rounds.awaited_round_and_ranks(&shm_operation).0);
        self.rounds.insert(key, host_rounds);
        self.shm_tasks.insert(id, ShmTask { key, shm_operation, memory, spun_round });
        self.recorded.extend(event.map(|event| (id, event)));
        self.active_ids.insert(id);
        id
    }

    /// Returns an operation that [`Core::adopt`] has taken over to its caller, if the caller can go on: the other ranks have
    /// posted, or the core has executed a round. No other operation may use its rounds.
    pub(crate) fn take_back(&mut self, id: OpId, now: Timestamp) -> Option<AdoptedOperation<M>> {
        let task = self.shm_tasks.get(&id).filter(|_| self.link_driver.engine.failure().is_none())?;
        let host_rounds = self.rounds.get(&task.key)?;
        let (round, _) = host_rounds.awaited_round_and_ranks(&task.shm_operation);
        if task.spun_round == Some(round) && !host_rounds.is_ready(&task.shm_operation) {
            return None;
        }
        let ShmTask { key, shm_operation, memory, .. } = self.shm_tasks.remove(&id)?;
        let host_rounds = self.rounds.remove(&key)?;
        host_rounds.rounds.mark_awake();
        self.link_driver.engine.end_external(id);
        // The record of the operation goes on.
        self.recorded.remove(&id);
        self.deactivate(id, now, EventStatus::Completed);
        Some((host_rounds, shm_operation, memory))
    }

    /// Returns the rounds that a group has handed over, if no operation uses them.
    pub(crate) fn take_rounds(&mut self, group: u32) -> Option<Box<HostRounds<M>>> {
        let key = (group, 0);
        if self.rounds.get(&key)?.is_busy() { None } else { self.rounds.remove(&key) }
    }

    /// Records that a group was dropped. Drops its rounds when no operation uses them any more.
    pub(crate) fn retire_group(&mut self, group: u32) {
        self.link_driver.engine.retire_group(group);
        self.link_stages.retire_group(group);
        self.rounds
            .range_mut((group, 0)..=(group, usize::MAX))
            .for_each(|(_, rounds)| rounds.is_retired = true);
        self.drop_retired_rounds();
    }

    fn drop_retired_rounds(&mut self) {
        self.rounds.retain(|_, rounds| !rounds.is_retired || rounds.is_busy());
    }

    /// After a failure: ends all operations in shared memory, so that peers no longer access their buffers.
    pub(super) fn abandon_shm(&mut self) {
        for ShmTask { key, shm_operation, mut memory, .. } in mem::take(&mut self.shm_tasks).into_values() {
            if let Some(host_rounds) = self.rounds.get_mut(&key) {
                host_rounds.stop_exposing(&shm_operation, &memory.access());
            }
        }
        self.rounds.clear();
    }

    /// Executes an operation as far as possible without waiting, if it is in shared memory. Returns whether it has ended.
    pub(super) fn poll_shm_operation(&mut self, id: OpId, now: Timestamp) -> bool {
        let Self { shm_tasks, rounds, link_driver, .. } = self;
        let Some(ShmTask { key, shm_operation, memory, .. }) = shm_tasks.get_mut(&id) else { return false };
        let Some(host_rounds) = rounds.get_mut(key).filter(|rounds| rounds.is_oldest(shm_operation)) else {
            return false;
        };
        let engine = &mut link_driver.engine;
        match host_rounds.poll(shm_operation, &mut memory.access(), |rank| engine.send_wake_frame(rank)) {
            Ok(Poll::Pending) => return false,
            Ok(Poll::Ready(())) => engine.end_external(id),
            Err(failure) => {
                fail_because(engine, key.0, host_rounds, &failure);
                return false;
            }
        }
        if let Some(ShmTask { memory, .. }) = shm_tasks.remove(&id) {
            self.handle_success(id, now, (memory, None));
        }
        self.drop_retired_rounds();
        true
    }

    /// Returns the posts for which a thread now waits without sleeping. Returns none if the progress thread works.
    pub(super) fn awaited_posts(&self) -> Vec<AwaitedPosts<M>> {
        if !self.background.is_empty() || !self.is_running() {
            return Vec::new();
        }
        let awaited = |task: &ShmTask| {
            let host_rounds = self.rounds.get(&task.key)?;
            let (round, ranks) = host_rounds
                .is_oldest(&task.shm_operation)
                .then(|| host_rounds.awaited_round_and_ranks(&task.shm_operation))
                .filter(|(round, _)| task.spun_round != Some(*round))?;
            Some(AwaitedPosts { posts: host_rounds.rounds.posts().clone(), round, ranks })
        };
        self.shm_tasks.values().filter_map(awaited).collect()
    }

    /// Sets the sleep flag of this rank in every shared memory in which the core waits. Returns true if there is work, so that
    /// the thread must not sleep. Fails the job if an awaited rank has left.
    pub(super) fn mark_asleep(&mut self) -> bool {
        let mut is_ready = false;
        for (&id, ShmTask { key, shm_operation, .. }) in &self.shm_tasks {
            let Some(host_rounds) = self.rounds.get(key) else { continue };
            if !host_rounds.is_oldest(shm_operation) {
                continue;
            }
            // A peer that has left without its post will never post. In this case this call fails the job.
            self.link_driver.engine.set_awaited_ranks(id, host_rounds.awaited_ranks(shm_operation));
            // A peer that wakes this rank clears the sleep flag. The operation may wait for more peers.
            host_rounds.rounds.mark_asleep();
            is_ready |= host_rounds.is_ready(shm_operation);
        }
        is_ready
    }
}
