//! Why a job failed, as every rank comes to report it.

use crate::types::{Contract, Rank};

/// The root cause of a failure: decided by the rank that saw it first, passed on unchanged to all others.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// A process died, or the network between it and a neighbour failed.
    #[error("rank {rank} on {host} was lost: {detail}; look at that rank's own output for why")]
    PeerLost {
        /// The rank that is gone.
        rank: Rank,
        /// Its host and address.
        host: String,
        /// What the neighbour's socket said.
        detail: String,
    },
    /// A rank closed its group in order while others still had operations to do with it.
    #[error("rank {rank} on {host} closed its group while others still had work to do with it; do all ranks run the same number of steps?")]
    PeerLeft {
        /// The rank that left.
        rank: Rank,
        /// Its host and address.
        host: String,
    },
    /// Two ranks called different things at the same place of the program.
    #[error("ranks do not agree on operation {sequence}: rank {first} called {first_asked}, rank {second} called {second_asked}")]
    Mismatch {
        /// The operation's number within its group, counted from 0.
        sequence: u64,
        /// The lower of the two ranks.
        first: Rank,
        /// What the lower rank asked for.
        first_asked: Contract,
        /// The higher of the two ranks.
        second: Rank,
        /// What the higher rank asked for.
        second_asked: Contract,
    },
    /// Two ranks are at different places of the program.
    #[error(
        "ranks do not agree on the order of operations: rank {rank} is in operation {sequence}, {asked}, while rank {ahead} has left it and is in operation {ahead_sequence}, {ahead_asked}"
    )]
    OutOfOrder {
        /// The rank that waits.
        rank: Rank,
        /// The operation it waits in.
        sequence: u64,
        /// What it asked for.
        asked: Contract,
        /// The rank that went on.
        ahead: Rank,
        /// The operation it is in.
        ahead_sequence: u64,
        /// What it asked for.
        ahead_asked: Contract,
    },
    /// An operation did not end within its deadline.
    #[error(
        "{asked}, operation {sequence}, did not end within {timeout_ms} ms on rank {rank}, which waits for {waiting_for}; a rank there hangs, is stopped or is slow (raise --timeout if it may be)"
    )]
    Timeout {
        /// The rank whose patience ended first.
        rank: Rank,
        /// The operation's number.
        sequence: u64,
        /// What the rank asked for.
        asked: Contract,
        /// The deadline in milliseconds.
        timeout_ms: u64,
        /// The ranks it still waits for, in words.
        waiting_for: String,
    },
    /// The program on a rank gave up and said why.
    #[error("rank {rank} on {host} stopped the job: {message}")]
    Aborted {
        /// The rank that gave up.
        rank: Rank,
        /// Its host.
        host: String,
        /// Its reason.
        message: String,
    },
    /// A peer broke the protocol, or the network corrupted what it said.
    #[error("rank {rank} on {host} broke the protocol: {detail}; the network corrupts data or a build differs")]
    Misbehaved {
        /// The rank whose bytes were wrong.
        rank: Rank,
        /// Its host and address.
        host: String,
        /// What was wrong.
        detail: String,
    },
}
