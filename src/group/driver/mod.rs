//! Drives the pump: joins it to the clock and to the threads that wait for it.
//!
//! There is one core, the pump and what became of its operations, and one event queue. Whoever waits for an operation
//! turns the pump itself, so that a blocking collective is not handed from thread to thread; of several who wait, one
//! waits for the sockets and the others for it. Operations that nobody waits for are driven by the progress thread, which
//! is started with the first of them and sleeps while there are none.

mod core;
mod guard;
mod hierarchical;
mod shared;
mod shm;
mod shm_counters;
mod takeover;

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use self::core::{Core, JobState, PollProgress};
use self::guard::Lock;
pub(super) use self::hierarchical::{Block, HierarchicalOperation};
use self::shared::DriverShared;
use super::hosts::HostExecutor;
use super::link_driver::{LinkDriver, OperationBuffers};
use super::memory::{self, BufferAccess, Memory};
use super::profile::{Meter, work_in_background};
use super::shm_executor::ShmRequest;
use super::{Error, Interrupt, Statistics};
use crate::engine::{Begin, Envelope, OpId, Pattern, Timestamp};
use crate::schedule::Schedule;
use crate::transport::scheduling::request_short_slices;
use crate::transport::tcp::TcpTransport;
use crate::types::Rank;

/// How long a thread that waits for the sockets stays awake: longer than short messages take on one host, and than it takes to
/// fall asleep and to wake up. Ten times as long gains nothing that can be measured, and costs three times as much processor
/// time on a line of 1 Gbit/s. Between looks it gives its processor away.
const SPIN: Duration = Duration::from_micros(20);
/// How long a closing group waits for its peers' last words.
const PART_TIMEOUT: Duration = Duration::from_secs(1);
/// How long operations whose handles were dropped may take once the last group is closed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// A pump over TCP, the clock and the threads that drive it. The last one who drops it closes all links in order.
pub(super) struct Driver {
    shared: Arc<DriverShared>,
    progress: Mutex<Option<JoinHandle<()>>>,
}

/// An operation to begin.
pub(super) enum Submission {
    /// A collective, with ranks of the world.
    Collective(Schedule, OperationBuffers),
    /// A collective in shared memory, with the ranks of the world that take part in it.
    AtDesk(HostExecutor, ShmRequest, Memory),
    /// A collective by hosts.
    ByHosts(HierarchicalOperation),
    /// A message to this rank of the world.
    Send(Rank, Memory),
    /// A message that fits.
    Receive(Pattern, Memory),
}

/// An operation's end.
pub(super) struct OperationOutput {
    pub(super) memory: Memory,
    pub(super) envelope: Option<Envelope>,
}

impl Driver {
    pub(super) fn new(
        mut link_driver: LinkDriver<TcpTransport>,
        epoch: Instant,
        has_own_processor: bool,
        interrupt: Option<Interrupt>,
    ) -> io::Result<Self> {
        let poller = link_driver.transport_mut().take_poller().ok_or(io::ErrorKind::NotConnected)?;
        let core = Core::new(link_driver);
        let shared = Arc::new(DriverShared {
            waker: poller.waker(),
            meter: core.link_driver.meter().clone(),
            has_failed: Arc::clone(&core.has_failed),
            shm_counters: Arc::clone(&core.shm_counters),
            core: Lock::new(core),
            poller: Mutex::new(poller),
            changed: Condvar::new(),
            work: Condvar::new(),
            epoch,
            spin: SPIN,
            has_own_processor,
            interrupt,
        });
        Ok(Self { shared, progress: Mutex::new(None) })
    }

    /// Sends on so many of each link's connections.
    pub(super) fn use_streams(&self, count: u8) {
        self.shared.lock().link_driver.transport_mut().use_streams(count);
    }

    /// Goes on with one connection for each link.
    pub(super) fn use_single_connection(&self) {
        self.shared.lock().link_driver.transport_mut().use_single_connection();
    }

    pub(super) fn statistics(&self) -> Statistics {
        let core = self.shared.lock();
        let counters = core.link_driver.counters();
        let under_way =
            core.busy_since.map_or(Duration::ZERO, |since| self.shared.now().saturating_sub(since));
        let mut statistics = Statistics {
            bytes_sent: counters.bytes_sent,
            bytes_received: counters.bytes_received,
            communication: core.statistics.communication + under_way,
            ..core.statistics
        };
        core.shm_counters.add_to(&mut statistics);
        statistics
    }

    /// The sockets that are open now, by their numbers.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        self.shared.lock().link_driver.transport().descriptors()
    }

    /// What measures where time goes.
    pub(super) fn meter(&self) -> &Meter {
        &self.shared.meter
    }

    /// Opens a link before the first operation needs it.
    pub(super) fn connect(&self, peer: Rank) {
        let now = self.shared.now();
        self.shared.lock().link_driver.connect(now, peer);
    }

    /// Runs an operation on a caller's buffer to its end.
    pub(super) fn run<'a>(
        &self,
        begin: Begin,
        bytes: impl Into<BufferAccess<'a>>,
        submission: impl FnOnce(Memory) -> Submission,
    ) -> Result<Option<Envelope>, Error> {
        let started = self.shared.now();
        let result = memory::lend(bytes, |memory| {
            let id = self.begin(begin, submission(memory), true)?;
            let outcome = self.take_over_driving(id);
            outcome.map_or(Ok(None), |outcome| outcome.map(|outcome| outcome.envelope))
        });
        self.expose(started);
        result
    }

    /// Begins an operation that goes on by itself; [`Driver::wait`] gives its outcome.
    pub(super) fn submit(&self, begin: Begin, submission: Submission) -> Result<OpId, Error> {
        self.ensure_progress()?;
        self.begin(begin, submission, false)
    }

    /// Begins an operation; whoever attends to it waits for it at once.
    pub(super) fn begin(
        &self,
        begin: Begin,
        submission: Submission,
        is_attended: bool,
    ) -> Result<OpId, Error> {
        // Whatever becomes of the operation, a function of the program's own outlives the lock, which its drop may take.
        let _kernels = match &submission {
            Submission::Collective(_, work) => work.kernels.clone(),
            Submission::AtDesk(_, shm_request, _) => shm_request.kernels.clone(),
            Submission::ByHosts(hierarchical) => hierarchical.kernels.clone(),
            Submission::Send(..) | Submission::Receive(..) => None,
        };
        let mut core = self.shared.lock();
        if let JobState::Failed(error) = &core.state {
            return Err(error.clone());
        }
        // The submission is dropped without the lock.
        if core.link_driver.failure().is_some() {
            return Err(self.shared.fail(core));
        }
        let now = self.shared.now();
        let link_driver = &mut core.link_driver;
        let begun = match submission {
            Submission::Collective(schedule, work) => link_driver.begin(now, begin, schedule, work),
            Submission::AtDesk(place, shm_request, memory) => {
                core.begin_shm(now, begin, place, shm_request, memory)
            }
            Submission::ByHosts(hierarchical) => core.begin_hierarchical(now, begin, hierarchical),
            Submission::Send(to, memory) => link_driver.send_message(now, begin, to, memory),
            Submission::Receive(pattern, memory) => link_driver.receive_message(now, begin, pattern, memory),
        };
        let Ok(id) = begun else { return Err(self.shared.fail(core)) };
        core.pending.insert(id);
        core.busy_since.get_or_insert(now);
        core.shm_counters.is_counted.store(true, Ordering::Relaxed);
        if !is_attended {
            core.unattended.insert(id);
            if !core.is_polled {
                self.shared.work.notify_one();
            }
        }
        if core.is_polled {
            // Whoever waits for the sockets does not know of this operation, nor of its deadline.
            let _ = self.shared.waker.wake();
        }
        Ok(id)
    }

    /// Waits for an operation's outcome, until `until` at most.
    pub(super) fn wait(&self, id: OpId, until: Option<Timestamp>) -> Option<Result<OperationOutput, Error>> {
        let started = self.shared.now();
        let takeover = self.shared.take_over_driving(std::iter::once(id));
        let outcome = self.shared.wait(id, until);
        drop(takeover);
        self.expose(started);
        outcome
    }

    /// Waits for the outcome of an operation on memory that the caller has lent, which only a failure of the job gives back
    /// early.
    pub(super) fn take_over_driving(&self, id: OpId) -> Option<Result<OperationOutput, Error>> {
        loop {
            let until = self.shared.next_question();
            let outcome = self.shared.wait(id, until);
            if outcome.is_some() || until.is_none() {
                return outcome;
            }
            if let Some(why) = self.shared.interruption() {
                self.abort(why);
            }
        }
    }

    /// Waits until all operations of one of the lists have ended, until `until` at most.
    pub(super) fn wait_any(&self, lists: &[&[OpId]], until: Option<Timestamp>) -> Option<usize> {
        let started = self.shared.now();
        let ended =
            |core: &mut Core| lists.iter().position(|ids| ids.iter().all(|id| !core.pending.contains(id)));
        let takeover = self.shared.take_over_driving(lists.iter().copied().flatten().copied());
        let index = self.shared.wait_until(until, ended);
        drop(takeover);
        self.expose(started);
        index
    }

    /// The outcome, if there is one already. Does what can be done at once.
    pub(super) fn test(&self, id: OpId) -> bool {
        let mut core = self.shared.lock();
        if core.pending.contains(&id) && matches!(core.poll(self.shared.now()), PollProgress::Progress) {
            self.shared.tell_all(&mut core);
        }
        let has_ended = !core.pending.contains(&id);
        drop(core);
        // Whoever asks again and again must not keep others from the core.
        if !has_ended && self.shared.core.is_contended() {
            thread::yield_now();
        }
        has_ended
    }

    /// The first message that fits and has no receive yet, waited for until `until`.
    pub(super) fn probe(&self, pattern: Pattern, until: Timestamp) -> Result<Option<Envelope>, Error> {
        let mut core = self.shared.lock();
        let now = self.shared.now();
        core.link_driver.set_probing(true);
        // Even who does not wait wants to know what has come: once to hear of it, once to read it.
        for _ in 0..2 {
            core = self.shared.step(core, Some(now));
        }
        drop(core);
        let found = self.shared.wait_until(Some(until), |core| match &core.state {
            JobState::Failed(error) => Some(Err(error.clone())),
            _ => core.link_driver.probe(&pattern).map(Ok),
        });
        self.shared.lock().link_driver.set_probing(false);
        found.transpose()
    }

    /// Nobody wants the outcome any more.
    pub(super) fn forget(&self, id: OpId) {
        self.shared.lock().forget(id, self.shared.now());
    }

    /// Ends a receive that has found no message yet; whether it was one.
    pub(super) fn cancel(&self, id: OpId) -> bool {
        self.shared.lock().cancel(id, self.shared.now())
    }

    /// The group begins nothing more.
    pub(super) fn retire(&self, group: u32) {
        self.shared.lock().link_driver.retire_group(group);
    }

    pub(super) fn abort(&self, message: &str) -> Error {
        let mut core = self.shared.lock();
        core.link_driver.abort(message);
        self.shared.fail(core)
    }

    pub(super) fn now(&self) -> Timestamp {
        self.shared.now()
    }

    /// The caller has waited since `started`.
    fn expose(&self, started: Timestamp) {
        let waited = self.shared.now().saturating_sub(started);
        self.shared.lock().statistics.exposed += waited;
    }

    fn ensure_progress(&self) -> Result<(), Error> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("progress".into()).spawn(move || {
                if let Err(error) = request_short_slices() {
                    log::debug!("the progress thread keeps the turns of other threads: {error}");
                }
                work_in_background();
                shared.progress();
            });
            let refused = |error: io::Error| Error::System { what: "a thread", detail: error.to_string() };
            *progress = Some(thread.map_err(refused)?);
        }
        Ok(())
    }
}

impl Drop for Driver {
    /// Lets what is under way end, says goodbye, or why the job failed, and reads what the peers still say, so that no last
    /// word is lost to a reset.
    ///
    /// A panic is no goodbye: the peers, who may wait for this rank, are told so instead.
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort("its program panicked; look at that rank's own output for where");
        }
        let shared = &self.shared;
        let until = shared.now() + FLUSH_TIMEOUT;
        shared.wait_until(Some(until), |core| core.pending.is_empty().then_some(()));
        let mut core = shared.lock();
        core.is_closing = true;
        shared.work.notify_all();
        shared.tell_others(&mut core);
        drop(core);
        let _ = shared.waker.wake();
        if let Some(thread) = self.progress.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The progress thread drops the driver itself if the caller's function held the last handle: it ends on its own
            // afterwards. It does not panic; if it did, no thread is left to hear of it.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        let deadline = shared.now() + PART_TIMEOUT;
        let mut core = shared.lock();
        while !core.link_driver.part() && shared.now() < deadline {
            let timeout = deadline.saturating_sub(shared.now());
            core = shared.poll(core, Some(timeout));
        }
    }
}
