//! Handles of asynchronous operations.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};
use ringtrain::{Rank, Status};

use crate::errors::OperationError;
use crate::named::NamedOperation;
use crate::signals::wait_in_intervals;
use crate::{calls, errors};

/// The interval at which `wait_any` tests operations on named tensors, and operations for which other threads wait.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The result of an operation.
#[derive(Clone)]
pub(crate) enum OperationResult {
    /// No value.
    Nothing,
    /// The status of a message that was received into a buffer.
    Message(Status),
    /// The bytes of a message, and its status.
    Bytes(Arc<Vec<u8>>, Status),
    /// The bytes that the ranks have gathered. The program may change them.
    Gathered(Arc<Vec<u8>>),
    /// A rank of the group.
    Rank(Rank),
}

impl OperationResult {
    /// Returns the result of a receive into a buffer. The sender sends each element of the buffer as `scale` values,
    /// and `status.count` is the number of these values.
    pub(crate) fn message(status: Status, scale: usize) -> Self {
        Self::Message(Status { count: status.count / scale.max(1), ..status })
    }

    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match self {
            Self::Nothing => py.None(),
            Self::Message(status) => {
                let values = (status.source.get(), status.tag, status.count);
                values.into_pyobject(py)?.into_any().unbind()
            }
            Self::Gathered(bytes) => PyByteArray::new(py, &bytes).into_any().unbind(),
            Self::Rank(rank) => rank.get().into_pyobject(py)?.into_any().unbind(),
            Self::Bytes(bytes, status) => {
                let values = (PyBytes::new(py, &bytes), status.source.get(), status.tag);
                values.into_pyobject(py)?.into_any().unbind()
            }
        })
    }
}

/// An operation that has not ended.
enum BegunHandle {
    OfGroup(ringtrain::Handle<OperationResult>),
    OfNamedTensor(NamedOperation),
}

impl BegunHandle {
    fn wait_timeout(self, timeout: Duration) -> Result<Outcome, Self> {
        match self {
            Self::OfGroup(handle) => {
                handle.wait_timeout(timeout).map(|result| result.map_err(Into::into)).map_err(Self::OfGroup)
            }
            Self::OfNamedTensor(operation) => operation.wait_timeout(timeout).map_err(Self::OfNamedTensor),
        }
    }

    fn test(&self) -> bool {
        match self {
            Self::OfGroup(handle) => handle.test(),
            Self::OfNamedTensor(operation) => operation.test(),
        }
    }

    /// Cancels a receive. Returns whether this was possible.
    fn cancel(&mut self) -> bool {
        match self {
            Self::OfGroup(handle) => handle.cancel(),
            Self::OfNamedTensor(_) => false,
        }
    }
}

/// The result of an operation, or its error.
pub(crate) type Outcome = Result<OperationResult, OperationError>;

enum PyHandleState {
    Running(BegunHandle),
    /// One thread has taken the handle and waits for the operation. Other threads wait until the first thread puts
    /// the handle back.
    Waiting,
    Ended(Outcome),
    Cancelled,
}

/// The handle of an operation that has begun. The buffers of the operation stay alive until the operation ends. If
/// the handle is dropped, the operation continues, but a receive that has matched no message yet is cancelled.
#[pyclass(name = "Handle", frozen, module = "ringtrain._core")]
pub(crate) struct PyHandle {
    state: Mutex<PyHandleState>,
    /// Notified when a waiting thread puts the handle back into `state`.
    returned: Condvar,
}

impl PyHandle {
    pub(crate) fn new(handle: ringtrain::Handle<OperationResult>) -> Self {
        Self::running(BegunHandle::OfGroup(handle))
    }

    /// Makes the handle of an operation on a named tensor.
    pub(crate) fn of_named_tensor(operation: NamedOperation) -> Self {
        Self::running(BegunHandle::OfNamedTensor(operation))
    }

    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(Py::new(py, self)?.into_any())
    }

    fn running(operation: BegunHandle) -> Self {
        Self { state: Mutex::new(PyHandleState::Running(operation)), returned: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, PyHandleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the operation for at most `patience`. Returns whether the operation has ended.
    fn wait_until_ended(&self, patience: Duration) -> bool {
        let started = Instant::now();
        let mut state = self.lock();
        loop {
            let left = patience.saturating_sub(started.elapsed());
            match std::mem::replace(&mut *state, PyHandleState::Waiting) {
                PyHandleState::Running(handle) => {
                    drop(state);
                    let waited = handle.wait_timeout(left);
                    let mut state = self.lock();
                    *state = waited.map_or_else(PyHandleState::Running, PyHandleState::Ended);
                    self.returned.notify_all();
                    return !matches!(*state, PyHandleState::Running(_));
                }
                PyHandleState::Waiting if left.is_zero() => return false,
                PyHandleState::Waiting => {
                    let waited = self.returned.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                ended => {
                    *state = ended;
                    return true;
                }
            }
        }
    }

    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        // This lock is free or soon free, because the operation has ended.
        let result = match &*self.lock() {
            PyHandleState::Ended(result) => result.clone(),
            PyHandleState::Running(_) | PyHandleState::Waiting | PyHandleState::Cancelled => {
                return Err(errors::base_error(py, "the receive was cancelled"));
            }
        };
        result.map_err(|error| error.into_python(py))?.into_python(py)
    }

    /// Waits for the operation. Runs Python's signal handlers while waiting.
    pub(crate) fn wait_for(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Option<Py<PyAny>>> {
        calls::fail_if_forked(py)?;
        wait_in_intervals(py, timeout, |patience| {
            if calls::detach(py, || self.wait_until_ended(patience))? {
                self.result(py).map(Some)
            } else {
                Ok(None)
            }
        })
    }
}

#[pymethods]
impl PyHandle {
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let limit = timeout.map(|seconds| duration_from_seconds(py, seconds)).transpose()?;
        let waited = self.wait_for(py, limit)?;
        waited.ok_or_else(|| errors::still_running(py, timeout.unwrap_or_default()))
    }

    fn test(&self, py: Python<'_>) -> PyResult<bool> {
        calls::fail_if_forked(py)?;
        calls::detach(py, || {
            let has_ended = match &*self.lock() {
                PyHandleState::Running(handle) => handle.test(),
                // Another thread waits for the operation, and will change this state.
                PyHandleState::Waiting => false,
                PyHandleState::Ended(_) | PyHandleState::Cancelled => true,
            };
            // `wait_until_ended` also stores the result, for example in the output buffer.
            has_ended && self.wait_until_ended(Duration::ZERO)
        })
    }

    pub(crate) fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        calls::fail_if_forked(py)?;
        calls::detach(py, || {
            let mut state = self.lock();
            while matches!(*state, PyHandleState::Waiting) {
                // The waiting thread puts the handle back within `SIGNAL_CHECK_INTERVAL`.
                state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let PyHandleState::Running(handle) = &mut *state else { return false };
            let is_cancelled = handle.cancel();
            if is_cancelled {
                *state = PyHandleState::Cancelled;
            }
            is_cancelled
        })
    }
}

impl Drop for PyHandle {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let state = std::mem::replace(state, PyHandleState::Cancelled);
        if calls::is_forked() {
            std::mem::forget(state);
        } else if matches!(state, PyHandleState::Running(_)) {
            // Detach first, because dropping the handle waits for a lock, and the thread that holds this lock may
            // wait for the interpreter's lock.
            Python::try_attach(|py| {
                py.detach(move || drop(state));
                calls::drop_deferred(py);
            });
        }
    }
}

/// Waits at most `patience` until one of the operations has ended. If another thread waits for one of the operations, or
/// an operation is on a named tensor, this function returns after [`POLL_INTERVAL`].
fn wait_for_any(handles: &[&PyHandle], patience: Duration) {
    let (mut owners, mut running) = (Vec::new(), Vec::new());
    for &handle in handles {
        let mut state = handle.lock();
        match std::mem::replace(&mut *state, PyHandleState::Waiting) {
            PyHandleState::Running(BegunHandle::OfGroup(operation)) => {
                owners.push(handle);
                running.push(operation);
            }
            other => *state = other,
        }
    }
    if owners.is_empty() {
        handles[0].wait_until_ended(POLL_INTERVAL);
    } else {
        let patience = if owners.len() < handles.len() { patience.min(POLL_INTERVAL) } else { patience };
        ringtrain::wait_any(&running, Some(patience));
    }
    for (owner, operation) in owners.into_iter().zip(running) {
        *owner.lock() = PyHandleState::Running(BegunHandle::OfGroup(operation));
        owner.returned.notify_all();
    }
}

/// Waits until one of the operations has ended, and returns the index of its handle. Returns `None` after `timeout`
/// seconds, or if there are no handles.
#[pyfunction]
#[pyo3(signature = (handles, timeout = None))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 converts the Python sequence into it")]
pub(crate) fn wait_any(
    py: Python<'_>,
    handles: Vec<PyRef<'_, PyHandle>>,
    timeout: Option<f64>,
) -> PyResult<Option<usize>> {
    calls::fail_if_forked(py)?;
    let limit = timeout.map(|seconds| duration_from_seconds(py, seconds)).transpose()?;
    let handles: Vec<&PyHandle> = handles.iter().map(|handle| &**handle).collect();
    if handles.is_empty() {
        return Ok(None);
    }
    let find_ended = || handles.iter().position(|handle| handle.wait_until_ended(Duration::ZERO));
    wait_in_intervals(py, limit, |patience| {
        calls::detach(py, || {
            find_ended().or_else(|| {
                wait_for_any(&handles, patience);
                find_ended()
            })
        })
    })
}

/// Converts a number of seconds to a duration. Infinity becomes about a hundred years.
pub(crate) fn duration_from_seconds(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
    if seconds.is_nan() || seconds < 0.0 {
        return Err(errors::invalid(py, format!("{seconds} is not a valid time in seconds")));
    }
    Ok(Duration::try_from_secs_f64(seconds).map_or(FOREVER, |time| time.min(FOREVER)))
}
