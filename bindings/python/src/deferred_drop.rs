//! References to Python objects that a thread can drop without the interpreter's lock. Dropping a [`DeferredDrop`]
//! puts its object on a list. The next call that holds the interpreter's lock drops the objects on the list.
//!
//! Every call through `PyO3` locks a similar list of `PyO3`, and in a forked child, that list may stay locked
//! forever. A forked child never locks the list of this module, and never frees the objects.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::fork;

static DROPPED: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
/// Whether `DROPPED` contains objects. While this flag is false, calls need not lock `DROPPED`.
static HAS_DROPPED: AtomicBool = AtomicBool::new(false);

/// A reference to an object that any thread may drop, with or without the interpreter's lock.
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

/// Drops the objects in `DROPPED`. The caller holds the interpreter's lock.
pub(crate) fn drop_all(_py: Python<'_>) {
    if !HAS_DROPPED.load(Ordering::Acquire) || fork::is_forked() {
        return;
    }
    HAS_DROPPED.store(false, Ordering::Release);
    let objects = std::mem::take(&mut *DROPPED.lock().unwrap_or_else(PoisonError::into_inner));
    // The list must not be locked here: dropping an object may run the program's destructor, and this destructor may
    // add other objects to the list.
    drop(objects);
}
