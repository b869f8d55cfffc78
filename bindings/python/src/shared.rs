//! Memory that the group allocates and that peers on the same host can read and write in place.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use ringtrain::{DType, SharedBuffer};

use crate::elements::ElementKind;
use crate::group::PyGroup;
use crate::{calls, errors};

/// Memory from `Group.alloc`, with the buffer protocol.
#[pyclass(name = "Shared", frozen, module = "ringtrain._core")]
pub(crate) struct PySharedBuffer {
    /// The memory. `None` after the memory has been dropped.
    buffer: Mutex<Option<SharedBuffer<u64>>>,
    start: usize,
    bytes: usize,
    kind: ElementKind,
    shape: [isize; 1],
    strides: [isize; 1],
    #[pyo3(get)]
    is_shared: bool,
}

#[pymethods]
impl PyGroup {
    fn alloc(&self, py: Python<'_>, count: i64, dtype: &str) -> PyResult<PySharedBuffer> {
        let count = Self::parse_count(py, count)?;
        let kind = ElementKind::from_name(dtype)
            .ok_or_else(|| errors::invalid(py, format!("`{dtype}` is not an element type of ringtrain")))?;
        let bytes = count.checked_mul(kind.bytes()).filter(|&bytes| isize::try_from(bytes).is_ok());
        // If the length is too large, pass `usize::MAX`: then `Group::alloc` fails on all ranks.
        let words = bytes.map_or(usize::MAX, |bytes| bytes.div_ceil(size_of::<u64>()));
        let mut buffer = self.lock.with_group(py, |group| group.alloc::<u64>(words))?;
        let start = buffer.as_mut_ptr() as usize;
        Ok(PySharedBuffer {
            is_shared: buffer.is_shared(),
            buffer: Mutex::new(Some(buffer)),
            start,
            bytes: bytes.unwrap_or_default(),
            kind,
            shape: [count as isize],
            strides: [kind.bytes() as isize],
        })
    }
}

/// Returns the format that the buffer protocol has for elements of this kind. The protocol has no format for
/// bf16, so bf16 has the format of u16.
fn buffer_format(kind: ElementKind) -> &'static CStr {
    match kind {
        ElementKind::Bool => c"?",
        ElementKind::Opaque(_) => c"B",
        ElementKind::Number(dtype) => match dtype {
            DType::F16 => c"e",
            DType::I16 => c"h",
            DType::Bf16 | DType::U16 => c"H",
            DType::F32 => c"f",
            DType::F64 => c"d",
            DType::I8 => c"b",
            DType::I32 => c"i",
            DType::U32 => c"I",
            DType::I64 => c"q",
            DType::U64 => c"Q",
            _ => c"B",
        },
    }
}

impl PySharedBuffer {
    pub(crate) fn kind(&self) -> ElementKind {
        self.kind
    }
}

#[pymethods]
impl PySharedBuffer {
    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    fn __repr__(&self) -> String {
        format!("Shared({} x {})", self.shape[0], self.kind.name())
    }

    /// Fills a view for the buffer protocol.
    ///
    /// # Safety
    ///
    /// `view` must be null or point to a view that may be overwritten.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("the view to fill is null"));
        }
        let shared = slf.get();
        let is_requested = |flag: c_int| flags & flag == flag;
        let format: &'static CStr = buffer_format(shared.kind);
        // SAFETY: Python passes a view that may be overwritten. The view points to memory of
        // `shared`, and holds a reference to `slf`, which keeps this memory alive.
        unsafe {
            (*view).buf = shared.start as *mut c_void;
            (*view).len = shared.bytes as isize;
            (*view).readonly = 0;
            (*view).itemsize = shared.kind.bytes() as isize;
            (*view).format = if is_requested(ffi::PyBUF_FORMAT) {
                format.as_ptr().cast_mut()
            } else {
                std::ptr::null_mut()
            };
            (*view).ndim = 1;
            (*view).shape = if is_requested(ffi::PyBUF_ND) {
                shared.shape.as_ptr().cast_mut()
            } else {
                std::ptr::null_mut()
            };
            (*view).strides = if is_requested(ffi::PyBUF_STRIDES) {
                shared.strides.as_ptr().cast_mut()
            } else {
                std::ptr::null_mut()
            };
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = std::ptr::null_mut();
            (*view).obj = slf.clone().into_any().into_ptr();
        }
        Ok(())
    }
}

impl Drop for PySharedBuffer {
    fn drop(&mut self) {
        let buffer = self.buffer.get_mut().map_or(None, Option::take);
        if calls::is_forked() {
            std::mem::forget(buffer);
        } else {
            Python::try_attach(|py| py.detach(move || drop(buffer)));
        }
    }
}
