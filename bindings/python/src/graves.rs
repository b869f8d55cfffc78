//! Objects that are let go of where the interpreter's lock is not held: they wait here for somebody who has it.
//!
//! `PyO3` has such a list of its own, whose lock a process that forks may leave locked in its child for ever, where everything
//! needs it. Nobody needs this one there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::fork;

static GRAVES: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
/// Whether there is anything, for those who would rather not take the lock to know.
static IS_THERE: AtomicBool = AtomicBool::new(false);

/// An object that may be let go of by any thread.
pub(crate) struct Kept(Option<Py<PyAny>>);

impl Kept {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        if fork::is_forked() {
            std::mem::forget(object);
            return;
        }
        GRAVES.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        IS_THERE.store(true, Ordering::Release);
    }
}

/// Lets go of what waits.
pub(crate) fn clear(_py: Python<'_>) {
    if !IS_THERE.load(Ordering::Acquire) || fork::is_forked() {
        return;
    }
    IS_THERE.store(false, Ordering::Release);
    let objects = std::mem::take(&mut *GRAVES.lock().unwrap_or_else(PoisonError::into_inner));
    // Without the lock: what goes with them may be a program's own, and come back here.
    drop(objects);
}
