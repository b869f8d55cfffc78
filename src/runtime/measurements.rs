//! What a job measures on a rank: statistics, and the profile of how long the operations sent, received, reduced and waited. The
//! timeline gets the same parts. The clock is read for them only while the profile or a timeline is on.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::observe::recorder::Recorder;
use crate::schedule::Action;
use crate::types::Rank;

/// Operations on at most this number of bytes are short.
pub(crate) const SHORT_BYTES: usize = 4 << 10;
/// The same for messages. To read the clock for a message of 64 KiB would take a few percent of its time.
pub(crate) const SHORT_MESSAGE_BYTES: usize = 64 << 10;
/// One of this number of short operations is timed, and its time counts for all of them. A prime number, so that a program which
/// repeats a few operations does not always time the same one.
const SAMPLE_INTERVAL: u64 = 31;

/// Statistics of a job on this rank, in all groups of the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// The number of completed operations.
    pub operations: u64,
    /// The bytes that this rank sent, with frame headers.
    pub bytes_sent: u64,
    /// The bytes that this rank received, with frame headers.
    pub bytes_received: u64,
    /// The number of `f32` elements that this rank encoded and sent, once for each receiver.
    pub encoded_elements: u64,
    /// The bytes of these elements on the wire, without frame headers.
    pub encoded_bytes: u64,
    /// The time during which at least one operation was active, including the wait for slower ranks. Of 31 short operations in
    /// shared memory, only one is timed, and its time counts 31 times.
    pub communication: Duration,
    /// The part of the communication time in which callers waited for operations, and so did no other work.
    pub exposed: Duration,
}

/// The bytes that one link of this rank has carried, with frame headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkBytes {
    /// The rank, in the whole job, at the other end of the link.
    pub peer: Rank,
    /// The bytes that this rank sent.
    pub bytes_sent: u64,
    /// The bytes that this rank received.
    pub bytes_received: u64,
}

/// Counters of operations in shared memory, counted without the lock of the core, which may take longer than a short operation.
#[derive(Default)]
pub(crate) struct ShmCounters {
    operations: AtomicU64,
    exposed_ns: AtomicU64,
    communication_ns: AtomicU64,
    /// Whether the core already counts the current time as communication, because another operation is active.
    pub(crate) does_core_count: AtomicBool,
}

pub(crate) struct OperationTimer {
    /// `None` if the operation is not timed.
    began: Option<Instant>,
    /// The number of operations for which the measured time counts.
    weight: u32,
}

impl OperationTimer {
    /// Operations on at most `short_bytes` are short.
    pub(crate) fn new(number: u64, bytes: usize, short_bytes: usize) -> Self {
        let is_short = bytes <= short_bytes;
        let is_timed = !is_short || number.is_multiple_of(SAMPLE_INTERVAL);
        Self { began: is_timed.then(Instant::now), weight: if is_short { SAMPLE_INTERVAL as u32 } else { 1 } }
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.began.is_some()
    }

    /// Marks the operation as long. Every long operation is timed and counts only for itself.
    pub(crate) fn mark_long(&mut self) {
        self.weight = 1;
        self.began.get_or_insert_with(Instant::now);
    }
}

impl ShmCounters {
    pub(crate) fn start_timer(&self, bytes: usize) -> OperationTimer {
        OperationTimer::new(self.operations.load(Ordering::Relaxed), bytes, SHORT_BYTES)
    }

    /// Counts an operation that has ended. A failed operation counts only for the times.
    pub(crate) fn count(&self, timer: &OperationTimer, is_successful: bool) {
        self.operations.fetch_add(u64::from(is_successful), Ordering::Relaxed);
        self.count_time(timer);
    }

    pub(crate) fn count_time(&self, timer: &OperationTimer) {
        let Some(began) = timer.began else { return };
        let add = |counter: &AtomicU64, increment: u64| counter.fetch_add(increment, Ordering::Relaxed);
        let ns = (began.elapsed() * timer.weight).as_nanos() as u64;
        add(&self.exposed_ns, ns);
        if !self.does_core_count.load(Ordering::Relaxed) {
            add(&self.communication_ns, ns);
        }
    }

    pub(crate) fn add_to(&self, statistics: &mut Statistics) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        statistics.operations += read(&self.operations);
        statistics.exposed += Duration::from_nanos(read(&self.exposed_ns));
        statistics.communication += Duration::from_nanos(read(&self.communication_ns));
    }
}

/// How long a job's operations on this rank have sent, received, reduced and waited while the profile was on
/// ([`Group::set_profiling`](crate::Group::set_profiling)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Profile {
    /// The times in the program's threads, within calls of this library. The times of several threads are added up.
    pub calls: Spent,
    /// The times in the background thread. While this thread works for a waiting caller, the caller's time counts as `wait`.
    pub background: Spent,
}

/// The time of each part of the work. The parts of one thread do not overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// System calls that send. In shared memory: copying to this rank's slot or to other ranks' buffers, and posting.
    pub send: Duration,
    /// System calls that receive, and copies of data that arrived early. In shared memory: copying from ranks' slots.
    pub receive: Duration,
    /// Reductions, also by functions of the caller. In shared memory, reductions also read other ranks' slots and buffers.
    pub reduce: Duration,
    /// Waiting for peers or for another thread that works for the caller: asleep, polling, or yielding the processor.
    pub wait: Duration,
}

impl Spent {
    /// Returns the time that was spent since an `earlier` profile.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            send: self.send.saturating_sub(earlier.send),
            receive: self.receive.saturating_sub(earlier.receive),
            reduce: self.reduce.saturating_sub(earlier.reduce),
            wait: self.wait.saturating_sub(earlier.wait),
        }
    }

    /// Returns the sum of all parts.
    pub fn total(self) -> Duration {
        self.send + self.receive + self.reduce + self.wait
    }
}

/// A part of the work of operations. [`Spent`] has a field for each part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProfilePart {
    Send,
    Receive,
    Reduce,
    Wait,
}

impl ProfilePart {
    pub(crate) fn of(action: Action) -> Self {
        match action {
            Action::Copy => Self::Receive,
            Action::Reduce | Action::ReduceLast => Self::Reduce,
        }
    }
}

/// Measures the profile of a job. While the profile is off, a measurement costs only the reading of a flag.
#[derive(Clone, Default)]
pub(crate) struct Meter(Arc<ProfileCounters>);

#[derive(Default)]
struct ProfileCounters {
    is_on: AtomicBool,
    /// Records the operations, and the parts for its timeline; empty if nothing is recorded.
    recorder: OnceLock<Arc<Recorder>>,
    calls: PartTimes,
    background: PartTimes,
}

/// Nanoseconds of each [`ProfilePart`], in the order of its variants.
type PartTimes = [AtomicU64; 4];

thread_local! {
    static IN_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn mark_background_thread() {
    IN_BACKGROUND.set(true);
}

impl Meter {
    pub(crate) fn switch(&self, is_on: bool) {
        self.0.is_on.store(is_on, Ordering::Relaxed);
    }

    pub(crate) fn profile(&self) -> Profile {
        let spent = |parts: &PartTimes| {
            let [send, receive, reduce, wait] =
                parts.each_ref().map(|ns| Duration::from_nanos(ns.load(Ordering::Relaxed)));
            Spent { send, receive, reduce, wait }
        };
        Profile { calls: spent(&self.0.calls), background: spent(&self.0.background) }
    }

    pub(crate) fn start_recording(&self, recorder: &Arc<Recorder>) {
        self.0.recorder.get_or_init(|| Arc::clone(recorder));
    }

    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.0.recorder.get()
    }

    /// Returns whether times are measured, for the profile or for a timeline.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
            || self.recorder().is_some_and(|recorder| recorder.has_timeline())
    }

    /// Returns the current time; `None` while the profile is off and there is no timeline.
    #[inline]
    pub(crate) fn start(&self) -> Option<Instant> {
        self.is_on().then(Instant::now)
    }

    /// Adds the time since `started` to `part`, and sets `started` to the current time, at which the next part begins.
    #[inline]
    pub(crate) fn end(&self, part: ProfilePart, started: &mut Option<Instant>) {
        if let Some(since) = started {
            self.add(part, since, (true, None));
        }
    }

    /// Like [`end`](Self::end), after a transfer. The timeline gets the call only if bytes have moved.
    #[inline]
    pub(crate) fn end_transfer(
        &self,
        part: ProfilePart,
        started: &mut Option<Instant>,
        peer: Rank,
        moved: Option<usize>,
    ) {
        if let Some(since) = started {
            let transfer = moved.map(|bytes| (peer, bytes as u64));
            self.add(part, since, (moved.is_some(), transfer));
        }
    }

    /// Ends a part. The timeline gets it if it `is_visible` and is not a wait, with its transfer.
    #[cold]
    fn add(
        &self,
        part: ProfilePart,
        since: &mut Instant,
        (is_visible, transfer): (bool, Option<(Rank, u64)>),
    ) {
        let (begun, now) = (*since, Instant::now());
        *since = now;
        if self.0.is_on.load(Ordering::Relaxed) {
            let parts = if IN_BACKGROUND.get() { &self.0.background } else { &self.0.calls };
            parts[part as usize].fetch_add((now - begun).as_nanos() as u64, Ordering::Relaxed);
        }
        let name = match part {
            ProfilePart::Send => "send",
            ProfilePart::Receive => "receive",
            ProfilePart::Reduce => "reduce",
            ProfilePart::Wait => return,
        };
        if let (true, Some(recorder)) = (is_visible, self.recorder()) {
            recorder.add_part(name, transfer, (begun, now));
        }
    }

    pub(crate) fn time<R>(&self, part: ProfilePart, work: impl FnOnce() -> R) -> R {
        let mut started = self.start();
        let result = work();
        self.end(part, &mut started);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of the operations are timed, and the sum of their weights.
    fn count_timed(numbers: std::ops::Range<u64>, bytes: usize, is_long: bool) -> (usize, u32) {
        let timers = numbers.map(|number| {
            let mut timer = OperationTimer::new(number, bytes, SHORT_BYTES);
            if is_long {
                timer.mark_long();
            }
            timer
        });
        timers.fold((0, 0), |(count, weight), timer| match timer.began {
            Some(_) => (count + 1, weight + timer.weight),
            None => (count, weight),
        })
    }

    #[test]
    fn the_weights_of_timed_operations_add_up_to_the_number_of_operations() {
        assert_eq!(count_timed(0..310, 64, false), (10, 310));
        assert_eq!(count_timed(0..310, 64, true), (310, 310));
        assert_eq!(count_timed(0..310, SHORT_BYTES + 1, false), (310, 310));
    }
}
