//! Operations that go on by themselves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::OperationOutput;
use super::{Error, SharedJob};
use crate::engine::OpId;

/// How long the operations of one job are waited for before those of another are looked at.
const SLICE: Duration = Duration::from_millis(1);

/// An asynchronous operation. It owns its buffer and makes progress while the caller does other work.
///
/// If you drop the handle, the operation continues and its result is discarded; the other ranks do not notice. A
/// receive that has not matched a message yet is withdrawn, as by [`Handle::cancel`].
#[must_use = "an operation's result is had by waiting for it"]
pub struct Handle<R>(HandleState<R>);

enum HandleState<R> {
    Ready(Result<R, Error>),
    Pending(Pending<R>),
    Taken,
}

/// Operations of one job that together have one result.
struct Pending<R> {
    job: Arc<SharedJob>,
    ids: Vec<OpId>,
    finish: FinishMany<R>,
}

/// Makes the result of what the operations, in their order, have come to.
type FinishMany<R> = Box<dyn FnOnce(&mut dyn Iterator<Item = OperationOutput>) -> Result<R, Error> + Send>;

impl<R> Handle<R> {
    pub(super) fn ready(result: Result<R, Error>) -> Self {
        Self(HandleState::Ready(result))
    }

    pub(super) fn pending(
        job: Arc<SharedJob>,
        id: OpId,
        finish: impl FnOnce(OperationOutput) -> Result<R, Error> + Send + 'static,
    ) -> Self {
        let finish: FinishMany<R> = Box::new(|outcomes| finish(outcomes.next().ok_or(Error::Taken)?));
        Self(HandleState::Pending(Pending { job, ids: vec![id], finish }))
    }

    /// The operations of several handles of one job as one, which has ended when all have.
    pub(super) fn joined<S: Send + 'static>(
        handles: Vec<Handle<S>>,
        finish: impl FnOnce(Vec<S>) -> Result<R, Error> + Send + 'static,
    ) -> Self {
        let mut parts: Vec<FinishMany<S>> = Vec::with_capacity(handles.len());
        let (mut job, mut ids) = (None, Vec::with_capacity(handles.len()));
        for mut handle in handles {
            match std::mem::replace(&mut handle.0, HandleState::Taken) {
                HandleState::Pending(pending) => {
                    ids.extend(pending.ids);
                    parts.push(pending.finish);
                    job = Some(pending.job);
                }
                HandleState::Ready(result) => parts.push(Box::new(|_| result)),
                HandleState::Taken => parts.push(Box::new(|_| Err(Error::Taken))),
            }
        }
        let finish = |outcomes: &mut dyn Iterator<Item = OperationOutput>| {
            let results: Result<Vec<S>, Error> = parts.into_iter().map(|part| part(outcomes)).collect();
            finish(results?)
        };
        match job {
            Some(job) => Self(HandleState::Pending(Pending { job, ids, finish: Box::new(finish) })),
            None => Self::ready(finish(&mut std::iter::empty())),
        }
    }

    /// Applies `then` to the result when the operation is waited for. If `then` fails, waiting returns its error.
    pub fn and_then<S>(mut self, then: impl FnOnce(R) -> Result<S, Error> + Send + 'static) -> Handle<S>
    where
        R: 'static,
    {
        Handle(match std::mem::replace(&mut self.0, HandleState::Taken) {
            HandleState::Ready(result) => HandleState::Ready(result.and_then(then)),
            HandleState::Pending(Pending { job, ids, finish }) => {
                let finish: FinishMany<S> = Box::new(|outcomes| finish(outcomes).and_then(then));
                HandleState::Pending(Pending { job, ids, finish })
            }
            HandleState::Taken => HandleState::Taken,
        })
    }

    /// Whether the operation has ended, with success or failure; [`Handle::wait`] then returns at once. The call also
    /// makes the progress that needs no waiting.
    pub fn test(&self) -> bool {
        match &self.0 {
            HandleState::Pending(Pending { job, ids, .. }) => ids.iter().all(|&id| job.driver.test(id)),
            HandleState::Ready(_) | HandleState::Taken => true,
        }
    }

    /// Withdraws a receive that has not matched a message yet, and returns whether it did. Waiting for a withdrawn
    /// receive returns [`Error::Taken`]. A receive that has matched a message continues, and so does every other
    /// operation, because other ranks depend on it (`MPI_Cancel`).
    pub fn cancel(&mut self) -> bool {
        let HandleState::Pending(Pending { job, ids, .. }) = &self.0 else { return false };
        // What consists of several operations has begun as soon as one of them has.
        let &[id] = &ids[..] else { return false };
        let is_cancelled = job.driver.cancel(id);
        if is_cancelled {
            self.0 = HandleState::Taken;
        }
        is_cancelled
    }

    /// Waits until the operation has ended.
    ///
    /// # Errors
    ///
    /// The operation's error; its own deadline is one reason.
    pub fn wait(mut self) -> Result<R, Error> {
        match std::mem::replace(&mut self.0, HandleState::Taken) {
            HandleState::Ready(result) => result,
            HandleState::Pending(Pending { job, ids, finish }) => {
                let outcomes = ids.iter().map(|&id| job.driver.wait(id, None).unwrap_or(Err(Error::Taken)));
                // All of them are taken, whatever became of the first.
                let outcomes: Vec<Result<OperationOutput, Error>> = outcomes.collect();
                let outcomes: Vec<OperationOutput> = outcomes.into_iter().collect::<Result<_, _>>()?;
                finish(&mut outcomes.into_iter())
            }
            HandleState::Taken => Err(Error::Taken),
        }
    }

    /// Waits at most `timeout` for the operation to end.
    ///
    /// # Errors
    ///
    /// Returns the handle if the operation has not ended; it continues.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<R, Error>, Self> {
        if self.has_ended(timeout) { Ok(self.wait()) } else { Err(self) }
    }

    /// Waits for its end for as long as `timeout`, and leaves the result where it is.
    fn has_ended(&self, timeout: Duration) -> bool {
        match &self.0 {
            HandleState::Pending(Pending { job, ids, .. }) => {
                let until = job.driver.now().saturating_add(timeout);
                job.driver.wait_any(&[ids], Some(until)).is_some()
            }
            HandleState::Ready(_) | HandleState::Taken => true,
        }
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        if let HandleState::Pending(Pending { job, ids, .. }) = &self.0 {
            for &id in ids {
                job.driver.discard_result(id);
            }
        }
    }
}

/// Waits for all operations; the results are in the order of the handles.
///
/// # Errors
///
/// The first failure. All operations have ended then, because a failure ends the job.
pub fn wait_all<R>(handles: impl IntoIterator<Item = Handle<R>>) -> Result<Vec<R>, Error> {
    handles.into_iter().map(Handle::wait).collect()
}

/// [`wait_all`] with a limit of `timeout`.
///
/// # Errors
///
/// Returns all handles in their order, ended ones too, if the time is too short; the operations continue.
pub fn wait_all_timeout<R>(
    handles: Vec<Handle<R>>,
    timeout: Duration,
) -> Result<Result<Vec<R>, Error>, Vec<Handle<R>>> {
    let started = Instant::now();
    let have_ended = |handle: &Handle<R>| handle.has_ended(timeout.saturating_sub(started.elapsed()));
    if handles.iter().all(have_ended) { Ok(wait_all(handles)) } else { Err(handles) }
}

/// Waits until one operation has ended, removes its handle from the list, and returns its index and result; `None` if
/// the list is empty. The other handles keep their order: those behind it move up by one.
///
/// The handles may be of different jobs.
///
/// # Errors
///
/// The error of that operation.
pub fn wait_any<R>(handles: &mut Vec<Handle<R>>) -> Result<Option<(usize, R)>, Error> {
    take(handles, None)
}

/// [`wait_any`] with a limit of `timeout`. If the time is too short it returns `None` and leaves the list unchanged.
///
/// # Errors
///
/// As [`wait_any`].
pub fn wait_any_timeout<R>(
    handles: &mut Vec<Handle<R>>,
    timeout: Duration,
) -> Result<Option<(usize, R)>, Error> {
    take(handles, Some(timeout))
}

/// Waits until one of the operations has ended, for at most `timeout`. Returns the index of its handle, and `None` after
/// `timeout` or if there are no handles. The list does not change.
///
/// The handles may be of different jobs.
pub fn wait_until_any_ended<R>(handles: &[Handle<R>], timeout: Duration) -> Option<usize> {
    first_ended(handles, Some(timeout))
}

/// [`wait_any`] without waiting: if no operation has ended it returns `None` and leaves the list unchanged.
///
/// # Errors
///
/// As [`wait_any`].
pub fn test_any<R>(handles: &mut Vec<Handle<R>>) -> Result<Option<(usize, R)>, Error> {
    match handles.iter().position(Handle::test) {
        Some(index) => handles.remove(index).wait().map(|result| Some((index, result))),
        None => Ok(None),
    }
}

/// Whether all operations have ended, with success or failure; [`wait_all`] then returns at once.
pub fn test_all<R>(handles: &[Handle<R>]) -> bool {
    handles.iter().all(Handle::test)
}

fn take<R>(handles: &mut Vec<Handle<R>>, timeout: Option<Duration>) -> Result<Option<(usize, R)>, Error> {
    match first_ended(handles, timeout) {
        Some(index) => handles.remove(index).wait().map(|result| Some((index, result))),
        None => Ok(None),
    }
}

/// What is waited for of one job: where the handles stand, and the operations of each.
struct OfJob<'a> {
    job: &'a Arc<SharedJob>,
    indices: Vec<usize>,
    lists: Vec<&'a [OpId]>,
}

/// The first that has ended, waited for as long as `timeout`.
fn first_ended<R>(handles: &[Handle<R>], timeout: Option<Duration>) -> Option<usize> {
    let mut jobs: Vec<OfJob<'_>> = Vec::new();
    for (index, handle) in handles.iter().enumerate() {
        let HandleState::Pending(Pending { job, ids, .. }) = &handle.0 else { return Some(index) };
        match jobs.iter_mut().find(|known| Arc::ptr_eq(known.job, job)) {
            Some(known) => {
                known.indices.push(index);
                known.lists.push(ids);
            }
            None => jobs.push(OfJob { job, indices: vec![index], lists: vec![ids] }),
        }
    }
    let started = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        for OfJob { job, indices, lists } in &jobs {
            // Of several jobs none may keep the others waiting.
            let patience =
                if jobs.len() == 1 { left } else { Some(left.map_or(SLICE, |left| left.min(SLICE))) };
            let until = patience.map(|patience| job.driver.now().saturating_add(patience));
            if let Some(place) = job.driver.wait_any(lists, until) {
                return indices.get(place).copied();
            }
        }
        if jobs.is_empty() || left == Some(Duration::ZERO) {
            return None;
        }
    }
}
