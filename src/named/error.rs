//! What a named tensor can fail with.

use std::fmt;

use crate::group::Error;

/// Why a named tensor has no result.
///
/// All but [`NamedError::Job`] leave the job, and all other tensors, as they were.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamedError {
    /// The job failed, and everything in it; or the call itself is none that a group knows, such as a sum of located
    /// values or a root that is not in the group.
    #[error(transparent)]
    Job(#[from] Error),
    /// This rank has submitted the name before, and that tensor has not been reduced yet.
    #[error("tensor `{0}` is in flight on this rank already; wait for it, or use another name")]
    InFlight(String),
    /// The name or the tensor is longer than it may be, or too many are in flight.
    #[error("tensor `{name}` cannot be submitted: {reason}")]
    Limit {
        /// The name, or its beginning.
        name: String,
        /// Which limit it is.
        reason: String,
    },
    /// All ranks have submitted it, but not the same; every rank's handle gets this.
    #[error("the ranks do not agree about tensor `{name}`: {asked}")]
    Disagreement {
        /// The name.
        name: String,
        /// What each rank asked for, with ranks of the job.
        asked: String,
    },
    /// Some ranks have joined, and what they would contribute to this operation is not known; every rank's handle gets
    /// this.
    #[error("tensor `{name}` cannot do without the ranks that have joined: {detail}")]
    WithoutJoined {
        /// The name.
        name: String,
        /// What was asked for, and who has joined.
        detail: String,
    },
    /// Some ranks have closed and will never submit it; every rank's handle gets this.
    #[error("tensor `{name}` will never be complete: {detail}")]
    Left {
        /// The name.
        name: String,
        /// Who has closed.
        detail: String,
    },
    /// This rank has joined, and nothing may be submitted until all have.
    #[error("this rank has joined, and submits nothing until all ranks have")]
    HasJoined,
    /// The named tensors of this rank have ended.
    #[error("the named tensors have been closed")]
    Closed,
}

/// What a peer has sent that this rank's state does not allow. It ends the job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Violation(pub(super) String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
