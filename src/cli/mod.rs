//! The programs. Each parses its arguments, checks them together, runs and returns an exit code.

pub mod bench;
pub mod group_args;
mod print_error;
pub mod run;
pub mod train;

pub use crate::exit;
