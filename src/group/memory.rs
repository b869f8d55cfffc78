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
                let room = memory.access().len() / *element_bytes;
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
            MemoryKind::Lent(loan) => loan.bytes(range),
            MemoryKind::Later(_) | MemoryKind::Fitting { .. } => None,
        }
    }

    /// The whole buffer, if it has been allocated, and what an operation may do with it.
    pub(super) fn access(&mut self) -> BufferAccess<'_> {
        match &mut self.0 {
            MemoryKind::Owned(owned) => owned.bytes_mut().into(),
            MemoryKind::Lent(loan) => loan.access(),
            MemoryKind::Later(_) | MemoryKind::Fitting { .. } => BufferAccess::default(),
        }
    }

    pub(super) fn bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match &mut self.0 {
            MemoryKind::Owned(owned) => owned.bytes_mut().get_mut(range),
            MemoryKind::Lent(loan) => loan.bytes_mut(&range),
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
        let whole = BorrowedMemory::new(self.access(), &token);
        let mut end = 0;
        let part = |range: &Range<usize>| {
            assert!(
                end <= range.start && range.start <= range.end && range.end <= whole.len(),
                "a part of its own"
            );
            end = range.end;
            Self(MemoryKind::Lent(whole.part(range, &token)))
        };
        let parts = ranges.iter().map(part).collect();
        drop(whole);
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

/// The buffer of an operation: bytes that it may only read and, behind them, bytes that it may also write. The two may lie
/// in different places. Offsets count through both.
#[derive(Default)]
pub(super) struct BufferAccess<'a> {
    input: &'a [u8],
    output: &'a mut [u8],
}

impl BufferAccess<'_> {
    /// How many bytes there are in both.
    pub(super) fn len(&self) -> usize {
        self.input.len() + self.output.len()
    }

    /// Some of the bytes.
    ///
    /// # Panics
    ///
    /// If the buffer ends before the range does, or the range begins in the input and ends in the output.
    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        bytes_of(self.input, self.output, range).expect("the range lies in one of the two")
    }

    /// Some of the bytes that may be written.
    ///
    /// # Panics
    ///
    /// If the range is not all in the output.
    pub(super) fn bytes_mut(&mut self, range: &Range<usize>) -> &mut [u8] {
        let range = in_output(self.input.len(), range);
        range.and_then(|range| self.output.get_mut(range)).expect("the range lies in the output")
    }

    /// The whole buffer, if all of it may be written.
    pub(super) fn all_writable(&self) -> Option<&[u8]> {
        self.input.is_empty().then_some(&*self.output)
    }
}

/// Some bytes of an input and the output behind it; `None` if neither has them all.
fn bytes_of<'a>(input: &'a [u8], output: &'a [u8], range: Range<usize>) -> Option<&'a [u8]> {
    if range.end <= input.len() { input.get(range) } else { output.get(in_output(input.len(), &range)?) }
}

/// Where a range begins and ends in the output behind an input of so many bytes; `None` if it begins in the input.
fn in_output(input_bytes: usize, range: &Range<usize>) -> Option<Range<usize>> {
    Some(range.start.checked_sub(input_bytes)?..range.end.checked_sub(input_bytes)?)
}

impl<'a> From<&'a [u8]> for BufferAccess<'a> {
    fn from(input: &'a [u8]) -> Self {
        Self { input, output: &mut [] }
    }
}

impl<'a> From<&'a mut [u8]> for BufferAccess<'a> {
    fn from(output: &'a mut [u8]) -> Self {
        Self { input: &[], output }
    }
}

impl<'a> From<(&'a [u8], &'a mut [u8])> for BufferAccess<'a> {
    fn from((input, output): (&'a [u8], &'a mut [u8])) -> Self {
        Self { input, output }
    }
}

/// Lends `bytes` to whatever `work` does, as memory of an operation. It has to be dropped before `work` returns; a process in
/// which it is not ends at once, for the caller would go on to use its buffer, or free it, while another thread uses it.
pub(super) fn lend<'a, R>(bytes: impl Into<BufferAccess<'a>>, work: impl FnOnce(Memory) -> R) -> R {
    let token = Arc::new(());
    let loan = BorrowedMemory::new(bytes.into(), &token);
    // It looks even if `work` panics.
    let _check = BorrowCheck(token);
    work(Memory(MemoryKind::Lent(loan)))
}

/// A caller's buffer, lent for as long as an operation is under way, or a part of an operation's. Only [`lend`] and
/// [`Memory::into_parts`] make one.
struct BorrowedMemory {
    /// As in [`BufferAccess`].
    input: *const [u8],
    output: *mut [u8],
    /// Tells the lender that the loan lives.
    _token: Arc<()>,
}

// SAFETY: a loan is the only way to its output while it lives (see `lend`; `SplitBuffer` gives no access to the whole), and
// its input is only read, so any one thread may use it.
unsafe impl Send for BorrowedMemory {}

impl BorrowedMemory {
    fn new(access: BufferAccess<'_>, token: &Arc<()>) -> Self {
        let BufferAccess { input, output } = access;
        Self { input, output, _token: Arc::clone(token) }
    }

    fn len(&self) -> usize {
        self.input.len() + self.output.len()
    }

    /// A range of the buffer, whose end is not before its start nor behind the buffer's end.
    fn part(&self, range: &Range<usize>, token: &Arc<()>) -> Self {
        let split = self.input.len();
        let input = range.start.min(split)..range.end.min(split);
        let output = range.start.max(split) - split..range.end.max(split) - split;
        let from = self.input.cast::<u8>().wrapping_add(input.start);
        let to = self.output.cast::<u8>().wrapping_add(output.start);
        Self {
            input: std::ptr::slice_from_raw_parts(from, input.len()),
            output: std::ptr::slice_from_raw_parts_mut(to, output.len()),
            _token: Arc::clone(token),
        }
    }

    fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        // SAFETY: `lend` had valid slices, and does not return them to their owner while the loan lives; no more does
        // `SplitBuffer`, whose whole stays where it is, for it is on the heap or a loan itself.
        let (input, output) = unsafe { (&*self.input, &*self.output) };
        bytes_of(input, output, range)
    }

    fn access(&mut self) -> BufferAccess<'_> {
        // SAFETY: as above; `lend` had the output mutably, and the loan itself is borrowed mutably.
        unsafe { BufferAccess { input: &*self.input, output: &mut *self.output } }
    }

    fn bytes_mut(&mut self, range: &Range<usize>) -> Option<&mut [u8]> {
        // SAFETY: as in `access`.
        unsafe { &mut *self.output }.get_mut(in_output(self.input.len(), range)?)
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
                    let length = part.access().len();
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
    fn an_input_and_an_output_are_used_as_one_buffer() {
        let (input, mut output) = ([1u8, 2, 3], [0u8; 2]);
        let work = |mut memory: Memory| {
            assert_eq!(memory.bytes(1..3), Some(&[2u8, 3][..]));
            assert!(memory.bytes(2..4).is_none() && memory.bytes(4..6).is_none());
            assert!(memory.bytes_mut(2..4).is_none() && memory.bytes_mut(0..1).is_none());
            memory.bytes_mut(3..4).unwrap().fill(8);
            let mut access = memory.access();
            assert!(access.len() == 5 && access.all_writable().is_none());
            access.bytes_mut(&(4..5)).copy_from_slice(&[9]);
            assert_eq!((access.bytes(0..2), access.bytes(3..5)), (&[1u8, 2][..], &[8u8, 9][..]));
            let (split, mut parts) = memory.into_parts(&[0..1, 2..4, 4..5]);
            parts[1].bytes_mut(1..2).unwrap().fill(7);
            assert_eq!((parts[1].bytes(0..1), parts[1].bytes(1..2)), (Some(&[3u8][..]), Some(&[7u8][..])));
            assert!(parts[0].bytes_mut(0..1).is_none() && parts[2].bytes(0..1) == Some(&[9u8][..]));
            drop(parts);
            drop(split.into_whole());
        };
        lend((&input[..], &mut output[..]), |memory| {
            std::thread::spawn(move || work(memory)).join().unwrap();
        });
        assert_eq!(output, [7, 9]);
    }

    #[test]
    fn what_is_lent_to_be_read_is_not_written() {
        lend(&[1u8, 2, 3][..], |mut lent| {
            assert_eq!(lent.bytes(1..3), Some(&[2u8, 3][..]));
            assert!(lent.bytes_mut(0..1).is_none());
        });
    }
}
