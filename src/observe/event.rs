//! An operation in the log of a rank.

use std::time::Duration;

use crate::types::{Contract, Rank, Site};

/// What is known of an operation when it is submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperationStart {
    /// The number of the group in the job.
    pub(crate) group: u32,
    pub(crate) contract: Contract,
    pub(crate) direction: Direction,
    /// The line of the program that called the operation.
    pub(crate) site: Site,
    /// The time of the call, since the start of the recorder.
    pub(crate) submitted: Duration,
}

/// The direction in which data move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// The operation is a collective.
    Collective,
    /// The operation sends a message to this rank of the job.
    To(Rank),
    /// The operation receives a message from this rank of the job; `None` if any rank may send it.
    From(Option<Rank>),
}

/// The number of an event in the log of a rank. Events are numbered from 0 in the order in which they are submitted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct EventNumber(pub(super) u64);

/// An operation in the log.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct RecordedEvent {
    pub(crate) number: EventNumber,
    pub(crate) group: u32,
    /// The number of the collective in its group, counted from 0. `None` for messages, and if there are too many groups.
    pub(crate) sequence: Option<u64>,
    pub(crate) contract: Contract,
    pub(crate) direction: Direction,
    /// `None` if the program has too many different lines that call operations.
    pub(crate) site: Option<Site>,
    pub(crate) submitted: Duration,
    /// When the rank began to execute the operation; `None` if it has not.
    pub(crate) begun: Option<Duration>,
    /// When the operation ended; `None` if it has not.
    pub(crate) finished: Option<Duration>,
    pub(crate) status: EventStatus,
}

/// The state of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EventStatus {
    Active,
    Completed,
    Failed,
    Cancelled,
}

impl EventStatus {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}
