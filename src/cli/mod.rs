//! The programs: arguments -> checked configuration -> run -> exit code.

pub mod bench;
mod complaint;
pub mod group_args;
pub mod run;
pub mod train;

pub use crate::exit;
