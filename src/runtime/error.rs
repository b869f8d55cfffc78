//! The errors of a group's operations.

use crate::engine::Failure;
use crate::types::{DType, Rank, ReduceOp, WorldSize, debug_as_display};
use crate::wire::Cause;

/// The error of an operation. After [`Error::Failed`], every later operation of the group returns the same error.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The job failed; all ranks report the same cause.
    #[error("{cause}{}", reported_by.map(|rank| format!(" (reported by rank {rank})")).unwrap_or_default())]
    Failed {
        /// The cause.
        cause: Cause,
        /// The rank that reported the failure; `None` if this rank detected it.
        reported_by: Option<Rank>,
    },
    /// The array's elements are not contiguous in memory.
    #[error("the array is not contiguous in standard layout; pass a contiguous copy (`as_standard_layout`)")]
    NotContiguous,
    /// The root is not a rank of this group.
    #[error("root {root} is not a rank of this group of {world}")]
    InvalidRoot {
        /// The requested root.
        root: Rank,
        /// The group's size.
        world: WorldSize,
    },
    /// A count or a length is invalid or too large. Nothing has been sent, and the group can still be used.
    #[error("{0}")]
    InvalidCounts(&'static str),
    /// A rank already has the maximum number of buffers of `Group::alloc`. The group can still be used.
    #[error("a rank of the group already has {0} shared buffers of the group; drop some of them first")]
    TooManyBuffers(usize),
    /// No message can go to, or come from, this rank. Nothing has been sent, and the group can still be used.
    #[error("rank {peer} is not a rank of this group of {world}")]
    InvalidPeer {
        /// The requested rank.
        peer: Rank,
        /// The group's size.
        world: WorldSize,
    },
    /// A blocking receive accepts only messages of this rank itself, and this rank has sent no message that matches. The
    /// receive would never end. The group can still be used.
    #[error(
        "this rank waits for a message from itself but has sent no message that matches; send first, or receive asynchronously"
    )]
    NothingSent,
    /// The tag is reserved for receives that accept any tag. Nothing has been sent, and the group can still be used.
    #[error(
        "tag {} is reserved for receives that accept any tag; no message can have it",
        crate::types::ANY_TAG
    )]
    InvalidTag,
    /// An object cannot be encoded, or the received bytes do not decode as such an object.
    #[error("the object {0}")]
    Object(String),
    /// A message was longer than the buffer of [`Group::receive_fitting`](crate::Group::receive_fitting). The message has
    /// been received and discarded, and the group can still be used.
    #[error(
        "rank {} sent a message of {} elements with tag {}, which is longer than the buffer of {room} elements",
        status.source, status.count, status.tag
    )]
    Truncated {
        /// The message's sender, tag, type and length.
        status: Status,
        /// The number of elements of the buffer.
        room: usize,
    },
    /// The result has been taken before.
    #[error("the operation's result has been taken before")]
    Taken,
    /// The reduction is not defined on elements of this type. Nothing has been sent, and the group can still be used.
    #[error("{op} on {dtype} is not defined: {}", accepted_types(*op))]
    Unsupported {
        /// The requested reduction.
        op: ReduceOp,
        /// The buffer's element type.
        dtype: DType,
    },
    /// A compression cannot be used for this call. Nothing has been sent, and the group can still be used.
    #[error("{0}")]
    Compression(String),
    /// This host's operating system refused a resource that the transport needs.
    #[error("the operating system refused {what}: {detail}")]
    System {
        /// The refused resource.
        what: &'static str,
        /// The operating system's message.
        detail: String,
    },
}

debug_as_display!(Error);

/// The sender, tag, type and length of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// The sender.
    pub source: Rank,
    /// The tag.
    pub tag: u32,
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements.
    pub count: usize,
}

impl From<&Failure> for Error {
    fn from(Failure { cause, reported_by }: &Failure) -> Self {
        Self::Failed { cause: cause.clone(), reported_by: *reported_by }
    }
}

impl Error {
    /// Returns the root cause, if the job failed.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            Self::Failed { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

fn accepted_types(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => "it takes integers",
        ReduceOp::MinLoc | ReduceOp::MaxLoc => "it takes values with their location, such as f32_loc",
        ReduceOp::Custom => "it takes a function of the caller",
        _ => "it takes plain numbers",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_an_undefined_reduction_names_the_types_that_have_it() {
        let text = |op, dtype| format!("{:?}", Error::Unsupported { op, dtype });
        assert_eq!(
            text(ReduceOp::Max, DType::F32Loc),
            "max on f32_loc is not defined: it takes plain numbers"
        );
        assert_eq!(text(ReduceOp::BitOr, DType::F16), "bor on f16 is not defined: it takes integers");
    }
}
