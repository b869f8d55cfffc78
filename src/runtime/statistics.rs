//! Counters and times of a job.

use std::time::Duration;

/// Statistics of a job on this rank, in all groups of the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// The number of completed operations.
    pub operations: u64,
    /// The bytes that this rank sent, with frame headers.
    pub bytes_sent: u64,
    /// The bytes that this rank received, with frame headers.
    pub bytes_received: u64,
    /// The time during which at least one operation was active, including the wait for slower ranks. Of eight short
    /// operations in shared memory, only one is timed, and its time counts eight times. Such operations take less time
    /// than reading the clock.
    pub communication: Duration,
    /// The part of the communication time in which callers waited for operations, and so did no other work.
    pub exposed: Duration,
}
