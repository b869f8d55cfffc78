//! The reasons why a job cannot be started.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::message::LaunchMessage;
use crate::exit::Exit;
use crate::rendezvous::StartError;
use crate::types::{Rank, WorldSize, counted, plural};

/// Why the ranks of a host could not be started, or why the host was lost.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("host {host}{}: {reason}", via.as_ref().map_or_else(String::new, |via| format!(", reached from host {via}")))]
pub struct HostError {
    /// The name of the host.
    pub host: Arc<str>,
    /// The host that reaches it through ssh; `None` if ringrun itself does.
    pub via: Option<Arc<str>>,
    /// The exit code of ringrun if the job cannot start because of this error.
    pub exit_code: u8,
    /// The reason, and what the user can do.
    pub reason: String,
}

impl HostError {
    /// Returns the message that ringrun prints.
    pub(super) fn message(&self) -> LaunchMessage {
        LaunchMessage::error(self.to_string()).on_host(Some(&self.host))
    }
}

/// The reason why a job could not be started. If a rank fails after the start, [`run_job`](super::run_job) returns an exit code
/// and no error.
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
        "--mpi4py: {i} cannot find the package ringtrain: {why}; to install it, run in a clone of ringtrain: \
         {i} -m pip install ./bindings/python",
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
        "{} {} {needed} open files and this machine allows {allowed}: raise `ulimit -n` or start fewer ranks",
        counted(world, "rank"),
        plural(world, "needs", "need")
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
    /// Some hosts could not be reached, or their ranks could not be started.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Hosts(Vec<HostError>),
    /// The program `ssh` could not be started.
    #[error(
        "cannot start ssh, which starts the ranks on other hosts: {0}; on Debian, run: apt-get install openssh-client"
    )]
    Ssh(#[source] io::Error),
    /// There is no address at which the other hosts can reach this host.
    #[error("{0}")]
    Address(String),
    /// The ports of `--port` are in use.
    #[error("{0}")]
    Ports(String),
    /// The ringruns of the nodes did not meet.
    #[error("--rdzv-endpoint {endpoint}: {source}; run the same command on all nodes")]
    Nodes {
        /// The endpoint.
        endpoint: String,
        /// The reason.
        source: StartError,
    },
    /// A signal arrived before the ranks were started.
    #[error("stopped by signal {0} before the ranks started")]
    Interrupted(i32),
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
    /// Returns the messages that ringrun prints.
    pub fn messages(&self) -> Vec<LaunchMessage> {
        match self {
            Self::Hosts(errors) => errors.iter().map(HostError::message).collect(),
            other => vec![LaunchMessage::error(other.to_string())],
        }
    }

    /// Returns the exit code of ringrun.
    pub fn exit_code(&self) -> u8 {
        let exit = match self {
            Self::Hosts(errors) => return errors.first().map_or(Exit::Start as u8, |error| error.exit_code),
            Self::Interrupted(signal) => return u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::CommandNotFound { .. } => Exit::CommandNotFound,
            Self::NotExecutable { .. } => Exit::CommandNotExecutable,
            Self::VariableUnset { .. } => Exit::Usage,
            Self::Ports(_)
            | Self::Nodes { source: StartError::PortsInUse { .. }, .. }
            | Self::Rendezvous(StartError::PortsInUse { .. }) => Exit::PortInUse,
            Self::Directory { .. } | Self::OutputDir { .. } | Self::TooManyFiles { .. } => {
                Exit::Configuration
            }
            Self::Mpi4py { .. }
            | Self::Spawn { .. }
            | Self::Rendezvous(_)
            | Self::Ssh(_)
            | Self::Nodes { .. }
            | Self::Address(_) => Exit::Start,
            Self::System { .. } => Exit::Failure,
        };
        exit as u8
    }
}
