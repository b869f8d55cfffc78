//! Operations of ranks that share memory: the caller looks at the board itself, spins for a while, and sleeps where the
//! sockets wake it, for a peer that has posted something says so on its link. So there is one place to wait, at which the
//! end of a peer and the job's failure are heard as well.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use super::core::{Core, State, Step};
use super::tally::Watch;
use super::{Driver, INTERRUPTED, Outcome};
use crate::engine::{Begin, Failure, OpId, Timestamp};
use crate::group::Error;
use crate::group::desk::{Asked, Desk, Errand, Look, Order};
use crate::group::hosts::Place;
use crate::group::lane::reducing;
use crate::group::memory::{Lender, Memory};
use crate::group::profile::Part;
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
        desk: &mut Desk,
        members: &[Rank],
        begin: Begin,
        order: Order,
        mut memory: Lender<'_>,
    ) -> Result<(), Error> {
        if self.shared.has_failed.load(Ordering::Acquire) {
            return Err(self.shared.fail(self.shared.lock()));
        }
        let mut errand = desk.take_on((begin.contract, begin.site), order);
        let mut time = Watch::new(errand.sequence(), memory.bytes().len());
        let mut watch = None;
        let mut sleepers = Vec::new();
        let result = loop {
            let look =
                reducing(|| desk.look(&mut errand, &mut memory, |rank| sleepers.push(members[rank.index()])));
            if !sleepers.is_empty() {
                self.wake(sleepers.drain(..));
            }
            match look {
                Ok(Look::Done) => break Ok(()),
                Ok(Look::Waits) => {}
                Ok(Look::Differs(own, rank, asked)) => {
                    let mut core = self.shared.lock();
                    core.remember(begin.group, desk);
                    core.differ(begin.group, own, (members[rank.index()], asked));
                    break Err(self.shared.fail(core));
                }
                Ok(Look::Broken(rank, what)) => {
                    let mut core = self.shared.lock();
                    core.pump.engine_mut().blame(members[rank.index()], what);
                    break Err(self.shared.fail(core));
                }
                Err(_) => break Err(self.abort("the program's own reduction panicked there")),
            }
            if self
                .shared
                .meter
                .time(Part::Wait, || self.shared.stay_awake(&mut time, || desk.has_news(&errand)))
            {
                continue;
            }
            let slept = self.watch(&mut watch, begin, desk, &errand);
            if let Err(error) = slept.and_then(|id| self.sleep_at(desk, &errand, members, id)) {
                break Err(error);
            }
        };
        if result.is_err() {
            desk.take_back(&errand, memory.bytes());
        }
        if let Some(id) = watch {
            self.shared.lock().pump.engine_mut().unwatch(id);
        }
        self.shared.tally.count(&time, result.is_ok());
        result
    }

    /// Wakes peers that sleep. They are told at once: this thread may not turn the pump again for a while.
    fn wake(&self, peers: impl Iterator<Item = Rank>) {
        let mut core = self.shared.lock();
        for peer in peers {
            core.pump.engine_mut().wake(peer);
        }
        if matches!(core.turn(self.shared.now()), Step::Progress) {
            self.shared.tell_others(&mut core);
        }
        if core.is_polled {
            let _ = self.shared.waker.wake();
        }
    }

    /// Lets the engine know of an operation that takes longer: it has a deadline, and peers that it cannot do without.
    fn watch(
        &self,
        watch: &mut Option<OpId>,
        begin: Begin,
        desk: &Desk,
        errand: &Errand,
    ) -> Result<OpId, Error> {
        if let Some(id) = *watch {
            return Ok(id);
        }
        let mut core = self.shared.lock();
        let now = self.shared.now();
        core.remember(begin.group, desk);
        match core.pump.watch(now, begin, errand.sequence()) {
            Ok(id) => Ok(*watch.insert(id)),
            Err(_) => Err(self.shared.fail(core)),
        }
    }

    /// Sleeps until there is something to be seen at the desk.
    fn sleep_at(&self, desk: &Desk, errand: &Errand, members: &[Rank], id: OpId) -> Result<(), Error> {
        let mut question = self.shared.next_question();
        let mut core = self.shared.lock();
        let slept = loop {
            // Whoever wakes this rank takes the word back that it sleeps, and may not be the last one it waits for.
            desk.board().fall_asleep();
            if desk.has_news(errand) {
                desk.board().wake_up();
                break Ok(());
            }
            // Whoever has left by now, and has not posted, never will.
            let awaited = desk.awaited(errand).map(|rank| members[rank.index()]).collect();
            core.pump.engine_mut().await_ranks(id, awaited);
            if let State::Failed(error) = &core.state {
                break Err(error.clone());
            }
            core = self.shared.drive(core, question);
            if question.is_some_and(|question| self.shared.now() >= question) {
                drop(core);
                if self.shared.is_interrupted() {
                    return Err(self.abort(INTERRUPTED));
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
pub(super) struct Task {
    group: u32,
    desk: Arc<Mutex<Desk>>,
    members: Arc<[Rank]>,
    errand: Errand,
    memory: Memory,
}

impl Task {
    pub(super) fn new(group: u32, (desk, members): Place, errand: Errand, memory: Memory) -> Self {
        Self { group, desk, members, errand, memory }
    }

    /// It has failed, and peers must not be at its buffer any more, whoever has that now. Gives what may be the program's own.
    pub(super) fn give_up(mut self) -> Option<Kernels> {
        lock(&self.desk).take_back(&self.errand, self.memory.lender().bytes());
        self.errand.into_kernels()
    }
}

impl Core {
    /// Takes on an operation at a desk.
    pub(super) fn begin_at_desk(
        &mut self,
        now: Timestamp,
        begin: Begin,
        place: Place,
        order: Order,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        let mut desk = lock(&place.0);
        let errand = desk.take_on((begin.contract, begin.site), order);
        self.remember(begin.group, &desk);
        drop(desk);
        let id = self.pump.watch(now, begin, errand.sequence())?;
        self.desk_tasks.insert(id, Task::new(begin.group, place, errand, memory));
        Ok(id)
    }

    /// For a rank that comes to an operation later and asks for something else.
    fn remember(&mut self, group: u32, desk: &Desk) {
        for Asked { sequence, contract, site, .. } in desk.history() {
            self.pump.engine_mut().remember(group, sequence, (contract, site));
        }
    }

    fn differ(&mut self, group: u32, own: Asked, theirs: (Rank, Option<Contract>)) {
        let place = (group, own.sequence);
        self.pump.engine_mut().disagree(place, (own.contract, own.site), theirs);
    }

    /// Looks at the desks where somebody waits; whether an operation has ended.
    pub(super) fn look_at_desks(&mut self, now: Timestamp) -> bool {
        let ids: Vec<OpId> = self.desk_tasks.keys().copied().collect();
        let mut has_ended = false;
        for id in ids {
            let Some(Task { group, desk, members, errand, memory }) = self.desk_tasks.get_mut(&id) else {
                continue;
            };
            let mut desk = lock(desk);
            if !desk.is_next(errand) {
                continue;
            }
            let pump = &mut self.pump;
            let look = reducing(|| {
                desk.look(errand, &mut memory.lender(), |rank| pump.engine_mut().wake(members[rank.index()]))
            });
            drop(desk);
            match look {
                Ok(Look::Waits) => {}
                Ok(Look::Differs(own, rank, asked)) => {
                    let (group, peer) = (*group, members[rank.index()]);
                    self.differ(group, own, (peer, asked));
                }
                Ok(Look::Broken(rank, what)) => {
                    let peer = members[rank.index()];
                    self.pump.engine_mut().blame(peer, what);
                }
                Ok(Look::Done) => {
                    self.pump.engine_mut().unwatch(id);
                    if let Some(Task { memory, errand, .. }) = self.desk_tasks.remove(&id) {
                        self.left_over.extend(errand.into_kernels());
                        self.end(id, now, Outcome { memory, envelope: None });
                        has_ended = true;
                    }
                }
                Err(_) => {
                    self.pump.abort("the program's own reduction panicked there");
                }
            }
        }
        has_ended
    }

    /// What this rank waits for at desks, if whoever waits for it may stay awake.
    pub(super) fn lookouts(&self) -> Vec<Lookout> {
        if !self.unattended.is_empty() || !matches!(self.state, State::Running) {
            return Vec::new();
        }
        let lookout = |task: &Task| {
            let desk = lock(&task.desk);
            let (round, ranks) = desk.is_next(&task.errand).then(|| desk.wanted(&task.errand))?;
            Some(Lookout { desk: Arc::clone(&task.desk), round, ranks })
        };
        self.desk_tasks.values().filter_map(lookout).collect()
    }

    /// Says at every desk where somebody waits that this rank is about to sleep; whether there is a reason not to.
    pub(super) fn fall_asleep_at_desks(&mut self) -> bool {
        // Once the job has failed, what it hears of that is all that counts.
        if !matches!(self.state, State::Running) {
            return false;
        }
        let mut has_news = false;
        for (&id, Task { desk, members, errand, .. }) in &self.desk_tasks {
            let desk = lock(desk);
            if !desk.is_next(errand) {
                continue;
            }
            self.pump
                .engine_mut()
                .await_ranks(id, desk.awaited(errand).map(|rank| members[rank.index()]).collect());
            desk.board().fall_asleep();
            has_news |= desk.has_news(errand);
        }
        // Whom they wait for may have left.
        has_news || self.pump.failure().is_some()
    }
}

/// Posts that somebody waits for at a desk.
pub(super) struct Lookout {
    desk: Arc<Mutex<Desk>>,
    round: u64,
    /// By their numbers at the desk.
    ranks: Vec<usize>,
}

impl Lookout {
    /// Whether they are there, or the operation is over: then the desk may be another thread's, for as long as that one waits.
    pub(super) fn is_posted(&self) -> bool {
        let desk = match self.desk.try_lock() {
            Ok(desk) => desk,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        self.ranks.iter().all(|&rank| desk.board().has_posted(rank, self.round))
    }
}

/// A panic at a desk is caught where it happens, so what it guards is whole.
pub(super) fn lock(desk: &Mutex<Desk>) -> MutexGuard<'_, Desk> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

impl super::shared::Shared {
    /// Stays awake for a while, until `is_there`; whether it is. Where ranks outnumber processors, the one that is waited for
    /// may need this one.
    fn stay_awake(&self, time: &mut Watch, is_there: impl Fn() -> bool) -> bool {
        if self.has_own_processor {
            for _ in 0..LOOKS_ALONE {
                if is_there() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        // Others may need this processor, whatever was thought at the start.
        time.lasts();
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
