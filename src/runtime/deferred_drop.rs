//! Deferred drops. Dropping a value of the user may run code that takes the lock of the core. So a thread that holds this lock
//! keeps such values, and drops them after it has released the lock.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Deref;

pub(crate) type Deferred = Option<Vec<Box<dyn Any + Send>>>;

thread_local! {
    static LOCKS: Cell<usize> = const { Cell::new(0) };
    /// Whether `DEFERRED` has values. To look at this costs less, because it needs no destructor.
    static HAS_DEFERRED: Cell<bool> = const { Cell::new(false) };
    /// The values that this thread drops after it has released its locks.
    static DEFERRED: RefCell<Vec<Box<dyn Any + Send>>> = const { RefCell::new(Vec::new()) };
}

#[inline]
pub(crate) fn record_lock_taken() {
    LOCKS.set(LOCKS.get() + 1);
}

/// Records that this thread has released a core lock, and returns the values to drop.
#[inline]
pub(crate) fn record_lock_released() -> Deferred {
    LOCKS.set(LOCKS.get() - 1);
    (LOCKS.get() == 0 && HAS_DEFERRED.take()).then(|| DEFERRED.take())
}

pub(crate) fn holds_lock() -> bool {
    // A thread that is exiting has no thread-local variables and holds no lock.
    LOCKS.try_with(|locks| locks.get() > 0).unwrap_or(false)
}

pub(crate) fn has_deferred_drops() -> bool {
    HAS_DEFERRED.get()
}

/// A value of the user. A thread that holds a core lock drops it only after it has released the lock.
pub(crate) struct UserValue<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> UserValue<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send + 'static> Deref for UserValue<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("only `drop` takes the value")
    }
}

impl<T: Send + 'static> Drop for UserValue<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take().filter(|_| holds_lock()) {
            DEFERRED.with_borrow_mut(|deferred| deferred.push(Box::new(value)));
            HAS_DEFERRED.set(true);
        }
    }
}
