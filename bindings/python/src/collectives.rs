//! Functions that all collectives on buffers share.

use pyo3::prelude::*;
use ringtrain::{DType, Element, Error, ForeignBuffer, ReduceOp};

use crate::dtype::Kind;
use crate::errors;
use crate::group::Group;
use crate::handle::{Handle, OperationResult};
use crate::messages::reduction;
use crate::region::Region;

/// A buffer argument.
pub(crate) type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// The type as which elements are reduced, and the reduction.
pub(crate) fn reduced(py: Python<'_>, kind: Kind, op: &str) -> PyResult<(DType, ReduceOp)> {
    let op = reduction(py, op)?;
    kind.reduced(op).ok_or_else(|| errors::unsupported(py, format!("{op} on {} is not defined", kind.name())))
}

pub(crate) fn alike(py: Python<'_>, output: &Region, input: &Region) -> PyResult<()> {
    if output.kind == input.kind {
        return Ok(());
    }
    let (output, input) = (output.kind.name(), input.kind.name());
    Err(errors::invalid(py, format!("the input's elements are {input}, the output's {output}")))
}

/// The output of a reduction, and its input if that is separate.
pub(crate) fn place(output: Any<'_, '_>, input: Option<Any<'_, '_>>) -> PyResult<(Region, Option<Region>)> {
    let py = output.py();
    let output = Region::writable(output)?;
    let Some(input) = input else { return Ok((output, None)) };
    let input = Region::of(input)?;
    alike(py, &output, &input)?;
    if output.count != input.count {
        let (output, input) = (output.count, input.count);
        return Err(errors::invalid(py, format!("the input has {input} elements, the output {output}")));
    }
    Ok((output, Some(input)))
}

/// Counts of elements as counts of the elements that are sent.
pub(crate) fn scaled(py: Python<'_>, counts: Option<Vec<i64>>, scale: usize) -> PyResult<Option<Vec<usize>>> {
    let scaled = |count| Ok(Group::count(py, count)?.saturating_mul(scale));
    counts.map(|counts| counts.into_iter().map(scaled).collect()).transpose()
}

/// Copies a result to the output.
pub(crate) fn deliver<T: Element>(
    mut output: ForeignBuffer<T>,
) -> impl FnOnce(Vec<T>) -> Result<OperationResult, Error> + Send {
    move |result| {
        let output = output.as_mut();
        if output.len() != result.len() {
            return Err(Error::InvalidCounts("the output has another length than the result"));
        }
        output.copy_from_slice(&result);
        Ok(OperationResult::Nothing)
    }
}

#[expect(clippy::unnecessary_wraps, reason = "other operations fail in their last step")]
pub(crate) fn over<R>(_: R) -> Result<OperationResult, Error> {
    Ok(OperationResult::Nothing)
}

impl Group {
    /// Begins an asynchronous collective.
    pub(crate) fn begun(
        &self,
        py: Python<'_>,
        begin: impl FnOnce(&mut ringtrain::Group) -> Result<ringtrain::Handle<OperationResult>, Error> + Send,
    ) -> PyResult<Handle> {
        self.collective(py, begin).map(Handle::new)
    }
}
