//! How a rank that leaves finds out whether its last messages have arrived.

use super::LinkDriver;
use crate::transport::Transport;
use crate::types::Rank;

impl<T: Transport> LinkDriver<T> {
    /// Returns the peers to which this rank has not sent everything, or whose machines have not acknowledged everything. A
    /// message to such a peer may be lost if this rank closes the link now.
    pub fn peers_with_undelivered_bytes(&self) -> Vec<Rank> {
        let has_undelivered_bytes = |peer: &&Rank| {
            self.links.get(peer).is_some_and(|link| {
                !link.is_lost && (link.outgoing.is_some() || self.transport.has_unacknowledged_bytes(**peer))
            })
        };
        self.peers.iter().filter(has_undelivered_bytes).copied().collect()
    }
}
