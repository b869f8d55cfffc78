//! A part of the work of operations in the timeline: a step of a schedule.

use std::time::Duration;

use crate::types::Rank;

/// What a rank did in an operation, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OperationPart {
    /// `send`, `receive` or `reduce`.
    pub(crate) name: &'static str,
    /// The rank at the other end of the link, and the bytes that one call has moved; `None` in shared memory and for reductions.
    pub(crate) transfer: Option<(Rank, u64)>,
    pub(crate) begun: Duration,
    pub(crate) ended: Duration,
}
