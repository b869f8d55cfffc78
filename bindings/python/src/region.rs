//! Where the elements of an argument lie, and what keeps them there.

use pyo3::prelude::*;
use ringtrain::{Element, ForeignBuffer};

use crate::dtype::Kind;
use crate::errors;
use crate::graves::Kept;
use crate::group::Group;
use crate::shared::Shared;
use crate::view::View;

/// `count` elements of type `dtype` at `address`, which stay valid for as long as `owner` lives. Nobody checks that.
#[pyclass(frozen, module = "ringtrain._core")]
pub(crate) struct Memory {
    owner: Py<PyAny>,
    address: usize,
    count: usize,
    kind: Kind,
    is_writable: bool,
}

#[pymethods]
impl Memory {
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
        let kind = Kind::named(dtype)
            .ok_or_else(|| errors::invalid(py, format!("`{dtype}` is no element type of ringtrain")))?;
        let count = Group::count(py, count)?;
        if address == 0 && count > 0 {
            return Err(errors::invalid(py, "nothing lies at address 0"));
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

/// Holds a buffer of the buffer protocol as an object, which may be let go of where the interpreter's lock is not held.
#[pyclass(frozen, module = "ringtrain._core")]
struct Hold(#[expect(dead_code, reason = "it is held, not used")] View);

/// What keeps elements where they are.
enum Keeper {
    Buffer(View),
    Object(Py<PyAny>),
}

/// The elements of an argument.
pub(crate) struct Region {
    start: *mut u8,
    /// How many elements.
    pub(crate) count: usize,
    pub(crate) kind: Kind,
    is_writable: bool,
    keeper: Keeper,
}

impl Region {
    /// The elements of a buffer that is only read.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let region = if let Ok(shared) = object.cast::<Shared>() {
            // The buffer protocol has no word for all of its types.
            Self { kind: shared.get().kind(), ..Self::of_buffer(object)? }
        } else if let Ok(memory) = object.cast::<Memory>() {
            let memory = memory.get();
            Self {
                start: memory.address as *mut u8,
                count: memory.count,
                kind: memory.kind,
                is_writable: memory.is_writable,
                keeper: Keeper::Object(memory.owner.clone_ref(py)),
            }
        } else {
            Self::of_buffer(object)?
        };
        let alignment = with_alignment(region.kind);
        if region.count > 0 && !(region.start as usize).is_multiple_of(alignment) {
            return Err(errors::invalid(py, "the buffer is not aligned; pass a copy"));
        }
        Ok(region)
    }

    /// The elements of a buffer that is written.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let region = Self::of(object)?;
        if !region.is_writable {
            return Err(errors::invalid(object.py(), "the buffer to write to is read-only"));
        }
        Ok(region)
    }

    fn of_buffer(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let buffer = View::of(object).map_err(|error| {
            let kind = object.get_type();
            errors::invalid(py, format!("a buffer is needed, such as a numpy array, not {kind}: {error}"))
        })?;
        if !buffer.is_contiguous() {
            let what =
                "the array is not contiguous in row-major order; pass a copy (numpy.ascontiguousarray)";
            return Err(errors::invalid(py, what));
        }
        if has_objects(buffer.format().to_bytes()) {
            return Err(errors::invalid(py, "an array of Python objects has no elements to move"));
        }
        let item_bytes = buffer.item_bytes();
        Ok(Self {
            start: buffer.start(),
            count: buffer.bytes() / item_bytes,
            kind: Kind::of_format(buffer.format(), item_bytes),
            is_writable: !buffer.is_read_only(),
            keeper: Keeper::Buffer(buffer),
        })
    }

    /// How many elements of the type that they are moved as.
    pub(crate) fn moved_count(&self) -> usize {
        self.count * self.kind.moved().1
    }

    /// Bytes of all elements.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.kind.bytes()
    }

    /// The elements as a type that has their size or divides it.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        let count = self.bytes() / size_of::<T>();
        if count == 0 {
            return &[];
        }
        // SAFETY: the keeper keeps so many bytes where they are, aligned for their own type, of which `T` is the type or a
        // byte; all patterns of bits are elements. That Python's threads do not write meanwhile is what the call's user
        // promises.
        unsafe { std::slice::from_raw_parts(self.start.cast(), count) }
    }

    /// The elements, to be written. They were found to be writable.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        let count = self.bytes() / size_of::<T>();
        if count == 0 || !self.is_writable {
            return &mut [];
        }
        // SAFETY: as above; and that Python's threads do not use them meanwhile is what the call's user promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), count) }
    }

    /// The elements of what is broadcast: the root does not write them, whose buffer may be read-only.
    pub(crate) fn elements_to_broadcast<T: Element>(&mut self) -> &mut [T] {
        let is_writable = std::mem::replace(&mut self.is_writable, true);
        let start = std::ptr::from_mut(self.elements_mut::<T>());
        self.is_writable = is_writable;
        // SAFETY: it is the slice that has just been made, and nobody has another.
        unsafe { &mut *start }
    }

    /// Copies all of an input of the same length, which may be the same memory; does nothing without one.
    pub(crate) fn copy_from(&mut self, input: Option<&Self>) {
        if let Some(input) = input {
            self.copy_part(0, input);
        }
    }

    /// Copies an input to `at` bytes from the beginning, as much of it as there is room for.
    pub(crate) fn copy_part(&mut self, at: usize, input: &Self) {
        let bytes = input.bytes().min(self.bytes().saturating_sub(at));
        let place = self.start.wrapping_add(at);
        if bytes > 0 && self.is_writable && place != input.start {
            // SAFETY: both have so many bytes, which may overlap.
            unsafe { std::ptr::copy(input.start, place, bytes) };
        }
    }

    /// The elements for an operation that goes on by itself.
    pub(crate) fn into_foreign<T: Element>(self, py: Python<'_>) -> PyResult<ForeignBuffer<T>> {
        let (start, count) = (self.start.cast(), self.bytes() / size_of::<T>());
        let keeper: Py<PyAny> = match self.keeper {
            Keeper::Object(object) => object,
            // Let go of by whatever thread ends the operation: an object waits for the interpreter then, a buffer would take
            // its lock.
            Keeper::Buffer(buffer) => Py::new(py, Hold(buffer))?.into_any(),
        };
        // SAFETY: as above; the keeper goes with it.
        Ok(unsafe { ForeignBuffer::new(start, count, Kept::new(keeper)) })
    }
}

// SAFETY: the keeper keeps the elements where they are whichever thread has the region.
unsafe impl Send for Region {}
// SAFETY: what is shared of it is only read.
unsafe impl Sync for Region {}

/// Whether items with this format hold references to objects, which mean nothing elsewhere. Names stand between colons.
fn has_objects(format: &[u8]) -> bool {
    let mut is_name = false;
    format.iter().any(|&byte| {
        is_name ^= byte == b':';
        byte == b'O' && !is_name
    })
}

fn with_alignment(kind: Kind) -> usize {
    match kind {
        Kind::Number(dtype) => dtype.size_bytes(),
        Kind::Bool | Kind::Opaque(_) => 1,
    }
}
