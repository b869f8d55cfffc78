//! Operations that go on by themselves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::OperationOutput;
use super::{Error, SharedJob};
use crate::engine::OpId;

/// How long the operations of one job are waited for before those of another are looked at.
const SLICE: Duration = Duration::from_millis(1);

/// An operation under way: it owns its buffer and goes on by itself, whatever its caller does meanwhile.
///
/// Dropping the handle lets the operation go on and forgets its result; the other ranks do not notice. A receive that has
/// found no message yet is withdrawn, as by [`Handle::cancel`].
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

    /// The same operation with something made of its result, by whoever waits for it; what `then` fails with, waiting does.
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

    /// Whether it has ended, well or not; [`Handle::wait`] then returns at once. Does what can be done for it without
    /// waiting.
    pub fn test(&self) -> bool {
        match &self.0 {
            HandleState::Pending(Pending { job, ids, .. }) => ids.iter().all(|&id| job.driver.test(id)),
            HandleState::Ready(_) | HandleState::Taken => true,
        }
    }

    /// Withdraws a receive that has found no message yet, and says whether it did: it takes none any more, and waiting for
    /// it gives [`Error::Taken`]. One that has found its message goes on, as every other operation does, for other ranks
    /// count on it (`MPI_Cancel`).
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

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// What the operation failed with; its own deadline is one reason.
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

    /// Waits for its end for as long as `timeout`; gives the handle back if that was too short.
    ///
    /// # Errors
    ///
    /// The handle; the operation goes on.
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
                job.driver.forget(id);
            }
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

/// [`wait_all`] for as long as `timeout`; gives all handles back if that was too short.
///
/// # Errors
///
/// The handles, in their order, those included that have ended; the operations go on.
pub fn wait_all_timeout<R>(
    handles: Vec<Handle<R>>,
    timeout: Duration,
) -> Result<Result<Vec<R>, Error>, Vec<Handle<R>>> {
    let started = Instant::now();
    let have_ended = |handle: &Handle<R>| handle.has_ended(timeout.saturating_sub(started.elapsed()));
    if handles.iter().all(have_ended) { Ok(wait_all(handles)) } else { Err(handles) }
}

/// Waits until one of them has ended, takes it from the list, and gives its result and where in the list it stood; `None`
/// if the list is empty. The others keep their order: those behind it move up by one place.
///
/// The handles may be of different jobs.
///
/// # Errors
///
/// What that one failed with.
pub fn wait_any<R>(handles: &mut Vec<Handle<R>>) -> Result<Option<(usize, R)>, Error> {
    take(handles, None)
}

/// [`wait_any`] for as long as `timeout`; `None` if that was too short as well, and the list is as it was.
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

/// [`wait_any`] without waiting: `None` if none has ended, and the list is as it was.
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

/// Whether all of them have ended, well or not; [`wait_all`] then returns at once.
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
