//! The errors of a parameter server.

use crate::group;
use crate::train::peer_link::ConnectError;
use crate::types::{Rank, debug_as_display};

/// The reason why a function of a parameter server failed.
#[derive(thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParameterServerError {
    /// The number of servers does not fit the number of ranks.
    #[error(
        "a parameter server needs at least one server and one worker, but the number of ranks is {ranks} and the number of \
         servers is {servers}; start more ranks or lower the number of servers"
    )]
    TooFewRanks {
        /// The number of ranks.
        ranks: u32,
        /// The number of servers.
        servers: u32,
    },
    /// A parameter server does not support these options. Holds the error message.
    #[error("{0}")]
    Unsupported(String),
    /// This rank could not start a thread. Holds the error of the operating system.
    #[error("cannot start a thread for a client of the parameter server: {0}")]
    Thread(String),
    /// A server and one of its clients could not connect.
    #[error("rank {server}, a parameter server, and its client, rank {client}, cannot connect: {problem}")]
    Connect {
        /// The client: a worker or another server.
        client: Rank,
        /// The server.
        server: Rank,
        /// The reason.
        problem: String,
    },
    /// A server ended, or the network between this rank and the server failed.
    #[error("rank {server}, a parameter server, is lost: {problem}; look at the output of that rank")]
    ServerLost {
        /// The server.
        server: Rank,
        /// The cause, as far as this rank knows it.
        problem: String,
    },
    /// A server refused a request.
    #[error("rank {server}, a parameter server, refused a request: {problem}")]
    Refused {
        /// The server.
        server: Rank,
        /// Why the server refused the request.
        reason: RefusalReason,
        /// The reason in words.
        problem: String,
    },
    /// A worker is lost in a synchronous run, which needs all workers.
    #[error(
        "rank {worker}, a worker, is lost: {problem}; with ps-sync, each step needs the gradients of all workers"
    )]
    WorkerLost {
        /// The worker.
        worker: Rank,
        /// The cause of its loss.
        problem: String,
    },
    /// All workers are lost, but the run has not ended.
    #[error("all workers are lost; the last of them was rank {worker}: {problem}")]
    AllWorkersLost {
        /// The last worker that was lost.
        worker: Rank,
        /// The cause of its loss.
        problem: String,
    },
    /// A collective operation of all ranks failed.
    #[error(transparent)]
    Group(#[from] group::Error),
}

/// Why a server refused a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RefusalReason {
    /// A reason that has no variant of its own.
    Other,
    /// The training diverged.
    Diverged,
    /// A rank is lost, and the servers cannot continue without it.
    RankLost,
    /// The first server cannot write a file.
    Storage,
}

impl RefusalReason {
    pub(super) fn to_code(self) -> u64 {
        match self {
            Self::Other => 0,
            Self::Diverged => 1,
            Self::RankLost => 2,
            Self::Storage => 3,
        }
    }

    pub(super) fn from_code(code: u64) -> Self {
        match code {
            1 => Self::Diverged,
            2 => Self::RankLost,
            3 => Self::Storage,
            _ => Self::Other,
        }
    }
}

impl From<ConnectError> for ParameterServerError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Group(error) => Self::Group(error),
            ConnectError::Pair { pair: [server, client], problem } => {
                Self::Connect { client, server, problem }
            }
        }
    }
}

debug_as_display!(ParameterServerError);
