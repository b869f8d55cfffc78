//! How collectives on buffers begin and end.

use std::borrow::Cow;

use pyo3::prelude::*;
use ringtrain::verbs::{InPlace, OutOfPlace};
use ringtrain::{Element, Error, ForeignBuffer};

use crate::elements::Region;
use crate::group::PyGroup;
use crate::handle::{OperationResult, PyHandle};

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
            return self.lock.with_group(py, run).map(|()| None);
        }
        buffer.copy_from(input.as_ref());
        let buffer = buffer.into_foreign::<T>();
        let begin =
            |group: &mut ringtrain::Group| Ok(group.call(verb).start(buffer)?.and_then(discard_result));
        Ok(Some(PyHandle::new(self.lock.with_group(py, begin)?)))
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
            return self.lock.with_group(py, run).map(|()| None);
        }
        let output = output.map(Region::into_foreign::<T>);
        let input = input.as_ref().map(Region::elements::<T>).unwrap_or_default();
        let begin = |group: &mut ringtrain::Group| {
            Ok(group.call(verb).start_from(input)?.and_then(copy_result_to(output)))
        };
        Ok(Some(PyHandle::new(self.lock.with_group(py, begin)?)))
    }
}
