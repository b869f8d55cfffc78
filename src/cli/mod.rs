//! The command-line programs. Each program parses and checks its arguments, runs, and returns an exit code.

pub mod bench;
pub mod definitions;
pub mod doctor;
pub mod group_args;
mod journal;
pub mod log_format;
pub mod observe_args;
mod print_error;
pub mod run;
pub mod train;
mod version;

pub use crate::exit;
