//! The lock of the core: who waits for it is counted, and what operations leave behind is dropped outside of it.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::core::Core;
use crate::group::{deferred_drop, link_io};

/// The core, and the threads that want it.
pub(super) struct Lock {
    core: Mutex<Core>,
    /// Whoever turns the pump lets them have it from time to time.
    contenders: AtomicUsize,
}

/// The core, for as long as this lives.
pub(super) struct Guard<'a> {
    lock: &'a Lock,
    /// `None` only while it is given up.
    core: Option<MutexGuard<'a, Core>>,
}

/// One of the threads that want the core, until it has it.
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

impl Lock {
    pub(super) fn new(core: Core) -> Self {
        Self { core: Mutex::new(core), contenders: AtomicUsize::new(0) }
    }

    /// # Panics
    ///
    /// Where it would wait for ever: in a function of the program's own that reduces, and so runs under this lock.
    pub(super) fn lock(&self) -> Guard<'_> {
        assert!(
            !link_io::is_reducing(),
            "a function that reduces must not use groups or handles, nor drop them"
        );
        let _contender = Contender::new(&self.contenders);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        deferred_drop::lock_taken();
        Guard { lock: self, core: Some(core) }
    }

    /// Whether other threads want the core.
    pub(super) fn is_contended(&self) -> bool {
        self.contenders.load(Ordering::SeqCst) > 0
    }

    /// Wakes those that wait for something to change. They are contenders from now on.
    pub(super) fn wake(&self, core: &mut Core, changed: &Condvar) {
        if core.waiters > 0 {
            self.contenders.fetch_add(std::mem::take(&mut core.waiters), Ordering::SeqCst);
            core.changes += 1;
            changed.notify_all();
        }
    }
}

impl Guard<'_> {
    /// Whether something is to be dropped without the lock.
    pub(super) fn has_left_over(&self) -> bool {
        !self.left_over.is_empty() || deferred_drop::is_pending()
    }

    /// Lets others have the core that want it.
    pub(super) fn make_way(self) -> Self {
        let lock = self.lock;
        drop(self);
        while lock.is_contended() {
            std::thread::yield_now();
        }
        lock.lock()
    }

    /// Waits until something has changed ([`Lock::wake`]), or for so long.
    pub(super) fn wait(mut self, changed: &Condvar, timeout: Option<Duration>) -> Self {
        let before = self.changes;
        self.waiters += 1;
        self.wait_on(changed, timeout);
        if self.changes == before {
            self.waiters -= 1;
        } else {
            self.lock.contenders.fetch_sub(1, Ordering::SeqCst);
        }
        self
    }

    /// Waits on a condition that nobody counts.
    pub(super) fn wait_on(&mut self, condition: &Condvar, timeout: Option<Duration>) {
        let Some(core) = self.core.take() else { return };
        self.core = Some(match timeout {
            Some(timeout) => condition.wait_timeout(core, timeout).unwrap_or_else(PoisonError::into_inner).0,
            None => condition.wait(core).unwrap_or_else(PoisonError::into_inner),
        });
    }
}

impl Deref for Guard<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        self.core.as_ref().expect("it is given up only within `wait_on` and `drop`")
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        self.core.as_mut().expect("it is given up only within `wait_on` and `drop`")
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let Some(mut core) = self.core.take() else { return };
        let left_over = std::mem::take(&mut core.left_over);
        drop(core);
        // The caller's functions and the owners of its buffers may hold handles and groups, whose drop takes the lock.
        drop((left_over, deferred_drop::lock_released()));
    }
}
