//! How the threads of a rank share the core: which thread drives the event loop, which thread waits for the sockets, and which
//! threads wait for another thread. This code knows neither the sockets nor the clock, so simulations run it too.

use std::time::Duration;

use super::core_lock::{CoreGuard, CoreLock, DrivenCore, PollProgress};
use super::primitives::Primitives;
use crate::engine::Timestamp;

type Locked<'a, D> = CoreGuard<'a, <D as ThreadedDriver>::Core, <D as ThreadedDriver>::Primitives>;

/// A core that several threads drive, and how they wait for events of its sockets.
pub(crate) trait ThreadedDriver: Sized {
    type Core: DrivenCore;
    type Primitives: Primitives;
    /// How a thread waits for events, and what it needs for that without the lock.
    type Wait;
    type Found;

    fn core(&self) -> &CoreLock<Self::Core, Self::Primitives>;

    fn now(&self) -> Timestamp;

    /// Returns how the thread polls shared memory and the sockets for a short time before it sleeps; `None` if it does not.
    fn begin_spin(&self, core: &Self::Core) -> Option<Self::Wait>;

    /// Returns how the thread sleeps until a socket has an event, at most for `timeout`.
    fn begin_sleep(&self, core: &Self::Core, timeout: Option<Duration>) -> Self::Wait;

    fn wait_for_events(&self, wait: Self::Wait) -> Self::Found;

    /// Passes the events to the core. Returns whether there may be work.
    fn handle_events(&self, core: &mut Self::Core, found: Self::Found) -> bool;

    /// Makes [`ThreadedDriver::wait_for_events`] return: the current call, or else the next one.
    fn interrupt_wait(&self);

    /// Calls a function in which this thread waits for other threads, and measures the time.
    fn measure_wait<R>(&self, wait: impl FnOnce() -> R) -> R;

    fn lock(&self) -> Locked<'_, Self> {
        self.core().lock()
    }

    fn wake_socket_waiter(&self, core: &Locked<'_, Self>) {
        if core.has_socket_waiter() {
            self.interrupt_wait();
        }
    }

    fn wake_all(&self, core: &mut Locked<'_, Self>) {
        core.wake_waiters();
        self.wake_socket_waiter(core);
    }

    /// Tells the other threads that an operation has begun. If `is_awaited` is false, the progress thread drives it.
    fn announce_operation(&self, core: &Locked<'_, Self>, is_awaited: bool) {
        if !is_awaited && !core.has_socket_waiter() {
            core.notify_progress_thread();
        }
        // The thread that waits for the sockets must learn of this operation and its deadline.
        self.wake_socket_waiter(core);
    }

    /// Drives the event loop until `find` returns a value, or until the time `until`. Also returns the time at the end. Until
    /// then, the progress thread does not drive the operations `ids`, so this thread polls before it sleeps. The progress thread
    /// never polls, to leave the processor to the program's computation.
    fn drive_until<'a, R>(
        &'a self,
        mut core: Locked<'a, Self>,
        ids: &[<Self::Core as DrivenCore>::OpId],
        until: Option<Timestamp>,
        mut find: impl FnMut(&mut Self::Core) -> Option<R>,
    ) -> (Locked<'a, Self>, Timestamp, Option<R>) {
        let taken_over: Vec<_> = ids.iter().filter(|id| core.background().remove(id)).copied().collect();
        // The progress thread may wait for the sockets. Wake it, so that this thread can wait for the sockets.
        if !taken_over.is_empty() && core.background().is_empty() {
            self.wake_socket_waiter(&core);
        }
        loop {
            let found = find(&mut core);
            let now = self.now();
            if found.is_some() || until.is_some_and(|until| now >= until) {
                for id in taken_over {
                    if core.is_active(id) {
                        core.background().insert(id);
                    }
                }
                // Another thread has to drive the event loop now.
                if !core.has_socket_waiter() {
                    core.wake_waiters();
                    if !core.background().is_empty() {
                        core.notify_progress_thread();
                    }
                }
                return (core, now, found);
            }
            core = self.drive(core, now, until);
        }
    }

    /// Does the work that needs no waiting. If there is no such work, waits for a change, at most until the time `until`. Threads
    /// that wait for the lock get the lock first, so that a thread whose operation has ended can continue.
    fn drive<'a>(
        &'a self,
        core: Locked<'a, Self>,
        now: Timestamp,
        until: Option<Timestamp>,
    ) -> Locked<'a, Self> {
        // After `yield_lock` the caller checks whether its operation has ended meanwhile.
        if self.core().is_contended() { self.yield_lock(core) } else { self.drive_once(core, now, until) }
    }

    /// Like [`ThreadedDriver::drive`], but keeps the lock even if other threads wait for it.
    fn drive_once<'a>(
        &'a self,
        mut core: Locked<'a, Self>,
        now: Timestamp,
        until: Option<Timestamp>,
    ) -> Locked<'a, Self> {
        match self.poll(&mut core, now) {
            PollProgress::Progress => {
                self.wake_all(&mut core);
                core
            }
            PollProgress::Busy => core,
            // The deferred values are dropped after the lock is released. Dropping them may create new work.
            PollProgress::Blocked if core.has_deferred_drops() => self.yield_lock(core),
            PollProgress::Blocked => {
                let spin = if core.has_socket_waiter() { None } else { self.begin_spin(&core) };
                if let Some(spin) = spin {
                    let (locked, has_work) = self.wait_without_lock(core, spin);
                    core = locked;
                    // If another thread has completed the caller's operation meanwhile, the next wait returns at once.
                    if has_work {
                        return core;
                    }
                }
                if core.prepare_to_sleep() {
                    return core;
                }
                let until = until.into_iter().chain(core.next_deadline()).min();
                // Time may have passed since `now`: other threads may have had the lock during the spin.
                let timeout = until.map(|until| until.saturating_sub(self.now()));
                if core.has_socket_waiter() {
                    self.measure_wait(|| core.wait(timeout))
                } else {
                    self.wait_for_sockets(core, timeout)
                }
            }
        }
    }

    /// Does the work that needs no waiting. If this thread has read a wake byte that was for the thread that waits for the
    /// sockets, wakes that thread. The peer sends no other wake byte before that thread has set the sleep flag again.
    fn poll(&self, core: &mut Locked<'_, Self>, now: Timestamp) -> PollProgress {
        let progress = core.poll(now);
        if core.take_wake_bytes() {
            self.wake_socket_waiter(core);
        }
        progress
    }

    /// Waits for the sockets, at most for `timeout`. No other thread may wait for the sockets.
    fn wait_for_sockets<'a>(&'a self, core: Locked<'a, Self>, timeout: Option<Duration>) -> Locked<'a, Self> {
        let wait = self.begin_sleep(&core, timeout);
        self.wait_without_lock(core, wait).0
    }

    /// Waits for events without the lock. Returns whether there may be work.
    fn wait_without_lock<'a>(
        &'a self,
        mut core: Locked<'a, Self>,
        wait: Self::Wait,
    ) -> (Locked<'a, Self>, bool) {
        core.set_has_socket_waiter(true);
        drop(core);
        let found = self.wait_for_events(wait);
        let mut core = self.lock();
        core.set_has_socket_waiter(false);
        let has_work = self.handle_events(&mut core, found);
        (core, has_work)
    }

    /// Lets the threads that wait for the lock have it, and then locks it again.
    fn yield_lock<'a>(&'a self, core: Locked<'a, Self>) -> Locked<'a, Self> {
        self.measure_wait(|| core.yield_lock())
    }

    /// Runs the progress thread: it drives the operations for which no other thread waits.
    fn run_progress_thread(&self) {
        let mut core = self.lock();
        while !core.is_closing() {
            if core.background().is_empty() && !core.has_deferred_drops() {
                if !core.has_socket_waiter() {
                    // One of the waiting threads has to wait for the sockets now.
                    core.wake_waiters();
                }
                core.wait_for_progress_work();
            } else {
                core = self.drive(core, self.now(), None);
            }
        }
    }

    fn end_progress_thread(&self) {
        self.lock().close();
        self.interrupt_wait();
    }
}
