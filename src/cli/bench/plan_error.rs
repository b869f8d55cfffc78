//! What is wrong with a benchmark's flags.

use std::path::PathBuf;

use super::operation::BenchOperation;
use super::plan::ROWS_MAX;
use crate::types::{DType, Rank, ReduceOp, WorldSize};

/// Why the flags cannot be followed together. All of them are the person's to mend: exit code 2.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchPlanError {
    /// The smallest is larger than the largest.
    #[error("the smallest size (-b {min}) is larger than the largest (-e {max})")]
    Inverted {
        /// `-b`.
        min: usize,
        /// `-e`.
        max: usize,
    },
    /// The sizes would never end.
    #[error(
        "a factor of {factor} (-f) leads from {min} bytes to nowhere; it has to be 2 or more, or give a step with -i"
    )]
    Factor {
        /// `-f`.
        factor: usize,
        /// `-b`.
        min: usize,
    },
    /// The sizes would never end.
    #[error("a step of 0 bytes (-i) leads nowhere")]
    Step,
    /// Too many rows.
    #[error("these sizes, types and reductions make more than {ROWS_MAX} rows; choose larger steps")]
    TooManyRows,
    /// There is no such reduction.
    #[error("{}", crate::group::Error::Unsupported { op: *op, dtype: *dtype })]
    Undefined {
        /// `-o`.
        op: ReduceOp,
        /// `-t`.
        dtype: DType,
    },
    /// Some of the ranks have no average.
    #[error("{operation} takes any reduction but avg: the average of some of the ranks alone is not defined")]
    Average {
        /// The operation.
        operation: BenchOperation,
    },
    /// There is no rank to send to.
    #[error(
        "{operation} needs 2 ranks or more, and this job has {world}; start it under ringrun -n 2 or with --peers"
    )]
    TooFewRanks {
        /// The operation.
        operation: BenchOperation,
        /// The ranks.
        world: WorldSize,
    },
    /// There is no such rank.
    #[error("root {root} is not a rank of this job of {world} (ranks are counted from 0)")]
    Root {
        /// `--root`.
        root: Rank,
        /// The ranks.
        world: WorldSize,
    },
    /// The buffers would not fit.
    #[error(
        "a size of {bytes} bytes takes {needed} bytes of memory for the {ranks} rank(s) on this host, more than the \
         {available} that are available; choose a smaller -e"
    )]
    Memory {
        /// Bytes of the largest buffer.
        bytes: usize,
        /// Bytes of all buffers together.
        needed: u64,
        /// Ranks on this host.
        ranks: u32,
        /// Bytes available.
        available: u64,
    },
    /// The report could not be written.
    #[error("--json {}: its directory does not exist", path.display())]
    NoDirectory {
        /// `--json`.
        path: PathBuf,
    },
    /// The report could not be written.
    #[error("--json {}: the report could not be written there: {problem}", path.display())]
    Report {
        /// `--json`.
        path: PathBuf,
        /// What the operating system says.
        problem: String,
    },
    /// The operation does not use the flag.
    #[error("--alloc is for all_reduce, and {operation} has no use for it; leave it out")]
    Alloc {
        /// The operation.
        operation: BenchOperation,
    },
}
