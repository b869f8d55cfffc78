//! The receiver's end of a queue.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::entry::{
    BYTES_IN_CELL_MAX, EntryBytes, KIND_BEGIN, KIND_BYTES, KIND_MASK, KIND_MESSAGE, NextEntry, PASSES_BUFFER,
    QueueError, QueueMessage,
};
use crate::shm::host::{HostMemoryLayout, QueueLayout};
use crate::shm::memory::{SegmentMemory, WORD_BYTES, pause_between_looks};

pub struct QueueReceiver<M> {
    memory: Arc<M>,
    layout: QueueLayout,
    /// The number of the entry that this rank reads next or is reading.
    next: u64,
    /// The offset of its cell in the memory.
    cell: usize,
    /// The bytes of this entry that have not been read; none if this rank has not begun to read it.
    unread: EntryBytes,
    /// The passed buffers of this rank, for `QueueSender::write_message`. The last one is that whose bytes it has read last.
    pub owned: Vec<u8>,
    /// Whether the parts that [`QueueReceiver::read`] fills belong to a buffer that is longer than the caches.
    pub is_target_long: bool,
}

impl<M: SegmentMemory> QueueReceiver<M> {
    /// Creates the receiver's end of the queue from rank `from` to rank `to` of the host. The queue must be new. Panics if the
    /// memory is too small, or if the ranks are not two ranks of the layout.
    pub fn new(memory: Arc<M>, layout: HostMemoryLayout, from: usize, to: usize) -> Self {
        assert!(memory.length() >= layout.bytes(), "the memory must be large enough for all ranks");
        let layout = layout.queue(from, to);
        let owned = vec![u8::from(from < to)];
        Self {
            memory,
            layout,
            next: 0,
            cell: layout.cell(0),
            unread: EntryBytes::NONE,
            owned,
            is_target_long: false,
        }
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
        self.finish_entry(None);
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

    /// Returns what the next entry is: bytes if a part of it has been read. Returns an error if the sender wrote it wrongly.
    #[inline]
    pub fn peek(&self) -> Result<NextEntry, QueueError> {
        if self.unread.count > 0 {
            return Ok(NextEntry::Bytes);
        }
        let Some([kind_and_bytes, word]) = self.next_words()? else { return Ok(NextEntry::Nothing) };
        if kind_and_bytes & KIND_MASK != KIND_MESSAGE {
            return Ok(NextEntry::Bytes);
        }
        let [label_0, label_1, bytes] = self.memory.load_words(self.cell + 3 * WORD_BYTES);
        let label = [label_0, label_1];
        let count = (kind_and_bytes >> 32) as u32;
        if count as usize <= BYTES_IN_CELL_MAX {
            let first = EntryBytes { start: self.cell + 5 * WORD_BYTES, count, passed: None };
            return Ok(NextEntry::Message(QueueMessage { label, bytes: count as usize, first }));
        }
        let first = self.check_bytes(count, word)?;
        if bytes < u64::from(count) {
            return Err(QueueError::Bytes { start: word & !PASSES_BUFFER, bytes });
        }
        Ok(NextEntry::Message(QueueMessage { label, bytes: bytes as usize, first }))
    }

    /// Begins to read the message that [`QueueReceiver::peek`] has just returned: [`QueueReceiver::read`] then copies its first
    /// bytes. If the message has no bytes, its entry has been read.
    pub fn begin_message(&mut self, message: &QueueMessage) {
        self.unread = message.first;
        if message.bytes == 0 {
            self.finish_entry(None);
        }
    }

    /// Copies the bytes of the message that [`QueueReceiver::peek`] has just returned, as far as they are in its entry, to the
    /// start of `target`. Returns the number of bytes. [`QueueReceiver::read_rest`] then copies the other bytes. Panics if
    /// `target` is shorter than the message.
    #[inline]
    pub fn read_message(&mut self, message: &QueueMessage, target: &mut [u8]) -> usize {
        let EntryBytes { start, count, passed } = message.first;
        self.memory.read(start, &mut target[..count as usize]);
        self.finish_entry(passed);
        count as usize
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
                    filled += self.read(&mut [IoSliceMut::new(&mut target[filled..])], 0)?;
                }
                // A message does not begin in the middle of another message.
                NextEntry::Message(_) => return Err(QueueError::Kind(KIND_MESSAGE)),
            }
        }
        Ok(filled)
    }

    /// Copies bytes of one entry into `parts`, after their first `skip` bytes. Returns their number: 0 if no entry is there, or
    /// if the entry is a message that has not been begun. Returns an error if the sender has written a wrong entry.
    pub fn read(&mut self, parts: &mut [IoSliceMut<'_>], skip: usize) -> Result<usize, QueueError> {
        if self.unread.count == 0 {
            let Some([kind_and_bytes, start]) = self.next_words()? else { return Ok(0) };
            match kind_and_bytes & KIND_MASK {
                KIND_BYTES => {}
                KIND_MESSAGE => return Ok(0),
                kind => return Err(QueueError::Kind(kind)),
            }
            self.unread = self.check_bytes((kind_and_bytes >> 32) as u32, start)?;
        }
        let EntryBytes { mut start, count, passed } = self.unread;
        let (mut skip, mut left) = (skip, count as usize);
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
        self.unread = EntryBytes { start, count: left as u32, passed };
        if left == 0 {
            self.finish_entry(passed);
        }
        Ok(count as usize - left)
    }

    /// Returns the words 1 and 2 of the next cell; `None` if the entry is not there.
    #[inline]
    fn next_words(&self) -> Result<Option<[u64; 2]>, QueueError> {
        let stamp = self.memory.load(self.cell, Ordering::Acquire);
        if stamp == self.next + 1 {
            return Ok(Some(self.memory.load_words(self.cell + WORD_BYTES)));
        }
        // The cell still has the stamp of the entry that used it before, or no stamp.
        let stamp_before = (self.next + 1).saturating_sub(self.layout.host.cell_count as u64);
        if stamp == stamp_before { Ok(None) } else { Err(QueueError::Stamp(stamp)) }
    }

    /// Checks word 2 of an entry with `count` bytes, which says where they are.
    #[inline]
    fn check_bytes(&self, count: u32, word: u64) -> Result<EntryBytes, QueueError> {
        let (end, arena_bytes) = (word.saturating_add(u64::from(count)), self.layout.host.arena_bytes as u64);
        if count > 0 && end <= arena_bytes {
            return Ok(EntryBytes { start: self.layout.arena + word as usize, count, passed: None });
        }
        self.check_passed_bytes(count, word)
    }

    /// The same for an entry whose bytes are not in the arena. They must be in a passed buffer of the sender.
    fn check_passed_bytes(&self, count: u32, word: u64) -> Result<EntryBytes, QueueError> {
        let place = word & !PASSES_BUFFER;
        let find_inside = |buffer: u8| {
            let skip = place.checked_sub(self.layout.place_in_passed(buffer))?;
            let is_inside = count > 0 && skip + u64::from(count) <= self.layout.host.passed_bytes as u64;
            is_inside.then(|| (buffer, self.layout.passed[usize::from(buffer)] + skip as usize))
        };
        let found =
            [0, 1].into_iter().find_map(find_inside).filter(|(buffer, _)| !self.owned.contains(buffer));
        let (buffer, start) = found.ok_or(QueueError::Bytes { start: place, bytes: count.into() })?;
        Ok(EntryBytes { start, count, passed: (word != place).then_some(buffer) })
    }

    /// Counts the entry as read, so that the sender may overwrite it. The buffer `passed` belongs to this rank from now on.
    #[inline]
    fn finish_entry(&mut self, passed: Option<u8>) {
        if let Some(buffer) = passed {
            self.owned.push(buffer);
        }
        self.next += 1;
        self.cell = self.layout.cell_after(self.cell);
        // Release: the bytes have been read before the sender sees the number.
        self.memory.store(self.layout.read_count, self.next, Ordering::Release);
    }
}
