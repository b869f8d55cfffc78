//! The profile: how long the operations of a rank send, receive, reduce and wait. The timeline gets the same parts. The clock is
//! read only while the profile or a timeline is on.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::observe::recorder::Recorder;
use crate::schedule::Action;
use crate::types::Rank;

/// How long a job's operations on this rank have sent, received, reduced and waited while the profile was on
/// ([`Group::set_profiling`](crate::Group::set_profiling)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Profile {
    /// The times in the program's threads, within calls of this library. The rest of a call's time is preparation and
    /// completion: schedules, matching, conversions, locks. The times of several threads are added up.
    pub calls: Spent,
    /// The times in the background thread that drives asynchronous operations. While this thread works for a waiting
    /// caller, the caller's time counts as `wait`.
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
    /// Returns the part of the profile to which the time of this action belongs.
    pub(crate) fn of(action: Action) -> Self {
        match action {
            Action::Copy => Self::Receive,
            Action::Reduce | Action::ReduceLast => Self::Reduce,
        }
    }

    /// Returns the name of the part in a timeline; `None` if it is not in the timeline.
    const fn step_name(self) -> Option<&'static str> {
        match self {
            Self::Send => Some("send"),
            Self::Receive => Some("receive"),
            Self::Reduce => Some("reduce"),
            Self::Wait => None,
        }
    }
}

/// Measures the profile of a job. While the profile is off, a measurement costs only the reading of a flag.
#[derive(Clone, Default)]
pub(crate) struct Meter(Arc<ProfileCounters>);

/// The times of a job on this rank, in nanoseconds.
#[derive(Default)]
struct ProfileCounters {
    is_on: AtomicBool,
    /// What also gets the parts, for its timeline.
    recorder: OnceLock<Arc<Recorder>>,
    calls: PartTimes,
    background: PartTimes,
}

/// Nanoseconds of each [`ProfilePart`].
type PartTimes = [AtomicU64; 4];

thread_local! {
    /// Whether this thread is the progress thread.
    static IN_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// Makes the times of this thread count as [`Profile::background`].
pub(crate) fn mark_background_thread() {
    IN_BACKGROUND.set(true);
}

impl Meter {
    /// Switches the profile on or off.
    pub(crate) fn switch(&self, is_on: bool) {
        self.0.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Returns the times that have been measured since the start of the job.
    pub(crate) fn profile(&self) -> Profile {
        let spent = |parts: &PartTimes| {
            let time_of =
                |part: ProfilePart| Duration::from_nanos(parts[part as usize].load(Ordering::Relaxed));
            Spent {
                send: time_of(ProfilePart::Send),
                receive: time_of(ProfilePart::Receive),
                reduce: time_of(ProfilePart::Reduce),
                wait: time_of(ProfilePart::Wait),
            }
        };
        Profile { calls: spent(&self.0.calls), background: spent(&self.0.background) }
    }

    /// Adds the parts to the timeline of `recorder` from now on.
    pub(crate) fn record(&self, recorder: &Arc<Recorder>) {
        self.0.recorder.get_or_init(|| Arc::clone(recorder));
    }

    /// Returns whether times are measured, for the profile or for a timeline.
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed) || self.0.recorder.get().is_some()
    }

    /// Returns the current time; `None` while the profile is off and there is no timeline.
    pub(crate) fn start(&self) -> Option<Instant> {
        self.is_on().then(Instant::now)
    }

    /// Adds the time since `started` to `part`, and sets `started` to the current time. So the clock is read only once between
    /// two parts that follow each other.
    pub(crate) fn end(&self, part: ProfilePart, started: &mut Option<Instant>) {
        if let Some((begun, ended)) = self.add(part, started) {
            self.add_to_timeline(part, None, (begun, ended));
        }
    }

    /// Like [`end`](Self::end), after a call that has tried to move bytes between this rank and a peer. If it has moved none, the
    /// timeline does not get the call.
    pub(crate) fn end_transfer(
        &self,
        part: ProfilePart,
        started: &mut Option<Instant>,
        peer: Rank,
        moved: Option<usize>,
    ) {
        if let (Some(times), Some(bytes)) = (self.add(part, started), moved) {
            self.add_to_timeline(part, Some((peer, bytes as u64)), times);
        }
    }

    /// Adds the time since `started` to the profile, sets `started` to the current time, and returns both times.
    fn add(&self, part: ProfilePart, started: &mut Option<Instant>) -> Option<(Instant, Instant)> {
        let since = started.as_mut()?;
        let (begun, now) = (*since, Instant::now());
        if self.0.is_on.load(Ordering::Relaxed) {
            let parts = if IN_BACKGROUND.get() { &self.0.background } else { &self.0.calls };
            parts[part as usize].fetch_add((now - begun).as_nanos() as u64, Ordering::Relaxed);
        }
        *since = now;
        Some((begun, now))
    }

    fn add_to_timeline(&self, part: ProfilePart, transfer: Option<(Rank, u64)>, times: (Instant, Instant)) {
        if let (Some(name), Some(recorder)) = (part.step_name(), self.0.recorder.get()) {
            recorder.add_part(name, transfer, times);
        }
    }

    /// Runs `work` and adds its time to `part`.
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

    /// Keeps the processor busy for 5 microseconds.
    fn work() {
        let started = Instant::now();
        while started.elapsed() < Duration::from_micros(5) {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_profile_that_is_off_measures_nothing() {
        let meter = Meter::default();
        meter.time(ProfilePart::Send, work);
        let mut started_while_off = meter.start();
        meter.switch(true);
        meter.end(ProfilePart::Wait, &mut started_while_off);
        assert_eq!(meter.profile(), Profile::default());
    }

    #[test]
    fn consecutive_parts_are_measured_without_gaps() {
        let meter = Meter::default();
        meter.switch(true);
        let test_started = Instant::now();
        let mut started = meter.start();
        for part in [ProfilePart::Send, ProfilePart::Receive, ProfilePart::Reduce, ProfilePart::Wait] {
            work();
            meter.end(part, &mut started);
        }
        let first = meter.profile().calls;
        assert!(first.total() <= test_started.elapsed());
        for spent in [first.send, first.receive, first.reduce, first.wait] {
            assert!(spent >= Duration::from_micros(5), "{first:?}");
        }
        meter.time(ProfilePart::Reduce, work);
        let second = meter.profile().calls.since(first);
        assert_eq!(second, Spent { reduce: second.total(), ..Spent::default() });
        assert!(second.reduce >= Duration::from_micros(5));
    }

    #[test]
    fn the_background_thread_is_measured_separately() {
        let meter = Meter::default();
        meter.switch(true);
        let background = meter.clone();
        std::thread::spawn(move || {
            mark_background_thread();
            background.time(ProfilePart::Receive, work);
        })
        .join()
        .unwrap();
        let profile = meter.profile();
        assert_eq!(profile.calls, Spent::default());
        assert!(profile.background.receive >= Duration::from_micros(5));
    }
}
