//! How collectives on buffers begin and end.

use std::borrow::Cow;

use pyo3::prelude::*;
use ringtrain::verbs::{InPlace, OutOfPlace};
use ringtrain::{DType, Element, Error, ForeignBuffer, ReduceOp};

use crate::dtype::ElementKind;
use crate::group::PyGroup;
use crate::group_lock::LockError;
use crate::handle::{OperationResult, PyHandle};
use crate::region::Region;
use crate::{deferred_drop, errors, fork, interrupt, site};

/// A buffer argument.
pub(crate) type BufferArg<'a, 'py> = &'a Bound<'py, PyAny>;

/// Returns the element type and the reduction that the library uses for elements of `kind` and the reduction `op`.
pub(crate) fn reduction_for(py: Python<'_>, kind: ElementKind, op: &str) -> PyResult<(DType, ReduceOp)> {
    let op = op.parse().map_err(|error: String| errors::invalid(py, error))?;
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

/// How a call ends. Python chooses with the argument `async_op`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The call waits for the operation, and returns `None`.
    Wait,
    /// The call only begins the operation, and returns its handle.
    Handle,
}

impl From<bool> for Ending {
    fn from(async_op: bool) -> Self {
        if async_op { Self::Handle } else { Self::Wait }
    }
}

/// What a collective returns: the handle of an asynchronous call, or `None`.
pub(crate) type Ended = PyResult<Option<PyHandle>>;

/// Returns a function that copies the result of an operation to `output`. Discards the result if there is no output.
pub(crate) fn copy_result_to<T: Element>(
    output: Option<ForeignBuffer<T>>,
) -> impl FnOnce(Vec<T>) -> Result<OperationResult, Error> + Send {
    move |result| {
        if let Some(mut output) = output {
            let output = output.as_mut();
            if output.len() != result.len() {
                return Err(Error::InvalidCounts("the output and the result have different lengths"));
            }
            output.copy_from_slice(&result);
        }
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
    /// Locks the group and calls `work` with the group. Other Python threads can run during `work`.
    pub(crate) fn collective<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ringtrain::Group) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        fork::fail_if_forked(py)?;
        let site = site::find_user_line(py);
        let result = py.detach(|| site::run_at(site, || self.lock.with_group(work)));
        deferred_drop::drop_all(py);
        // If a signal handler raised an exception, raise that exception, even if the operation has a result.
        if let Some(raised) = interrupt::take_raised_exception() {
            return Err(raised);
        }
        match result {
            Ok(result) => result.map_err(|error| errors::from_error(py, &error)),
            Err(LockError::Closed) => Err(errors::closed_group(py)),
            Err(LockError::Interrupted) => Err(errors::base_error(py, "the thread was interrupted")),
            Err(LockError::Nested) => Err(errors::base_error(
                py,
                "a signal handler called a collective of a group while the interrupted thread was in another \
                 collective of that group",
            )),
        }
    }

    /// Runs or begins a collective that works on `buffer` in place. If there is an `input`, its elements are first copied to
    /// `buffer`, which has the same length.
    pub(crate) fn in_place<T: Element, V: InPlace<T> + Send>(
        &self,
        py: Python<'_>,
        verb: V,
        (mut buffer, input): (Region, Option<Region>),
        ending: Ending,
    ) -> Ended {
        if ending == Ending::Wait {
            let (buffer, input) = (&mut buffer, input.as_ref());
            let run = move |group: &mut ringtrain::Group| {
                buffer.copy_from(input);
                group.call(verb).run(buffer.elements_mut::<T>()).map(drop)
            };
            return self.collective(py, run).map(|()| None);
        }
        buffer.copy_from(input.as_ref());
        let buffer = buffer.into_foreign::<T>(py)?;
        let begin =
            |group: &mut ringtrain::Group| Ok(group.call(verb).start(buffer)?.and_then(discard_result));
        Ok(Some(PyHandle::new(self.collective(py, begin)?)))
    }

    /// Runs or begins a collective that reads `input` and writes its result to `output`. A rank that sends nothing has no input,
    /// and a rank that gets no result has no output.
    pub(crate) fn out_of_place<T: Element, V: OutOfPlace<T> + Send>(
        &self,
        py: Python<'_>,
        verb: V,
        (mut output, input): (Option<Region>, Option<Region>),
        ending: Ending,
    ) -> Ended {
        if ending == Ending::Wait {
            let input = match (&input, &output) {
                (Some(input), Some(output)) => input.elements_without_overlap::<T>(output),
                (Some(input), None) => input.elements::<T>().into(),
                (None, _) => Cow::default(),
            };
            let output = output.as_mut().map(Region::elements_mut::<T>).unwrap_or_default();
            let run = move |group: &mut ringtrain::Group| group.call(verb).run_into(&*input, output);
            return self.collective(py, run).map(|()| None);
        }
        let output = output.map(|output| output.into_foreign::<T>(py)).transpose()?;
        let input = input.as_ref().map(Region::elements::<T>).unwrap_or_default();
        let begin = |group: &mut ringtrain::Group| {
            Ok(group.call(verb).start_from(input)?.and_then(copy_result_to(output)))
        };
        Ok(Some(PyHandle::new(self.collective(py, begin)?)))
    }
}
