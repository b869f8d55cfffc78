//! Counters and times of a job.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::types::Rank;

/// Operations on at most this number of bytes are short.
const SHORT_BYTES: usize = 4 << 10;
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
    /// The number of `f32` elements that this rank encoded and sent. An element that is sent to several ranks counts once for
    /// each of them. Without compression, an element takes 4 bytes.
    pub encoded_elements: u64,
    /// The bytes of these elements on the wire, without frame headers.
    pub encoded_bytes: u64,
    /// The time during which at least one operation was active, including the wait for slower ranks. Of 31 short
    /// operations in shared memory, only one is timed, and its time counts 31 times. Such operations take less time
    /// than reading the clock.
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

/// The counters of a job's operations in shared memory, counted without the core's lock. To take the lock and to read the clock
/// may take more time than a short operation.
#[derive(Default)]
pub(crate) struct ShmCounters {
    operations: AtomicU64,
    exposed_ns: AtomicU64,
    communication_ns: AtomicU64,
    /// Whether the core already counts the current time as communication, because another operation is active.
    pub(crate) does_core_count: AtomicBool,
}

/// Measures the time of one operation.
pub(crate) struct OperationTimer {
    /// `None` if the operation is not timed.
    began: Option<Instant>,
    /// The number of operations for which the measured time counts.
    weight: u32,
}

impl OperationTimer {
    /// Starts to time operation `number`, which works on `bytes` bytes.
    pub(crate) fn new(number: u64, bytes: usize) -> Self {
        let is_short = bytes <= SHORT_BYTES;
        let is_timed = !is_short || number.is_multiple_of(SAMPLE_INTERVAL);
        Self { began: is_timed.then(Instant::now), weight: if is_short { SAMPLE_INTERVAL as u32 } else { 1 } }
    }

    /// Returns whether the operation is timed.
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
    /// Starts to time the next operation, which works on `bytes` bytes.
    pub(crate) fn start_timer(&self, bytes: usize) -> OperationTimer {
        OperationTimer::new(self.operations.load(Ordering::Relaxed), bytes)
    }

    /// Counts an operation that has ended. A failed operation counts only for the times.
    pub(crate) fn count(&self, timer: &OperationTimer, is_successful: bool) {
        self.operations.fetch_add(u64::from(is_successful), Ordering::Relaxed);
        self.count_time(timer);
    }

    /// Counts the time of an operation or of a message that has ended.
    pub(crate) fn count_time(&self, timer: &OperationTimer) {
        let Some(began) = timer.began else { return };
        let add = |counter: &AtomicU64, increment: u64| counter.fetch_add(increment, Ordering::Relaxed);
        let ns = (began.elapsed() * timer.weight).as_nanos() as u64;
        add(&self.exposed_ns, ns);
        if !self.does_core_count.load(Ordering::Relaxed) {
            add(&self.communication_ns, ns);
        }
    }

    /// Adds the counters to `statistics`.
    pub(crate) fn add_to(&self, statistics: &mut Statistics) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        statistics.operations += read(&self.operations);
        statistics.exposed += Duration::from_nanos(read(&self.exposed_ns));
        statistics.communication += Duration::from_nanos(read(&self.communication_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of the operations are timed, and the sum of their weights.
    fn count_timed(numbers: std::ops::Range<u64>, bytes: usize, is_long: bool) -> (usize, u32) {
        let timers = numbers.map(|number| {
            let mut timer = OperationTimer::new(number, bytes);
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
