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
    /// The secret is none.
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
    /// A job without a secret that others could reach.
    #[error(
        "the job has no secret and {address} is not a loopback address: anybody who reaches it could join; give every rank the same --secret-file (or RING_SECRET)"
    )]
    NeedsSecret {
        /// The address that is not loopback.
        address: SocketAddr,
    },
    /// Somebody listens there already.
    #[error("port {} on {} is in use by another process; stop it or choose another port for rank {rank}", address.port(), address.ip())]
    PortInUse {
        /// Where this rank was to listen.
        address: SocketAddr,
        /// This rank.
        rank: Rank,
    },
    /// The address cannot be listened on.
    #[error(
        "rank {rank} cannot listen on {address}: {source}; is this the host that the peers file names for it?"
    )]
    CannotListen {
        /// Where this rank was to listen.
        address: SocketAddr,
        /// This rank.
        rank: Rank,
        /// The operating system's words.
        source: io::Error,
    },
    /// The socket options cannot be had.
    #[error("{0}")]
    SocketOptions(String),
    /// Nobody answers at the rendezvous.
    #[error("{who} at {address} did not answer within {} s ({detail}); start it, or check the address and the firewall", timeout.as_secs_f32())]
    NoRendezvous {
        /// Who was to answer.
        who: String,
        /// Where.
        address: SocketAddr,
        /// The last attempt's error.
        detail: String,
        /// How long was tried.
        timeout: Duration,
    },
    /// Whoever is there is not one of this job.
    #[error("{who} at {address}: {source}")]
    Handshake {
        /// Who was to answer.
        who: String,
        /// Where.
        address: SocketAddr,
        /// What is wrong.
        source: HandshakeError,
    },
    /// Not all ranks came.
    #[error("not all ranks came within {} s: missing {missing}; start them, or look at their own output for why they did not come", timeout.as_secs_f32())]
    Missing {
        /// Who, in words.
        missing: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The rendezvous sent us away.
    #[error("the rendezvous refused this rank: {0}")]
    Refused(String),
    /// A rank that had registered died before the job had started.
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
    /// The rendezvous died or does not speak as it should.
    #[error("{who} at {address} went away while the job was starting: {detail}")]
    RendezvousLost {
        /// Who.
        who: String,
        /// Where.
        address: SocketAddr,
        /// What happened.
        detail: String,
    },
    /// The ring was being closed when a rank that had passed already gave up.
    #[error("{0}")]
    Failed(Cause),
    /// This machine's operating system refused something.
    #[error("the operating system refused {what}: {source}")]
    System {
        /// The thing.
        what: &'static str,
        /// Its words.
        source: io::Error,
    },
}

/// The sentence, for `main` and `unwrap` print errors by `Debug`, and a person reads them.
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

    /// Whether the peers were told different things of the job: its id, its size, its peers file or their ranks.
    pub fn is_configuration(&self) -> bool {
        let Self::Handshake { source: HandshakeError::Refused(refusal), .. } = self else { return false };
        matches!(
            refusal,
            Refusal::Job | Refusal::World | Refusal::PeersFile | Refusal::Rank | Refusal::SameRank
        )
    }
}
