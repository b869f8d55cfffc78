//! Memory that the ranks of a host use in turns.

use super::memory::SegmentMemory as _;
use super::segment::{Segment, TOKEN_BYTES};

/// The number of bytes before the words. These bytes contain the token.
const HEADER_BYTES: usize = 128;

const _: () = assert!(TOKEN_BYTES <= HEADER_BYTES);

/// 32-bit words in shared memory that one rank at a time reads and writes. A rank gives the memory to another rank with a
/// message, and does not touch the words until it gets them back with another message.
pub struct HandoverBuffer {
    segment: Segment,
}

impl HandoverBuffer {
    /// Returns the length of a segment for `count` words. If the segment would be too long, returns a length that no operating
    /// system allows.
    pub fn segment_bytes(count: usize) -> usize {
        count.saturating_mul(size_of::<u32>()).saturating_add(HEADER_BYTES)
    }

    /// Uses all words of a segment of [`HandoverBuffer::segment_bytes`] bytes.
    pub fn new(segment: Segment) -> Self {
        Self { segment }
    }

    /// Returns the words. Call this method only while this rank has the memory.
    pub fn words(&mut self) -> &mut [u32] {
        let count = self.segment.length().saturating_sub(HEADER_BYTES) / size_of::<u32>();
        if count == 0 {
            return &mut [];
        }
        // SAFETY: the words are inside the mapping, which begins at the beginning of a page, and because of `&mut self` no other
        // thread of this process uses them. The other ranks run the same protocol: they touch the words only after they have
        // received a message that this rank sends when it no longer uses them.
        unsafe {
            let first = self.segment.base.add(HEADER_BYTES).cast::<u32>();
            std::slice::from_raw_parts_mut(first.as_ptr(), count)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_mappings_have_the_same_words_and_keep_the_token() {
        let (token, bytes) = ([3; TOKEN_BYTES], HandoverBuffer::segment_bytes(1000));
        let first = Segment::create(bytes, &token).unwrap();
        let open = || Segment::open(first.location().unwrap(), bytes, &token).map(HandoverBuffer::new);
        let (mut second, mut third) = (open().unwrap(), open().unwrap());
        assert_eq!(second.words(), [0; 1000]);
        second.words().fill(7);
        assert_eq!(third.words(), [7; 1000]);
        assert!(open().is_ok(), "the token is still there");
        let empty = Segment::create(HandoverBuffer::segment_bytes(0), &token).unwrap();
        assert_eq!(HandoverBuffer::new(empty).words(), [0; 0]);
        assert!(Segment::create(HandoverBuffer::segment_bytes(usize::MAX), &token).is_err());
    }
}
