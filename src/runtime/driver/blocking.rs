//! A collective in shared memory that its caller executes itself, and for which it takes no lock unless it has to sleep.
//!
//! This state machine uses no clock, no lock and no thread, so simulations also run it. The caller polls the collective. If the
//! collective waits for other ranks, the caller may look at their posts for a while, and then falls asleep until its sockets have
//! an event.

use super::core::Core;
use crate::engine::{Engine, OpId, OperationRequest, Timestamp};
use crate::runtime::host_rounds::{HostRounds, ShmCall, ShmOperation, ShmPoll, ShmRequest};
use crate::runtime::link_io::catch_reduction_panic;
use crate::runtime::memory::BufferAccess;
use crate::shm::RoundsMemory;
use crate::transport::local_links::SocketTransport;
use crate::types::{Contract, Rank};

/// Why a job fails if a function of the program panics.
pub(super) const FUNCTION_PANICKED: &str = "the program's reduction function panicked";

/// A collective in shared memory that its caller executes itself. Every method gets the same rounds, and the world ranks that
/// share their memory.
pub(crate) struct BlockingCollective {
    request: OperationRequest,
    shm_operation: ShmOperation,
    /// The sleeping ranks that have to learn of the posts of the last poll.
    sleeping_peers: Vec<Rank>,
    /// The identifier of the operation in the engine; `None` until the caller falls asleep for the first time.
    engine_id: Option<OpId>,
}

/// The result of [`BlockingCollective::fall_asleep`].
pub(crate) enum SleepDecision {
    /// The other ranks have posted, so the caller must not sleep.
    Posted,
    /// The caller must poll the core, and may sleep if that changes nothing.
    Allowed,
    /// The job has failed.
    Failed,
}

impl BlockingCollective {
    /// Begins a collective.
    pub(crate) fn new<M: RoundsMemory>(
        host_rounds: &mut HostRounds<M>,
        request: OperationRequest,
        shm_request: ShmRequest,
    ) -> Self {
        let shm_operation = host_rounds.add_operation((request.contract, request.site), shm_request);
        Self { request, shm_operation, sleeping_peers: Vec::new(), engine_id: None }
    }

    /// Returns the number of the operation in the shared memory.
    pub(super) fn sequence(&self) -> u64 {
        self.shm_operation.sequence()
    }

    /// Executes the collective as far as possible without waiting. Returns `None` if a function of the user panics. Then call
    /// [`BlockingCollective::wake_peers`] if there are [`sleeping peers`](Self::has_sleeping_peers).
    pub(crate) fn poll<M: RoundsMemory>(
        &mut self,
        (host_rounds, members): (&mut HostRounds<M>, &[Rank]),
        memory: &mut BufferAccess<'_>,
    ) -> Option<ShmPoll> {
        let Self { shm_operation, sleeping_peers, .. } = self;
        let wake = |rank: Rank| sleeping_peers.push(members[rank.index()]);
        catch_reduction_panic(|| host_rounds.poll(shm_operation, memory, wake)).ok()
    }

    /// Returns whether ranks sleep that have to learn of the posts of the last poll.
    pub(crate) fn has_sleeping_peers(&self) -> bool {
        !self.sleeping_peers.is_empty()
    }

    /// Sends wake frames to the sleeping peers. The caller must poll the core now, because it may not do so for a while.
    pub(crate) fn wake_peers<S: SocketTransport, M: RoundsMemory>(&mut self, core: &mut Core<S, M>) {
        for peer in self.sleeping_peers.drain(..) {
            core.link_driver.engine_mut().send_wake_frame(peer);
        }
    }

    /// Returns whether [`BlockingCollective::poll`] would make progress.
    pub(crate) fn is_ready<M: RoundsMemory>(&self, host_rounds: &HostRounds<M>) -> bool {
        host_rounds.is_ready(&self.shm_operation)
    }

    /// Prepares to sleep until the other ranks have posted. The first call tells the engine of the collective, so that the engine
    /// checks its deadline and the ranks for which it waits.
    pub(crate) fn fall_asleep<S: SocketTransport, M: RoundsMemory>(
        &mut self,
        (host_rounds, members): (&mut HostRounds<M>, &[Rank]),
        core: &mut Core<S, M>,
        now: Timestamp,
    ) -> SleepDecision {
        let engine = core.link_driver.engine_mut();
        if self.engine_id.is_none() {
            record_calls(engine, self.request.group, host_rounds);
            self.engine_id = engine.begin_external(now, self.request, self.sequence()).ok();
        }
        let Some(id) = self.engine_id else { return SleepDecision::Failed };
        // A peer that wakes this rank clears the sleep flag. Set it again, because the operation may wait for more peers.
        host_rounds.rounds().mark_asleep();
        if self.is_ready(host_rounds) {
            host_rounds.rounds().mark_awake();
            return SleepDecision::Posted;
        }
        // A peer that has left without its post will never post. In this case `set_awaited_ranks` fails the job.
        let awaited = host_rounds.awaited_ranks(&self.shm_operation).map(|rank| members[rank.index()]);
        engine.set_awaited_ranks(id, awaited.collect());
        if core.error().is_some() { SleepDecision::Failed } else { SleepDecision::Allowed }
    }

    /// Fails the job for the reason that [`BlockingCollective::poll`] has returned.
    pub(crate) fn fail<S: SocketTransport, M: RoundsMemory>(
        &self,
        (host_rounds, members): (&mut HostRounds<M>, &[Rank]),
        core: &mut Core<S, M>,
        poll: Option<&ShmPoll>,
    ) {
        let engine = core.link_driver.engine_mut();
        match poll {
            Some(&ShmPoll::Mismatch(own_call, rank, contract)) => {
                record_calls(engine, self.request.group, host_rounds);
                report_mismatch(engine, self.request.group, own_call, (members[rank.index()], contract));
            }
            Some(&ShmPoll::Invalid(rank, what)) => engine.report_misbehavior(members[rank.index()], what),
            Some(ShmPoll::Done | ShmPoll::Waits) => {}
            None => {
                engine.abort(FUNCTION_PANICKED);
            }
        }
    }

    /// Makes the other ranks stop accessing the buffer after a failure.
    pub(crate) fn stop_exposing<M: RoundsMemory>(
        &self,
        host_rounds: &mut HostRounds<M>,
        memory: &BufferAccess<'_>,
    ) {
        host_rounds.stop_exposing(&self.shm_operation, memory);
    }

    /// Returns the identifier of the operation in the engine, which must learn of its end.
    pub(crate) fn engine_id(&self) -> Option<OpId> {
        self.engine_id
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

/// Fails the job because a peer called a different operation than this rank.
pub(super) fn report_mismatch(
    engine: &mut Engine,
    group: u32,
    own_call: ShmCall,
    peer_and_contract: (Rank, Option<Contract>),
) {
    let ShmCall { sequence, contract, site } = own_call;
    engine.report_mismatch((group, sequence), (contract, site), peer_and_contract);
}
