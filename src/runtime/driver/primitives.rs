//! The locks with which threads wait for each other. Jobs use those of the standard library, and simulations use others.

use std::ops::DerefMut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

/// A kind of mutexes, condition variables and counters. A panic while a thread holds a mutex does not poison the mutex.
pub(crate) trait Primitives: 'static {
    type Mutex<T: 'static>;
    type Guard<'a, T: 'static>: DerefMut<Target = T>;
    type Condvar: Default;
    type Counter: Default;

    fn new_mutex<T: 'static>(value: T) -> Self::Mutex<T>;
    fn lock<T: 'static>(mutex: &Self::Mutex<T>) -> Self::Guard<'_, T>;
    /// Takes the mutex if that needs no waiting.
    fn try_lock<T: 'static>(mutex: &Self::Mutex<T>) -> Option<Self::Guard<'_, T>>;
    /// Releases the mutex until a notification, at most for `timeout`. May also return earlier.
    fn wait<'a, T: 'static>(
        condvar: &Self::Condvar,
        guard: Self::Guard<'a, T>,
        timeout: Option<Duration>,
    ) -> Self::Guard<'a, T>;
    fn notify_all(condvar: &Self::Condvar);
    fn add(counter: &Self::Counter, count: usize);
    fn subtract(counter: &Self::Counter, count: usize);
    fn get(counter: &Self::Counter) -> usize;
    fn yield_now();
}

pub(crate) struct StdPrimitives;

impl Primitives for StdPrimitives {
    type Mutex<T: 'static> = Mutex<T>;
    type Guard<'a, T: 'static> = MutexGuard<'a, T>;
    type Condvar = Condvar;
    type Counter = AtomicUsize;

    fn new_mutex<T: 'static>(value: T) -> Mutex<T> {
        Mutex::new(value)
    }

    fn lock<T: 'static>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock<T: 'static>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        match mutex.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn wait<'a, T: 'static>(
        condvar: &Condvar,
        guard: Self::Guard<'a, T>,
        timeout: Option<Duration>,
    ) -> Self::Guard<'a, T> {
        match timeout {
            Some(timeout) => condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0,
            None => condvar.wait(guard).unwrap_or_else(PoisonError::into_inner),
        }
    }

    fn notify_all(condvar: &Condvar) {
        condvar.notify_all();
    }

    fn add(counter: &AtomicUsize, count: usize) {
        counter.fetch_add(count, Ordering::SeqCst);
    }

    fn subtract(counter: &AtomicUsize, count: usize) {
        counter.fetch_sub(count, Ordering::SeqCst);
    }

    fn get(counter: &AtomicUsize) -> usize {
        counter.load(Ordering::SeqCst)
    }

    fn yield_now() {
        thread::yield_now();
    }
}
