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

mod binding;
mod claims;
mod command;
mod environment;
mod exit_pipe;
mod job;
mod lines;
mod mpi4py;
mod mpi4py_guard;
mod outcome;
mod output;
mod output_files;
mod processes;
mod rank_processes;
mod root_cause;
mod shim;
mod signals;
mod status_line;
mod supervisor;
mod terminal_writer;
mod topology;
mod watchdog;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

pub use command::LaunchedProgram;
pub use environment::{JobVariables, RINGRUN_VARIABLE_PREFIX, rank_environment};
pub use outcome::{JobOutcome, RankEnd};
pub use shim::SHIM_NAME;
pub use status_line::STATUS_COLUMNS_VARIABLE;
pub use watchdog::WATCHDOG_NAME;

use crate::exit::Exit;
use crate::rendezvous::StartError;
use crate::types::{Rank, WorldSize};

/// The maximal number of ranks that ringrun starts on one machine. The limit is higher than any useful number of
/// ranks, but low enough to protect the machine from a typing error in `-n`.
pub const LOCAL_RANKS_MAX: u32 = 1024;

/// A job to launch, with checked arguments.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// The number of ranks.
    pub world: WorldSize,
    /// The program of each rank: a built-in program, a name on `PATH`, or a path.
    pub program: OsString,
    /// The arguments of the program.
    pub arguments: Vec<OsString>,
    /// The environment variables that `-x` sets on the ranks. A variable without a value gets its value from ringrun's
    /// environment.
    pub variables: Vec<(OsString, Option<OsString>)>,
    /// The package that ranks import as `mpi4py`.
    pub mpi4py: Mpi4py,
    /// Which rank reads the standard input of ringrun.
    pub stdin_reader: StdinReader,
    /// The working directory of the ranks. `None` selects the working directory of ringrun.
    pub directory: Option<PathBuf>,
    /// The format in which ringrun prints the output of the ranks.
    pub output_format: OutputFormat,
    /// The directory for a copy of the output.
    pub output_dir: Option<PathBuf>,
    /// The time limits.
    pub limits: LaunchLimits,
    /// What happens to the other ranks when a rank fails.
    pub failure_policy: FailurePolicy,
    /// The processors that each rank may use.
    pub binding: Binding,
    /// Whether to print the processors of each rank.
    pub report_bindings: bool,
    /// Which messages ringrun prints.
    pub verbosity: Verbosity,
}

/// What happens to the other ranks when a rank fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailurePolicy {
    /// ringrun ends the job.
    EndJob,
    /// The other ranks continue. But if a rank fails before all ranks have joined the job, ringrun ends the job.
    Tolerate,
}

/// The package that `from mpi4py import MPI` imports on the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mpi4py {
    /// No package: the import raises an `ImportError` that says which option of ringrun to use. In two cases, the
    /// import gets the installed package: on the only rank of a job, and in a process that a rank starts with an MPI
    /// launcher.
    Refused,
    /// The Python package `ringtrain`, which must be installed for the job's interpreter.
    Ringtrain,
    /// The installed package, in which every rank is a world of size 1.
    Installed,
}

/// Which rank reads the standard input of ringrun. The standard input of the other ranks is `/dev/null`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StdinReader {
    /// Rank 0. But if the standard input of ringrun is a terminal, no rank reads it.
    RankZero,
    /// No rank.
    NoRank,
}

/// The processors that each rank may use, among the processors that ringrun may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Binding {
    /// All processors.
    None,
    /// An even share of the processors. If there are enough cores, a share consists of whole cores.
    Core,
    /// All processors of the NUMA nodes in which the rank's even share lies (see `Core`).
    Numa,
}

/// The format of the ranks' lines on ringrun's standard output and standard error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputFormat {
    /// Each line begins with `[RANK]<stdout>:` or `[RANK]<stderr>:`.
    Tagged,
    /// Lines are unchanged.
    Raw,
}

/// Which messages ringrun prints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verbosity {
    /// Only errors.
    Quiet,
    /// Errors, messages about the time limits, and messages about how each rank ended.
    Verbose,
}

/// The time limits of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchLimits {
    /// How long the ranks wait for each other when the job starts. ringrun passes this time to the ranks.
    pub start_timeout: Duration,
    /// The time from the first failure of a rank until the other ranks get SIGTERM.
    pub grace: Duration,
    /// The time from the moment when the ranks get SIGTERM, or SIGINT for Ctrl-C, until ringrun kills the ranks.
    pub kill_after: Duration,
    /// The time from the moment when ringrun itself receives SIGTERM until ringrun kills the ranks. The ranks can
    /// save their state during this time.
    pub term_timeout: Duration,
    /// The time limit of the whole job; `None` for no limit.
    pub job_timeout: Option<Duration>,
}

/// The reason why a job could not be started. If a rank fails after the start, [`run_job`] returns an exit code and no
/// error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The program was not found.
    #[error("command not found: `{}` is not {searched_place}", name.display())]
    CommandNotFound {
        /// The name as the user typed it.
        name: OsString,
        /// Where ringrun looked for the program.
        searched_place: String,
    },
    /// The program cannot be executed.
    #[error("cannot execute {}: {why}", path.display())]
    NotExecutable {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// The directory of `--wdir` cannot be used.
    #[error("cannot run in the directory {}: {source}; see --wdir", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file of `--output-dir` cannot be created.
    #[error("cannot create {} for the ranks' output: {source}; see --output-dir", path.display())]
    OutputDir {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// `-x NAME` names a variable that is not set.
    #[error("-x {0}: {0} is not set in ringrun's environment; give it a value with -x {0}=VALUE", name.display())]
    VariableUnset {
        /// The variable.
        name: OsString,
    },
    /// `--mpi4py` was given and the Python package ringtrain was not found.
    #[error(
        "--mpi4py: {i} cannot find the package ringtrain: {why}; to install it, run: {i} -m pip install ringtrain",
        i = interpreter.display()
    )]
    Mpi4py {
        /// The interpreter that did not find the package.
        interpreter: OsString,
        /// What went wrong, with the last line that the interpreter printed.
        why: String,
    },
    /// The job needs more open files than the system allows.
    #[error(
        "{world} ranks need {needed} open files and this machine allows {allowed}: raise `ulimit -n` or start fewer ranks"
    )]
    TooManyFiles {
        /// The number of ranks.
        world: WorldSize,
        /// The number of open files that the job needs.
        needed: u64,
        /// The hard limit on open files.
        allowed: u64,
    },
    /// The process of a rank could not be started. ringrun killed the ranks that it had already started.
    #[error("cannot start rank {rank} of {world}: {source}; the ranks already started were killed")]
    Spawn {
        /// The rank.
        rank: Rank,
        /// The number of ranks.
        world: WorldSize,
        /// The reason.
        source: io::Error,
    },
    /// The rendezvous server could not be started.
    #[error("cannot start the rendezvous server: {0}")]
    Rendezvous(#[source] StartError),
    /// The operating system refused a resource.
    #[error("the operating system refused {resource}: {source}")]
    System {
        /// The refused resource.
        resource: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl LaunchError {
    /// Returns the exit code of ringrun.
    pub fn exit_code(&self) -> Exit {
        match self {
            Self::CommandNotFound { .. } => Exit::CommandNotFound,
            Self::NotExecutable { .. } => Exit::CommandNotExecutable,
            Self::VariableUnset { .. } => Exit::Usage,
            Self::Directory { .. } | Self::OutputDir { .. } | Self::TooManyFiles { .. } => {
                Exit::Configuration
            }
            Self::Mpi4py { .. } | Self::Spawn { .. } | Self::Rendezvous(_) => Exit::Start,
            Self::System { .. } => Exit::Failure,
        }
    }
}

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

/// Sets the name that `ps` and `top` show for this process. Without this call, `ps` and `top` show the name `exe` for
/// a process that was started from `/proc/self/exe`.
pub fn set_process_name(name: &str) {
    let _ = std::fs::write("/proc/self/comm", name);
}
