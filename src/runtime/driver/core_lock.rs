//! The lock of the core. A thread drops values of the user only after it has released the lock.

use std::mem;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::primitives::Primitives;
use crate::engine::Timestamp;
use crate::types::SortedSet;

/// What the threads of a rank need of the core. Simulations of threads have a core without links.
pub(crate) trait DrivenCore: 'static {
    type OpId: Copy + Ord;
    /// Values of the user, which a thread may drop only without the lock.
    type Deferred;

    /// Records that this thread takes the lock. Panics if this thread must not use the core.
    fn begin_locking();

    /// Records that this thread releases the lock. Returns the values that it then drops.
    fn take_deferred(&mut self) -> Self::Deferred;

    fn has_deferred_drops(&self) -> bool;

    /// Does all work that needs no waiting, and stores the results of the operations that have ended.
    fn poll(&mut self, now: Timestamp) -> PollProgress;

    fn take_wake_bytes(&mut self) -> bool;

    /// Prepares for a thread that falls asleep. Returns true if there is work, so that the thread must not sleep.
    fn prepare_to_sleep(&mut self) -> bool;

    /// Returns the earliest time at which [`DrivenCore::poll`] has to be called even if no event comes.
    fn next_deadline(&self) -> Option<Timestamp>;

    fn is_active(&self, id: Self::OpId) -> bool;

    /// The active operations that the progress thread drives, because no other thread waits for them.
    fn background(&mut self) -> &mut SortedSet<Self::OpId>;
}

#[derive(PartialEq, Eq)]
pub(crate) enum PollProgress {
    /// An event has happened for which other threads may wait.
    Progress,
    /// More work can be done now.
    Busy,
    /// No more work can be done before a thread has waited for the sockets.
    Blocked,
}

pub(crate) struct CoreLock<C: DrivenCore, P: Primitives> {
    state: P::Mutex<LockedState<C>>,
    /// The number of threads that wait for the lock. The thread that drives the event loop yields the lock to them.
    contenders: P::Counter,
    /// Signals that an operation has ended, or that no thread waits for the sockets.
    pub(crate) changed: P::Condvar,
    progress_work: P::Condvar,
}

struct LockedState<C> {
    core: C,
    threads: WaitingThreads,
}

#[derive(Default)]
struct WaitingThreads {
    has_socket_waiter: bool,
    /// The number of threads that wait for a change and have not been woken.
    waiters: usize,
    changes: u64,
    /// Whether the progress thread must end.
    is_closing: bool,
}

pub(crate) struct CoreGuard<'a, C: DrivenCore, P: Primitives> {
    lock: &'a CoreLock<C, P>,
    /// `None` only while this thread waits, and in `drop`.
    state: Option<P::Guard<'a, LockedState<C>>>,
}

impl<C: DrivenCore, P: Primitives> CoreLock<C, P> {
    pub(crate) fn new(core: C) -> Self {
        Self {
            state: P::new_mutex(LockedState { core, threads: WaitingThreads::default() }),
            contenders: P::Counter::default(),
            changed: P::Condvar::default(),
            progress_work: P::Condvar::default(),
        }
    }

    /// Locks the core. Panics in a reduction function of the user, where locking again would deadlock.
    #[inline]
    pub(crate) fn lock(&self) -> CoreGuard<'_, C, P> {
        C::begin_locking();
        let state = P::try_lock(&self.state).unwrap_or_else(|| {
            P::add(&self.contenders, 1);
            let state = P::lock(&self.state);
            P::subtract(&self.contenders, 1);
            state
        });
        CoreGuard { lock: self, state: Some(state) }
    }

    pub(crate) fn is_contended(&self) -> bool {
        P::get(&self.contenders) > 0
    }
}

impl<C: DrivenCore, P: Primitives> CoreGuard<'_, C, P> {
    pub(super) fn has_socket_waiter(&self) -> bool {
        self.state().threads.has_socket_waiter
    }

    pub(super) fn set_has_socket_waiter(&mut self, has_socket_waiter: bool) {
        self.state_mut().threads.has_socket_waiter = has_socket_waiter;
    }

    /// Wakes the threads that wait for a change. From now on these threads count as threads that wait for the lock.
    pub(super) fn wake_waiters(&mut self) {
        let lock = self.lock;
        let threads = &mut self.state_mut().threads;
        if threads.waiters > 0 {
            P::add(&lock.contenders, mem::take(&mut threads.waiters));
            threads.changes += 1;
            P::notify_all(&lock.changed);
        }
    }

    /// Waits for [`CoreGuard::wake_waiters`], at most for `timeout`.
    pub(super) fn wait(mut self, timeout: Option<Duration>) -> Self {
        let threads = &mut self.state_mut().threads;
        let changes_before = threads.changes;
        threads.waiters += 1;
        self.wait_uncounted(&self.lock.changed, timeout);
        let lock = self.lock;
        let threads = &mut self.state_mut().threads;
        if threads.changes == changes_before {
            threads.waiters -= 1;
        } else {
            P::subtract(&lock.contenders, 1);
        }
        self
    }

    pub(super) fn wait_for_progress_work(&mut self) {
        self.wait_uncounted(&self.lock.progress_work, None);
    }

    pub(super) fn notify_progress_thread(&self) {
        P::notify_all(&self.lock.progress_work);
    }

    /// Waits on a condition variable without counting this thread as a waiter.
    fn wait_uncounted(&mut self, condvar: &P::Condvar, timeout: Option<Duration>) {
        self.state = self.state.take().map(|state| P::wait(condvar, state, timeout));
    }

    /// Releases the lock until no other thread waits for it, and locks it again.
    pub(super) fn yield_lock(self) -> Self {
        let lock = self.lock;
        drop(self);
        while lock.is_contended() {
            P::yield_now();
        }
        lock.lock()
    }

    pub(super) fn close(&mut self) {
        self.state_mut().threads.is_closing = true;
        P::notify_all(&self.lock.progress_work);
        self.wake_waiters();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.state().threads.is_closing
    }

    fn state(&self) -> &LockedState<C> {
        self.state.as_ref().expect("the state is `None` only while this thread waits, and in `drop`")
    }

    fn state_mut(&mut self) -> &mut LockedState<C> {
        self.state.as_mut().expect("the state is `None` only while this thread waits, and in `drop`")
    }
}

impl<C: DrivenCore, P: Primitives> Deref for CoreGuard<'_, C, P> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.state().core
    }
}

impl<C: DrivenCore, P: Primitives> DerefMut for CoreGuard<'_, C, P> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.state_mut().core
    }
}

impl<C: DrivenCore, P: Primitives> Drop for CoreGuard<'_, C, P> {
    #[inline]
    fn drop(&mut self) {
        let Some(mut state) = self.state.take() else { return };
        let deferred = state.core.take_deferred();
        drop(state);
        // Functions and buffers of the user may own handles and groups. To drop a handle or a group takes the lock.
        drop(deferred);
    }
}
