//! Where the time of calls goes, for whoever wants to know: the clock is read for it only while it is switched on.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::schedule::Action;

/// Where the time of a job's operations went on this rank, while that was measured
/// ([`Group::set_profiling`](super::Group::set_profiling)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Profile {
    /// In the threads of the program, within its calls. The rest of a call's time is preparation and completion:
    /// schedules, matching, conversions, locks. The times of several threads are added up.
    pub calls: Spent,
    /// In the background thread that drives asynchronous operations. Work that it does for a waiting caller also
    /// counts as that caller's `wait`.
    pub background: Spent,
}

/// The time of each part of the work. No moment of a thread counts twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// System calls that send. In shared memory: copying into this rank's slot or into others' buffers, and posting.
    pub send: Duration,
    /// System calls that receive. In shared memory: copying from ranks' slots. Also copying data that arrived early.
    pub receive: Duration,
    /// Kernels and functions of the caller that reduce; in shared memory they read ranks' slots and buffers
    /// themselves.
    pub reduce: Duration,
    /// Waiting for peers or for another thread that works for the caller: asleep, polling, or yielding the processor.
    pub wait: Duration,
}

impl Spent {
    /// The difference to an `earlier` reading.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            send: self.send.saturating_sub(earlier.send),
            receive: self.receive.saturating_sub(earlier.receive),
            reduce: self.reduce.saturating_sub(earlier.reduce),
            wait: self.wait.saturating_sub(earlier.wait),
        }
    }

    /// All parts together.
    pub fn total(self) -> Duration {
        self.send + self.receive + self.reduce + self.wait
    }
}

/// A part of the work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ProfilePart {
    Send,
    Receive,
    Reduce,
    Wait,
}

impl ProfilePart {
    /// What is done to elements that have arrived.
    pub(super) fn of(action: Action) -> Self {
        match action {
            Action::Copy => Self::Receive,
            Action::Reduce | Action::ReduceLast => Self::Reduce,
        }
    }
}

/// What the threads of a rank measure with. While it is off it costs a look at a flag that hardly ever changes.
#[derive(Clone, Default)]
pub(super) struct Meter(Arc<ProfileCounters>);

#[derive(Default)]
struct ProfileCounters {
    is_on: AtomicBool,
    calls: PartTimes,
    background: PartTimes,
}

/// Nanoseconds of each [`ProfilePart`].
type PartTimes = [AtomicU64; 4];

thread_local! {
    /// Whether this thread drives what nobody waits for.
    static IN_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// From now on this thread works in the background.
pub(super) fn work_in_background() {
    IN_BACKGROUND.set(true);
}

impl Meter {
    pub(super) fn switch(&self, is_on: bool) {
        self.0.is_on.store(is_on, Ordering::Relaxed);
    }

    pub(super) fn profile(&self) -> Profile {
        let spent = |parts: &PartTimes| {
            let of = |part: ProfilePart| Duration::from_nanos(parts[part as usize].load(Ordering::Relaxed));
            Spent {
                send: of(ProfilePart::Send),
                receive: of(ProfilePart::Receive),
                reduce: of(ProfilePart::Reduce),
                wait: of(ProfilePart::Wait),
            }
        };
        Profile { calls: spent(&self.0.calls), background: spent(&self.0.background) }
    }

    /// When something began; `None` while nobody wants to know.
    pub(super) fn start(&self) -> Option<Instant> {
        self.0.is_on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// What has been going on since then was this part. What comes next begins now: where parts follow each other the clock
    /// is read once between them.
    pub(super) fn end(&self, part: ProfilePart, started: &mut Option<Instant>) {
        if let Some(since) = started {
            let now = Instant::now();
            let parts = if IN_BACKGROUND.get() { &self.0.background } else { &self.0.calls };
            parts[part as usize].fetch_add((now - *since).as_nanos() as u64, Ordering::Relaxed);
            *since = now;
        }
    }

    /// Does what is this part as a whole.
    pub(super) fn time<R>(&self, part: ProfilePart, work: impl FnOnce() -> R) -> R {
        let mut started = self.start();
        let result = work();
        self.end(part, &mut started);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Until the clock has gone on.
    fn work() {
        let started = Instant::now();
        while started.elapsed() < Duration::from_micros(5) {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn what_is_off_counts_nothing() {
        let meter = Meter::default();
        meter.time(ProfilePart::Send, work);
        let mut begun_off = meter.start();
        meter.switch(true);
        meter.end(ProfilePart::Wait, &mut begun_off);
        assert_eq!(meter.profile(), Profile::default());
    }

    #[test]
    fn parts_follow_each_other_without_a_gap() {
        let meter = Meter::default();
        meter.switch(true);
        let all = Instant::now();
        let mut started = meter.start();
        for part in [ProfilePart::Send, ProfilePart::Receive, ProfilePart::Reduce, ProfilePart::Wait] {
            work();
            meter.end(part, &mut started);
        }
        let first = meter.profile().calls;
        assert!(first.total() <= all.elapsed());
        for spent in [first.send, first.receive, first.reduce, first.wait] {
            assert!(spent >= Duration::from_micros(5), "{first:?}");
        }
        meter.time(ProfilePart::Reduce, work);
        let second = meter.profile().calls.since(first);
        assert_eq!(second, Spent { reduce: second.total(), ..Spent::default() });
        assert!(second.reduce >= Duration::from_micros(5));
    }

    #[test]
    fn what_is_done_in_the_background_is_counted_apart() {
        let meter = Meter::default();
        meter.switch(true);
        let background = meter.clone();
        std::thread::spawn(move || {
            work_in_background();
            background.time(ProfilePart::Receive, work);
        })
        .join()
        .unwrap();
        let profile = meter.profile();
        assert_eq!(profile.calls, Spent::default());
        assert!(profile.background.receive >= Duration::from_micros(5));
    }
}
