//! Buffers in shared memory. While an operation exposes a buffer, the other ranks of the host read and write it in place. Ranks
//! use a [`HandoverBuffer`] in turns.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::memory::{SegmentMemory as _, WORD_BYTES};
use super::segment::{Segment, SegmentLocation, SparePages, TOKEN_BYTES};

/// The number of bytes before the elements. These bytes contain the token and the owner's flag.
const HEADER_BYTES: usize = 128;
/// The offset in bytes of the flag that the owner sets when it no longer exposes the buffer.
const WITHDRAWN_FLAG_OFFSET: usize = 64;

const _: () =
    assert!(TOKEN_BYTES <= WITHDRAWN_FLAG_OFFSET && WITHDRAWN_FLAG_OFFSET + WORD_BYTES <= HEADER_BYTES);

/// This process's mapping of a buffer, which in most cases belongs to another rank.
pub struct RemoteBuffer(Segment);

/// This rank's own buffer. While an operation exposes a part of the buffer, other ranks may read and write the part.
pub struct ExposedBuffer {
    mapping: RemoteBuffer,
    /// The pages that replace the buffer's pages after a failure.
    pub(super) spare_pages: Option<SparePages>,
}

impl ExposedBuffer {
    /// Creates a buffer of `length` bytes, which are all zero. Returns an error if the operating system refuses the memory.
    pub fn create(length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let segment = Segment::create(length_with_header(length)?, token)?;
        let spare_pages = Some(segment.map_spare_pages()?);
        Ok(Self { mapping: RemoteBuffer(segment), spare_pages })
    }

    /// Returns where other processes find the buffer, or `None` after [`ExposedBuffer::close_file`].
    pub fn location(&self) -> Option<SegmentLocation> {
        self.mapping.0.location()
    }

    pub fn close_file(&mut self) {
        drop(self.mapping.0.take_file());
    }

    /// Tells the other ranks that this rank will no longer expose the buffer.
    pub fn withdraw(&self) {
        self.mapping.0.store(WITHDRAWN_FLAG_OFFSET, 1, Ordering::Release);
    }

    /// Returns the contents. The first byte is aligned for every element type.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes are inside the mapping. Other ranks write to them only while an operation exposes them. The
        // operation borrows the bytes mutably, or owns them, until all ranks have reported that they are done.
        unsafe { std::slice::from_raw_parts(self.mapping.first_byte().as_ptr(), self.mapping.length()) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and because of `&mut self` no other thread of this process uses the bytes.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.first_byte().as_ptr(), self.mapping.length()) }
    }
}

impl RemoteBuffer {
    /// Opens a buffer of `length` bytes that another rank has created. Returns the errors of [`Segment::open`].
    pub fn open(location: SegmentLocation, length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        Segment::open(location, length_with_header(length)?, token).map(Self)
    }

    /// Returns the length of the elements in bytes.
    pub(super) fn length(&self) -> usize {
        self.0.length() - HEADER_BYTES
    }

    pub(super) fn is_withdrawn(&self) -> bool {
        self.0.load(WITHDRAWN_FLAG_OFFSET, Ordering::Acquire) != 0
    }

    /// Returns the address of the first byte of `range`, or `None` if `range` is not inside the buffer.
    pub fn address_of(&self, range: &Range<usize>) -> Option<NonNull<u8>> {
        let is_inside = range.start <= range.end && range.end <= self.length();
        // SAFETY: the range begins inside the mapping, or at its end.
        is_inside.then(|| unsafe { self.first_byte().add(range.start) })
    }

    fn first_byte(&self) -> NonNull<u8> {
        // SAFETY: the mapping is at least as long as the header.
        unsafe { self.0.base.add(HEADER_BYTES) }
    }
}

/// 32-bit words in shared memory that one rank at a time reads and writes. A rank gives the memory to another rank with a
/// message, and does not touch the words until it gets them back with another message.
pub struct HandoverBuffer(pub Segment);

impl HandoverBuffer {
    /// Returns the length of a segment for `count` words. If that is too long, no operating system allows the result.
    pub fn segment_bytes(count: usize) -> usize {
        count.saturating_mul(size_of::<u32>()).saturating_add(HEADER_BYTES)
    }

    /// Returns the words. Call this method only while this rank has the memory.
    pub fn words(&mut self) -> &mut [u32] {
        let count = self.0.length().saturating_sub(HEADER_BYTES) / size_of::<u32>();
        if count == 0 {
            return &mut [];
        }
        // SAFETY: the words are inside the mapping, which begins at the beginning of a page, and because of `&mut self` no other
        // thread of this process uses them. The other ranks run the same protocol: they touch the words only after they have
        // received a message that this rank sends when it no longer uses them.
        unsafe {
            let first = self.0.base.add(HEADER_BYTES).cast::<u32>();
            std::slice::from_raw_parts_mut(first.as_ptr(), count)
        }
    }
}

fn length_with_header(length: usize) -> io::Result<usize> {
    let sum = length.checked_add(HEADER_BYTES).filter(|&sum| isize::try_from(sum).is_ok());
    sum.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_ranks_access_the_bytes_of_the_buffer_and_no_other_bytes() {
        let token = [3; TOKEN_BYTES];
        let mut own = ExposedBuffer::create(1000, &token).unwrap();
        assert!(own.bytes().iter().all(|&byte| byte == 0) && own.bytes().len() == 1000);
        let other = RemoteBuffer::open(own.location().unwrap(), 1000, &token).unwrap();
        own.bytes_mut()[999] = 7;
        let last = other.address_of(&(999..1000)).unwrap();
        // SAFETY: the byte is inside the mapping, and only this thread uses it.
        assert_eq!(unsafe { last.read() }, 7);
        assert!(other.address_of(&(1000..1000)).is_some() && other.address_of(&(999..1001)).is_none());
        assert!(other.address_of(&(usize::MAX..usize::MAX)).is_none());
        assert!(!other.is_withdrawn());
        own.withdraw();
        drop(own);
        assert!(other.is_withdrawn());
    }

    #[test]
    fn a_buffer_longer_than_the_address_space_is_refused() {
        for length in [usize::MAX, isize::MAX as usize, 1 << 62] {
            assert!(ExposedBuffer::create(length, &[0; TOKEN_BYTES]).is_err());
        }
        assert!(ExposedBuffer::create(0, &[0; TOKEN_BYTES]).unwrap().bytes().is_empty());
        assert!(Segment::create(HandoverBuffer::segment_bytes(usize::MAX), &[0; TOKEN_BYTES]).is_err());
    }

    #[test]
    fn words_that_ranks_use_in_turns_do_not_overlap_the_token() {
        let (token, bytes) = ([3; TOKEN_BYTES], HandoverBuffer::segment_bytes(1000));
        let mut first = HandoverBuffer(Segment::create(bytes, &token).unwrap());
        first.words().fill(7);
        let other = Segment::open(first.0.location().unwrap(), bytes, &token).unwrap();
        assert_eq!(HandoverBuffer(other).words(), [7; 1000]);
        let empty = Segment::create(HandoverBuffer::segment_bytes(0), &token).unwrap();
        assert_eq!(HandoverBuffer(empty).words(), [0; 0]);
    }
}
