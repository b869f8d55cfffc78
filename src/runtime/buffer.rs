//! The buffers that collectives and messages accept: slices, vectors and contiguous arrays.

use std::ops::Range;

use ndarray::{ArrayBase, Data, DataMut, Dimension};

use super::error::Error;
use crate::types::Element;

/// Memory that a collective or a message only reads.
pub trait Input {
    /// The element type.
    type Element: Element;

    /// Returns the elements, which are contiguous in memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotContiguous`] for an array that is not in standard (row-major, contiguous) layout. If the ranks had
    /// different layouts, a collective would reduce elements that do not belong together.
    fn elements(&self) -> Result<&[Self::Element], Error>;
}

/// Memory that a collective reads and writes in place.
pub trait Buffer: Input {
    /// Returns the elements, which are contiguous in memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotContiguous`], as [`Input::elements`].
    fn elements_mut(&mut self) -> Result<&mut [Self::Element], Error>;
}

/// Memory that an asynchronous operation owns until the operation ends: a vector, or a
/// [`SharedBuffer`](crate::SharedBuffer). The operation's handle returns the memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be owned by an asynchronous operation",
    note = "move a vector or a buffer of `Group::alloc` into the call, or copy the input with `start_from`"
)]
pub trait OwnedBuffer:
    AsRef<[Self::Element]> + AsMut<[Self::Element]> + sealed::Sealed + Send + 'static
{
    /// The element type.
    type Element: Element;
}

impl<T: Element> OwnedBuffer for Vec<T> {
    type Element = T;
}

/// The trait [`Sealed`](sealed::Sealed), which only this crate can implement.
pub(crate) mod sealed {
    use crate::types::Element;

    /// A buffer whose elements keep their address when the buffer is moved.
    pub trait Sealed {}

    impl<T: Element> Sealed for Vec<T> {}
}

/// Implements [`Buffer`] and [`Input`] for types that dereference to a slice of elements of type `T`.
macro_rules! impl_buffer_of_slice {
    ($($buffer:ty $(, const $length:ident)?;)+) => { $(
        impl<T: $crate::types::Element $(, const $length: usize)?> $crate::runtime::buffer::Buffer for $buffer {
            fn elements_mut(&mut self) -> Result<&mut [T], $crate::runtime::error::Error> {
                Ok(self)
            }
        }

        impl<T: $crate::types::Element $(, const $length: usize)?> $crate::runtime::buffer::Input for $buffer {
            type Element = T;

            fn elements(&self) -> Result<&[T], $crate::runtime::error::Error> {
                Ok(self)
            }
        }
    )+ };
}
pub(crate) use impl_buffer_of_slice;

impl_buffer_of_slice! {
    [T];
    [T; N], const N;
    Vec<T>;
}

impl<S: DataMut<Elem: Element>, D: Dimension> Buffer for ArrayBase<S, D> {
    fn elements_mut(&mut self) -> Result<&mut [S::Elem], Error> {
        self.as_slice_mut().ok_or(Error::NotContiguous)
    }
}

impl<S: Data<Elem: Element>, D: Dimension> Input for ArrayBase<S, D> {
    type Element = S::Elem;

    fn elements(&self) -> Result<&[S::Elem], Error> {
        self.as_slice().ok_or(Error::NotContiguous)
    }
}

/// Access to the buffer of an operation: an input, which the operation only reads, followed by an output, which it may also
/// write. Input and output may be separate memories, but the offsets count through both.
#[derive(Default)]
pub(crate) struct BufferAccess<'a> {
    pub(super) input: &'a [u8],
    pub(super) output: &'a mut [u8],
}

impl<'a> BufferAccess<'a> {
    pub(super) fn into_bytes_mut(self, range: &Range<usize>) -> Option<&'a mut [u8]> {
        self.output.get_mut(output_range(self.input.len(), range)?)
    }

    pub(crate) fn len(&self) -> usize {
        self.input.len() + self.output.len()
    }

    /// Returns a range of the bytes. Panics unless the range is completely in the input or in the output.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        range_of(self.input, self.output, range).expect("the range is in the input or in the output")
    }

    /// Returns a range of the output. Panics if the range is not completely in the output.
    pub(crate) fn bytes_mut(&mut self, range: &Range<usize>) -> &mut [u8] {
        let whole = BufferAccess { input: self.input, output: self.output };
        whole.into_bytes_mut(range).expect("the range is in the output")
    }

    /// Returns the whole buffer, or `None` if a part of it is input, which must not be written.
    pub(crate) fn all_writable(&self) -> Option<&[u8]> {
        self.input.is_empty().then_some(&*self.output)
    }
}

/// Returns a range of the bytes of an input followed by an output; `None` if neither contains the whole range.
pub(super) fn range_of<'a>(input: &'a [u8], output: &'a [u8], range: Range<usize>) -> Option<&'a [u8]> {
    if range.end <= input.len() { input.get(range) } else { output.get(output_range(input.len(), &range)?) }
}

/// Converts a range of the whole buffer to a range of the output; `None` if the range begins in the input.
fn output_range(input_bytes: usize, range: &Range<usize>) -> Option<Range<usize>> {
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
