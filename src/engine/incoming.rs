//! What the engine makes of a frame that arrives.

use super::matching::Envelope;
use super::operation::DueReceive;
use super::{Engine, FrameVerdict, OpId, OperationKey, of_message};
use crate::types::{Operation, Rank};
use crate::wire::{FrameHeader, FrameKind};

impl Engine {
    /// Judges a frame from `peer` by its header.
    pub fn frame(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        self.links.entry(peer).or_default().last_frame = self.now;
        match header.kind {
            FrameKind::Abort => return FrameVerdict::Control,
            _ if self.failure.is_some() => return FrameVerdict::Discard,
            _ => {}
        }
        match header.kind {
            FrameKind::Abort => FrameVerdict::Control,
            FrameKind::Goodbye => {
                self.peer_left(peer);
                FrameVerdict::Control
            }
            FrameKind::Credit => {
                let link = self.links.entry(peer).or_default();
                if link.receive_credit(header.offset) {
                    return FrameVerdict::Taken;
                }
                self.refuse(peer, "it claims to have used what it was never sent".into())
            }
            FrameKind::Wake => {
                self.alerts += 1;
                FrameVerdict::Taken
            }
            FrameKind::Ready => self.ready(peer, header),
            FrameKind::Announce => self.announce(peer, header),
            FrameKind::Data => self.segment(peer, header),
        }
    }

    /// Judges a stored frame again: [`FrameVerdict::Apply`] if its time has come, [`FrameVerdict::Store`] if not.
    pub fn stored_frame(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let key = Self::key(header, peer, self.settings.rank);
        match self.by_key.get(&key) {
            Some(&id) if self.failure.is_none() => self.due(id, key, peer, header, true),
            _ => FrameVerdict::Store(key),
        }
    }

    /// The operation that a frame from one rank to another belongs to.
    fn key(header: &FrameHeader, from: Rank, to: Rank) -> OperationKey {
        let FrameHeader { group, sequence, contract, .. } = *header;
        if contract.operation == Operation::Message {
            OperationKey::Message { from, to, sequence }
        } else {
            OperationKey::Collective { group, sequence }
        }
    }

    fn ready(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let key = Self::key(header, self.settings.rank, peer);
        let id = self.by_key.get(&key).copied();
        let link = self.links.entry(peer).or_default();
        // Every announcement is answered so, even if what was announced has left on credit in the meantime: until then the
        // peer remembers it.
        link.send_queue.unpark(key, id);
        if let Some(running) = id.and_then(|id| self.operations.get_mut(&id)) {
            running.cleared(peer, header.offset);
            return FrameVerdict::Taken;
        }
        // What has ended here needs no word any more: the last segment and this frame crossed.
        let OperationKey::Collective { group, sequence } = key else { return FrameVerdict::Taken };
        if sequence >= self.history.next(group) {
            link.cleared.insert(key, header.offset);
            if link.cleared.len() > self.announced_max {
                let limit = self.announced_max;
                return self.refuse(peer, format!("it is ready for more than {limit} operations"));
            }
        }
        FrameVerdict::Taken
    }

    fn announce(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let key = match self.place(peer, header) {
            Ok(key) => key,
            Err(verdict) => return verdict,
        };
        if let Some(&id) = self.by_key.get(&key) {
            let Some(running) = self.operations.get_mut(&id) else { return FrameVerdict::Taken };
            let call = running.call;
            if header.contract != call.contract {
                let place = (call.group, call.sequence());
                let cause = self.mismatch(place, (call.contract, call.site), (peer, header.contract));
                self.fail(cause);
                return FrameVerdict::Taken;
            }
            running.tell_when_ready(peer);
            self.tell_ready(id);
            return FrameVerdict::Taken;
        }
        let link = self.links.entry(peer).or_default();
        link.announced.insert(key, header.contract);
        if link.announced.len() > self.announced_max {
            let limit = self.announced_max;
            return self.refuse(peer, format!("it announced more than {limit} operations"));
        }
        FrameVerdict::Taken
    }

    fn segment(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let key = match self.place(peer, header) {
            Ok(key) => key,
            Err(verdict) => return verdict,
        };
        match self.by_key.get(&key) {
            Some(&id) => self.due(id, key, peer, header, false),
            None => self.store(key, peer, header),
        }
    }

    /// The operation that a frame belongs to, once it is sure that it has not ended. A message that nobody has seen before
    /// is matched with a receive, if there is one.
    fn place(&mut self, peer: Rank, header: &FrameHeader) -> Result<OperationKey, FrameVerdict> {
        let key = Self::key(header, peer, self.settings.rank);
        if self.by_key.contains_key(&key) {
            return Ok(key);
        }
        match key {
            OperationKey::Collective { group, sequence } => {
                let next = self.history.next(group);
                if sequence < next { Err(self.belated(peer, header)) } else { Ok(key) }
            }
            OperationKey::Message { sequence, .. } => {
                let link = self.links.entry(peer).or_default();
                if sequence != link.messages_seen {
                    if sequence < link.messages_seen && self.matching.has_arrived(key) {
                        return Ok(key);
                    }
                    let detail = format!("message {sequence} came where {} was due", link.messages_seen);
                    return Err(self.refuse(peer, detail));
                }
                link.messages_seen += 1;
                let envelope = Envelope {
                    group: header.group,
                    source: peer,
                    tag: header.contract.layout,
                    contract: header.contract,
                };
                match self.matching.take_posted(&envelope) {
                    Some(posted) => {
                        self.unite(&posted, key, envelope).map_err(|_| FrameVerdict::Discard)?;
                    }
                    None => self.matching.arrive(key, envelope),
                }
                Ok(key)
            }
        }
    }

    /// What a frame of an operation that has begun is good for.
    fn due(
        &mut self,
        id: OpId,
        key: OperationKey,
        peer: Rank,
        header: &FrameHeader,
        is_stored: bool,
    ) -> FrameVerdict {
        let Some(running) = self.operations.get(&id) else { return FrameVerdict::Discard };
        let call = running.call;
        let due = running.due(peer);
        let asked = match &due {
            DueReceive::Segment { total, .. } => of_message(call.contract, *total),
            DueReceive::Nothing => call.contract,
        };
        if header.contract != asked {
            let place = (call.group, call.sequence());
            let cause = self.mismatch(place, (asked, call.site), (peer, header.contract));
            self.fail(cause);
            return FrameVerdict::Discard;
        }
        let number = call.sequence();
        let DueReceive::Segment { range, action, message, offset, is_ready, is_vacated, .. } = due else {
            return self.refuse(peer, format!("it sent more than its part of operation {number}"));
        };
        let is_next = header.message == message && header.offset == offset as u64;
        // What came before it on this link may itself be stored, or be stored for want of what comes from another peer.
        let may_wait = header.eager && (header.message, header.offset) >= (message, offset as u64);
        if !is_next || !is_ready {
            if is_stored {
                return FrameVerdict::Store(key);
            }
            if may_wait {
                return self.store(key, peer, header);
            }
            // Partners in an exchange are ready for each other at once, and what comes first waits for what leaves from there.
            let is_crossed =
                !header.eager && !is_vacated && (header.message, header.offset) >= (message, offset as u64);
            let is_long = header.payload_bytes as usize > self.settings.segment_bytes;
            let link = self.links.entry(peer).or_default();
            if is_crossed && !is_long && link.stored_segments(key) < running.open_segments(peer) {
                link.keep(key);
                return FrameVerdict::Store(key);
            }
        }
        let bytes = range.len() * call.contract.dtype.size_bytes();
        if !is_next || !is_ready || header.payload_bytes as usize != bytes {
            let detail = format!(
                "it sent {} bytes for element {} of message {} of operation {number} where {bytes} bytes for element {offset} of message {message} were due",
                header.payload_bytes, header.offset, header.message
            );
            return self.refuse(peer, detail);
        }
        if header.payload_crc.is_some() != self.settings.is_checked(peer) {
            return self
                .refuse(peer, "it disagrees about whether payloads on this link carry checksums".into());
        }
        FrameVerdict::Apply { operation: id, range, action }
    }

    fn store(&mut self, key: OperationKey, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let link = self.links.entry(peer).or_default();
        if header.eager && link.store(key, header.payload_bytes as usize) {
            return FrameVerdict::Store(key);
        }
        self.refuse(peer, format!("it sent more of operation {} than it had credit for", header.sequence))
    }
}
