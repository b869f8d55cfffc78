//! The protocol of one rank as a state machine without IO.
//!
//! The engine executes the [schedules](crate::schedule) of any number of operations at the same time. It decides which frame
//! each peer is sent next, checks every frame that arrives, matches messages with receives, and keeps the deadlines. If the
//! job fails, the engine agrees with the peers on one root cause. Time is an argument, and data are ranges of elements that the
//! driver maps to memory.
//!
//! The caller of the engine is its driver, which has these duties:
//! - Pass every frame header to [`Engine::handle_header`], in the order in which the frames arrive on their link.
//! - Store each frame for which the verdict is [`FrameVerdict::Store`]. When the operation of the frame begins or makes progress,
//!   pass the header of the frame to [`Engine::check_stored_frame`].
//! - Call [`Engine::handle_applied_segment`] when a segment has been applied.
//! - Call [`Engine::poll_transmit`] after every input. Send each returned frame completely, and then call
//!   [`Engine::handle_sent_segment`] if the frame is a segment.
//! - Report lost links, and call [`Engine::handle_timeout`] at the time that [`Engine::poll_timeout`] returns.

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

mod external;
mod failure;
mod history;
mod incoming;
mod interface;
mod link;
mod matching;
mod messages;
mod operation;
mod send_queue;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;

use self::history::OperationHistory;
pub use self::interface::{
    DELIVERY_TIMEOUT, DISCONNECT_TIMEOUT, Failure, FrameVerdict, NOTIFY_TIMEOUT, OpId, OperationKey,
    OperationRequest, SendMode, Settings, Timestamp, Transmit,
};
use self::link::{ANNOUNCED_MAX, Link};
pub use self::link::{CREDIT_BYTES, CREDIT_FRAMES_MAX};
use self::matching::Matching;
pub use self::matching::{Envelope, Pattern};
#[cfg(test)]
pub use self::operation::EAGER_BYTES;
use self::operation::{ExternalOperation, NextSend, RunningOperation, TransferSegment};
use crate::schedule::Schedule;
use crate::types::{Contract, Operation, Rank, RankMap, Site, SortedMap, SortedSet};
use crate::wire::cause::SilentLink;
use crate::wire::{Cause, FrameHeader, FrameKind};

#[derive(Default)]
pub struct Engine {
    settings: Settings,
    /// The active operations that the engine executes.
    operations: SortedMap<OpId, RunningOperation>,
    /// Operations that the engine does not execute: operations in shared memory, and synchronous sends of this rank to itself.
    external: BTreeMap<OpId, ExternalOperation>,
    /// The number of wake frames and goodbyes that have arrived. After each, a thread that waits for shared memory must wake up.
    wake_events: u64,
    /// The operations in `operations`, by the key in the headers of their frames.
    by_key: SortedMap<OperationKey, OpId>,
    matching: Matching,
    /// For each receive that has matched a message: the envelope of the message.
    envelopes: SortedMap<OpId, Envelope>,
    deadlines: SortedSet<(Timestamp, OpId)>,
    overdue_operation: Option<OpId>,
    history: OperationHistory,
    /// [`ANNOUNCED_MAX`], except in tests.
    announced_max: usize,
    links: RankMap<Link>,
    /// The complete operations that [`Engine::take_completed`] has not returned, in the order of completion.
    completed: VecDeque<OpId>,
    /// The matched messages of this rank to itself: the send and the receive of each message.
    self_deliveries: VecDeque<(OpId, OpId)>,
    last_id: u64,
    now: Timestamp,
    failure: Option<Failure>,
    /// The links on which this rank waited when a deadline passed.
    silent_links: Vec<SilentLink>,
    /// Peers whose hosts do not acknowledge the data that this rank sent.
    peers_without_acks: BTreeSet<Rank>,
    /// A peer to which no link could be opened: the time at which the engine reports the peer as lost, and the cause.
    unreachable_peer: Option<(Timestamp, Cause)>,
    is_closing: bool,
}

impl Engine {
    pub fn new(settings: Settings) -> Self {
        Self { settings, announced_max: ANNOUNCED_MAX, ..Self::default() }
    }

    /// Assigns the next number of a group to a collective of the program. Every rank of the group has to call the same collective
    /// under this number. Returns the failure if the job has already failed, or if a peer has announced a different operation.
    pub fn assign_number(&mut self, group: u32, contract_and_site: (Contract, Site)) -> Result<u64, Failure> {
        self.check()?;
        let sequence = self.history.record_next(group, contract_and_site);
        let keys = OperationKey::of_other_kind(group, sequence, &contract_and_site.0);
        let announced =
            |(peer, link): (Rank, &Link)| Some((peer, *link.announced.range(keys.clone()).next()?.1));
        let mismatch = self.links.iter().find_map(announced);
        match mismatch {
            Some(mismatch) => Err(self.fail_because_mismatch((group, sequence), contract_and_site, mismatch)),
            None => Ok(sequence),
        }
    }

    /// Begins a collective with a number from [`Engine::assign_number`], or a block with one from [`OperationKey::block_number`].
    /// The blocks of a group begin in the order of their numbers. The ranks in the schedule are ranks of the world. Returns the
    /// failure if the job has failed, if a peer that the operation needs has left, or if one has announced another operation.
    pub fn begin(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        sequence: u64,
        schedule: Schedule,
    ) -> Result<OpId, Failure> {
        self.check()?;
        self.history.record_begun(request.group, sequence);
        let id = self.new_id();
        let key = OperationKey::Collective { group: request.group, sequence };
        self.start_transfers(id, key, request.begun(now), schedule)
    }

    pub fn retire_group(&mut self, group: u32) {
        self.history.retire_group(group);
    }

    pub fn probe(&self, pattern: &Pattern) -> Option<Envelope> {
        let number = self.matching.find_arrived(pattern)?;
        self.matching.arrived.get(&number).map(|(_, envelope)| *envelope)
    }

    /// Returns the key in the frames of an operation; `None` if it has ended, has no frames, or has not matched a message.
    pub fn key_of(&self, operation: OpId) -> Option<OperationKey> {
        self.operations.get(&operation).map(|running| running.key)
    }

    /// Returns the envelope of the message that a receive has matched, until [`Engine::take_completed`] returns the receive.
    pub fn envelope(&self, receive: OpId) -> Option<&Envelope> {
        self.envelopes.get(&receive)
    }

    /// Removes and returns the operation that was completed first. For a receive, also returns the envelope of its message.
    pub fn take_completed(&mut self) -> Option<(OpId, Option<Envelope>)> {
        let id = self.completed.pop_front()?;
        Some((id, self.envelopes.remove(&id)))
    }

    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.external.is_empty() && self.matching.posted.is_empty()
    }

    /// Returns the number of events for which a thread may wait: messages without a receive, wake frames, and goodbyes.
    pub fn event_count(&self) -> u64 {
        self.matching.unexpected_messages + self.wake_events
    }

    /// Returns whether control frames for `peer` wait to be sent. The driver sends them even if no operation is active.
    pub fn has_control_frames(&self, peer: Rank) -> bool {
        self.links.get(peer).is_some_and(|link| !link.control_frames.is_empty())
    }

    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Returns the time at which the driver has to call [`Engine::handle_timeout`], or `None` if there is no deadline.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        if self.failure.is_some() {
            return None;
        }
        let deadline = self.deadlines.first().map(|&(deadline, _)| deadline);
        let report_at = self.unreachable_peer.as_ref().map(|&(report_at, _)| report_at);
        deadline.into_iter().chain(report_at).min()
    }

    /// Sets the current time, unless it would go back.
    pub fn advance(&mut self, now: Timestamp) {
        self.now = self.now.max(now);
    }

    /// Returns the frame to send to `peer` next, if there is one. The driver must send the whole frame.
    pub fn poll_transmit(&mut self, peer: Rank) -> Option<Transmit> {
        if self.failure.is_some() || self.is_closing {
            return self.take_notification(peer);
        }
        let link = self.links.get_mut(peer)?;
        if let Some(header) = link.control_frames.pop_front() {
            return Some(Transmit::Control { header, payload: Bytes::new() });
        }
        for _ in 0..link.send_queue.runnable.len() {
            let Some(id) = link.send_queue.runnable.pop_front() else { break };
            let Some(running) = self.operations.get_mut(&id) else { continue };
            match running.take_next_send(peer, link.credit()) {
                NextSend::Nothing if running.sends_to(peer) => {
                    link.send_queue.waiting_for_data.insert(id);
                }
                NextSend::Nothing => {}
                NextSend::MustWait { credit_needed, must_announce } => {
                    link.send_queue.suspend(id, credit_needed);
                    if must_announce && link.send_queue.try_announce(id, running.key, self.announced_max) {
                        running.set_announced(peer);
                        link.send_queue.record_frame(id, 0, self.settings.segment_bytes);
                        let header = header(FrameKind::Announce, running, 0);
                        return Some(Transmit::Control { header, payload: Bytes::new() });
                    }
                }
                NextSend::Segment { segment, eager } => {
                    let header = segment_header(running, &segment, eager, self.settings.is_checked(peer));
                    let payload_bytes = header.payload_bytes as usize;
                    if eager {
                        link.spend_credit(payload_bytes);
                    }
                    link.send_queue.record_frame(id, payload_bytes, self.settings.segment_bytes);
                    return Some(Transmit::Segment { operation: id, header, range: segment.range });
                }
            }
        }
        None
    }

    /// Records that the driver has sent the whole segment that [`Engine::poll_transmit`] returned for `peer`.
    pub fn handle_sent_segment(&mut self, operation: OpId, peer: Rank) {
        let Some(running) = self.operations.get_mut(&operation) else { return };
        running.record_segment(peer, true);
        if running.sends_to(peer) {
            self.links.get_or_default(peer).send_queue.runnable.push_back(operation);
        }
        self.complete_if_done(operation);
    }

    /// Records that the driver has applied a segment with the verdict [`FrameVerdict::Apply`], which it may have stored before.
    pub fn handle_applied_segment(
        &mut self,
        operation: OpId,
        peer: Rank,
        header: &FrameHeader,
        was_stored: bool,
    ) {
        let bytes = header.payload_bytes as usize;
        let key = self.key_of(operation);
        let link = self.links.get_or_default(peer);
        if was_stored && let Some(key) = key {
            link.forget_stored_segment(key, bytes, header.eager);
        }
        if header.eager {
            link.return_credit(bytes);
        }
        if let Some(running) = self.operations.get_mut(&operation) {
            running.record_segment(peer, false);
            for peer in running.receivers() {
                self.links.get_or_default(peer).send_queue.resume_after_data(operation);
            }
        }
        self.send_ready_frames(operation);
        self.complete_if_done(operation);
    }

    /// Leaves the job: [`Engine::poll_transmit`] then returns a goodbye for each peer.
    pub fn close(&mut self) {
        self.is_closing = true;
    }

    pub fn new_id(&mut self) -> OpId {
        self.last_id += 1;
        OpId(self.last_id)
    }

    pub(super) fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn start_transfers(
        &mut self,
        id: OpId,
        key: OperationKey,
        info: OperationRequest,
        schedule: Schedule,
    ) -> Result<OpId, Failure> {
        let segment_elements = (self.settings.segment_bytes / info.contract.dtype.size_bytes()).max(1);
        let peers = schedule.peers();
        let mut running = RunningOperation::new(key, info, (schedule, &peers), segment_elements);
        let mut missing_peer = None;
        let mut mismatch: Option<(Rank, Contract)> = None;
        for peer in peers {
            let link = self.links.get_or_default(peer);
            if link.is_gone() && running.needs(peer, link.stored_segments(key)) {
                missing_peer.get_or_insert(peer);
            }
            if let Some(announced) = link.announced.remove(&key) {
                running.enable_ready_frames(peer);
                if announced != info.contract {
                    mismatch.get_or_insert((peer, announced));
                }
            }
            if let Some(transfers) = link.ready_transfers.remove(&key) {
                running.set_ready_sends(peer, transfers);
            }
            match key {
                _ if !running.sends_to(peer) => {}
                OperationKey::Collective { .. } => link.send_queue.runnable.push_back(id),
                OperationKey::Message { .. } => link.send_queue.add_message(id),
            }
        }
        self.deadlines.insert((info.deadline(), id));
        self.by_key.insert(key, id);
        self.operations.insert(id, running);
        if let Some(mismatch) = mismatch {
            let group_and_sequence = (info.group, key.sequence());
            return Err(self.fail_because_mismatch(group_and_sequence, (info.contract, info.site), mismatch));
        }
        if let Some(peer) = missing_peer {
            return Err(self.fail_because_peer_left(peer));
        }
        self.send_ready_frames(id);
        self.complete_if_done(id);
        Ok(id)
    }

    /// Sends a ready frame to each peer from which this rank can now receive further transfers of the operation.
    fn send_ready_frames(&mut self, id: OpId) {
        let Some(running) = self.operations.get_mut(&id) else { return };
        for (peer, transfers) in running.take_ready_frames() {
            let header = header(FrameKind::Ready, running, transfers as u64);
            self.links.get_or_default(peer).control_frames.push_back(header);
        }
    }

    /// Moves an operation to `completed` if all its transfers are complete.
    fn complete_if_done(&mut self, id: OpId) {
        if self.operations.get(&id).is_some_and(RunningOperation::is_complete)
            && let Some(running) = self.operations.remove(&id)
        {
            self.by_key.remove(&running.key);
            self.deadlines.remove(&(running.info.deadline(), id));
            self.completed.push_back(id);
        }
    }
}

/// Returns the contract in the headers of the segments of a transfer of `elements` elements. If the parts of an all-to-all have
/// different lengths, the contract's count is 0, and each header carries the length of its transfer instead.
fn contract_of_transfer(contract: Contract, elements: usize) -> Contract {
    let has_uneven_parts = contract.operation == Operation::AllToAll && contract.count == 0;
    Contract { count: if has_uneven_parts { elements as u64 } else { contract.count }, ..contract }
}

/// Returns the header of a frame of an operation, without payload. The meaning of `offset` depends on the kind of the frame.
fn header(kind: FrameKind, running: &RunningOperation, offset: u64) -> FrameHeader {
    let OperationRequest { group, contract, .. } = running.info;
    FrameHeader { kind, group, sequence: running.key.sequence(), contract, offset, ..FrameHeader::EMPTY }
}

/// Returns the header of a segment. If the header has a checksum field, the driver fills it in.
fn segment_header(
    running: &RunningOperation,
    segment: &TransferSegment,
    eager: bool,
    is_checked: bool,
) -> FrameHeader {
    let payload_bytes = segment.range.len() * running.info.contract.dtype.size_bytes();
    FrameHeader {
        contract: contract_of_transfer(running.info.contract, segment.transfer_elements),
        step: segment.transfer_index,
        eager,
        payload_bytes: payload_bytes as u32,
        payload_crc: is_checked.then_some(0),
        ..header(FrameKind::Data, running, segment.offset as u64)
    }
}
