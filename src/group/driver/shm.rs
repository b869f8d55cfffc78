//! Operations of ranks that share memory: the caller looks at the board itself, spins for a while, and sleeps where the
//! sockets wake it, for a peer that has posted something says so on its link. So there is one place to wait, at which the
//! end of a peer and the job's failure are heard as well.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use super::core::{Core, JobState, PollProgress};
use super::shm_counters::OperationTimer;
use super::{Driver, OperationOutput};
use crate::engine::{Begin, Failure, OpId, Timestamp};
use crate::group::Error;
use crate::group::hosts::HostExecutor;
use crate::group::link_io::catch_reduction_panic;
use crate::group::memory::{BufferAccess, Memory};
use crate::group::profile::ProfilePart;
use crate::group::shm_executor::{ShmContract, ShmExecutor, ShmOperation, ShmPoll, ShmRequest};
use crate::reduce::Kernels;
use crate::types::{Contract, Rank};

/// How long a thread looks at its desk before it falls asleep: longer than others usually need for a round.
pub(super) const PATIENCE: Duration = Duration::from_micros(200);
/// How often a thread looks, a few microseconds in all, before it lets others have its processor between looks.
const LOOKS_ALONE: u32 = 500;

impl Driver {
    /// Runs an operation at a desk to its end. `members` are the ranks of the job that sit at it.
    pub(in crate::group) fn run_at_desk(
        &self,
        shm_executor: &mut ShmExecutor,
        members: &[Rank],
        begin: Begin,
        shm_request: ShmRequest,
        mut memory: BufferAccess<'_>,
    ) -> Result<(), Error> {
        if self.shared.has_failed.load(Ordering::Acquire) {
            return Err(self.shared.fail(self.shared.lock()));
        }
        let mut shm_operation = shm_executor.take_on((begin.contract, begin.site), shm_request);
        let mut time = OperationTimer::new(shm_operation.sequence(), memory.len());
        let mut external = None;
        let mut sleepers = Vec::new();
        let result = loop {
            let poll = catch_reduction_panic(|| {
                shm_executor
                    .poll(&mut shm_operation, &mut memory, |rank| sleepers.push(members[rank.index()]))
            });
            if !sleepers.is_empty() {
                self.wake(sleepers.drain(..));
            }
            match poll {
                Ok(ShmPoll::Done) => break Ok(()),
                Ok(ShmPoll::Waits) => {}
                Ok(ShmPoll::Differs(own, rank, asked)) => {
                    let mut core = self.shared.lock();
                    core.remember(begin.group, shm_executor);
                    core.differ(begin.group, own, (members[rank.index()], asked));
                    break Err(self.shared.fail(core));
                }
                Ok(ShmPoll::Broken(rank, what)) => {
                    let mut core = self.shared.lock();
                    core.link_driver.engine_mut().report_misbehavior(members[rank.index()], what);
                    break Err(self.shared.fail(core));
                }
                Err(_) => break Err(self.abort("the program's reduction function panicked")),
            }
            if self.shared.meter.time(ProfilePart::Wait, || {
                self.shared.stay_awake(&mut time, || shm_executor.is_ready(&shm_operation))
            }) {
                continue;
            }
            let slept = self.register_waiting(&mut external, begin, shm_executor, &shm_operation);
            if let Err(error) =
                slept.and_then(|id| self.sleep_until_posted(shm_executor, &shm_operation, members, id))
            {
                break Err(error);
            }
        };
        if result.is_err() {
            shm_executor.stop_exposing(&shm_operation, &memory);
        }
        if let Some(id) = external {
            self.shared.lock().link_driver.engine_mut().end_external(id);
        }
        self.shared.shm_counters.count(&time, result.is_ok());
        result
    }

    /// Wakes peers that sleep. They are told at once: this thread may not turn the pump again for a while.
    fn wake(&self, peers: impl Iterator<Item = Rank>) {
        let mut core = self.shared.lock();
        for peer in peers {
            core.link_driver.engine_mut().wake(peer);
        }
        if matches!(core.poll(self.shared.now()), PollProgress::Progress) {
            self.shared.tell_others(&mut core);
        }
        if core.is_polled {
            let _ = self.shared.waker.wake();
        }
    }

    /// Lets the engine know of an operation that takes longer: it has a deadline, and peers that it cannot do without.
    fn register_waiting(
        &self,
        external: &mut Option<OpId>,
        begin: Begin,
        shm_executor: &ShmExecutor,
        shm_operation: &ShmOperation,
    ) -> Result<OpId, Error> {
        if let Some(id) = *external {
            return Ok(id);
        }
        let mut core = self.shared.lock();
        let now = self.shared.now();
        core.remember(begin.group, shm_executor);
        match core.link_driver.begin_external(now, begin, shm_operation.sequence()) {
            Ok(id) => Ok(*external.insert(id)),
            Err(_) => Err(self.shared.fail(core)),
        }
    }

    /// Sleeps until there is something to be seen at the desk.
    fn sleep_until_posted(
        &self,
        shm_executor: &ShmExecutor,
        shm_operation: &ShmOperation,
        members: &[Rank],
        id: OpId,
    ) -> Result<(), Error> {
        let mut question = self.shared.next_question();
        let mut core = self.shared.lock();
        let slept = loop {
            // Whoever wakes this rank takes the word back that it sleeps, and may not be the last one it waits for.
            shm_executor.rounds().fall_asleep();
            if shm_executor.is_ready(shm_operation) {
                shm_executor.rounds().wake_up();
                break Ok(());
            }
            // Whoever has left by now, and has not posted, never will.
            let awaited = shm_executor.awaited(shm_operation).map(|rank| members[rank.index()]).collect();
            core.link_driver.engine_mut().await_ranks(id, awaited);
            if let JobState::Failed(error) = &core.state {
                break Err(error.clone());
            }
            core = self.shared.drive(core, question);
            if question.is_some_and(|question| self.shared.now() >= question) {
                drop(core);
                if let Some(why) = self.shared.interruption() {
                    return Err(self.abort(why));
                }
                question = self.shared.next_question();
                core = self.shared.lock();
            }
        };
        self.shared.hand_over(&mut core);
        slept
    }
}

/// An operation at a desk that goes on by itself, or that has to wait for such.
pub(super) struct ShmTask {
    group: u32,
    shm_executor: Arc<Mutex<ShmExecutor>>,
    members: Arc<[Rank]>,
    shm_operation: ShmOperation,
    memory: Memory,
}

impl ShmTask {
    pub(super) fn new(
        group: u32,
        (shm_executor, members): HostExecutor,
        shm_operation: ShmOperation,
        memory: Memory,
    ) -> Self {
        Self { group, shm_executor, members, shm_operation, memory }
    }

    /// It has failed, and peers must not be at its buffer any more, whoever has that now. Gives what may be the program's own.
    pub(super) fn give_up(mut self) -> Option<Kernels> {
        lock(&self.shm_executor).stop_exposing(&self.shm_operation, &self.memory.access());
        self.shm_operation.into_kernels()
    }
}

impl Core {
    /// Takes on an operation at a desk.
    pub(super) fn begin_shm(
        &mut self,
        now: Timestamp,
        begin: Begin,
        place: HostExecutor,
        shm_request: ShmRequest,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        let mut shm_executor = lock(&place.0);
        let shm_operation = shm_executor.take_on((begin.contract, begin.site), shm_request);
        self.remember(begin.group, &shm_executor);
        drop(shm_executor);
        let id = self.link_driver.begin_external(now, begin, shm_operation.sequence())?;
        self.shm_tasks.insert(id, ShmTask::new(begin.group, place, shm_operation, memory));
        Ok(id)
    }

    /// For a rank that comes to an operation later and asks for something else.
    fn remember(&mut self, group: u32, shm_executor: &ShmExecutor) {
        for ShmContract { sequence, contract, site, .. } in shm_executor.history() {
            self.link_driver.engine_mut().record_external(group, sequence, (contract, site));
        }
    }

    fn differ(&mut self, group: u32, own: ShmContract, theirs: (Rank, Option<Contract>)) {
        let place = (group, own.sequence);
        self.link_driver.engine_mut().report_mismatch(place, (own.contract, own.site), theirs);
    }

    /// Looks at the desks where somebody waits; whether an operation has ended.
    pub(super) fn poll_shm_operations(&mut self, now: Timestamp) -> bool {
        let ids: Vec<OpId> = self.shm_tasks.keys().copied().collect();
        let mut has_ended = false;
        for id in ids {
            let Some(ShmTask { group, shm_executor, members, shm_operation, memory }) =
                self.shm_tasks.get_mut(&id)
            else {
                continue;
            };
            let mut shm_executor = lock(shm_executor);
            if !shm_executor.is_next(shm_operation) {
                continue;
            }
            let link_driver = &mut self.link_driver;
            let poll = catch_reduction_panic(|| {
                shm_executor.poll(shm_operation, &mut memory.access(), |rank| {
                    link_driver.engine_mut().wake(members[rank.index()]);
                })
            });
            drop(shm_executor);
            match poll {
                Ok(ShmPoll::Waits) => {}
                Ok(ShmPoll::Differs(own, rank, asked)) => {
                    let (group, peer) = (*group, members[rank.index()]);
                    self.differ(group, own, (peer, asked));
                }
                Ok(ShmPoll::Broken(rank, what)) => {
                    let peer = members[rank.index()];
                    self.link_driver.engine_mut().report_misbehavior(peer, what);
                }
                Ok(ShmPoll::Done) => {
                    self.link_driver.engine_mut().end_external(id);
                    if let Some(ShmTask { memory, shm_operation, .. }) = self.shm_tasks.remove(&id) {
                        self.left_over.extend(shm_operation.into_kernels());
                        self.end(id, now, OperationOutput { memory, envelope: None });
                        has_ended = true;
                    }
                }
                Err(_) => {
                    self.link_driver.abort("the program's reduction function panicked");
                }
            }
        }
        has_ended
    }

    /// What this rank waits for at desks, if whoever waits for it may stay awake.
    pub(super) fn awaited_posts(&self) -> Vec<AwaitedPosts> {
        if !self.unattended.is_empty() || !matches!(self.state, JobState::Running) {
            return Vec::new();
        }
        let lookout = |task: &ShmTask| {
            let shm_executor = lock(&task.shm_executor);
            let (round, ranks) = shm_executor
                .is_next(&task.shm_operation)
                .then(|| shm_executor.wanted(&task.shm_operation))?;
            Some(AwaitedPosts { shm_executor: Arc::clone(&task.shm_executor), round, ranks })
        };
        self.shm_tasks.values().filter_map(lookout).collect()
    }

    /// Says at every desk where somebody waits that this rank is about to sleep; whether there is a reason not to.
    pub(super) fn prepare_to_sleep(&mut self) -> bool {
        // Once the job has failed, what it hears of that is all that counts.
        if !matches!(self.state, JobState::Running) {
            return false;
        }
        let mut is_ready = false;
        for (&id, ShmTask { shm_executor, members, shm_operation, .. }) in &self.shm_tasks {
            let shm_executor = lock(shm_executor);
            if !shm_executor.is_next(shm_operation) {
                continue;
            }
            self.link_driver.engine_mut().await_ranks(
                id,
                shm_executor.awaited(shm_operation).map(|rank| members[rank.index()]).collect(),
            );
            shm_executor.rounds().fall_asleep();
            is_ready |= shm_executor.is_ready(shm_operation);
        }
        // Whom they wait for may have left.
        is_ready || self.link_driver.failure().is_some()
    }
}

/// Posts that somebody waits for at a desk.
pub(super) struct AwaitedPosts {
    shm_executor: Arc<Mutex<ShmExecutor>>,
    round: u64,
    /// By their numbers at the desk.
    ranks: Vec<usize>,
}

impl AwaitedPosts {
    /// Whether they are there, or the operation is over: then the desk may be another thread's, for as long as that one waits.
    pub(super) fn is_posted(&self) -> bool {
        let shm_executor = match self.shm_executor.try_lock() {
            Ok(shm_executor) => shm_executor,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        self.ranks.iter().all(|&rank| shm_executor.rounds().has_posted(rank, self.round))
    }
}

/// A panic at a desk is caught where it happens, so what it guards is whole.
pub(super) fn lock(shm_executor: &Mutex<ShmExecutor>) -> MutexGuard<'_, ShmExecutor> {
    shm_executor.lock().unwrap_or_else(PoisonError::into_inner)
}

impl super::shared::DriverShared {
    /// Stays awake for a while, until `is_there`; whether it is. Where ranks outnumber processors, the one that is waited for
    /// may need this one.
    fn stay_awake(&self, time: &mut OperationTimer, is_there: impl Fn() -> bool) -> bool {
        if self.has_own_processor {
            for _ in 0..LOOKS_ALONE {
                if is_there() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        // Others may need this processor, whatever was thought at the start.
        time.mark_long();
        let started = Instant::now();
        loop {
            if is_there() {
                return true;
            }
            thread::yield_now();
            if started.elapsed() >= PATIENCE {
                return false;
            }
        }
    }
}
