//! Messages of a rank to itself: matched like all others, and never on any link.
//!
//! Such a message has been sent when it has begun; its bytes are the driver's to keep until a receive takes them.

use super::{Begin, Engine, Envelope, Failure, OpId, OperationKey};

impl Engine {
    /// Begins to send a message to this rank, and ends it.
    pub(super) fn send_to_itself(&mut self, begin: Begin) -> Result<OpId, Failure> {
        let (id, rank, contract) = (self.next_id(), self.settings.rank, begin.contract);
        let key = OperationKey::Message { from: rank, to: rank, sequence: id.0 };
        let envelope = Envelope { group: begin.group, source: rank, tag: contract.layout, contract };
        match self.matching.take_posted(&envelope) {
            Some(posted) => self.unite(&posted, key, envelope)?,
            None => self.matching.arrive(key, envelope),
        }
        self.completed.push_back(id);
        Ok(id)
    }

    /// A receive has found a message of this rank's own, and has ended.
    pub(super) fn hand_over(&mut self, receive: OpId, key: OperationKey) {
        if let OperationKey::Message { sequence, .. } = key {
            self.handed_over.push_back((OpId(sequence), receive));
            self.completed.push_back(receive);
        }
    }

    /// A message of this rank to itself, by the operation that sent it, and the receive whose buffer it belongs into.
    /// To be asked for after every [`Engine::send`] and [`Engine::receive`].
    pub fn take_handed_over(&mut self) -> Option<(OpId, OpId)> {
        self.handed_over.pop_front()
    }
}
