//! The threads that share a core: who turns the pump, who waits for the sockets, who waits for others.

use std::io;
use std::panic::catch_unwind;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;

use super::OperationOutput;
use super::core::{Core, JobState, PollProgress};
use super::guard::{Guard, Lock};
use super::shm::{AwaitedPosts, PATIENCE};
use super::shm_counters::ShmCounters;
use crate::engine::{OpId, Timestamp};
use crate::group::profile::{Meter, ProfilePart};
use crate::group::{Error, Interrupt};
use crate::transport::poller::{Event, Poller};

/// How often a thread looks for events, some 10 us in all, before it lets others have its processor between looks.
const LOOKS_ALONE: u32 = 20;

/// How often whoever waits asks whether to give up.
const QUESTION_EVERY: Duration = Duration::from_millis(50);

/// The core and its threads' meeting places.
pub(super) struct DriverShared {
    pub(super) core: Lock,
    /// Whoever holds it waits for the sockets.
    pub(super) poller: Mutex<Poller>,
    pub(super) waker: Arc<Waker>,
    /// An operation has ended, or nobody waits for the sockets any more.
    pub(super) changed: Condvar,
    /// There is something to do for the progress thread.
    pub(super) work: Condvar,
    pub(super) epoch: Instant,
    /// How long a thread that waits for the sockets stays awake.
    pub(super) spin: Duration,
    /// Whether each rank of this host can have a processor.
    pub(super) has_own_processor: bool,
    /// Asked whether whoever waits is to give up.
    pub(super) interrupt: Option<Interrupt>,
    /// The job has failed, and everybody has been told.
    pub(super) has_failed: Arc<AtomicBool>,
    pub(super) meter: Meter,
    /// What is done at desks without the core's lock.
    pub(super) shm_counters: Arc<ShmCounters>,
}

impl DriverShared {
    /// The time since the epoch: the engine's and the transport's clock.
    pub(super) fn now(&self) -> Timestamp {
        self.epoch.elapsed()
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        self.core.lock()
    }

    /// When whoever waits should next ask whether to give up; `None` if there is nobody to ask.
    pub(super) fn next_question(&self) -> Option<Timestamp> {
        self.interrupt.map(|_| self.now() + QUESTION_EVERY)
    }

    /// Why the waiting thread should give up, if the program says so. The caller must not hold a lock. A panic of the program
    /// is a reason too: it must not unwind through an operation that other ranks still write to.
    pub(super) fn interruption(&self) -> Option<&'static str> {
        match catch_unwind(self.interrupt?) {
            Ok(is_interrupted) => {
                is_interrupted.then_some("it was interrupted while it waited for the others")
            }
            Err(_) => Some("its interrupt function panicked while it waited for the others"),
        }
    }

    /// Something that others may wait for has happened.
    pub(super) fn tell_others(&self, core: &mut Core) {
        self.core.wake(core, &self.changed);
    }

    /// [`DriverShared::tell_others`], and the thread that sleeps in the poller: its operation may have ended too.
    pub(super) fn tell_all(&self, core: &mut Core) {
        self.tell_others(core);
        if core.is_polled {
            let _ = self.waker.wake();
        }
    }

    /// The caller stops waiting: if nobody waits for the sockets, somebody else has to now.
    pub(super) fn hand_over(&self, core: &mut Core) {
        if core.is_polled {
            return;
        }
        self.tell_others(core);
        if !core.unattended.is_empty() {
            self.work.notify_one();
        }
    }

    pub(super) fn wait(&self, id: OpId, until: Option<Timestamp>) -> Option<Result<OperationOutput, Error>> {
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
                self.hand_over(&mut core);
                return found;
            }
            core = self.drive(core, until);
        }
    }

    /// Does what can be done, or else waits until something may have changed, or until `until`. Others that want the core
    /// have it first, so that nobody whose operation has ended waits for one that has not.
    pub(super) fn drive<'a>(&'a self, core: Guard<'a>, until: Option<Timestamp>) -> Guard<'a> {
        // What the caller waits for may have happened meanwhile.
        if self.core.is_contended() { self.make_way(core) } else { self.step(core, until) }
    }

    /// [`DriverShared::drive`], whoever else wants the core.
    pub(super) fn step<'a>(&'a self, mut core: Guard<'a>, until: Option<Timestamp>) -> Guard<'a> {
        let now = self.now();
        match core.poll(now) {
            PollProgress::Progress => {
                self.tell_all(&mut core);
                core
            }
            PollProgress::Busy => core,
            // It is dropped without the lock, which may change what there is to do.
            PollProgress::Blocked if core.has_left_over() => self.make_way(core),
            PollProgress::Blocked => {
                let awaited_posts = if core.is_polled { Vec::new() } else { core.awaited_posts() };
                if !awaited_posts.is_empty() {
                    let pending = core.pending.len();
                    let (seen, has_news) = self.spin_on_posts(core, &awaited_posts);
                    core = seen;
                    // Another thread may have ended what the caller waits for meanwhile. What it begins wakes this one.
                    if has_news || core.pending.len() != pending {
                        return core;
                    }
                }
                if core.prepare_to_sleep() {
                    return core;
                }
                let until = until.into_iter().chain(core.next_deadline()).min();
                let timeout = until.map(|until| until.saturating_sub(now));
                if core.is_polled {
                    self.meter.time(ProfilePart::Wait, || core.wait(&self.changed, timeout))
                } else {
                    self.poll(core, timeout)
                }
            }
        }
    }

    /// Stays awake for a while to see what peers post at desks, before they are asked to send word of it; whether there is
    /// something to do.
    fn spin_on_posts<'a>(&'a self, mut core: Guard<'a>, awaited_posts: &[AwaitedPosts]) -> (Guard<'a>, bool) {
        core.is_polled = true;
        drop(core);
        let mut events = Vec::new();
        let mut poller = self.poller.lock().unwrap_or_else(PoisonError::into_inner);
        let (started, mut looks) = (Instant::now(), 0);
        let result = self.meter.time(ProfilePart::Wait, || {
            while started.elapsed() < PATIENCE {
                let is_posted = awaited_posts.iter().any(AwaitedPosts::is_posted);
                if is_posted || poller.wait(Some(Duration::ZERO), &mut events)? || !events.is_empty() {
                    return Ok(true);
                }
                if !self.has_own_processor || looks >= LOOKS_ALONE {
                    thread::yield_now();
                }
                looks += 1;
            }
            Ok(false)
        });
        drop(poller);
        let core = self.heard(events, result.as_ref().err());
        (core, result.unwrap_or(true))
    }

    /// The core, once the transport knows what the event queue had.
    fn heard(&self, events: Vec<Event>, refused: Option<&io::Error>) -> Guard<'_> {
        let mut core = self.lock();
        core.is_polled = false;
        core.link_driver.transport_mut().serve(self.now(), events);
        if let Some(error) = refused {
            core.link_driver.abort(&format!("the operating system refused to wait for its sockets: {error}"));
        }
        core
    }

    fn make_way<'a>(&self, core: Guard<'a>) -> Guard<'a> {
        self.meter.time(ProfilePart::Wait, || core.make_way())
    }

    pub(super) fn poll<'a>(&'a self, mut core: Guard<'a>, timeout: Option<Duration>) -> Guard<'a> {
        core.is_polled = true;
        // Whoever waits for an operation is back at work sooner if it does not sleep first; the progress thread would take the
        // processor from the caller that computes.
        let spin = if core.unattended.is_empty() { self.spin } else { Duration::ZERO };
        drop(core);
        let mut events = Vec::new();
        let waited = self.meter.time(ProfilePart::Wait, || self.wait_for_events(spin, timeout, &mut events));
        self.heard(events, waited.err().as_ref())
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
        let mut looks = 0;
        while started.elapsed() < spin {
            let is_woken = poller.wait(Some(Duration::ZERO), events)?;
            if is_woken || !events.is_empty() {
                return Ok(());
            }
            // The rank that is waited for may need this processor, whatever was thought at the start.
            if !self.has_own_processor || looks >= LOOKS_ALONE {
                thread::yield_now();
            }
            looks += 1;
        }
        poller.wait(timeout, events).map(|_| ())
    }

    /// The job has failed: tells the peers, gives up all memory, and returns the error.
    pub(super) fn fail<'a>(&'a self, mut core: Guard<'a>) -> Error {
        loop {
            if let JobState::Failed(error) = &core.state {
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
            if core.unattended.is_empty() && !core.has_left_over() {
                if !core.is_polled {
                    // Somebody else has to wait for the sockets now.
                    self.tell_others(&mut core);
                }
                core.wait_on(&self.work, None);
            } else {
                core = self.drive(core, None);
            }
        }
    }
}
