//! The errors of a parameter server.

use std::fmt;

use crate::group;
use crate::types::Rank;

/// The reason why an operation with a parameter server failed.
#[derive(thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParameterServerError {
    /// The number of servers does not fit the number of ranks.
    #[error(
        "a parameter server needs at least one server and one worker, but there are {ranks} ranks and {servers} of them are \
         servers; start more ranks or lower the number of servers"
    )]
    TooFewRanks {
        /// The number of ranks.
        ranks: u32,
        /// The number of servers.
        servers: u32,
    },
    /// The optimizer cannot be used in this way.
    #[error("{0}")]
    Unsupported(String),
    /// The connection between a worker and a server could not be opened.
    #[error("rank {worker} and its server, rank {server}, cannot connect: {problem}")]
    Connect {
        /// The worker.
        worker: Rank,
        /// The server.
        server: Rank,
        /// The reason.
        problem: String,
    },
    /// A server ended, or the network between this worker and the server failed.
    #[error("rank {server}, a parameter server, is lost: {problem}; look at the output of that rank")]
    ServerLost {
        /// The server.
        server: Rank,
        /// What this worker knows about the cause.
        problem: String,
    },
    /// A server refused a request.
    #[error("rank {server}, a parameter server, refused a request: {problem}")]
    Refused {
        /// The server.
        server: Rank,
        /// The reason.
        problem: String,
    },
    /// A worker without which the servers cannot continue was lost.
    #[error(
        "rank {worker}, a worker, is lost: {problem}; with ps-sync, each step needs the gradients of all workers"
    )]
    WorkerLost {
        /// The worker.
        worker: Rank,
        /// The cause of its loss.
        problem: String,
    },
    /// All workers were lost before the run ended.
    #[error("all workers are lost; the last of them was rank {worker}: {problem}")]
    AllWorkersLost {
        /// The worker that was lost last.
        worker: Rank,
        /// The cause of its loss.
        problem: String,
    },
    /// An operation between all ranks failed.
    #[error(transparent)]
    Group(#[from] group::Error),
}

impl ParameterServerError {
    pub(super) fn connect(worker: Rank, server: Rank, error: &dyn fmt::Display) -> Self {
        Self::Connect { worker, server, problem: error.to_string() }
    }
}

/// `main` and `unwrap` print errors with `Debug`, so `Debug` writes the same sentence as `Display`.
impl fmt::Debug for ParameterServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
