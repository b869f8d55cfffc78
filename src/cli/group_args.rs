//! The flags with which ringtrain and ringbench join a job.

use std::fs::File;
use std::io::Read as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::log_format::{LogFormat, LogLevel, start_log};
use super::observe_args::ObserveArgs;
use crate::exit::Exit;
use crate::group::{
    Algorithms, Checksums, Error, Group, JoinMethod, JoinOptions, LocalTransport, SEGMENT_BYTES,
    START_TIMEOUT, Streams,
};
use crate::rendezvous::{
    PeersFile, SECRET_VARIABLE, StartError, from_environment, ports_from_environment, secret_from_environment,
};
use crate::transport::tcp::{CONNECT_TIMEOUT, CongestionControl, PacingRate};
use crate::types::{Rank, counted};
use crate::wire::frame::SEGMENT_BYTES_MAX;
use crate::wire::{Cause, SECRET_BYTES_MAX, Secret};

/// The maximal length of a secret file, in bytes. A file of this length can hold the longest secret, with white space
/// before and after the secret.
const SECRET_FILE_BYTES_MAX: u64 = 2 * SECRET_BYTES_MAX as u64;

// These comments are also the text of --help, so they have no backticks.
#[allow(clippy::doc_markdown, reason = "help texts")]
/// How this process joins its job and communicates with the other ranks.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Joining the job")]
pub struct GroupArgs {
    /// File with the address of every rank: one host:port per line, in rank order. A # begins a comment.
    /// Do not use this option under ringrun, which gives each rank the addresses
    #[arg(long, value_name = "FILE", requires = "rank")]
    pub peers: Option<PathBuf>,

    /// The rank of this process. The first address in the peers file belongs to rank 0
    #[arg(long, value_name = "R", requires = "peers")]
    pub rank: Option<u32>,

    /// Listen on this IP address instead of the address in the peers file. The port is always the port in the peers
    /// file
    #[arg(long, value_name = "IP", requires = "peers")]
    pub bind: Option<IpAddr>,

    /// File with the secret of the job. The secret must be the same on every rank. Without this option, the secret is
    /// the value of the environment variable RING_SECRET. Ranks of srun, torchrun or mpirun without either use the file
    /// .ringtrain-secret in the home directory. Other ranks without a secret can use only loopback addresses
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,

    /// How long to wait until all ranks have joined [default: the --start-timeout of ringrun, or 30 without ringrun]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub start_timeout: Option<Duration>,

    /// The maximal time of one collective operation. If an operation takes longer, the job fails on all ranks
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub timeout: Duration,

    /// The TCP congestion control of this rank's connections to other ranks. auto: cubic if the kernel has cubic,
    /// otherwise the default of the host. host: the default of the host. You may also give a name from the file
    /// /proc/sys/net/ipv4/tcp_available_congestion_control
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub tcp_congestion: CongestionControl,

    /// The maximal rate at which this rank sends to each other rank, for example 940mbit or 1.2gbit. The kernel then
    /// sends packets evenly instead of in bursts. If you know the rate of the network, give that rate [default: no
    /// limit]
    #[arg(long, value_name = "RATE")]
    pub tcp_pacing: Option<PacingRate>,

    /// The number of TCP connections between two ranks, from 1 to 8, or auto. Use several connections if one connection
    /// does not reach the rate of the network. With auto, the ranks time a transfer over 1 and over 4 connections
    /// when the job starts. If 4 connections take at least 10% less time, the ranks use 4, otherwise 1. Rank 0's
    /// setting applies to all ranks
    #[arg(long, value_name = "K", default_value_t)]
    pub streams: Streams,

    /// Ranks divide long messages into segments of this size, so that sending and reducing overlap. Rank 0's setting
    /// applies to all ranks
    #[arg(long, value_name = "BYTES", default_value_t = SEGMENT_BYTES, value_parser = parse_segment_bytes)]
    pub segment_bytes: usize,

    /// The algorithm of the collectives. auto chooses an algorithm for each operation and size. To use one algorithm
    /// for everything, give its name: one-shot, butterfly, direct, doubling, double-tree, hierarchy, ring or tree. To
    /// choose by size in bytes, give ranges, such as direct:0-65536;ring:65537-max. Rank 0's setting applies to all
    /// ranks
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub algorithm: Algorithms,

    /// How ranks on the same host exchange data. Rank 0's setting applies to all ranks
    #[arg(long, value_name = "NAME", value_enum, default_value = "auto")]
    pub transport: TransportName,

    /// A name for the host of this rank. Ranks with different names communicate as if they were on different hosts.
    /// Use different names to test a job of several hosts on one machine, or if containers cannot share memory
    #[arg(long, value_name = "NAME")]
    pub host_id: Option<String>,

    /// Add a CRC32C checksum to all payloads, including payloads between ranks of one host. Rank 0's setting applies to
    /// all ranks [default: only to payloads between hosts]
    #[arg(long, overrides_with = "no_checksum")]
    pub checksum: bool,

    /// Send payloads without CRC32C checksums. Between hosts, only the weak checksum of TCP then protects the
    /// payloads. Rank 0's setting applies to all ranks
    #[arg(long, overrides_with = "checksum")]
    pub no_checksum: bool,

    /// What this rank records.
    #[command(flatten)]
    pub observe: ObserveArgs,
}

/// How ranks on the same host exchange data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum TransportName {
    /// Through shared memory if shared memory is available, otherwise over TCP.
    Auto,
    /// Over TCP.
    Tcp,
    /// Through shared memory. If shared memory is not available, the job does not start.
    Shm,
}

impl From<TransportName> for LocalTransport {
    fn from(name: TransportName) -> Self {
        match name {
            TransportName::Auto => Self::Auto,
            TransportName::Tcp => Self::Tcp,
            TransportName::Shm => Self::Shm,
        }
    }
}

/// Why a program could not join its job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The job did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The secret cannot be read or used.
    #[error("{place}: {problem}")]
    Secret {
        /// The place of the secret: a file or an environment variable.
        place: String,
        /// The problem.
        problem: String,
    },
    /// `--peers` was given to a process that got its rank from ringrun.
    #[error(
        "--peers was given, but ringrun has already given this process a rank; leave out --peers and --rank"
    )]
    PeersUnderRingrun,
}

impl GroupArgs {
    /// Joins the job that the flags and the environment describe. The flags come first. Without a launcher and without a
    /// peers file, the job consists of this process alone.
    ///
    /// # Errors
    ///
    /// [`JoinError`], whose [`JoinError::exit_code`] is the program's exit code.
    pub fn join(&self) -> Result<Group, JoinError> {
        let environment = from_environment().map_err(StartError::from);
        let method = match (&self.peers, environment) {
            (Some(_), Ok(JoinMethod::Launched(_))) => return Err(JoinError::PeersUnderRingrun),
            // With a peers file, the variables of other launchers do not count.
            (Some(path), _) => JoinMethod::Peers {
                file: PeersFile::read(path).map_err(StartError::from)?,
                rank: Rank::new(self.rank.unwrap_or_default()),
                bind: self.bind,
            },
            (None, environment) => environment?,
        };
        let launcher_timeout = method.start_timeout();
        let options = JoinOptions {
            method,
            ports: ports_from_environment().map_err(StartError::from)?,
            secret: self.find_secret()?,
            start_timeout: self.start_timeout.or(launcher_timeout).unwrap_or(START_TIMEOUT),
            operation_timeout: self.timeout,
            congestion: self.tcp_congestion.clone(),
            pacing: self.tcp_pacing,
            streams: self.streams,
            segment_bytes: self.segment_bytes,
            checksums: self.checksums(),
            algorithms: self.algorithm.clone(),
            transport: self.transport.into(),
            host_id: self.host_id.clone(),
            recording: self.observe.recording_options(),
            ..JoinOptions::default()
        };
        Ok(Group::join(&options)?)
    }

    /// Starts the log of the program.
    ///
    /// # Errors
    ///
    /// Returns a sentence if the environment has a wrong format.
    pub(super) fn start_log(&self, program: &'static str, level: LogLevel) -> Result<(), String> {
        let launched = || {
            let method = from_environment().ok().filter(|method| *method != JoinMethod::Alone)?;
            Some(method.rank_and_world().0)
        };
        let rank = self.rank.map(Rank::new).or_else(launched);
        let format = self.observe.log_format.map_or_else(LogFormat::from_environment, Ok)?;
        start_log(level, format, (program, rank));
        Ok(())
    }

    /// Returns one line about the job's ranks, transports and timeouts.
    pub fn describe_job(&self, group: &Group) -> String {
        let streams = match group.streams() {
            0 | 1 => String::new(),
            streams => format!(", {streams} streams"),
        };
        format!(
            "{} over {} ({}{streams}), {} of them on this host; timeouts: connection {} s, operation {} s",
            counted(group.size(), "rank"),
            group.transport(),
            group.congestion_control().unwrap_or("the host's congestion control"),
            group.local_size(),
            CONNECT_TIMEOUT.as_secs_f32(),
            self.timeout.as_secs_f32(),
        )
    }

    /// Returns the setting that `--checksum` and `--no-checksum` select.
    fn checksums(&self) -> Checksums {
        match (self.checksum, self.no_checksum) {
            (true, _) => Checksums::On,
            (false, true) => Checksums::Off,
            (false, false) => Checksums::Auto,
        }
    }

    /// Returns the secret from `--secret-file`, or without this option from the environment. Returns [`Secret::none`]
    /// if there is no secret.
    fn find_secret(&self) -> Result<Secret, JoinError> {
        if let Some(path) = &self.secret_file {
            return read_secret_file(path);
        }
        let secret = secret_from_environment().map_err(|error| JoinError::Secret {
            place: format!("the environment variable {SECRET_VARIABLE}"),
            problem: error.to_string(),
        })?;
        Ok(secret.unwrap_or_else(Secret::none))
    }
}

fn read_secret_file(path: &Path) -> Result<Secret, JoinError> {
    let place = format!("the secret file {}", path.display());
    let secret_error = |problem: String| JoinError::Secret { place: place.clone(), problem };
    let file = File::open(path).map_err(|error| secret_error(error.to_string()))?;
    // Limit the number of bytes to read. The length in the file's metadata is not reliable: devices have the length
    // 0.
    let mut bytes = Vec::new();
    file.take(SECRET_FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| secret_error(error.to_string()))?;
    if bytes.len() as u64 > SECRET_FILE_BYTES_MAX {
        return Err(secret_error(format!(
            "it has more than {SECRET_FILE_BYTES_MAX} bytes, too many for a secret"
        )));
    }
    Secret::new(&bytes).map_err(|error| secret_error(error.to_string()))
}

impl JoinError {
    /// Returns the exit code of a program that fails with this error.
    pub fn exit_code(&self) -> Exit {
        match self {
            Self::Start(error) if error.is_wrong_secret() => Exit::Secret,
            Self::Start(error) if error.is_version_mismatch() => Exit::Version,
            Self::Start(error) => match error {
                StartError::PeersFile(_)
                | StartError::Environment(_)
                | StartError::Secret(_)
                | StartError::UserSecret { .. }
                | StartError::RankOutOfRange { .. }
                | StartError::NeedsSecret { .. }
                | StartError::SocketOptions(_)
                | StartError::Recording { .. }
                | StartError::CannotListen { .. } => Exit::Configuration,
                // A rank stops the start if it does not know an option of rank 0.
                StartError::Failed(Cause::Aborted { .. }) => Exit::Start,
                StartError::Failed(cause) => exit_code_of_cause(cause),
                StartError::PortInUse { .. }
                | StartError::PortsInUse { .. }
                | StartError::RendezvousPortInUse { .. } => Exit::PortInUse,
                StartError::PeerLost { .. } | StartError::RendezvousLost { .. } => Exit::PeerLost,
                StartError::Handshake { .. } if error.is_configuration_error() => Exit::Configuration,
                _ => Exit::Start,
            },
            Self::Secret { .. } | Self::PeersUnderRingrun => Exit::Configuration,
        }
    }
}

/// Returns the exit code for the error of an operation on a group.
pub fn exit_code_of_group_error(error: &Error) -> Exit {
    error.cause().map_or(Exit::Failure, exit_code_of_cause)
}

fn exit_code_of_cause(cause: &Cause) -> Exit {
    match cause {
        Cause::PeerLost { .. } | Cause::PeerLeft { .. } => Exit::PeerLost,
        Cause::Mismatch { .. } => Exit::Mismatch,
        Cause::Timeout { .. } => Exit::Timeout,
        Cause::Misbehaved { .. } => Exit::Protocol,
        // ringtrain aborts a job when the training diverges.
        Cause::Aborted { .. } => Exit::Diverged,
    }
}

/// Parses a number of seconds, from a millisecond (the unit of deadlines on the wire) to a month.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=2_592_000.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!(
            "`{text}` is not a number of seconds from 0.001 (a millisecond) to 2592000 (a month)"
        )),
    }
}

fn parse_segment_bytes(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(bytes) if (1024..=SEGMENT_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(64) => Ok(bytes),
        _ => Err(format!("`{text}` is not a multiple of 64 between 1024 and {SEGMENT_BYTES_MAX}")),
    }
}
