//! The command-line programs. Each program parses and checks its arguments, runs, and returns an exit code.

pub mod bench;
pub mod doctor;
pub mod group_args;
mod print_error;
pub mod run;
pub mod train;

pub use crate::exit;

/// Writes the log to standard error: the messages from `level` on, or those that `RUST_LOG` selects. Does nothing if this
/// process has a logger already.
fn log_to_stderr(level: &'static str) {
    let environment = env_logger::Env::default().default_filter_or(level);
    let _ = env_logger::Builder::from_env(environment).try_init();
}
