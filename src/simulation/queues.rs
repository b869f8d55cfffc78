//! Runs queues and signals on [`SimMemory`], with other threads between any two accesses. Two ranks of two threads each exchange
//! bytes and sleep whenever they can. The tests show that no byte is wrong and no wake-up is lost. They also change each line
//! that accesses the memory, and show that a seed then fails.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::memory::{AccessKind, AccessSite, Mutation, SimMemory, SimView};
use crate::shm::{
    HostMemoryLayout, NextEntry, QueueError, QueueReceiver, QueueSender, QueueSignals, SegmentMemory as _,
};

/// A layout whose queues fill up after 4 entries or 256 bytes.
const SHORT: HostMemoryLayout = HostMemoryLayout::with_short_queues(2, 4, 256);
/// The most bytes that a rank sends.
const TOTAL_MAX: usize = 700;
/// Two ranks that need more turns make no progress.
const TURNS_MAX: usize = 20_000;
/// A rank that finds a change more often, but can do nothing, does not sleep.
const REFUSALS_MAX: usize = 3;
/// The number of seeds among which one must fail if the source is wrong.
const FAILING_SEEDS: u64 = 2_000;

/// The sources of the lines that access the memory.
const SOURCES: [(&str, &str); 3] = [
    ("sender.rs", include_str!("../shm/queue/sender.rs")),
    ("receiver.rs", include_str!("../shm/queue/receiver.rs")),
    ("signals.rs", include_str!("../shm/signals.rs")),
];

/// The lines that may be skipped: the ranks only send more wake bytes than they have to.
const MAY_BE_SKIPPED: [&str; 3] = [
    "self.memory.store(self.sleep_flag, 0, Ordering::Relaxed);",
    "self.memory.store(peer.outgoing.wants_space, 0, Ordering::Relaxed);",
    "&& self.memory.swap(peer.sleep_flag, 0, Ordering::Relaxed) != 0",
];

/// What a rank may forget.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Omission {
    /// To look again for space after [`QueueSignals::wait_for_space`].
    SecondWrite,
    /// To look for entries after [`QueueSignals::resume_reading`].
    ReadAfterResume,
    /// To set the number of the next entry after a read.
    NextEntry,
    WakeReceiver,
    WakeSender,
    /// To look at the queues before it falls asleep.
    LookBeforeSleep,
}

const OMISSIONS: [Omission; 6] = [
    Omission::SecondWrite,
    Omission::ReadAfterResume,
    Omission::NextEntry,
    Omission::WakeReceiver,
    Omission::WakeSender,
    Omission::LookBeforeSleep,
];

/// What is wrong in a run: a line of the source, or the rank that uses it.
#[derive(Clone, Copy, Default)]
struct Defect {
    mutation: Option<(AccessSite, Mutation)>,
    omission: Option<Omission>,
}

/// A rank. Its first thread begins to send and to receive, and does not wait. Its second thread waits and continues.
struct QueueRank {
    /// The number of this rank.
    own: usize,
    memory: Arc<SimMemory>,
    signals: QueueSignals<SimMemory>,
    /// Only the thread that has locked the ends may use them.
    ends: RefCell<QueueEnds>,
    state: Cell<Waiter>,
    is_running: [Cell<bool>; 2],
    wake_ups: Rc<Cell<usize>>,
    wake_ups_of_peer: Rc<Cell<usize>>,
    /// How often the second thread has not fallen asleep since bytes have moved.
    refusals: Cell<usize>,
    omission: Option<Omission>,
    problem: RefCell<Option<String>>,
}

/// What the second thread of a rank does in its next turn.
#[derive(Clone, Copy, PartialEq)]
enum Waiter {
    Transfers,
    FallsAsleep,
    Sleeps,
}

/// The ends of the two queues of a rank.
struct QueueEnds {
    sender: QueueSender<SimMemory>,
    receiver: QueueReceiver<SimMemory>,
    /// The number of bytes that the rank is to send.
    total: usize,
    /// The number of bytes that the rank has begun to send.
    begun: usize,
    sent: usize,
    received: usize,
    is_reading: bool,
    random: StdRng,
    /// What the last thread knew that used the ends.
    unlocked: SimView,
}

impl QueueRank {
    /// Returns whether a thread can do anything.
    fn can_run(&self, thread: usize) -> bool {
        if self.is_running[thread].get() {
            return false;
        }
        if thread == 0 {
            self.ends.try_borrow().is_ok_and(|ends| ends.begun < ends.total || !ends.is_reading)
        } else {
            self.state.get() != Waiter::Sleeps || self.wake_ups.get() > 0
        }
    }

    fn take_turn(&self, thread: usize) {
        self.is_running[thread].set(true);
        if thread == 0 {
            self.begin();
        } else {
            self.wait();
        }
        self.is_running[thread].set(false);
    }

    /// Begins to send more bytes, and sends and receives until no more bytes move. The second thread continues.
    fn begin(&self) {
        let mut begins = true;
        while self.transfer(std::mem::take(&mut begins)) == Some(true) {}
    }

    fn wait(&self) {
        match self.state.get() {
            Waiter::Transfers => {
                if self.transfer(false) == Some(false) {
                    self.state.set(Waiter::FallsAsleep);
                }
            }
            Waiter::FallsAsleep => {
                let may_sleep = self.signals.mark_asleep_unless_changed();
                self.state.set(if may_sleep { Waiter::Sleeps } else { Waiter::Transfers });
                self.refusals.set(self.refusals.get() + usize::from(!may_sleep));
                if self.refusals.get() > REFUSALS_MAX {
                    self.note("a rank that can do nothing does not sleep");
                }
                if !may_sleep && self.omission == Some(Omission::LookBeforeSleep) {
                    // The rank sleeps although a queue has changed.
                    self.memory.store(SHORT.sleep_flag(self.own), 1, Ordering::Relaxed);
                    self.state.set(Waiter::Sleeps);
                }
            }
            Waiter::Sleeps => {
                self.wake_ups.set(0);
                self.signals.mark_awake();
                self.state.set(Waiter::Transfers);
            }
        }
    }

    /// Sends and receives once. Returns whether any bytes have moved; `None` if the other thread uses the ends.
    fn transfer(&self, begins: bool) -> Option<bool> {
        let mut ends = self.ends.try_borrow_mut().ok()?;
        self.memory.acquire_view(&ends.unlocked);
        if begins {
            ends.begun = ends.total.min(ends.begun + ends.random.random_range(1..200));
        }
        let sent = self.send(&mut ends);
        let received = self.receive(&mut ends, begins);
        ends.unlocked = self.memory.view();
        match (sent, received) {
            (Ok(0), Ok(0)) => Some(false),
            (Ok(_), Ok(_)) => {
                self.refusals.set(0);
                Some(true)
            }
            (Err(error), _) | (_, Err(error)) => {
                self.note(&error.to_string());
                Some(false)
            }
        }
    }

    /// Sends an entry. If the queue is full, notes that, and looks again.
    fn send(&self, ends: &mut QueueEnds) -> Result<usize, QueueError> {
        let count = ends.random.random_range(1..100).min(ends.begun - ends.sent);
        let bytes: Vec<u8> = (ends.sent..ends.sent + count).map(|position| position as u8).collect();
        // A message of two entries may need more space than the whole arena has, but not in a passed buffer.
        let bytes_max = if ends.receiver.owned.is_empty() { 64 } else { 128 };
        let is_message = (1..=bytes_max).contains(&count) && ends.random.random_bool(0.5);
        let write = |ends: &mut QueueEnds| {
            if !is_message {
                return ends.sender.write(&[IoSlice::new(&bytes)], 0);
            }
            let is_sent = ends.sender.write_message([0; 2], &bytes, &mut ends.receiver.owned)?;
            Ok(if is_sent { count } else { 0 })
        };
        let mut sent = write(ends)?;
        if sent == 0 && count > 0 {
            self.signals.wait_for_space(0, ends.sender.read_count());
            if self.omission != Some(Omission::SecondWrite) {
                sent = write(ends)?;
            }
        }
        if sent > 0 {
            ends.sent += sent;
            self.signals.stop_waiting_for_space(0);
            if self.signals.must_wake_receiver(0) && self.omission != Some(Omission::WakeReceiver) {
                self.wake_ups_of_peer.set(self.wake_ups_of_peer.get() + 1);
            }
        }
        Ok(sent)
    }

    /// Receives bytes and checks them. The first thread resumes reading, and sometimes stops it for a while.
    fn receive(&self, ends: &mut QueueEnds, is_first_thread: bool) -> Result<usize, QueueError> {
        if !ends.is_reading {
            if !is_first_thread {
                return Ok(0);
            }
            ends.is_reading = true;
            self.signals.resume_reading(0, ends.receiver.next_entry());
            if self.omission == Some(Omission::ReadAfterResume) {
                return Ok(0);
            }
        } else if ends.random.random_bool(0.1) {
            ends.is_reading = false;
            self.signals.stop_reading(0);
            return Ok(0);
        }
        let mut bytes = vec![0; ends.random.random_range(1..100)];
        if let NextEntry::Message(message) = ends.receiver.peek()? {
            ends.receiver.begin_message(&message);
        }
        let next_entry = ends.receiver.next_entry();
        let count = ends.receiver.read(&mut [IoSliceMut::new(&mut bytes)], 0)?;
        let expected = (ends.received..ends.received + count).map(|position| position as u8);
        if !bytes[..count].iter().copied().eq(expected) {
            self.note("bytes are wrong");
        }
        ends.received += count;
        if ends.receiver.next_entry() != next_entry {
            if self.omission != Some(Omission::NextEntry) {
                self.signals.set_next_entry(0, ends.receiver.next_entry());
            }
            if self.signals.must_wake_sender(0) && self.omission != Some(Omission::WakeSender) {
                self.wake_ups_of_peer.set(self.wake_ups_of_peer.get() + 1);
            }
        }
        Ok(count)
    }

    fn note(&self, problem: &str) {
        self.problem.borrow_mut().get_or_insert(problem.into());
    }
}

/// Lets a random thread that can run take a turn. Returns false if no thread can run.
fn run_any(ranks: &[QueueRank; 2], memory: &SimMemory, random: &RefCell<StdRng>) -> bool {
    let threads = (0..4).filter(|thread| ranks[thread / 2].can_run(thread % 2));
    let threads: Vec<usize> = threads.collect();
    if threads.is_empty() {
        return false;
    }
    let thread = threads[random.borrow_mut().random_range(0..threads.len())];
    memory.run_as(thread, || ranks[thread / 2].take_turn(thread % 2));
    true
}

#[expect(clippy::arc_with_non_send_sync, reason = "all threads are simulated in one thread")]
fn new_ranks(seed: u64, defect: Defect) -> (Arc<SimMemory>, Rc<[QueueRank; 2]>) {
    let memory = Arc::new(SimMemory::new(SHORT.bytes(), seed));
    memory.set_mutation(defect.mutation);
    let wake_ups: [Rc<Cell<usize>>; 2] = Default::default();
    let mut random = StdRng::seed_from_u64(seed ^ 0x5EED);
    let ranks = [0, 1].map(|rank| QueueRank {
        own: rank,
        memory: Arc::clone(&memory),
        signals: QueueSignals::new(Arc::clone(&memory), SHORT, rank),
        ends: RefCell::new(QueueEnds {
            sender: QueueSender::new(Arc::clone(&memory), SHORT, rank, 1 - rank),
            receiver: QueueReceiver::new(Arc::clone(&memory), SHORT, 1 - rank, rank),
            total: random.random_range(0..=TOTAL_MAX),
            begun: 0,
            sent: 0,
            received: 0,
            is_reading: true,
            random: StdRng::seed_from_u64(2 * seed + rank as u64),
            unlocked: SimView::default(),
        }),
        state: Cell::new(Waiter::Transfers),
        is_running: Default::default(),
        wake_ups: Rc::clone(&wake_ups[rank]),
        wake_ups_of_peer: Rc::clone(&wake_ups[1 - rank]),
        refusals: Cell::new(0),
        omission: defect.omission,
        problem: RefCell::default(),
    });
    (memory, Rc::new(ranks))
}

/// Runs two ranks until both have all bytes and sleep. Returns the lines that have accessed the memory, or what went wrong.
fn run_ranks(seed: u64, defect: Defect) -> Result<BTreeMap<AccessSite, AccessKind>, String> {
    let (memory, ranks) = new_ranks(seed, defect);
    let random = Rc::new(RefCell::new(StdRng::seed_from_u64(seed)));
    let preemption = (Arc::downgrade(&memory), Rc::clone(&ranks), Rc::clone(&random));
    memory.set_on_access(Some(Box::new(move || {
        let (memory, ranks, random) = &preemption;
        let preempts = random.borrow_mut().random_bool(0.15);
        if let (true, Some(memory)) = (preempts, memory.upgrade()) {
            run_any(ranks, &memory, random);
        }
    })));
    let mut turns = 0;
    let result = loop {
        let can_run = run_any(&ranks, &memory, &random);
        turns += 1;
        let problem = ranks.iter().find_map(|rank| rank.problem.borrow().clone());
        if let Some(problem) = problem.or_else(|| memory.race()) {
            break Err(problem);
        }
        let [one, other] = [&ranks[0], &ranks[1]].map(|rank| rank.ends.borrow());
        let is_complete = one.received == other.total && other.received == one.total;
        drop((one, other));
        if !can_run {
            break if is_complete { Ok(memory.sites()) } else { Err("a wake-up is lost".into()) };
        }
        if turns > TURNS_MAX {
            break Err("the ranks make no progress".into());
        }
    };
    // The function and the memory own each other.
    memory.set_on_access(None);
    result
}

/// Returns the first failure among many seeds.
fn find_failure(defect: Defect) -> Option<String> {
    (0..FAILING_SEEDS).find_map(|seed| run_ranks(seed, defect).err())
}

#[test]
fn no_byte_is_wrong_and_no_wake_up_is_lost() {
    let seeds = if cfg!(miri) { 2 } else { 200 };
    for seed in 0..seeds {
        assert_eq!(run_ranks(seed, Defect::default()).err(), None, "seed {seed}");
    }
}

/// Returns the text of a line of the source.
fn text_of(site: AccessSite) -> &'static str {
    let source = SOURCES.iter().find(|(name, _)| site.file().ends_with(name)).map(|(_, source)| source);
    source.and_then(|source| source.lines().nth(site.line() as usize - 1)).unwrap().trim()
}

/// Each release, acquire and fence is relaxed, and each load, store, swap, read and write is skipped. This test also shows that
/// the test above can fail.
#[test]
#[cfg_attr(miri, ignore = "Miri would need hours")]
fn each_line_that_accesses_the_memory_is_needed() {
    let sites = run_ranks(0, Defect::default()).unwrap();
    let (mut needed, mut unneeded) = (0, Vec::new());
    for (site, kind) in sites {
        let relaxed = kind.is_ordered.then_some(Mutation::Relax);
        let skipped = (!kind.is_fence && !MAY_BE_SKIPPED.contains(&text_of(site))).then_some(Mutation::Skip);
        for mutation in relaxed.into_iter().chain(skipped) {
            let failure = find_failure(Defect { mutation: Some((site, mutation)), omission: None });
            needed += usize::from(failure.is_some());
            if failure.is_none() {
                unneeded.push(format!(
                    "{mutation:?} line {} of {}: {}",
                    site.line(),
                    site.file(),
                    text_of(site)
                ));
            }
        }
    }
    assert!(unneeded.is_empty(), "no seed fails with these changes: {unneeded:#?}");
    assert!(needed >= 23, "only {needed} changes were tested");
}

#[test]
#[cfg_attr(miri, ignore = "Miri would need hours")]
fn each_duty_of_a_rank_is_needed() {
    for omission in OMISSIONS {
        let failure = find_failure(Defect { mutation: None, omission: Some(omission) });
        assert!(failure.is_some(), "no seed fails without {omission:?}");
    }
}
