//! Messages of a rank to itself: matched like all others, and never on any link.
//!
//! The driver keeps the bytes of such a message until a receive takes them, so that the send is complete at once. A
//! synchronous send is complete when a receive has matched the message.

use super::external::ExternalOperation;
use super::{Begin, Engine, Envelope, Failure, OpId, OperationKey, SendMode, Timestamp, begin};

impl Engine {
    /// Begins to send a message to this rank.
    pub(super) fn send_to_itself(&mut self, now: Timestamp, asked: Begin) -> Result<OpId, Failure> {
        let (id, rank, contract) = (self.next_id(), self.settings.rank, asked.contract);
        let key = OperationKey::Message { from: rank, to: rank, sequence: id.0 };
        let envelope = Envelope { group: asked.group, source: rank, tag: contract.layout, contract };
        match asked.mode {
            SendMode::Standard => self.completed.push_back(id),
            SendMode::Synchronous => {
                let call = begin::call(now, asked, key);
                self.deadlines.insert((call.deadline, id));
                self.external.insert(id, ExternalOperation { call, awaited: vec![rank] });
            }
        }
        match self.matching.take_posted(&envelope) {
            Some(posted) => self.unite(&posted, key, envelope)?,
            None => self.matching.arrive(key, envelope),
        }
        Ok(id)
    }

    /// A receive has found a message of this rank's own, and has ended.
    pub(super) fn hand_over(&mut self, receive: OpId, key: OperationKey) {
        if let OperationKey::Message { sequence, .. } = key {
            let send = OpId(sequence);
            if self.external.contains_key(&send) {
                self.end_external(send);
                self.completed.push_back(send);
            }
            self.handed_over.push_back((send, receive));
            self.completed.push_back(receive);
        }
    }

    /// A message of this rank to itself, by the operation that sent it, and the receive whose buffer it belongs into.
    /// To be asked for after every [`Engine::send`] and [`Engine::receive`].
    pub fn take_handed_over(&mut self) -> Option<(OpId, OpId)> {
        self.handed_over.pop_front()
    }
}
