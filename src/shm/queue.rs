//! A queue of entries from one rank of a host to another, in shared memory.
//!
//! Each entry has a cell of 64 bytes. A cell is one cache line. The bytes of an entry are in the arena, a ring of memory. The
//! words of a cell are:
//!
//! | word | content |
//! |---|---|
//! | 0 | the stamp: the number of the entry plus 1. The sender writes the stamp last |
//! | 1 | the kind of the entry in the lower half, the number of its bytes in the upper half |
//! | 2 | for bytes: where they begin in the arena. For a beginning: how many bytes the sender has sent over the socket |
//! | 3, 4 | for a message: its label |
//! | 5 to 7 | the bytes of a message of at most 24 bytes, which are not in the arena |
//! | 5 | the length of a longer message |
//!
//! A message may be longer than its entry. The next entries then have kind "bytes", and contain the rest of the message. So the
//! receiver can copy the first bytes while the sender still writes the next ones.
//!
//! The sender reuses a cell and the memory of its bytes when the receiver has counted the entry as read.
//!
//! Each word of a peer is read once and then checked. A wrong word gives a [`QueueError`], and nothing is read or written
//! outside the queue. A rank that stops in the middle of an entry harms only its own messages. Every rank of the host can
//! write to the whole memory, so a rank that writes outside its queues can harm all messages of the host, and can make ranks
//! wait until their deadlines.

#[cfg(test)]
mod tests;

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::host::{HostMemoryLayout, PAYLOAD_ALIGNMENT, QueueLayout};
use super::memory::{SegmentMemory, WORD_BYTES, pause_between_looks};

/// The kind of an entry with bytes.
const KIND_BYTES: u64 = 1;
/// The kind of the first entry of a queue.
const KIND_BEGIN: u64 = 2;
/// The kind of an entry that begins a message.
const KIND_MESSAGE: u64 = 3;
/// The most bytes of a message that are in its cell.
const BYTES_IN_CELL_MAX: usize = 3 * WORD_BYTES;
/// The half of a word that contains the kind.
const KIND_MASK: u64 = (1 << 32) - 1;

/// What is wrong with the words that a peer has written. The text continues a sentence about the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The stamp of a cell is neither the stamp of the next entry nor an earlier one.
    #[error("it wrote the invalid entry number {0} to shared memory")]
    Stamp(u64),
    /// The kind of an entry is unknown, or the entry may not be at this place.
    #[error("it wrote an entry of the invalid kind {0} to shared memory")]
    Kind(u64),
    /// The bytes of an entry are not inside the arena.
    #[error(
        "it wrote an entry of {bytes} bytes at offset {start} to shared memory, which is outside of its queue"
    )]
    Bytes {
        /// The offset in the arena at which the bytes begin.
        start: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// The receiver has counted fewer entries than before, or more entries than there are.
    #[error("it claims to have read {0} entries of shared memory, which is impossible")]
    ReadCount(u64),
    /// The label of a message is wrong.
    #[error("it wrote a message with the invalid label {0:#x} to shared memory")]
    Label(u64),
}

/// A message that begins with the next entry of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueMessage {
    /// What the sender says about the message.
    pub label: [u64; 2],
    /// The number of bytes of the message. Those that are not in this entry are in the entries after it.
    pub bytes: usize,
    /// The offset in the memory, and the number, of the bytes in this entry.
    first: (usize, usize),
}

/// The sender's end of a queue.
pub struct QueueSender<M> {
    memory: Arc<M>,
    layout: QueueLayout,
    /// The number of the next entry.
    next: u64,
    /// The offset of its cell in the memory.
    cell: usize,
    /// The number of entries that the receiver had read when this rank last looked.
    read_count: u64,
    /// For each cell: the position in the arena at which the bytes of its last entry end. A position counts all bytes since
    /// the start, so the offset in the arena is the position modulo the length of the arena.
    ends: Box<[u64]>,
    /// The position at which the bytes of the next entry begin.
    head: u64,
    /// The offset of this position in the arena.
    head_offset: usize,
    /// The position before which the receiver has read all bytes.
    tail: u64,
}

/// The receiver's end of a queue.
pub struct QueueReceiver<M> {
    memory: Arc<M>,
    layout: QueueLayout,
    /// The number of the entry that this rank reads next or is reading.
    next: u64,
    /// The offset of its cell in the memory.
    cell: usize,
    /// The offset in the memory, and the number, of the bytes of this entry that have not been read; (0, 0) if this rank has
    /// not begun to read it.
    unread: (usize, usize),
    /// Whether the bytes go to a buffer that is longer than the caches.
    is_target_long: bool,
}

/// What the next entry of a queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextEntry {
    /// There is no entry.
    Nothing,
    /// Bytes of the link.
    Bytes,
    /// A message, of which nothing has been read.
    Message(QueueMessage),
}

/// The result of [`QueueReceiver::read`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueRead {
    /// The number of bytes that were copied.
    pub bytes: usize,
    /// Whether an entry has been read completely, so that the sender has more space.
    pub has_freed_space: bool,
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
        let (ends, cell) = (vec![0; layout.cell_count].into_boxed_slice(), layout.cell(0));
        Self { memory, layout, next: 0, cell, read_count: 0, ends, head: 0, head_offset: 0, tail: 0 }
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
    /// Returns the number of bytes. If the queue is full, returns 0. Returns an error if the receiver has written an impossible
    /// number of read entries.
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

    /// Adds the entries of a whole message. Returns false if there is no space for all of them. Returns the same errors as
    /// [`QueueSender::write`].
    pub fn write_message(&mut self, label: [u64; 2], payload: &[u8]) -> Result<bool, QueueError> {
        let bytes = payload.len();
        if bytes <= BYTES_IN_CELL_MAX {
            if !self.has_cell() {
                self.update_read_count()?;
            }
            if !self.has_cell() {
                return Ok(false);
            }
            self.memory.write(self.cell + 5 * WORD_BYTES, payload);
            self.publish(&[kind_and_bytes(KIND_MESSAGE, bytes), 0, label[0], label[1]]);
            return Ok(true);
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

    /// Returns whether there is space for a message of `bytes` bytes, as far as this rank knows. An entry of the message may
    /// also end at the end of the arena.
    fn has_space_for(&self, bytes: usize) -> bool {
        let entries = 2 + bytes / self.layout.piece_bytes(bytes);
        let unused = self.arena_bytes() - (self.head - self.tail);
        self.next - self.read_count + entries as u64 <= self.layout.cell_count as u64
            && (bytes + entries * PAYLOAD_ALIGNMENT) as u64 <= unused
    }

    /// Returns whether there is space for an entry of exactly `bytes` bytes, which begins at `head`.
    fn reserve_whole(&mut self, bytes: usize) -> Result<bool, QueueError> {
        if self.reserve(bytes)? == bytes {
            return Ok(true);
        }
        // The rest of the arena may be too short, and the space at its start long enough.
        let start = self.head + self.bytes_to_arena_end() as u64;
        let has_space = bytes <= self.layout.payload_bytes_max()
            && self.has_cell()
            && start + bytes as u64 <= self.tail + self.arena_bytes();
        if has_space {
            (self.head, self.head_offset) = (start, 0);
        }
        Ok(has_space)
    }

    /// Returns whether a cell is free, as far as this rank knows.
    fn has_cell(&self) -> bool {
        self.next - self.read_count < self.layout.cell_count as u64
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
        if !self.has_cell() {
            return 0;
        }
        let unused = self.arena_bytes() - (self.head - self.tail);
        // The bytes of an entry do not continue at the start of the arena.
        self.bytes_to_arena_end().min(unused as usize)
    }

    /// Returns the number of bytes between the start of the next entry's bytes and the end of the arena.
    fn bytes_to_arena_end(&self) -> usize {
        self.layout.arena_bytes - self.head_offset
    }

    /// Counts the bytes of the next entry.
    fn advance(&mut self, bytes: usize) {
        let padded = bytes.next_multiple_of(PAYLOAD_ALIGNMENT);
        self.head += padded as u64;
        self.head_offset += padded;
        if self.head_offset >= self.layout.arena_bytes {
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
            self.tail = self.ends[((read_count - 1) % self.layout.cell_count as u64) as usize];
        }
        Ok(())
    }

    /// Writes the cell of the next entry, whose bytes end before `head`. `words` are the words of the cell from word 1 on.
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
        self.layout.arena_bytes as u64
    }
}

impl<M: SegmentMemory> QueueReceiver<M> {
    /// Creates the receiver's end of the queue from rank `from` to rank `to` of the host. The queue must be new. Panics if the
    /// memory is too small, or if the ranks are not two ranks of the layout.
    pub fn new(memory: Arc<M>, layout: HostMemoryLayout, from: usize, to: usize) -> Self {
        assert!(memory.length() >= layout.bytes(), "the memory must be large enough for all ranks");
        let layout = layout.queue(from, to);
        Self { memory, layout, next: 0, cell: layout.cell(0), unread: (0, 0), is_target_long: false }
    }

    /// Sets whether the parts that [`QueueReceiver::read`] fills belong to a buffer that is longer than the caches.
    pub fn set_target_long(&mut self, is_target_long: bool) {
        self.is_target_long = is_target_long;
    }

    /// Returns the number of the entry that this rank reads next.
    pub fn next_entry(&self) -> u64 {
        self.next
    }

    /// Reads the first entry, if it is there. Returns the number of bytes that the sender has sent over the socket. Returns an
    /// error if the sender has written a wrong entry.
    pub fn read_begin(&mut self) -> Result<Option<u64>, QueueError> {
        let Some([kind_and_bytes, socket_bytes]) = self.next_words()? else { return Ok(None) };
        if kind_and_bytes != KIND_BEGIN || self.next != 0 {
            return Err(QueueError::Kind(kind_and_bytes & KIND_MASK));
        }
        self.finish_entry();
        Ok(Some(socket_bytes))
    }

    /// Looks at most `looks` times whether the next entry is there. Returns whether it is, as soon as that is the case.
    pub fn await_entry(&self, looks: u32) -> bool {
        (0..looks).any(|look| {
            let is_written = self.memory.load(self.cell, Ordering::Relaxed) > self.next;
            if !is_written {
                pause_between_looks(look);
            }
            is_written
        })
    }

    /// Returns what the next entry is. An entry that has been read in part counts as bytes. Returns an error if the sender has
    /// written a wrong entry.
    #[inline]
    pub fn peek(&self) -> Result<NextEntry, QueueError> {
        if self.unread.1 > 0 {
            return Ok(NextEntry::Bytes);
        }
        let Some([kind_and_bytes, start]) = self.next_words()? else { return Ok(NextEntry::Nothing) };
        if kind_and_bytes & KIND_MASK != KIND_MESSAGE {
            return Ok(NextEntry::Bytes);
        }
        let [label_0, label_1, bytes] = self.memory.load_words(self.cell + 3 * WORD_BYTES);
        let label = [label_0, label_1];
        let first_bytes = (kind_and_bytes >> 32) as usize;
        if first_bytes <= BYTES_IN_CELL_MAX {
            let first = (self.cell + 5 * WORD_BYTES, first_bytes);
            return Ok(NextEntry::Message(QueueMessage { label, bytes: first_bytes, first }));
        }
        let (bytes, first) = (bytes as usize, self.check_bytes(first_bytes as u64, start)?);
        if bytes < first_bytes {
            return Err(QueueError::Bytes { start, bytes: bytes as u64 });
        }
        Ok(NextEntry::Message(QueueMessage { label, bytes, first }))
    }

    /// Begins to read the message that [`QueueReceiver::peek`] has just returned: [`QueueReceiver::read`] then copies its first
    /// bytes. If the message has no bytes, its entry has been read.
    pub fn begin_message(&mut self, message: &QueueMessage) {
        self.unread = message.first;
        if message.bytes == 0 {
            self.finish_entry();
        }
    }

    /// Copies the bytes of the message that [`QueueReceiver::peek`] has just returned, as far as they are in its entry, to the
    /// start of `target`. Returns the number of bytes. [`QueueReceiver::read_rest`] then copies the other bytes. Panics if
    /// `target` is shorter than the message.
    #[inline]
    pub fn read_message(&mut self, message: &QueueMessage, target: &mut [u8]) -> usize {
        let (start, bytes) = message.first;
        self.memory.read(start, &mut target[..bytes]);
        self.finish_entry();
        bytes
    }

    /// Copies the bytes of the next entries until `target` is full, or until the next entry is not there after `looks` looks.
    /// Returns the number of bytes. `target` is the rest of a message or a part of it. Returns an error if the sender has
    /// written a wrong entry.
    pub fn read_rest(&mut self, target: &mut [u8], looks: u32) -> Result<usize, QueueError> {
        let mut filled = 0;
        while filled < target.len() && self.await_entry(looks) {
            match self.peek()? {
                NextEntry::Nothing => break,
                NextEntry::Bytes => {
                    filled += self.read(&mut [IoSliceMut::new(&mut target[filled..])], 0)?.bytes;
                }
                // A message does not begin in the middle of another message.
                NextEntry::Message(_) => return Err(QueueError::Kind(KIND_MESSAGE)),
            }
        }
        Ok(filled)
    }

    /// Copies bytes of one entry into `parts`, after their first `skip` bytes. Copies nothing if no entry is there, or if the
    /// entry is a message that [`QueueReceiver::begin_message`] has not begun. Returns an error if the sender has written a
    /// wrong entry.
    pub fn read(&mut self, parts: &mut [IoSliceMut<'_>], skip: usize) -> Result<QueueRead, QueueError> {
        if self.unread.1 == 0 {
            let Some([kind_and_bytes, start]) = self.next_words()? else { return Ok(QueueRead::default()) };
            match kind_and_bytes & KIND_MASK {
                KIND_BYTES => {}
                KIND_MESSAGE => return Ok(QueueRead::default()),
                kind => return Err(QueueError::Kind(kind)),
            }
            self.unread = self.check_bytes(kind_and_bytes >> 32, start)?;
        }
        let (mut start, mut left) = self.unread;
        let mut skip = skip;
        for part in parts {
            let first = skip.min(part.len());
            skip -= first;
            let end = part.len().min(first + left);
            if self.is_target_long {
                self.memory.read_past_caches(start, &mut part[first..end]);
            } else {
                self.memory.read(start, &mut part[first..end]);
            }
            start += end - first;
            left -= end - first;
        }
        let bytes = self.unread.1 - left;
        self.unread = (start, left);
        if left == 0 {
            self.finish_entry();
        }
        Ok(QueueRead { bytes, has_freed_space: left == 0 })
    }

    /// Returns the words 1 and 2 of the next cell; `None` if the entry is not there.
    #[inline]
    fn next_words(&self) -> Result<Option<[u64; 2]>, QueueError> {
        let stamp = self.memory.load(self.cell, Ordering::Acquire);
        if stamp == self.next + 1 {
            return Ok(Some(self.memory.load_words(self.cell + WORD_BYTES)));
        }
        // The cell still has the stamp of the entry that used it before, or no stamp.
        let stamp_before = (self.next + 1).saturating_sub(self.layout.cell_count as u64);
        if stamp == stamp_before { Ok(None) } else { Err(QueueError::Stamp(stamp)) }
    }

    /// Checks where the bytes of an entry are in the arena. Returns where they begin in the memory, and their number.
    #[inline]
    fn check_bytes(&self, bytes: u64, start: u64) -> Result<(usize, usize), QueueError> {
        let is_inside = start.checked_add(bytes).is_some_and(|end| end <= self.layout.arena_bytes as u64);
        if bytes == 0 || !is_inside {
            return Err(QueueError::Bytes { start, bytes });
        }
        Ok((self.layout.arena + start as usize, bytes as usize))
    }

    /// Counts the entry as read, so that the sender may overwrite it.
    #[inline]
    fn finish_entry(&mut self) {
        self.next += 1;
        self.cell = self.layout.cell_after(self.cell);
        // Release: the bytes have been read before the sender sees the number.
        self.memory.store(self.layout.read_count, self.next, Ordering::Release);
    }
}
