//! References to Python objects that a thread may drop without the interpreter's lock: a later call that holds the lock
//! drops the objects.
//!
//! `PyO3` has such a list too. A process that forks may leave its lock locked in the child, where every call needs it; the
//! child does not use this list.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::fork;

static DROPPED: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
/// Whether the list has objects, so that most calls need not lock it.
static HAS_DROPPED: AtomicBool = AtomicBool::new(false);

/// A reference to an object that any thread may drop.
pub(crate) struct DeferredDrop(Option<Py<PyAny>>);

impl DeferredDrop {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for DeferredDrop {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        if fork::is_forked() {
            std::mem::forget(object);
            return;
        }
        DROPPED.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        HAS_DROPPED.store(true, Ordering::Release);
    }
}

/// Drops the objects of the list.
pub(crate) fn run(_py: Python<'_>) {
    if !HAS_DROPPED.load(Ordering::Acquire) || fork::is_forked() {
        return;
    }
    HAS_DROPPED.store(false, Ordering::Release);
    let objects = std::mem::take(&mut *DROPPED.lock().unwrap_or_else(PoisonError::into_inner));
    // The list is not locked here: a destructor of the program may add to it.
    drop(objects);
}
