//! The buffers of operations.
//!
//! An operation either owns its buffer until the operation ends, or borrows the buffer of a caller that waits for this end. The
//! compiler cannot check such a borrow, because other threads may work on the operation. So the borrow is checked at run time.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::buffer::{BufferAccess, OwnedBuffer, range_of};
use crate::types::Element;

pub struct Memory {
    /// The input and the output, as in [`BufferAccess`].
    input: *const [u8],
    output: *mut [u8],
    keeper: Keeper,
    /// How to allocate memory for a longer message, when the length of the message is known.
    if_longer: Option<Allocate>,
}

/// What keeps the bytes of a [`Memory`] at their address.
enum Keeper {
    Owner(Box<dyn Any + Send>),
    /// A buffer of the caller, or a part of another operation's. While the token lives, [`BorrowCheck`] knows that it is in use.
    Borrow {
        _token: Arc<()>,
    },
}

/// Returns memory for this number of elements; `None` if there is not enough memory.
type Allocate = fn(usize) -> Option<Memory>;

// SAFETY: while this memory lives, it is the only access to its output: it has the owner of the output, or has borrowed the
// output (see `lend`; `SplitBuffer` gives no access to the whole buffer). Its input is only read. So any thread may use it.
unsafe impl Send for Memory {}

impl Memory {
    pub fn none() -> Self {
        Self::owned(Vec::<u8>::new())
    }

    /// Returns memory that the operation owns until it has ended.
    pub fn owned<B: OwnedBuffer>(mut elements: B) -> Self {
        let output: *mut [u8] = bytemuck::cast_slice_mut::<B::Element, u8>(elements.as_mut());
        // The empty input is aligned, too.
        let input = std::ptr::slice_from_raw_parts(output.cast::<u8>(), 0);
        Self::new(input, output, Keeper::Owner(Box::new(elements)))
    }

    /// Returns memory that the operation owns until it has ended, and only reads.
    pub(crate) fn owned_input<B: OwnedBuffer>(elements: B) -> Self {
        let input: *const [u8] = bytemuck::cast_slice::<B::Element, u8>(elements.as_ref());
        Self::new(input, &mut [], Keeper::Owner(Box::new(elements)))
    }

    /// The keeper must keep the input and the output at their addresses.
    fn new(input: *const [u8], output: *mut [u8], keeper: Keeper) -> Self {
        Self { input, output, keeper, if_longer: None }
    }

    /// Returns memory for a message of at most `count_max` elements: this memory, or a new vector if the message does not fit.
    pub(crate) fn or_allocated_for<T: Element>(self, count_max: usize) -> Self {
        let allocate: Allocate = |count| zeroed::<T>(count).map(Self::owned);
        let may_be_longer = count_max > self.length() / size_of::<T>();
        Self { if_longer: may_be_longer.then_some(allocate), ..self }
    }

    /// Allocates memory for a message of `count` elements, if it does not fit into this memory. Returns whether there is enough.
    pub(crate) fn allocate_for_message(&mut self, count: usize, element_bytes: usize) -> bool {
        let Some(allocate) = self.if_longer.take() else { return true };
        if count <= self.length() / element_bytes {
            return true;
        }
        let Some(allocated) = allocate(count) else { return false };
        *self = allocated;
        true
    }

    /// Returns a range of the bytes; `None` if the range is too long.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        // SAFETY: the slices are valid. An owner is not used while this memory lives, and its elements do not move when it is
        // moved (`Sealed`). `lend` does not return a buffer to its owner while this memory lives, and nor does `SplitBuffer`.
        let (input, output) = unsafe { (&*self.input, &*self.output) };
        range_of(input, output, range)
    }

    pub(crate) fn length(&self) -> usize {
        self.input.len() + self.output.len()
    }

    pub(crate) fn access(&mut self) -> BufferAccess<'_> {
        // SAFETY: as in `bytes`; the output was borrowed mutably, and `self` is borrowed mutably.
        unsafe { BufferAccess { input: &*self.input, output: &mut *self.output } }
    }

    /// Returns a range of the bytes; `None` if they may not be written, or the range is too long.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.access().into_bytes_mut(&range)
    }

    /// Divides the buffer into parts, which several operations may use at the same time. Returns the owner of the whole buffer,
    /// and the parts. Panics if the ranges overlap, are not in ascending order, or exceed the buffer.
    pub(crate) fn into_parts(self, ranges: &[Range<usize>]) -> (SplitBuffer, Vec<Self>) {
        let token = Arc::new(());
        let mut end = 0;
        let part = |range: &Range<usize>| {
            assert!(
                end <= range.start && range.start <= range.end && range.end <= self.length(),
                "the parts overlap or exceed the buffer"
            );
            end = range.end;
            self.part(range, &token)
        };
        let parts = ranges.iter().map(part).collect();
        (SplitBuffer { parts_check: BorrowCheck(token), whole: self }, parts)
    }

    /// Returns a part of the buffer. The range must be valid: its start is not after its end, and it is within the buffer.
    fn part(&self, range: &Range<usize>, token: &Arc<()>) -> Self {
        let split = self.input.len();
        let input = range.start.min(split)..range.end.min(split);
        let output = range.start.max(split) - split..range.end.max(split) - split;
        let input_start = self.input.cast::<u8>().wrapping_add(input.start);
        let output_start = self.output.cast::<u8>().wrapping_add(output.start);
        Self::new(
            std::ptr::slice_from_raw_parts(input_start, input.len()),
            std::ptr::slice_from_raw_parts_mut(output_start, output.len()),
            Keeper::Borrow { _token: Arc::clone(token) },
        )
    }

    /// Returns the buffer that the operation owned; `None` if it owned no buffer of this type.
    pub(crate) fn into_owned<B: OwnedBuffer>(self) -> Option<B> {
        match self.keeper {
            Keeper::Owner(owner) => owner.downcast().ok().map(|elements| *elements),
            Keeper::Borrow { .. } => None,
        }
    }
}

/// A buffer whose parts are in use. As with [`lend`], the process aborts if this owner is dropped before all parts.
pub(crate) struct SplitBuffer {
    /// This field is dropped first, so that the check runs before the buffer is freed.
    parts_check: BorrowCheck,
    whole: Memory,
}

impl SplitBuffer {
    /// Returns the whole buffer. All parts must have been dropped.
    pub(crate) fn into_whole(self) -> Memory {
        let Self { parts_check, whole } = self;
        drop(parts_check);
        whole
    }
}

/// Returns `count` zeros; `None` if there is not enough memory. The number may come from another rank, so it may be very large.
pub(crate) fn zeroed<T: Element>(count: usize) -> Option<Vec<T>> {
    bytemuck::allocation::try_zeroed_slice_box(count).ok().map(Vec::from)
}

/// Lends `bytes` to `work` as the memory of an operation. This memory must be dropped before `work` returns. Otherwise the
/// process aborts, because the caller would use or free its buffer while another thread still uses it.
pub(crate) fn lend<'a, R>(bytes: impl Into<BufferAccess<'a>>, work: impl FnOnce(Memory) -> R) -> R {
    let BufferAccess { input, output } = bytes.into();
    let token = Arc::new(());
    let borrowed = Memory::new(input, output, Keeper::Borrow { _token: Arc::clone(&token) });
    // The check also runs if `work` panics.
    let _check = BorrowCheck(token);
    work(borrowed)
}

/// Dropping this value checks that all memory with the same token has been dropped.
struct BorrowCheck(Arc<()>);

impl Drop for BorrowCheck {
    fn drop(&mut self) {
        // Only borrowed memory holds other references to the token. `get_mut` returns `None` while such a reference lives.
        if Arc::get_mut(&mut self.0).is_none() {
            eprintln!(
                "ringtrain: a collective ended while its buffer was in use; this is a bug in ringtrain, and the process aborts"
            );
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_memory_is_returned_and_borrowed_memory_is_changed_in_place() {
        let mut owned = Memory::owned(vec![1u32, 2, 3]);
        owned.bytes_mut(4..8).unwrap().copy_from_slice(&7u32.to_ne_bytes());
        assert!(owned.bytes(8..13).is_none());
        assert_eq!(owned.into_owned::<Vec<u32>>().unwrap(), [1, 7, 3]);

        let mut borrowed = [1u8, 2, 3];
        lend(&mut borrowed[..], |mut lent| {
            // The progress thread also uses the memory in another thread.
            std::thread::spawn(move || {
                lent.bytes_mut(0..2).unwrap().fill(9);
                assert!(lent.into_owned::<Vec<u8>>().is_none());
            })
            .join()
            .unwrap();
        });
        assert_eq!(borrowed, [9, 9, 3]);

        assert!(Memory::owned(vec![1u8]).into_owned::<Vec<f32>>().is_none());
    }

    #[test]
    fn a_message_that_does_not_fit_gets_new_memory() {
        for (count, fits) in [(0, true), (2, true), (3, false)] {
            let mut memory = Memory::owned(vec![7u16, 7]).or_allocated_for::<u16>(usize::MAX);
            assert!(memory.allocate_for_message(count, 2));
            // Only the first call allocates memory.
            assert!(memory.allocate_for_message(5, 2));
            let elements: Vec<u16> = memory.into_owned().unwrap();
            assert_eq!(elements, if fits { vec![7, 7] } else { vec![0; 3] });
        }
        let mut memory = Memory::owned(vec![7u16]).or_allocated_for::<u16>(usize::MAX);
        assert!(!memory.allocate_for_message(usize::MAX, 2));
    }

    #[test]
    fn threads_use_parts_at_the_same_time_and_the_whole_buffer_is_returned() {
        let work = |whole: Memory| {
            let (split, parts) = whole.into_parts(&[0..2, 2..2, 3..6]);
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
            split.into_whole()
        };
        let whole = work(Memory::owned(vec![0u8; 7]));
        assert_eq!(whole.into_owned::<Vec<u8>>().unwrap(), [7, 7, 0, 9, 9, 9, 0]);
        let mut lent = [0u8; 6];
        lend(&mut lent[..], |memory| drop(work(memory)));
        assert_eq!(lent, [7, 7, 0, 9, 9, 9]);
    }

    #[test]
    #[should_panic(expected = "the parts overlap or exceed the buffer")]
    fn overlapping_parts_panic() {
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
        lend(&[1u8, 2, 3][..], |mut lent| assert!(lent.bytes_mut(0..1).is_none()));
    }
}
