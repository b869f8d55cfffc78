//! Memory of one rank that the others of its host reach as well: a buffer that they read and write where it lies while an
//! operation lends it.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::segment::{Segment, SegmentLocation, SparePages, TOKEN_BYTES};

/// Bytes before the elements: the token, and the owner's flag.
const HEAD: usize = 128;
/// Where the flag stands that says that the owner has given the memory up.
const FLAG: usize = 64;

const _: () = assert!(TOKEN_BYTES <= FLAG && FLAG + size_of::<AtomicU32>() <= HEAD);

/// Another rank's memory, mapped. Dropping it takes the mapping back; the owner's is not touched.
pub struct RemoteBuffer {
    segment: Segment,
    length: usize,
}

/// This rank's own memory. Its bytes belong to whoever has it, but while an operation lends them.
pub struct ExposedBuffer(RemoteBuffer, Option<SparePages>);

impl ExposedBuffer {
    /// So many bytes, all zero.
    ///
    /// # Errors
    ///
    /// When the operating system refuses.
    pub fn create(length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let segment = Segment::create(whole(length)?, token)?;
        let spare = segment.spare_pages()?;
        Ok(Self(RemoteBuffer { segment, length }, Some(spare)))
    }

    /// What replaces the memory's pages after a failure. It is given once.
    pub(super) fn take_spare_pages(&mut self) -> Option<SparePages> {
        self.1.take()
    }

    /// Where others find it, until [`ExposedBuffer::close`].
    pub fn place(&self) -> Option<SegmentLocation> {
        self.0.segment.place()
    }

    /// From now on nobody can open it.
    pub fn close(&mut self) {
        self.0.segment.close();
    }

    /// Says to the others that its owner lends it no more.
    pub fn withdraw(&self) {
        self.0.flag().store(1, Ordering::Release);
    }

    /// What is in it. The first byte is aligned for every element type.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: they are inside of the mapping. Others write them only while an operation lends them, which has them borrowed
        // mutably or owns them until all ranks have said that they are done.
        unsafe { std::slice::from_raw_parts(self.0.first().as_ptr(), self.0.length) }
    }

    /// What is in it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` keeps this process's other threads away.
        unsafe { std::slice::from_raw_parts_mut(self.0.first().as_ptr(), self.0.length) }
    }

    /// The mapping, from its first byte on, and the first byte that is not its head.
    pub(super) fn extent(&self) -> (Range<usize>, usize) {
        let start = self.0.segment.base().as_ptr().expose_provenance();
        (start..start + self.0.segment.length(), start + HEAD)
    }
}

impl RemoteBuffer {
    /// The memory of so many bytes that another rank has created.
    ///
    /// # Errors
    ///
    /// When it cannot be opened, or is not what was promised.
    pub fn open(place: SegmentLocation, length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let segment = Segment::open(place, whole(length)?, token)?;
        Ok(Self { segment, length })
    }

    /// Bytes that can be lent.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Whether its owner has said that it lends it no more.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.flag().load(Ordering::Acquire) != 0
    }

    /// Where some of the bytes are; `None` if it has not so many.
    pub(super) fn part(&self, range: &Range<usize>) -> Option<NonNull<u8>> {
        let is_inside = range.start <= range.end && range.end <= self.length;
        // SAFETY: the range begins inside of the mapping, or at its end.
        is_inside.then(|| unsafe { self.first().add(range.start) })
    }

    fn first(&self) -> NonNull<u8> {
        // SAFETY: the mapping is longer than the head.
        unsafe { self.segment.base().add(HEAD) }
    }

    fn flag(&self) -> &AtomicU32 {
        // SAFETY: the flag is inside of the mapping and aligned, and all processes use it as an atomic alone.
        unsafe { self.segment.base().add(FLAG).cast::<AtomicU32>().as_ref() }
    }
}

/// Bytes with the head.
fn whole(length: usize) -> io::Result<usize> {
    let whole = length.checked_add(HEAD).filter(|&whole| isize::try_from(whole).is_ok());
    whole.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_reach_the_same_bytes_and_no_others() {
        let token = [3; TOKEN_BYTES];
        let mut own = ExposedBuffer::create(1000, &token).unwrap();
        assert!(own.bytes().iter().all(|&byte| byte == 0) && own.bytes().len() == 1000);
        let other = RemoteBuffer::open(own.place().unwrap(), 1000, &token).unwrap();
        own.bytes_mut()[999] = 7;
        let last = other.part(&(999..1000)).unwrap();
        // SAFETY: the byte is inside of the mapping, and this thread alone uses it.
        assert_eq!(unsafe { last.read() }, 7);
        assert!(other.part(&(1000..1000)).is_some() && other.part(&(999..1001)).is_none());
        assert!(other.part(&(usize::MAX..usize::MAX)).is_none());
        assert!(!other.is_withdrawn());
        own.withdraw();
        drop(own);
        assert!(other.is_withdrawn());
    }

    #[test]
    fn more_than_there_can_be_is_refused() {
        for length in [usize::MAX, isize::MAX as usize, 1 << 62] {
            assert!(ExposedBuffer::create(length, &[0; TOKEN_BYTES]).is_err());
        }
        assert!(ExposedBuffer::create(0, &[0; TOKEN_BYTES]).unwrap().bytes().is_empty());
    }
}
