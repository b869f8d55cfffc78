//! The description of a job: what the user has asked for, with checked arguments.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::interfaces::InterfaceFilter;
use super::message::MessageFormat;
use super::share::RankShare;
use crate::rendezvous::{NodeOptions, PortRange};
use crate::types::WorldSize;

/// The maximal number of hosts of a job.
pub const HOSTS_MAX: usize = 256;

/// The maximal number of ranks that ringrun starts on one machine. The limit is higher than any useful number of
/// ranks, but low enough to protect the machine from a typing error in `-n`.
pub const LOCAL_RANKS_MAX: u32 = 1024;

/// A job to launch, with checked arguments.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// The number of ranks.
    pub world: WorldSize,
    /// The ranks on this host.
    pub share: RankShare,
    /// How this ringrun meets those of the other nodes; `None` if this ringrun starts all ranks. `share` then has the ranks of
    /// node 0, because the number of this node is not known yet.
    pub nodes: Option<NodeOptions>,
    /// The other hosts of the job.
    pub remote_hosts: Vec<RemoteHost>,
    /// How to reach the other hosts.
    pub ssh: SshOptions,
    /// The addresses that the ranks and the rendezvous may use. With `None`, the routes to the other hosts decide.
    pub interfaces: Option<InterfaceFilter>,
    /// The ports on which the ranks and the rendezvous may listen. With `None`, the operating system chooses the ports.
    pub ports: Option<PortRange>,
    /// The programs of the ranks, in rank order. There is at least one.
    pub programs: Vec<RankProgram>,
    /// The package that ranks import as `mpi4py`.
    pub mpi4py: Mpi4py,
    /// Which ranks read the standard input of ringrun.
    pub stdin_reader: StdinReader,
    /// The format in which ringrun prints the output of the ranks.
    pub output_format: OutputFormat,
    /// The format in which ringrun prints its own messages.
    pub message_format: MessageFormat,
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

/// A program, and the number of consecutive ranks that run it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankProgram {
    /// The number of ranks.
    pub ranks: u32,
    /// A built-in program, a name on `PATH`, or a path.
    pub program: OsString,
    /// The arguments of the program.
    pub arguments: Vec<OsString>,
    /// The environment variables that `-x` sets on the ranks. A variable without a value gets its value from ringrun's
    /// environment.
    pub variables: Vec<(OsString, Option<OsString>)>,
    /// The working directory of the ranks. `None` selects the working directory of ringrun.
    pub directory: Option<OsString>,
}

/// A host that ringrun reaches through ssh.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteHost {
    /// The name that ssh gets: a host name, an address or a name of the user's ssh configuration, perhaps with `USER@`.
    pub name: Arc<str>,
    /// The ranks on the host.
    pub share: RankShare,
}

/// How ringrun reaches the other hosts.
#[derive(Clone, Default, Debug)]
pub struct SshOptions {
    /// The port of sshd; `None` for the port that ssh chooses.
    pub port: Option<u16>,
    /// The file with the private key; `None` for the keys that ssh chooses.
    pub identity: Option<PathBuf>,
    /// Further arguments of ssh.
    pub arguments: Vec<String>,
    /// The directory whose `bin/ringrun` is the ringrun of the other hosts. With `None`, it is the file with the same path
    /// as this executable or, if there is no such file, `ringrun` in `PATH`.
    pub remote_prefix: Option<PathBuf>,
    /// The most hosts that ringrun, and each host, reaches itself. Hosts reach further hosts. With 0, ringrun reaches all hosts.
    pub fanout: u16,
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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

/// Which ranks read the standard input of ringrun. The standard input of the other ranks is `/dev/null`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StdinReader {
    /// Rank 0. But if the standard input of ringrun is a terminal, no rank reads it.
    RankZero,
    /// All ranks: each gets a copy. But if the standard input of ringrun is a terminal, no rank reads it.
    AllRanks,
    /// No rank.
    NoRank,
}

/// The processors that each rank may use, among the processors that ringrun may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
    /// As [`Self::Tagged`], after the time (UTC) at which ringrun has received the end of the line.
    Timestamped,
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
