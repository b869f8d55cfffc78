//! The errors of named tensors.

use std::fmt;

use crate::group::Error;

/// The error of a call on named tensors.
///
/// A rank *has joined* if it has called [`NamedTensors::join`](super::NamedTensors::join) because it has no more
/// data. All errors but [`NamedError::Job`] leave the job and all other tensors unaffected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamedError {
    /// Either the job has failed, or the arguments of the call are invalid. After the job has failed, no tensor gets a
    /// result. Examples of invalid arguments are a sum of elements of a type with locations (`F32Loc`), and a root that
    /// is not a rank of the group.
    #[error(transparent)]
    Job(#[from] Error),
    /// This rank has already submitted a tensor with this name, and that tensor has no result yet.
    #[error("tensor `{0}` is already in flight on this rank; wait for it, or use another name")]
    InFlight(String),
    /// The name is empty, the name or the tensor is too long, or too many tensors are in flight.
    #[error("tensor `{name}` cannot be submitted: {reason}")]
    Limit {
        /// The name of the tensor, or the beginning of a long name.
        name: String,
        /// A text that names the limit.
        reason: String,
    },
    /// All ranks have submitted the tensor, but with different requests. Every rank's handle returns this error.
    #[error("the ranks do not agree about tensor `{name}`: {requests}")]
    Disagreement {
        /// The name of the tensor.
        name: String,
        /// The request of each rank, with the rank's number in the job.
        requests: String,
    },
    /// The operation needs the data of all ranks, but some ranks have joined. Every rank's handle returns this error.
    #[error("tensor `{name}` needs data from ranks that have joined: {detail}")]
    NeedsJoinedRanks {
        /// The name of the tensor.
        name: String,
        /// The request, and the ranks that have joined.
        detail: String,
    },
    /// Some ranks have closed without submitting the tensor. Every rank's handle returns this error.
    #[error("tensor `{name}` will never be complete: {detail}")]
    RankClosed {
        /// The name of the tensor.
        name: String,
        /// The ranks that have closed.
        detail: String,
    },
    /// This rank has joined and cannot submit tensors until all ranks have joined.
    #[error("this rank has joined and cannot submit tensors until all ranks have joined")]
    HasJoined,
    /// The named tensors of this rank have been closed.
    #[error("the named tensors have been closed")]
    Closed,
}

/// A peer has sent an invalid message, which ends the job. The text says what the peer did, for example "it named
/// slot 3, which is empty": here "it" is the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Violation(pub(super) String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
