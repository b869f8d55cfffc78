//! A simulated rank: runs its program on the core of a driver, over the simulated network and in simulated shared memory.

mod calls;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::engine::{DISCONNECT_TIMEOUT, Failure, OpId, Timestamp};
use crate::runtime::buffer::BufferAccess;
use crate::runtime::driver::{Core, DrivenCore as _, PollProgress, fail_because, send_wake_frames};
use crate::runtime::error::Error;
use crate::runtime::host_rounds::HostRounds;
use crate::runtime::host_rounds::operation::ShmOperation;
use crate::runtime::memory::Memory;
use crate::shm::QueueSignals;
use crate::simulation::hosts::SimGroup;
use crate::simulation::memory::SimMemory;
use crate::simulation::network::{SimNetwork, SimTransport};
use crate::simulation::program::SimCall;
use crate::types::HOSTS_GROUP_BIT;
use crate::{Rank, WorldSize};

/// The virtual time after which an operation fails.
pub(crate) const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);

/// A rank and its program.
pub(crate) struct SimulatedRank {
    pub(crate) rank: Rank,
    pub(crate) network: Rc<RefCell<SimNetwork>>,
    pub(crate) core: Core<SimTransport, SimMemory>,
    /// The memory of the host; `None` if the rank shares no memory.
    pub(crate) host: Option<HostMemory>,
    /// How the rank sleeps. Only a rank that shares memory sleeps, because the others do nothing before an event.
    pub(crate) sleep: Option<Sleep>,
    pub(crate) random: StdRng,
    pub(crate) program: Vec<SimCall>,
    pub(crate) groups: Vec<SimGroup>,
    /// The index of the next call to begin.
    pub(crate) next_call: usize,
    /// For each operation in progress, the index of its call.
    pub(crate) running: BTreeMap<OpId, usize>,
    /// The same for operations whose handles were dropped.
    pub(crate) dropped: BTreeMap<OpId, usize>,
    /// The collective that the rank executes itself.
    pub(crate) blocking: Option<BlockingCall>,
    /// The last such collective that the core has adopted.
    pub(crate) adopted: Option<OpId>,
    /// The rounds of groups that have taken them back from the core.
    pub(crate) rounds: BTreeMap<u32, Box<HostRounds<SimMemory>>>,
    /// The groups that were dropped.
    pub(crate) retired: BTreeSet<u32>,
    /// The largest number of calls that run at the same time.
    pub(crate) running_max: usize,
    /// How often this rank did what not all programs do.
    pub(crate) counts: SimCounts,
    /// The time until which the rank computes before its next call.
    pub(crate) busy_until: Timestamp,
    /// Whether to check the results of calls. A network that flips a bit on a link without checksums may change results.
    pub(crate) checks_results: bool,
    pub(crate) state: SimRankState,
}

/// How often ranks did what not all programs do.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct SimCounts {
    /// Messages that were sent or received without an operation.
    pub(crate) direct_messages: u64,
    /// The direct messages that were received.
    pub(crate) direct_receives: u64,
    /// Direct messages of which a part was late.
    pub(crate) divided_messages: u64,
    /// Collectives in shared memory.
    pub(crate) in_shared_memory: u64,
    /// The collectives in shared memory that the rank executed itself.
    pub(crate) blocking: u64,
    /// The short collectives in shared memory that were complete after one look at the posts.
    pub(crate) short: u64,
    /// Hierarchical collectives.
    pub(crate) hierarchical: u64,
    pub(crate) compressed: u64,
}

impl SimCounts {
    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            direct_messages: self.direct_messages + other.direct_messages,
            direct_receives: self.direct_receives + other.direct_receives,
            divided_messages: self.divided_messages + other.divided_messages,
            in_shared_memory: self.in_shared_memory + other.in_shared_memory,
            blocking: self.blocking + other.blocking,
            short: self.short + other.short,
            hierarchical: self.hierarchical + other.hierarchical,
            compressed: self.compressed + other.compressed,
        }
    }
}

/// The shared memory of a host, as a rank uses it.
#[derive(Clone)]
pub(crate) struct HostMemory {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) thread: usize,
    /// The signals of the queues; `None` if the rank has no queues.
    pub(crate) signals: Option<Arc<QueueSignals<SimMemory>>>,
    /// When the rank begins to send through the queues.
    pub(crate) change_over_at: Timestamp,
}

/// What wakes a rank that sleeps.
pub(crate) struct Sleep {
    at: Option<Timestamp>,
    /// The rank wakes when [`SimNetwork::events_of`] changes.
    events: u64,
}

/// A collective in shared memory that the rank executes itself, until it hands the collective over to the core.
pub(crate) struct BlockingCall {
    call: usize,
    host_rounds: Box<HostRounds<SimMemory>>,
    shm_operation: ShmOperation,
    /// The sleeping ranks that have to learn of a post.
    sleeping_peers: Vec<Rank>,
    buffer: Vec<f64>,
    /// Whether the collective has found a problem, which fails the job.
    has_failed: bool,
}

/// What a rank does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SimRankState {
    Running,
    /// Until the time `until`, the rank sends its remaining messages and closes its links.
    Closing {
        outcome: SimEnd,
        until: Timestamp,
    },
    Ended(SimEnd),
}

/// The result of an attempt to send or receive a message without an operation.
enum DirectMessage {
    /// The message has been sent or received.
    Ended,
    /// The message has not arrived.
    NotYet,
    NeedsOperation,
}

/// How a rank has ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SimEnd {
    Success,
    Failed { call: usize, failure: Failure },
    Killed,
}

impl SimulatedRank {
    /// Does the work of the rank at the time `now`, unless the rank sleeps. After each call of its program, the rank computes
    /// for at most `compute_max`. Returns whether a rank that shares memory may have more work at this time.
    pub(crate) fn take_turn(&mut self, now: Timestamp, compute_max: Duration) -> bool {
        let Some(host) = self.host.clone() else {
            self.step(now, compute_max);
            return false;
        };
        host.memory.run_as(host.thread, || self.take_turn_on_host(now, compute_max, &host))
    }

    fn take_turn_on_host(&mut self, now: Timestamp, compute_max: Duration, host: &HostMemory) -> bool {
        let events = self.network.borrow().events_of(self.rank);
        if let Some(sleep) = &self.sleep {
            if sleep.events == events && sleep.at.is_none_or(|at| at > now) {
                return false;
            }
            self.sleep = None;
            if let Some(signals) = &host.signals {
                signals.mark_awake();
            }
        }
        if now >= host.change_over_at {
            self.core.link_driver.transport.change_over();
        }
        if !self.step(now, compute_max) {
            return true;
        }
        if matches!(self.state, SimRankState::Ended(_)) || self.is_computing(now) {
            return false;
        }
        // A rank sleeps when its sockets have nothing more, and its rounds and queues have not changed. It may also look again
        // before that.
        let is_quiet = self.network.borrow().events_of(self.rank) == events;
        let may_sleep = is_quiet
            && !self.random.random_bool(0.2)
            && !self.core.prepare_to_sleep()
            && host.signals.as_ref().is_none_or(|signals| signals.mark_asleep_unless_changed());
        if !may_sleep {
            return true;
        }
        let change_over_at = Some(host.change_over_at).filter(|&at| at > now);
        let at = self.next_event(now).into_iter().chain(change_over_at).min();
        self.sleep = Some(Sleep { at, events });
        false
    }

    /// Returns whether the rank computes, so that it reads no messages and accepts no links.
    fn is_computing(&self, now: Timestamp) -> bool {
        self.state == SimRankState::Running
            && now < self.busy_until
            && self.running.is_empty()
            && self.blocking.is_none()
    }

    /// Does the work of the rank. Returns false if the rank must not sleep, because it polls shared memory.
    fn step(&mut self, now: Timestamp, compute_max: Duration) -> bool {
        match &self.state {
            SimRankState::Running => return self.run_program(now, compute_max),
            SimRankState::Closing { outcome, until } => {
                let is_done = self.core.link_driver.disconnect() || now >= *until;
                if is_done {
                    self.state = SimRankState::Ended(outcome.clone());
                }
            }
            SimRankState::Ended(_) => {}
        }
        true
    }

    /// Runs the program as far as possible. Returns false if the rank must not sleep.
    fn run_program(&mut self, now: Timestamp, compute_max: Duration) -> bool {
        if self.is_computing(now) {
            return true;
        }
        loop {
            self.begin_calls(now);
            if self.is_computing(now) {
                return true;
            }
            self.take_back_blocking_call(now);
            let was_blocking = self.blocking.is_some();
            if !self.continue_blocking_call(now, compute_max) {
                return false;
            }
            let progress = self.core.poll(now);
            let has_ended = self.take_results(now, compute_max) | (was_blocking && self.blocking.is_none());
            if let Some(Error::Failed { cause, reported_by }) = self.core.error() {
                let blocking = self.blocking.as_ref().map(|blocking| blocking.call);
                let running = self.running.values().chain(self.dropped.values()).copied().chain(blocking);
                let call = running.min().unwrap_or(self.next_call);
                self.close(now, SimEnd::Failed { call, failure: Failure { cause, reported_by } });
                return true;
            }
            self.dropped.retain(|id, _| self.core.active_ids.contains(id));
            let is_idle = self.core.active_ids.is_empty() && self.blocking.is_none();
            if self.next_call == self.program.len() && is_idle {
                let has_retired = |key: &(u32, usize)| self.retired.contains(&(key.0 & !HOSTS_GROUP_BIT));
                assert!(!self.core.rounds.keys().any(has_retired), "the rounds of a dropped group stay");
                self.close(now, SimEnd::Success);
                return true;
            }
            match progress {
                PollProgress::Progress | PollProgress::Busy => {}
                PollProgress::Blocked if has_ended && now >= self.busy_until => {}
                PollProgress::Blocked => return true,
            }
        }
    }

    fn close(&mut self, now: Timestamp, outcome: SimEnd) {
        self.state = SimRankState::Closing { outcome, until: now + DISCONNECT_TIMEOUT };
    }

    /// Begins the next calls, unless the job has failed.
    fn begin_calls(&mut self, now: Timestamp) {
        let calls = self.program.len();
        while now >= self.busy_until
            && self.running.len() < self.running_max
            && self.next_call < calls
            && self.blocking.is_none()
            && self.core.link_driver.engine.failure().is_none()
        {
            // The last barrier begins when all other calls have ended.
            if self.next_call + 1 == calls && !self.core.active_ids.is_empty() {
                break;
            }
            if !self.begin_next_call(now) {
                return;
            }
            self.next_call += 1;
            if self.blocking.is_none() {
                self.drop_unused_groups();
            }
        }
    }

    /// Takes the collective that the core has adopted back, if the rank can go on and runs no other call of the group.
    fn take_back_blocking_call(&mut self, now: Timestamp) {
        let Some((id, &call)) = self.adopted.and_then(|id| Some((id, self.running.get(&id)?))) else {
            return;
        };
        let calls_of_group = self
            .running
            .values()
            .chain(self.dropped.values())
            .filter(|&&other| self.program[other].group == self.program[call].group);
        if calls_of_group.count() > 1 || self.blocking.is_some() || self.random.random_bool(0.3) {
            return;
        }
        let Some((host_rounds, shm_operation, memory)) = self.core.take_back(id, now) else { return };
        self.running.remove(&id);
        let buffer = memory.into_owned().expect("the operation had the elements of the call");
        self.blocking = Some(BlockingCall {
            call,
            host_rounds,
            shm_operation,
            sleeping_peers: Vec::new(),
            buffer,
            has_failed: false,
        });
    }

    /// Continues the collective that the rank executes itself. Returns false if the rank polls the collective again before it
    /// does anything else.
    fn continue_blocking_call(&mut self, now: Timestamp, compute_max: Duration) -> bool {
        let Some(mut blocking) = self.blocking.take_if(|blocking| !blocking.has_failed) else { return true };
        let BlockingCall { call, host_rounds, shm_operation, sleeping_peers, buffer, .. } = &mut blocking;
        let call = self.program[*call];
        let group = call.group as u32;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(buffer);
        let wake = |rank| sleeping_peers.push(rank);
        let poll = host_rounds.poll(shm_operation, &mut BufferAccess::from(bytes), wake);
        let sleeping_peers = std::mem::take(sleeping_peers);
        if !sleeping_peers.is_empty() {
            send_wake_frames(&mut self.core, (group, &mut *host_rounds), sleeping_peers);
            self.core.poll(now);
        }
        match poll {
            Ok(Poll::Ready(())) => {
                self.rounds.insert(group, blocking.host_rounds);
                self.check_result(call, Memory::owned(blocking.buffer));
                self.busy_until = now + compute_max.mul_f64(self.random.random_range(0.0..1.0));
            }
            Ok(Poll::Pending) if self.random.random_bool(0.3) => {
                self.blocking = Some(blocking);
                return false;
            }
            Ok(Poll::Pending) => {
                let BlockingCall { host_rounds, shm_operation, buffer, .. } = blocking;
                let operation = (host_rounds, shm_operation, Memory::owned(buffer));
                let id = self.core.adopt(now, call.to_begin(OPERATION_TIMEOUT), operation, None);
                self.running.insert(id, blocking.call);
                self.adopted = Some(id);
            }
            Err(failure) => {
                fail_because(&mut self.core.link_driver.engine, group, host_rounds, &failure);
                self.blocking = Some(BlockingCall { has_failed: true, ..blocking });
            }
        }
        true
    }

    /// Takes the results of operations that have ended successfully. Returns whether any has ended.
    fn take_results(&mut self, now: Timestamp, compute_max: Duration) -> bool {
        let ended: Vec<(OpId, usize)> = self.running.iter().map(|(&id, &call)| (id, call)).collect();
        let mut has_ended = false;
        for (id, call) in ended {
            let Some(Ok(output)) = self.core.results.remove(&id) else { continue };
            self.running.remove(&id);
            self.check_result(self.program[call], output.memory);
            self.busy_until = now + compute_max.mul_f64(self.random.random_range(0.0..1.0));
            has_ended = true;
        }
        has_ended
    }

    /// Returns the size of a call's group and this rank's rank in the group, or `None` if this rank is no member.
    fn rank_in_group(&self, call: SimCall) -> Option<(WorldSize, Rank)> {
        let members = &self.groups[call.group].members;
        let rank = members.iter().position(|&member| member == self.rank)?;
        Some((WorldSize::new(members.len() as u32)?, Rank::new(rank as u32)))
    }

    /// Returns how the rank has ended.
    pub(crate) fn end(&self) -> SimEnd {
        match &self.state {
            SimRankState::Ended(outcome) => outcome.clone(),
            // A rank that a fault has stopped does not end. Count it as killed.
            _ => SimEnd::Killed,
        }
    }

    fn check_result(&self, call: SimCall, memory: Memory) {
        // A rank that is killed or stopped in the middle of a turn reads wrong bytes until the end of the turn.
        let has_ended =
            self.network.borrow().is_killed(self.rank) || self.network.borrow().is_stalled(self.rank);
        if !self.checks_results || has_ended {
            return;
        }
        let (world, rank) = self.rank_in_group(call).expect("the rank is a member of the group");
        let buffer: Vec<f64> = if call.is_compressed {
            let elements = memory.into_owned::<Vec<f32>>().unwrap_or_default();
            elements.into_iter().map(f64::from).collect()
        } else {
            memory.into_owned().unwrap_or_default()
        };
        assert!(call.is_right_result(world, rank, &buffer), "rank {} {call:?} {buffer:?}", self.rank);
    }

    /// Returns the next time at which the rank has work even if no data arrive.
    pub(crate) fn next_event(&self, now: Timestamp) -> Option<Timestamp> {
        let is_later = |at: &Timestamp| *at > now;
        match &self.state {
            SimRankState::Running => {
                // A rank that computes when a deadline passes handles the deadline only when it has computed.
                let deadline = self.core.next_deadline().filter(is_later);
                Some(self.busy_until).filter(is_later).into_iter().chain(deadline).min()
            }
            SimRankState::Closing { until, .. } => Some(*until).filter(is_later),
            SimRankState::Ended(_) => None,
        }
    }
}
