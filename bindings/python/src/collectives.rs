//! Functions that several collectives on buffers use.

use pyo3::prelude::*;
use ringtrain::{DType, Element, Error, ForeignBuffer, ReduceOp};

use crate::dtype::ElementKind;
use crate::errors;
use crate::group::PyGroup;
use crate::handle::{OperationResult, PyHandle};
use crate::messages::parse_reduction;
use crate::region::Region;

/// A buffer argument.
pub(crate) type BufferArg<'a, 'py> = &'a Bound<'py, PyAny>;

/// Returns the element type and the reduction that the library uses for elements of `kind` and the reduction `op`.
pub(crate) fn reduction_for(py: Python<'_>, kind: ElementKind, op: &str) -> PyResult<(DType, ReduceOp)> {
    let op = parse_reduction(py, op)?;
    kind.reduction(op)
        .ok_or_else(|| errors::unsupported(py, format!("{op} on {} is not defined", kind.name())))
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

/// Returns a function that copies the result of an operation to `output`.
pub(crate) fn copy_result_to<T: Element>(
    mut output: ForeignBuffer<T>,
) -> impl FnOnce(Vec<T>) -> Result<OperationResult, Error> + Send {
    move |result| {
        let output = output.as_mut();
        if output.len() != result.len() {
            return Err(Error::InvalidCounts("the output and the result have different lengths"));
        }
        output.copy_from_slice(&result);
        Ok(OperationResult::Nothing)
    }
}

/// Discards the result of an operation. This function is the last step of each operation that returns no value to the
/// program.
#[expect(clippy::unnecessary_wraps, reason = "the last step of other operations can fail")]
pub(crate) fn discard_result<R>(_: R) -> Result<OperationResult, Error> {
    Ok(OperationResult::Nothing)
}

impl PyGroup {
    /// Begins an asynchronous collective.
    pub(crate) fn begin_collective(
        &self,
        py: Python<'_>,
        begin: impl FnOnce(&mut ringtrain::Group) -> Result<ringtrain::Handle<OperationResult>, Error> + Send,
    ) -> PyResult<PyHandle> {
        self.collective(py, begin).map(PyHandle::new)
    }
}
