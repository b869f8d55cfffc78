//! What collectives accept: slices, vectors and contiguous arrays.

use ndarray::{ArrayBase, DataMut, Dimension};

use super::Error;
use crate::types::Element;

/// Memory that a collective reads and writes in place.
pub trait Buffer {
    /// The element type.
    type Element: Element;

    /// The elements, one after another.
    ///
    /// # Errors
    ///
    /// [`Error::NotContiguous`] for an array that is not in standard (row-major, contiguous) layout: ranks with
    /// different layouts would otherwise reduce different elements with each other.
    fn elements_mut(&mut self) -> Result<&mut [Self::Element], Error>;
}

impl<T: Element> Buffer for [T] {
    type Element = T;

    fn elements_mut(&mut self) -> Result<&mut [T], Error> {
        Ok(self)
    }
}

impl<T: Element, const N: usize> Buffer for [T; N] {
    type Element = T;

    fn elements_mut(&mut self) -> Result<&mut [T], Error> {
        Ok(self)
    }
}

impl<T: Element> Buffer for Vec<T> {
    type Element = T;

    fn elements_mut(&mut self) -> Result<&mut [T], Error> {
        Ok(self)
    }
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
