//! What the threads of a rank share, and how a thread waits for events.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use mio::Waker;

use super::core::Core;
use super::core_lock::{CoreGuard, CoreLock};
use super::poll_time::must_sleep;
use super::primitives::StdPrimitives;
use super::tasks::{AwaitedPosts, OperationOutput};
use super::threads::ThreadedDriver;
use crate::engine::{OpId, Timestamp};
use crate::observe::training_thread::{SpanKind, span};
use crate::runtime::deferred_drop;
use crate::runtime::error::Error;
use crate::runtime::measurements::{Meter, ProfilePart, ShmCounters};
use crate::shm::{QueueSignals, Segment};
use crate::transport::poller::{Event, Poller};
use crate::types::RankMap;

/// The number of polls, which take about 10 us, before a thread also yields its processor between the polls.
const SPINS_BEFORE_YIELD: u32 = 20;

/// The number of times that a thread looks at the queues before it polls for events. So many looks take less time than a poll.
const LOOKS_PER_POLL: u32 = 8;
/// The most times in a row that a thread does not poll for events because a queue has changed.
const SKIPPED_POLLS_MAX: u32 = 16;

/// A waiting thread calls the program's interrupt function at this interval.
pub(super) const INTERRUPT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A function that a thread calls about twenty times a second while it waits for an operation. If the function returns
/// true, this rank aborts the job. Bindings need it for languages whose signal handlers run in the waiting thread itself.
pub type Interrupt = fn() -> bool;

pub(super) type LockedCore<'a> = CoreGuard<'a, Core, StdPrimitives>;

/// How a thread waits for events: it polls the posts, the queues and the sockets for the time `spin`. Then it sleeps if it is
/// `ready_to_sleep`, in all at most for `timeout`.
pub(super) struct EventWait {
    posts: Vec<AwaitedPosts>,
    signals: Option<Arc<JobSignals>>,
    spin: Duration,
    ready_to_sleep: bool,
    timeout: Option<Duration>,
}

pub(super) struct FoundEvents {
    events: Vec<Event>,
    /// Whether there may be work, or why waiting has failed.
    has_work: io::Result<bool>,
    /// How long the thread has waited, if it was ready to sleep.
    waited: Option<Duration>,
}

/// What the threads that share the core need. [`ThreadedDriver`] says how they take turns.
pub(super) struct DriverShared {
    pub(super) core: CoreLock<Core, StdPrimitives>,
    /// The event queue. The thread that holds this lock waits for the sockets.
    pub(super) poller: Mutex<Poller>,
    /// The number of times that the thread that waits has not polled for events because a queue has changed.
    pub(super) skipped_polls: AtomicU32,
    /// The ranks of this host, from when on messages to them go through queues.
    pub(super) local_peers: OnceLock<LocalPeers>,
    pub(super) waker: Arc<Waker>,
    pub(super) epoch: Instant,
    /// Whether this host has at least one processor for each of its ranks.
    pub(super) has_own_processor: bool,
    pub(super) shm_spin_time: Duration,
    pub(super) interrupt: Option<Interrupt>,
    /// Whether the job has failed and the peers have been told.
    pub(super) has_failed: Arc<AtomicBool>,
    pub(super) meter: Meter,
    /// Statistics of operations in shared memory that run without the core's lock.
    pub(super) shm_counters: Arc<ShmCounters>,
}

/// What a waiting thread looks at to learn of changes of the queues.
type JobSignals = QueueSignals<Segment>;

/// The other ranks of this host, and the queues between them and this rank.
pub(super) struct LocalPeers {
    pub(super) signals: Arc<JobSignals>,
    pub(super) numbers: RankMap<usize>,
}

impl DriverShared {
    /// Calls the interrupt function. Returns the reason why the waiting thread should abort the job, or `None`. The caller must
    /// not hold a lock. A panic is also such a reason, because it must not unwind while the operation uses the buffer.
    pub(super) fn check_interrupt(&self) -> Option<&'static str> {
        match catch_unwind(self.interrupt?) {
            Ok(is_interrupted) => {
                is_interrupted.then_some("it was interrupted while it waited for other ranks")
            }
            Err(_) => Some("its interrupt function panicked while it waited for other ranks"),
        }
    }

    /// Waits for the result of an operation, at most until the time `until`. The caller has waited since `started`.
    pub(super) fn wait<'a>(
        &'a self,
        core: LockedCore<'a>,
        id: OpId,
        started: Timestamp,
        until: Option<Timestamp>,
    ) -> Option<Result<OperationOutput, Error>> {
        self.wait_and_count(core, &[id], started, until, |core| {
            let result = core.results.remove(&id)?;
            if result.as_ref().is_ok_and(|output| output.envelope.is_some()) {
                core.poll_time.record_received_message();
            }
            Some(result)
        })
    }

    /// Like [`ThreadedDriver::drive_until`]. Counts the time since `started` as time in which the caller has waited.
    pub(super) fn wait_and_count<'a, R>(
        &'a self,
        core: LockedCore<'a>,
        ids: &[OpId],
        started: Timestamp,
        until: Option<Timestamp>,
        find: impl FnMut(&mut Core) -> Option<R>,
    ) -> Option<R> {
        let span = self.meter.recorder().map(|_| span(SpanKind::Wait));
        let (mut core, ended, found) = self.drive_until(core, ids, until, find);
        drop(span);
        core.statistics.exposed += ended.saturating_sub(started);
        found
    }

    /// Polls the posts, the queues and the sockets for the time `spin`. Returns whether there may be work.
    fn spin(
        &self,
        poller: &mut Poller,
        (started, spin): (Instant, Duration),
        (posts, signals): (&[AwaitedPosts], Option<&JobSignals>),
        events: &mut Vec<Event>,
    ) -> io::Result<bool> {
        let looks = if posts.is_empty() { LOOKS_PER_POLL } else { 1 };
        let (mut spins, mut polled) = (0, Duration::ZERO);
        let are_posted = |awaited: &AwaitedPosts| {
            awaited.ranks.indices().all(|rank| awaited.posts.has_posted(rank, awaited.round))
        };
        while polled < spin {
            let is_posted = posts.iter().any(are_posted);
            // Without queues, nothing changes.
            let has_changed = signals.is_some_and(|signals| {
                (0..looks).any(|_| {
                    std::hint::spin_loop();
                    signals.have_changed()
                })
            });
            if is_posted || self.skips_poll(has_changed) {
                return Ok(true);
            }
            if poller.wait(Some(Duration::ZERO), events)? || !events.is_empty() || has_changed {
                return Ok(true);
            }
            let polled_before = mem::replace(&mut polled, started.elapsed());
            if posts.is_empty() && must_sleep(spin, polled_before, polled) {
                break;
            }
            // Yield after some polls even if each rank should have a processor: the awaited rank may need this one.
            if !self.has_own_processor || spins >= SPINS_BEFORE_YIELD {
                thread::yield_now();
            }
            spins += 1;
        }
        Ok(false)
    }

    /// Sleeps until a socket has an event or a queue has changed, at most for `timeout`.
    fn sleep(
        poller: &mut Poller,
        timeout: Option<Duration>,
        signals: Option<&JobSignals>,
        events: &mut Vec<Event>,
    ) -> io::Result<bool> {
        // Peers wake this rank only while its flag is set.
        if signals.is_some_and(|signals| !signals.mark_asleep_unless_changed()) {
            return poller.wait(Some(Duration::ZERO), events);
        }
        let waited = poller.wait(timeout, events);
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
    pub(super) fn fail<'a>(&'a self, mut core: LockedCore<'a>) -> Error {
        loop {
            if let Some(error) = core.error() {
                return error;
            }
            core = self.drive(core, self.now(), None);
        }
    }
}

impl ThreadedDriver for DriverShared {
    type Core = Core;
    type Primitives = StdPrimitives;
    type Wait = EventWait;
    type Found = FoundEvents;

    fn core(&self) -> &CoreLock<Core, StdPrimitives> {
        &self.core
    }

    fn now(&self) -> Timestamp {
        self.epoch.elapsed()
    }

    fn begin_spin(&self, core: &Core) -> Option<EventWait> {
        let (posts, signals) = (core.awaited_posts(), core.link_driver.transport.signals());
        let (spin, ready_to_sleep, timeout) = (self.shm_spin_time, false, None);
        (!posts.is_empty()).then_some(EventWait { posts, signals, spin, ready_to_sleep, timeout })
    }

    fn begin_sleep(&self, core: &Core, timeout: Option<Duration>) -> EventWait {
        // A thread that waits for its own operation first polls, because waking up takes time. The progress thread does not
        // poll, because it would take the processor from the program's computation.
        let spin = if core.background.is_empty() { core.poll_time.max() } else { Duration::ZERO };
        let (spin, ready_to_sleep) = (timeout.map_or(spin, |timeout| timeout.min(spin)), true);
        let (posts, signals) = (Vec::new(), core.link_driver.transport.signals());
        EventWait { posts, signals, spin, ready_to_sleep, timeout }
    }

    fn wait_for_events(&self, wait: EventWait) -> FoundEvents {
        let EventWait { posts, signals, spin, ready_to_sleep, timeout } = wait;
        let (mut events, started) = (Vec::new(), Instant::now());
        let signals = signals.as_deref();
        // Waiting takes long.
        debug_assert!(
            !deferred_drop::holds_lock(),
            "a thread releases the core before it locks the event queue"
        );
        let has_work = self.meter.time(ProfilePart::Wait, || {
            let mut poller = self.poller.lock().unwrap_or_else(PoisonError::into_inner);
            let has_work = self.spin(&mut poller, (started, spin), (&posts, signals), &mut events)?;
            if ready_to_sleep && !has_work {
                Self::sleep(&mut poller, timeout, signals, &mut events)?;
            }
            Ok(has_work || ready_to_sleep)
        });
        let waited = ready_to_sleep.then(|| started.elapsed());
        FoundEvents { events, has_work, waited }
    }

    fn handle_events(&self, core: &mut Core, found: FoundEvents) -> bool {
        let FoundEvents { events, has_work, waited } = found;
        core.link_driver.transport.sockets.serve(self.now(), events);
        if let Some(waited) = waited {
            core.poll_time.record_wait(waited);
        }
        has_work.unwrap_or_else(|error| {
            let why = format!("the operating system could not wait for sockets: {error}");
            core.link_driver.engine.abort(&why);
            true
        })
    }

    fn interrupt_wait(&self) {
        let _ = self.waker.wake();
    }

    fn measure_wait<R>(&self, wait: impl FnOnce() -> R) -> R {
        self.meter.time(ProfilePart::Wait, wait)
    }
}
