//! The sans-IO state machine of one rank: inputs in, outputs out.
//!
//! It walks the [schedules](crate::schedule) of any number of operations at a time, decides what each peer may be sent
//! next, judges every frame that arrives, matches messages with receives, knows the deadlines, and turns whatever goes
//! wrong into one root cause that all ranks come to share. It never reads a clock, opens a socket, starts a thread or
//! touches a byte of data: time is an argument, and data are ranges of elements that its driver maps to memory.
//!
//! The driver's duties: offer every frame header in the order of its link ([`Engine::frame`]); store what it is told to
//! store, and offer it again ([`Engine::stored_frame`]) when its operation begins or gets further; say when a segment has
//! been applied ([`Engine::applied`]); ask what to send ([`Engine::poll_transmit`]) after every input, and send it whole;
//! report lost links and the passing of [`Engine::poll_timeout`].

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

mod begin;
mod external;
mod failing;
mod history;
mod incoming;
mod link;
mod loopback;
mod matching;
mod operation;
mod send_queue;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

use self::external::ExternalOperation;
pub use self::failing::Failure;
use self::failing::Unreached;
use self::history::OperationHistory;
pub use self::link::CREDIT_BYTES;
use self::link::{ANNOUNCED_MAX, Link};
use self::matching::Matching;
pub use self::matching::{Envelope, Pattern};
pub use self::operation::{EAGER_BYTES, OperationKey};
use self::operation::{NextSend, OperationInfo, OutgoingSegment, RunningOperation};
use crate::schedule::Action;
use crate::types::{Contract, Operation, Rank, Site, WorldSize};
use crate::wire::cause::SilentLink;
use crate::wire::{FrameHeader, FrameKind};

/// A moment, as the time since an epoch of the driver's choice.
pub type Timestamp = Duration;

/// An operation of this rank, by the order in which they were begun.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpId(u64);

/// What an engine has to know from the start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whose engine this is.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: WorldSize,
    /// Bytes of a whole segment; the same on all ranks.
    pub segment_bytes: usize,
    /// Whether payloads on the link to each rank carry a CRC32C, in rank order. Both ends of a link have the same setting.
    pub checked_links: Vec<bool>,
    /// How to name each rank's host in an error, in rank order.
    pub hosts: Vec<String>,
}

impl Settings {
    /// Whether payloads on the link to `peer` carry a CRC32C.
    fn is_checked(&self, peer: Rank) -> bool {
        self.checked_links.get(peer.index()).is_some_and(|&is_checked| is_checked)
    }
}

/// When the send of a message is complete.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SendMode {
    /// When its bytes have left this rank. The receiver may not have asked for the message yet.
    #[default]
    Standard,
    /// When its bytes have left and a receive of the receiver has matched the message.
    Synchronous,
}

/// What is common to all ways of beginning an operation.
#[derive(Clone, Copy, Debug)]
pub struct Begin {
    /// The group.
    pub group: u32,
    /// What this rank asks for.
    pub contract: Contract,
    /// How long the peers may take to do their part.
    pub timeout: Duration,
    /// How much of that has passed already, where this is a part of something longer.
    pub spent: Duration,
    /// Where in the caller's program.
    pub site: Site,
    /// When a message that this operation sends is complete; other operations ignore it.
    pub mode: SendMode,
}

/// Something to send, whole and before anything else to that peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// A segment: the header, then the elements of the operation's buffer. Its checksum is the driver's to fill in.
    Segment {
        /// The operation.
        operation: OpId,
        /// The frame's header.
        header: FrameHeader,
        /// The elements.
        range: Range<usize>,
    },
    /// A control frame: the header, then these bytes.
    Control {
        /// The frame's header.
        header: FrameHeader,
        /// The payload.
        payload: Bytes,
    },
}

/// What to do with a frame whose header has arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameVerdict {
    /// Receive the payload for these elements, apply it, and say so with [`Engine::applied`].
    Apply {
        /// The operation.
        operation: OpId,
        /// The elements.
        range: Range<usize>,
        /// What to do with them.
        action: Action,
    },
    /// Receive the payload and keep it under this key until [`Engine::stored_frame`] has a use for it.
    Store(OperationKey),
    /// Receive the payload and pass it to [`Engine::control`].
    Control,
    /// The frame has no payload and has been dealt with.
    Taken,
    /// The job has failed: receive the payload and forget it.
    Discard,
    /// The bytes of this link mean nothing any more; read no more from it.
    Refuse,
}

/// One rank's state machine.
pub struct Engine {
    settings: Settings,
    operations: BTreeMap<OpId, RunningOperation>,
    /// Operations whose progress is seen elsewhere.
    external: BTreeMap<OpId, ExternalOperation>,
    /// How often something has come that whoever sleeps at a board has to know of.
    alerts: u64,
    by_key: BTreeMap<OperationKey, OpId>,
    matching: Matching,
    /// The messages that receives were matched with.
    envelopes: BTreeMap<OpId, Envelope>,
    deadlines: BTreeSet<(Timestamp, OpId)>,
    /// The operation whose deadline has passed.
    overdue: Option<OpId>,
    history: OperationHistory,
    /// How many operations may be announced to a peer at a time; the same on all ranks.
    announced_max: usize,
    links: BTreeMap<Rank, Link>,
    completed: VecDeque<OpId>,
    /// Messages of this rank to itself and the receives that have found them.
    handed_over: VecDeque<(OpId, OpId)>,
    next_id: u64,
    now: Timestamp,
    failure: Option<Failure>,
    /// After a missed deadline: the links on which this rank waited.
    silent_links: Vec<SilentLink>,
    /// Peers whose hosts do not acknowledge the data of this rank.
    unacknowledged: BTreeSet<Rank>,
    /// A peer to which no link could be opened.
    unreached: Option<Unreached>,
    closing: bool,
}

impl Engine {
    /// An engine with nothing to do.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            operations: BTreeMap::new(),
            external: BTreeMap::new(),
            alerts: 0,
            by_key: BTreeMap::new(),
            matching: Matching::default(),
            envelopes: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            overdue: None,
            history: OperationHistory::default(),
            announced_max: ANNOUNCED_MAX,
            links: BTreeMap::new(),
            completed: VecDeque::new(),
            handed_over: VecDeque::new(),
            next_id: 0,
            now: Duration::ZERO,
            failure: None,
            silent_links: Vec::new(),
            unacknowledged: BTreeSet::new(),
            unreached: None,
            closing: false,
        }
    }

    /// The first message that fits and has no receive yet.
    pub fn probe(&self, pattern: &Pattern) -> Option<Envelope> {
        self.matching.probe(pattern)
    }

    /// The name under which the frames of an operation travel, while it is under way and once it has one.
    pub fn key_of(&self, operation: OpId) -> Option<OperationKey> {
        self.operations.get(&operation).map(|running| running.call.key)
    }

    /// The message that a receive has found.
    pub fn envelope(&self, receive: OpId) -> Option<&Envelope> {
        self.envelopes.get(&receive)
    }

    /// An operation that has ended, in the order in which they did. The envelope of a receive comes with it.
    pub fn take_completed(&mut self) -> Option<(OpId, Option<Envelope>)> {
        let id = self.completed.pop_front()?;
        Some((id, self.envelopes.remove(&id)))
    }

    /// Whether no operation is under way.
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.external.is_empty() && !self.matching.has_posted()
    }

    /// How many messages have come that had no receive yet.
    pub fn arrivals(&self) -> u64 {
        self.matching.arrivals()
    }

    /// Whether words about operations wait to be sent, which are not held up until there is an operation again.
    pub fn has_control(&self, peer: Rank) -> bool {
        self.links.get(&peer).is_some_and(|link| !link.control.is_empty())
    }

    /// Why the job failed, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// When [`Engine::handle_timeout`] is due next.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        if self.failure.is_some() {
            return None;
        }
        let deadline = self.deadlines.first().map(|&(deadline, _)| deadline);
        deadline.into_iter().chain(self.unreached.as_ref().map(|unreached| unreached.due)).min()
    }

    /// Time has passed.
    pub fn advance(&mut self, now: Timestamp) {
        self.now = self.now.max(now);
    }

    /// What to send to `peer` next, if anything may be sent. Once it has been given out, it has to be sent whole.
    pub fn poll_transmit(&mut self, peer: Rank) -> Option<Transmit> {
        if self.failure.is_some() || self.closing {
            return self.notification(peer);
        }
        let link = self.links.get_mut(&peer)?;
        if let Some(header) = link.control.pop_front() {
            return Some(Transmit::Control { header, payload: Bytes::new() });
        }
        for _ in 0..link.send_queue.len() {
            let Some(id) = link.send_queue.take() else { break };
            let Some(running) = self.operations.get_mut(&id) else { continue };
            match running.next(peer, link.credit()) {
                NextSend::Nothing if running.sends_to(peer) => link.send_queue.wait(id),
                NextSend::Nothing => {}
                NextSend::Held { charge, announce } => {
                    link.send_queue.park(id, charge);
                    if announce && link.send_queue.announce(id, running.call.key, self.announced_max) {
                        running.announced(peer);
                        link.send_queue.leaves(id, 0, self.settings.segment_bytes);
                        let header = header(FrameKind::Announce, &running.call, 0);
                        return Some(Transmit::Control { header, payload: Bytes::new() });
                    }
                }
                NextSend::Segment(outgoing) => {
                    let header = segment_header(&running.call, &outgoing, self.settings.is_checked(peer));
                    let payload_bytes = header.payload_bytes as usize;
                    if outgoing.eager {
                        link.spend(payload_bytes);
                    }
                    link.send_queue.leaves(id, payload_bytes, self.settings.segment_bytes);
                    link.send_queue.mark_in_flight(id);
                    return Some(Transmit::Segment { operation: id, header, range: outgoing.range });
                }
            }
        }
        None
    }

    /// The segment that [`Engine::poll_transmit`] gave for `peer` has been sent whole.
    pub fn transmitted(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        let Some(id) = link.send_queue.take_in_flight() else { return };
        let Some(running) = self.operations.get_mut(&id) else { return };
        running.transmitted(peer);
        if running.sends_to(peer) {
            link.send_queue.pass(id);
        }
        self.settle(id);
    }

    /// The segment that [`FrameVerdict::Apply`] asked for has been received and applied; `was_stored` before that.
    pub fn applied(&mut self, operation: OpId, peer: Rank, header: &FrameHeader, was_stored: bool) {
        let bytes = header.payload_bytes as usize;
        let key = self.key_of(operation);
        let link = self.links.entry(peer).or_default();
        if was_stored && let Some(key) = key {
            link.unstore(key, bytes, header.eager);
        }
        if header.eager
            && let Some(used) = link.make_use(bytes)
        {
            link.control.push_back(FrameHeader {
                kind: FrameKind::Credit,
                offset: used,
                ..FrameHeader::EMPTY
            });
        }
        if let Some(running) = self.operations.get_mut(&operation) {
            running.applied(peer);
            for index in 0..running.peers() {
                if let (peer, true) = running.peer(index) {
                    self.links.entry(peer).or_default().send_queue.resume(operation);
                }
            }
        }
        self.tell_ready(operation);
        self.settle(operation);
    }

    /// This rank has no more to do: peers are told goodbye.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Tells peers for what we have become ready.
    fn tell_ready(&mut self, id: OpId) {
        let Some(running) = self.operations.get_mut(&id) else { return };
        for (peer, messages) in running.take_ready() {
            let header = header(FrameKind::Ready, &running.call, messages as u64);
            self.links.entry(peer).or_default().control.push_back(header);
        }
    }

    /// Takes note if an operation has ended.
    fn settle(&mut self, id: OpId) {
        if self.operations.get(&id).is_some_and(RunningOperation::is_complete)
            && let Some(running) = self.operations.remove(&id)
        {
            self.by_key.remove(&running.call.key);
            self.deadlines.remove(&(running.call.deadline, id));
            self.completed.push_back(id);
        }
    }
}

/// What a message of an operation asks for. Where parts differ from pair to pair of ranks, each names that of its pair.
fn of_message(contract: Contract, elements: usize) -> Contract {
    let by_pair = contract.operation == Operation::AllToAll && contract.count == 0;
    Contract { count: if by_pair { elements as u64 } else { contract.count }, ..contract }
}

/// A frame of an operation, without payload.
fn header(kind: FrameKind, call: &OperationInfo, offset: u64) -> FrameHeader {
    let contract = call.contract;
    FrameHeader { kind, group: call.group, sequence: call.sequence(), contract, offset, ..FrameHeader::EMPTY }
}

/// The frame of a segment. Its checksum is the driver's to fill in.
fn segment_header(call: &OperationInfo, outgoing: &OutgoingSegment, is_checked: bool) -> FrameHeader {
    let payload_bytes = outgoing.range.len() * call.contract.dtype.size_bytes();
    FrameHeader {
        contract: of_message(call.contract, outgoing.total),
        message: outgoing.message,
        eager: outgoing.eager,
        payload_bytes: payload_bytes as u32,
        payload_crc: is_checked.then_some(0),
        ..header(FrameKind::Data, call, outgoing.offset as u64)
    }
}
