//! What Python has to be asked while a thread waits: whether a signal's handler raised.

use pyo3::prelude::*;
use std::cell::{Cell, RefCell};

thread_local! {
    /// Whether this is the thread that runs signal handlers, once that is known.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    /// What a handler raised while the thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Whether a signal's handler has raised. Called by threads that wait, without the interpreter's lock.
pub(crate) fn is_interrupted() -> bool {
    // Python runs handlers in its main thread alone: all others need not take its lock.
    if IS_MAIN.get() == Some(false) {
        return false;
    }
    let answer = Python::try_attach(|py| {
        // Asking may itself run handlers: what they raise is not to be lost.
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
    // An interpreter that ends runs no handlers any more.
    answer.unwrap_or(false)
}

/// What a handler raised while this thread waited.
pub(crate) fn take_raised() -> Option<PyErr> {
    RAISED.take()
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main: u64 = threading.call_method0("main_thread")?.getattr("ident")?.extract()?;
    Ok(threading.call_method0("get_ident")?.extract::<u64>()? == main)
}
