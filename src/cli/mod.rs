//! The programs: arguments -> checked configuration -> run -> exit code.

pub mod exit;
pub mod train;
