//! Errors of a training run.

use std::fmt;

use super::checkpoint::CheckpointError;
use super::data::DataError;
use crate::group;
use crate::types::Rank;

/// The phase in which a rank failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Phase {
    /// Reading data and fitting the model to it.
    Data,
    /// Reading or writing a checkpoint or report.
    Storage,
}

/// Why a run failed. When a rank fails, all ranks return an error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// This rank's data is wrong.
    #[error(transparent)]
    Data(#[from] DataError),
    /// This rank's checkpoint or report is wrong.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Another rank failed and told all others.
    #[error("rank {rank} failed: {message}")]
    Elsewhere {
        /// The rank that failed; the lowest if there are several.
        rank: Rank,
        /// The phase in which it failed.
        phase: Phase,
        /// The message of its error.
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
        /// The name of the data.
        name: String,
    },
    /// Ranks hold different parameters, which only corrupted memory or messages can cause.
    #[error(
        "{} after epoch {epoch}: the memory of a host or the network between the hosts corrupted a value; go on from the last \
         checkpoint without --no-checksum, and if it happens again test the memory of these ranks' hosts",
        who_differs(ranks, *majority)
    )]
    ParametersDiffer {
        /// The ranks whose parameters differ from those of the majority; without a majority, all ranks.
        ranks: Vec<Rank>,
        /// Whether more than half of the ranks hold the same parameters.
        majority: bool,
        /// Epochs completed.
        epoch: u64,
    },
    /// The loss or the parameters became NaN or infinite, or the loss far exceeds that of a constant prediction.
    #[error("{0}")]
    Diverged(String),
    /// A collective failed.
    #[error(transparent)]
    Group(#[from] group::Error),
}

fn who_differs(ranks: &[Rank], majority: bool) -> String {
    let names: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    let names = names.join(", ");
    match ranks.len() {
        1 => format!("rank {names} holds other parameters than the other ranks"),
        _ if majority => format!("ranks {names} hold other parameters than the other ranks"),
        _ => format!("ranks {names} hold different parameters"),
    }
}

/// `main` and `unwrap` print errors by `Debug`, so it writes the same sentence as `Display`.
impl fmt::Debug for TrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
