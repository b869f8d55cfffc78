//! How the threads of a rank share the core: which thread drives the event loop, which thread waits for the sockets, and which
//! threads wait for another thread.

use std::io;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;

use super::core::{Core, PollProgress};
use super::core_lock::{CoreGuard, CoreLock};
use super::local_peers::{JobSignals, LocalPeers};
use super::poll_time::must_sleep;
use super::shm_counters::ShmCounters;
use super::tasks::{AwaitedPosts, OperationOutput};
use crate::engine::{OpId, Timestamp};
use crate::runtime::deferred_drop;
use crate::runtime::error::Error;
use crate::runtime::profile::{Meter, ProfilePart};
use crate::transport::poller::{Event, Poller};

/// The number of times that a thread polls for events before it also yields its processor between the polls. So many polls
/// take about 10 us.
const SPINS_BEFORE_YIELD: u32 = 20;

/// The number of times that a thread looks at the queues before it polls for events. So many looks take less time than a poll.
const LOOKS_PER_POLL: u32 = 8;
/// The most times in a row that a thread does not poll for events because a queue has changed.
const SKIPPED_POLLS_MAX: u32 = 16;

/// A waiting thread calls the program's interrupt function at this interval.
const INTERRUPT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A function that a thread calls about twenty times a second while it waits for an operation. If the function returns
/// true, this rank aborts the job. Bindings need it for languages whose signal handlers run in the waiting thread itself.
pub type Interrupt = fn() -> bool;

/// The core, and the objects with which the threads that share the core wait for each other.
pub(super) struct DriverShared {
    pub(super) core: CoreLock,
    /// The event queue. The thread that holds this lock waits for the sockets.
    pub(super) poller: Mutex<Poller>,
    /// The number of times that the thread that waits has not polled for events because a queue has changed.
    pub(super) skipped_polls: AtomicU32,
    /// The ranks of this host, from when on messages to them go through queues.
    pub(super) local_peers: OnceLock<LocalPeers>,
    /// Wakes the thread that waits for the sockets.
    pub(super) waker: Arc<Waker>,
    /// Signals that an operation has ended, or that no thread waits for the sockets.
    pub(super) changed: Condvar,
    /// Signals that the progress thread has work.
    pub(super) progress_work: Condvar,
    /// The start of the engine's clock.
    pub(super) epoch: Instant,
    /// Whether this host has at least one processor for each of its ranks.
    pub(super) has_own_processor: bool,
    /// How long a thread polls shared memory before it sleeps.
    pub(super) shm_spin_time: Duration,
    /// The program's function that says whether a waiting thread should abort the job.
    pub(super) interrupt: Option<Interrupt>,
    /// Whether the job has failed and the peers have been told.
    pub(super) has_failed: Arc<AtomicBool>,
    pub(super) meter: Meter,
    /// Statistics of operations in shared memory that run without the core's lock.
    pub(super) shm_counters: Arc<ShmCounters>,
}

impl DriverShared {
    /// Returns the time since the epoch. The engine and the transport use this clock.
    pub(super) fn now(&self) -> Timestamp {
        self.epoch.elapsed()
    }

    pub(super) fn lock(&self) -> CoreGuard<'_> {
        self.core.lock()
    }

    /// Locks the event queue. A thread must not hold the lock of the core meanwhile, because waiting takes long.
    fn lock_poller(&self) -> MutexGuard<'_, Poller> {
        debug_assert!(
            !deferred_drop::holds_lock(),
            "a thread releases the core before it locks the event queue"
        );
        self.poller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of the next call of the interrupt function; `None` if the program has set no such function.
    pub(super) fn next_interrupt_check(&self, now: Timestamp) -> Option<Timestamp> {
        self.interrupt.map(|_| now + INTERRUPT_CHECK_INTERVAL)
    }

    /// Calls the interrupt function. Returns the reason why the waiting thread should abort the job, or `None`. The caller must
    /// not hold a lock. A panic of the function is also such a reason, because the panic must not unwind while the operation uses
    /// the buffer.
    pub(super) fn check_interrupt(&self) -> Option<&'static str> {
        match catch_unwind(self.interrupt?) {
            Ok(is_interrupted) => {
                is_interrupted.then_some("it was interrupted while it waited for other ranks")
            }
            Err(_) => Some("its interrupt function panicked while it waited for other ranks"),
        }
    }

    /// Wakes the threads that wait for a change.
    pub(super) fn wake_waiters(&self, core: &mut Core) {
        self.core.wake_waiters(core, &self.changed);
    }

    /// Wakes the threads that wait for a change, and the thread that waits for the sockets.
    pub(super) fn wake_all(&self, core: &mut Core) {
        self.wake_waiters(core);
        if core.has_socket_waiter {
            let _ = self.waker.wake();
        }
    }

    /// Makes another thread drive the event loop, because the caller stops waiting.
    pub(super) fn pass_on_driving(&self, core: &mut Core) {
        if core.has_socket_waiter {
            return;
        }
        self.wake_waiters(core);
        if !core.background.is_empty() {
            self.progress_work.notify_one();
        }
    }

    /// Waits for the result of an operation, at most until the time `until`. Counts the time since `started` as time in which the
    /// caller has waited.
    pub(super) fn wait<'a>(
        &'a self,
        core: CoreGuard<'a>,
        id: OpId,
        started: Timestamp,
        until: Option<Timestamp>,
    ) -> Option<Result<OperationOutput, Error>> {
        self.wait_and_count(core, started, until, |core| {
            let result = core.results.remove(&id)?;
            if result.as_ref().is_ok_and(|output| output.envelope.is_some()) {
                core.poll_time.record_received_message();
            }
            Some(result)
        })
    }

    /// Drives the event loop until `find` returns a value, or until the time `until`. Counts the time since `started` as time in
    /// which the caller has waited.
    pub(super) fn wait_and_count<'a, R>(
        &'a self,
        core: CoreGuard<'a>,
        started: Timestamp,
        until: Option<Timestamp>,
        find: impl FnMut(&mut Core) -> Option<R>,
    ) -> Option<R> {
        let (mut core, ended, found) = self.drive_until(core, until, find);
        core.statistics.exposed += ended.saturating_sub(started);
        found
    }

    /// Drives the event loop until `find` returns a value, or until the time `until`.
    pub(super) fn wait_until<R>(
        &self,
        until: Option<Timestamp>,
        find: impl FnMut(&mut Core) -> Option<R>,
    ) -> Option<R> {
        self.drive_until(self.lock(), until, find).2
    }

    /// Does the same as [`DriverShared::wait_until`] with a locked core. Also returns the time at the end.
    fn drive_until<'a, R>(
        &'a self,
        mut core: CoreGuard<'a>,
        until: Option<Timestamp>,
        mut find: impl FnMut(&mut Core) -> Option<R>,
    ) -> (CoreGuard<'a>, Timestamp, Option<R>) {
        loop {
            let found = find(&mut core);
            let now = self.now();
            if found.is_some() || until.is_some_and(|until| now >= until) {
                self.pass_on_driving(&mut core);
                return (core, now, found);
            }
            core = self.drive(core, now, until);
        }
    }

    /// Does the work that needs no waiting. If there is no such work, waits for a change, at most until the time `until`. Threads
    /// that wait for the lock get the lock first, so that a thread whose operation has ended can continue.
    pub(super) fn drive<'a>(
        &'a self,
        core: CoreGuard<'a>,
        now: Timestamp,
        until: Option<Timestamp>,
    ) -> CoreGuard<'a> {
        // After `yield_lock` the caller checks whether its operation has ended meanwhile.
        if self.core.is_contended() { self.yield_lock(core) } else { self.drive_once(core, now, until) }
    }

    /// Like [`DriverShared::drive`], but keeps the lock even if other threads wait for it.
    pub(super) fn drive_once<'a>(
        &'a self,
        mut core: CoreGuard<'a>,
        now: Timestamp,
        until: Option<Timestamp>,
    ) -> CoreGuard<'a> {
        match self.poll_core(&mut core, now) {
            PollProgress::Progress => {
                self.wake_all(&mut core);
                core
            }
            PollProgress::Busy => core,
            // The deferred values are dropped after the lock is released. Dropping them may create new work.
            PollProgress::Blocked if core.has_deferred_drops() => self.yield_lock(core),
            PollProgress::Blocked => {
                let awaited_posts = if core.has_socket_waiter { Vec::new() } else { core.awaited_posts() };
                if !awaited_posts.is_empty() {
                    let active_count = core.active_ids.len();
                    let (locked, has_work) = self.spin_on_posts(core, &awaited_posts);
                    core = locked;
                    // Another thread may have completed the caller's operation meanwhile.
                    if has_work || core.active_ids.len() != active_count {
                        return core;
                    }
                }
                if core.prepare_to_sleep() {
                    return core;
                }
                let until = until.into_iter().chain(core.next_deadline()).min();
                let timeout = until.map(|until| until.saturating_sub(now));
                if core.has_socket_waiter {
                    self.meter.time(ProfilePart::Wait, || core.wait(&self.changed, timeout))
                } else {
                    self.poll(core, timeout)
                }
            }
        }
    }

    /// Does the work that needs no waiting. If this thread has read a wake byte that was for the thread that waits for the
    /// sockets, wakes that thread. The peer sends no other wake byte before that thread has set the sleep flag again.
    pub(super) fn poll_core(&self, core: &mut Core, now: Timestamp) -> PollProgress {
        let progress = core.poll(now);
        if core.link_driver.transport_mut().take_wake_bytes() && core.has_socket_waiter {
            let _ = self.waker.wake();
        }
        progress
    }

    /// Polls shared memory and the sockets for a short time. Returns whether there is work. If there is no work, the caller
    /// sleeps, and peers then have to send wake frames.
    fn spin_on_posts<'a>(
        &'a self,
        mut core: CoreGuard<'a>,
        awaited_posts: &[AwaitedPosts],
    ) -> (CoreGuard<'a>, bool) {
        core.has_socket_waiter = true;
        let signals = core.link_driver.transport().signals();
        drop(core);
        let mut events = Vec::new();
        let mut poller = self.lock_poller();
        let (started, mut spins) = (Instant::now(), 0);
        let result = self.meter.time(ProfilePart::Wait, || {
            while started.elapsed() < self.shm_spin_time {
                let is_posted = awaited_posts.iter().any(AwaitedPosts::are_posted);
                let has_changed = have_queues_changed(signals.as_deref());
                if is_posted || self.skips_poll(has_changed) {
                    return Ok(true);
                }
                if poller.wait(Some(Duration::ZERO), &mut events)? || !events.is_empty() || has_changed {
                    return Ok(true);
                }
                if !self.has_own_processor || spins >= SPINS_BEFORE_YIELD {
                    thread::yield_now();
                }
                spins += 1;
            }
            Ok(false)
        });
        drop(poller);
        let core = self.handle_events(events, result.as_ref().err());
        (core, result.unwrap_or(true))
    }

    /// Locks the core and passes the events to the transport. If waiting has failed, aborts the job.
    fn handle_events(&self, events: Vec<Event>, wait_error: Option<&io::Error>) -> CoreGuard<'_> {
        let mut core = self.lock();
        core.has_socket_waiter = false;
        core.link_driver.transport_mut().sockets_mut().serve(self.now(), events);
        if let Some(error) = wait_error {
            core.link_driver.abort(&format!("the operating system could not wait for sockets: {error}"));
        }
        core
    }

    /// Lets the threads that wait for the lock have it, and then locks it again.
    fn yield_lock<'a>(&self, core: CoreGuard<'a>) -> CoreGuard<'a> {
        self.meter.time(ProfilePart::Wait, || core.yield_lock())
    }

    /// Waits for the sockets and the queues, at most for `timeout`.
    pub(super) fn poll<'a>(&'a self, mut core: CoreGuard<'a>, timeout: Option<Duration>) -> CoreGuard<'a> {
        core.has_socket_waiter = true;
        // A thread that waits for its own operation first polls, because waking up takes time. The progress thread does not
        // poll, because it would take the processor from the program's computation.
        let spin = if core.background.is_empty() { core.poll_time.max() } else { Duration::ZERO };
        let signals = core.link_driver.transport().signals();
        drop(core);
        let mut events = Vec::new();
        let started = Instant::now();
        let waited = self.meter.time(ProfilePart::Wait, || {
            self.wait_for_events(started, (spin, timeout), signals.as_deref(), &mut events)
        });
        let waited_time = started.elapsed();
        let mut core = self.handle_events(events, waited.err().as_ref());
        core.poll_time.record_wait(waited_time);
        core
    }

    /// Waits for events of the sockets, or for a change of a queue: first polls for the time `spin`, and then sleeps.
    fn wait_for_events(
        &self,
        started: Instant,
        (spin, timeout): (Duration, Option<Duration>),
        signals: Option<&JobSignals>,
        events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let mut poller = self.lock_poller();
        let spin = timeout.map_or(spin, |timeout| spin.min(timeout));
        let (mut spins, mut polled) = (0, Duration::ZERO);
        while !spin.is_zero() {
            let has_changed = (0..LOOKS_PER_POLL).any(|_| have_queues_changed(signals));
            if self.skips_poll(has_changed) {
                return Ok(());
            }
            let is_woken = poller.wait(Some(Duration::ZERO), events)?;
            if is_woken || !events.is_empty() || has_changed {
                return Ok(());
            }
            let polled_before = std::mem::replace(&mut polled, started.elapsed());
            if must_sleep(spin, polled_before, polled) {
                break;
            }
            // Yield after some polls even if each rank should have a processor: the awaited rank may need this one.
            if !self.has_own_processor || spins >= SPINS_BEFORE_YIELD {
                thread::yield_now();
            }
            spins += 1;
        }
        // Peers wake this rank only while its flag is set.
        if signals.is_some_and(|signals| !signals.mark_asleep_unless_changed()) {
            return poller.wait(Some(Duration::ZERO), events).map(|_| ());
        }
        let waited = poller.wait(timeout, events).map(|_| ());
        if let Some(signals) = signals {
            signals.mark_awake();
        }
        waited
    }

    /// Returns whether the thread that waits for the sockets may skip a poll for events, because a queue has changed. To look at
    /// the queues takes far less time than a poll. But a rank that always finds a change must also handle its events.
    fn skips_poll(&self, has_queue_changed: bool) -> bool {
        let skipped = self.skipped_polls.load(Ordering::Relaxed);
        let skips = has_queue_changed && skipped < SKIPPED_POLLS_MAX;
        self.skipped_polls.store(if skips { skipped + 1 } else { 0 }, Ordering::Relaxed);
        skips
    }

    /// After a failure of the job: tells the peers, releases all buffers, and returns the error.
    pub(super) fn fail<'a>(&'a self, mut core: CoreGuard<'a>) -> Error {
        loop {
            if let Some(error) = core.error() {
                return error;
            }
            core = self.drive(core, self.now(), None);
        }
    }

    /// Runs the progress thread: it drives the operations for which no other thread waits.
    pub(super) fn run_progress_thread(&self) {
        let mut core = self.lock();
        loop {
            if core.is_closing {
                return;
            }
            if core.background.is_empty() && !core.has_deferred_drops() {
                if !core.has_socket_waiter {
                    // One of the waiting threads has to wait for the sockets now.
                    self.wake_waiters(&mut core);
                }
                core.wait_uncounted(&self.progress_work, None);
            } else {
                core = self.drive(core, self.now(), None);
            }
        }
    }
}

/// Returns whether a queue of a job has changed. Without queues, nothing changes.
fn have_queues_changed(signals: Option<&JobSignals>) -> bool {
    signals.is_some_and(|signals| {
        std::hint::spin_loop();
        signals.have_changed()
    })
}
