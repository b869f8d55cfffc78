//! Launching a job on this machine: processes, their environment, their output and their end.
//!
//! ```text
//!  ringrun ---- job: one thread waits for signals (SIGCHLD among them), output's events and the supervisor's deadlines
//!   |  |  \---- output: one thread reads every rank's pipes
//!   |  |
//!   |  +------- watchdog: a process that kills the rest if ringrun is killed
//!   +---------- rank 0, 1, ...: the shim, which becomes the command; each leads a process group
//! ```
//!
//! When to stop a job and how hard is decided by `supervisor`, which does no IO. Nothing here reads arguments; besides
//! `rendezvous`, nothing but this reads the environment. There are no temporary files.

mod binding;
mod blame;
mod claims;
mod command;
mod environment;
mod job;
mod lines;
mod mpi4py;
mod mpi4py_guard;
mod outcome;
mod output;
mod processes;
mod rank_processes;
mod shim;
mod signals;
mod supervisor;
mod topology;
mod watchdog;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

pub use command::Program;
pub use environment::{JobVariables, OWN_PREFIX, environment};
pub use outcome::{JobOutcome, RankEnd};
pub use shim::SHIM;
pub use watchdog::WATCHDOG;

use crate::exit::Exit;
use crate::rendezvous::StartError;
use crate::types::{Rank, WorldSize};

/// The most ranks that ringrun starts on one machine. Far more than its cores can serve, and few enough that a slip of the
/// finger does not take the machine down.
pub const LOCAL_RANKS_MAX: u32 = 1024;

/// A job, its arguments checked.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// How many ranks.
    pub world: WorldSize,
    /// What each of them runs: a program of ours, a name to be found on `PATH`, or a path.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Variables to set besides; without a value, ringrun's own.
    pub variables: Vec<(OsString, Option<OsString>)>,
    /// What ranks import as `mpi4py`.
    pub mpi4py: Mpi4py,
    /// Where the ranks run; `None` for here.
    pub directory: Option<PathBuf>,
    /// How their output appears on ours.
    pub output_format: OutputFormat,
    /// Where a copy of their output goes.
    pub output_dir: Option<PathBuf>,
    /// How long things may take.
    pub limits: LaunchLimits,
    /// Which processors each rank may use.
    pub binding: Binding,
    /// Whether to print them.
    pub report_bindings: bool,
    /// How much ringrun says.
    pub verbosity: Verbosity,
}

/// What `from mpi4py import MPI` imports on the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mpi4py {
    /// Nothing: an `ImportError` says which option of ringrun to use. A process that an MPI launcher started in a rank, and the
    /// only rank of a job, import the installed package.
    Refused,
    /// The Python package `ringtrain`, which must be installed for the job's interpreter.
    Ringtrain,
    /// The installed package. Every rank is a world of one.
    Installed,
}

/// Which processors each rank may use, of those that ringrun may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Binding {
    /// All of them.
    None,
    /// An even share: whole cores if there are enough.
    Core,
    /// The NUMA nodes in which its even share is.
    Numa,
}

/// How the ranks' lines appear on ringrun's standard output and error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputFormat {
    /// Each with `[RANK]<stdout>:` or `[RANK]<stderr>:` before it.
    Tagged,
    /// As they are.
    Raw,
}

/// How much ringrun prints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verbosity {
    /// Only what went wrong.
    Quiet,
    /// Also the limits, and how each rank ends.
    Verbose,
}

/// How long things may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchLimits {
    /// The ranks' meeting; passed on to them.
    pub start_timeout: Duration,
    /// After the first failure, until the other ranks are told to end.
    pub grace: Duration,
    /// After they are told to end, until they are killed.
    pub kill_after: Duration,
    /// The same, if it was SIGTERM to ringrun that made it tell them: time to save.
    pub term_timeout: Duration,
    /// The whole job; `None` for as long as it takes.
    pub job_timeout: Option<Duration>,
}

/// Why a job could not be run. What went wrong in a rank is no such error: that is a [`JobOutcome`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No such program.
    #[error("command not found: `{}` is not {place}", name.display())]
    CommandNotFound {
        /// As it was typed.
        name: OsString,
        /// Where it was looked for.
        place: String,
    },
    /// A program that may not be run.
    #[error("cannot execute {}: {why}", path.display())]
    NotExecutable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The directory of `--wdir` cannot be used.
    #[error("cannot run in the directory {}: {source}; see --wdir", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file of `--output-dir` cannot be made.
    #[error("cannot create {} for the ranks' output: {source}; see --output-dir", path.display())]
    OutputDir {
        /// The file or directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// `-x NAME` of a variable that does not exist.
    #[error("-x {0}: {0} is not set in ringrun's environment; give it a value with -x {0}=VALUE", name.display())]
    VariableUnset {
        /// The variable.
        name: OsString,
    },
    /// `--mpi4py` was given and the Python package ringtrain was not found.
    #[error(
        "--mpi4py: {i} cannot say where the package ringtrain is: {why}; install it where {i} finds it: {i} -m pip install ringtrain",
        i = interpreter.display()
    )]
    Mpi4py {
        /// Who was asked.
        interpreter: OsString,
        /// What came of it, the interpreter's last words among that.
        why: String,
    },
    /// The machine does not allow so many open files.
    #[error(
        "{world} ranks need {needed} open files and this machine allows {allowed}: raise `ulimit -n` or lower -n"
    )]
    TooManyFiles {
        /// The ranks asked for.
        world: WorldSize,
        /// What they need.
        needed: u64,
        /// The hard limit.
        allowed: u64,
    },
    /// A process could not be started; those before it have been killed.
    #[error("cannot start rank {rank} of {world}: {source}; the ranks already started were killed")]
    Spawn {
        /// The rank.
        rank: Rank,
        /// Of how many.
        world: WorldSize,
        /// Why not.
        source: io::Error,
    },
    /// The rendezvous could not be served.
    #[error("cannot serve the rendezvous: {0}")]
    Rendezvous(#[source] StartError),
    /// This machine's operating system refused something.
    #[error("the operating system refused {what}: {source}")]
    System {
        /// The thing refused.
        what: &'static str,
        /// Its own words.
        source: io::Error,
    },
}

impl LaunchError {
    /// What ringrun exits with.
    pub fn exit(&self) -> Exit {
        match self {
            Self::CommandNotFound { .. } => Exit::CommandNotRun,
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

/// Runs a job to its end and returns what ringrun exits with. On return no process of the job is left.
///
/// To be called once, on the main thread: it takes over the process's signals and children.
///
/// # Errors
///
/// If the job could not be started; see [`LaunchError`].
pub fn run(plan: &LaunchPlan) -> Result<u8, LaunchError> {
    job::run(plan)
}

/// The programs that ringrun's executable becomes for its own use, by the name it is called by.
pub fn internal_program(name: &OsStr, arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if name == WATCHDOG {
        Some(watchdog::main())
    } else if name == SHIM {
        Some(shim::main(arguments))
    } else {
        None
    }
}

/// Gives this process the name that `ps` and `top` show; run from `/proc/self/exe`, it would be called `exe`.
pub fn name_process(name: &str) {
    let _ = std::fs::write("/proc/self/comm", name);
}
