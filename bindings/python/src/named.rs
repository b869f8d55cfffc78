//! Collectives of tensors that the ranks submit by name, in any order.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ringtrain::{Element, ForeignBuffer, NamedError, NamedHandle, NamedOptions, NamedTensors};

use crate::arguments::{BufferArg, check_same_kind, output_and_input};
use crate::closable::Closable;
use crate::collectives::copy_result_to;
use crate::elements::{Region, with_type};
use crate::errors::{self, OperationError};
use crate::group::PyGroup;
use crate::handle::{OperationResult, Outcome, PyHandle, duration_from_seconds};
use crate::signals::wait_in_intervals;

/// The type-independent part of an operation on a named tensor.
trait Wait: Send {
    fn test(&self) -> bool;
    fn wait_timeout(
        self: Box<Self>,
        timeout: Duration,
    ) -> Result<Result<OperationResult, NamedError>, Box<dyn Wait>>;
}

/// The handle of an operation, and the function that converts its result.
struct WaitAndConvert<R, F>(NamedHandle<R>, F);

impl<R, F> Wait for WaitAndConvert<R, F>
where
    R: Send + 'static,
    F: FnOnce(R) -> Result<OperationResult, ringtrain::Error> + Send + 'static,
{
    fn test(&self) -> bool {
        self.0.test()
    }

    fn wait_timeout(
        self: Box<Self>,
        timeout: Duration,
    ) -> Result<Result<OperationResult, NamedError>, Box<dyn Wait>> {
        let Self(handle, convert) = *self;
        match handle.wait_timeout(timeout) {
            Ok(result) => Ok(result.and_then(|result| Ok(convert(result)?))),
            Err(handle) => Err(Box::new(Self(handle, convert))),
        }
    }
}

/// An operation on a named tensor that has not ended.
pub(crate) struct NamedOperation {
    wait: Box<dyn Wait>,
    /// The operation and the name of the tensor, for errors.
    what: String,
}

impl NamedOperation {
    pub(crate) fn test(&self) -> bool {
        self.wait.test()
    }

    pub(crate) fn wait_timeout(self, timeout: Duration) -> Result<Outcome, Self> {
        let Self { wait, what } = self;
        match wait.wait_timeout(timeout) {
            Ok(result) => Ok(result.map_err(|error| OperationError::Named(error, what))),
            Err(wait) => Err(Self { wait, what }),
        }
    }
}

/// The result of an operation in the memory of the program.
#[expect(clippy::unnecessary_wraps, reason = "the conversion of other results can fail")]
fn no_value<T: Element>(_: ForeignBuffer<T>) -> Result<OperationResult, ringtrain::Error> {
    Ok(OperationResult::Nothing)
}

/// The name of a tensor, the ranks of the job that have not submitted it, and the seconds that the tensor waited.
type StallTuple = (Option<String>, Vec<u32>, f64);

/// The named tensors of a group.
#[pyclass(name = "NamedTensors", frozen, module = "ringtrain._core")]
pub(crate) struct PyNamedTensors {
    tensors: Closable<NamedTensors>,
}

impl PyNamedTensors {
    /// Submits a tensor. Other Python threads can run in the meantime.
    fn begin<R: Send + 'static>(
        &self,
        py: Python<'_>,
        what: String,
        submit: impl FnOnce(&NamedTensors) -> Result<NamedHandle<R>, NamedError> + Send,
        convert: impl FnOnce(R) -> Result<OperationResult, ringtrain::Error> + Send + 'static,
    ) -> PyResult<PyHandle> {
        let handle = self
            .tensors
            .run_shared(py, submit)?
            .map_err(|error| OperationError::Named(error, what.clone()).into_python(py))?;
        Ok(PyHandle::of_named_tensor(NamedOperation {
            wait: Box::new(WaitAndConvert(handle, convert)),
            what,
        }))
    }
}

#[pymethods]
impl PyNamedTensors {
    #[new]
    #[pyo3(signature = (group, stall_warning = None, stall_abort = None))]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 converts the Python object into it")]
    fn new(
        py: Python<'_>,
        group: PyRef<'_, PyGroup>,
        stall_warning: Option<f64>,
        stall_abort: Option<f64>,
    ) -> PyResult<Self> {
        let mut options = NamedOptions::default();
        if let Some(seconds) = stall_warning {
            options.stall_warning = duration_from_seconds(py, seconds)?;
        }
        options.stall_abort = stall_abort.map(|seconds| duration_from_seconds(py, seconds)).transpose()?;
        let (tensors, messenger) = group.lock.with_group(py, |group: &mut ringtrain::Group| {
            Ok((NamedTensors::new(group, options)?, group.messenger()))
        })?;
        Ok(Self { tensors: Closable::new("object NamedTensors", tensors, vec![messenger]) })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.tensors.is_closed()
    }

    #[pyo3(signature = (name, output, op = "sum", input = None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        name: &str,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<PyHandle> {
        let (mut output, input) = output_and_input(output, input)?;
        let (dtype, op) = output.kind.reduction(py, op)?;
        output.copy_from(input.as_ref());
        let what = format!("the all-reduce of tensor `{name}`");
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>();
            self.begin(py, what, |tensors| tensors.all_reduce(name, output, op), no_value)
        })
    }

    fn broadcast(
        &self,
        py: Python<'_>,
        name: &str,
        output: BufferArg<'_, '_>,
        root: i64,
    ) -> PyResult<PyHandle> {
        let root = PyGroup::parse_rank(py, root)?;
        let output = Region::writable(output)?;
        let what = format!("the broadcast of tensor `{name}`");
        with_type!(output.kind.wire_type().0, T => {
            let output = output.into_foreign::<T>();
            self.begin(py, what, |tensors| tensors.broadcast(name, output, root), no_value)
        })
    }

    #[pyo3(signature = (name, output, input, op = "sum"))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        name: &str,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        op: &str,
    ) -> PyResult<PyHandle> {
        let (output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, op) = output.kind.reduction(py, op)?;
        let what = format!("the reduce-scatter of tensor `{name}`");
        with_type!(dtype, T => {
            let (output, input) = (output.into_foreign::<T>(), input.into_foreign::<T>());
            self.begin(py, what, |tensors| tensors.reduce_scatter(name, input, op), copy_result_to(Some(output)))
        })
    }

    fn all_gather_bytes(&self, py: Python<'_>, name: &str, data: BufferArg<'_, '_>) -> PyResult<PyHandle> {
        let data = Region::readable(data)?.into_foreign::<u8>();
        let what = format!("the all-gather of tensor `{name}`");
        let convert = |bytes| Ok(OperationResult::Gathered(Arc::new(bytes)));
        self.begin(py, what, |tensors| tensors.all_gather(name, data), convert)
    }

    fn join(&self, py: Python<'_>) -> PyResult<PyHandle> {
        self.begin(py, "join".into(), NamedTensors::join_async, |rank| Ok(OperationResult::Rank(rank)))
    }

    #[getter]
    fn stalls(&self, py: Python<'_>) -> PyResult<Vec<StallTuple>> {
        let stalls = self.tensors.run_shared(py, NamedTensors::stalled)?;
        let missing = |stall: &ringtrain::Stall| stall.missing.iter().map(|rank| rank.get()).collect();
        Ok(stalls
            .into_iter()
            .map(|stall| (stall.tensor.clone(), missing(&stall), stall.waited.as_secs_f64()))
            .collect())
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let statistics = self.tensors.run_shared(py, NamedTensors::statistics)?;
        let dict = PyDict::new(py);
        dict.set_item("tensors", statistics.tensors)?;
        dict.set_item("cached", statistics.cached)?;
        dict.set_item("operations", statistics.operations)?;
        dict.set_item("reports", statistics.reports)?;
        Ok(dict)
    }

    fn abort(&self, py: Python<'_>, message: &str) -> PyResult<()> {
        self.tensors.abort(py, message)
    }

    /// Waits until all ranks have closed. Runs Python's signal handlers while waiting.
    #[pyo3(signature = (timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if self.tensors.is_closed() {
            return Ok(());
        }
        let limit = timeout.map(|seconds| duration_from_seconds(py, seconds)).transpose()?;
        self.tensors.run_shared(py, NamedTensors::begin_close)?;
        let closed = wait_in_intervals(py, limit, |patience| {
            let is_closed = self.tensors.run_shared(py, |tensors| tensors.wait_until_closed(patience))?;
            Ok(is_closed.then_some(()))
        })?;
        match closed {
            Some(()) => self.tensors.close(py),
            None => Err(errors::still_running(py, timeout.unwrap_or_default())),
        }
    }
}
