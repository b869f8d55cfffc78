//! Messages of a rank to itself. Receives match these messages like all other messages, but no link carries them.
//!
//! The driver copies the bytes of such a message and keeps them until a receive takes them. So a standard send is complete
//! at once. A synchronous send is complete when a receive has matched the message.

use super::request::ExternalOperation;
use super::{Engine, Envelope, Failure, OpId, OperationKey, OperationRequest, SendMode, Timestamp, begin};

impl Engine {
    /// Begins to send a message from this rank to itself.
    pub(super) fn send_to_itself(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
    ) -> Result<OpId, Failure> {
        let (id, rank, contract) = (self.new_id(), self.settings.rank, request.contract);
        let key = OperationKey::Message { from: rank, to: rank, sequence: id.0 };
        // The layout in the contract of a message is the tag of the message.
        let envelope = Envelope { group: request.group, source: rank, tag: contract.layout, contract };
        match request.mode {
            SendMode::Standard => self.completed.push_back(id),
            SendMode::Synchronous => {
                let info = begin::operation_info(now, request, key);
                self.deadlines.insert((info.deadline, id));
                self.external.insert(id, ExternalOperation { info, awaited: vec![rank] });
            }
        }
        match self.matching.take_posted(&envelope) {
            Some(posted) => self.start_matched_receive(&posted, key, envelope)?,
            None => self.matching.add_arrived(key, envelope),
        }
        Ok(id)
    }

    /// Completes a receive that has matched a message of this rank to itself. Also completes the send of the message if it is
    /// synchronous.
    pub(super) fn deliver_to_itself(&mut self, receive: OpId, key: OperationKey) {
        if let OperationKey::Message { sequence, .. } = key {
            let send = OpId(sequence);
            if self.external.contains_key(&send) {
                self.end_external(send);
                self.completed.push_back(send);
            }
            self.self_deliveries.push_back((send, receive));
            self.completed.push_back(receive);
        }
    }

    /// Removes and returns the oldest message of this rank to itself that a receive has matched: the operation that sent the
    /// message, and the receive into whose buffer the driver has to copy the message. Call this method after every
    /// [`Engine::send`] and [`Engine::receive`].
    pub fn take_self_delivery(&mut self) -> Option<(OpId, OpId)> {
        self.self_deliveries.pop_front()
    }
}
