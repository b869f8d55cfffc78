//! Connects the link driver to the clock and to the threads of the program.
//!
//! A driver has one core (the link driver and the results of its operations) and one event queue. The thread that waits for
//! an operation also drives the event loop, so a blocking collective needs no second thread. If several threads wait, one of
//! them waits for the sockets, and the others wait for this thread. The progress thread drives the operations for which no
//! thread waits. It starts with the first such operation, and sleeps while there are none.

mod blocking;
mod core;
mod core_lock;
mod direct;
mod encoded;
mod link_stages;
mod poll_time;
mod primitives;
mod shared;
mod shm;
mod stages;
mod tasks;
mod threads;

use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) use self::core::Core;
#[cfg(test)]
pub(crate) use self::core_lock::{CoreGuard, DrivenCore};
pub(crate) use self::core_lock::{CoreLock, PollProgress};
#[cfg(test)]
pub(crate) use self::primitives::Primitives;
pub use self::shared::Interrupt;
use self::shared::{DriverShared, INTERRUPT_CHECK_INTERVAL, LocalPeers, LockedCore};
use self::tasks::SHM_SPIN_TIME;
pub(crate) use self::tasks::{BegunShort, OperationOutput, Submission};
pub(crate) use self::threads::ThreadedDriver;
#[cfg(test)]
pub(crate) use self::{
    blocking::{fail_because, send_wake_frames},
    tasks::RoundsKey,
};
use super::buffer::BufferAccess;
use super::error::Error;
use super::measurements::{Meter, Statistics, mark_background_thread};
use super::memory::{self, Memory};
use crate::engine::{
    DELIVERY_TIMEOUT, DISCONNECT_TIMEOUT, Envelope, OpId, OperationRequest, Pattern, Timestamp,
};
use crate::transport::scheduling::request_short_slices;

/// After the last group is closed: the maximum time for which the driver waits for operations that are still active.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// If more ranks share a processor, a rank in shared memory polls no longer than with this number.
const RANKS_PER_PROCESSOR_MAX: u32 = 64;
/// A rank that leaves looks this often whether its last messages have been accepted.
const DELIVERY_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A link driver over TCP, the clock and the threads that drive it. Dropping the driver closes all links.
pub(crate) struct Driver {
    shared: Arc<DriverShared>,
    progress_thread: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    pub(crate) fn new(
        mut core: Core,
        epoch: Instant,
        ranks_per_processor: u32,
        interrupt: Option<Interrupt>,
    ) -> io::Result<Self> {
        let poller =
            core.link_driver.transport.sockets.listener.poller.take().ok_or(io::ErrorKind::NotConnected)?;
        let shared = Arc::new(DriverShared {
            waker: Arc::clone(&poller.waker),
            meter: core.link_driver.operations.meter.clone(),
            has_failed: Arc::clone(&core.has_failed),
            shm_counters: Arc::clone(&core.shm_counters),
            core: CoreLock::new(core),
            poller: Mutex::new(poller),
            skipped_polls: AtomicU32::new(0),
            local_peers: OnceLock::new(),
            epoch,
            has_own_processor: ranks_per_processor <= 1,
            shm_spin_time: SHM_SPIN_TIME * ranks_per_processor.clamp(1, RANKS_PER_PROCESSOR_MAX),
            interrupt,
        });
        Ok(Self { shared, progress_thread: Mutex::new(None) })
    }

    pub(crate) fn core(&self) -> LockedCore<'_> {
        self.shared.lock()
    }

    /// Sends to the other ranks of this host through the queues from now on.
    pub(crate) fn change_over_to_queues(&self) {
        let mut core = self.shared.lock();
        let numbers = core.link_driver.transport.change_over();
        if let Some(signals) = core.link_driver.transport.signals() {
            self.shared.local_peers.get_or_init(|| LocalPeers { signals, numbers });
        }
        // A message takes so little time that sleeping would take most of it.
        core.adapt_polling();
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let core = self.shared.lock();
        let current = core.busy_since.map_or(Duration::ZERO, |since| self.shared.now().saturating_sub(since));
        let mut statistics = core.statistics;
        statistics.communication += current;
        for counters in core.link_driver.link_bytes() {
            statistics.bytes_sent += counters.bytes_sent;
            statistics.bytes_received += counters.bytes_received;
        }
        core.shm_counters.add_to(&mut statistics);
        statistics
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.shared.meter
    }

    pub(crate) fn run<'a>(
        &self,
        request: OperationRequest,
        bytes: impl Into<BufferAccess<'a>>,
        submission: impl FnOnce(Memory) -> Submission,
    ) -> Result<Option<Envelope>, Error> {
        memory::lend(bytes, |memory| {
            let submission = submission(memory);
            let started = self.shared.now();
            let (core, id) = self.begin(started, request, submission, true)?;
            let result = self.wait_for_borrowed(core, id, started);
            result.map_or(Ok(None), |result| result.map(|output| output.envelope))
        })
    }

    pub(crate) fn submit(&self, request: OperationRequest, submission: Submission) -> Result<OpId, Error> {
        self.ensure_progress_thread()?;
        self.begin(self.shared.now(), request, submission, false).map(|(_, id)| id)
    }

    /// Begins an operation, and returns the locked core. If `is_awaited` is true, the progress thread does not drive the
    /// operation, and the caller waits for it: with [`Driver::wait_for_borrowed`] if it works on a borrowed buffer.
    pub(crate) fn begin(
        &self,
        now: Timestamp,
        request: OperationRequest,
        submission: Submission,
        is_awaited: bool,
    ) -> Result<(LockedCore<'_>, OpId), Error> {
        let mut core = self.shared.lock();
        // This return releases the lock before this function drops the submission.
        if core.link_driver.engine.failure().is_some() {
            return Err(self.shared.fail(core));
        }
        let Some(id) = core.begin(now, request, submission, is_awaited) else {
            return Err(self.shared.fail(core));
        };
        self.shared.announce_operation(&core, is_awaited);
        Ok((core, id))
    }

    pub(crate) fn wait(&self, id: OpId) -> Option<Result<OperationOutput, Error>> {
        let started = self.shared.now();
        self.shared.wait(self.shared.lock(), id, started, None)
    }

    /// Waits for an operation on a borrowed buffer. It uses the buffer until it ends, so an interrupt must fail the job.
    /// `started` is the time since which the caller has waited.
    pub(crate) fn wait_for_borrowed<'a>(
        &'a self,
        core: LockedCore<'a>,
        id: OpId,
        started: Timestamp,
    ) -> Option<Result<OperationOutput, Error>> {
        self.wait_with_interrupts(core, started, |core, started, until| {
            self.shared.wait(core, id, started, until)
        })
    }

    /// Calls `wait` until it returns a value. Between the calls, aborts the job if the program has been interrupted.
    fn wait_with_interrupts<'a, R>(
        &'a self,
        mut core: LockedCore<'a>,
        mut started: Timestamp,
        mut wait: impl FnMut(LockedCore<'a>, Timestamp, Option<Timestamp>) -> Option<R>,
    ) -> Option<R> {
        loop {
            let until = self.shared.interrupt.map(|_| started + INTERRUPT_CHECK_INTERVAL);
            let found = wait(core, started, until);
            if found.is_some() || until.is_none() {
                return found;
            }
            if let Some(why) = self.shared.check_interrupt() {
                self.abort(why);
            }
            (core, started) = (self.shared.lock(), self.shared.now());
        }
    }

    /// Waits until any of the operations has ended, and returns its index. Returns `None` if none has ended at the time `until`.
    pub(crate) fn wait_any(&self, ids: &[OpId], until: Option<Timestamp>) -> Option<usize> {
        let started = self.shared.now();
        let ended = |core: &mut Core| ids.iter().position(|id| !core.active_ids.contains(id));
        self.shared.wait_and_count(self.shared.lock(), ids, started, until, ended)
    }

    /// Does all work of the job that needs no waiting. Returns whether the operation `id` has ended.
    pub(crate) fn test(&self, id: OpId) -> bool {
        let mut core = self.shared.lock();
        if core.active_ids.contains(&id)
            && matches!(self.shared.poll(&mut core, self.shared.now()), PollProgress::Progress)
        {
            self.shared.wake_all(&mut core);
        }
        let has_ended = !core.active_ids.contains(&id);
        drop(core);
        // A thread that calls this method in a loop must let other threads take the lock.
        if !has_ended && self.shared.core.is_contended() {
            thread::yield_now();
        }
        has_ended
    }

    /// Waits until the time `until` for a message that fits the pattern and that no receive has matched. Returns its envelope.
    pub(crate) fn probe(&self, pattern: Pattern, until: Timestamp) -> Result<Option<Envelope>, Error> {
        let mut core = self.shared.lock();
        let now = self.shared.now();
        core.link_driver.probing_threads += 1;
        // Messages that have already come must be found. The first call gets the event, and the second call reads the socket.
        for _ in 0..2 {
            core = self.shared.drive_once(core, now, Some(now));
        }
        let (mut core, _, found) =
            self.shared.drive_until(core, &[], Some(until), |core| match core.error() {
                Some(error) => Some(Err(error)),
                None => core.link_driver.engine.probe(&pattern).map(Ok),
            });
        core.link_driver.probing_threads -= 1;
        found.transpose()
    }

    /// Fails the job because the program of this rank aborts it. `message` is the reason.
    pub(crate) fn abort(&self, message: &str) -> Error {
        let mut core = self.shared.lock();
        core.link_driver.engine.abort(message);
        self.shared.fail(core)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.shared.now()
    }

    /// Waits until the machines of the peers have accepted everything that this rank has sent. The kernel would discard the rest
    /// if a peer sent a frame after the socket is closed.
    fn deliver_last_messages(&self) {
        let shared = &self.shared;
        let deadline = shared.now() + DELIVERY_TIMEOUT;
        let mut core = shared.lock();
        while core.link_driver.engine.failure().is_none() {
            let peers = core.link_driver.peers_with_undelivered_bytes();
            if peers.is_empty() {
                return;
            }
            if shared.now() >= deadline {
                let limit = DELIVERY_TIMEOUT.as_secs();
                log::warn!(
                    "the last messages to the ranks {peers:?} may be lost: they were not read within {limit} s"
                );
                return;
            }
            // An acknowledgement is no event.
            core = shared.wait_for_sockets(core, Some(DELIVERY_CHECK_INTERVAL));
            core.link_driver.disconnect();
        }
    }

    fn ensure_progress_thread(&self) -> Result<(), Error> {
        let mut progress_thread = self.progress_thread.lock().unwrap_or_else(PoisonError::into_inner);
        if progress_thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("progress".into()).spawn(move || {
                if let Err(error) = request_short_slices() {
                    log::debug!("the progress thread runs with the default time slices: {error}");
                }
                mark_background_thread();
                shared.run_progress_thread();
            });
            let refused = |error: io::Error| Error::System { what: "a thread", detail: error.to_string() };
            *progress_thread = Some(thread.map_err(refused)?);
        }
        Ok(())
    }
}

impl Drop for Driver {
    /// Waits for the active operations, sends each peer a goodbye or the failure, and closes the links. If the program panics,
    /// the job is aborted instead, because the peers may wait for this rank.
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort("its program panicked; the output of that rank shows where");
        }
        let shared = &self.shared;
        let until = shared.now() + FLUSH_TIMEOUT;
        let is_idle = |core: &mut Core| core.active_ids.is_empty().then_some(());
        drop(shared.drive_until(shared.lock(), &[], Some(until), is_idle));
        shared.end_progress_thread();
        if let Some(thread) = self.progress_thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // If a function of the user held the last handle, the progress thread itself drops the driver, and then ends.
            // A panic of the progress thread is ignored, because there is no thread to which it could be reported.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        let deadline = shared.now() + DISCONNECT_TIMEOUT;
        let mut core = shared.lock();
        while !core.link_driver.disconnect() && shared.now() < deadline {
            let timeout = deadline.saturating_sub(shared.now());
            core = shared.wait_for_sockets(core, Some(timeout));
        }
        drop(core);
        self.deliver_last_messages();
    }
}
