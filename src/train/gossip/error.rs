//! The errors of gossip averaging and of the strategy `gossip`.

use super::coordinator::FailureKind;
use crate::group;
use crate::train::peer_link::ConnectError;
use crate::train::{RunPhase, TrainError};
use crate::types::{Rank, debug_as_display};

/// The reason why gossip averaging or a run with the strategy `gossip` failed on this rank.
#[derive(thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GossipError {
    /// Two ranks could not connect.
    #[error("rank {high} and rank {low} cannot connect: {problem}")]
    Connect {
        /// The lower of the two ranks.
        low: Rank,
        /// The higher of the two ranks.
        high: Rank,
        /// The reason.
        problem: String,
    },
    /// This rank cannot reach the coordinator, the rank that assigns the batches, but another rank can.
    #[error(
        "this rank cannot reach rank {coordinator}, which hands out batches ({problem}), but rank {other} can; check the network \
         between the hosts of these ranks"
    )]
    CutOff {
        /// The rank of the coordinator.
        coordinator: Rank,
        /// A rank that can reach `coordinator`.
        other: Rank,
        /// What this rank knows about the cause.
        problem: String,
    },
    /// The coordinator ended the run on this rank.
    #[error("rank {coordinator}, the coordinator, ended the run on this rank: {problem}")]
    CoordinatorFailed {
        /// The rank of the coordinator.
        coordinator: Rank,
        /// The reason.
        problem: String,
    },
    /// The connection with the coordinator failed after this rank had sent its final parameters to the coordinator.
    #[error(
        "rank {coordinator}, which averages the final parameters, is lost: {problem}. No other rank can average them, \
         because rank {coordinator} may already have completed the run; resume from the last checkpoint"
    )]
    CoordinatorLostAtEnd {
        /// The rank of the coordinator, which averages the final parameters.
        coordinator: Rank,
        /// What this rank knows about the cause.
        problem: String,
    },
    /// This rank can reach too few ranks, because other ranks are lost or cannot be reached.
    #[error(
        "rank {own} can only reach {reached} of the {ranks} ranks of the job, including itself ({missing}). A run needs more \
         than half of its ranks, or exactly half of them including rank 0, because the other ranks may continue too; resume from \
         the last checkpoint"
    )]
    TooFewRanks {
        /// This rank.
        own: Rank,
        /// The number of ranks that this rank can reach, including itself.
        reached: usize,
        /// The number of ranks of the job.
        ranks: usize,
        /// Why this rank cannot reach the missing ranks.
        missing: String,
    },
    /// This rank could not start a thread. Holds the error of the operating system.
    #[error("cannot start a thread for the averages with another rank: {0}")]
    Thread(String),
    /// The program's interrupt function stopped this rank.
    #[error("this rank was interrupted while it waited for the final average")]
    Interrupted,
    /// A collective operation of all ranks failed.
    #[error(transparent)]
    Group(#[from] group::Error),
}

debug_as_display!(GossipError);

impl From<ConnectError> for TrainError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Group(error) => Self::Group(error),
            ConnectError::Pair { .. } => Self::Gossip(error.into()),
        }
    }
}

impl From<ConnectError> for GossipError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Group(error) => Self::Group(error),
            ConnectError::Pair { pair: [low, high], problem } => Self::Connect { low, high, problem },
        }
    }
}

/// Returns the error of this rank after the coordinator, rank `coordinator`, has failed.
pub(super) fn coordinator_failed_error(coordinator: Rank, kind: FailureKind, problem: String) -> TrainError {
    match kind {
        FailureKind::Diverged => TrainError::Diverged(problem),
        FailureKind::Storage => {
            TrainError::OtherRankFailed { rank: coordinator, phase: RunPhase::Storage, message: problem }
        }
        FailureKind::Other => TrainError::Gossip(GossipError::CoordinatorFailed { coordinator, problem }),
    }
}

/// Returns the kind of failure that the coordinator reports to the other ranks for this error.
pub(super) fn failure_kind(error: &TrainError) -> FailureKind {
    match error {
        TrainError::Diverged(_) | TrainError::Layer(_) => FailureKind::Diverged,
        TrainError::Checkpoint(_) | TrainError::ModelFile(_) => FailureKind::Storage,
        _ => FailureKind::Other,
    }
}
