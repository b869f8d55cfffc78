//! The layout of the memory that the ranks of a host share in a job: the sleep flag of each rank, and a queue for each pair.
//!
//! ```text
//! offset                length                              content
//! 0                     128                                 token
//! 128                   128 x ranks                         sleep flag of each rank
//! 128 x (1 + ranks)     queue x ranks x (ranks - 1)         queues, ordered by sender and then by receiver
//!
//! queue:   128                                              number of entries that the receiver has read
//!          128                                              flag: the sender waits for space
//!          64 x cells                                       cells, one for each entry
//!          arena                                            payloads
//!          passed buffer                                    payloads of a queue and of the opposite queue
//! ```

use std::ops::Range;

use super::memory::UNIT_BYTES;

/// The length of a cell in bytes: one cache line.
pub(super) const CELL_BYTES: usize = 64;
/// Payloads begin at multiples of this number of bytes in the arena.
pub(super) const PAYLOAD_ALIGNMENT: usize = 64;
/// The most bytes of a payload. The receiver copies a payload while the sender writes the next one.
const PAYLOAD_BYTES_MAX: usize = 32 << 10;
/// A message of more bytes has several entries, so that the receiver copies one while the sender writes the next one.
const PIECE_BYTES_MIN: usize = 2 << 10;
/// A message has about this number of entries, as long as they are neither too short nor too long.
const PIECES: usize = 4;
/// The number of cells of a queue, 8,192 for data and 1,024 for control frames.
const CELL_COUNT: usize = 9 << 10;
const CONTROL_ARENA_BYTES: usize = 64 << 10;
/// The number of bytes for data in the arena of a queue.
const DATA_ARENA_BYTES: usize = 1 << 20;
/// The number of bytes for data in a long arena, which is faster: when the sender writes memory again, it is no longer in
/// the cache of the receiver's processor, which often has 1 MiB, but in the cache that all processors share.
const LONG_DATA_ARENA_BYTES: usize = 2 << 20;
/// A message of fewer bytes is in the arena. In memory that the receiver has just written, it would take longer (ADR 99).
const PASSED_BYTES_MIN: usize = 256;
/// The length in bytes of a passed buffer, which belongs to one rank of a pair at a time. Longer messages are in arenas.
const PASSED_BYTES: usize = 256 << 10;
/// The same with many ranks.
const SHORT_PASSED_BYTES: usize = 64 << 10;
/// Ranks with long arenas populate so many bytes of cells together, and of arenas, but at least an eighth of each.
const POPULATED_BYTES: usize = 16 << 20;
/// The most ranks of a host with long arenas. With more ranks, their memory would be too large.
const RANKS_WITH_LONG_ARENAS_MAX: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemoryLayout {
    pub(super) ranks: usize,
    pub(super) cell_count: usize,
    pub(super) arena_bytes: usize,
    pub(super) passed_bytes: usize,
    pub(super) passed_bytes_min: usize,
}

/// Where a queue is in the memory of a host. All offsets are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QueueLayout {
    /// The offset of the word with the number of entries that the receiver has read. Only the receiver writes it.
    pub(super) read_count: usize,
    /// The offset of the flag that the sender sets while it waits for space. Only the sender writes it.
    pub(super) wants_space: usize,
    pub(super) cells: usize,
    pub(super) arena: usize,
    /// The two passed buffers of the pair: that of the queue to the rank with the higher number, and that of the opposite queue.
    /// At first, each belongs to the sender of its queue.
    pub(super) passed: [usize; 2],
    /// The lengths of the parts.
    pub(super) host: HostMemoryLayout,
}

impl HostMemoryLayout {
    /// The most ranks of a host that have queues, because each pair of ranks has two.
    pub const RANKS_MAX: usize = 16;

    /// Returns whether a queue has space for `frames` unread frames of together `bytes` bytes, each padded to a multiple of 64.
    pub const fn has_space_for(frames: usize, bytes: usize) -> bool {
        // A long message has an entry for each 2 KiB, and one more at the end of the arena, where its bytes are divided.
        let cells = frames + bytes / PIECE_BYTES_MIN + 1;
        cells <= CELL_COUNT && bytes <= DATA_ARENA_BYTES + CONTROL_ARENA_BYTES
    }

    pub const fn new(ranks: usize) -> Self {
        Self {
            ranks,
            cell_count: CELL_COUNT,
            arena_bytes: DATA_ARENA_BYTES + CONTROL_ARENA_BYTES,
            passed_bytes: SHORT_PASSED_BYTES,
            passed_bytes_min: PASSED_BYTES_MIN,
        }
    }

    /// Returns this layout with long arenas, unless there are too many ranks.
    pub const fn with_long_arenas(self) -> Self {
        if self.ranks > RANKS_WITH_LONG_ARENAS_MAX {
            return self;
        }
        Self { arena_bytes: LONG_DATA_ARENA_BYTES + CONTROL_ARENA_BYTES, passed_bytes: PASSED_BYTES, ..self }
    }

    /// Returns a layout with short queues, which fill up and begin again soon, for tests.
    #[cfg(test)]
    pub const fn with_short_queues(ranks: usize, cell_count: usize, arena_bytes: usize) -> Self {
        Self { ranks, cell_count, arena_bytes, passed_bytes: arena_bytes / 2, passed_bytes_min: 0 }
    }

    pub const fn bytes(self) -> usize {
        UNIT_BYTES * (1 + self.ranks) + self.ranks * self.ranks.saturating_sub(1) * self.queue_bytes()
    }

    pub(crate) fn sleep_flag(self, rank: usize) -> usize {
        assert!(rank < self.ranks, "the rank must be below the number of ranks");
        UNIT_BYTES * (1 + rank)
    }

    pub(super) fn queue(self, from: usize, to: usize) -> QueueLayout {
        assert!(from < self.ranks && to < self.ranks && from != to, "a queue connects two ranks of the host");
        let read_count = self.queue_start(from, to);
        let wants_space = read_count + UNIT_BYTES;
        let cells = wants_space + UNIT_BYTES;
        let arena = cells + self.cell_count * CELL_BYTES;
        let (low, high) = (from.min(to), from.max(to));
        let passed = [self.queue_start(low, high), self.queue_start(high, low)]
            .map(|start| start + self.queue_bytes() - self.passed_bytes);
        QueueLayout { read_count, wants_space, cells, arena, passed, host: self }
    }

    fn queue_start(self, from: usize, to: usize) -> usize {
        // A rank has no queue to itself.
        let index = from * (self.ranks - 1) + to - usize::from(to > from);
        UNIT_BYTES * (1 + self.ranks) + index * self.queue_bytes()
    }

    const fn queue_bytes(self) -> usize {
        let bytes = self.cell_count * CELL_BYTES + self.arena_bytes + self.passed_bytes;
        2 * UNIT_BYTES + bytes.next_multiple_of(UNIT_BYTES)
    }
}

impl QueueLayout {
    pub(super) fn cell(&self, entry: u64) -> usize {
        self.cells + (entry % self.host.cell_count as u64) as usize * CELL_BYTES
    }

    /// Returns the offset of the cell after another cell, which is the first one after the last one.
    pub(super) fn cell_after(&self, cell: usize) -> usize {
        let next = cell + CELL_BYTES;
        if next == self.cells + self.host.cell_count * CELL_BYTES { self.cells } else { next }
    }

    pub(super) fn index_of(&self, cell: usize) -> usize {
        (cell - self.cells) / CELL_BYTES
    }

    /// Returns the bytes from `start` on, in the cells or the arena, that a rank populates when it repeats messages.
    pub(super) fn bytes_to_populate(&self, start: usize) -> Range<usize> {
        let end = if start < self.arena { self.arena } else { self.arena + self.host.arena_bytes };
        let (queues, eighth) = (self.host.ranks * (self.host.ranks - 1), self.host.arena_bytes / 8);
        let is_long = self.host.arena_bytes > LONG_DATA_ARENA_BYTES;
        start..end.min(start + if is_long { eighth.max(POPULATED_BYTES / queues) } else { eighth })
    }

    /// Returns the place of a passed buffer in word 2 of an entry.
    pub(super) fn place_in_passed(&self, buffer: u8) -> u64 {
        (self.host.arena_bytes + usize::from(buffer) * self.host.passed_bytes) as u64
    }

    /// Returns the most bytes of the payload of an entry. Several payloads of this length fit into the arena.
    pub(super) fn payload_bytes_max(&self) -> usize {
        PAYLOAD_BYTES_MAX.min(self.host.arena_bytes / 4)
    }

    /// Returns the most bytes of a message of `bytes` bytes in one entry.
    pub(super) fn piece_bytes(&self, bytes: usize) -> usize {
        let piece_bytes = (bytes / PIECES).next_power_of_two().max(PIECE_BYTES_MIN);
        bytes.min(piece_bytes).min(self.payload_bytes_max())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::memory::WORD_BYTES;
    use super::super::segment::TOKEN_BYTES;
    use super::*;

    #[test]
    fn flags_and_queues_do_not_overlap_and_end_at_the_end_of_the_memory() {
        for ranks in [2, 3, 4, 7, 16] {
            let layout = HostMemoryLayout::new(ranks).with_long_arenas();
            let flags = (0..ranks).map(|rank| (layout.sleep_flag(rank), WORD_BYTES));
            let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
            let queues = pairs.filter(|(from, to)| from != to).map(|(from, to)| layout.queue(from, to));
            let parts = queues.flat_map(|queue| {
                assert_eq!(queue.cell(layout.cell_count as u64 + 1), queue.cells + CELL_BYTES);
                let last = queue.cell(layout.cell_count as u64 - 1);
                assert_eq!(
                    (queue.cell_after(last), queue.index_of(last)),
                    (queue.cells, layout.cell_count - 1)
                );
                assert!(queue.payload_bytes_max() * 4 <= layout.arena_bytes);
                assert_eq!(queue.bytes_to_populate(last), last..last + CELL_BYTES);
                let arena_end = queue.arena + layout.arena_bytes;
                assert_eq!(queue.bytes_to_populate(arena_end - 64), arena_end - 64..arena_end);
                let populated = queue.bytes_to_populate(queue.arena).len();
                assert!(
                    populated == layout.arena_bytes || (ranks > 3 && populated >= layout.arena_bytes / 8)
                );
                [
                    (queue.read_count, WORD_BYTES),
                    (queue.wants_space, WORD_BYTES),
                    (queue.cells, layout.cell_count * CELL_BYTES),
                    (queue.arena, layout.arena_bytes),
                    (queue.passed[0], layout.passed_bytes),
                    (queue.passed[1], layout.passed_bytes),
                ]
            });
            let parts: BTreeSet<(usize, usize)> =
                std::iter::once((0, TOKEN_BYTES)).chain(flags).chain(parts).collect();
            // The two queues of a pair have the same passed buffers.
            assert_eq!(parts.len(), 1 + ranks + 5 * ranks * (ranks - 1));
            let mut end = 0;
            for (start, length) in parts {
                assert!(start >= end && start.is_multiple_of(PAYLOAD_ALIGNMENT), "{ranks} ranks");
                end = start + length;
            }
            assert_eq!(end, layout.bytes());
        }
    }

    #[test]
    fn the_memory_of_a_host_is_limited() {
        for (ranks, mib_max) in [(2, 6), (4, 36), (8, 165), (HostMemoryLayout::RANKS_MAX, 420)] {
            let layout = HostMemoryLayout::new(ranks);
            assert!(layout.with_long_arenas().bytes() < mib_max << 20, "{ranks} ranks");
            assert!(layout.bytes() <= layout.with_long_arenas().bytes());
        }
    }
}
