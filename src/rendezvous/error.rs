//! The errors with which a rank fails to join its job.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::environment_error::EnvironmentError;
use super::peers_file::PeersFileError;
use super::ports::PortRange;
use crate::types::{Rank, WorldSize, counted, debug_as_display};
use crate::wire::cause::means_no_answer;
use crate::wire::handshake::{HandshakeError, Refusal};
use crate::wire::{Cause, SecretError};

/// Why this rank could not join its job.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The peers file is invalid.
    #[error(transparent)]
    PeersFile(#[from] PeersFileError),
    /// The environment variables are invalid.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The secret is invalid.
    #[error("{0}")]
    Secret(#[from] SecretError),
    /// The rank is not below the world size.
    #[error("rank {rank} is out of range: the job has {}, numbered from 0", counted(world, "rank"))]
    RankOutOfRange {
        /// The requested rank.
        rank: Rank,
        /// The world size.
        world: WorldSize,
    },
    /// The job has no secret, but other hosts could connect to it.
    #[error(
        "the job has no secret and {address} is not a loopback address: any process that can reach this address could join the job; give every rank the same --secret-file (or RING_SECRET)"
    )]
    NeedsSecret {
        /// The address that other hosts could reach.
        address: SocketAddr,
    },
    /// The user's secret cannot be read or created. Ranks that a launcher other than `ringrun` started use it if they have no
    /// other secret.
    #[error(
        "the secret of this user, {}, cannot be used: {problem}; correct this, or set RING_SECRET to the same secret on every rank",
        path.display()
    )]
    UserSecret {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// Rank 0 has another secret than this rank, which uses the user's secret.
    #[error(
        "{source}; this rank uses the secret of this user (~/.ringtrain-secret); if the hosts have separate home directories, set RING_SECRET to the same secret on every rank"
    )]
    UserSecretDiffers {
        /// The error of the handshake.
        source: Box<StartError>,
    },
    /// The name of the host of rank 0 has no address.
    #[error(
        "the host of rank 0, `{host}`, has no address: {source}; set RING_MASTER_ADDR to a name or address of this host that every rank knows"
    )]
    UnknownHost {
        /// The name of the host.
        host: String,
        /// The error of the last attempt.
        source: io::Error,
    },
    /// Another process listens on the port of the rendezvous, which rank 0 serves.
    #[error(
        "port {} on {} is in use by another process, and the other ranks expect rank 0 on this port; set RING_PORT to a free port on every rank",
        address.port(), address.ip()
    )]
    RendezvousPortInUse {
        /// The address on which rank 0 tried to listen.
        address: SocketAddr,
    },
    /// Another process listens on this rank's port.
    #[error("port {} on {} is in use by another process; stop that process or choose another port for rank {rank}", address.port(), address.ip())]
    PortInUse {
        /// The address on which this rank tried to listen.
        address: SocketAddr,
        /// This rank.
        rank: Rank,
    },
    /// All ports of `--port` are in use.
    #[error(
        "{process} on host {host} cannot listen: {} in use on {ip} by other programs, which `ss -ltnp` lists; end them, or choose other ports with --port", ports.describe_all()
    )]
    PortsInUse {
        /// The process that wants to listen: a rank, or the rendezvous.
        process: String,
        /// The name of its host.
        host: String,
        /// The ports.
        ports: PortRange,
        /// The address on which the process tried to listen.
        ip: IpAddr,
    },
    /// This rank cannot listen on the address.
    #[error(
        "rank {rank} cannot listen on {address}: {source}; does the peers file name this host for rank {rank}?"
    )]
    CannotListen {
        /// The address on which this rank tried to listen.
        address: SocketAddr,
        /// This rank.
        rank: Rank,
        /// The operating system's error.
        source: io::Error,
    },
    /// This host does not offer a socket option that was requested, for example a congestion control. The text names
    /// the option.
    #[error("{0}")]
    SocketOptions(String),
    /// The rendezvous does not answer.
    #[error("{server_name} at {address} did not answer within {} s ({detail}); start {server_name}, or check the address and the firewall", timeout.as_secs_f32())]
    NoRendezvous {
        /// The name of the process that serves the rendezvous.
        server_name: String,
        /// The address of `server_name`.
        address: SocketAddr,
        /// The error of the last attempt to connect.
        detail: String,
        /// The start timeout: the time for which this rank tried to connect.
        timeout: Duration,
    },
    /// The process at the other end does not belong to this job.
    #[error("{server_name} at {address}: {source}")]
    Handshake {
        /// The name of the process that serves the rendezvous.
        server_name: String,
        /// The address of `server_name`.
        address: SocketAddr,
        /// The error of the handshake.
        source: HandshakeError,
    },
    /// Not all ranks joined before the start timeout.
    #[error("not all ranks joined within {} s: missing {missing}; start the missing ranks, or see their output for the reason", timeout.as_secs_f32())]
    Missing {
        /// The missing ranks, as text.
        missing: String,
        /// The start timeout that is over.
        timeout: Duration,
    },
    /// The rendezvous refused this rank.
    #[error("the rendezvous refused this rank: {0}")]
    Refused(String),
    /// The ranks of an isolated group cannot connect. The text says why.
    #[error("{0}")]
    Isolated(String),
    /// A rank ended, or its connection to the rendezvous failed, before the job started.
    #[error(
        "rank {rank} on {host} was lost while the job was starting: {detail}; {}",
        advice_for_lost_rank(detail)
    )]
    PeerLost {
        /// The rank that was lost.
        rank: Rank,
        /// The host of that rank.
        host: String,
        /// A description of the failure.
        detail: String,
    },
    /// The rendezvous ended or broke the protocol.
    #[error("{server_name} at {address} was lost while the job was starting: {detail}")]
    RendezvousLost {
        /// The name of the process that serves the rendezvous.
        server_name: String,
        /// The address of `server_name`.
        address: SocketAddr,
        /// A description of the failure.
        detail: String,
    },
    /// The job failed in its first barrier, which is the last step of the start.
    #[error("{0}")]
    Failed(Cause),
    /// The rank cannot write what it should record.
    #[error("the {what} cannot write to {}: {source}; pass another path", path.display())]
    Recording {
        /// What would be recorded.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// This machine's operating system refused a system call or a resource.
    #[error("the operating system refused {what}: {source}")]
    System {
        /// The system call or resource.
        what: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Returns the advice for a rank that was lost with the failure `detail`.
fn advice_for_lost_rank(detail: &str) -> &'static str {
    if means_no_answer(detail) {
        "check the network to that host: addresses, MTU and firewall"
    } else {
        "see the output of that rank, and if that rank still runs, check the network to its host"
    }
}

debug_as_display!(StartError);

impl StartError {
    /// Returns whether this error means that the peers' secrets differ.
    pub fn is_wrong_secret(&self) -> bool {
        matches!(
            self,
            Self::UserSecretDiffers { .. }
                | Self::Handshake {
                    source: HandshakeError::Secret | HandshakeError::Refused(Refusal::Secret),
                    ..
                }
        )
    }

    /// Returns whether this error means that the peers' protocol versions differ.
    pub fn is_version_mismatch(&self) -> bool {
        matches!(
            self,
            Self::Handshake {
                source: HandshakeError::Version { .. } | HandshakeError::Refused(Refusal::Version),
                ..
            }
        )
    }

    /// Returns whether the ranks were started with settings that contradict each other, for example with different
    /// peers files, or with the same rank twice.
    pub fn is_configuration_error(&self) -> bool {
        let Self::Handshake { source: HandshakeError::Refused(refusal), .. } = self else { return false };
        matches!(
            refusal,
            Refusal::Job | Refusal::World | Refusal::PeersFile | Refusal::Rank | Refusal::SameRank
        )
    }
}
