//! The threads that share a core: who turns the pump, who waits for the sockets, who waits for others.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;

use super::Outcome;
use super::core::{Core, State, Step};
use crate::engine::{OpId, Timestamp};
use crate::group::Error;
use crate::transport::poller::{Event, Poller};

/// The core and its threads' meeting places.
pub(super) struct Shared {
    pub(super) core: Mutex<Core>,
    /// Whoever holds it waits for the sockets.
    pub(super) poller: Mutex<Poller>,
    pub(super) waker: Arc<Waker>,
    /// An operation has ended, or nobody waits for the sockets any more.
    pub(super) changed: Condvar,
    /// There is something to do for the progress thread.
    pub(super) work: Condvar,
    /// Threads that want the core: whoever turns the pump lets them have it from time to time.
    pub(super) contenders: AtomicUsize,
    pub(super) epoch: Instant,
    /// How long a thread that waits stays awake.
    pub(super) spin: Duration,
}

impl Shared {
    /// The time since the epoch: the engine's and the transport's clock.
    pub(super) fn now(&self) -> Timestamp {
        self.epoch.elapsed()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        self.contenders.fetch_add(1, Ordering::SeqCst);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.contenders.fetch_sub(1, Ordering::SeqCst);
        core
    }

    pub(super) fn wait(&self, id: OpId, until: Option<Timestamp>) -> Option<Result<Outcome, Error>> {
        self.wait_until(until, |core| core.outcomes.remove(&id))
    }

    /// Drives the pump until `look` finds something, or until `until`.
    pub(super) fn wait_until<R>(
        &self,
        until: Option<Timestamp>,
        mut look: impl FnMut(&mut Core) -> Option<R>,
    ) -> Option<R> {
        let mut core = self.lock();
        loop {
            let found = look(&mut core);
            if found.is_some() || until.is_some_and(|until| self.now() >= until) {
                if core.waiters > 0 && !core.is_polled {
                    // Somebody else has to wait for the sockets now.
                    self.changed.notify_all();
                }
                if !core.unattended.is_empty() && !core.is_polled {
                    self.work.notify_one();
                }
                return found;
            }
            core = self.drive(core, until);
        }
    }

    /// Does what can be done, or else waits until something may have changed, or until `until`.
    pub(super) fn drive<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        until: Option<Timestamp>,
    ) -> MutexGuard<'a, Core> {
        let now = self.now();
        match core.turn(now) {
            Step::Progress => {
                if core.waiters > 0 {
                    self.changed.notify_all();
                }
                core
            }
            Step::Busy => {
                if self.contenders.load(Ordering::SeqCst) == 0 {
                    return core;
                }
                drop(core);
                while self.contenders.load(Ordering::SeqCst) > 0 {
                    thread::yield_now();
                }
                self.core.lock().unwrap_or_else(PoisonError::into_inner)
            }
            Step::Blocked => {
                let until = until.into_iter().chain(core.next_deadline()).min();
                let timeout = until.map(|until| until.saturating_sub(now));
                if core.is_polled { self.wait_for_others(core, timeout) } else { self.poll(core, timeout) }
            }
        }
    }

    fn wait_for_others<'a>(
        &self,
        mut core: MutexGuard<'a, Core>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, Core> {
        core.waiters += 1;
        let mut core = match timeout {
            Some(timeout) => {
                self.changed.wait_timeout(core, timeout).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait(core).unwrap_or_else(PoisonError::into_inner),
        };
        core.waiters -= 1;
        core
    }

    pub(super) fn poll<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, Core> {
        core.is_polled = true;
        // Whoever waits for an operation is back at work sooner if it does not sleep first; the progress thread would take the
        // processor from the caller that computes.
        let spin = if core.unattended.is_empty() { self.spin } else { Duration::ZERO };
        drop(core);
        let mut events = Vec::new();
        let waited = self.wait_for_events(spin, timeout, &mut events);
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.is_polled = false;
        core.pump.transport_mut().serve(self.now(), events);
        if let Err(error) = waited {
            core.pump.abort(&format!("the operating system refused to wait for its sockets: {error}"));
        }
        core
    }

    /// Waits for the sockets: awake for as long as `spin`, then asleep.
    fn wait_for_events(
        &self,
        spin: Duration,
        timeout: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let mut poller = self.poller.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        let spin = timeout.map_or(spin, |timeout| spin.min(timeout));
        while started.elapsed() < spin {
            poller.wait(Some(Duration::ZERO), events)?;
            if !events.is_empty() {
                return Ok(());
            }
        }
        poller.wait(timeout, events)
    }

    /// The job has failed: tells the peers, gives up all memory, and returns the error.
    pub(super) fn fail<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> Error {
        loop {
            if let State::Failed(error) = &core.state {
                return error.clone();
            }
            core = self.drive(core, None);
        }
    }

    /// What the progress thread does: drives what is left to it.
    pub(super) fn progress(&self) {
        let mut core = self.lock();
        loop {
            if core.is_closing {
                return;
            }
            core = if core.unattended.is_empty() {
                if core.waiters > 0 {
                    // What it drove has ended in another thread's hands, and somebody else has to wait for the sockets now.
                    self.changed.notify_all();
                }
                self.work.wait(core).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.drive(core, None)
            };
        }
    }
}
