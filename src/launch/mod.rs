//! Launches a job on this machine: starts its processes with their environment, prints their output, and ends the
//! job.
//!
//! ```text
//! ringrun ---- job: a thread that waits for signals (SIGCHLD among them), events of the output thread, and deadlines
//!   |  |  \---- output: a thread that reads the pipes of all ranks
//!   |  |
//!   |  +------- watchdog: a process that kills the other processes if ringrun is killed
//!   +---------- rank 0, 1, ...: each process leads a process group, and runs first the shim (see `shim`) and then the command
//! ```
//!
//! The module `supervisor` decides when to send which signal, and does no IO. The module `launch` does not parse
//! command lines, and makes no temporary files. `launch` and `rendezvous` are the only modules of the library that
//! read environment variables.

mod agent;
mod agent_link;
mod agent_messages;
mod agents;
mod binding;
mod claims;
mod command;
mod environment;
mod error;
mod exit_pipe;
mod frame_link;
mod frames;
mod free_ports;
mod host_connection;
mod host_job;
mod input_feed;
mod input_reader;
mod interfaces;
mod job;
mod job_description;
mod job_rendezvous;
mod lines;
mod local_ranks;
mod message;
mod mpi4py;
mod mpi4py_guard;
mod nodes;
mod outcome;
mod output;
mod output_files;
mod output_messages;
mod pipe_ends;
mod plan;
mod processes;
mod rank_processes;
mod relay;
mod relay_link;
mod relay_messages;
mod relays;
mod root_cause;
mod share;
mod shim;
mod signals;
mod ssh;
mod ssh_tree;
mod status_line;
mod streams;
mod supervisor;
mod terminal_writer;
mod topology;
mod watchdog;

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

pub use command::{HOST_CHECK_NAME, LaunchedProgram};
pub use environment::{JobVariables, RINGRUN_VARIABLE_PREFIX, rank_environment};
pub use error::{HostError, LaunchError};
pub use interfaces::InterfaceFilter;
pub use message::{LaunchMessage, MessageFormat, MessageLevel};
pub use outcome::{JobOutcome, RankEnd};
pub use plan::{
    Binding, FailurePolicy, HOSTS_MAX, LOCAL_RANKS_MAX, LaunchLimits, LaunchPlan, Mpi4py, OutputFormat,
    RankProgram, RemoteHost, SshOptions, StdinReader, Verbosity,
};
pub use processes::set_process_name;
pub use share::RankShare;
pub use shim::SHIM_NAME;
pub use ssh::{AGENT_OPTION, RELAY_OPTION};
pub use ssh_tree::find_parents;
pub use status_line::STATUS_COLUMNS_VARIABLE;
pub use watchdog::WATCHDOG_NAME;

/// Runs a job to its end and returns the exit code of ringrun. When this function returns, no process of the job is
/// left.
///
/// Call this function once, on the main thread, because it installs signal handlers and reaps all children of the
/// process.
///
/// # Errors
///
/// If the job could not be started; see [`LaunchError`].
pub fn run_job(plan: &LaunchPlan) -> Result<u8, LaunchError> {
    job::run_job(plan)
}

/// Runs the agent of a ringrun on another host, which exchanges messages with it through standard input and standard output.
/// Returns when the job is over or the connection has ended. No rank is left then.
pub fn run_agent() -> ExitCode {
    agent::main()
}

/// Runs the relay of a ringrun on another host: starts an agent on this host and an ssh for each further host, and passes on the
/// bytes between them and the ringrun. Returns when the connection has ended.
pub fn run_relay() -> ExitCode {
    relay::main()
}

/// Runs the watchdog if `name` is [`WATCHDOG_NAME`], or the shim if `name` is [`SHIM_NAME`]. Returns `None` for any
/// other name.
pub fn run_internal_program(name: &OsStr, arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if name == WATCHDOG_NAME {
        Some(watchdog::main())
    } else if name == SHIM_NAME {
        Some(shim::main(arguments))
    } else {
        None
    }
}
