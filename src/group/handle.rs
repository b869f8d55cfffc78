//! Handles of asynchronous operations.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Error;
use super::state::SharedJob;
use crate::engine::OpId;
use crate::runtime::driver::OperationOutput;

/// If handles belong to several jobs, a thread waits for the operations of one job for this time before it waits for those of
/// the next job.
const JOB_WAIT: Duration = Duration::from_millis(1);

/// An asynchronous operation. It owns its buffer and makes progress while the caller does other work.
///
/// If you drop the handle, the operation continues and its result is discarded. The other ranks do not notice. A receive
/// that has not matched a message is cancelled, as by [`Handle::cancel`].
#[must_use = "wait for the operation to get its result"]
pub struct Handle<R>(HandleState<R>);

enum HandleState<R> {
    /// The operation had ended when the handle was created.
    Ready(Result<R, Error>),
    Pending(Pending<R>),
    /// The result has been taken, or the operation was cancelled.
    Taken,
}

/// An asynchronous operation like that of a [`Handle`]. It does not keep the job alive. `None` after [`WeakHandle::upgrade`], and
/// if the result was ready.
pub(super) struct WeakHandle<R>(Option<(Weak<SharedJob>, OpId, MakeResult<R>)>);

/// An active operation of a job, and the function that makes the result from its output.
struct Pending<R> {
    job: Arc<SharedJob>,
    id: OpId,
    make_result: MakeResult<R>,
}

type MakeResult<R> = Box<dyn FnOnce(OperationOutput) -> Result<R, Error> + Send>;

impl<R> Handle<R> {
    /// Returns a handle whose operation has already ended.
    pub(super) fn ready(result: Result<R, Error>) -> Self {
        Self(HandleState::Ready(result))
    }

    /// Returns the handle of an active operation. `make_result` makes the result from the operation's output.
    pub(super) fn pending(
        job: Arc<SharedJob>,
        id: OpId,
        make_result: impl FnOnce(OperationOutput) -> Result<R, Error> + Send + 'static,
    ) -> Self {
        Self(HandleState::Pending(Pending { job, id, make_result: Box::new(make_result) }))
    }

    /// Returns a handle that does not keep the job alive.
    pub(super) fn downgrade(mut self) -> WeakHandle<R> {
        WeakHandle(match std::mem::replace(&mut self.0, HandleState::Taken) {
            HandleState::Pending(Pending { job, id, make_result }) => {
                Some((Arc::downgrade(&job), id, make_result))
            }
            HandleState::Ready(_) | HandleState::Taken => None,
        })
    }

    /// Applies `then` to the result when the operation is waited for. If `then` fails, waiting returns its error.
    pub fn and_then<S>(mut self, then: impl FnOnce(R) -> Result<S, Error> + Send + 'static) -> Handle<S>
    where
        R: 'static,
    {
        Handle(match std::mem::replace(&mut self.0, HandleState::Taken) {
            HandleState::Ready(result) => HandleState::Ready(result.and_then(then)),
            HandleState::Pending(Pending { job, id, make_result }) => {
                let make_result = Box::new(|output| make_result(output).and_then(then));
                HandleState::Pending(Pending { job, id, make_result })
            }
            HandleState::Taken => HandleState::Taken,
        })
    }

    /// Returns whether the operation has ended, with success or failure. If this method returns true, [`Handle::wait`]
    /// returns at once. The call also does all work of the job that needs no waiting.
    pub fn test(&self) -> bool {
        match &self.0 {
            HandleState::Pending(Pending { job, id, .. }) => job.driver.test(*id),
            HandleState::Ready(_) | HandleState::Taken => true,
        }
    }

    /// Cancels a receive that has not matched a message, and returns true (`MPI_Cancel`). Waiting for a cancelled receive
    /// returns [`Error::Taken`]. For every other operation, returns false, and the operation continues, because other
    /// ranks depend on it.
    pub fn cancel(&mut self) -> bool {
        let HandleState::Pending(Pending { job, id, .. }) = &self.0 else { return false };
        let is_cancelled = job.driver.core().cancel(*id, job.driver.now());
        if is_cancelled {
            self.0 = HandleState::Taken;
        }
        is_cancelled
    }

    /// Waits until the operation has ended.
    ///
    /// # Errors
    ///
    /// The operation's error, for example if it missed its deadline.
    pub fn wait(mut self) -> Result<R, Error> {
        match std::mem::replace(&mut self.0, HandleState::Taken) {
            HandleState::Ready(result) => result,
            HandleState::Pending(Pending { job, id, make_result }) => {
                make_result(job.driver.wait(id, None).unwrap_or(Err(Error::Taken))?)
            }
            HandleState::Taken => Err(Error::Taken),
        }
    }

    /// Waits at most `timeout` for the operation to end.
    ///
    /// # Errors
    ///
    /// Returns the handle if the operation has not ended. The operation continues.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<R, Error>, Self> {
        let has_ended = wait_any(std::slice::from_ref(&self), Some(timeout)).is_some();
        if has_ended { Ok(self.wait()) } else { Err(self) }
    }
}

impl<R> WeakHandle<R> {
    /// Returns the handle; `None` if the job has been dropped.
    pub(super) fn upgrade(mut self) -> Option<Handle<R>> {
        let (job, id, make_result) = self.0.take()?;
        let job = job.upgrade()?;
        Some(Handle(HandleState::Pending(Pending { job, id, make_result })))
    }
}

impl<R> Drop for WeakHandle<R> {
    fn drop(&mut self) {
        if let Some((job, id, _)) = &self.0
            && let Some(job) = job.upgrade()
        {
            job.driver.core().discard_result(*id, job.driver.now());
        }
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        if let HandleState::Pending(Pending { job, id, .. }) = &self.0 {
            job.driver.core().discard_result(*id, job.driver.now());
        }
    }
}

/// Waits for all operations; the results are in the order of the handles.
///
/// # Errors
///
/// The first failure. When this function returns, all operations have ended, because a failure ends the job.
pub fn wait_all<R>(handles: impl IntoIterator<Item = Handle<R>>) -> Result<Vec<R>, Error> {
    handles.into_iter().map(Handle::wait).collect()
}

/// The handles of one job: their indices in the list, and their operations.
struct JobHandles<'a> {
    job: &'a Arc<SharedJob>,
    indices: Vec<usize>,
    operations: Vec<OpId>,
}

/// Waits until one of the operations has ended, at most for `timeout`. Returns the index of the operation's handle. Returns
/// `None` after `timeout`, or if there are no handles. The list does not change.
///
/// The handles may belong to different jobs.
///
/// ```
/// use std::time::Duration;
///
/// use ringtrain::{Group, Rank, wait_any};
///
/// let group = Group::solo();
/// let mut handles = vec![];
/// for tag in 0..3 {
///     handles.push(group.receive_async::<u8>(1, Rank::ZERO, tag)?);
/// }
/// assert_eq!(wait_any(&handles, Some(Duration::ZERO)), None);
/// group.send(&[7u8], Rank::ZERO, 2)?;
/// let index = wait_any(&handles, None).expect("one message has been sent");
/// assert_eq!(handles.remove(index).wait()?.elements, [7]);
/// # Ok::<(), ringtrain::Error>(())
/// ```
pub fn wait_any<R>(handles: &[Handle<R>], timeout: Option<Duration>) -> Option<usize> {
    let mut jobs: Vec<JobHandles<'_>> = Vec::new();
    for (index, handle) in handles.iter().enumerate() {
        let HandleState::Pending(Pending { job, id, .. }) = &handle.0 else { return Some(index) };
        match jobs.iter_mut().find(|known| Arc::ptr_eq(known.job, job)) {
            Some(known) => {
                known.indices.push(index);
                known.operations.push(*id);
            }
            None => jobs.push(JobHandles { job, indices: vec![index], operations: vec![*id] }),
        }
    }
    let started = Instant::now();
    loop {
        let remaining = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        for JobHandles { job, indices, operations } in &jobs {
            // With several jobs, wait only a short time for each job in turn.
            let job_timeout = if jobs.len() == 1 {
                remaining
            } else {
                Some(remaining.map_or(JOB_WAIT, |remaining| remaining.min(JOB_WAIT)))
            };
            let until = job_timeout.map(|timeout| job.driver.now().saturating_add(timeout));
            if let Some(position) = job.driver.wait_any(operations, until) {
                return indices.get(position).copied();
            }
        }
        if jobs.is_empty() || remaining == Some(Duration::ZERO) {
            return None;
        }
    }
}
