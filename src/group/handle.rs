//! Operations that go on by themselves.

use std::sync::Arc;
use std::time::Duration;

use super::driver::Outcome;
use super::{Error, Job};
use crate::engine::OpId;

/// An operation under way: it owns its buffer and goes on by itself, whatever its caller does meanwhile.
///
/// Dropping the handle lets the operation go on and forgets its result; the other ranks do not notice. A receive that has
/// found no message yet is withdrawn, as by [`Handle::cancel`].
#[must_use = "an operation's result is had by waiting for it"]
pub struct Handle<R>(State<R>);

enum State<R> {
    Ready(Result<R, Error>),
    Pending(Pending<R>),
    Taken,
}

struct Pending<R> {
    job: Arc<Job>,
    id: OpId,
    finish: Box<dyn FnOnce(Outcome) -> Result<R, Error> + Send>,
}

impl<R> Handle<R> {
    pub(super) fn ready(result: Result<R, Error>) -> Self {
        Self(State::Ready(result))
    }

    pub(super) fn pending(
        job: Arc<Job>,
        id: OpId,
        finish: impl FnOnce(Outcome) -> Result<R, Error> + Send + 'static,
    ) -> Self {
        Self(State::Pending(Pending { job, id, finish: Box::new(finish) }))
    }

    /// Whether it has ended, well or not; [`Handle::wait`] then returns at once. Does what can be done for it without
    /// waiting.
    pub fn test(&self) -> bool {
        match &self.0 {
            State::Pending(Pending { job, id, .. }) => job.driver.test(*id),
            State::Ready(_) | State::Taken => true,
        }
    }

    /// Withdraws a receive that has found no message yet, and says whether it did: it takes none any more, and waiting for
    /// it gives [`Error::Taken`]. One that has found its message goes on, as every other operation does, for other ranks
    /// count on it (`MPI_Cancel`).
    pub fn cancel(&mut self) -> bool {
        let State::Pending(Pending { job, id, .. }) = &self.0 else { return false };
        let is_cancelled = job.driver.cancel(*id);
        if is_cancelled {
            self.0 = State::Taken;
        }
        is_cancelled
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// What the operation failed with; its own deadline is one reason.
    pub fn wait(mut self) -> Result<R, Error> {
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Ready(result) => result,
            State::Pending(Pending { job, id, finish }) => match job.driver.wait(id, None) {
                Some(outcome) => outcome.and_then(finish),
                None => Err(Error::Taken),
            },
            State::Taken => Err(Error::Taken),
        }
    }

    /// Waits for its end for as long as `timeout`; gives the handle back if that was too short.
    ///
    /// # Errors
    ///
    /// The handle; the operation goes on.
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Result<R, Error>, Self> {
        if let State::Pending(Pending { job, id, .. }) = &self.0 {
            let until = job.driver.now() + timeout;
            match job.driver.wait(*id, Some(until)) {
                None => return Err(self),
                Some(outcome) => {
                    let State::Pending(pending) = std::mem::replace(&mut self.0, State::Taken) else {
                        return Ok(Err(Error::Taken));
                    };
                    return Ok(outcome.and_then(pending.finish));
                }
            }
        }
        Ok(self.wait())
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        if let State::Pending(Pending { job, id, .. }) = &self.0 {
            job.driver.forget(*id);
        }
    }
}

/// Waits for all of them; the results come in the same order.
///
/// # Errors
///
/// The first failure. All operations have ended then: a failure is the job's.
pub fn wait_all<R>(handles: impl IntoIterator<Item = Handle<R>>) -> Result<Vec<R>, Error> {
    handles.into_iter().map(Handle::wait).collect()
}

/// Waits until one of them has ended, and takes it from the list.
///
/// # Errors
///
/// What that one failed with.
///
/// # Panics
///
/// If the list is empty.
pub fn wait_any<R>(handles: &mut Vec<Handle<R>>) -> Result<R, Error> {
    assert!(!handles.is_empty(), "there is something to wait for");
    let mut job = None;
    let mut ids = Vec::with_capacity(handles.len());
    for (index, handle) in handles.iter().enumerate() {
        match &handle.0 {
            State::Pending(pending) => {
                job.get_or_insert_with(|| Arc::clone(&pending.job));
                ids.push(pending.id);
            }
            State::Ready(_) | State::Taken => return handles.remove(index).wait(),
        }
    }
    let index = job.and_then(|job| job.driver.wait_any(&ids, None)).unwrap_or(0);
    handles.remove(index).wait()
}
