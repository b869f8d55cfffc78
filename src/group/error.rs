//! What a collective can fail with.

use std::fmt;

use super::Status;
use crate::types::{DType, Rank, ReduceOp, WorldSize};
use crate::wire::Cause;

/// A failed operation. After [`Error::Failed`] the group cannot be used: every later operation returns the same
/// error.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The job failed; all ranks report the same cause.
    #[error("{cause}{}", reported_by.map(|rank| format!(" (reported by rank {rank})")).unwrap_or_default())]
    Failed {
        /// Why.
        cause: Cause,
        /// The rank that told us; `None` if this rank saw it itself.
        reported_by: Option<Rank>,
    },
    /// The array's elements are not contiguous in memory.
    #[error("the array is not contiguous in standard layout; pass a contiguous copy (`as_standard_layout`)")]
    NotContiguous,
    /// The root is not a rank of this group.
    #[error("root {root} is not a rank of this group of {world}")]
    InvalidRoot {
        /// The root asked for.
        root: Rank,
        /// The group's size.
        world: WorldSize,
    },
    /// The lengths of the ranks' parts are invalid. Nothing has been sent, and the group can still be used.
    #[error("the counts of the ranks' parts cannot be: {0}")]
    InvalidCounts(&'static str),
    /// A rank has the largest number of buffers of [`Group::alloc`](crate::Group::alloc). The group can still be
    /// used.
    #[error("a rank of the group has {0} buffers of it already; drop some first")]
    TooManyBuffers(usize),
    /// A message cannot be sent to, or received from, this rank. Nothing has been sent, and the group can still be
    /// used.
    #[error("rank {peer} is not a rank of this group of {world}")]
    InvalidPeer {
        /// The rank asked for.
        peer: Rank,
        /// The group's size.
        world: WorldSize,
    },
    /// No other rank can send what is to be received, and this one has not: it would wait for itself. The group is as it was.
    #[error(
        "this rank waits for a message of its own and has sent none that fits; send first, or receive asynchronously"
    )]
    NothingSent,
    /// The tag is reserved for receives that accept any tag. Nothing has been sent, and the group can still be used.
    #[error("tag {} stands for any tag, and no message can have it", crate::types::ANY_TAG)]
    InvalidTag,
    /// An object cannot be encoded, or the received bytes do not decode as such an object.
    #[error("the object {0}")]
    Object(String),
    /// A message was longer than the buffer of who asked for it by [`Group::receive_fitting`](crate::Group::receive_fitting).
    /// It has been received and thrown away, and the group is as it was.
    #[error(
        "rank {} sent a message of {} elements with tag {}, which is longer than the buffer of {room}",
        status.source, status.count, status.tag
    )]
    Truncated {
        /// What is known of the message.
        status: Status,
        /// How many elements the buffer has.
        room: usize,
    },
    /// The result has been taken before.
    #[error("the operation's result has been taken before")]
    Taken,
    /// The reduction is not defined on elements of this type. Nothing has been sent, and the group can still be used.
    #[error("{op} on {dtype} is not defined: {}", domain(*op))]
    Unsupported {
        /// The reduction asked for.
        op: ReduceOp,
        /// The buffer's element type.
        dtype: DType,
    },
    /// This host's operating system refused a resource that the transport needs.
    #[error("the operating system refused {what}: {detail}")]
    System {
        /// The thing refused.
        what: &'static str,
        /// Its own words.
        detail: String,
    },
}

/// The sentence, for `main` and `unwrap` print errors by `Debug`, and a person reads them.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The root cause, if the job failed.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            Self::Failed { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// Where a reduction is defined, in words.
fn domain(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => "it takes integers",
        ReduceOp::MinLoc | ReduceOp::MaxLoc => "it takes values with their location, such as f32_loc",
        ReduceOp::Custom => "it takes a function of the program's own",
        ReduceOp::Sum
        | ReduceOp::Average
        | ReduceOp::Min
        | ReduceOp::Max
        | ReduceOp::Product
        | ReduceOp::LogicalAnd
        | ReduceOp::LogicalOr
        | ReduceOp::LogicalXor
        | ReduceOp::PreMulSum => "it takes plain numbers",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Group;

    #[test]
    fn a_reduction_that_is_not_defined_leaves_the_group_as_it_was() {
        let mut group = Group::solo();
        let (op, dtype) = (ReduceOp::BitAnd, DType::F32);
        assert_eq!(group.all_reduce(&mut [1.5f32], op), Err(Error::Unsupported { op, dtype }));
        assert!(group.reduce_scatter(&mut [1u8], ReduceOp::Custom).is_err());
        assert_eq!(group.statistics().operations, 0);
        let mut values = [2u8, 0];
        assert_eq!(group.all_reduce(&mut values, ReduceOp::LogicalAnd), Ok(()));
        assert_eq!(values, [1, 0]);
    }

    /// What a program shows that returns it from `main`.
    #[test]
    fn debug_is_for_people() {
        let cause = Cause::PeerLeft { rank: Rank::new(1), host: "h".into() };
        let error = Error::Failed { cause, reported_by: Some(Rank::new(2)) };
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(error.to_string().starts_with("rank 1 on h closed its group"), "{error}");
    }

    #[test]
    fn a_reduction_that_is_not_defined_says_where_it_is() {
        let text = |op, dtype| Error::Unsupported { op, dtype }.to_string();
        assert_eq!(
            text(ReduceOp::Max, DType::F32Loc),
            "max on f32_loc is not defined: it takes plain numbers"
        );
        assert_eq!(text(ReduceOp::BitOr, DType::F16), "bor on f16 is not defined: it takes integers");
    }
}
