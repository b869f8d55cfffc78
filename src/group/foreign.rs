//! Memory that this program's compiler knows nothing of: another language's arrays.

use std::any::Any;

use super::buffer::OwnedBuffer;
use super::buffer::sealed::Sealed;
use crate::types::Element;

/// Elements somewhere in memory, with whatever keeps them there: an array of another language, for an operation that goes on by
/// itself. A reference to the array is a keeper.
pub struct ForeignBuffer<T: Element> {
    start: *mut T,
    count: usize,
    _keeper: Box<dyn Any + Send>,
}

impl<T: Element> ForeignBuffer<T> {
    /// `count` elements at `start`.
    ///
    /// # Safety
    ///
    /// Until the buffer is dropped, `start` is aligned and so many initialised elements lie there, which nobody writes to while
    /// an operation has the buffer, and nobody reads either unless that operation only reads: sends are such. `keeper` sees to
    /// it that they stay. It may be dropped by any thread.
    pub unsafe fn new(start: *mut T, count: usize, keeper: impl Any + Send) -> Self {
        let start = if count == 0 { std::ptr::NonNull::dangling().as_ptr() } else { start };
        Self { start, count, _keeper: Box::new(keeper) }
    }
}

// SAFETY: whoever made it has promised that the elements may be used by any thread that has the buffer.
unsafe impl<T: Element> Send for ForeignBuffer<T> {}

impl<T: Element> AsRef<[T]> for ForeignBuffer<T> {
    fn as_ref(&self) -> &[T] {
        // SAFETY: whoever made it has promised that they are there.
        unsafe { std::slice::from_raw_parts(self.start, self.count) }
    }
}

impl<T: Element> AsMut<[T]> for ForeignBuffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        // SAFETY: whoever made it has promised that they are there, and that nobody else is at them.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.count) }
    }
}

impl<T: Element> Sealed for ForeignBuffer<T> {}

impl<T: Element> OwnedBuffer for ForeignBuffer<T> {
    type Element = T;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Group;
    use crate::types::ReduceOp;

    #[test]
    fn it_is_worked_on_where_it_lies_and_its_keeper_outlives_the_operation() {
        let keeper = std::sync::Arc::new(());
        let mut values = [1u8, 0, 3];
        // SAFETY: the array outlives the operation, which is waited for here.
        let buffer = unsafe { ForeignBuffer::new(values.as_mut_ptr(), 2, std::sync::Arc::clone(&keeper)) };
        let mut group = Group::solo();
        let buffer = group.all_reduce_async(buffer, ReduceOp::LogicalOr).unwrap().wait().unwrap();
        assert_eq!(buffer.as_ref(), [1, 0]);
        assert_eq!(std::sync::Arc::strong_count(&keeper), 2);
        drop(buffer);
        assert_eq!(std::sync::Arc::strong_count(&keeper), 1);
        // SAFETY: nothing is there, and nothing is looked at.
        let empty = unsafe { ForeignBuffer::<u64>::new(std::ptr::null_mut(), 0, ()) };
        assert!(empty.as_ref().is_empty());
        assert_eq!(values, [1, 0, 3]);
    }
}
