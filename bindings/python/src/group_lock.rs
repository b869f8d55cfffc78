//! A lock that lets only one thread at a time use a group.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ringtrain::{Group, Messenger};

use crate::fork;
use crate::interrupt::{self, SIGNAL_CHECK_INTERVAL};

/// The reason why a thread cannot use the group.
pub(crate) enum LockError {
    /// The group has been closed.
    Closed,
    /// While the thread waited for the group, a signal handler raised an exception.
    Interrupted,
    /// A signal handler called a collective of the group while its thread was already in a collective of the same
    /// group.
    Nested,
}

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

/// A group and its messenger. Only one thread at a time can use the group. Any thread can use the messenger.
pub(crate) struct GroupLock {
    holder: Mutex<Holder>,
    returned: Condvar,
    /// The number of threads that wait for `returned`. To notify a condition variable is a system call.
    waiters: AtomicUsize,
    messenger: Mutex<Option<Arc<Messenger>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GroupLock {
    pub(crate) fn new(group: Group) -> Self {
        let messenger = Arc::new(group.messenger());
        fork::register_messenger(&messenger);
        Self {
            messenger: Mutex::new(Some(messenger)),
            holder: Mutex::new(Holder::Free(Box::new(group))),
            returned: Condvar::new(),
            waiters: AtomicUsize::new(0),
        }
    }

    /// Waits until no other thread uses the group, and then calls `work` with the group. The caller must not hold the
    /// interpreter's lock.
    pub(crate) fn with_group<R>(&self, work: impl FnOnce(&mut Group) -> R) -> Result<R, LockError> {
        let own = ThreadId::current();
        let mut holder = lock(&self.holder);
        let group = loop {
            match std::mem::replace(&mut *holder, Holder::Thread { id: own, is_closing: false }) {
                Holder::Free(group) => break group,
                Holder::Closed => {
                    *holder = Holder::Closed;
                    return Err(LockError::Closed);
                }
                Holder::Thread { id, is_closing } => {
                    *holder = Holder::Thread { id, is_closing };
                    if is_closing {
                        return Err(LockError::Closed);
                    }
                    if id == own {
                        return Err(LockError::Nested);
                    }
                }
            }
            // Only threads that have locked `holder` change or read this number.
            self.waiters.fetch_add(1, Ordering::Relaxed);
            let (guard, waited) = self
                .returned
                .wait_timeout(holder, SIGNAL_CHECK_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            self.waiters.fetch_sub(1, Ordering::Relaxed);
            holder = guard;
            if waited.timed_out() {
                drop(holder);
                if interrupt::is_interrupted() {
                    return Err(LockError::Interrupted);
                }
                holder = lock(&self.holder);
            }
        };
        drop(holder);
        let mut guard = GroupGuard { lock: self, group: Some(group) };
        Ok(guard.group.as_mut().map(|group| work(group)).expect("the guard has just been made with a group"))
    }

    /// Returns the group's messenger, or `None` if the group is closed.
    pub(crate) fn messenger(&self) -> Option<Arc<Messenger>> {
        lock(&self.messenger).clone()
    }

    /// Replaces the messenger by a new messenger with the current settings of the group.
    pub(crate) fn renew_messenger(&self, group: &Group) {
        let mut messenger = lock(&self.messenger);
        if messenger.is_some() {
            let renewed = Arc::new(group.messenger());
            fork::register_messenger(&renewed);
            *messenger = Some(renewed);
        }
    }

    /// Drops the group. If a thread uses the group, that thread drops the group when it has finished.
    pub(crate) fn close(&self) {
        let messenger = lock(&self.messenger).take();
        let mut holder = lock(&self.holder);
        let group = match std::mem::replace(&mut *holder, Holder::Closed) {
            Holder::Free(group) => Some(group),
            Holder::Thread { id, .. } => {
                *holder = Holder::Thread { id, is_closing: true };
                None
            }
            Holder::Closed => None,
        };
        drop(holder);
        self.returned.notify_all();
        drop((messenger, group));
    }

    /// Returns whether the group has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(*lock(&self.holder), Holder::Closed | Holder::Thread { is_closing: true, .. })
    }

    /// Gives up the group without dropping it, so that its connections stay open. A forked process must not close the
    /// connections, because they belong to its parent.
    pub(crate) fn leak(&mut self) {
        let holder = self.holder.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::replace(holder, Holder::Closed));
        std::mem::forget(self.messenger.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A thread that holds this guard may use the group. When the guard is dropped, the guard puts the group back into
/// the lock.
struct GroupGuard<'a> {
    lock: &'a GroupLock,
    group: Option<Box<Group>>,
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        let mut holder = lock(&self.lock.holder);
        let (next, closed) = match *holder {
            Holder::Thread { is_closing: true, .. } => (Holder::Closed, Some(group)),
            _ => (Holder::Free(group), None),
        };
        *holder = next;
        let has_waiters = self.lock.waiters.load(Ordering::Relaxed) > 0;
        drop(holder);
        if has_waiters {
            self.lock.returned.notify_one();
        }
        drop(closed);
    }
}
