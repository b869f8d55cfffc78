//! The last accesses to each word of bytes. Two accesses are a data race if one of them is a write, and neither happens before
//! the other.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::shm::WORD_BYTES;

/// The most simulated threads.
pub const THREADS_MAX: usize = 4;

/// For each thread, a number of its accesses.
pub type Clock = [u32; THREADS_MAX];

/// An access of a thread to bytes.
#[derive(Clone, Copy)]
pub struct Access {
    pub thread: usize,
    /// The number of the access.
    pub now: u32,
    /// The accesses that happen before this access.
    pub before: Clock,
}

/// The last accesses to the bytes of a word.
#[derive(Clone, Copy, Default)]
pub struct LastAccesses {
    writer: usize,
    written: u32,
    read: Clock,
}

impl LastAccesses {
    /// Records a read. Returns whether it is a data race.
    pub fn read(&mut self, access: &Access) -> bool {
        self.read[access.thread] = access.now;
        self.written > access.before[self.writer]
    }

    /// Records a write. Returns whether it is a data race.
    pub fn write(&mut self, access: &Access) -> bool {
        let is_race = self.written > access.before[self.writer]
            || self.read.iter().zip(&access.before).any(|(read, before)| read > before);
        (self.writer, self.written) = (access.thread, access.now);
        is_race
    }
}

/// Splits a range of bytes where words begin. Returns the offset of each part, and its place in the range.
pub fn split_at_words(start: usize, length: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let end = start + length;
    let words = if length == 0 { 0..0 } else { start / WORD_BYTES..end.div_ceil(WORD_BYTES) };
    words.map(move |word| {
        let (first, last) = (start.max(word * WORD_BYTES), end.min((word + 1) * WORD_BYTES));
        (first, first - start..last - start)
    })
}

/// Buffers in the memory of this process that have a mapping for each thread. Threads access the bytes themselves.
#[derive(Default)]
pub struct MappedBuffers {
    /// For each mapping, by the address of its first byte: the index of its buffer.
    mappings: BTreeMap<usize, usize>,
    /// For each buffer, the last accesses to each of its words.
    buffers: Vec<Vec<LastAccesses>>,
}

impl MappedBuffers {
    /// Adds a buffer of `length` bytes. `mappings` are the addresses at which the threads have mapped the first byte.
    pub fn add(&mut self, length: usize, mappings: impl IntoIterator<Item = usize>) {
        self.mappings.extend(mappings.into_iter().map(|address| (address, self.buffers.len())));
        self.buffers.push(vec![LastAccesses::default(); length.div_ceil(WORD_BYTES)]);
    }

    /// Returns the words to which `bytes` belong. Returns none if the bytes are not in a mapping.
    pub fn words(&mut self, bytes: *const [u8]) -> &mut [LastAccesses] {
        let address = bytes.cast::<u8>().addr();
        let Some((first, &buffer)) = self.mappings.range(..=address).next_back() else { return &mut [] };
        let start = address - first;
        let words = start / WORD_BYTES..(start + bytes.len()).div_ceil(WORD_BYTES);
        self.buffers[buffer].get_mut(words).unwrap_or_default()
    }
}
