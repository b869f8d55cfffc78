//! Drives the pump: joins it to the clock and to the threads that wait for it.
//!
//! There is one core, the pump and what became of its operations, and one event queue. Whoever waits for an operation
//! turns the pump itself, so that a blocking collective is not handed from thread to thread; of several who wait, one
//! waits for the sockets and the others for it. Operations that nobody waits for are driven by the progress thread, which
//! is started with the first of them and sleeps while there are none.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::Waker;

use super::memory::{Loan, Memory};
use super::pump::{Finished, Pump, Turn, Work};
use super::{Error, Statistics};
use crate::engine::{Begin, Envelope, Failure, OpId, Pattern, Timestamp};
use crate::schedule::Schedule;
use crate::transport::poller::Poller;
use crate::transport::tcp::TcpTransport;
use crate::types::Rank;

/// How long a failed operation may take to tell the peers why, and to hear what they know.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a closing group waits for its peers' last words.
const PART_TIMEOUT: Duration = Duration::from_secs(1);
/// How long operations whose handles were dropped may take once the last group is closed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// A pump over TCP, the clock and the threads that drive it. The last one who drops it closes all links in order.
pub(super) struct Driver {
    shared: Arc<Shared>,
    progress: Mutex<Option<JoinHandle<()>>>,
}

/// An operation to begin.
pub(super) enum Submission {
    /// A collective, with ranks of the world.
    Collective(Schedule, Work),
    /// A message to this rank of the world.
    Send(Rank, Memory),
    /// A message that fits.
    Receive(Pattern, Memory),
}

/// An operation's end.
pub(super) struct Outcome {
    pub(super) memory: Memory,
    pub(super) envelope: Option<Envelope>,
}

struct Shared {
    core: Mutex<Core>,
    /// Whoever holds it waits for the sockets.
    poller: Mutex<Poller>,
    waker: Arc<Waker>,
    /// An operation has ended, or nobody waits for the sockets any more.
    changed: Condvar,
    /// There is something to do for the progress thread.
    work: Condvar,
    /// Threads that want the core: whoever turns the pump lets them have it from time to time.
    contenders: AtomicUsize,
    epoch: Instant,
}

struct Core {
    pump: Pump<TcpTransport>,
    state: State,
    /// Operations under way; whether somebody waits for each or it is left to the progress thread.
    pending: BTreeSet<OpId>,
    outcomes: BTreeMap<OpId, Result<Outcome, Error>>,
    /// Operations whose outcome nobody wants any more.
    forgotten: BTreeSet<OpId>,
    is_polled: bool,
    /// Threads that wait for `changed`.
    waiters: usize,
    /// Those of the pending ones that the progress thread is to drive.
    unattended: BTreeSet<OpId>,
    is_closing: bool,
    busy_since: Option<Timestamp>,
    statistics: Statistics,
}

enum State {
    Running,
    /// Telling the peers, until then.
    Failing(Timestamp),
    Failed(Error),
}

impl Driver {
    pub(super) fn new(mut pump: Pump<TcpTransport>, epoch: Instant) -> io::Result<Self> {
        let poller = pump.transport_mut().take_poller().ok_or(io::ErrorKind::NotConnected)?;
        let shared = Arc::new(Shared {
            waker: poller.waker(),
            core: Mutex::new(Core {
                pump,
                state: State::Running,
                pending: BTreeSet::new(),
                outcomes: BTreeMap::new(),
                forgotten: BTreeSet::new(),
                is_polled: false,
                waiters: 0,
                unattended: BTreeSet::new(),
                is_closing: false,
                busy_since: None,
                statistics: Statistics::default(),
            }),
            poller: Mutex::new(poller),
            changed: Condvar::new(),
            work: Condvar::new(),
            contenders: AtomicUsize::new(0),
            epoch,
        });
        Ok(Self { shared, progress: Mutex::new(None) })
    }

    pub(super) fn statistics(&self) -> Statistics {
        let core = self.shared.lock();
        let counters = core.pump.counters();
        let under_way =
            core.busy_since.map_or(Duration::ZERO, |since| self.shared.now().saturating_sub(since));
        Statistics {
            bytes_sent: counters.bytes_sent,
            bytes_received: counters.bytes_received,
            communication: core.statistics.communication + under_way,
            ..core.statistics
        }
    }

    /// Opens a link before the first operation needs it.
    pub(super) fn connect(&self, peer: Rank) {
        let now = self.shared.now();
        self.shared.lock().pump.connect(now, peer);
    }

    /// Runs an operation on a caller's buffer to its end.
    pub(super) fn run(
        &self,
        begin: Begin,
        bytes: &mut [u8],
        submission: impl FnOnce(Memory) -> Submission,
    ) -> Result<Option<Envelope>, Error> {
        let started = self.shared.now();
        // SAFETY: `bytes` is borrowed until this function returns, and it returns only when the operation has ended or
        // all memory has been given up; were it to unwind before that, `guard` would end the process.
        let loan = unsafe { Loan::new(bytes) };
        let guard = NeverUnwinds;
        let result = self.begin(begin, submission(Memory::lent(loan)), true).and_then(|id| {
            let outcome = self.shared.wait(id, None);
            outcome.map_or(Ok(None), |outcome| outcome.map(|outcome| outcome.envelope))
        });
        std::mem::forget(guard);
        self.expose(started);
        result
    }

    /// Begins an operation that goes on by itself; [`Driver::wait`] gives its outcome.
    pub(super) fn submit(&self, begin: Begin, submission: Submission) -> Result<OpId, Error> {
        self.ensure_progress()?;
        self.begin(begin, submission, false)
    }

    fn begin(&self, begin: Begin, submission: Submission, is_attended: bool) -> Result<OpId, Error> {
        let mut core = self.shared.lock();
        if let State::Failed(error) = &core.state {
            return Err(error.clone());
        }
        let now = self.shared.now();
        let pump = &mut core.pump;
        let begun = match submission {
            Submission::Collective(schedule, work) => pump.begin(now, begin, schedule, work),
            Submission::Send(to, memory) => pump.send_message(now, begin, to, memory),
            Submission::Receive(pattern, memory) => pump.receive_message(now, begin, pattern, memory),
        };
        let Ok(id) = begun else { return Err(self.shared.fail(core)) };
        core.pending.insert(id);
        core.busy_since.get_or_insert(now);
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
    pub(super) fn wait(&self, id: OpId, until: Option<Timestamp>) -> Option<Result<Outcome, Error>> {
        let started = self.shared.now();
        let outcome = self.shared.wait(id, until);
        self.expose(started);
        outcome
    }

    /// Waits until one of the operations has ended, until `until` at most.
    pub(super) fn wait_any(&self, ids: &[OpId], until: Option<Timestamp>) -> Option<usize> {
        let started = self.shared.now();
        let ended = |core: &mut Core| ids.iter().position(|id| !core.pending.contains(id));
        let index = self.shared.wait_until(until, ended);
        self.expose(started);
        index
    }

    /// The outcome, if there is one already. Does what can be done at once.
    pub(super) fn test(&self, id: OpId) -> bool {
        let mut core = self.shared.lock();
        if core.pending.contains(&id) && matches!(core.turn(self.shared.now()), Step::Progress) {
            // It may be what others wait for.
            self.shared.changed.notify_all();
            if core.is_polled {
                let _ = self.shared.waker.wake();
            }
        }
        !core.pending.contains(&id)
    }

    /// The first message that fits and has no receive yet, waited for until `until`.
    pub(super) fn probe(&self, pattern: Pattern, until: Timestamp) -> Result<Option<Envelope>, Error> {
        let mut core = self.shared.lock();
        let now = self.shared.now();
        if let Some(source) = pattern.source {
            core.pump.connect(now, source);
        }
        drop(core);
        let found = self.shared.wait_until(Some(until), |core| match &core.state {
            State::Failed(error) => Some(Err(error.clone())),
            _ => core.pump.probe(&pattern).map(Ok),
        });
        found.transpose()
    }

    /// Nobody wants the outcome any more.
    pub(super) fn forget(&self, id: OpId) {
        let mut core = self.shared.lock();
        if core.outcomes.remove(&id).is_none() && core.pending.contains(&id) {
            core.forgotten.insert(id);
        }
    }

    pub(super) fn abort(&self, message: &str) -> Error {
        let mut core = self.shared.lock();
        core.pump.abort(message);
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
            let thread = thread::Builder::new().name("progress".into()).spawn(move || shared.progress());
            let refused = |error: io::Error| Error::System { what: "a thread", detail: error.to_string() };
            *progress = Some(thread.map_err(refused)?);
        }
        Ok(())
    }
}

/// Ends the process if it is dropped: memory of this function's caller is still in use.
struct NeverUnwinds;

impl Drop for NeverUnwinds {
    fn drop(&mut self) {
        eprintln!("ringtrain: a panic inside a collective whose buffer is in use; giving up");
        std::process::abort();
    }
}

impl Shared {
    /// The time since the epoch: the engine's and the transport's clock.
    fn now(&self) -> Timestamp {
        self.epoch.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.contenders.fetch_add(1, Ordering::SeqCst);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.contenders.fetch_sub(1, Ordering::SeqCst);
        core
    }

    fn wait(&self, id: OpId, until: Option<Timestamp>) -> Option<Result<Outcome, Error>> {
        self.wait_until(until, |core| core.outcomes.remove(&id))
    }

    /// Drives the pump until `look` finds something, or until `until`.
    fn wait_until<R>(
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
    fn drive<'a>(&'a self, mut core: MutexGuard<'a, Core>, until: Option<Timestamp>) -> MutexGuard<'a, Core> {
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

    fn poll<'a>(&'a self, mut core: MutexGuard<'a, Core>, timeout: Option<Duration>) -> MutexGuard<'a, Core> {
        core.is_polled = true;
        drop(core);
        let mut events = Vec::new();
        let waited = self.poller.lock().unwrap_or_else(PoisonError::into_inner).wait(timeout, &mut events);
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.is_polled = false;
        core.pump.transport_mut().serve(self.now(), events);
        if let Err(error) = waited {
            core.pump.abort(&format!("the operating system refused to wait for its sockets: {error}"));
        }
        core
    }

    /// The job has failed: tells the peers, gives up all memory, and returns the error.
    fn fail<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> Error {
        loop {
            if let State::Failed(error) = &core.state {
                return error.clone();
            }
            core = self.drive(core, None);
        }
    }

    /// What the progress thread does: drives what is left to it.
    fn progress(&self) {
        let mut core = self.lock();
        loop {
            if core.is_closing {
                return;
            }
            core = if core.unattended.is_empty() {
                self.work.wait(core).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.drive(core, None)
            };
        }
    }
}

/// What a look at the pump has come to.
enum Step {
    /// Something that others may wait for has happened.
    Progress,
    Busy,
    Blocked,
}

impl Core {
    fn turn(&mut self, now: Timestamp) -> Step {
        match &self.state {
            State::Failed(_) => return if self.settle_failed(now) { Step::Progress } else { Step::Blocked },
            State::Failing(deadline) => {
                let is_over = now >= *deadline;
                if !self.pump.notify() && !is_over {
                    return Step::Blocked;
                }
                self.pump.release();
                let error = match self.pump.failure() {
                    Some(Failure { cause, reported_by }) => {
                        Error::Failed { cause: cause.clone(), reported_by: *reported_by }
                    }
                    None => return Step::Blocked,
                };
                self.state = State::Failed(error);
                self.settle_failed(now);
                return Step::Progress;
            }
            State::Running => {}
        }
        let turn = self.pump.turn(now);
        let mut is_progress = false;
        while let Some(Finished { operation, memory, envelope }) = self.pump.take_finished() {
            self.statistics.operations += 1;
            self.settle(operation, now, Ok(Outcome { memory, envelope }));
            is_progress = true;
        }
        match turn {
            Turn::Failed(_) => {
                self.state = State::Failing(now + NOTIFY_TIMEOUT);
                Step::Busy
            }
            _ if is_progress => Step::Progress,
            Turn::Busy => Step::Busy,
            Turn::Blocked => Step::Blocked,
        }
    }

    /// Ends what is pending after the failure; whether there was anything.
    fn settle_failed(&mut self, now: Timestamp) -> bool {
        let State::Failed(error) = &self.state else { return false };
        let error = error.clone();
        let pending: Vec<OpId> = self.pending.iter().copied().collect();
        for &id in &pending {
            self.settle(id, now, Err(error.clone()));
        }
        !pending.is_empty()
    }

    fn settle(&mut self, id: OpId, now: Timestamp, outcome: Result<Outcome, Error>) {
        self.pending.remove(&id);
        self.unattended.remove(&id);
        if !self.forgotten.remove(&id) {
            self.outcomes.insert(id, outcome);
        }
        if self.pending.is_empty()
            && let Some(since) = self.busy_since.take()
        {
            self.statistics.communication += now.saturating_sub(since);
        }
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let failing = match self.state {
            State::Failing(deadline) => Some(deadline),
            _ => None,
        };
        let transport = self.pump.transport().next_deadline();
        failing.into_iter().chain(self.pump.poll_timeout()).chain(transport).min()
    }
}

impl Drop for Driver {
    /// Lets what is under way end, says goodbye, or why the job failed, and reads what the peers still say, so that no last
    /// word is lost to a reset.
    fn drop(&mut self) {
        let shared = &self.shared;
        let until = shared.now() + FLUSH_TIMEOUT;
        shared.wait_until(Some(until), |core| core.pending.is_empty().then_some(()));
        shared.lock().is_closing = true;
        shared.work.notify_all();
        shared.changed.notify_all();
        let _ = shared.waker.wake();
        if let Some(thread) = self.progress.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It does not panic; if it did, there is nobody left to tell.
            let _ = thread.join();
        }
        let deadline = shared.now() + PART_TIMEOUT;
        let mut core = shared.lock();
        while !core.pump.part() && shared.now() < deadline {
            let timeout = deadline.saturating_sub(shared.now());
            core = shared.poll(core, Some(timeout));
        }
    }
}
