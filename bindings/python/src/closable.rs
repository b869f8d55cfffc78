//! Objects of the library that have connections and threads of their own. Python can close such an object while other
//! Python threads call its methods.

use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};

use pyo3::prelude::*;
use ringtrain::Messenger;

use crate::{calls, errors, fork};

/// An object, and the messengers of its connections. If Python closes the object during calls, the last call to return
/// drops the object.
type OpenObject<T> = (Arc<RwLock<T>>, Vec<Arc<Messenger>>);

/// An object that can be closed.
pub(crate) struct Closable<T: Send + Sync> {
    /// `None` after `close`.
    open: Mutex<Option<OpenObject<T>>>,
    /// The name in errors for this kind of object, for example "gossip".
    name: &'static str,
}

impl<T: Send + Sync> Closable<T> {
    /// `messengers` are the messengers of the object's connections.
    pub(crate) fn new(name: &'static str, object: T, messengers: Vec<Messenger>) -> Self {
        let messengers: Vec<_> = messengers.into_iter().map(fork::register_messenger).collect();
        Self { open: Mutex::new(Some((Arc::new(RwLock::new(object)), messengers))), name }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Returns the object. Fails after `close`, and in a forked process.
    fn object(&self, py: Python<'_>) -> PyResult<Arc<RwLock<T>>> {
        calls::fail_if_forked(py)?;
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = || errors::base_error(py, format!("the {} has been closed", self.name));
        open.as_ref().map(|(object, _)| Arc::clone(object)).ok_or_else(closed)
    }

    /// Calls `work` with the object. Other Python threads can run during `work`, but no other call can use the object. Fails
    /// if another call uses the object.
    pub(crate) fn run_alone<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut T) -> R + Send,
    ) -> PyResult<R> {
        let object = self.object(py)?;
        let result = calls::detach(py, move || {
            let result = match object.try_write() {
                Ok(mut object) => Some(work(&mut object)),
                Err(TryLockError::Poisoned(poisoned)) => Some(work(&mut poisoned.into_inner())),
                Err(TryLockError::WouldBlock) => None,
            };
            // If another thread closed the object during `work`, this drop ends the connections.
            drop(object);
            result
        })?;
        result.ok_or_else(|| self.busy_error(py))
    }

    /// Calls `work` with the object. Other Python threads can run during `work`, and other calls of this method can use the
    /// object. Fails during a call of [`run_alone`](Self::run_alone).
    pub(crate) fn run_shared<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&T) -> R + Send,
    ) -> PyResult<R> {
        let object = self.object(py)?;
        let result = calls::detach(py, move || {
            let result = match object.try_read() {
                Ok(object) => Some(work(&object)),
                Err(TryLockError::Poisoned(poisoned)) => Some(work(&poisoned.into_inner())),
                Err(TryLockError::WouldBlock) => None,
            };
            drop(object);
            result
        })?;
        result.ok_or_else(|| self.busy_error(py))
    }

    fn busy_error(&self, py: Python<'_>) -> PyErr {
        let name = self.name;
        errors::base_error(
            py,
            format!("a signal handler called the {name} during another call of the same {name}"),
        )
    }

    /// Ends all connections with an error that contains `message`. Works even while another thread is in a call.
    pub(crate) fn abort(&self, py: Python<'_>, message: &str) -> PyResult<()> {
        calls::fail_if_forked(py)?;
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let messengers = open.as_ref().map(|(_, messengers)| messengers.clone()).unwrap_or_default();
        drop(open);
        py.detach(move || messengers.iter().for_each(|messenger| drop(messenger.abort(message))));
        Ok(())
    }

    /// Ends the connections and drops the object. If another thread is in a call, the object is dropped at the end of that
    /// call.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        calls::fail_if_forked(py)?;
        let open = self.take_open_object();
        calls::detach(py, move || drop(open))
    }

    fn take_open_object(&self) -> Option<OpenObject<T>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T: Send + Sync> Drop for Closable<T> {
    fn drop(&mut self) {
        let open = self.take_open_object();
        if calls::is_forked() {
            std::mem::forget(open);
        } else if open.is_some() {
            // The drop waits for other ranks and for threads, so let other Python threads run.
            Python::try_attach(|py| py.detach(move || drop(open)));
        }
    }
}
