//! Operations that go on by themselves.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringtrain::{Error, Status};

use crate::{errors, fork, graves};

/// How long a thread waits before it looks whether a signal's handler raised.
const SLICE: Duration = Duration::from_millis(50);
/// How long one of several operations is waited for before the others are looked at.
const SHORT_SLICE: Duration = Duration::from_millis(1);

/// What an operation has come to.
#[derive(Clone)]
pub(crate) enum Outcome {
    /// It is over.
    Nothing,
    /// A message has come.
    Message(Status),
    /// Bytes have come.
    Bytes(Arc<Vec<u8>>, Status),
}

impl Outcome {
    /// A message whose elements each were `scale` of those that were sent.
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
            Self::Bytes(bytes, status) => {
                let values = (PyBytes::new(py, &bytes), status.source.get(), status.tag);
                values.into_pyobject(py)?.into_any().unbind()
            }
        })
    }
}

enum State {
    Running(ringtrain::Handle<Outcome>),
    /// A thread waits for it, and others wait for that one.
    Away,
    Ended(Result<Outcome, Error>),
    Cancelled,
}

/// An operation under way. It keeps its buffers alive; dropping it lets the operation go on, unless that is a receive that has
/// found no message yet, which is withdrawn.
#[pyclass(frozen, module = "ringtrain._core")]
pub(crate) struct Handle {
    state: Mutex<State>,
    /// A thread that waited for it has stopped.
    returned: Condvar,
}

impl Handle {
    pub(crate) fn new(handle: ringtrain::Handle<Outcome>) -> Self {
        Self { state: Mutex::new(State::Running(handle)), returned: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for as long as `patience`; whether it has ended.
    fn has_ended(&self, patience: Duration) -> bool {
        let started = Instant::now();
        let mut state = self.lock();
        loop {
            let left = patience.saturating_sub(started.elapsed());
            match std::mem::replace(&mut *state, State::Away) {
                State::Running(handle) => {
                    drop(state);
                    let waited = handle.wait_timeout(left);
                    let mut state = self.lock();
                    *state = waited.map_or_else(State::Running, State::Ended);
                    self.returned.notify_all();
                    return !matches!(*state, State::Running(_));
                }
                State::Away if left.is_zero() => return false,
                State::Away => {
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
        // Nobody keeps it long once the operation has ended.
        let result = match &*self.lock() {
            State::Ended(result) => result.clone(),
            State::Running(_) | State::Away | State::Cancelled => {
                return Err(errors::plain(py, "the receive was cancelled"));
            }
        };
        result.map_err(|error| errors::of(py, &error))?.into_python(py)
    }

    /// Waits, and runs signal handlers meanwhile.
    pub(crate) fn wait_for(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Option<Py<PyAny>>> {
        fork::check(py)?;
        let started = Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
            let patience = left.map_or(SLICE, |left| left.min(SLICE));
            if py.detach(|| self.has_ended(patience)) {
                graves::clear(py);
                return self.result(py).map(Some);
            }
            py.check_signals()?;
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
        }
    }
}

#[pymethods]
impl Handle {
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let limit = timeout.map(|seconds| duration(py, seconds)).transpose()?;
        let waited = self.wait_for(py, limit)?;
        waited.ok_or_else(|| errors::still_running(py, timeout.unwrap_or_default()))
    }

    fn test(&self, py: Python<'_>) -> PyResult<bool> {
        fork::check(py)?;
        Ok(py.detach(|| {
            let is_over = match &*self.lock() {
                State::Running(handle) => handle.test(),
                // Whoever waits for it would not if it had ended.
                State::Away => false,
                State::Ended(_) | State::Cancelled => true,
            };
            // The last step, which may be what puts the result in its place, is done by who waits.
            is_over && self.has_ended(Duration::ZERO)
        }))
    }

    pub(crate) fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        fork::check(py)?;
        Ok(py.detach(|| {
            let mut state = self.lock();
            while matches!(*state, State::Away) {
                // Nobody waits for longer than a slice at a time.
                state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let State::Running(handle) = &mut *state else { return false };
            let is_cancelled = handle.cancel();
            if is_cancelled {
                *state = State::Cancelled;
            }
            is_cancelled
        }))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let state = std::mem::replace(state, State::Cancelled);
        if fork::is_forked() {
            std::mem::forget(state);
        } else if matches!(state, State::Running(_)) {
            // It takes a lock that other threads hold while they let go of Python's objects.
            Python::try_attach(|py| {
                py.detach(move || drop(state));
                graves::clear(py);
            });
        }
    }
}

/// The index of a handle that has ended; `None` after `timeout` seconds, or if there are none.
#[pyfunction]
#[pyo3(signature = (handles, timeout = None))]
#[expect(clippy::needless_pass_by_value, reason = "what Python's sequence is made into")]
pub(crate) fn wait_any(
    py: Python<'_>,
    handles: Vec<PyRef<'_, Handle>>,
    timeout: Option<f64>,
) -> PyResult<Option<usize>> {
    fork::check(py)?;
    let limit = timeout.map(|seconds| duration(py, seconds)).transpose()?;
    let handles: Vec<&Handle> = handles.iter().map(|handle| &**handle).collect();
    let started = Instant::now();
    if handles.is_empty() {
        return Ok(None);
    }
    let mut looked = Instant::now();
    loop {
        let left = limit.map(|limit| limit.saturating_sub(started.elapsed()));
        let patience = left.map_or(SHORT_SLICE, |left| left.min(SHORT_SLICE));
        let ended = py.detach(|| {
            let ended = handles.iter().position(|handle| handle.has_ended(Duration::ZERO));
            ended.or_else(|| handles[0].has_ended(patience).then_some(0))
        });
        if ended.is_some() || left == Some(Duration::ZERO) {
            return Ok(ended);
        }
        if looked.elapsed() >= SLICE {
            py.check_signals()?;
            looked = Instant::now();
        }
    }
}

/// So many seconds; infinity is some hundred years.
pub(crate) fn duration(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
    if seconds.is_nan() || seconds < 0.0 {
        return Err(errors::invalid(py, format!("{seconds} is no number of seconds to wait")));
    }
    Ok(Duration::try_from_secs_f64(seconds).map_or(FOREVER, |time| time.min(FOREVER)))
}
