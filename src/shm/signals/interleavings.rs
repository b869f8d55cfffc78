//! Runs queues and signals on memory whose writes become visible late and in another order, as on real processors. Two ranks
//! exchange bytes and sleep whenever they can. The tests show that no byte is wrong and no wake-up is lost, and that both would
//! happen without the fences and without the release orderings.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::super::memory::WORD_BYTES;
use super::super::queue::{QueueRead, QueueReceiver, QueueSender};
use super::*;

/// A layout whose queues fill up after 4 entries or 256 bytes.
const SHORT: HostMemoryLayout = HostMemoryLayout::with_short_queues(2, 4, 256);
/// The number of bytes that each rank sends.
const TOTAL: usize = 1_000;
/// If no rank does anything for so many turns, all of them sleep for ever.
const IDLE_TURNS_MAX: usize = 300;

/// What the memory guarantees.
#[derive(Clone, Copy)]
struct Guarantees {
    fences: bool,
    releases: bool,
}

/// The view of one rank of the memory. Between two accesses of a rank, the other rank may take a turn.
struct WeakMemory {
    rank: usize,
    shared: Rc<SharedWords>,
}

/// Gives the other rank than this one a turn.
type Preempt = Box<dyn Fn(usize)>;

/// The memory that both ranks see, and their writes that are not visible yet.
struct SharedWords {
    guarantees: Guarantees,
    bytes: RefCell<Vec<u8>>,
    pending: [RefCell<VecDeque<PendingWrite>>; 2],
    random: RefCell<StdRng>,
    /// Gives the other rank than this one a turn, if that rank is not in the middle of a turn.
    preempt: RefCell<Option<Preempt>>,
}

/// A write that only its own rank sees.
struct PendingWrite {
    start: usize,
    bytes: Vec<u8>,
    /// Whether the write becomes visible after all earlier writes of its rank.
    is_release: bool,
}

impl PendingWrite {
    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.start + other.bytes.len() && other.start < self.start + self.bytes.len()
    }
}

impl SharedWords {
    fn write(&self, rank: usize, start: usize, bytes: &[u8], is_release: bool) {
        let is_release = is_release && self.guarantees.releases;
        self.pending[rank].borrow_mut().push_back(PendingWrite { start, bytes: bytes.to_vec(), is_release });
    }

    /// Makes the pending write `index` of a rank visible, unless an earlier write must become visible first.
    fn try_publish(&self, rank: usize, index: usize) {
        let mut pending = self.pending[rank].borrow_mut();
        let Some(write) = pending.get(index) else { return };
        if (write.is_release && index > 0)
            || pending.iter().take(index).any(|earlier| earlier.overlaps(write))
        {
            return;
        }
        if let Some(PendingWrite { start, bytes, .. }) = pending.remove(index) {
            self.bytes.borrow_mut()[start..start + bytes.len()].copy_from_slice(&bytes);
        }
    }

    fn publish_all(&self, rank: usize) {
        while !self.pending[rank].borrow().is_empty() {
            self.try_publish(rank, 0);
        }
    }

    /// Makes some random writes visible.
    fn publish_some(&self) {
        for rank in [0, 1] {
            if self.random.borrow_mut().random_bool(0.2) {
                let count = self.pending[rank].borrow().len();
                let index = self.random.borrow_mut().random_range(0..=count);
                self.try_publish(rank, index);
            }
        }
    }

    fn word(&self, offset: usize) -> u64 {
        let mut word = [0; WORD_BYTES];
        word.copy_from_slice(&self.bytes.borrow()[offset..offset + WORD_BYTES]);
        u64::from_le_bytes(word)
    }
}

impl WeakMemory {
    /// Called before each access.
    fn interleave(&self) {
        self.shared.publish_some();
        let preempts = self.shared.random.borrow_mut().random_bool(0.1);
        if let (true, Some(preempt)) = (preempts, &*self.shared.preempt.borrow()) {
            preempt(self.rank);
        }
    }
}

impl SegmentMemory for WeakMemory {
    fn length(&self) -> usize {
        self.shared.bytes.borrow().len()
    }

    fn load(&self, offset: usize, _ordering: Ordering) -> u64 {
        self.interleave();
        let pending = self.shared.pending[self.rank].borrow();
        let own = pending.iter().rev().find(|write| write.start == offset);
        own.map_or_else(
            || self.shared.word(offset),
            |write| u64::from_le_bytes(write.bytes[..].try_into().unwrap()),
        )
    }

    fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        self.interleave();
        self.shared.write(self.rank, offset, &value.to_le_bytes(), ordering == Ordering::Release);
    }

    fn swap(&self, offset: usize, value: u64, _ordering: Ordering) -> u64 {
        self.interleave();
        // Only the two ranks' swaps and stores of one word are ordered.
        let is_other = |write: &PendingWrite| write.start != offset;
        assert!(self.shared.pending[self.rank].borrow().iter().all(is_other), "no rank swaps its own flag");
        let before = self.shared.word(offset);
        self.shared.bytes.borrow_mut()[offset..offset + WORD_BYTES].copy_from_slice(&value.to_le_bytes());
        before
    }

    fn fence(&self) {
        self.interleave();
        if self.shared.guarantees.fences {
            self.shared.publish_all(self.rank);
        }
    }

    fn read(&self, start: usize, target: &mut [u8]) {
        self.interleave();
        target.copy_from_slice(&self.shared.bytes.borrow()[start..start + target.len()]);
    }

    fn write(&self, start: usize, source: &[u8]) {
        for (index, piece) in source.chunks(16).enumerate() {
            self.interleave();
            self.shared.write(self.rank, start + 16 * index, piece, false);
        }
    }
}

/// A rank that sends bytes to the other rank, and receives and checks its bytes.
struct QueueRank {
    sender: QueueSender<WeakMemory>,
    receiver: QueueReceiver<WeakMemory>,
    signals: QueueSignals<WeakMemory>,
    sent: usize,
    received: usize,
    is_asleep: bool,
    wake_ups: Rc<Cell<usize>>,
    wake_ups_of_peer: Rc<Cell<usize>>,
    random: StdRng,
    /// What went wrong.
    problem: Option<String>,
    /// The number of turns in which the rank did anything.
    active_turns: usize,
}

impl QueueRank {
    fn take_turn(&mut self) {
        if self.is_asleep && self.wake_ups.take() == 0 {
            return;
        }
        self.active_turns += 1;
        if std::mem::take(&mut self.is_asleep) {
            self.signals.mark_awake();
        }
        let has_sent = self.send();
        let has_received = self.receive();
        if !has_sent && !has_received {
            self.is_asleep = self.signals.mark_asleep_unless_changed();
        }
    }

    /// Sends an entry. If the queue is full, notes that, and looks again.
    fn send(&mut self) -> bool {
        let count = self.random.random_range(1..70).min(TOTAL - self.sent);
        let bytes: Vec<u8> = (self.sent..self.sent + count).map(|position| position as u8).collect();
        let mut sent = self.sender.write(&[IoSlice::new(&bytes)], 0);
        if sent == Ok(0) && count > 0 {
            self.signals.wait_for_space(0, self.sender.read_count());
            sent = self.sender.write(&[IoSlice::new(&bytes)], 0);
        }
        let sent = sent.unwrap_or_else(|error| {
            self.problem = Some(error.to_string());
            0
        });
        if sent > 0 {
            self.sent += sent;
            self.signals.stop_waiting_for_space(0);
            if self.signals.must_wake_receiver(0) {
                self.wake_ups_of_peer.set(self.wake_ups_of_peer.get() + 1);
            }
        }
        sent > 0
    }

    fn receive(&mut self) -> bool {
        let mut bytes = vec![0; self.random.random_range(1..100)];
        let read = self.receiver.read(&mut [IoSliceMut::new(&mut bytes)], 0).unwrap_or_else(|error| {
            self.problem = Some(error.to_string());
            QueueRead::default()
        });
        let expected = (self.received..self.received + read.bytes).map(|position| position as u8);
        if !bytes[..read.bytes].iter().copied().eq(expected) {
            self.problem = Some("bytes are wrong".into());
        }
        self.received += read.bytes;
        if read.has_freed_space {
            self.signals.set_next_entry(0, self.receiver.next_entry());
            if self.signals.must_wake_sender(0) {
                self.wake_ups_of_peer.set(self.wake_ups_of_peer.get() + 1);
            }
        }
        read.bytes > 0
    }
}

/// Runs two ranks until both have all bytes. Returns what went wrong.
#[expect(clippy::arc_with_non_send_sync, reason = "both ranks run in one thread")]
fn run_ranks(seed: u64, guarantees: Guarantees) -> Result<(), String> {
    let shared = Rc::new(SharedWords {
        guarantees,
        bytes: RefCell::new(vec![0; SHORT.bytes()]),
        pending: Default::default(),
        random: RefCell::new(StdRng::seed_from_u64(seed)),
        preempt: RefCell::default(),
    });
    let wake_ups: [Rc<Cell<usize>>; 2] = Default::default();
    let ranks = [0, 1].map(|rank| {
        let memory = Arc::new(WeakMemory { rank, shared: Rc::clone(&shared) });
        Rc::new(RefCell::new(QueueRank {
            sender: QueueSender::new(Arc::clone(&memory), SHORT, rank, 1 - rank),
            receiver: QueueReceiver::new(Arc::clone(&memory), SHORT, 1 - rank, rank),
            signals: QueueSignals::new(memory, SHORT, rank),
            sent: 0,
            received: 0,
            is_asleep: false,
            wake_ups: Rc::clone(&wake_ups[rank]),
            wake_ups_of_peer: Rc::clone(&wake_ups[1 - rank]),
            random: StdRng::seed_from_u64(2 * seed + rank as u64),
            problem: None,
            active_turns: 0,
        }))
    });
    let all_ranks = ranks.clone();
    *shared.preempt.borrow_mut() = Some(Box::new(move |rank| {
        if let Ok(mut other) = all_ranks[1 - rank].try_borrow_mut() {
            other.take_turn();
        }
    }));
    let mut random = StdRng::seed_from_u64(seed);
    let mut idle_turns = 0;
    let result = loop {
        let count_turns = || ranks.iter().map(|rank| rank.borrow().active_turns).sum::<usize>();
        let turns_before = count_turns();
        ranks[random.random_range(0..2)].borrow_mut().take_turn();
        shared.publish_some();
        idle_turns = if count_turns() == turns_before { idle_turns + 1 } else { 0 };
        if let Some(problem) = ranks.iter().find_map(|rank| rank.borrow().problem.clone()) {
            break Err(problem);
        }
        if ranks.iter().all(|rank| rank.borrow().received == TOTAL) {
            break Ok(());
        }
        if idle_turns > IDLE_TURNS_MAX {
            break Err("a wake-up is lost".into());
        }
    };
    // The closure and the memory own each other.
    *shared.preempt.borrow_mut() = None;
    result
}

#[test]
fn with_fences_and_releases_no_byte_is_wrong_and_no_wake_up_is_lost() {
    let seeds = if cfg!(miri) { 2 } else { 100 };
    for seed in 0..seeds {
        assert_eq!(run_ranks(seed, Guarantees { fences: true, releases: true }), Ok(()), "seed {seed}");
    }
}

#[test]
fn without_fences_or_releases_the_same_runs_fail() {
    let find = |guarantees| (0..100).find_map(|seed| run_ranks(seed, guarantees).err());
    assert_eq!(find(Guarantees { fences: false, releases: true }), Some("a wake-up is lost".into()));
    let without_releases = find(Guarantees { fences: true, releases: false });
    assert!(without_releases.is_some_and(|problem| problem != "a wake-up is lost"));
}
