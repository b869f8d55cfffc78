//! Words and bytes of shared memory. The queues use shared memory only through [`SegmentMemory`], and the rounds through
//! [`RoundsMemory`], so that tests can run them on other memory than a mapped segment.

use std::ops::{Deref, Range};
use std::sync::atomic::Ordering;

pub const WORD_BYTES: usize = size_of::<u64>();
/// The unit of layouts: two cache lines, which some processors fetch together. Words that different ranks write share no unit.
pub(super) const UNIT_BYTES: usize = 128;
/// A thread that looks for a change of a word pauses once after this number of looks.
const LOOKS_PER_PAUSE: u32 = 8;

/// Lets the processor pause after some looks for a change of a peer's word. A pause helps another thread that shares this
/// processor core, but takes longer than several looks.
#[inline]
pub fn pause_between_looks(look: u32) {
    if look.is_multiple_of(LOOKS_PER_PAUSE) {
        std::hint::spin_loop();
    }
}

/// Counts how often a rank uses a part of the memory, which it populates at the fourth use: rare calls use few pages (ADR 104).
#[derive(Clone, Copy, Default)]
pub(super) struct Uses(u8);

impl Uses {
    /// Counts a use. Returns whether the part is to be populated now.
    #[inline]
    pub(super) fn count(&mut self) -> bool {
        self.0 = (self.0 + 1).min(5);
        self.0 == 4
    }
}

/// Memory that several processes read and write at any time, so no method returns a reference into it. Words are read and
/// written as atomics, and payloads are copied. All offsets are in bytes. The methods panic if a word or a range is not inside
/// the memory, or if a word is not aligned. They know the line of their caller, because tests change accesses of single lines.
pub trait SegmentMemory {
    fn length(&self) -> usize;

    #[track_caller]
    fn load(&self, offset: usize, ordering: Ordering) -> u64;

    #[track_caller]
    fn store(&self, offset: usize, value: u64, ordering: Ordering);

    /// Returns the values of `N` words from `offset` on, with [`Ordering::Relaxed`].
    #[track_caller]
    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let mut values = [0; N];
        for (index, value) in values.iter_mut().enumerate() {
            *value = self.load(offset + index * WORD_BYTES, Ordering::Relaxed);
        }
        values
    }

    /// Sets `N` words from `offset` on, with [`Ordering::Relaxed`].
    #[track_caller]
    fn store_words<const N: usize>(&self, offset: usize, values: &[u64; N]) {
        for (index, value) in values.iter().enumerate() {
            self.store(offset + index * WORD_BYTES, *value, Ordering::Relaxed);
        }
    }

    /// Begins to fetch the byte at `offset` into the caches, because this thread will read it soon. Does nothing by default.
    fn prefetch(&self, _offset: usize) {}

    /// Makes the system provide the pages of these bytes now. Otherwise the first access to each page takes some microseconds.
    /// Returns false if the system cannot do this (Linux before 5.14).
    fn populate(&self, _bytes: Range<usize>) -> bool {
        false
    }

    /// Sets the word at `offset`, and returns its value before.
    #[track_caller]
    fn swap(&self, offset: usize, value: u64, ordering: Ordering) -> u64;

    /// Orders all earlier accesses of this thread before all later ones, as [`fence`] with [`Ordering::SeqCst`] does.
    #[track_caller]
    fn fence(&self);

    /// Copies the bytes from `start` on to `target`, which has an unspecified content if another process writes them meanwhile.
    #[track_caller]
    fn read(&self, start: usize, target: &mut [u8]);

    /// Does the same as [`SegmentMemory::read`], for a target that is longer than the caches or a part of such a buffer.
    #[track_caller]
    fn read_past_caches(&self, start: usize, target: &mut [u8]) {
        self.read(start, target);
    }

    #[track_caller]
    fn write(&self, start: usize, source: &[u8]);
}

/// Shared memory whose bytes a rank may use in place while no other rank writes them.
pub trait RoundsMemory: SegmentMemory {
    /// Bytes of this memory, or of memory of this process.
    type Bytes<'a>: Deref<Target = [u8]> + From<&'a [u8]>
    where
        Self: 'a;

    /// Returns the `length` bytes from `start` on. Simulated memory returns a copy.
    ///
    /// # Safety
    ///
    /// No thread of any process may write the bytes while the result is in use.
    #[track_caller]
    unsafe fn bytes(&self, start: usize, length: usize) -> Self::Bytes<'_>;

    /// Called before this thread accesses `bytes` of an exposed buffer. Simulated memory then looks for data races.
    fn before_access_in_place(&self, bytes: *const [u8], is_write: bool);
}

#[cfg(test)]
mod tests {
    use super::super::segment::Segment;
    use super::*;

    #[test]
    fn an_access_that_does_not_end_inside_the_memory_panics() {
        let segment = &Segment::for_tests(4096, 1)[0];
        for (start, length) in [(4096, 1), (4089, 8), (usize::MAX, 2)] {
            let write = || segment.write(start, &vec![0; length]);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).is_err());
        }
        segment.write(4096, &[]);
    }
}
