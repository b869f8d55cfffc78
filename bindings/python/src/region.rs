//! The memory of a buffer argument: the address and the type of the elements, and the object that keeps the elements
//! alive.

use std::borrow::Cow;

use pyo3::prelude::*;
use ringtrain::{DType, Element, ForeignBuffer};

use crate::buffer_view::BufferView;
use crate::deferred_drop::DeferredDrop;
use crate::dtype::ElementKind;
use crate::errors;
use crate::group::PyGroup;
use crate::numpy_array::PlainArray;
use crate::shared::PySharedBuffer;

/// A buffer of `count` elements at `address`. The caller guarantees that the elements stay valid as long as
/// `owner` lives.
#[pyclass(name = "Memory", frozen, module = "ringtrain._core")]
pub(crate) struct PyMemory {
    owner: Py<PyAny>,
    address: usize,
    count: usize,
    kind: ElementKind,
    is_writable: bool,
}

#[pymethods]
impl PyMemory {
    #[new]
    #[pyo3(signature = (owner, address, count, dtype, writable = true))]
    fn new(
        py: Python<'_>,
        owner: Py<PyAny>,
        address: usize,
        count: i64,
        dtype: &str,
        writable: bool,
    ) -> PyResult<Self> {
        let kind = ElementKind::from_name(dtype)
            .ok_or_else(|| errors::invalid(py, format!("`{dtype}` is not an element type of ringtrain")))?;
        let count = PyGroup::parse_count(py, count)?;
        if address == 0 && count > 0 {
            return Err(errors::invalid(py, "the address of the elements is 0"));
        }
        if count.checked_mul(kind.bytes()).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(errors::invalid(py, format!("{count} elements are more than memory can hold")));
        }
        Ok(Self { owner, address, count, kind, is_writable: writable })
    }

    fn __repr__(&self) -> String {
        format!("Memory({} x {} at {:#x})", self.count, self.kind.name(), self.address)
    }
}

/// A Python object that owns a view. A thread may drop a reference to this object without the interpreter's lock, but it
/// may not drop a view.
#[pyclass(frozen, module = "ringtrain._core")]
struct ViewOwner(#[expect(dead_code, reason = "it only keeps the view alive")] BufferView);

/// The object that keeps the elements valid.
enum Owner {
    View(BufferView),
    Object(Py<PyAny>),
}

/// The elements of a buffer argument, aligned as their type requires.
pub(crate) struct Region {
    start: *mut u8,
    /// The number of elements.
    pub(crate) count: usize,
    pub(crate) kind: ElementKind,
    is_writable: bool,
    owner: Owner,
}

impl Region {
    /// Returns the elements of a buffer that an operation only reads.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let region = if let Some(array) = PlainArray::of(object) {
            Self::of_array(&array, object)
        } else if let Ok(shared) = object.cast::<PySharedBuffer>() {
            // The element type comes from the shared buffer, because the buffer protocol has no format for some
            // types, such as bf16.
            Self { kind: shared.get().kind(), ..Self::from_buffer_protocol(object)? }
        } else if let Ok(memory) = object.cast::<PyMemory>() {
            let memory = memory.get();
            Self {
                start: memory.address as *mut u8,
                count: memory.count,
                kind: memory.kind,
                is_writable: memory.is_writable,
                owner: Owner::Object(memory.owner.clone_ref(py)),
            }
        } else {
            Self::from_buffer_protocol(object)?
        };
        if region.count > 0 && !(region.start as usize).is_multiple_of(region.kind.alignment()) {
            return Err(errors::invalid(py, "the buffer is not aligned; pass a copy"));
        }
        Ok(region)
    }

    /// Returns the elements of a buffer that an operation writes.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let region = Self::readable(object)?;
        if !region.is_writable {
            return Err(errors::invalid(object.py(), "the buffer to write to is read-only"));
        }
        Ok(region)
    }

    /// Returns the elements of a numpy array that an operation writes only if [`PlainArray::is_writable`].
    pub(crate) fn of_array(array: &PlainArray<'_>, object: &Bound<'_, PyAny>) -> Self {
        Self {
            start: array.start(),
            count: array.count(),
            kind: array.kind,
            is_writable: array.is_writable(),
            owner: Owner::Object(object.clone().unbind()),
        }
    }

    /// Returns the buffer of a broadcast. The root only reads the buffer, so the root's buffer may be read-only.
    pub(crate) fn to_broadcast(object: &Bound<'_, PyAny>, is_root: bool) -> PyResult<Self> {
        if is_root {
            Ok(Self { is_writable: true, ..Self::readable(object)? })
        } else {
            Self::writable(object)
        }
    }

    fn from_buffer_protocol(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let view = BufferView::from_object(object).map_err(|error| {
            let kind = object.get_type();
            errors::invalid(py, format!("a buffer is needed, for example a numpy array, not {kind}: {error}"))
        })?;
        if !view.is_contiguous() {
            let what =
                "the array is not contiguous in row-major order; pass a copy (numpy.ascontiguousarray)";
            return Err(errors::invalid(py, what));
        }
        if has_python_objects(view.format().to_bytes()) {
            return Err(errors::invalid(
                py,
                "the elements of the array are Python objects, which cannot be sent",
            ));
        }
        let item_bytes = view.item_bytes();
        Ok(Self {
            start: view.start(),
            count: view.bytes() / item_bytes,
            kind: ElementKind::from_format(view.format(), item_bytes),
            is_writable: !view.is_read_only(),
            owner: Owner::View(view),
        })
    }

    /// The number of elements that the library sends for this region, each of the type [`ElementKind::wire_type`].
    pub(crate) fn wire_count(&self) -> usize {
        self.count * self.kind.wire_type().1
    }

    /// The size of all elements in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.kind.bytes()
    }

    /// The number of elements of type `T` that the region holds.
    ///
    /// # Panics
    ///
    /// If `T` is neither the type with which the library sends the elements nor `u8`. A slice of another type could
    /// be unaligned, or hold bit patterns that are not valid for the type.
    fn count_as<T: Element>(&self) -> usize {
        let wire = self.kind.wire_type().0;
        assert!(T::DTYPE == wire || T::DTYPE == DType::U8, "{} is not {}", self.kind.name(), T::DTYPE);
        let count = self.bytes() / size_of::<T>();
        assert!(
            count == 0 || self.start.cast::<T>().is_aligned(),
            "`Region::readable` has checked the alignment"
        );
        count
    }

    /// Returns the elements as a slice of the type with which the library sends them, or as bytes.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        let count = self.count_as::<T>();
        if count == 0 {
            return &[];
        }
        // SAFETY: the owner keeps this many bytes valid; type and alignment have been checked. As with all arrays,
        // the caller guarantees that no other Python thread writes the elements during the operation.
        unsafe { std::slice::from_raw_parts(self.start.cast(), count) }
    }

    /// Returns the elements as a slice that can be written. The slice is empty if the region is read-only.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        let count = self.count_as::<T>();
        if count == 0 || !self.is_writable {
            return &mut [];
        }
        // SAFETY: as in `elements`. The root of a broadcast does not write. If another argument overlaps with this region,
        // operations read a copy of that argument (`elements_without_overlap`). The caller guarantees that no other Python
        // thread uses the elements during the operation.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), count) }
    }

    /// Returns the elements for an operation that also writes to `output`: a copy if this region overlaps with
    /// `output`.
    pub(crate) fn elements_without_overlap<'a, T: Element>(&'a self, output: &Self) -> Cow<'a, [T]> {
        let elements = self.elements::<T>();
        if self.overlaps(output) { Cow::Owned(elements.to_vec()) } else { Cow::Borrowed(elements) }
    }

    /// Returns whether the two regions have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (own, others) = (self.start as usize, other.start as usize);
        let is_empty = self.bytes() == 0 || other.bytes() == 0;
        !is_empty && own < others + other.bytes() && others < own + self.bytes()
    }

    /// Copies the elements of `input`, if there is one, to this region. Both regions have the same length, and they
    /// may overlap.
    pub(crate) fn copy_from(&mut self, input: Option<&Self>) {
        if let Some(input) = input {
            self.copy_part(0, input);
        }
    }

    /// Copies the elements of `input` to the position `offset_bytes` in this region. If `input` is too long, copies
    /// only the part that fits. The two regions may overlap.
    pub(crate) fn copy_part(&mut self, offset_bytes: usize, input: &Self) {
        let bytes = input.bytes().min(self.bytes().saturating_sub(offset_bytes));
        let target = self.start.wrapping_add(offset_bytes);
        if bytes > 0 && self.is_writable && target != input.start {
            // SAFETY: `input` has at least `bytes` bytes, and this region has at least `bytes` bytes after `target`.
            // `copy` allows an overlap.
            unsafe { std::ptr::copy(input.start, target, bytes) };
        }
    }

    /// Converts the region to a buffer for an asynchronous operation. The buffer keeps the owner of the elements
    /// alive.
    pub(crate) fn into_foreign<T: Element>(self, py: Python<'_>) -> PyResult<ForeignBuffer<T>> {
        let (start, count) = (self.start.cast(), self.count_as::<T>());
        let owner: Py<PyAny> = match self.owner {
            Owner::Object(object) => object,
            // The thread that ends the operation drops the owner. Dropping a view needs the interpreter's lock, but
            // dropping a reference to a Python object can be deferred.
            Owner::View(view) => Py::new(py, ViewOwner(view))?.into_any(),
        };
        // SAFETY: the owner, which the buffer holds, keeps this many elements valid; type and alignment have been
        // checked.
        Ok(unsafe { ForeignBuffer::new(start, count, DeferredDrop::new(owner)) })
    }
}

// SAFETY: the owner keeps the elements valid for every thread.
unsafe impl Send for Region {}
// SAFETY: shared references only read the elements.
unsafe impl Sync for Region {}

/// Returns whether items of this format hold references to Python objects (`O`). An `O` between two colons belongs to
/// the name of a field, for example in `i:Offset:`.
fn has_python_objects(format: &[u8]) -> bool {
    let mut is_name = false;
    format.iter().any(|&byte| {
        is_name ^= byte == b':';
        byte == b'O' && !is_name
    })
}

/// Returns an error if the region does not have `count` elements of type f32.
fn check_f32(py: Python<'_>, region: &Region, count: usize) -> PyResult<()> {
    if region.kind != ElementKind::Number(DType::F32) {
        return Err(errors::invalid(py, format!("the elements are {}, not f32", region.kind.name())));
    }
    if region.count != count {
        return Err(errors::invalid(py, format!("there are {} elements instead of {count}", region.count)));
    }
    Ok(())
}

/// Returns the memory of an object. Fails if the object does not have `count` elements of type f32.
pub(crate) fn readable_f32(object: &Bound<'_, PyAny>, count: usize) -> PyResult<Region> {
    let region = Region::readable(object)?;
    check_f32(object.py(), &region, count)?;
    Ok(region)
}

/// Returns the memory of a writable object. Fails if the object does not have `count` elements of type f32.
pub(crate) fn writable_f32(object: &Bound<'_, PyAny>, count: usize) -> PyResult<Region> {
    let region = Region::writable(object)?;
    check_f32(object.py(), &region, count)?;
    Ok(region)
}
