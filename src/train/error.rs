//! Errors of a training run.

use super::checkpoint::CheckpointError;
use super::data::DataError;
use super::gossip::GossipError;
use super::model::LayerError;
use super::model_file::ModelFileError;
use super::parameter_server::ParameterServerError;
use crate::group;
use crate::types::{Rank, debug_as_display};

/// The phase in which a rank failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RunPhase {
    /// Reading the data and creating the model.
    Data,
    /// Computing the training steps.
    Training,
    /// Reading or writing a checkpoint, a report or a model file.
    Storage,
}

/// The reason why a run failed. If a rank fails, all ranks return an error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// This rank cannot use its data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// This rank cannot read or write a checkpoint or report.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// This rank cannot read or write a model file.
    #[error(transparent)]
    ModelFile(#[from] ModelFileError),
    /// Another rank failed and sent its error to all ranks.
    #[error("rank {rank} failed: {message}")]
    OtherRankFailed {
        /// The lowest rank that failed.
        rank: Rank,
        /// The phase in which `rank` failed.
        phase: RunPhase,
        /// The error message of `rank`.
        message: String,
    },
    /// Ranks were started with different arguments.
    #[error(
        "rank {rank} and rank 0 were started with different options ({options}); start all ranks with the same arguments"
    )]
    ArgumentsDiffer {
        /// The lowest rank whose options differ from the options of rank 0.
        rank: Rank,
        /// The names of the options that differ.
        options: String,
    },
    /// The options do not fit together.
    #[error("{0}")]
    Options(String),
    /// Ranks hold different data.
    #[error(
        "rank {rank} on {} and rank 0 on {} read different data from {name}; copy the same files to all hosts (compare \
         them with sha256sum)",
        hosts[0],
        hosts[1]
    )]
    DataDiffer {
        /// The lowest rank whose data differs from the data of rank 0.
        rank: Rank,
        /// The host of this rank, and the host of rank 0: their names and addresses.
        hosts: [String; 2],
        /// The name of the data.
        name: String,
    },
    /// Ranks hold different parameters. The cause is corrupted memory or a corrupted message.
    #[error(
        "{} after epoch {epoch}: the memory of a host or the network between the hosts corrupted a value; resume from the last \
         checkpoint without --no-checksum; if the error occurs again, test the memory of the hosts of these ranks",
        describe_differing_ranks(ranks, *majority)
    )]
    ParametersDiffer {
        /// The ranks whose parameters differ from the parameters of the majority. If there is no majority, contains all
        /// ranks that should hold the same parameters.
        ranks: Vec<Rank>,
        /// Whether more than half of the ranks that should hold the same parameters agree.
        majority: bool,
        /// The number of completed epochs.
        epoch: u64,
    },
    /// The training diverged: the loss or a parameter is NaN or infinite, or the loss is far above the loss of a
    /// constant prediction.
    #[error("{0}")]
    Diverged(String),
    /// A layer of the model failed on this rank.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The parameter server failed, or this rank lost its connection to the server.
    #[error(transparent)]
    ParameterServer(ParameterServerError),
    /// The strategy `gossip` failed on this rank.
    #[error(transparent)]
    Gossip(#[from] GossipError),
    /// A collective failed.
    #[error(transparent)]
    Group(#[from] group::Error),
}

/// Returns the beginning of the message of [`TrainError::ParametersDiffer`], which names the ranks.
fn describe_differing_ranks(ranks: &[Rank], majority: bool) -> String {
    let names: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    let names = names.join(", ");
    match ranks.len() {
        1 => format!("rank {names} holds different parameters than the other ranks"),
        _ if majority => format!("ranks {names} hold different parameters than the other ranks"),
        _ => format!("ranks {names} hold different parameters"),
    }
}

debug_as_display!(TrainError);
