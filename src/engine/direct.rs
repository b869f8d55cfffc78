//! Messages that the driver moves between the caller's buffer and a link without an operation. The engine allows that only if
//! the message would be the next one in each of its tables, so the order of messages does not depend on how each of them goes.

use super::link::Link;
use super::operation::{EAGER_BYTES, credit_cost};
use super::{Engine, Timestamp};
use crate::types::{Rank, Site};

impl Engine {
    /// Returns the number of the next message to `to`, if a message of `bytes` bytes may be sent now without an operation.
    pub fn next_direct_send(&self, to: Rank, bytes: usize) -> Option<u64> {
        let link = self.direct_link(to)?;
        let may_send = bytes <= EAGER_BYTES.min(self.settings.segment_bytes)
            && !link.has_left
            && link.credit() >= credit_cost(bytes)
            && !link.send_queue.has_unopened_messages()
            && link.control_frames.is_empty();
        may_send.then(|| link.next_message())
    }

    /// Records that the driver has sent the message for which [`Engine::next_direct_send`] returned a number.
    pub fn record_direct_send(&mut self, to: Rank, bytes: usize, site: Site) {
        let link = self.links.entry(to).or_default();
        link.number_message(site);
        link.spend_credit(bytes);
    }

    /// Returns the number of the next message from `from`, if it may be received without an operation: no other operation
    /// waits, and no message waits for a receive.
    pub fn next_direct_receive(&self, from: Rank) -> Option<u64> {
        let may_receive = self.is_idle() && !self.matching.has_arrived_messages();
        self.direct_link(from).filter(|_| may_receive).map(|link| link.messages_received)
    }

    /// Records that the driver has received the message for which [`Engine::next_direct_receive`] returned a number. Returns
    /// whether control frames for the peer wait to be sent.
    pub fn record_direct_receive(&mut self, from: Rank, bytes: usize, now: Option<Timestamp>) -> bool {
        let link = self.links.entry(from).or_default();
        link.messages_received += 1;
        link.last_frame_at = now.map_or(link.last_frame_at, |now| now.max(link.last_frame_at));
        link.return_credit(bytes);
        !link.control_frames.is_empty()
    }

    /// Returns the link to a peer if messages may go without operations: the job and the link work, and messages have no
    /// checksums.
    fn direct_link(&self, peer: Rank) -> Option<&Link> {
        let is_possible = self.failure.is_none() && !self.is_closing && !self.settings.is_checked(peer);
        self.links.get(&peer).filter(|link| is_possible && !link.is_lost)
    }
}
