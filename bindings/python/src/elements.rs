//! The elements of an array: their type, and their place in memory.
//!
//! A numpy array is read without Python's buffer protocol. With the protocol, numpy describes the shape and the type of an array
//! anew for each view, which takes longer than a short collective.

use std::borrow::Cow;
use std::ffi::{c_int, c_long};

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use ringtrain::{DType, Element, ForeignBuffer, ReduceOp};

use crate::calls::DeferredDrop;
use crate::errors;

/// The type of a buffer's elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ElementKind {
    /// Numbers that can be reduced.
    Number(DType),
    /// Booleans: each element is a byte with the value 0 or 1.
    Bool,
    /// Items of this many bytes, which can be sent but not reduced.
    Opaque(usize),
}

impl ElementKind {
    /// Returns the kind of elements with this name, such as `f32` or `bool`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "bool" => Some(Self::Bool),
            _ => name.parse().ok().filter(|&dtype| is_number(dtype)).map(Self::Number),
        }
    }

    /// Returns the kind of elements that have this code of the buffer protocol. The codes `l` and `L` mean 4 or 8 bytes,
    /// depending on the machine and on the character in front of the code, so `item_bytes` decides. Returns `None` if the
    /// elements cannot be reduced.
    pub(crate) fn from_code(code: u8, item_bytes: usize) -> Option<Self> {
        let number = match code {
            b'?' => return Some(Self::Bool),
            b'e' => DType::F16,
            b'f' => DType::F32,
            b'd' => DType::F64,
            b'b' => DType::I8,
            b'B' => DType::U8,
            b'h' => DType::I16,
            b'H' => DType::U16,
            b'i' => DType::I32,
            b'I' => DType::U32,
            b'l' if item_bytes == 4 => DType::I32,
            b'L' if item_bytes == 4 => DType::U32,
            b'l' | b'q' | b'n' => DType::I64,
            b'L' | b'Q' | b'N' => DType::U64,
            _ => return None,
        };
        Some(Self::Number(number))
    }

    /// The size of an element in bytes.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.size_bytes(),
            Self::Bool => 1,
            Self::Opaque(bytes) => bytes,
        }
    }

    /// The alignment of an element in bytes.
    pub(crate) fn alignment(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.size_bytes(),
            Self::Bool | Self::Opaque(_) => 1,
        }
    }

    /// Returns the type with which the library sends the elements, and how many values of that type represent one
    /// element.
    pub(crate) fn wire_type(self) -> (DType, usize) {
        match self {
            Self::Number(dtype) => (dtype, 1),
            Self::Bool => (DType::U8, 1),
            Self::Opaque(bytes) => (DType::U8, bytes),
        }
    }

    /// Returns the type with which the library reduces the elements, and the reduction on that type. Fails if there is no
    /// reduction of this name, or if it is not defined on the elements.
    pub(crate) fn reduction(self, py: Python<'_>, name: &str) -> PyResult<(DType, ReduceOp)> {
        let op = name.parse().map_err(|error: String| errors::invalid(py, error))?;
        let reduction = match self {
            Self::Number(dtype) => Some((dtype, op)),
            Self::Bool => reduction_of_bools(op).map(|op| (DType::U8, op)),
            Self::Opaque(_) => None,
        };
        reduction.ok_or_else(|| errors::unsupported(py, format!("{op} on {} is not defined", self.name())))
    }

    /// Returns the name of the element type, as error messages show it.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Number(dtype) => dtype.to_string(),
            Self::Bool => "bool".into(),
            Self::Opaque(bytes) => format!("opaque items of {bytes} bytes"),
        }
    }
}

fn is_number(dtype: DType) -> bool {
    !matches!(dtype, DType::F32Loc | DType::F64Loc | DType::I32Loc | DType::I64Loc)
}

/// Returns the reduction of the bytes that represent booleans. Sums and products of booleans are "any" and "all", as in numpy and
/// NCCL.
fn reduction_of_bools(op: ReduceOp) -> Option<ReduceOp> {
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::LogicalOr | ReduceOp::BitOr => Some(ReduceOp::Max),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::LogicalAnd | ReduceOp::BitAnd => Some(ReduceOp::Min),
        ReduceOp::LogicalXor | ReduceOp::BitXor => Some(ReduceOp::BitXor),
        _ => None,
    }
}

/// Runs `$body` with `$T` as the Rust type of the [`DType`] `$dtype`. The macro has no case for values with an index,
/// for example `F32Loc`, because an [`ElementKind`] never has such a type.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::elements::with_type!(
            $dtype, $T => $body,
            F16 half::f16, Bf16 half::bf16, F32 f32, F64 f64,
            I8 i8, I16 i16, U16 u16, I32 i32, U32 u32, I64 i64, U64 u64
        )
    };
    ($dtype:expr, $T:ident => $body:expr, $($name:ident $type:ty),*) => {
        match $dtype {
            $(ringtrain::DType::$name => {
                type $T = $type;
                $body
            })*
            _ => {
                type $T = u8;
                $body
            }
        }
    };
}
pub(crate) use with_type;

/// The first fields of `PyArrayObject_fields` in numpy's C interface.
#[repr(C)]
struct ArrayFields {
    head: ffi::PyObject,
    data: *mut u8,
    dimension_count: c_int,
    dimensions: *const isize,
    strides: *const isize,
    base: *mut ffi::PyObject,
    descriptor: *const Descriptor,
    flags: c_int,
}

/// The first fields of `PyArray_Descr`, which are the same in numpy 1 and 2.
#[repr(C)]
struct Descriptor {
    head: ffi::PyObject,
    scalar_type: *mut ffi::PyTypeObject,
    kind: u8,
    code: u8,
    byte_order: u8,
    flags: u8,
    type_number: c_int,
}

/// The flag of elements that are contiguous in row-major order.
const C_CONTIGUOUS: c_int = 0x1;
/// The flag of elements that are aligned as their type requires.
const ALIGNED: c_int = 0x100;
const WRITEABLE: c_int = 0x400;

/// The address of the type `numpy.ndarray`. `None` if numpy is missing, or has arrays of another layout. [`find_numpy`] sets it.
static ARRAY_TYPE: PyOnceLock<Option<usize>> = PyOnceLock::new();

/// A numpy array whose elements are aligned, contiguous in row-major order, and of a type of [`ElementKind`] that is not opaque.
pub(crate) struct PlainArray<'a, 'py> {
    pub(crate) object: &'a Bound<'py, PyAny>,
    pub(crate) kind: ElementKind,
    data: *mut u8,
    is_writable: bool,
    dimension_count: usize,
    dimensions: *const isize,
}

impl<'a, 'py> PlainArray<'a, 'py> {
    /// Returns the array, or `None` if the object is another object or another kind of array.
    pub(crate) fn of(object: &'a Bound<'py, PyAny>) -> Option<Self> {
        let array_type = (*ARRAY_TYPE.get(object.py())?)?;
        if object.get_type_ptr() as usize != array_type {
            return None;
        }
        let array = object.as_ptr().cast::<ArrayFields>();
        // SAFETY: the object is an array, and `find_array_type` has checked the layout of arrays. The interpreter's lock is held,
        // so the fields do not change meanwhile. There is no reference to the whole array, because its count of references
        // changes.
        let (data, flags, descriptor) = unsafe { ((*array).data, (*array).flags, (*array).descriptor) };
        // SAFETY: as before.
        let (dimension_count, dimensions) = unsafe { ((*array).dimension_count, (*array).dimensions) };
        // SAFETY: an array owns a reference to its descriptor.
        let kind = unsafe { element_kind(descriptor) }?;
        let is_plain = flags & (C_CONTIGUOUS | ALIGNED) == C_CONTIGUOUS | ALIGNED;
        let (is_writable, dimension_count) = (flags & WRITEABLE != 0, dimension_count as usize);
        is_plain.then_some(Self { object, kind, data, is_writable, dimension_count, dimensions })
    }

    /// As [`of`](Self::of), but returns `None` also if the array is read-only.
    pub(crate) fn writable(object: &'a Bound<'py, PyAny>) -> Option<Self> {
        Self::of(object).filter(|array| array.is_writable)
    }

    /// The lengths of the dimensions.
    pub(crate) fn shape(&self) -> &[isize] {
        if self.dimension_count == 0 {
            return &[];
        }
        // SAFETY: an array that has dimensions points to their lengths. The interpreter's lock is held, and a call runs no Python
        // code between `of` and its last use of the shape, so no Python code can have changed the shape.
        unsafe { std::slice::from_raw_parts(self.dimensions, self.dimension_count) }
    }

    /// The elements of the array.
    pub(crate) fn region(&self) -> Region {
        Region {
            start: self.data,
            count: self.shape().iter().product::<isize>().unsigned_abs(),
            kind: self.kind,
            is_writable: self.is_writable,
            owner: self.object.clone().unbind(),
        }
    }
}

/// Returns the kind of the elements. Returns `None` for types that cannot be reduced and for another byte order.
///
/// # Safety
///
/// `descriptor` must point to the descriptor of an array, and the caller must hold the interpreter's lock.
unsafe fn element_kind(descriptor: *const Descriptor) -> Option<ElementKind> {
    // SAFETY: the caller guarantees it.
    let (type_number, byte_order) = unsafe { ((*descriptor).type_number, (*descriptor).byte_order) };
    // `=` is the byte order of the machine, and `|` belongs to elements of a single byte.
    if !matches!(byte_order, b'=' | b'|') {
        return None;
    }
    // These are the numbers of numpy's own types (`NPY_TYPES`). Types of other modules have other numbers, but can have the
    // character codes of numpy's types.
    let is_long_short = size_of::<c_long>() == 4;
    let number = match type_number {
        0 => return Some(ElementKind::Bool),
        1 => DType::I8,
        2 => DType::U8,
        3 => DType::I16,
        4 => DType::U16,
        5 => DType::I32,
        6 => DType::U32,
        7 if is_long_short => DType::I32,
        8 if is_long_short => DType::U32,
        7 | 9 => DType::I64,
        8 | 10 => DType::U64,
        11 => DType::F32,
        12 => DType::F64,
        23 => DType::F16,
        _ => return None,
    };
    Some(ElementKind::Number(number))
}

/// Finds the type `numpy.ndarray`. The module calls this function once, when it is imported. Fails with the error of importing
/// numpy, unless numpy is missing.
pub(crate) fn find_numpy(py: Python<'_>) -> PyResult<()> {
    ARRAY_TYPE.get_or_try_init(py, || find_array_type(py)).map(drop)
}

/// Returns the address of the type `numpy.ndarray`, if an example shows that arrays have the expected layout.
fn find_array_type(py: Python<'_>) -> PyResult<Option<usize>> {
    let numpy = match py.import("numpy") {
        Err(error) if error.is_instance_of::<PyImportError>(py) => return Ok(None),
        numpy => numpy?,
    };
    let array_type = numpy.getattr("ndarray")?;
    let options = PyDict::new(py);
    options.set_item("dtype", "int16")?;
    let array = numpy.call_method("zeros", ((2, 3),), Some(&options))?;
    if !array.get_type().is(&array_type) {
        return Ok(None);
    }
    let interface = array.getattr("__array_interface__")?;
    let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
    let descriptor = array.getattr("dtype")?;
    let type_number: c_int = descriptor.getattr("num")?.extract()?;
    let fields = array.as_ptr().cast::<ArrayFields>();
    // SAFETY: an array is larger than `ArrayFields`. Only integers and addresses are read until the layout has been checked.
    let has_layout = unsafe {
        (*fields).data as usize == address
            && (*fields).dimension_count == 2
            && (*fields).descriptor == descriptor.as_ptr().cast_const().cast()
            && (*fields).flags & (C_CONTIGUOUS | ALIGNED | WRITEABLE) == C_CONTIGUOUS | ALIGNED | WRITEABLE
    };
    if !has_layout {
        return Ok(None);
    }
    let descriptor = descriptor.as_ptr().cast::<Descriptor>();
    // SAFETY: the array has this descriptor and two dimensions, as has just been checked.
    let has_layout = unsafe {
        (*descriptor).type_number == type_number
            && (*descriptor).code == b'h'
            && (*descriptor).byte_order == b'='
            && *std::slice::from_raw_parts((*fields).dimensions, 2) == [2, 3]
    };
    Ok(has_layout.then_some(array_type.as_ptr() as usize))
}

/// The elements of a buffer argument, aligned as their type requires.
pub(crate) struct Region {
    pub(crate) start: *mut u8,
    /// The number of elements.
    pub(crate) count: usize,
    pub(crate) kind: ElementKind,
    pub(crate) is_writable: bool,
    /// The object that keeps the elements valid.
    pub(crate) owner: Py<PyAny>,
}

impl Region {
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
            "`PlainArray::of` or `Region::readable` has checked the alignment"
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
    pub(crate) fn into_foreign<T: Element>(self) -> ForeignBuffer<T> {
        let (start, count) = (self.start.cast(), self.count_as::<T>());
        // SAFETY: the owner, which the buffer holds, keeps this many elements valid; type and alignment have been
        // checked.
        unsafe { ForeignBuffer::new(start, count, DeferredDrop::new(self.owner)) }
    }
}

// SAFETY: the owner keeps the elements valid for every thread.
unsafe impl Send for Region {}
// SAFETY: shared references only read the elements.
unsafe impl Sync for Region {}
