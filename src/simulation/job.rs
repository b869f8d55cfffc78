//! Runs the ranks of a job in turns, in virtual time. Between two accesses of a rank to shared memory, other ranks may take
//! turns, and the rank may be killed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::Rank;
use crate::simulation::memory::SimMemory;
use crate::simulation::network::SimNetwork;
use crate::simulation::rank::{SimEnd, SimRankState, SimulatedRank};

/// If the ranks have more turns at one moment of virtual time, a rank that can do nothing does not sleep.
const TURNS_MAX: usize = 2_000;
/// The time that so many turns take.
const TURNS_TIME: Duration = Duration::from_micros(100);
/// The most ranks that are in the middle of a turn at the same time.
const RUNNING_MAX: usize = 3;

/// A fault before an access of a rank to shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryFault {
    pub(crate) rank: Rank,
    /// The number of accesses of the rank before the fault.
    pub(crate) access: u64,
    pub(crate) kind: MemoryFaultKind,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum MemoryFaultKind {
    /// The rank's process ends.
    Kill,
    /// The rank's process is stopped.
    Stall,
    /// A random word of the memory of the host changes.
    Corrupt,
}

/// The ranks of a job, their network and the memory of each host.
pub(crate) struct SimulatedJob {
    pub(crate) seed: u64,
    pub(crate) network: Rc<RefCell<SimNetwork>>,
    pub(crate) ranks: Vec<RefCell<SimulatedRank>>,
    /// For each rank: the memory of its host, and its thread in this memory.
    pub(crate) memories: Vec<Option<(Arc<SimMemory>, usize)>>,
    pub(crate) faults: Vec<MemoryFault>,
    /// How probable it is that another rank takes a turn before an access to shared memory.
    pub(crate) preemption: f64,
    pub(crate) compute_max: Duration,
    /// How often a rank that could do nothing did not sleep.
    pub(crate) sleepless_times: Cell<u64>,
    pub(crate) random: RefCell<StdRng>,
    /// The ranks in the middle of a turn. Only the last of them runs.
    pub(crate) running: RefCell<Vec<usize>>,
    /// For each rank, the number of its accesses to shared memory.
    pub(crate) accesses: Vec<Cell<u64>>,
}

impl SimulatedJob {
    /// Runs the job until all ranks have ended. Returns the virtual time.
    pub(crate) fn run(self: &Rc<Self>, limit: Duration) -> Duration {
        for (memory, _) in self.memories.iter().flatten() {
            let job = Rc::clone(self);
            memory.set_on_access(Some(Box::new(move || job.before_access())));
        }
        let ended_at = self.run_in_turns(limit);
        for (memory, _) in self.memories.iter().flatten() {
            // The function and the memory own each other.
            memory.set_on_access(None);
        }
        ended_at
    }

    fn run_in_turns(&self, limit: Duration) -> Duration {
        let mut turns = 0;
        loop {
            let now = self.network.borrow().now();
            assert!(
                now < limit,
                "seed {}: the program has not ended after {now:?} of virtual time",
                self.seed
            );
            let moved_before = self.network.borrow().bytes_moved();
            // Each rank takes a turn.
            let has_work = (0..self.ranks.len()).filter(|&index| self.take_turn(index)).count() > 0;
            if self.ranks.iter().all(|rank| self.is_over(&rank.borrow())) {
                return now;
            }
            turns += 1;
            if has_work || self.network.borrow().bytes_moved() != moved_before {
                // Continue at the same virtual time: a rank that reads bytes makes room for further bytes.
                if turns < TURNS_MAX {
                    continue;
                }
                self.sleepless_times.set(self.sleepless_times.get() + 1);
                self.network.borrow_mut().advance(now + TURNS_TIME);
            } else {
                self.advance(now);
            }
            turns = 0;
            for (memory, _) in self.memories.iter().flatten() {
                memory.settle();
            }
        }
    }

    /// Moves the clock to the next event.
    fn advance(&self, now: Duration) {
        let ranks = self.ranks.iter().map(RefCell::borrow);
        let awake = ranks.filter(|rank| !self.network.borrow().is_stalled(rank.rank));
        let next = awake.filter_map(|rank| rank.next_event(now)).min();
        let next = next.into_iter().chain(self.network.borrow().next_event()).min();
        let next =
            next.unwrap_or_else(|| panic!("seed {}: a rank waits, but no event can wake it", self.seed));
        self.network.borrow_mut().advance(next);
    }

    fn is_over(&self, rank: &SimulatedRank) -> bool {
        matches!(rank.state, SimRankState::Ended(_)) || self.network.borrow().is_stalled(rank.rank)
    }

    /// Lets a rank run that is not in the middle of a turn. Returns whether it may have more work at this time.
    fn take_turn(&self, index: usize) -> bool {
        let Ok(mut rank) = self.ranks[index].try_borrow_mut() else { return false };
        let (now, killed) = (self.network.borrow().now(), self.network.borrow().is_killed(rank.rank));
        if killed && !matches!(rank.state, SimRankState::Ended(_)) {
            rank.state = SimRankState::Ended(SimEnd::Killed);
        }
        if self.is_over(&rank) {
            return false;
        }
        self.running.borrow_mut().push(index);
        let has_work = rank.take_turn(now, self.compute_max);
        self.running.borrow_mut().pop();
        has_work
    }

    /// Called before each access of the rank that runs to shared memory.
    fn before_access(&self) {
        let (index, running) = {
            let running = self.running.borrow();
            (running[running.len() - 1], running.len())
        };
        let access = self.accesses[index].get();
        self.accesses[index].set(access + 1);
        for fault in self.faults.iter().filter(|fault| fault.rank.index() == index && fault.access == access)
        {
            self.apply(fault);
        }
        let (preempts, other) = {
            let mut random = self.random.borrow_mut();
            (random.random_bool(self.preemption), random.random_range(0..self.ranks.len()))
        };
        if preempts && running < RUNNING_MAX {
            self.take_turn(other);
        }
    }

    fn apply(&self, fault: &MemoryFault) {
        let Some((memory, thread)) = &self.memories[fault.rank.index()] else { return };
        match fault.kind {
            MemoryFaultKind::Kill => self.network.borrow_mut().kill(fault.rank),
            MemoryFaultKind::Stall => self.network.borrow_mut().stall(fault.rank),
            MemoryFaultKind::Corrupt => return memory.corrupt_word(&mut self.random.borrow_mut()),
        }
        memory.end_thread(*thread);
    }
}
