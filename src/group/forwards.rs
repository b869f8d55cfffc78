//! Partial sums on their way from one peer to the next. They are never stored in the caller's buffer, which saves writing it
//! once for each hop of a reduce-scatter.

use std::collections::VecDeque;
use std::ops::Range;

/// The most bytes that wait to be sent on; what exceeds them is stored in the caller's buffer after all. A fixed bound that
/// held back receiving instead would stop a ring on which everybody waits for everybody.
const BYTES_MAX: usize = 1 << 20;

/// Bytes in words, so that every element type is aligned.
pub(super) type Words = Vec<u64>;

/// Partial sums that have been received and not been given out to be sent, in the order in which they came.
#[derive(Default)]
pub(super) struct Forwards {
    queue: VecDeque<(Range<usize>, Words)>,
    queued_bytes: usize,
    /// Memory for further ones.
    spare: Vec<Words>,
}

impl Forwards {
    /// Whether `bytes` more may wait.
    pub(super) fn has_room_for(&self, bytes: usize) -> bool {
        self.queued_bytes + bytes <= BYTES_MAX
    }

    /// Keeps what belongs to `range` of the buffer, in bytes, until it is sent; returns other memory for it.
    pub(super) fn push(&mut self, range: Range<usize>, words: Words) -> Words {
        self.queued_bytes += range.len();
        self.queue.push_back((range, words));
        self.spare.pop().unwrap_or_default()
    }

    /// The partial sum for `range` of the buffer, in bytes, if it has not been stored there.
    pub(super) fn take(&mut self, range: &Range<usize>) -> Option<Words> {
        let (found, words) = self.queue.pop_front_if(|(waiting, _)| waiting == range)?;
        self.queued_bytes -= found.len();
        Some(words)
    }

    /// Takes memory back that has been sent.
    pub(super) fn recycle(&mut self, words: Words) {
        self.spare.push(words);
    }

    /// Forgets what a failed operation has left.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.queued_bytes = 0;
    }
}
