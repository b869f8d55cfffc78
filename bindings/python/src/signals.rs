//! Python's signal handlers, for threads that wait.

use std::cell::Cell;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// The time between two checks whether a signal handler has raised an exception.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether the current thread is Python's main thread, which runs signal handlers. `None` if this thread has not
    /// yet determined whether it is the main thread.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Runs pending signal handlers. If a handler raised an exception, passes it to `keep`, which has the interpreter's lock, and
/// returns true. Call this function without the interpreter's lock.
pub(crate) fn run_signal_handlers(keep: impl FnOnce(PyErr)) -> bool {
    // Python runs signal handlers only in its main thread, so other threads need not take the interpreter's lock.
    if IS_MAIN.get() == Some(false) {
        return false;
    }
    let has_raised = Python::try_attach(|py| {
        // Both `check_signals` and `is_main_thread` can run signal handlers, so both can return an exception.
        let checked = match IS_MAIN.get() {
            Some(_) => py.check_signals(),
            None => is_main_thread(py).and_then(|is_main| {
                IS_MAIN.set(Some(is_main));
                py.check_signals()
            }),
        };
        let Err(raised) = checked else { return false };
        keep(raised);
        true
    });
    // An interpreter that has ended runs no handlers.
    has_raised.unwrap_or(false)
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main: u64 = threading.call_method0("main_thread")?.getattr("ident")?.extract()?;
    Ok(threading.call_method0("get_ident")?.extract::<u64>()? == main)
}

/// Calls `wait` until it returns a value, and runs Python's signal handlers between the calls. Passes the time that `wait` may
/// take. Returns `None` after `timeout`.
pub(crate) fn wait_in_intervals<R>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait: impl FnMut(Duration) -> PyResult<Option<R>>,
) -> PyResult<Option<R>> {
    let started = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        let result = wait(left.map_or(SIGNAL_CHECK_INTERVAL, |left| left.min(SIGNAL_CHECK_INTERVAL)))?;
        if result.is_some() {
            return Ok(result);
        }
        py.check_signals()?;
        if left == Some(Duration::ZERO) {
            return Ok(None);
        }
    }
}
