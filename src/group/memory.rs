//! The memory that operations read and write while they are under way.
//!
//! It is either owned by the operation, which gives it back at its end, or lent by a caller that waits for that end. The
//! loan is the one place where the crate's own promise takes the place of the compiler's.

use std::any::Any;
use std::ops::Range;

use crate::types::Element;

/// Elements that an operation owns.
trait Owned: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<T: Element> Owned for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// An operation's buffer.
pub struct Memory(Kind);

enum Kind {
    Owned(Box<dyn Owned>),
    Lent(Loan),
    /// Allocated when the message's length is known.
    Later(fn(usize) -> Box<dyn Owned>),
}

impl Memory {
    /// No elements.
    pub fn none() -> Self {
        Self::owned(Vec::<u8>::new())
    }

    /// Elements that the operation owns until it has ended.
    pub fn owned<T: Element>(elements: Vec<T>) -> Self {
        Self(Kind::Owned(Box::new(elements)))
    }

    /// As many elements as the message that is received turns out to have.
    pub fn later<T: Element>() -> Self {
        Self(Kind::Later(|count| Box::new(vec![T::zeroed(); count])))
    }

    /// A caller's buffer.
    pub(super) fn lent(loan: Loan) -> Self {
        Self(Kind::Lent(loan))
    }

    /// Allocates what could not be allocated before the number of elements was known.
    pub(super) fn prepare(&mut self, count: usize) {
        if let Kind::Later(allocate) = self.0 {
            self.0 = Kind::Owned(allocate(count));
        }
    }

    pub(super) fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        match &self.0 {
            Kind::Owned(owned) => owned.bytes().get(range),
            Kind::Lent(loan) => loan.bytes().get(range),
            Kind::Later(_) => None,
        }
    }

    pub(super) fn bytes_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match &mut self.0 {
            Kind::Owned(owned) => owned.bytes_mut().get_mut(range),
            Kind::Lent(loan) => loan.bytes_mut().get_mut(range),
            Kind::Later(_) => None,
        }
    }

    /// The elements that the operation owned; none if it owned none of this type.
    pub fn into_elements<T: Element>(self) -> Vec<T> {
        match self.0 {
            Kind::Owned(owned) => {
                owned.into_any().downcast().map_or_else(|_| Vec::new(), |elements| *elements)
            }
            Kind::Lent(_) | Kind::Later(_) => Vec::new(),
        }
    }
}

/// A caller's buffer, lent for as long as an operation is under way.
///
/// It is neither freed nor touched by the caller before the operation has given it up, which is the caller's promise.
pub(super) struct Loan {
    start: *mut u8,
    length: usize,
}

// SAFETY: a loan is the only way to its bytes while it lives (see `Loan::new`), so it may be used by any one thread.
unsafe impl Send for Loan {}

impl Loan {
    /// Lends `bytes` without their lifetime.
    ///
    /// # Safety
    ///
    /// Until the loan has been dropped, the bytes must stay where they are and nobody else may touch them.
    pub(super) unsafe fn new(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), length: bytes.len() }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `Loan::new` was given a valid slice, which nobody else touches while the loan lives.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the loan itself is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
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

        let mut lender = [1u8, 2, 3];
        // SAFETY: `lender` outlives the loan and is not touched before it is dropped.
        let mut lent = Memory::lent(unsafe { Loan::new(&mut lender) });
        lent.bytes_mut(0..2).unwrap().fill(9);
        assert!(lent.into_elements::<u8>().is_empty());
        assert_eq!(lender, [9, 9, 3]);

        let mut later = Memory::later::<f64>();
        assert!(later.bytes(0..0).is_none());
        later.prepare(2);
        later.prepare(5);
        assert_eq!(later.into_elements::<f64>(), [0.0, 0.0]);
        assert!(Memory::owned(vec![1u8]).into_elements::<f32>().is_empty());
    }
}
