//! A lock that lets only one thread at a time use a group.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use ringtrain::{Error, Group, Messenger};

use crate::calls::{self, SIGNAL_CHECK_INTERVAL};
use crate::errors;
use crate::fork::register_messenger;

const CLOSED: &str = "the group has been closed";

/// A thread, for as long as it lives. The standard library counts the references to the thread of its own identifier.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ThreadId(usize);

impl ThreadId {
    fn current() -> Self {
        thread_local! {
            static MARK: u8 = const { 0 };
        }
        MARK.with(|mark| Self(std::ptr::from_ref(mark) as usize))
    }
}

/// The state of the group: free, in use by a thread, or dropped.
enum Holder {
    /// No thread uses the group.
    Free(Box<Group>),
    /// A thread uses the group. If `is_closing` is true, this thread drops the group when it has finished using the
    /// group.
    Thread { id: ThreadId, is_closing: bool },
    /// The group has been dropped.
    Closed,
}

struct LockState {
    holder: Holder,
    /// The number of threads that wait for `returned`. To notify a condition variable is a system call.
    waiters: usize,
}

/// A group and its messenger. Only one thread at a time can use the group. Any thread can use the messenger.
pub(crate) struct GroupLock {
    state: Mutex<LockState>,
    returned: Condvar,
    messenger: Mutex<Option<Arc<Messenger>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GroupLock {
    pub(crate) fn new(group: Group) -> Self {
        let messenger = Arc::new(group.messenger());
        register_messenger(&messenger);
        Self {
            messenger: Mutex::new(Some(messenger)),
            state: Mutex::new(LockState { holder: Holder::Free(Box::new(group)), waiters: 0 }),
            returned: Condvar::new(),
        }
    }

    /// Waits until no other thread uses the group, and then calls `work` with the group. Other Python threads can run meanwhile.
    pub(crate) fn with_group<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Group) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let result = calls::run(py, || self.take_group().map(|mut guard| work(guard.group())))?;
        match result {
            Ok(result) => result.map_err(|error| errors::from_error(py, &error)),
            Err(reason) => Err(errors::base_error(py, reason)),
        }
    }

    /// Waits until no other thread uses the group, and returns the group. If the thread cannot use the group, returns the reason.
    fn take_group(&self) -> Result<GroupGuard<'_>, &'static str> {
        let own = ThreadId::current();
        let mut state = lock(&self.state);
        loop {
            match std::mem::replace(&mut state.holder, Holder::Thread { id: own, is_closing: false }) {
                Holder::Free(group) => return Ok(GroupGuard { lock: self, group: Some(group) }),
                other => state.holder = other,
            }
            match state.holder {
                Holder::Thread { is_closing: false, id } if id == own => {
                    return Err(
                        "a signal handler called a collective of a group while the interrupted thread was in \
                                another collective of that group",
                    );
                }
                Holder::Thread { is_closing: false, .. } => {}
                _ => return Err(CLOSED),
            }
            state.waiters += 1;
            let (guard, waited) = self
                .returned
                .wait_timeout(state, SIGNAL_CHECK_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.waiters -= 1;
            if waited.timed_out() {
                drop(state);
                if calls::is_interrupted() {
                    return Err("the thread was interrupted");
                }
                state = lock(&self.state);
            }
        }
    }

    /// Calls `work` with the group's messenger. Other Python threads can run during `work`.
    pub(crate) fn with_messenger<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Messenger) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        // If another thread closes the group during `work`, `messenger` is the last messenger, and dropping it closes the
        // connections. So it is dropped without the interpreter's lock.
        let messenger = self.messenger(py)?;
        let result = calls::run(py, move || work(&messenger))?;
        result.map_err(|error| errors::from_error(py, &error))
    }

    /// Returns the group's messenger. Fails if the group is closed or this process was forked.
    pub(crate) fn messenger(&self, py: Python<'_>) -> PyResult<Arc<Messenger>> {
        calls::fail_if_forked(py)?;
        lock(&self.messenger).clone().ok_or_else(|| errors::base_error(py, CLOSED))
    }

    /// Replaces the messenger by a new messenger with the current settings of the group.
    pub(crate) fn renew_messenger(&self, group: &Group) {
        let mut messenger = lock(&self.messenger);
        if messenger.is_some() {
            let renewed = Arc::new(group.messenger());
            register_messenger(&renewed);
            *messenger = Some(renewed);
        }
    }

    /// Drops the group. If a thread uses the group, that thread drops the group when it has finished.
    pub(crate) fn close(&self) {
        let messenger = lock(&self.messenger).take();
        let mut state = lock(&self.state);
        let group = match std::mem::replace(&mut state.holder, Holder::Closed) {
            Holder::Free(group) => Some(group),
            Holder::Thread { id, .. } => {
                state.holder = Holder::Thread { id, is_closing: true };
                None
            }
            Holder::Closed => None,
        };
        drop(state);
        self.returned.notify_all();
        drop((messenger, group));
    }

    /// Returns whether the group has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(lock(&self.state).holder, Holder::Closed | Holder::Thread { is_closing: true, .. })
    }

    /// Gives up the group without dropping it, so that its connections stay open. A forked process must not close the
    /// connections, because they belong to its parent.
    pub(crate) fn leak(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::replace(&mut state.holder, Holder::Closed));
        std::mem::forget(self.messenger.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A thread that holds this guard may use the group. When the guard is dropped, the guard puts the group back into
/// the lock.
struct GroupGuard<'a> {
    lock: &'a GroupLock,
    group: Option<Box<Group>>,
}

impl GroupGuard<'_> {
    fn group(&mut self) -> &mut Group {
        self.group.as_mut().expect("only `drop` takes the group")
    }
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        let mut state = lock(&self.lock.state);
        let (next, closed) = match state.holder {
            Holder::Thread { is_closing: true, .. } => (Holder::Closed, Some(group)),
            _ => (Holder::Free(group), None),
        };
        state.holder = next;
        let has_waiters = state.waiters > 0;
        drop(state);
        if has_waiters {
            self.lock.returned.notify_one();
        }
        drop(closed);
    }
}
