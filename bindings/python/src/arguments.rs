//! Finds the elements of buffer arguments: numpy arrays, memory of a `Group`, addresses, and objects with the buffer protocol.

use pyo3::prelude::*;
use ringtrain::DType;

use crate::buffer_view::BufferView;
use crate::elements::{ElementKind, PlainArray, Region};
use crate::errors;
use crate::group::PyGroup;
use crate::shared::PySharedBuffer;

/// A buffer argument.
pub(crate) type BufferArg<'a, 'py> = &'a Bound<'py, PyAny>;

/// A buffer of `count` elements at `address`. The caller guarantees that the elements stay valid as long as
/// `owner` lives.
#[pyclass(name = "Memory", frozen, module = "ringtrain._core")]
pub(crate) struct PyMemory(Region);

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
        Ok(Self(Region { start: address as *mut u8, count, kind, is_writable: writable, owner }))
    }

    fn __repr__(&self) -> String {
        format!("Memory({} x {} at {:#x})", self.0.count, self.0.kind.name(), self.0.start as usize)
    }
}

impl Region {
    /// Returns the elements of a buffer that an operation only reads.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let region = if let Some(array) = PlainArray::of(object) {
            array.region()
        } else if let Ok(shared) = object.cast::<PySharedBuffer>() {
            // The element type comes from the shared buffer, because the buffer protocol has no format for some
            // types, such as bf16.
            Self { kind: shared.get().kind(), ..Self::from_buffer_protocol(object)? }
        } else if let Ok(memory) = object.cast::<PyMemory>() {
            let region = &memory.get().0;
            Self { owner: region.owner.clone_ref(py), ..*region }
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
            kind: kind_of_items(view.format().to_bytes(), item_bytes),
            is_writable: !view.is_read_only(),
            owner: Py::new(py, view)?.into_any(),
        })
    }
}

/// Returns the kind of items that have this format of the buffer protocol and this size in bytes.
fn kind_of_items(format: &[u8], item_bytes: usize) -> ElementKind {
    let kind = match format {
        [code] | [b'@' | b'=' | b'<' | b'|', code] => ElementKind::from_code(*code, item_bytes),
        _ => None,
    };
    kind.filter(|kind| kind.bytes() == item_bytes).unwrap_or(ElementKind::Opaque(item_bytes))
}

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

/// Checks that the elements of both buffers have the same type.
pub(crate) fn check_same_kind(py: Python<'_>, output: &Region, input: &Region) -> PyResult<()> {
    if output.kind == input.kind {
        return Ok(());
    }
    let (output, input) = (output.kind.name(), input.kind.name());
    Err(errors::invalid(py, format!("the input's elements are {input}, the output's {output}")))
}

/// Returns the memory of a reduction's output, and of its input if the reduction is not in place. Checks that output
/// and input have the same type and length.
pub(crate) fn output_and_input(
    output: BufferArg<'_, '_>,
    input: Option<BufferArg<'_, '_>>,
) -> PyResult<(Region, Option<Region>)> {
    let py = output.py();
    let output = Region::writable(output)?;
    let Some(input) = input else { return Ok((output, None)) };
    let input = Region::readable(input)?;
    check_same_kind(py, &output, &input)?;
    if output.count != input.count {
        let (output, input) = (output.count, input.count);
        return Err(errors::invalid(py, format!("the input has {input} elements, the output {output}")));
    }
    Ok((output, Some(input)))
}

/// Multiplies each count by `scale`, because the library sends each element of the caller's buffer as `scale` values.
pub(crate) fn scale_counts(
    py: Python<'_>,
    counts: Option<Vec<i64>>,
    scale: usize,
) -> PyResult<Option<Vec<usize>>> {
    let scale_count = |count| Ok(PyGroup::parse_count(py, count)?.saturating_mul(scale));
    counts.map(|counts| counts.into_iter().map(scale_count).collect()).transpose()
}
