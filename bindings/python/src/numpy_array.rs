//! Reads numpy arrays without Python's buffer protocol. With the protocol, numpy describes the shape and the type of an array
//! anew for each view, which takes longer than a short collective.

use std::ffi::{c_int, c_long};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use ringtrain::DType;

use crate::dtype::ElementKind;

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

/// The address of the type `numpy.ndarray`. `None` if numpy is missing, or has arrays of another layout.
static ARRAY_TYPE: PyOnceLock<Option<usize>> = PyOnceLock::new();

/// A numpy array whose elements are aligned, contiguous in row-major order, and of a type of [`ElementKind`] that is not opaque.
pub(crate) struct PlainArray<'a> {
    fields: &'a ArrayFields,
    pub(crate) kind: ElementKind,
}

impl<'a> PlainArray<'a> {
    /// Returns the array, or `None` if the object is another object or another kind of array.
    pub(crate) fn of(object: &'a Bound<'_, PyAny>) -> Option<Self> {
        let array_type = (*ARRAY_TYPE.get_or_init(object.py(), || find_array_type(object.py())))?;
        if object.get_type_ptr() as usize != array_type {
            return None;
        }
        // SAFETY: the object is an array and lives for `'a`, and `find_array_type` has checked the layout of arrays.
        let fields = unsafe { &*object.as_ptr().cast::<ArrayFields>() };
        // SAFETY: an array owns a reference to its descriptor.
        let kind = element_kind(unsafe { &*fields.descriptor })?;
        let is_plain = fields.flags & (C_CONTIGUOUS | ALIGNED) == C_CONTIGUOUS | ALIGNED;
        is_plain.then_some(Self { fields, kind })
    }

    /// The address of the elements.
    pub(crate) fn start(&self) -> *mut u8 {
        self.fields.data
    }

    /// The lengths of the dimensions.
    pub(crate) fn shape(&self) -> &'a [isize] {
        let count = self.fields.dimension_count as usize;
        if count == 0 {
            return &[];
        }
        // SAFETY: an array that has dimensions points to their lengths, and a shape does not change during a call.
        unsafe { std::slice::from_raw_parts(self.fields.dimensions, count) }
    }

    /// The number of elements.
    pub(crate) fn count(&self) -> usize {
        self.shape().iter().product::<isize>().unsigned_abs()
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.fields.flags & WRITEABLE != 0
    }
}

/// Returns the kind of the elements. Returns `None` for types that cannot be reduced and for another byte order.
fn element_kind(descriptor: &Descriptor) -> Option<ElementKind> {
    const LONG: c_int = 7;
    const UNSIGNED_LONG: c_int = 8;
    let number = match descriptor.type_number {
        LONG | UNSIGNED_LONG if size_of::<c_long>() == 4 => descriptor.type_number - 2,
        LONG | UNSIGNED_LONG => descriptor.type_number + 2,
        number => number,
    };
    let dtype = match number {
        0 => return Some(ElementKind::Bool),
        1 => DType::I8,
        2 => DType::U8,
        3 => DType::I16,
        4 => DType::U16,
        5 => DType::I32,
        6 => DType::U32,
        9 => DType::I64,
        10 => DType::U64,
        11 => DType::F32,
        12 => DType::F64,
        23 => DType::F16,
        _ => return None,
    };
    // `=` is the byte order of the machine, and `|` belongs to elements of a single byte.
    matches!(descriptor.byte_order, b'=' | b'|').then_some(ElementKind::Number(dtype))
}

/// Returns the address of the type `numpy.ndarray`, if an example shows that arrays have the expected layout.
fn find_array_type(py: Python<'_>) -> Option<usize> {
    let check = || -> PyResult<Option<usize>> {
        let numpy = py.import("numpy")?;
        let array_type = numpy.getattr("ndarray")?;
        let options = PyDict::new(py);
        options.set_item("dtype", "int16")?;
        let array = numpy.call_method("zeros", ((2, 3),), Some(&options))?;
        if !array.get_type().is(&array_type) {
            return Ok(None);
        }
        let interface = array.getattr("__array_interface__")?;
        let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
        let type_number: c_int = array.getattr("dtype")?.getattr("num")?.extract()?;
        // SAFETY: an array is larger than `ArrayFields`. Only integers and addresses are read until the layout has been checked.
        let fields = unsafe { &*array.as_ptr().cast::<ArrayFields>() };
        let descriptor = array.getattr("dtype")?.as_ptr() as usize;
        let has_layout = fields.data as usize == address
            && fields.dimension_count == 2
            && fields.descriptor as usize == descriptor
            && fields.flags & (C_CONTIGUOUS | ALIGNED | WRITEABLE) == C_CONTIGUOUS | ALIGNED | WRITEABLE;
        if !has_layout {
            return Ok(None);
        }
        // SAFETY: the array has a descriptor and two dimensions, as has just been checked.
        let (descriptor, shape) =
            unsafe { (&*fields.descriptor, std::slice::from_raw_parts(fields.dimensions, 2)) };
        let has_layout =
            descriptor.type_number == type_number && descriptor.byte_order == b'=' && *shape == [2, 3];
        Ok(has_layout.then_some(array_type.as_ptr() as usize))
    };
    check().ok().flatten()
}
