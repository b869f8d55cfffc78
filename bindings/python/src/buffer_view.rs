//! A view of an object through the buffer protocol. `PyO3`'s own view refuses arrays without dimensions, such as
//! numpy's scalars.

use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;

/// A view of an object's memory. The memory stays valid and is not moved until the view is dropped. The view is a Python object,
/// so that a thread without the interpreter's lock can leave it to another thread, as it leaves all Python objects
/// ([`DeferredDrop`](crate::calls::DeferredDrop)).
#[pyclass(frozen, module = "ringtrain._core")]
pub(crate) struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: the memory stays valid for every thread, and the thread that releases the view holds the interpreter's
// lock.
unsafe impl Send for BufferView {}
// SAFETY: shared references only read the view.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// Returns a view of the object's memory. The memory may have any layout and may be read-only.
    pub(crate) fn from_object(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, and the call fills the view, which stays in its box.
        let code = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_FULL_RO) };
        if code == 0 { Ok(Self(view)) } else { Err(PyErr::fetch(object.py())) }
    }

    /// The address of the memory.
    pub(crate) fn start(&self) -> *mut u8 {
        self.0.buf.cast()
    }

    /// The size of all items in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.len.unsigned_abs()
    }

    /// The size of an item in bytes, at least 1.
    pub(crate) fn item_bytes(&self) -> usize {
        self.0.itemsize.unsigned_abs().max(1)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.0.readonly != 0
    }

    /// The format of an item, in the notation of Python's module `struct`.
    pub(crate) fn format(&self) -> &CStr {
        if self.0.format.is_null() {
            return c"B";
        }
        // SAFETY: the exporter has set the format to a string that lives as long as the view.
        unsafe { CStr::from_ptr(self.0.format) }
    }

    /// Returns whether the items are contiguous in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        // SAFETY: the view has been filled.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, b'C' as std::ffi::c_char) == 1 }
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        // SAFETY: the view has been filled and not yet released, and the interpreter's lock is held. After the
        // interpreter has ended, `try_attach` does not call this closure. The view then needs no release.
        Python::try_attach(|_| unsafe { ffi::PyBuffer_Release(&raw mut *self.0) });
    }
}
