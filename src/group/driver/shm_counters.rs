//! What operations at desks come to, counted without the core's lock: they may take less time than it takes to lock it and to
//! look at the clock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::group::Statistics;

/// Operations on at most so many bytes, which never wait for long, are timed one by one in so many: it counts for the others.
const SHORT_BYTES: usize = 4 << 10;
const SAMPLED: u64 = 8;

/// Counters of a job's operations at desks.
#[derive(Default)]
pub(super) struct ShmCounters {
    operations: AtomicU64,
    exposed_ns: AtomicU64,
    communication_ns: AtomicU64,
    /// Whether the core counts the time as communication already.
    pub(super) is_counted: AtomicBool,
}

/// An operation's watch.
pub(super) struct OperationTimer {
    began: Option<Instant>,
    weight: u32,
}

impl OperationTimer {
    /// For the operation of this number, on so many bytes.
    pub(super) fn new(number: u64, bytes: usize) -> Self {
        let is_short = bytes <= SHORT_BYTES;
        let is_timed = !is_short || number.is_multiple_of(SAMPLED);
        Self { began: is_timed.then(Instant::now), weight: if is_short { SAMPLED as u32 } else { 1 } }
    }

    /// It takes longer: every such one counts for itself.
    pub(super) fn mark_long(&mut self) {
        self.weight = 1;
        self.began.get_or_insert_with(Instant::now);
    }
}

impl ShmCounters {
    /// An operation has ended, well or not.
    pub(super) fn count(&self, timer: &OperationTimer, is_done: bool) {
        let add = |counter: &AtomicU64, more: u64| counter.fetch_add(more, Ordering::Relaxed);
        add(&self.operations, u64::from(is_done));
        let Some(began) = timer.began else { return };
        let ns = (began.elapsed() * timer.weight).as_nanos() as u64;
        add(&self.exposed_ns, ns);
        if !self.is_counted.load(Ordering::Relaxed) {
            add(&self.communication_ns, ns);
        }
    }

    /// Adds what was counted.
    pub(super) fn add_to(&self, statistics: &mut Statistics) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        statistics.operations += read(&self.operations);
        statistics.exposed += Duration::from_nanos(read(&self.exposed_ns));
        statistics.communication += Duration::from_nanos(read(&self.communication_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(numbers: std::ops::Range<u64>, bytes: usize, is_long: bool) -> (usize, u32) {
        let watches = numbers.map(|number| {
            let mut timer = OperationTimer::new(number, bytes);
            if is_long {
                timer.mark_long();
            }
            timer
        });
        watches.fold((0, 0), |(count, weight), timer| match timer.began {
            Some(_) => (count + 1, weight + timer.weight),
            None => (count, weight),
        })
    }

    #[test]
    fn every_operation_counts_once_on_the_whole() {
        assert_eq!(timed(0..80, 64, false), (10, 80));
        assert_eq!(timed(0..80, 64, true), (80, 80));
        assert_eq!(timed(0..80, SHORT_BYTES + 1, false), (80, 80));
    }
}
