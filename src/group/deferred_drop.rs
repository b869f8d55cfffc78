//! Values whose drop runs the caller's code, which may take the core's lock: a thread that holds the lock keeps them until
//! it has released it.

use std::any::Any;
use std::cell::{Cell, RefCell};

type Deferred = Vec<Box<dyn Any + Send>>;

thread_local! {
    /// How many core locks this thread holds.
    static LOCKS: Cell<usize> = const { Cell::new(0) };
    static DEFERRED: RefCell<Deferred> = const { RefCell::new(Vec::new()) };
}

/// Says that this thread holds one more core lock.
pub(super) fn lock_taken() {
    LOCKS.set(LOCKS.get() + 1);
}

/// Says that this thread has released a core lock, and gives the values to drop.
pub(super) fn lock_released() -> Deferred {
    LOCKS.set(LOCKS.get() - 1);
    if LOCKS.get() == 0 { DEFERRED.take() } else { Vec::new() }
}

/// Whether values wait for this thread to release its lock.
pub(super) fn is_pending() -> bool {
    DEFERRED.with_borrow(|deferred| !deferred.is_empty())
}

/// Drops a value now, or once this thread holds no lock.
pub(super) fn drop_unlocked(value: Box<dyn Any + Send>) {
    // A thread that ends has no lists any more, and no locks.
    let holds_lock = LOCKS.try_with(|locks| locks.get() > 0).unwrap_or(false);
    if holds_lock {
        DEFERRED.with_borrow_mut(|deferred| deferred.push(value));
    }
}
