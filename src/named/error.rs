//! The errors of named tensors.

use std::fmt;

use crate::group::Error;

/// Why a named tensor has no result.
///
/// All but [`NamedError::Job`] leave the job and all other tensors unaffected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamedError {
    /// The job failed, and with it all tensors; or the call is invalid in any group, such as a sum of located values
    /// or a root that is not in the group.
    #[error(transparent)]
    Job(#[from] Error),
    /// This rank has submitted the name before, and that tensor has no result yet.
    #[error("tensor `{0}` is already in flight on this rank; wait for it, or use another name")]
    InFlight(String),
    /// The name or the tensor exceeds the limit, or too many tensors are in flight.
    #[error("tensor `{name}` cannot be submitted: {reason}")]
    Limit {
        /// The name, or its beginning.
        name: String,
        /// The limit.
        reason: String,
    },
    /// All ranks have submitted it, but with different requests. Every rank's handle gets this error.
    #[error("the ranks do not agree about tensor `{name}`: {asked}")]
    Disagreement {
        /// The name.
        name: String,
        /// The request of each rank, by its number in the job.
        asked: String,
    },
    /// Some ranks have joined, and this operation is not defined without their data. Every rank's handle gets this
    /// error.
    #[error("tensor `{name}` needs data from ranks that have joined: {detail}")]
    WithoutJoined {
        /// The name.
        name: String,
        /// The request, and the ranks that have joined.
        detail: String,
    },
    /// Some ranks have closed and will never submit it. Every rank's handle gets this error.
    #[error("tensor `{name}` will never be complete: {detail}")]
    Left {
        /// The name.
        name: String,
        /// The ranks that have closed.
        detail: String,
    },
    /// This rank has joined, and must not submit tensors until all ranks have joined.
    #[error("this rank has joined and cannot submit tensors until all ranks have joined")]
    HasJoined,
    /// The named tensors of this rank have been closed.
    #[error("the named tensors have been closed")]
    Closed,
}

/// A message of a peer that this rank's state does not allow. It ends the job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Violation(pub(super) String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
