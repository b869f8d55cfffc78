//! A view of an object by the buffer protocol. `PyO3`'s own refuses arrays without dimensions, which numpy's scalars become.

use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;

/// What an object lets others see of its memory, which stays where it is until the view is dropped.
pub(crate) struct View(Box<ffi::Py_buffer>);

// SAFETY: the memory it points to stays where it is whichever thread has the view, and it is let go of with the interpreter's
// lock.
unsafe impl Send for View {}
// SAFETY: it is only read.
unsafe impl Sync for View {}

impl View {
    /// The object's memory, read-only or not, in whatever layout.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object lives, and the view is one to be filled, which stays where it is.
        let code = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_FULL_RO) };
        if code == 0 { Ok(Self(view)) } else { Err(PyErr::fetch(object.py())) }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.0.buf.cast()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.len.unsigned_abs()
    }

    /// Bytes of an item, at least 1.
    pub(crate) fn item_bytes(&self) -> usize {
        self.0.itemsize.unsigned_abs().max(1)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.0.readonly != 0
    }

    /// What an item is, in the words of Python's `struct`.
    pub(crate) fn format(&self) -> &CStr {
        if self.0.format.is_null() {
            return c"B";
        }
        // SAFETY: the exporter has filled it with a string that lives as long as the view.
        unsafe { CStr::from_ptr(self.0.format) }
    }

    /// Whether items lie one after another in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        // SAFETY: the view has been filled.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, b'C' as std::ffi::c_char) == 1 }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the view has been filled and not been released, and the interpreter's lock is held. An interpreter that ends
        // has no use for it any more.
        Python::try_attach(|_| unsafe { ffi::PyBuffer_Release(&raw mut *self.0) });
    }
}
