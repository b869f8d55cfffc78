//! The lock of the core. It counts the threads that wait for the lock. Values of the user are dropped only after the lock is
//! released.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::core::Core;
use crate::runtime::{deferred_drop, link_io};

/// The lock of the core.
pub(super) struct CoreLock {
    core: Mutex<Core>,
    /// The number of threads that wait for the lock. The thread that drives the event loop yields the lock to them.
    contenders: AtomicUsize,
}

/// The locked core.
pub(super) struct CoreGuard<'a> {
    lock: &'a CoreLock,
    /// `None` only within `wait_uncounted` and `drop`.
    core: Option<MutexGuard<'a, Core>>,
}

/// A thread that waits for the lock. Dropping this value ends the count of the thread in [`CoreLock::contenders`].
struct Contender<'a>(&'a AtomicUsize);

impl<'a> Contender<'a> {
    fn new(contenders: &'a AtomicUsize) -> Self {
        contenders.fetch_add(1, Ordering::SeqCst);
        Self(contenders)
    }
}

impl Drop for Contender<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl CoreLock {
    pub(super) fn new(core: Core) -> Self {
        Self { core: Mutex::new(core), contenders: AtomicUsize::new(0) }
    }

    /// Locks the core.
    ///
    /// # Panics
    ///
    /// In a reduction function of the user. Its thread already holds this lock, so locking again would deadlock.
    pub(super) fn lock(&self) -> CoreGuard<'_> {
        assert!(
            !link_io::is_reducing(),
            "a reduction function must not use groups or handles, and must not drop them"
        );
        debug_assert!(!deferred_drop::holds_lock(), "a thread must not lock two cores, or one core twice");
        let _contender = Contender::new(&self.contenders);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        deferred_drop::record_lock_taken();
        CoreGuard { lock: self, core: Some(core) }
    }

    /// Returns whether other threads wait for the lock.
    pub(super) fn is_contended(&self) -> bool {
        self.contenders.load(Ordering::SeqCst) > 0
    }

    /// Wakes the threads that wait for a change. From now on these threads count as threads that wait for the lock.
    pub(super) fn wake_waiters(&self, core: &mut Core, changed: &Condvar) {
        if core.waiters > 0 {
            self.contenders.fetch_add(std::mem::take(&mut core.waiters), Ordering::SeqCst);
            core.changes += 1;
            changed.notify_all();
        }
    }
}

impl CoreGuard<'_> {
    /// Returns whether values have to be dropped after the lock is released.
    pub(super) fn has_deferred_drops(&self) -> bool {
        !self.deferred_kernels.is_empty() || deferred_drop::has_deferred_drops()
    }

    /// Releases the lock until no other thread waits for it, and locks it again.
    pub(super) fn yield_lock(self) -> Self {
        let lock = self.lock;
        drop(self);
        while lock.is_contended() {
            std::thread::yield_now();
        }
        lock.lock()
    }

    /// Waits for [`CoreLock::wake_waiters`], at most for `timeout`.
    pub(super) fn wait(mut self, changed: &Condvar, timeout: Option<Duration>) -> Self {
        let changes_before = self.changes;
        self.waiters += 1;
        self.wait_uncounted(changed, timeout);
        if self.changes == changes_before {
            self.waiters -= 1;
        } else {
            self.lock.contenders.fetch_sub(1, Ordering::SeqCst);
        }
        self
    }

    /// Waits on a condition variable without counting this thread as a waiter.
    pub(super) fn wait_uncounted(&mut self, condition: &Condvar, timeout: Option<Duration>) {
        let Some(core) = self.core.take() else { return };
        self.core = Some(match timeout {
            Some(timeout) => condition.wait_timeout(core, timeout).unwrap_or_else(PoisonError::into_inner).0,
            None => condition.wait(core).unwrap_or_else(PoisonError::into_inner),
        });
    }
}

impl Deref for CoreGuard<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        self.core.as_ref().expect("the core is `None` only within `wait_uncounted` and `drop`")
    }
}

impl DerefMut for CoreGuard<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.core.as_mut().expect("the core is `None` only within `wait_uncounted` and `drop`")
    }
}

impl Drop for CoreGuard<'_> {
    fn drop(&mut self) {
        let Some(mut core) = self.core.take() else { return };
        let deferred_kernels = std::mem::take(&mut core.deferred_kernels);
        drop(core);
        // Functions and buffers of the user may own handles and groups. To drop a handle or a group takes the lock.
        drop((deferred_kernels, deferred_drop::record_lock_released()));
    }
}
