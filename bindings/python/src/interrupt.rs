//! Signal handlers: a thread that waits in Rust asks Python whether one has raised.

use pyo3::prelude::*;
use std::cell::{Cell, RefCell};

thread_local! {
    /// Whether this is the thread that runs signal handlers, once that is known.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    /// The exception that a handler raised while the thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Whether a signal handler has raised. Threads that wait call it, without the interpreter's lock.
pub(crate) fn is_interrupted() -> bool {
    // Python runs handlers only in its main thread: other threads need not take its lock.
    if IS_MAIN.get() == Some(false) {
        return false;
    }
    let answer = Python::try_attach(|py| {
        // The question may run handlers, so an exception of theirs must not be lost.
        let asked = match IS_MAIN.get() {
            Some(_) => py.check_signals(),
            None => is_main_thread(py).and_then(|is_main| {
                IS_MAIN.set(Some(is_main));
                py.check_signals()
            }),
        };
        let Err(raised) = asked else { return false };
        RAISED.set(Some(raised));
        true
    });
    // After the interpreter has ended it runs no handlers.
    answer.unwrap_or(false)
}

/// The exception that a handler raised while this thread waited.
pub(crate) fn take_raised() -> Option<PyErr> {
    RAISED.take()
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main: u64 = threading.call_method0("main_thread")?.getattr("ident")?.extract()?;
    Ok(threading.call_method0("get_ident")?.extract::<u64>()? == main)
}
