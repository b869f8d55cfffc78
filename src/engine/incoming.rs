//! The verdict of the engine for each frame that arrives.

use super::operation::{DueSegment, TransferSegment};
use super::{Engine, FrameVerdict, OpId, OperationKey, contract_of_transfer};
use crate::types::{Operation, Rank};
use crate::wire::{FrameHeader, FrameKind};

impl Engine {
    /// Handles the header of a frame from `peer`, and returns what the driver has to do with the payload.
    pub fn handle_header(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        self.links.get_or_default(peer).last_frame_at = self.now;
        match header.kind {
            FrameKind::Abort => FrameVerdict::Control,
            _ if self.failure.is_some() => FrameVerdict::Discard,
            FrameKind::Goodbye => {
                self.handle_goodbye(peer);
                FrameVerdict::Control
            }
            FrameKind::Credit => {
                if self.links.get_or_default(peer).accept_credit(header.offset) {
                    return FrameVerdict::Discard;
                }
                self.refuse(peer, "its credit frame claims an impossible number of consumed bytes")
            }
            FrameKind::Wake => {
                self.wake_events += 1;
                FrameVerdict::Discard
            }
            FrameKind::Ready => self.handle_ready(peer, header),
            FrameKind::Announce | FrameKind::Data => match self.find_or_match(peer, header) {
                Ok(key) if header.kind == FrameKind::Announce => self.handle_announcement(key, peer, header),
                Ok(key) => match self.by_key.get(&key) {
                    Some(&id) => self.check_segment(id, key, peer, header, false),
                    None => self.store_early(key, peer, header),
                },
                Err(verdict) => verdict,
            },
        }
    }

    /// Returns [`FrameVerdict::Apply`] if a stored frame may be applied now, and [`FrameVerdict::Store`] if it must wait.
    pub fn check_stored_frame(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let key = Self::key_of_header(header, peer, self.settings.rank);
        match self.by_key.get(&key) {
            Some(&id) if self.failure.is_none() => self.check_segment(id, key, peer, header, true),
            _ => FrameVerdict::Store(key),
        }
    }

    fn key_of_header(header: &FrameHeader, from: Rank, to: Rank) -> OperationKey {
        let FrameHeader { group, sequence, contract, .. } = *header;
        if contract.operation == Operation::Message {
            OperationKey::Message { from, to, sequence }
        } else {
            OperationKey::Collective { group, sequence }
        }
    }

    fn handle_ready(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let key = Self::key_of_header(header, self.settings.rank, peer);
        let id = self.by_key.get(&key).copied();
        let link = self.links.get_or_default(peer);
        // The peer stores an announcement until it answers with a ready frame. So the ready frame counts as the answer even
        // if the announced data have meanwhile been sent on credit.
        link.send_queue.handle_ready(key, id);
        if let Some(running) = id.and_then(|id| self.operations.get_mut(&id)) {
            running.set_ready_sends(peer, header.offset);
            return FrameVerdict::Discard;
        }
        // A ready frame for a complete operation is ignored. This rank sent the last segment before the ready frame arrived.
        let OperationKey::Collective { group, sequence } = key else { return FrameVerdict::Discard };
        if sequence >= self.history.next_sequence(group) {
            link.ready_transfers.insert(key, header.offset);
            let count = link.ready_transfers.len();
            return self.check_unbegun(peer, count, "sent ready frames for");
        }
        FrameVerdict::Discard
    }

    /// Handles an announcement: `peer` has begun an operation, and needs a ready frame before it sends data.
    fn handle_announcement(&mut self, key: OperationKey, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let Some(&id) = self.by_key.get(&key) else {
            let link = self.links.get_or_default(peer);
            link.announced.insert(key, header.contract);
            let count = link.announced.len();
            return self.check_unbegun(peer, count, "announced");
        };
        let Some(running) = self.operations.get_mut(&id) else { return FrameVerdict::Discard };
        let info = running.info;
        if header.contract == info.contract {
            running.enable_ready_frames(peer);
            self.send_ready_frames(id);
        } else {
            let peer_call = (peer, header.contract);
            self.fail_because_mismatch((info.group, key.sequence()), (info.contract, info.site), peer_call);
        }
        FrameVerdict::Discard
    }

    /// Refuses the frames of `peer` if its frames concern too many operations that this rank has not begun.
    fn check_unbegun(&mut self, peer: Rank, count: usize, what: &str) -> FrameVerdict {
        let limit = self.announced_max;
        if count <= limit {
            return FrameVerdict::Discard;
        }
        self.refuse(peer, format!("it {what} more than {limit} operations that this rank has not begun"))
    }

    /// Returns the key of the operation to which a segment or an announcement belongs, or a verdict if the operation is complete
    /// or the job fails. Matches the first frame of a message with the posted receives.
    fn find_or_match(&mut self, peer: Rank, header: &FrameHeader) -> Result<OperationKey, FrameVerdict> {
        let key = Self::key_of_header(header, peer, self.settings.rank);
        if self.by_key.contains_key(&key) {
            return Ok(key);
        }
        match key {
            OperationKey::Collective { group, sequence } => {
                if sequence >= self.history.next_sequence(group) && self.may_begin(group, sequence, header) {
                    return Ok(key);
                }
                Err(self.handle_late_frame(peer, header))
            }
            OperationKey::Message { sequence, .. } => {
                let link = self.links.get_or_default(peer);
                if sequence != link.messages_received {
                    if sequence < link.messages_received && self.matching.arrived_keys.contains(&key) {
                        return Ok(key);
                    }
                    let next = link.messages_received;
                    let detail = format!("it sent message {sequence} although message {next} was next");
                    return Err(self.refuse(peer, detail));
                }
                link.messages_received += 1;
                let matched = self.match_message(key, (peer, header.group), header.contract);
                matched.map(|()| key).map_err(|_| FrameVerdict::Discard)
            }
        }
    }

    /// Returns false if this rank has called another collective than the one to which the block of a frame belongs.
    fn may_begin(&self, group: u32, sequence: u64, header: &FrameHeader) -> bool {
        let (call_group, call) = OperationKey::call_of(group, sequence);
        call >= self.history.next_sequence(call_group)
            || self.find_contract(group, sequence).is_none_or(|(own, _)| own == header.contract)
    }

    /// Returns the verdict for a segment of an operation that has begun. `is_stored`: whether the driver already stores it.
    fn check_segment(
        &mut self,
        id: OpId,
        key: OperationKey,
        peer: Rank,
        header: &FrameHeader,
        is_stored: bool,
    ) -> FrameVerdict {
        let Some(running) = self.operations.get(&id) else { return FrameVerdict::Discard };
        let (info, number) = (running.info, key.sequence());
        let due = running.due_segment(peer);
        let with_length =
            |due: &DueSegment| contract_of_transfer(info.contract, due.segment.transfer_elements);
        let expected = due.as_ref().map_or(info.contract, with_length);
        if header.contract != expected {
            let peer_call = (peer, header.contract);
            self.fail_because_mismatch((info.group, number), (expected, info.site), peer_call);
            return FrameVerdict::Discard;
        }
        let Some(DueSegment { segment, action, is_ready, is_destination_free }) = due else {
            return self.refuse(peer, format!("it sent more data than operation {number} receives from it"));
        };
        let TransferSegment { range, transfer_index, offset, .. } = segment;
        let (position, due_position) = ((header.step, header.offset), (transfer_index, offset as u64));
        let can_apply = position == due_position && is_ready;
        if !can_apply {
            if is_stored {
                return FrameVerdict::Store(key);
            }
            // A segment on credit may be stored: an earlier one may need data of another peer, and later ones wait behind it.
            if header.eager && position >= due_position {
                return self.store_early(key, peer, header);
            }
            // The two partners of an exchange send each other ready frames at once. If the peer's data arrive before this rank
            // has sent its own data from the same elements, the peer's data are stored.
            let is_crossed = !header.eager && !is_destination_free && position >= due_position;
            let is_long = header.payload_bytes as usize > self.settings.segment_bytes;
            let link = self.links.get_or_default(peer);
            if is_crossed && !is_long && link.stored_segments(key) < running.unapplied_segments(peer) {
                // It needs no credit, because this rank has sent the peer a ready frame.
                *link.stored_segments.entry(key).or_default() += 1;
                return FrameVerdict::Store(key);
            }
        }
        let bytes = range.len() * info.contract.dtype.size_bytes();
        if !can_apply || header.payload_bytes as usize != bytes {
            let detail = format!(
                "it sent {} bytes for element {} of transfer {} of operation {number}, but {bytes} bytes for element \
                 {offset} of transfer {transfer_index} were expected",
                header.payload_bytes, header.offset, header.step
            );
            return self.refuse(peer, detail);
        }
        if header.payload_crc.is_some() != self.settings.is_checked(peer) {
            let detail = "its setting for checksums on this link differs from the setting of this rank";
            return self.refuse(peer, detail);
        }
        FrameVerdict::Apply { operation: id, range, action }
    }

    /// Returns the verdict for a segment that must wait, for which the peer needs credit.
    fn store_early(&mut self, key: OperationKey, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let link = self.links.get_or_default(peer);
        if header.eager && link.count_early_segment(key, header.payload_bytes as usize) {
            return FrameVerdict::Store(key);
        }
        let detail = format!("it sent more data of operation {} than its credit allows", header.sequence);
        self.refuse(peer, detail)
    }
}
