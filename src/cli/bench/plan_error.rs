//! The error that says why `ringbench` cannot run with its flags.

use std::path::PathBuf;

use super::operation::BenchOperation;
use super::plan::ROWS_MAX;
use crate::types::{Compression, DType, Rank, ReduceOp, WorldSize, counted};

/// Why the flags do not fit together, or do not fit the job or the machine. The program exits with code 2.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchPlanError {
    /// The smallest size is larger than the largest size.
    #[error("the smallest size (-b {min}) is larger than the largest (-e {max})")]
    MinAboveMax {
        /// The value of `-b`.
        min: usize,
        /// The value of `-e`.
        max: usize,
    },
    /// The factor does not make sizes larger.
    #[error(
        "a factor of {factor} (-f) does not increase a size of {min} bytes; pass a factor of at least 2, or a step with -i"
    )]
    FactorTooSmall {
        /// The value of `-f`.
        factor: usize,
        /// The value of `-b`.
        min: usize,
    },
    /// The step does not make sizes larger.
    #[error("a step of 0 bytes (-i) does not increase the size; pass a step of at least 1 byte")]
    StepIsZero,
    /// The table would have too many rows.
    #[error("these sizes, types and reductions make more than {ROWS_MAX} rows; choose larger steps")]
    TooManyRows,
    /// The reduction is not defined for the element type.
    #[error("{}", crate::group::Error::Unsupported { op: *op, dtype: *dtype })]
    UndefinedReduction {
        /// A reduction that `-o` names.
        op: ReduceOp,
        /// An element type that `-t` names.
        dtype: DType,
    },
    /// A scan or an exscan cannot compute an average.
    #[error(
        "{operation} accepts all reductions except avg: the average over a part of the ranks is not defined"
    )]
    AverageOfPrefix {
        /// The operation.
        operation: BenchOperation,
    },
    /// The other flags do not fit `--compression`.
    #[error("--compression {compression} {problem}")]
    Compression {
        /// The compression.
        compression: Compression,
        /// What does not fit.
        problem: &'static str,
    },
    /// The job has too few ranks for the operation.
    #[error(
        "{operation} needs 2 ranks or more, and this job has {world}; start ringbench under ringrun -n 2 or with --peers"
    )]
    TooFewRanks {
        /// The operation.
        operation: BenchOperation,
        /// The number of ranks.
        world: WorldSize,
    },
    /// The root is not a rank of the job.
    #[error("root {root} is not a rank of this job of {} (ranks are counted from 0)", counted(world, "rank"))]
    RootOutOfRange {
        /// The value of `--root`.
        root: Rank,
        /// The number of ranks.
        world: WorldSize,
    },
    /// The buffers do not fit into memory.
    #[error(
        "a size of {bytes} bytes needs {needed} bytes of memory for the {} on this host, but only {available} are available; \
         choose a smaller -e",
        counted(ranks, "rank")
    )]
    TooLittleMemory {
        /// The size of the largest buffer in bytes.
        bytes: usize,
        /// The total size in bytes of the buffers of all ranks on this host.
        needed: u64,
        /// The number of ranks on this host.
        ranks: u32,
        /// The available memory in bytes.
        available: u64,
    },
    /// The directory of an output file does not exist.
    #[error("{option} {}: its directory does not exist", path.display())]
    NoDirectory {
        /// The option that names the file.
        option: &'static str,
        /// The value of the option.
        path: PathBuf,
    },
    /// An output file could not be written.
    #[error("{option} {}: the file could not be written there: {problem}", path.display())]
    FileNotWritable {
        /// The option that names the file.
        option: &'static str,
        /// The value of the option.
        path: PathBuf,
        /// The error of the operating system.
        problem: String,
    },
    /// Two options name the same output file.
    #[error("--json and --plot both name {}; give each its own file", path.display())]
    SameFile {
        /// The value of both options.
        path: PathBuf,
    },
    /// The rows cannot be drawn.
    #[error("--plot {problem}")]
    Plot {
        /// Why the rows cannot be drawn.
        problem: &'static str,
    },
    /// `--alloc` was given for an operation other than all-reduce.
    #[error("--alloc is for all_reduce and has no effect on {operation}; leave --alloc out")]
    UnusedAlloc {
        /// The operation.
        operation: BenchOperation,
    },
}
