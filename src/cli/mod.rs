//! The programs: arguments -> checked configuration -> run -> exit code.

pub mod bench;
pub mod exit;
pub mod group_args;
