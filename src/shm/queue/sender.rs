//! The sender's end of a queue.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::entry::{BYTES_IN_CELL_MAX, KIND_BEGIN, KIND_BYTES, KIND_MESSAGE, PASSES_BUFFER, QueueError};
use crate::shm::host::{HostMemoryLayout, PAYLOAD_ALIGNMENT, QueueLayout};
use crate::shm::memory::{SegmentMemory, Uses, WORD_BYTES};

pub struct QueueSender<M> {
    memory: Arc<M>,
    layout: QueueLayout,
    /// The number of the next entry.
    next: u64,
    /// The offset of its cell in the memory.
    cell: usize,
    /// The number of entries that the receiver had read when this rank last looked.
    read_count: u64,
    /// For each cell: the value of `head` after its last entry. A position in the arena counts all bytes since the start, so the
    /// offset in the arena is the position modulo the length of the arena.
    ends: Box<[u64]>,
    /// The position at which the bytes of the next entry in the arena begin.
    head: u64,
    /// The offset of this position in the arena.
    head_offset: usize,
    /// The position before which the receiver has read all bytes.
    tail: u64,
    cell_uses: Uses,
    arena_uses: Uses,
}

/// Returns word 1 of the cell of an entry.
fn kind_and_bytes(kind: u64, bytes: usize) -> u64 {
    kind | (bytes as u64) << 32
}

impl<M: SegmentMemory> QueueSender<M> {
    /// Creates the sender's end of the queue from rank `from` to rank `to` of the host. The queue must be new. Panics if the
    /// memory is too small, or if the ranks are not two ranks of the layout.
    pub fn new(memory: Arc<M>, layout: HostMemoryLayout, from: usize, to: usize) -> Self {
        assert!(memory.length() >= layout.bytes(), "the memory must be large enough for all ranks");
        let layout = layout.queue(from, to);
        let (ends, cell) = (vec![0; layout.host.cell_count].into_boxed_slice(), layout.cell(0));
        Self {
            memory,
            layout,
            next: 0,
            cell,
            read_count: 0,
            ends,
            head: 0,
            head_offset: 0,
            tail: 0,
            cell_uses: Uses::default(),
            arena_uses: Uses::default(),
        }
    }

    /// Returns the number of entries that the receiver had read when this rank last looked.
    pub fn read_count(&self) -> u64 {
        self.read_count
    }

    /// Adds the first entry. `socket_bytes` is the number of bytes that this rank has sent to the receiver over the socket.
    pub fn begin(&mut self, socket_bytes: u64) {
        debug_assert_eq!(self.next, 0, "only the first entry says where the queue begins");
        self.publish(&[KIND_BEGIN, socket_bytes]);
    }

    /// Adds one entry with the bytes of `parts` after the first `skip` bytes, or with as many of them as there is space for.
    /// Returns the number of bytes; 0 if the queue is full. Returns an error if the receiver has counted wrongly.
    pub fn write(&mut self, parts: &[IoSlice<'_>], skip: usize) -> Result<usize, QueueError> {
        let wanted = parts.iter().map(|part| part.len()).sum::<usize>().saturating_sub(skip);
        let count = self.reserve(wanted)?;
        if count == 0 {
            return Ok(0);
        }
        let (mut skip, start) = (skip, self.head_offset);
        let mut end = self.layout.arena + start;
        let mut left = count;
        for part in parts {
            let start = skip.min(part.len());
            skip -= start;
            let piece = &part[start..part.len().min(start + left)];
            self.memory.write(end, piece);
            end += piece.len();
            left -= piece.len();
        }
        self.advance(count);
        self.publish(&[kind_and_bytes(KIND_BYTES, count), start as u64]);
        Ok(count)
    }

    /// Adds the entries of a whole message. Its bytes go to the last of the passed buffers `owned`, which is then removed, or to
    /// the arena. Returns false if there is no space for all of them. Returns the same errors as [`QueueSender::write`].
    pub fn write_message(
        &mut self,
        label: [u64; 2],
        payload: &[u8],
        owned: &mut Vec<u8>,
    ) -> Result<bool, QueueError> {
        let bytes = payload.len();
        if self.cell_uses.count() {
            self.memory.populate(self.layout.bytes_to_populate(self.cell));
        }
        if bytes <= BYTES_IN_CELL_MAX {
            let has_cell = self.find_cells(1)?;
            if has_cell {
                self.memory.write(self.cell + 5 * WORD_BYTES, payload);
                self.publish(&[kind_and_bytes(KIND_MESSAGE, bytes), 0, label[0], label[1]]);
            }
            return Ok(has_cell);
        }
        let may_pass = (self.layout.host.passed_bytes_min..=self.layout.host.passed_bytes).contains(&bytes);
        if may_pass && let Some(&buffer) = owned.last() {
            let is_written = self.write_to_passed_buffer(label, payload, buffer)?;
            if is_written {
                owned.pop();
            }
            return Ok(is_written);
        }
        if self.arena_uses.count() {
            self.memory.populate(self.layout.bytes_to_populate(self.layout.arena + self.head_offset));
        }
        let piece_bytes = self.layout.piece_bytes(bytes);
        if piece_bytes < bytes && !self.has_space_for(bytes) {
            self.update_read_count()?;
        }
        if !self.reserve_whole(piece_bytes)? || (piece_bytes < bytes && !self.has_space_for(bytes)) {
            return Ok(false);
        }
        let start = self.head_offset;
        self.memory.write(self.layout.arena + start, &payload[..piece_bytes]);
        self.advance(piece_bytes);
        let first = kind_and_bytes(KIND_MESSAGE, piece_bytes);
        self.publish(&[first, start as u64, label[0], label[1], bytes as u64]);
        let mut sent = piece_bytes;
        while sent < bytes {
            // An entry is shorter at the end of the arena.
            let count = piece_bytes.min(bytes - sent).min(self.bytes_to_arena_end());
            let start = self.head_offset;
            self.memory.write(self.layout.arena + start, &payload[sent..sent + count]);
            self.advance(count);
            self.publish(&[kind_and_bytes(KIND_BYTES, count), start as u64]);
            sent += count;
        }
        Ok(true)
    }

    /// Adds the entries of a whole message, whose bytes are in a passed buffer. The last entry passes the buffer on.
    fn write_to_passed_buffer(
        &mut self,
        label: [u64; 2],
        payload: &[u8],
        buffer: u8,
    ) -> Result<bool, QueueError> {
        let bytes = payload.len();
        let piece_bytes = self.layout.piece_bytes(bytes);
        if !self.find_cells(bytes.div_ceil(piece_bytes))? {
            return Ok(false);
        }
        let mut sent = 0;
        for piece in payload.chunks(piece_bytes) {
            self.memory.write(self.layout.passed[usize::from(buffer)] + sent, piece);
            let place = self.layout.place_in_passed(buffer) + sent as u64;
            let is_first = sent == 0;
            sent += piece.len();
            let word = if sent == bytes { place | PASSES_BUFFER } else { place };
            if is_first {
                let first = kind_and_bytes(KIND_MESSAGE, piece.len());
                self.publish(&[first, word, label[0], label[1], bytes as u64]);
            } else {
                self.publish(&[kind_and_bytes(KIND_BYTES, piece.len()), word]);
            }
        }
        Ok(true)
    }

    /// Returns whether there is space for a message of `bytes` bytes, as far as this rank knows. An entry of the message may
    /// also end at the end of the arena.
    fn has_space_for(&self, bytes: usize) -> bool {
        let entries = 2 + bytes / self.layout.piece_bytes(bytes);
        let unused = self.arena_bytes() - (self.head - self.tail);
        self.has_cells(entries) && (bytes + entries * PAYLOAD_ALIGNMENT) as u64 <= unused
    }

    /// Returns whether there is space for an entry of exactly `bytes` bytes, which begins at `head`.
    fn reserve_whole(&mut self, bytes: usize) -> Result<bool, QueueError> {
        if self.reserve(bytes)? == bytes {
            return Ok(true);
        }
        // The rest of the arena may be too short, and the space at its start long enough.
        let start = self.head + self.bytes_to_arena_end() as u64;
        let has_space = bytes <= self.layout.payload_bytes_max()
            && self.has_cells(1)
            && start + bytes as u64 <= self.tail + self.arena_bytes();
        if has_space {
            (self.head, self.head_offset) = (start, 0);
        }
        Ok(has_space)
    }

    /// Returns whether `count` cells are free, as far as this rank knows.
    fn has_cells(&self, count: usize) -> bool {
        self.next - self.read_count + count as u64 <= self.layout.host.cell_count as u64
    }

    /// Returns whether `count` cells are free.
    fn find_cells(&mut self, count: usize) -> Result<bool, QueueError> {
        if !self.has_cells(count) {
            self.update_read_count()?;
        }
        Ok(self.has_cells(count))
    }

    /// Returns for how many of `wanted` bytes there is space in one entry; 0 if there is no space.
    fn reserve(&mut self, wanted: usize) -> Result<usize, QueueError> {
        let wanted = wanted.min(self.layout.payload_bytes_max());
        if self.space() < wanted {
            self.update_read_count()?;
        }
        Ok(wanted.min(self.space()))
    }

    /// Returns the most bytes for which there is space in one entry.
    fn space(&self) -> usize {
        if !self.has_cells(1) {
            return 0;
        }
        let unused = self.arena_bytes() - (self.head - self.tail);
        // The bytes of an entry do not continue at the start of the arena.
        self.bytes_to_arena_end().min(unused as usize)
    }

    /// Returns the number of bytes between the start of the next entry's bytes and the end of the arena.
    fn bytes_to_arena_end(&self) -> usize {
        self.layout.host.arena_bytes - self.head_offset
    }

    /// Counts the bytes of the next entry.
    fn advance(&mut self, bytes: usize) {
        let padded = bytes.next_multiple_of(PAYLOAD_ALIGNMENT);
        self.head += padded as u64;
        self.head_offset += padded;
        if self.head_offset >= self.layout.host.arena_bytes {
            self.head_offset = 0;
        }
    }

    /// Looks how many entries the receiver has read.
    fn update_read_count(&mut self) -> Result<(), QueueError> {
        // Acquire pairs with Release in `finish_entry`: the receiver has read the bytes before this rank overwrites them.
        let read_count = self.memory.load(self.layout.read_count, Ordering::Acquire);
        if read_count < self.read_count || read_count > self.next {
            return Err(QueueError::ReadCount(read_count));
        }
        if read_count > self.read_count {
            self.read_count = read_count;
            self.tail = self.ends[((read_count - 1) % self.layout.host.cell_count as u64) as usize];
        }
        Ok(())
    }

    /// Writes the cell of the next entry. `words` are the words of the cell from word 1 on.
    #[inline]
    fn publish<const N: usize>(&mut self, words: &[u64; N]) {
        let cell = self.cell;
        self.memory.store_words(cell + WORD_BYTES, words);
        // Release pairs with Acquire in `next_words`: a receiver that sees the stamp sees the words and the bytes.
        self.memory.store(cell, self.next + 1, Ordering::Release);
        self.ends[self.layout.index_of(cell)] = self.head;
        self.next += 1;
        self.cell = self.layout.cell_after(cell);
    }

    fn arena_bytes(&self) -> u64 {
        self.layout.host.arena_bytes as u64
    }
}
