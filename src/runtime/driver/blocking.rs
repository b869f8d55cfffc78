//! Collectives in shared memory that their callers execute, without a lock. A caller that waits for other ranks looks at their
//! posts for a short time. Then the core has the collective until the others have posted, and the caller sleeps.

use std::mem;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::thread;
use std::time::Instant;

use super::Driver;
use super::core::Core;
use super::core_lock::PollProgress;
use super::shared::DriverShared;
use super::tasks::{AdoptedOperation, BegunShort, operation_start};
use super::threads::ThreadedDriver as _;
use crate::engine::{Engine, OperationRequest};
use crate::observe::event::{Direction, EventNumber, EventStatus};
use crate::observe::training_thread::{SpanKind, span};
use crate::reduce::Kernels;
use crate::runtime::buffer::BufferAccess;
use crate::runtime::error::Error;
use crate::runtime::host_rounds::short::{ShortCall, ShortResult};
use crate::runtime::host_rounds::{HostRounds, Patience, ShmCall, ShmFailure};
use crate::runtime::link_io::FUNCTION_PANICKED;
use crate::runtime::measurements::{OperationTimer, ProfilePart, SHORT_BYTES};
use crate::runtime::memory;
use crate::schedule::CollectiveSpec;
use crate::shm::{RoundsMemory, Segment, pause_between_looks};
use crate::transport::SocketTransport;
use crate::types::Rank;

/// The number of polls, which take 10 to 25 us, before a thread also yields its processor between the polls.
const SPINS_BEFORE_YIELD: u32 = 4000;
/// The number of yields before a short call goes on as an operation, which also handles failures and deadlines.
const YIELDS_OF_SHORT_CALL: u32 = 16;

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

pub(crate) fn fail_because<M: RoundsMemory>(
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
    /// Runs a short call, and waits until it is complete. If anything is unusual, returns what it has done: the caller has to
    /// call [`Driver::run_in_shared_memory`].
    pub(crate) fn run_short(
        &self,
        host_rounds: &mut HostRounds,
        (call, request): (&ShortCall, &OperationRequest),
        memory: &mut BufferAccess<'_>,
    ) -> Result<(), BegunShort> {
        let mut begun = BegunShort::default();
        // Only operations are recorded and measured, and only they report a failure.
        let is_observed = self.shared.meter.recorder().is_some() || self.shared.meter.is_on();
        if is_observed || self.shared.has_failed.load(Ordering::Acquire) {
            return Err(begun);
        }
        let timer = self.shared.shm_counters.start_timer(memory.len());
        let yields = !self.shared.has_own_processor;
        let patience =
            Patience { looks: if yields { YIELDS_OF_SHORT_CALL } else { SPINS_BEFORE_YIELD }, yields };
        let wake = |peer| begun.sleeping_peers.push(peer);
        match host_rounds.run_short(call, request.site, memory, (patience, wake)) {
            ShortResult::Complete => {
                if !begun.sleeping_peers.is_empty() {
                    self.wake_peers((request.group, host_rounds), begun.sleeping_peers);
                }
                self.shared.shm_counters.count(&timer, true);
                return Ok(());
            }
            ShortResult::NotBegun => {}
            ShortResult::Posted => begun.has_posted = true,
        }
        Err(begun)
    }

    /// Runs a collective, and waits until it is complete. Returns its rounds.
    pub(crate) fn run_in_shared_memory(
        &self,
        mut host_rounds: Box<HostRounds>,
        mut request: OperationRequest,
        (spec, kernels): (&CollectiveSpec, Option<Kernels>),
        (memory, begun): (BufferAccess<'_>, BegunShort),
    ) -> Result<Option<Box<HostRounds>>, Error> {
        let shared = &self.shared;
        if shared.has_failed.load(Ordering::Acquire) {
            return Err(shared.fail(shared.lock()));
        }
        let event = shared.meter.recorder().map(|recorder| {
            let now = recorder.now();
            let event = recorder.submit(&operation_start(&request, Direction::Collective, now));
            recorder.begin(event, now);
            event
        });
        let _span = event.map(|_| span(SpanKind::Wait));
        let BegunShort { has_posted, mut sleeping_peers } = begun;
        let mut shm_operation = host_rounds.add_operation((&request, None), spec, (kernels, has_posted));
        let mut timer = OperationTimer::new(shm_operation.sequence(), memory.len(), SHORT_BYTES);
        let mut has_core_ended = false;
        let result = memory::lend(memory, |mut memory| {
            loop {
                let wake = |rank| sleeping_peers.push(rank);
                let poll = host_rounds.poll(&mut shm_operation, &mut memory.access(), wake);
                if !sleeping_peers.is_empty() {
                    self.wake_peers((request.group, &mut host_rounds), mem::take(&mut sleeping_peers));
                }
                match poll {
                    Ok(Poll::Ready(())) => break Ok(Some(host_rounds)),
                    Ok(Poll::Pending) => {}
                    Err(failure) => {
                        let mut core = shared.lock();
                        fail_because(&mut core.link_driver.engine, request.group, &mut host_rounds, &failure);
                        let error = shared.fail(core);
                        // The other ranks must not access the buffer any more.
                        host_rounds.stop_exposing(&shm_operation, &memory.access());
                        break Err(error);
                    }
                }
                let is_ready = || host_rounds.is_ready(&shm_operation);
                if shared.meter.time(ProfilePart::Wait, || shared.spin_until(&mut timer, is_ready)) {
                    continue;
                }
                match self.wait_for_posts(&mut request, (host_rounds, shm_operation, memory), event) {
                    Ok(Some(adopted)) => (host_rounds, shm_operation, memory) = adopted,
                    ended => {
                        has_core_ended = true;
                        break ended.map(|_| self.core().take_rounds(request.group));
                    }
                }
            }
        });
        if has_core_ended {
            shared.shm_counters.count_time(&timer);
            return result;
        }
        if let (Some(recorder), Some(event)) = (shared.meter.recorder(), event) {
            recorder.finish(event, if result.is_ok() { EventStatus::Completed } else { EventStatus::Failed });
        }
        shared.shm_counters.count(&timer, result.is_ok());
        result
    }

    /// Lets the core have an operation until the other ranks have posted. Returns `None` if the core has ended the operation.
    fn wait_for_posts(
        &self,
        request: &mut OperationRequest,
        operation: AdoptedOperation<Segment>,
        event: Option<EventNumber>,
    ) -> Result<Option<AdoptedOperation<Segment>>, Error> {
        let (mut core, now) = (self.shared.lock(), self.shared.now());
        *request = request.begun(now);
        let id = core.adopt(now, *request, operation, event);
        let find = |core: &mut Core| match core.take_back(id, self.shared.now()) {
            Some(operation) => Some(Ok(Some(operation))),
            None => Some(core.results.remove(&id)?.map(|_| None)),
        };
        let found = self.wait_with_interrupts(core, now, |core, _, until| {
            self.shared.drive_until(core, &[], until, find).2
        });
        found.unwrap_or(Err(Error::Taken))
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
