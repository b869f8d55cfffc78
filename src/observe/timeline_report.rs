//! What rank 0 reports of a timeline that it has written.

use std::fmt;
use std::path::PathBuf;

use crate::types::counted;

/// A timeline that rank 0 has written.
#[derive(Clone, PartialEq, Debug)]
pub struct TimelineReport {
    /// The file.
    pub path: PathBuf,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of operations of all ranks in the timeline.
    pub operations: u64,
    /// The number of operations, steps of operations and parts of training that the ranks left out, because there were too many.
    pub left_out: u64,
    /// The largest possible error of the times of a rank relative to rank 0, in microseconds.
    pub clock_error_us: f64,
    /// Why the file is not complete; `None` if it is.
    pub problem: Option<String>,
}

impl fmt::Display for TimelineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, ranks, operations, left_out, clock_error_us, problem } = self;
        if let Some(problem) = problem {
            return write!(f, "warning: the timeline {} could not be written: {problem}", path.display());
        }
        write!(
            f,
            "timeline {}: {} of {}, clocks within {clock_error_us:.1} us",
            path.display(),
            counted(operations, "operation"),
            counted(ranks, "rank")
        )?;
        if *left_out > 0 {
            write!(
                f,
                "; the last {left_out} operations, steps and parts of training did not fit and are left out"
            )?;
        }
        Ok(())
    }
}
