//! How a rank sleeps while it waits for the queues of its host, and how the other ranks wake it.
//!
//! A rank that has written an entry wakes the receiver with a byte on the socket, but only if the receiver sleeps. A rank that
//! has read an entry wakes the sender, but only if the sender waits for space and sleeps.
//!
//! No wake-up is lost, because each side writes its own word, then calls a fence, and then reads the word of the other side:
//!
//! | side | writes | then reads |
//! |---|---|---|
//! | the rank that falls asleep | its sleep flag | the stamps of its next entries; where it waits for space, the read counts |
//! | a rank that has written an entry | the stamp | the sleep flag of the receiver |
//! | a rank that has read an entry | the read count | whether the sender waits for space, and then its sleep flag |
//! | a rank that finds a queue full | that it waits for space | the read count |
//! | a rank that begins to read a queue | the number of its next entry | the stamp |
//!
//! The side whose fence is second sees what the other side wrote before its fence. So the rank that falls asleep sees the change
//! and stays awake, or the other rank sees the flag and wakes it. That also holds if one thread of a rank finds a queue full
//! while another thread of the same rank falls asleep.
//!
//! The rank that clears a sleep flag sends the byte. If that rank ends before it has sent the byte, the end of its socket wakes
//! the sleeping rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::host::{HostMemoryLayout, QueueLayout};
use super::memory::SegmentMemory;

/// The value of [`PeerSignals::full_at`] while this rank does not wait for space.
const HAS_SPACE: u64 = u64::MAX;
/// The value of [`PeerSignals::next_entry`] while this rank does not read the queue.
const DOES_NOT_READ: u64 = u64::MAX;

/// What any thread of a rank may look at without a lock: whether the queues of the rank have changed, and the sleep flags.
pub struct QueueSignals<M> {
    memory: Arc<M>,
    sleep_flag: usize,
    peers: Vec<PeerSignals>,
}

/// The signals of the two queues between this rank and another rank of the host.
struct PeerSignals {
    sleep_flag: usize,
    incoming: QueueLayout,
    outgoing: QueueLayout,
    next_entry: AtomicU64,
    /// The number of entries that the peer had read when this rank found the queue to the peer full.
    full_at: AtomicU64,
}

impl<M: SegmentMemory> QueueSignals<M> {
    /// Creates the signals of rank `rank` of the host. The peers are the other ranks in their order. Panics if the memory is
    /// too small for the layout, or if the layout does not have the rank.
    pub fn new(memory: Arc<M>, layout: HostMemoryLayout, rank: usize) -> Self {
        assert!(memory.length() >= layout.bytes(), "the memory must be large enough for all ranks");
        let peers = (0..layout.ranks).filter(|&peer| peer != rank);
        let peers = peers.map(|peer| PeerSignals {
            sleep_flag: layout.sleep_flag(peer),
            incoming: layout.queue(peer, rank),
            outgoing: layout.queue(rank, peer),
            next_entry: AtomicU64::new(0),
            full_at: AtomicU64::new(HAS_SPACE),
        });
        Self { memory, sleep_flag: layout.sleep_flag(rank), peers: peers.collect() }
    }

    pub fn set_next_entry(&self, peer: usize, entry: u64) {
        // If another thread still sees an earlier number, its entry is there, so that thread does not fall asleep.
        self.peers[peer].next_entry.store(entry, Ordering::Relaxed);
    }

    /// Records that this rank does not read the queue from the peer now. New entries do not keep this rank awake.
    pub fn stop_reading(&self, peer: usize) {
        self.peers[peer].next_entry.store(DOES_NOT_READ, Ordering::Relaxed);
    }

    /// Records that this rank reads the queue from the peer again. After this call, look whether the entry is there.
    pub fn resume_reading(&self, peer: usize, entry: u64) {
        self.set_next_entry(peer, entry);
        // A thread that falls asleep sees the number, or this thread sees the entry.
        self.memory.fence();
    }

    /// Records that the queue to the peer, which has read `read_count` entries, is full. Then look again whether there is space.
    pub fn wait_for_space(&self, peer: usize, read_count: u64) {
        let peer = &self.peers[peer];
        peer.full_at.store(read_count, Ordering::Relaxed);
        self.memory.store(peer.outgoing.wants_space, 1, Ordering::Relaxed);
        self.memory.fence();
    }

    pub fn stop_waiting_for_space(&self, peer: usize) {
        let peer = &self.peers[peer];
        peer.full_at.store(HAS_SPACE, Ordering::Relaxed);
        self.memory.store(peer.outgoing.wants_space, 0, Ordering::Relaxed);
    }

    /// Returns whether a peer has written an entry, or has read one in a queue that was full. If this rank has meanwhile noticed
    /// the change itself, the result may still be true.
    pub fn have_changed(&self) -> bool {
        let has_space = |peer: &PeerSignals| {
            let full_at = peer.full_at.load(Ordering::Relaxed);
            full_at != HAS_SPACE && self.memory.load(peer.outgoing.read_count, Ordering::Relaxed) != full_at
        };
        (0..self.peers.len()).any(|peer| self.next_entry_watch(peer)() || has_space(&self.peers[peer]))
    }

    /// Returns a function that looks whether the peer has written the entry that is this rank's next one now. Make a new function
    /// after the rank has read. Panics if there is no peer with this number.
    pub fn next_entry_watch(&self, peer: usize) -> impl Fn() -> bool {
        let peer = &self.peers[peer];
        let next_entry = peer.next_entry.load(Ordering::Relaxed);
        let cell = peer.incoming.cell(next_entry);
        // The stamp is larger if this rank has read the entry, and the peer has used the cell again.
        move || next_entry != DOES_NOT_READ && self.memory.load(cell, Ordering::Relaxed) > next_entry
    }

    /// Sets the sleep flag of this rank, and returns true. If a queue has changed, does not set it and returns false: then the
    /// caller must not sleep. The caller must have been awake.
    pub fn mark_asleep_unless_changed(&self) -> bool {
        self.memory.store(self.sleep_flag, 1, Ordering::Relaxed);
        self.memory.fence();
        let may_sleep = !self.have_changed();
        if !may_sleep {
            self.mark_awake();
        }
        may_sleep
    }

    pub fn mark_awake(&self) {
        self.memory.store(self.sleep_flag, 0, Ordering::Relaxed);
    }

    /// Returns whether this rank must wake the peer, to which it has just written an entry.
    pub fn must_wake_receiver(&self, peer: usize) -> bool {
        self.memory.fence();
        self.take_sleep_flag(&self.peers[peer])
    }

    /// Returns whether this rank must wake the peer, from which it has just read an entry.
    pub fn must_wake_sender(&self, peer: usize) -> bool {
        self.memory.fence();
        let peer = &self.peers[peer];
        self.memory.load(peer.incoming.wants_space, Ordering::Relaxed) != 0 && self.take_sleep_flag(peer)
    }

    /// Clears the sleep flag of a peer. Returns whether the flag was set: of several ranks, only one wakes the peer.
    fn take_sleep_flag(&self, peer: &PeerSignals) -> bool {
        self.memory.load(peer.sleep_flag, Ordering::Relaxed) != 0
            && self.memory.swap(peer.sleep_flag, 0, Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::Segment;
    use super::*;

    #[test]
    fn a_rank_wakes_only_a_receiver_that_sleeps_and_a_sender_that_also_waits_for_space() {
        let layout = HostMemoryLayout::with_short_queues(2, 4, 256);
        let memory = Arc::new(Segment::for_tests(layout.bytes(), 1).remove(0));
        let [one, other] = [0, 1].map(|rank| QueueSignals::new(Arc::clone(&memory), layout, rank));
        assert!(!one.must_wake_receiver(0) && !one.must_wake_sender(0));
        assert!(other.mark_asleep_unless_changed());
        assert!(!one.must_wake_sender(0), "the other rank does not wait for space");
        assert!(one.must_wake_receiver(0) && !one.must_wake_receiver(0), "one rank wakes it once");
        assert!(other.mark_asleep_unless_changed());
        other.wait_for_space(0, 0);
        assert!(one.must_wake_sender(0));
        other.stop_waiting_for_space(0);
        assert!(other.mark_asleep_unless_changed());
        assert!(!one.must_wake_sender(0));
        other.mark_awake();
        assert!(!one.must_wake_receiver(0));
    }
}
