//! The failure of a job, and a failure that the engine does not report yet.

use std::time::Duration;

use super::request::Timestamp;
use crate::types::Rank;
use crate::wire::Cause;

/// After a failure, a rank sends the cause to its peers and receives their reports for at most this time.
pub const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);
/// A rank that leaves the job waits for at most this time until the peers have closed their links.
pub const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time for which a rank that leaves waits until its peers' machines have accepted its last messages. A machine
/// accepts no more bytes while its process does not read and the receive buffer is full.
pub const DELIVERY_TIMEOUT: Duration = Duration::from_mins(1);

/// The failure of the job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The root cause.
    pub cause: Cause,
    /// The rank that reported the cause to this rank; `None` if this rank detected the failure itself.
    pub reported_by: Option<Rank>,
}

/// A peer to which no link could be opened.
pub(super) struct UnreachablePeer {
    pub(super) rank: Rank,
    pub(super) detail: String,
    /// The time at which the engine reports the peer as lost.
    pub(super) report_at: Timestamp,
}
