//! A collective in shared memory that its caller executes itself, and for which it takes no lock unless it has to sleep.
//!
//! [`BlockingCollective`] is a state machine without clock, lock and threads, so simulations also run it. A caller that waits
//! for other ranks looks at their posts for a short time, and then sleeps until a socket has data: a peer that posts for a
//! sleeping rank sends a wake frame. So a sleeping thread also notices that a peer has exited or that the job has failed.

use std::mem;
use std::ops::DerefMut;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::thread;
use std::time::Instant;

use super::Driver;
use super::core::Core;
use super::core_lock::PollProgress;
use super::shared::DriverShared;
use super::tasks::{BegunShort, SpecAndKernels, operation_start};
use super::threads::ThreadedDriver as _;
use crate::engine::{Engine, OpId, OperationRequest, Timestamp};
use crate::observe::event::{Direction, EventNumber, EventStatus};
use crate::observe::training_thread::{SpanKind, span};
use crate::reduce::Kernels;
use crate::runtime::buffer::BufferAccess;
use crate::runtime::error::Error;
use crate::runtime::host_rounds::operation::ShmOperation;
use crate::runtime::host_rounds::short::{ShortCall, ShortResult};
use crate::runtime::host_rounds::{HostRounds, Patience, ShmCall, ShmFailure};
use crate::runtime::link_io::FUNCTION_PANICKED;
use crate::runtime::measurements::{OperationTimer, ProfilePart};
use crate::schedule::CollectiveSpec;
use crate::shm::{RoundsMemory, pause_between_looks};
use crate::transport::SocketTransport;
use crate::types::Rank;

/// The number of polls, which take a few microseconds, before a thread also yields its processor between the polls.
const SPINS_BEFORE_YIELD: u32 = 1000;
/// The number of yields before a short call goes on as an operation, which also handles failures and deadlines.
const YIELDS_OF_SHORT_CALL: u32 = 16;

pub(crate) struct BlockingCollective<H> {
    pub(crate) host_rounds: H,
    request: OperationRequest,
    shm_operation: ShmOperation,
    /// The sleeping ranks that have to learn of the posts of the last poll. Pass them to [`send_wake_frames`].
    pub(crate) sleeping_peers: Vec<Rank>,
    /// The operation in the engine, which must learn of its end; `None` until the caller falls asleep for the first time.
    pub(crate) engine_id: Option<OpId>,
}

pub(crate) enum SleepDecision {
    /// The other ranks have posted, so the caller must not sleep.
    Posted,
    /// The caller must poll the core, and may sleep if that changes nothing.
    Allowed,
    Failed,
}

impl<M: RoundsMemory, H: DerefMut<Target = HostRounds<M>>> BlockingCollective<H> {
    pub(crate) fn new(
        mut host_rounds: H,
        request: &OperationRequest,
        (spec, kernels): SpecAndKernels<'_>,
        BegunShort { has_posted, sleeping_peers }: BegunShort,
    ) -> Self {
        let shm_operation = host_rounds.add_operation((request, None), spec, (kernels, has_posted));
        Self { host_rounds, request: *request, shm_operation, sleeping_peers, engine_id: None }
    }

    /// Executes the collective as far as possible without waiting. After an error, call [`BlockingCollective::fail`].
    pub(crate) fn poll(&mut self, memory: &mut BufferAccess<'_>) -> Result<Poll<()>, Box<ShmFailure>> {
        let Self { host_rounds, shm_operation, sleeping_peers, .. } = self;
        host_rounds.poll(shm_operation, memory, |rank| sleeping_peers.push(rank))
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.host_rounds.is_ready(&self.shm_operation)
    }

    /// Prepares to sleep until the other ranks have posted. The first call tells the engine of the collective, so that the engine
    /// checks its deadline and the ranks for which it waits.
    pub(crate) fn fall_asleep<S: SocketTransport>(
        &mut self,
        core: &mut Core<S, M>,
        now: Timestamp,
    ) -> SleepDecision {
        let engine = &mut core.link_driver.engine;
        if self.engine_id.is_none() {
            record_calls(engine, self.request.group, &mut self.host_rounds);
            self.engine_id = engine.begin_external(now, self.request, self.shm_operation.sequence()).ok();
        }
        let Some(id) = self.engine_id else { return SleepDecision::Failed };
        // A peer that wakes this rank clears the sleep flag. Set it again, because the operation may wait for more peers.
        self.host_rounds.rounds.mark_asleep();
        if self.is_ready() {
            self.host_rounds.rounds.mark_awake();
            return SleepDecision::Posted;
        }
        // A peer that has left without its post will never post. In this case `set_awaited_ranks` fails the job.
        engine.set_awaited_ranks(id, self.host_rounds.awaited_ranks(&self.shm_operation));
        if core.error().is_some() { SleepDecision::Failed } else { SleepDecision::Allowed }
    }

    pub(crate) fn fail<S: SocketTransport>(&mut self, core: &mut Core<S, M>, failure: &ShmFailure) {
        let engine = &mut core.link_driver.engine;
        fail_because(engine, self.request.group, &mut self.host_rounds, failure);
    }
}

/// Sends wake frames to sleeping peers, after their rounds in the shared memory of `group`. The caller must poll the core now,
/// because it may not do so for a while. If the core then learns of a mismatch, the engine needs the last calls.
pub(crate) fn send_wake_frames<S: SocketTransport, M: RoundsMemory>(
    core: &mut Core<S, M>,
    (group, host_rounds): (u32, &mut HostRounds<M>),
    sleeping_peers: Vec<Rank>,
) {
    let engine = &mut core.link_driver.engine;
    record_calls(engine, group, host_rounds);
    for peer in sleeping_peers {
        engine.send_wake_frame(peer);
    }
}

/// Passes the last calls to the engine, so that the engine detects a rank that calls a different operation.
pub(super) fn record_calls<M: RoundsMemory>(
    engine: &mut Engine,
    group: u32,
    host_rounds: &mut HostRounds<M>,
) {
    for ShmCall { sequence, contract, site } in host_rounds.take_unrecorded() {
        engine.record_external(group, sequence, (contract, site));
    }
}

pub(super) fn fail_because<M: RoundsMemory>(
    engine: &mut Engine,
    group: u32,
    host_rounds: &mut HostRounds<M>,
    failure: &ShmFailure,
) {
    record_calls(engine, group, host_rounds);
    match *failure {
        ShmFailure::Mismatch(ShmCall { sequence, contract, site }, peer, peer_call) => {
            engine.report_mismatch(group, (sequence, (contract, site)), (peer, peer_call));
        }
        ShmFailure::Invalid(peer, what) => engine.report_misbehavior(peer, what),
        ShmFailure::Panicked => {
            engine.abort(FUNCTION_PANICKED);
        }
    }
}

impl Driver {
    /// Runs a short call, and waits until it is complete.
    pub(crate) fn run_short(
        &self,
        host_rounds: &mut HostRounds,
        (call, request): (&ShortCall, &OperationRequest),
        (spec, kernels): (&CollectiveSpec, &Option<Kernels>),
        mut memory: BufferAccess<'_>,
    ) -> Result<(), Error> {
        let (mut has_posted, mut sleeping_peers) = (false, Vec::new());
        // Only operations are recorded and measured, and only they report a failure.
        let is_observed = self.shared.recorder.get().is_some() || self.shared.meter.is_on();
        if !is_observed && !self.shared.has_failed.load(Ordering::Acquire) {
            let timer = self.shared.shm_counters.start_timer(memory.len());
            let patience = if self.shared.has_own_processor {
                Patience::Looks(SPINS_BEFORE_YIELD)
            } else {
                Patience::Yields(YIELDS_OF_SHORT_CALL)
            };
            let wake = |peer| sleeping_peers.push(peer);
            match host_rounds.run_short(call, request.site, &mut memory, (patience, wake)) {
                ShortResult::Complete => {
                    if !sleeping_peers.is_empty() {
                        self.wake_peers((request.group, host_rounds), sleeping_peers);
                    }
                    self.shared.shm_counters.count(&timer, true);
                    return Ok(());
                }
                ShortResult::NotBegun => {}
                ShortResult::Posted => has_posted = true,
            }
        }
        let begun = BegunShort { has_posted, sleeping_peers };
        self.run_in_shared_memory(host_rounds, request, (spec, kernels.clone()), (memory, begun))
    }

    pub(crate) fn run_in_shared_memory(
        &self,
        host_rounds: &mut HostRounds,
        request: &OperationRequest,
        spec_and_kernels: SpecAndKernels<'_>,
        (mut memory, begun): (BufferAccess<'_>, BegunShort),
    ) -> Result<(), Error> {
        if self.shared.has_failed.load(Ordering::Acquire) {
            return Err(self.shared.fail(self.shared.lock()));
        }
        let event = self.shared.recorder.get().map(|recorder| {
            let now = recorder.now();
            let event = recorder.submit(&operation_start(request, Direction::Collective, now));
            recorder.begin(event, now);
            event
        });
        let _span = event.map(|_| span(SpanKind::Wait));
        let mut collective = BlockingCollective::new(host_rounds, request, spec_and_kernels, begun);
        let mut timer = OperationTimer::new(collective.shm_operation.sequence(), memory.len());
        let result = loop {
            let poll = collective.poll(&mut memory);
            let sleeping_peers = mem::take(&mut collective.sleeping_peers);
            if !sleeping_peers.is_empty() {
                self.wake_peers((request.group, collective.host_rounds), sleeping_peers);
            }
            match poll {
                Ok(Poll::Ready(())) => break Ok(()),
                Ok(Poll::Pending) => {}
                Err(failure) => {
                    let mut core = self.shared.lock();
                    collective.fail(&mut core, &failure);
                    break Err(self.shared.fail(core));
                }
            }
            let is_ready = || collective.is_ready();
            if self.shared.meter.time(ProfilePart::Wait, || self.shared.spin_until(&mut timer, is_ready)) {
                continue;
            }
            if let Err(error) = self.sleep_until_posted(&mut collective, event) {
                break Err(error);
            }
        };
        if result.is_err() {
            // The other ranks must not access the buffer any more.
            collective.host_rounds.stop_exposing(&collective.shm_operation, &memory);
        }
        if let Some(id) = collective.engine_id {
            let mut core = self.shared.lock();
            core.link_driver.engine.end_external(id);
            core.recorded.remove(&id);
        }
        if let (Some(recorder), Some(event)) = (self.shared.recorder.get(), event) {
            recorder.finish(event, if result.is_ok() { EventStatus::Completed } else { EventStatus::Failed });
        }
        self.shared.shm_counters.count(&timer, result.is_ok());
        result
    }

    /// Wakes sleeping peers at once, because this thread may not poll the link driver for a while.
    fn wake_peers(&self, group_and_rounds: (u32, &mut HostRounds), sleeping_peers: Vec<Rank>) {
        let mut core = self.shared.lock();
        send_wake_frames(&mut core, group_and_rounds, sleeping_peers);
        if matches!(self.shared.poll(&mut core, self.shared.now()), PollProgress::Progress) {
            core.wake_waiters();
        }
        self.shared.wake_socket_waiter(&core);
    }

    fn sleep_until_posted(
        &self,
        collective: &mut BlockingCollective<&mut HostRounds>,
        event: Option<EventNumber>,
    ) -> Result<(), Error> {
        let mut interrupt_check = self.shared.next_interrupt_check(self.shared.now());
        let mut core = self.shared.lock();
        loop {
            match collective.fall_asleep(&mut core, self.shared.now()) {
                SleepDecision::Posted => {
                    self.shared.pass_on_driving(&mut core);
                    return Ok(());
                }
                SleepDecision::Failed => return Err(self.shared.fail(core)),
                SleepDecision::Allowed => {}
            }
            // The flight recorder names the ranks for which the engine's operation waits.
            core.recorded.extend(collective.engine_id.zip(event));
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

impl DriverShared {
    /// Calls `is_ready` for a short time until it returns true, and returns whether it has returned true. If there are fewer
    /// processors than ranks, the thread yields from the start, because the awaited rank may need this processor.
    pub(super) fn spin_until(&self, timer: &mut OperationTimer, is_ready: impl Fn() -> bool) -> bool {
        if self.has_own_processor {
            for look in 0..SPINS_BEFORE_YIELD {
                if is_ready() {
                    return true;
                }
                pause_between_looks(look);
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
