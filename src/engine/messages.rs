//! How messages are sent and received.
//!
//! No link carries the messages of a rank to itself: the driver keeps their bytes until a receive takes them.
//!
//! The driver may also move a short message between the caller's buffer and a link without an operation. The engine allows that
//! only if the message would be the next one in each of its tables, so the order of messages does not depend on how each goes.

use super::link::Link;
use super::matching::{Envelope, Pattern, PostedReceive};
use super::operation::{EAGER_BYTES, ExternalOperation, credit_cost};
use super::{Engine, Failure, OpId, OperationKey, OperationRequest, SendMode, Timestamp};
use crate::schedule::{Action, Step};
use crate::types::{Contract, Rank, Site};

impl Engine {
    /// Begins to send elements `0..count` of a buffer as a message. The contract's `layout` is the tag of the message. If this
    /// rank sends to itself, a standard send is complete at once, and the driver keeps the bytes of the message
    /// ([`Engine::take_self_delivery`]). Returns the same errors as [`Engine::begin`].
    pub fn send(&mut self, now: Timestamp, request: OperationRequest, to: Rank) -> Result<OpId, Failure> {
        self.check()?;
        if to == self.settings.rank {
            return self.send_to_itself(now, request);
        }
        let sequence = self.links.get_or_default(to).number_message(request.site);
        let key = OperationKey::Message { from: self.settings.rank, to, sequence };
        let step = Step::send(to, 0..request.contract.count as usize, None);
        let id = self.new_id();
        self.start_transfers(id, key, request.begun(now), vec![step].into())
    }

    /// Begins to receive a message into the start of a buffer. When the receive has matched a message, [`Engine::envelope`]
    /// returns its sender, tag and length. Returns the same errors as [`Engine::begin`], and a failure if the message is longer
    /// than the contract's count or has another element type.
    pub fn receive(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        pattern: Pattern,
    ) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.new_id();
        let info = request.begun(now);
        let posted = PostedReceive { id, pattern, info };
        if let Some((key, envelope)) = self.matching.take_arrived(&pattern) {
            self.start_matched_receive(&posted, key, envelope)?;
            return Ok(id);
        }
        if let Some(source) = pattern.source
            && self.links.get(source).is_some_and(Link::is_gone)
        {
            return Err(self.fail_because_peer_left(source));
        }
        self.deadlines.insert((info.deadline(), id));
        self.matching.add_posted(posted);
        Ok(id)
    }

    /// Cancels the operation if it is a receive that has not matched a message, and returns true. Every other operation
    /// continues, because other ranks take part in it. For such an operation, returns false.
    pub fn cancel(&mut self, operation: OpId) -> bool {
        let Some(posted) = self.matching.remove_posted(operation) else { return false };
        self.deadlines.remove(&(posted.info.deadline(), operation));
        true
    }

    /// Starts the receive that a message from `source` matches. If there is no such receive, the message waits for one.
    pub(super) fn match_message(
        &mut self,
        key: OperationKey,
        (source, group): (Rank, u32),
        contract: Contract,
    ) -> Result<(), Failure> {
        // The layout in the contract of a message is the tag of the message.
        let envelope = Envelope { group, source, tag: contract.layout, contract };
        if let Some(posted) = self.matching.take_posted(&envelope) {
            return self.start_matched_receive(&posted, key, envelope);
        }
        self.matching.add_arrived(key, envelope);
        Ok(())
    }

    fn start_matched_receive(
        &mut self,
        posted: &PostedReceive,
        key: OperationKey,
        envelope: Envelope,
    ) -> Result<(), Failure> {
        let PostedReceive { id, info, .. } = *posted;
        let contract = info.contract;
        if envelope.contract.dtype != contract.dtype || envelope.contract.count > contract.count {
            let number = (info.group, key.sequence());
            let peer_call = (envelope.source, envelope.contract);
            return Err(self.fail_because_mismatch(number, (contract, info.site), peer_call));
        }
        self.envelopes.insert(id, envelope);
        if envelope.source == self.settings.rank {
            self.deadlines.remove(&(info.deadline(), id));
            self.deliver_to_itself(id, key);
            return Ok(());
        }
        let range = 0..envelope.contract.count as usize;
        let step = Step::receive(envelope.source, range, Action::Copy, None);
        let info = OperationRequest { contract: envelope.contract, ..info };
        self.start_transfers(id, key, info, vec![step].into()).map(|_| ())
    }

    fn send_to_itself(&mut self, now: Timestamp, request: OperationRequest) -> Result<OpId, Failure> {
        let (id, rank, contract) = (self.new_id(), self.settings.rank, request.contract);
        let key = OperationKey::Message { from: rank, to: rank, sequence: id.0 };
        match request.mode {
            SendMode::Standard => self.completed.push_back(id),
            SendMode::Synchronous => {
                let info = request.begun(now);
                self.deadlines.insert((info.deadline(), id));
                self.external.insert(id, ExternalOperation { key, info, awaited: vec![rank] });
            }
        }
        self.match_message(key, (rank, request.group), contract).map(|()| id)
    }

    /// Completes a receive that has matched a message of this rank to itself, and the send of the message if it is synchronous.
    fn deliver_to_itself(&mut self, receive: OpId, key: OperationKey) {
        let send = OpId(key.sequence());
        if self.external.contains_key(&send) {
            self.end_external(send);
            self.completed.push_back(send);
        }
        self.self_deliveries.push_back((send, receive));
        self.completed.push_back(receive);
    }

    /// Removes and returns the send and the receive of the oldest matched message of this rank to itself. The driver has to copy
    /// the message. Call this method after every [`Engine::send`] and [`Engine::receive`].
    pub fn take_self_delivery(&mut self) -> Option<(OpId, OpId)> {
        self.self_deliveries.pop_front()
    }

    /// Returns the number of the next message to `to`, if a message of `bytes` bytes may be sent now without an operation.
    pub fn next_direct_send(&self, to: Rank, bytes: usize) -> Option<u64> {
        let may_send = |link: &&Link| {
            bytes <= EAGER_BYTES.min(self.settings.segment_bytes)
                && !link.has_left
                && link.credit() >= credit_cost(bytes)
                && link.send_queue.unopened.is_empty()
                && link.control_frames.is_empty()
        };
        self.direct_link(to).filter(may_send).map(|link| link.messages_sent)
    }

    /// Records that the driver has sent the message for which [`Engine::next_direct_send`] returned a number.
    pub fn record_direct_send(&mut self, to: Rank, bytes: usize, site: Site) {
        let Some(link) = self.links.get_mut(to) else { return };
        link.number_message(site);
        link.spend_credit(bytes);
    }

    /// Returns the number of the next message from `from`, if it may be received without an operation: nothing else waits.
    pub fn next_direct_receive(&self, from: Rank) -> Option<u64> {
        let may_receive = self.is_idle() && self.matching.arrived.is_empty();
        self.direct_link(from).filter(|_| may_receive).map(|link| link.messages_received)
    }

    /// Records that the driver has received the message for which [`Engine::next_direct_receive`] returned a number. Without the
    /// time `now`, the message counts as received at the last time that the engine knows, which may be of another link. Returns
    /// whether control frames for the peer wait to be sent.
    pub fn record_direct_receive(&mut self, from: Rank, bytes: usize, now: Option<Timestamp>) -> bool {
        if let Some(now) = now {
            self.advance(now);
        }
        let Some(link) = self.links.get_mut(from) else { return false };
        link.messages_received += 1;
        link.last_frame_at = self.now;
        link.return_credit(bytes);
        !link.control_frames.is_empty()
    }

    /// Returns the link to a peer, if the job and the link work and messages have no checksums.
    fn direct_link(&self, peer: Rank) -> Option<&Link> {
        let is_usable = self.failure.is_none() && !self.is_closing && !self.settings.is_checked(peer);
        self.links.get(peer).filter(|link| is_usable && !link.is_lost)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Settings;
    use super::*;

    /// In an earlier version, a link whose messages happened to have no time counted as silent, also if it was busy.
    #[test]
    fn a_message_without_a_time_arrives_at_the_last_known_time() {
        let mut engine = Engine::new(Settings::default());
        for rank in [1, 2] {
            engine.links.get_or_default(Rank::new(rank));
        }
        engine.record_direct_receive(Rank::new(1), 8, Some(Duration::from_secs(10)));
        engine.record_direct_receive(Rank::new(2), 8, None);
        engine.advance(Duration::from_secs(12));
        engine.handle_lost_link(Rank::new(2), "reset", true);
        let cause = engine.failure().map(|failure| failure.cause.to_string()).unwrap_or_default();
        assert!(cause.contains("reset, 2.0 s after the last frame from it"), "{cause}");
    }
}
