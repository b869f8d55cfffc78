//! What a training run can fail with.

use std::fmt;

use super::checkpoint::CheckpointError;
use super::data::DataError;
use crate::group;
use crate::types::Rank;

/// What a rank was doing when it failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Phase {
    /// Reading data and fitting the model to it.
    Data,
    /// Reading or writing a checkpoint or report.
    Storage,
}

/// A run that did not end well. All ranks return an error when one does.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// This rank's data is wrong.
    #[error(transparent)]
    Data(#[from] DataError),
    /// This rank's checkpoint or report is wrong.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Another rank failed, and said so to all.
    #[error("rank {rank} failed: {message}")]
    Elsewhere {
        /// The rank; the lowest, if several failed.
        rank: Rank,
        /// What it was doing.
        phase: Phase,
        /// Its own error's words.
        message: String,
    },
    /// Ranks were started with different arguments.
    #[error(
        "rank {rank} was started with another {what} than rank 0; start all ranks with the same arguments"
    )]
    ArgumentsDiffer {
        /// The lowest rank that differs from rank 0.
        rank: Rank,
        /// The arguments that differ.
        what: String,
    },
    /// Ranks hold different data.
    #[error(
        "rank {rank} holds other data than rank 0 under the name {name}; copy the same files to all hosts \
         (compare them with sha256sum)"
    )]
    DataDiffer {
        /// The lowest rank that differs from rank 0.
        rank: Rank,
        /// What the data is called.
        name: String,
    },
    /// The loss or the parameters became NaN or infinite.
    #[error("{0}")]
    Diverged(String),
    /// A collective failed.
    #[error(transparent)]
    Group(#[from] group::Error),
}

/// The sentence, for `main` and `unwrap` print errors by `Debug`, and a person reads them.
impl fmt::Debug for TrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
