//! Decides which of two connections becomes the link if two ranks dial each other. This module does no IO.
//!
//! A rank dials when it needs a link. The accepting rank chooses a connection by sending the *verdict*, the last
//! message of the handshake. For the accepting rank, the connection becomes the link when the verdict is sent. For
//! the dialing rank, the connection becomes the link when the verdict is read. Two ranks that dial each other must
//! therefore not both send a verdict. The rule: while both dials are in progress, the lower rank's connection wins.
//!
//! - A rank that does not dial accepts the peer's connection, and does not dial afterwards.
//! - The higher rank, while it dials, accepts the lower rank's connection and closes its own connection. The lower
//!   rank cannot have accepted the closed connection: the lower rank does not accept while it dials, and does not
//!   dial after it has accepted.
//! - The lower rank, while it dials, delays the verdict on the higher rank's connection. If the lower rank's own
//!   connection is accepted, the higher rank has closed its connection, and the lower rank closes its end of that
//!   connection too. If the lower rank's own connection fails, the lower rank accepts the higher rank's connection.
//!
//! A connection that is closed has carried only its handshake, so closing the connection loses no data.

use crate::types::Rank;

/// A link that is being opened: this rank dials the peer, and the peer may dial this rank.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SimultaneousOpen<D, A> {
    pub(crate) ours: D,
    /// The connection that the peer has opened, if any. The peer has sent its proof and waits for this rank's
    /// verdict.
    theirs: Option<A>,
    /// Whether this rank is the lower of the two ranks, so that this rank's connection wins.
    ours_wins: bool,
}

/// Which connection becomes the link. The caller closes every connection that the variant does not contain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LinkChoice<D, A> {
    Waiting(SimultaneousOpen<D, A>),
    /// The link is the connection that this rank has opened.
    Ours(D),
    /// The link is the connection that the peer has opened. The caller must send the verdict on this connection.
    Theirs(A),
    Lost,
}

impl<D, A> SimultaneousOpen<D, A> {
    /// Creates the state in which `own` dials `peer` with the connection `ours`.
    pub(crate) fn new(own: Rank, peer: Rank, ours: D) -> Self {
        Self { ours, theirs: None, ours_wins: own < peer }
    }

    /// Returns the connection of the peer that waits for this rank's verdict, if there is one.
    pub(crate) fn peer_connection(&self) -> Option<&A> {
        self.theirs.as_ref()
    }

    /// Handles a connection that the peer has opened, after the peer has sent its proof. If the peer has opened an earlier
    /// connection, the peer has closed the earlier connection, and the new connection replaces it.
    pub(crate) fn handle_peer_dial(self, theirs: A) -> LinkChoice<D, A> {
        if self.ours_wins {
            LinkChoice::Waiting(Self { theirs: Some(theirs), ..self })
        } else {
            LinkChoice::Theirs(theirs)
        }
    }

    /// Handles the peer's verdict, which accepts this rank's connection.
    pub(crate) fn handle_accepted_dial(self) -> LinkChoice<D, A> {
        LinkChoice::Ours(self.ours)
    }

    pub(crate) fn handle_failed_dial(self) -> LinkChoice<D, A> {
        self.theirs.map_or(LinkChoice::Lost, LinkChoice::Theirs)
    }
}
