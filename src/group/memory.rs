//! The memory that operations read and write while they are under way.
//!
//! It is either owned by the operation, which gives it back at its end, or lent by a caller that waits for that end. The
//! loan is the one place of the room where a check at run time takes the place of the compiler's.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::buffer::OwnedBuffer;
use crate::types::Element;

/// Elements that an operation owns.
trait Owned: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<B: OwnedBuffer> Owned for B {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.as_ref())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.as_mut())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// An operation's buffer.
pub struct Memory(MemoryKind);

enum MemoryKind {
    Owned(Box<dyn Owned>),
    Lent(BorrowedMemory),
    /// Allocated when the message's length is known; `None` if there is not so much memory.
    Later(fn(usize) -> Option<Box<dyn Owned>>),
    /// One or the other of these, once the message's length is known: the memory, if it has so many elements, or one that is
    /// allocated.
    Fitting {
        memory: Box<Memory>,
        element_bytes: usize,
        allocate: fn(usize) -> Option<Box<dyn Owned>>,
    },
}

impl Memory {
    /// No elements.
    pub fn none() -> Self {
        Self::owned(Vec::<u8>::new())
    }

    /// Elements that the operation owns until it has ended.
    pub fn owned(elements: impl OwnedBuffer) -> Self {
        Self(MemoryKind::Owned(Box::new(elements)))
    }

    /// As many elements as the message that is received turns out to have.
    pub fn later<T: Element>() -> Self {
        Self(MemoryKind::Later(|count| {
            zeroed::<T>(count).map(|elements| Box::new(elements) as Box<dyn Owned>)
        }))
    }

    /// This memory for a message that fits, and other memory for a longer one.
    pub(super) fn if_it_fits<T: Element>(self) -> Self {
        let Self(MemoryKind::Later(allocate)) = Self::later::<T>() else { return self };
        Self(MemoryKind::Fitting { memory: Box::new(self), element_bytes: size_of::<T>(), allocate })
    }

    /// Allocates what could not be allocated before the number of elements was known; whether there is so much memory.
    pub(super) fn prepare(&mut self, count: usize) -> bool {
        let allocate = match &mut self.0 {
            MemoryKind::Owned(_) | MemoryKind::Lent(_) => return true,
            MemoryKind::Later(allocate) => *allocate,
            MemoryKind::Fitting { memory, element_bytes, allocate } => {
                let room = memory.access().bytes().len() / *element_bytes;
                if count <= room {
                    *self = std::mem::replace(&mut **memory, Self::none());
                    return true;
                }
                *allocate
            }
        };
        let Some(owned) = allocate(count) else { return false };
        self.0 = MemoryKind::Owned(owned);
        true
    }

    pub(super) fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        match &self.0 {
            MemoryKind::Owned(owned) => owned.bytes().get(range),
            MemoryKind::Lent(loan) => loan.bytes().get(range),
            MemoryKind::Later(_) | MemoryKind::Fitting { .. } => None,
        }
    }

    /// The whole buffer, if it has been allocated, and what may be done with it.
    pub(super) fn access(&mut self) -> BufferAccess<'_> {
        match &mut self.0 {
            MemoryKind::Owned(owned) => BufferAccess::Write(owned.bytes_mut()),
            MemoryKind::Lent(loan) => {
                if loan.is_writable {
                    BufferAccess::Write(loan.bytes_mut().unwrap_or_default())
                } else {
                    BufferAccess::Read(loan.bytes())
                }
            }
            MemoryKind::Later(_) | MemoryKind::Fitting { .. } => BufferAccess::Read(&[]),
        }
    }

    pub(super) fn bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match &mut self.0 {
            MemoryKind::Owned(owned) => owned.bytes_mut().get_mut(range),
            MemoryKind::Lent(loan) => loan.bytes_mut()?.get_mut(range),
            MemoryKind::Later(_) | MemoryKind::Fitting { .. } => None,
        }
    }

    /// Gives parts of the buffer, such as operations of their own may have at the same time, and what keeps the whole.
    ///
    /// # Panics
    ///
    /// If they overlap, do not follow each other, or are more than there is.
    pub(super) fn into_parts(mut self, ranges: &[Range<usize>]) -> (SplitBuffer, Vec<Self>) {
        let token = Arc::new(());
        let (start, length, is_writable) = match self.access() {
            BufferAccess::Read(bytes) => (bytes.as_ptr().cast_mut(), bytes.len(), false),
            BufferAccess::Write(bytes) => (bytes.as_mut_ptr(), bytes.len(), true),
        };
        let mut end = 0;
        let part = |range: &Range<usize>| {
            assert!(
                end <= range.start && range.start <= range.end && range.end <= length,
                "a part of its own"
            );
            end = range.end;
            let start = start.wrapping_add(range.start);
            Self(MemoryKind::Lent(BorrowedMemory {
                start,
                length: range.len(),
                is_writable,
                _token: Arc::clone(&token),
            }))
        };
        let parts = ranges.iter().map(part).collect();
        (SplitBuffer { returned: BorrowCheck(token), whole: self }, parts)
    }

    /// The elements that the operation owned; none if it owned none of this type.
    pub fn into_elements<T: Element>(self) -> Vec<T> {
        self.into_owned().unwrap_or_default()
    }

    /// What the operation owned; `None` if that was nothing of this type.
    pub(super) fn into_owned<B: OwnedBuffer>(self) -> Option<B> {
        match self.0 {
            MemoryKind::Owned(owned) => owned.into_any().downcast().ok().map(|elements| *elements),
            MemoryKind::Lent(_) | MemoryKind::Later(_) | MemoryKind::Fitting { .. } => None,
        }
    }
}

/// A buffer whose parts are in use. As with [`lend`], the process ends if it is dropped before all of them.
pub(super) struct SplitBuffer {
    /// Dropped first.
    returned: BorrowCheck,
    whole: Memory,
}

impl SplitBuffer {
    /// The whole buffer, whose parts have all been dropped.
    pub(super) fn into_whole(self) -> Memory {
        let Self { returned, whole } = self;
        drop(returned);
        whole
    }
}

/// So many zeros; `None` if that is more memory than there can be, or than there is. The number may be a peer's claim.
pub(super) fn zeroed<T: Element>(count: usize) -> Option<Vec<T>> {
    bytemuck::allocation::try_zeroed_slice_box(count).ok().map(Vec::from)
}

/// A caller's buffer, by which it also says what an operation may do with it.
pub(super) enum BufferAccess<'a> {
    /// Read it.
    Read(&'a [u8]),
    /// Read and write it.
    Write(&'a mut [u8]),
}

impl BufferAccess<'_> {
    /// What it has.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Read(bytes) => bytes,
            Self::Write(bytes) => bytes,
        }
    }

    /// What may be written; nothing, if it may only be read.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Read(_) => &mut [],
            Self::Write(bytes) => bytes,
        }
    }
}

impl<'a> From<&'a [u8]> for BufferAccess<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Read(bytes)
    }
}

impl<'a> From<&'a mut [u8]> for BufferAccess<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Write(bytes)
    }
}

/// Lends `bytes` to whatever `work` does, as memory of an operation. It has to be dropped before `work` returns; a process in
/// which it is not ends at once, for the caller would go on to use its buffer, or free it, while another thread writes there.
pub(super) fn lend<'a, R>(bytes: impl Into<BufferAccess<'a>>, work: impl FnOnce(Memory) -> R) -> R {
    let token = Arc::new(());
    let (start, length, is_writable) = match bytes.into() {
        BufferAccess::Read(bytes) => (bytes.as_ptr().cast_mut(), bytes.len(), false),
        BufferAccess::Write(bytes) => (bytes.as_mut_ptr(), bytes.len(), true),
    };
    let loan = BorrowedMemory { start, length, is_writable, _token: Arc::clone(&token) };
    // It looks even if `work` panics.
    let _check = BorrowCheck(token);
    work(Memory(MemoryKind::Lent(loan)))
}

/// A caller's buffer, lent for as long as an operation is under way, or a part of an operation's. Only [`lend`] and
/// [`Memory::into_parts`] make one.
struct BorrowedMemory {
    start: *mut u8,
    length: usize,
    /// Whether the lender had it to write to.
    is_writable: bool,
    /// Tells the lender that the loan lives.
    _token: Arc<()>,
}

// SAFETY: a loan is the only way to its bytes while it lives (see `lend`; `SplitBuffer` gives no access to the whole), so any
// one thread may use it.
unsafe impl Send for BorrowedMemory {}

impl BorrowedMemory {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `lend` had a valid slice, and does not return it to its owner while the loan lives; no more does `SplitBuffer`,
        // whose whole stays where it is, for it is on the heap or a loan itself.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if !self.is_writable {
            return None;
        }
        // SAFETY: as above, `lend` had the slice mutably, and the loan itself is borrowed mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(self.start, self.length) })
    }
}

/// Sees to it that the loan has come back.
struct BorrowCheck(Arc<()>);

impl Drop for BorrowCheck {
    fn drop(&mut self) {
        // Only the loan has the other one. Its drop happened before, in whatever thread, or this reads 2.
        if Arc::get_mut(&mut self.0).is_none() {
            eprintln!(
                "ringtrain: a collective ended while its buffer was in use; this is a bug, and the process ends"
            );
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_owned_comes_back_and_what_is_lent_is_changed_in_place() {
        let mut owned = Memory::owned(vec![1u32, 2, 3]);
        owned.bytes_mut(4..8).unwrap().copy_from_slice(&7u32.to_ne_bytes());
        assert!(owned.bytes(8..13).is_none());
        assert_eq!(owned.into_elements::<u32>(), [1, 7, 3]);

        let mut access = [1u8, 2, 3];
        lend(&mut access[..], |mut lent| {
            // As the progress thread does.
            std::thread::spawn(move || {
                lent.bytes_mut(0..2).unwrap().fill(9);
                assert!(lent.into_elements::<u8>().is_empty());
            })
            .join()
            .unwrap();
        });
        assert_eq!(access, [9, 9, 3]);

        let mut later = Memory::later::<f64>();
        assert!(later.bytes(0..0).is_none());
        assert!(later.prepare(2));
        assert!(later.prepare(5));
        assert_eq!(later.into_elements::<f64>(), [0.0, 0.0]);
        assert!(Memory::owned(vec![1u8]).into_elements::<f32>().is_empty());
        assert!(!Memory::later::<f64>().prepare(usize::MAX));
    }

    #[test]
    fn what_does_not_fit_is_put_elsewhere() {
        for (count, fits) in [(0, true), (2, true), (3, false)] {
            let mut memory = Memory::owned(vec![7u16, 7]).if_it_fits::<u16>();
            assert!(memory.bytes_mut(0..0).is_none());
            assert!(memory.prepare(count));
            let elements: Vec<u16> = memory.into_elements();
            assert_eq!(elements, if fits { vec![7, 7] } else { vec![0; 3] });
        }
        assert!(!Memory::owned(vec![7u16]).if_it_fits::<u16>().prepare(usize::MAX));
    }

    #[test]
    fn parts_are_used_at_the_same_time_and_the_whole_comes_back() {
        let work = |whole: Memory| {
            let (parted, parts) = whole.into_parts(&[0..2, 2..2, 3..6]);
            let write = |(index, mut part): (usize, Memory)| {
                std::thread::spawn(move || {
                    let length = part.access().bytes().len();
                    part.bytes_mut(0..length).unwrap().fill(index as u8 + 7);
                    assert!(part.bytes(0..length + 1).is_none());
                })
            };
            let threads: Vec<_> = parts.into_iter().enumerate().map(write).collect();
            for thread in threads {
                thread.join().unwrap();
            }
            parted.into_whole()
        };
        assert_eq!(work(Memory::owned(vec![0u8; 7])).into_elements::<u8>(), [7, 7, 0, 9, 9, 9, 0]);
        let mut lent = [0u8; 6];
        lend(&mut lent[..], |memory| drop(work(memory)));
        assert_eq!(lent, [7, 7, 0, 9, 9, 9]);
    }

    #[test]
    #[should_panic(expected = "a part of its own")]
    fn parts_do_not_overlap() {
        let _ = Memory::owned(vec![0u8; 7]).into_parts(&[0..3, 2..4]);
    }

    #[test]
    fn what_is_lent_to_be_read_is_not_written() {
        lend(&[1u8, 2, 3][..], |mut lent| {
            assert_eq!(lent.bytes(1..3), Some(&[2u8, 3][..]));
            assert!(lent.bytes_mut(0..1).is_none());
        });
    }
}
