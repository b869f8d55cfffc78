//! Decides which of two connections becomes the link if two ranks dial each other: while both dials are in progress, the
//! connection of the lower rank wins (`docs/wire-format.md` says why this is safe). This module does no IO.

use crate::types::Rank;

/// A link that is being opened: this rank dials the peer, and the peer may dial this rank.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SimultaneousOpen<D, A> {
    pub(crate) ours: D,
    /// The peer's connection, if any. The peer waits for a verdict. If this rank's connection fails, this one becomes the link.
    pub(crate) theirs: Option<A>,
    /// Whether this rank is the lower of the two ranks, so that this rank's connection wins.
    ours_wins: bool,
}

impl<D, A> SimultaneousOpen<D, A> {
    pub(crate) fn new(own: Rank, peer: Rank, ours: D) -> Self {
        Self { ours, theirs: None, ours_wins: own < peer }
    }

    /// Handles a connection of the peer, which has sent its proof. Returns the connection if it becomes the link; then this rank
    /// closes its own. Otherwise the connection waits, and replaces an earlier one, which the peer has closed.
    pub(crate) fn handle_peer_dial(&mut self, theirs: A) -> Option<A> {
        if !self.ours_wins {
            return Some(theirs);
        }
        self.theirs = Some(theirs);
        None
    }
}
