//! What a collective can fail with.

use crate::types::{Rank, WorldSize};
use crate::wire::Cause;

/// A failed operation. After [`Error::Failed`] the group is done for: every later operation returns the same error.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
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
    /// The array's elements do not lie one after another in memory.
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
    /// This machine's operating system refused something that the transport needs.
    #[error("the operating system refused {what}: {detail}")]
    System {
        /// The thing refused.
        what: &'static str,
        /// Its own words.
        detail: String,
    },
}

impl Error {
    /// The root cause, where the job itself failed.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            Self::Failed { cause, .. } => Some(cause),
            _ => None,
        }
    }
}
