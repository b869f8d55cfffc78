//! Buffers in the memory of another language, for example a numpy array.

use std::any::Any;

use crate::runtime::buffer::OwnedBuffer;
use crate::runtime::buffer::sealed::Sealed;
use crate::runtime::deferred_drop::UserValue;
use crate::types::Element;

/// The elements of another language's array, as a buffer for asynchronous operations. The buffer holds an owner, for example a
/// reference to the array. The owner keeps the elements at their address.
pub struct ForeignBuffer<T: Element> {
    start: *mut T,
    count: usize,
    _owner: UserValue<Box<dyn Any + Send>>,
}

impl<T: Element> ForeignBuffer<T> {
    /// Creates a buffer of the `count` elements at `start`.
    ///
    /// # Safety
    ///
    /// Until the buffer is dropped, `start` must be aligned and point to `count` initialised elements, which `owner` keeps at
    /// this address. While an operation has the buffer, no other code may write to the elements. Other code may read them only
    /// if the operation is a send. Any thread may drop `owner`.
    pub unsafe fn new(start: *mut T, count: usize, owner: impl Any + Send) -> Self {
        let start = if count == 0 { std::ptr::NonNull::dangling().as_ptr() } else { start };
        Self { start, count, _owner: UserValue::new(Box::new(owner)) }
    }
}

// SAFETY: the caller of `new` has promised that any thread that has the buffer may use the elements.
unsafe impl<T: Element> Send for ForeignBuffer<T> {}

impl<T: Element> AsRef<[T]> for ForeignBuffer<T> {
    fn as_ref(&self) -> &[T] {
        // SAFETY: the caller of `new` has promised that the elements exist.
        unsafe { std::slice::from_raw_parts(self.start, self.count) }
    }
}

impl<T: Element> AsMut<[T]> for ForeignBuffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        // SAFETY: the caller of `new` has promised that the elements exist, and that no other code uses them.
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
    use crate::types::{Rank, ReduceOp};

    #[test]
    fn an_operation_works_in_place_and_keeps_the_owner_alive() {
        let owner = std::sync::Arc::new(());
        let mut values = [1u8, 0, 3];
        // SAFETY: the array outlives the operation, which is waited for here.
        let buffer = unsafe { ForeignBuffer::new(values.as_mut_ptr(), 2, std::sync::Arc::clone(&owner)) };
        let mut group = Group::solo();
        let buffer = group.all_reduce_async(buffer, ReduceOp::LogicalOr).unwrap().wait().unwrap();
        assert_eq!(buffer.as_ref(), [1, 0]);
        assert_eq!(std::sync::Arc::strong_count(&owner), 2);
        drop(buffer);
        assert_eq!(std::sync::Arc::strong_count(&owner), 1);
        // SAFETY: the buffer has no elements, so the address is never read.
        let empty = unsafe { ForeignBuffer::<u64>::new(std::ptr::null_mut(), 0, ()) };
        assert!(empty.as_ref().is_empty());
        assert_eq!(values, [1, 0, 3]);
    }

    /// In an earlier version, the owner was dropped while the thread held a lock that dropping a handle also takes.
    #[test]
    fn the_owner_of_a_buffer_may_own_handles() {
        let group = Group::solo();
        let never = group.receive_async::<u8>(1, Rank::ZERO, 77).unwrap();
        let marker = std::sync::Arc::new(());
        let mut values = [1u8, 2];
        let owner = (never, std::sync::Arc::clone(&marker));
        // SAFETY: the array outlives the send, which has ended when the owner is gone.
        let buffer = unsafe { ForeignBuffer::new(values.as_mut_ptr(), 2, owner) };
        drop(group.send_async(buffer, Rank::ZERO, 1).unwrap());
        let mut received = [0u8; 2];
        group.receive(&mut received, Rank::ZERO, 1).unwrap();
        assert_eq!(received, values);
        assert_eq!(std::sync::Arc::strong_count(&marker), 1);
    }
}
