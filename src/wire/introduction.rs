//! What the dialer of a connection says about itself, its job and the connection.

use crate::types::Rank;

/// The purposes of connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectionPurpose {
    /// The connection carries frames between two ranks.
    Link,
    /// The connection is between a rank and the rendezvous.
    Rendezvous,
    /// The connection carries frames between two ranks of the isolated group with this number.
    IsolatedLink(u64),
}

impl ConnectionPurpose {
    /// Returns the purpose's byte in the hello, and the number of the isolated group or 0.
    pub(super) fn encode(self) -> (u8, u64) {
        match self {
            Self::Link => (1, 0),
            Self::Rendezvous => (2, 0),
            Self::IsolatedLink(group) => (3, group),
        }
    }

    pub(super) fn decode(byte: u8, group: u64) -> Option<Self> {
        match byte {
            1 => Some(Self::Link),
            2 => Some(Self::Rendezvous),
            3 => Some(Self::IsolatedLink(group)),
            _ => None,
        }
    }
}

/// The properties of the job that must be equal at both ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Job {
    /// The job's id, which the launcher chooses; all zeros if there is a peers file.
    pub id: [u8; 16],
    /// The number of ranks.
    pub world: u32,
    /// A digest of the peers file; all zeros if a launcher starts the job.
    pub peers_digest: [u8; 32],
}

/// The maximum number of connections of a link.
pub const STREAMS_MAX: u8 = 8;

/// Identifies one of a link's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamId {
    /// The number of the connection, counted from 0. Connection 0 is opened first. One rank opens all connections of
    /// a link.
    pub index: u8,
    /// The number of connections of the link.
    pub total: u8,
}

impl StreamId {
    /// The only connection of a link.
    pub const ONLY: Self = Self { index: 0, total: 1 };

    /// Returns whether a link may have `total` connections and `index` is below `total`.
    pub fn is_valid(self) -> bool {
        self.total <= STREAMS_MAX && self.index < self.total
    }
}

/// What the dialer says about itself and the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Introduction {
    /// What the connection is for.
    pub purpose: ConnectionPurpose,
    /// The rank that dials.
    pub from: Rank,
    /// The rank that is dialed; for a connection to the rendezvous, rank 0.
    pub to: Rank,
    /// The connection's number within its link; for a connection to the rendezvous, [`StreamId::ONLY`].
    pub stream: StreamId,
}
