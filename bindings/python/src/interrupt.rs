//! Lets a thread that waits in Rust notice that a Python signal handler has raised an exception.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use pyo3::prelude::*;

/// The time between two checks whether a signal handler has raised an exception.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether the current thread is Python's main thread, which runs signal handlers. `None` if this thread has not
    /// yet determined whether it is the main thread.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    /// The exception that a signal handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs pending signal handlers. Returns whether a handler raised an exception, which [`take_raised_exception`] returns later.
/// A waiting thread calls this function without the interpreter's lock.
pub(crate) fn is_interrupted() -> bool {
    // Python runs signal handlers only in its main thread, so other threads need not take the interpreter's lock.
    if IS_MAIN.get() == Some(false) {
        return false;
    }
    let is_interrupted = Python::try_attach(|py| {
        // Both `check_signals` and `is_main_thread` can run signal handlers, so this function must store an exception
        // from either call.
        let checked = match IS_MAIN.get() {
            Some(_) => py.check_signals(),
            None => is_main_thread(py).and_then(|is_main| {
                IS_MAIN.set(Some(is_main));
                py.check_signals()
            }),
        };
        let Err(raised) = checked else { return false };
        RAISED.set(Some(raised));
        true
    });
    // An interpreter that has ended runs no handlers.
    is_interrupted.unwrap_or(false)
}

/// Takes the exception that a signal handler raised while this thread waited.
pub(crate) fn take_raised_exception() -> Option<PyErr> {
    RAISED.take()
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main: u64 = threading.call_method0("main_thread")?.getattr("ident")?.extract()?;
    Ok(threading.call_method0("get_ident")?.extract::<u64>()? == main)
}
