//! The types of buffers that collectives and messages accept: slices, vectors and contiguous arrays.

use ndarray::{ArrayBase, Data, DataMut, Dimension};

use super::error::Error;
use crate::types::Element;

/// Memory that a collective reads and writes in place.
pub trait Buffer {
    /// The element type.
    type Element: Element;

    /// Returns the elements, which are contiguous in memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotContiguous`] for an array that is not in standard (row-major, contiguous) layout. If the ranks had
    /// different layouts, a collective would reduce elements that do not belong together.
    fn elements_mut(&mut self) -> Result<&mut [Self::Element], Error>;
}

/// Memory that a collective or a message only reads.
pub trait Input {
    /// The element type.
    type Element: Element;

    /// Returns the elements, which are contiguous in memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotContiguous`], as [`Buffer::elements_mut`].
    fn elements(&self) -> Result<&[Self::Element], Error>;
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
            type Element = T;

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

impl<S, D> Buffer for ArrayBase<S, D>
where
    S: DataMut,
    S::Elem: Element,
    D: Dimension,
{
    type Element = S::Elem;

    fn elements_mut(&mut self) -> Result<&mut [S::Elem], Error> {
        self.as_slice_mut().ok_or(Error::NotContiguous)
    }
}

impl<S, D> Input for ArrayBase<S, D>
where
    S: Data,
    S::Elem: Element,
    D: Dimension,
{
    type Element = S::Elem;

    fn elements(&self) -> Result<&[S::Elem], Error> {
        self.as_slice().ok_or(Error::NotContiguous)
    }
}
