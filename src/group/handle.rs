//! Handles of asynchronous operations.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Error;
use super::state::SharedJob;
use crate::engine::OpId;
use crate::runtime::driver::OperationOutput;

/// If handles belong to several jobs, a thread waits for each job in turn for this time.
const JOB_WAIT: Duration = Duration::from_millis(1);

/// An asynchronous operation. It owns its buffer and makes progress while the caller does other work.
///
/// If you drop the handle, the operation continues and its result is discarded. The other ranks do not notice. A receive
/// that has not matched a message is cancelled, as by [`Handle::cancel`].
#[must_use = "wait for the operation to get its result"]
pub struct Handle<R>(HandleState<R>);

enum HandleState<R> {
    /// The result; [`Error::Taken`] after it was taken or the operation was cancelled.
    Ready(Result<R, Error>),
    Pending(Arc<SharedJob>, OpId, MakeResult<R>),
}

/// Like a [`Handle`], but does not keep the job alive. `None` after [`WeakHandle::upgrade`], and if the result was ready.
pub(super) struct WeakHandle<R>(Option<(Weak<SharedJob>, OpId, MakeResult<R>)>);

type MakeResult<R> = Box<dyn FnOnce(OperationOutput) -> Result<R, Error> + Send>;

impl<R> Handle<R> {
    pub(super) fn ready(result: Result<R, Error>) -> Self {
        Self(HandleState::Ready(result))
    }

    pub(super) fn pending(
        job: Arc<SharedJob>,
        id: OpId,
        make_result: impl FnOnce(OperationOutput) -> Result<R, Error> + Send + 'static,
    ) -> Self {
        Self(HandleState::Pending(job, id, Box::new(make_result)))
    }

    fn take(&mut self) -> HandleState<R> {
        std::mem::replace(&mut self.0, HandleState::Ready(Err(Error::Taken)))
    }

    pub(super) fn downgrade(mut self) -> WeakHandle<R> {
        WeakHandle(match self.take() {
            HandleState::Pending(job, id, make_result) => Some((Arc::downgrade(&job), id, make_result)),
            HandleState::Ready(_) => None,
        })
    }

    /// Applies `then` to the result when the operation is waited for. If `then` fails, waiting returns its error.
    pub fn and_then<S>(mut self, then: impl FnOnce(R) -> Result<S, Error> + Send + 'static) -> Handle<S>
    where
        R: 'static,
    {
        match self.take() {
            HandleState::Ready(result) => Handle::ready(result.and_then(then)),
            HandleState::Pending(job, id, make_result) => {
                Handle::pending(job, id, |output| make_result(output).and_then(then))
            }
        }
    }

    /// Returns whether the operation has ended, with success or failure. If this method returns true, [`Handle::wait`]
    /// returns at once. The call also does all work of the job that needs no waiting.
    pub fn test(&self) -> bool {
        match &self.0 {
            HandleState::Pending(job, id, _) => job.driver.test(*id),
            HandleState::Ready(_) => true,
        }
    }

    /// Cancels a receive that has not matched a message, and returns true (`MPI_Cancel`). Waiting for a cancelled receive returns
    /// [`Error::Taken`]. Every other operation continues, because other ranks depend on it, and this method returns false.
    pub fn cancel(&mut self) -> bool {
        let HandleState::Pending(job, id, _) = &self.0 else { return false };
        let is_cancelled = job.driver.core().cancel(*id, job.driver.now());
        if is_cancelled {
            self.take();
        }
        is_cancelled
    }

    /// Waits until the operation has ended.
    ///
    /// # Errors
    ///
    /// The operation's error, for example if it missed its deadline.
    pub fn wait(mut self) -> Result<R, Error> {
        match self.take() {
            HandleState::Ready(result) => result,
            HandleState::Pending(job, id, make_result) => {
                make_result(job.driver.wait(id).unwrap_or(Err(Error::Taken))?)
            }
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
        Some(Handle(HandleState::Pending(job, id, make_result)))
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
        if let HandleState::Pending(job, id, _) = &self.0 {
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
    // For each job: the indices of its handles, and their operations.
    let mut jobs: Vec<(&Arc<SharedJob>, Vec<usize>, Vec<OpId>)> = Vec::new();
    for (index, handle) in handles.iter().enumerate() {
        let HandleState::Pending(job, id, _) = &handle.0 else { return Some(index) };
        match jobs.iter_mut().find(|(known, ..)| Arc::ptr_eq(known, job)) {
            Some((_, indices, operations)) => {
                indices.push(index);
                operations.push(*id);
            }
            None => jobs.push((job, vec![index], vec![*id])),
        }
    }
    let started = Instant::now();
    loop {
        let remaining = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        for (job, indices, operations) in &jobs {
            // With several jobs, wait only a short time for each job in turn.
            let job_timeout =
                if jobs.len() == 1 { remaining } else { Some(remaining.unwrap_or(JOB_WAIT).min(JOB_WAIT)) };
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
