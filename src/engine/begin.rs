//! How collectives, sends and receives begin.
//!
//! Receives match the messages of a rank to itself like all other messages, but no link carries them: the driver copies the
//! bytes of such a message, and keeps them until a receive takes them.

use super::link::Link;
use super::matching::{Envelope, Pattern, PostedReceive};
use super::operation::{ExternalOperation, OperationInfo, RunningOperation};
use super::{Engine, Failure, OpId, OperationKey, OperationRequest, SendMode, Timestamp};
use crate::schedule::{Action, InboundElements, OutboundElements, Schedule, Step};
use crate::types::{Contract, Rank};

impl Engine {
    /// Begins the next collective of a group. Every rank of the group has to begin the same collective. The ranks in the
    /// schedule are ranks of the world.
    ///
    /// # Errors
    ///
    /// The failure, if the job has already failed, if the operation needs a peer that has already left, or if a peer has
    /// announced a different operation.
    pub fn begin(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        schedule: Schedule,
    ) -> Result<OpId, Failure> {
        self.check()?;
        let OperationRequest { group, contract, site, .. } = request;
        let sequence = self.history.record_next(group, (contract, site));
        let id = self.new_id();
        self.start_transfers(
            id,
            OperationInfo::new(now, request, OperationKey::Collective { group, sequence }),
            schedule,
        )
    }

    /// Records that a group was dropped.
    pub fn retire_group(&mut self, group: u32) {
        self.history.retire_group(group);
    }

    /// Begins to send elements `0..count` of a buffer as a message. The contract's `layout` is the tag of the message.
    ///
    /// If this rank sends to itself, a standard send is complete at once, and a synchronous send is complete when a receive has
    /// matched the message. The driver keeps the bytes of such a message ([`Engine::take_self_delivery`]).
    ///
    /// # Errors
    ///
    /// The same errors as [`Engine::begin`].
    pub fn send(&mut self, now: Timestamp, request: OperationRequest, to: Rank) -> Result<OpId, Failure> {
        self.check()?;
        if to == self.settings.rank {
            return self.send_to_itself(now, request);
        }
        let sequence = self.links.entry(to).or_default().number_message(request.site);
        let key = OperationKey::Message { from: self.settings.rank, to, sequence };
        let range = 0..request.contract.count as usize;
        let step =
            Step { send: Some(OutboundElements { peer: to, range, awaited_step: None }), receive: None };
        let id = self.new_id();
        self.start_transfers(id, OperationInfo::new(now, request, key), vec![step].into())
    }

    /// Begins to receive a message into the start of a buffer. The contract's count is the most elements that the message may
    /// have. When the receive has matched a message, [`Engine::envelope`] returns the message's sender, tag and length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Engine::begin`], and a failure if the matched message is longer than
    /// the contract's count or has another element type.
    pub fn receive(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        pattern: Pattern,
    ) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.new_id();
        // A receive gets its key when it matches a message. Until then it has an unused key.
        let info = OperationInfo::new(
            now,
            request,
            OperationKey::Collective { group: request.group, sequence: u64::MAX },
        );
        let posted = PostedReceive { id, pattern, info };
        if let Some((key, envelope)) = self.matching.take_arrived(&pattern) {
            self.start_matched_receive(&posted, key, envelope)?;
            return Ok(id);
        }
        if let Some(source) = pattern.source
            && self.links.get(&source).is_some_and(Link::is_gone)
        {
            return Err(self.fail_because_peer_left(source));
        }
        self.deadlines.insert((info.deadline, id));
        self.matching.add_posted(posted);
        Ok(id)
    }

    /// Cancels the operation if it is a receive that has not matched a message, and returns true. Every other operation
    /// continues, because other ranks take part in it. For such an operation, returns false.
    pub fn cancel(&mut self, operation: OpId) -> bool {
        let Some(posted) = self.matching.remove_posted(operation) else { return false };
        self.deadlines.remove(&(posted.info.deadline, operation));
        true
    }

    /// Returns the identifier of a new operation.
    pub(super) fn new_id(&mut self) -> OpId {
        self.last_id += 1;
        OpId(self.last_id)
    }

    /// Starts the transfers of an operation. Returns `id`.
    fn start_transfers(
        &mut self,
        id: OpId,
        info: OperationInfo,
        schedule: Schedule,
    ) -> Result<OpId, Failure> {
        let segment_elements = (self.settings.segment_bytes / info.contract.dtype.size_bytes()).max(1);
        let mut running = RunningOperation::new(info, schedule, segment_elements);
        let mut missing_peer = None;
        let mut mismatch: Option<(Rank, Contract)> = None;
        for index in 0..running.peer_count() {
            let (peer, is_sent_to) = running.peer_at(index);
            let link = self.links.entry(peer).or_default();
            if link.is_gone() && running.needs(peer, link.stored_segments(info.key)) {
                missing_peer.get_or_insert(peer);
            }
            if let Some(announced) = link.announced.remove(&info.key) {
                running.enable_ready_frames(peer);
                if announced != info.contract {
                    mismatch.get_or_insert((peer, announced));
                }
            }
            if let Some(transfers) = link.ready_transfers.remove(&info.key) {
                running.set_ready_sends(peer, transfers);
            }
            match info.key {
                _ if !is_sent_to => {}
                OperationKey::Collective { .. } => link.send_queue.add_collective(id),
                OperationKey::Message { .. } => link.send_queue.add_message(id),
            }
        }
        self.deadlines.insert((info.deadline, id));
        self.by_key.insert(info.key, id);
        self.operations.insert(id, running);
        if let Some(mismatch) = mismatch {
            let group_and_sequence = (info.group, info.sequence());
            return Err(self.fail_because_mismatch(group_and_sequence, (info.contract, info.site), mismatch));
        }
        if let Some(peer) = missing_peer {
            return Err(self.fail_because_peer_left(peer));
        }
        self.send_ready_frames(id);
        self.complete_if_done(id);
        Ok(id)
    }

    /// Starts a receive that has matched a message. `key` is the key of the message.
    pub(super) fn start_matched_receive(
        &mut self,
        posted: &PostedReceive,
        key: OperationKey,
        envelope: Envelope,
    ) -> Result<(), Failure> {
        let PostedReceive { id, info, .. } = *posted;
        let contract = info.contract;
        if envelope.contract.dtype != contract.dtype || envelope.contract.count > contract.count {
            let OperationKey::Message { sequence, .. } = key else { return Ok(()) };
            let peer_call = (envelope.source, envelope.contract);
            return Err(self.fail_because_mismatch((info.group, sequence), (contract, info.site), peer_call));
        }
        let receive = InboundElements {
            peer: envelope.source,
            range: 0..envelope.contract.count as usize,
            action: Action::Copy,
            awaited_step: None,
        };
        self.envelopes.insert(id, envelope);
        if envelope.source == self.settings.rank {
            self.deadlines.remove(&(info.deadline, id));
            self.deliver_to_itself(id, key);
            return Ok(());
        }
        let info = OperationInfo { key, contract: envelope.contract, ..info };
        let schedule: Schedule = vec![Step { send: None, receive: Some(receive) }].into();
        self.start_transfers(id, info, schedule).map(|_| ())
    }

    /// Begins to send a message from this rank to itself: see [`Engine::send`].
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
                let info = OperationInfo::new(now, request, key);
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
