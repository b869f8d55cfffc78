//! A simulated rank: runs its program on a link driver over the simulated network.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::engine::{DISCONNECT_TIMEOUT, Failure, NOTIFY_TIMEOUT, OpId, Pattern, Timestamp};
use crate::runtime::link_driver::direct::DirectReceive;
use crate::runtime::link_driver::{BufferAndReduction, LinkDriver, PollOutcome};
use crate::runtime::memory::Memory;
use crate::shm::QueueSignals;
use crate::simulation::memory::SimMemory;
use crate::simulation::network::{SimNetwork, SimTransport};
use crate::simulation::program::{Members, SimCall};
use crate::transport::local_links::LinkTransport;
use crate::types::Operation;
use crate::{Rank, WorldSize};

/// The virtual time after which an operation fails.
pub(crate) const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);

/// A rank and its program.
pub(crate) struct SimulatedRank {
    pub(crate) rank: Rank,
    pub(crate) network: Rc<RefCell<SimNetwork>>,
    pub(crate) link_driver: LinkDriver<LinkTransport<SimTransport, SimMemory>>,
    /// The memory of the host; `None` if the rank has no queues.
    pub(crate) host: Option<HostMemory>,
    /// How the rank sleeps. Only a rank with queues sleeps, because the others do nothing before an event.
    pub(crate) sleep: Option<Sleep>,
    pub(crate) random: StdRng,
    pub(crate) program: Vec<SimCall>,
    pub(crate) groups: Vec<Members>,
    /// The index of the next call to begin.
    pub(crate) next_call: usize,
    /// For each operation in progress, the index of its call.
    pub(crate) running: BTreeMap<OpId, usize>,
    /// The largest number of calls that run at the same time.
    pub(crate) running_max: usize,
    /// The number of messages that this rank sent or received without an operation.
    pub(crate) direct_messages: u64,
    /// The time until which the rank computes before its next call.
    pub(crate) busy_until: Timestamp,
    /// Whether to check the results of calls. A network that flips a bit on a link without checksums may change results.
    pub(crate) checks_results: bool,
    pub(crate) state: SimRankState,
}

/// The shared memory of a host, as a rank uses it.
#[derive(Clone)]
pub(crate) struct HostMemory {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) thread: usize,
    pub(crate) signals: Arc<QueueSignals<SimMemory>>,
    /// When the rank begins to send through the queues.
    pub(crate) change_over_at: Timestamp,
}

/// What wakes a rank that sleeps.
pub(crate) struct Sleep {
    at: Option<Timestamp>,
    /// The rank wakes when [`SimNetwork::events_of`] changes.
    events: u64,
}

/// What a rank does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SimRankState {
    Running,
    /// Until the time `until`, the failed rank exchanges the cause of the failure with its peers.
    Failing {
        call: usize,
        until: Timestamp,
    },
    /// Until the time `until`, the rank sends its remaining messages and closes its links.
    Closing {
        outcome: SimEnd,
        until: Timestamp,
    },
    Ended(SimEnd),
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
    /// for at most `compute_max`. Returns whether a rank with queues may have more work at this time.
    pub(crate) fn take_turn(&mut self, now: Timestamp, compute_max: Duration) -> bool {
        let Some(host) = self.host.clone() else {
            self.step(now, compute_max);
            return false;
        };
        host.memory.run_as(host.thread, || self.take_turn_with_queues(now, compute_max, &host))
    }

    fn take_turn_with_queues(&mut self, now: Timestamp, compute_max: Duration, host: &HostMemory) -> bool {
        let events = self.network.borrow().events_of(self.rank);
        if let Some(sleep) = &self.sleep {
            if sleep.events == events && sleep.at.is_none_or(|at| at > now) {
                return false;
            }
            self.sleep = None;
            host.signals.mark_awake();
        }
        if now >= host.change_over_at {
            self.link_driver.transport_mut().change_over();
        }
        self.step(now, compute_max);
        if matches!(self.state, SimRankState::Ended(_)) || self.is_computing(now) {
            return false;
        }
        // A rank sleeps when its sockets have nothing more and its queues have not changed. It may also look again before that.
        let is_quiet = self.network.borrow().events_of(self.rank) == events;
        if !is_quiet || self.random.random_bool(0.2) || !host.signals.mark_asleep_unless_changed() {
            return true;
        }
        let change_over_at = Some(host.change_over_at).filter(|&at| at > now);
        let at = self.next_event(now).into_iter().chain(change_over_at).min();
        self.sleep = Some(Sleep { at, events });
        false
    }

    /// Returns whether the rank computes, so that it reads no messages and accepts no links.
    fn is_computing(&self, now: Timestamp) -> bool {
        self.state == SimRankState::Running && now < self.busy_until && self.running.is_empty()
    }

    fn step(&mut self, now: Timestamp, compute_max: Duration) {
        match &self.state {
            SimRankState::Running => self.run_program(now, compute_max),
            SimRankState::Failing { call, until } => {
                let call = *call;
                if self.link_driver.notify_peers() || now >= *until {
                    self.link_driver.release();
                    let failure = self.link_driver.failure().expect("the link driver has failed").clone();
                    let outcome = SimEnd::Failed { call, failure };
                    self.state = SimRankState::Closing { outcome, until: now + DISCONNECT_TIMEOUT };
                }
            }
            SimRankState::Closing { outcome, until } => {
                let is_done = self.link_driver.disconnect() || now >= *until;
                if is_done {
                    self.state = SimRankState::Ended(outcome.clone());
                }
            }
            SimRankState::Ended(_) => {}
        }
    }

    fn run_program(&mut self, now: Timestamp, compute_max: Duration) {
        if self.is_computing(now) {
            return;
        }
        loop {
            let calls = self.program.len();
            while now >= self.busy_until && self.running.len() < self.running_max && self.next_call < calls {
                // The last barrier begins when all other calls have ended.
                if self.next_call + 1 == calls && !self.running.is_empty() {
                    break;
                }
                if !self.begin_next_call(now) {
                    return self.start_failing(now);
                }
                self.next_call += 1;
            }
            let poll = self.link_driver.poll(now);
            let mut is_progress = false;
            while let Some(finished) = self.link_driver.take_completed() {
                let call = self.running.remove(&finished.operation).expect("the operation has begun");
                self.check_result(self.program[call], finished.memory);
                self.busy_until = now + compute_max.mul_f64(self.random.random_range(0.0..1.0));
                is_progress = true;
            }
            match poll {
                PollOutcome::Failed(_) => return self.start_failing(now),
                _ if self.running.is_empty() && self.next_call == calls => {
                    self.state =
                        SimRankState::Closing { outcome: SimEnd::Success, until: now + DISCONNECT_TIMEOUT };
                    return;
                }
                PollOutcome::Busy => {}
                PollOutcome::Blocked if is_progress && now >= self.busy_until => {}
                PollOutcome::Blocked => return,
            }
        }
    }

    /// Returns the size of a call's group and this rank's rank in the group, or `None` if this rank is no member.
    fn rank_in_group(&self, call: SimCall) -> Option<(WorldSize, Rank)> {
        let members = &self.groups[call.group];
        let rank = members.iter().position(|&member| member == self.rank)?;
        Some((WorldSize::new(members.len() as u32)?, Rank::new(rank as u32)))
    }

    /// Sends or receives a message without an operation if that is possible. Returns whether the call has ended.
    fn try_directly(&mut self, now: Timestamp, call: SimCall, (world, rank): (WorldSize, Rank)) -> bool {
        let to = world.rank_after(call.root, 1);
        if call.operation != Operation::Message || world == WorldSize::ONE || ![call.root, to].contains(&rank)
        {
            return false;
        }
        let request = call.to_begin(OPERATION_TIMEOUT);
        let [from, to] = [call.root, to].map(|rank| self.groups[call.group][rank.index()]);
        if rank == call.root {
            let own = call.initial_buffer(world, rank);
            return self.link_driver.try_send_directly(&request, to, bytemuck::cast_slice(&own));
        }
        let pattern = Pattern { group: call.group as u32, source: Some(from), tag: Some(0) };
        let mut received = vec![0.0; call.count];
        let target = bytemuck::cast_slice_mut(&mut received);
        let mut result = self.link_driver.try_receive_directly(&request, (pattern, from), target, Some(now));
        while matches!(result, DirectReceive::Begun) && self.random.random_bool(0.9) {
            result = self.link_driver.continue_receive(from, target, Some(now));
        }
        match result {
            DirectReceive::Received(envelope) => {
                assert_eq!((envelope.source, envelope.contract.count), (from, call.count as u64));
                self.check_result(call, Memory::owned(received));
                true
            }
            DirectReceive::Begun => {
                self.link_driver.interrupt_receive(from, target);
                false
            }
            DirectReceive::NotYet | DirectReceive::NeedsOperation => false,
        }
    }

    /// Begins the next call, if this rank is a member of the call's group. Returns false if the call fails at once.
    fn begin_next_call(&mut self, now: Timestamp) -> bool {
        let call = self.program[self.next_call];
        let Some((world, rank)) = self.rank_in_group(call) else { return true };
        if self.random.random_bool(0.7) && self.try_directly(now, call, (world, rank)) {
            self.direct_messages += 1;
            return true;
        }
        let begin = call.to_begin(OPERATION_TIMEOUT);
        let member = |rank: Rank| self.groups[call.group][rank.index()];
        let memory = || Memory::owned(call.initial_buffer(world, rank));
        let begun = if call.operation == Operation::Message {
            if world == WorldSize::ONE {
                return true;
            }
            let to = world.rank_after(call.root, 1);
            if rank == call.root {
                self.link_driver.send_message(now, begin, member(to), memory())
            } else if rank == to {
                let source = Some(member(call.root));
                let pattern = Pattern { group: call.group as u32, source, tag: Some(0) };
                self.link_driver.receive_message(now, begin, pattern, Memory::allocated_on_match::<f64>())
            } else {
                return true;
            }
        } else {
            let mut schedule = call.schedule(world, rank);
            schedule.rename_peers(member);
            let buffers =
                BufferAndReduction { memory: memory(), kernels: call.kernels(), divisor: world.get() };
            self.link_driver.begin(now, begin, schedule, buffers)
        };
        begun.is_ok_and(|id| {
            self.running.insert(id, self.next_call);
            true
        })
    }

    fn check_result(&self, call: SimCall, memory: Memory) {
        // A rank that is killed or stopped in the middle of a turn reads wrong bytes until the end of the turn.
        let has_ended =
            self.network.borrow().is_killed(self.rank) || self.network.borrow().is_stalled(self.rank);
        if !self.checks_results || has_ended {
            return;
        }
        let (world, rank) = self.rank_in_group(call).expect("the rank is a member of the group");
        let buffer = memory.into_elements::<f64>();
        assert!(call.is_right_result(world, rank, &buffer), "rank {} {call:?} {buffer:?}", self.rank);
    }

    fn start_failing(&mut self, now: Timestamp) {
        let call = self.running.values().copied().min().unwrap_or(self.next_call);
        self.state = SimRankState::Failing { call, until: now + NOTIFY_TIMEOUT };
        self.link_driver.notify_peers();
    }

    /// Returns the next time at which the rank has work even if no data arrive.
    pub(crate) fn next_event(&self, now: Timestamp) -> Option<Timestamp> {
        let at = match &self.state {
            SimRankState::Running if self.busy_until > now => {
                Some(self.link_driver.poll_timeout().map_or(self.busy_until, |at| at.min(self.busy_until)))
            }
            SimRankState::Running => self.link_driver.poll_timeout(),
            SimRankState::Failing { until, .. } | SimRankState::Closing { until, .. } => Some(*until),
            SimRankState::Ended(_) => None,
        };
        at.filter(|&at| at > now)
    }
}
