//! Why a rank could not join its job.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::{EnvironmentError, PeersFileError};
use crate::types::{Rank, WorldSize};
use crate::wire::handshake::{HandshakeError, Refusal};
use crate::wire::{Cause, SecretError};

/// Why the job did not start, as seen from this rank.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The peers file is wrong.
    #[error(transparent)]
    PeersFile(#[from] PeersFileError),
    /// The environment is wrong.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The secret is invalid.
    #[error("{0}")]
    Secret(#[from] SecretError),
    /// The rank is not below the world size.
    #[error("rank {rank} is out of range: there are {world} ranks, numbered 0 to {}", world.get() - 1)]
    RankOutOfRange {
        /// The rank asked for.
        rank: Rank,
        /// The world size.
        world: WorldSize,
    },
    /// A job without a secret that other hosts could reach.
    #[error(
        "the job has no secret and {address} is not a loopback address: any process that can reach it could join; give every rank the same --secret-file (or RING_SECRET)"
    )]
    NeedsSecret {
        /// The address that is not loopback.
        address: SocketAddr,
    },
    /// Another process listens on that port.
    #[error("port {} on {} is in use by another process; stop it or choose another port for rank {rank}", address.port(), address.ip())]
    PortInUse {
        /// The address on which this rank tried to listen.
        address: SocketAddr,
        /// This rank.
        rank: Rank,
    },
    /// This rank cannot listen on the address.
    #[error(
        "rank {rank} cannot listen on {address}: {source}; is this the host that the peers file names for it?"
    )]
    CannotListen {
        /// The address on which this rank tried to listen.
        address: SocketAddr,
        /// This rank.
        rank: Rank,
        /// The operating system's error.
        source: io::Error,
    },
    /// The socket options are not available.
    #[error("{0}")]
    SocketOptions(String),
    /// The rendezvous does not answer.
    #[error("{who} at {address} did not answer within {} s ({detail}); start it, or check the address and the firewall", timeout.as_secs_f32())]
    NoRendezvous {
        /// The process that should have answered.
        who: String,
        /// Its address.
        address: SocketAddr,
        /// The last attempt's error.
        detail: String,
        /// How long this rank tried.
        timeout: Duration,
    },
    /// The process at the other end does not belong to this job.
    #[error("{who} at {address}: {source}")]
    Handshake {
        /// The process that should have answered.
        who: String,
        /// Its address.
        address: SocketAddr,
        /// What is wrong.
        source: HandshakeError,
    },
    /// Not all ranks joined.
    #[error("not all ranks came within {} s: missing {missing}; start them, or look at their own output for why they did not come", timeout.as_secs_f32())]
    Missing {
        /// The missing ranks, as text.
        missing: String,
        /// How long this rank waited.
        timeout: Duration,
    },
    /// The rendezvous refused this rank.
    #[error("the rendezvous refused this rank: {0}")]
    Refused(String),
    /// A rank that had registered ended, or its connection failed, before the job had started.
    #[error(
        "rank {rank} on {host} was lost while the job was starting: {detail}; see the output of that rank, and if it still runs, check the network to it"
    )]
    PeerLost {
        /// The rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// What happened.
        detail: String,
    },
    /// The rendezvous ended or broke the protocol.
    #[error("{who} at {address} went away while the job was starting: {detail}")]
    RendezvousLost {
        /// The process that serves it.
        who: String,
        /// Its address.
        address: SocketAddr,
        /// What happened.
        detail: String,
    },
    /// The job failed in the barrier that ends the start.
    #[error("{0}")]
    Failed(Cause),
    /// This machine's operating system refused something.
    #[error("the operating system refused {what}: {source}")]
    System {
        /// The system call or resource.
        what: &'static str,
        /// The error.
        source: io::Error,
    },
}

/// The same text as `Display`, because `main` and `unwrap` print errors with `Debug`.
impl fmt::Debug for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StartError {
    /// Whether the peers' secrets differ.
    pub fn is_secret(&self) -> bool {
        matches!(
            self,
            Self::Handshake { source: HandshakeError::Secret | HandshakeError::Refused(Refusal::Secret), .. }
        )
    }

    /// Whether the peers' protocol versions differ.
    pub fn is_version(&self) -> bool {
        matches!(
            self,
            Self::Handshake {
                source: HandshakeError::Version { .. } | HandshakeError::Refused(Refusal::Version),
                ..
            }
        )
    }

    /// Whether the peers disagree about the job: its id, its size, its peers file or their ranks.
    pub fn is_configuration(&self) -> bool {
        let Self::Handshake { source: HandshakeError::Refused(refusal), .. } = self else { return false };
        matches!(
            refusal,
            Refusal::Job | Refusal::World | Refusal::PeersFile | Refusal::Rank | Refusal::SameRank
        )
    }
}
