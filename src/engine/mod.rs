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

mod failing;
mod itself;
mod judge;
mod link;
mod matching;
mod operation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::panic::Location;
use std::time::Duration;

use bytes::Bytes;

pub use self::failing::Failure;
pub use self::link::CREDIT_BYTES;
use self::link::{ANNOUNCED_MAX, Link};
pub use self::matching::{Envelope, Pattern};
use self::matching::{Matching, Posted};
use self::operation::{Call, Next, Running};
pub use self::operation::{EAGER_BYTES, Key};
use crate::schedule::{Action, Inbound, Outbound, Schedule, Step};
use crate::types::{Contract, Operation, Rank, WorldSize};
use crate::wire::{Header, Kind};

/// How many past operations of a group an engine remembers, to tell a rank that it asked for something else.
const HISTORY_MAX: usize = 64;

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
    /// Whether every segment carries a CRC32C; the same on all ranks.
    pub checks_payloads: bool,
    /// How to name each rank's host in an error, in rank order.
    pub hosts: Vec<String>,
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
    /// Where in the caller's program.
    pub site: &'static Location<'static>,
}

/// Something to send, whole and before anything else to that peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// A segment: the header, then the elements of the operation's buffer. Its checksum is the driver's to fill in.
    Segment {
        /// The operation.
        operation: OpId,
        /// The frame's header.
        header: Header,
        /// The elements.
        range: Range<usize>,
    },
    /// A control frame: the header, then these bytes.
    Control {
        /// The frame's header.
        header: Header,
        /// The payload.
        payload: Bytes,
    },
}

/// What to do with a frame whose header has arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
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
    Store(Key),
    /// Receive the payload and pass it to [`Engine::control`].
    Control,
    /// The frame has no payload and has been dealt with.
    Taken,
    /// The job has failed: receive the payload and forget it.
    Discard,
    /// The bytes of this link mean nothing any more; read no more from it.
    Refuse,
}

/// What a group has done.
#[derive(Default)]
struct Past {
    /// The number of the next operation.
    next: u64,
    /// What was asked for in the last operations and where, oldest first.
    history: VecDeque<(u64, Contract, &'static Location<'static>)>,
}

/// One rank's state machine.
pub struct Engine {
    settings: Settings,
    operations: BTreeMap<OpId, Running>,
    by_key: BTreeMap<Key, OpId>,
    matching: Matching,
    /// The messages that receives were matched with.
    envelopes: BTreeMap<OpId, Envelope>,
    deadlines: BTreeSet<(Timestamp, OpId)>,
    groups: BTreeMap<u32, Past>,
    links: BTreeMap<Rank, Link>,
    completed: VecDeque<OpId>,
    /// Messages of this rank to itself and the receives that have found them.
    handed_over: VecDeque<(OpId, OpId)>,
    next_id: u64,
    now: Timestamp,
    failure: Option<Failure>,
    closing: bool,
}

impl Engine {
    /// An engine with nothing to do.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            operations: BTreeMap::new(),
            by_key: BTreeMap::new(),
            matching: Matching::default(),
            envelopes: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            groups: BTreeMap::new(),
            links: BTreeMap::new(),
            completed: VecDeque::new(),
            handed_over: VecDeque::new(),
            next_id: 0,
            now: Duration::ZERO,
            failure: None,
            closing: false,
        }
    }

    /// Begins the next operation of a group; every rank of the group has to begin the same one. The schedule's ranks are
    /// those of the world.
    ///
    /// # Errors
    ///
    /// The failure, if the job has failed before or a peer that is needed has already left.
    pub fn begin(&mut self, now: Timestamp, begin: Begin, schedule: Schedule) -> Result<OpId, Failure> {
        self.check()?;
        let Begin { group, contract, .. } = begin;
        let past = self.groups.entry(group).or_default();
        let sequence = past.next;
        past.next += 1;
        past.history.push_back((sequence, contract, begin.site));
        if past.history.len() > HISTORY_MAX {
            past.history.pop_front();
        }
        let id = self.next_id();
        let call = Self::call(now, begin, Key::Collective { group, sequence });
        self.start(id, call, schedule)
    }

    /// Begins to send a message of elements `0..count` of a buffer, the contract's `layout` being its tag. One to this
    /// rank itself has ended at once, and its bytes are to be kept ([`Engine::take_handed_over`]).
    ///
    /// # Errors
    ///
    /// As [`Engine::begin`].
    pub fn send(&mut self, now: Timestamp, begin: Begin, to: Rank) -> Result<OpId, Failure> {
        self.check()?;
        if to == self.settings.rank {
            return self.send_to_itself(begin);
        }
        let link = self.links.entry(to).or_default();
        let key = Key::Message { from: self.settings.rank, to, sequence: link.messages_sent };
        link.messages_sent += 1;
        let range = 0..begin.contract.count as usize;
        let step = Step { send: Some(Outbound { peer: to, range, after: None }), receive: None };
        let id = self.next_id();
        self.start(id, Self::call(now, begin, key), Schedule { steps: vec![step] })
    }

    /// Begins to receive a message of at most the contract's `count` elements into `0..` of a buffer. Which message it is,
    /// and how long, [`Engine::envelope`] says once it has been found.
    ///
    /// # Errors
    ///
    /// As [`Engine::begin`], and when the message that fits is longer or of another element type.
    pub fn receive(&mut self, now: Timestamp, begin: Begin, pattern: Pattern) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.next_id();
        // It has no key before it has a message.
        let call = Self::call(now, begin, Key::Collective { group: begin.group, sequence: u64::MAX });
        let posted = Posted { id, pattern, call };
        if let Some((key, envelope)) = self.matching.take_arrived(&pattern) {
            self.unite(&posted, key, envelope)?;
            return Ok(id);
        }
        if let Some(source) = pattern.source
            && self.links.get(&source).is_some_and(|link| link.left || link.lost)
        {
            return Err(self.fail_left(source));
        }
        self.deadlines.insert((call.deadline, id));
        self.matching.post(posted);
        Ok(id)
    }

    /// The first message that fits and has no receive yet.
    pub fn probe(&self, pattern: &Pattern) -> Option<Envelope> {
        self.matching.probe(pattern)
    }

    /// The name under which the frames of an operation travel, while it is under way and once it has one.
    pub fn key_of(&self, operation: OpId) -> Option<Key> {
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
        self.operations.is_empty() && self.matching.posted().next().is_none()
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
        self.deadlines.first().map(|&(deadline, _)| deadline)
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
        let mut next = None;
        while let Some(&id) = link.sending.range(next.unwrap_or(OpId(0))..).next() {
            next = Some(OpId(id.0 + 1));
            let Some(running) = self.operations.get_mut(&id) else { continue };
            match running.next(peer, link.credit()) {
                Next::Nothing => {}
                Next::Announce if link.announcing.len() < ANNOUNCED_MAX => {
                    running.announced(peer);
                    link.announcing.insert(id);
                    let header = header(Kind::Announce, &running.call, 0);
                    return Some(Transmit::Control { header, payload: Bytes::new() });
                }
                Next::Starved | Next::Announce => {
                    link.sending.remove(&id);
                    link.parked.insert(id);
                }
                Next::Segment(outgoing) => {
                    let payload_bytes = outgoing.range.len() * running.call.contract.dtype.size_bytes();
                    if outgoing.eager {
                        link.spend(payload_bytes);
                    }
                    link.in_flight = Some(id);
                    let contract = of_message(running.call.contract, outgoing.total);
                    let header = Header {
                        contract,
                        message: outgoing.message,
                        eager: outgoing.eager,
                        payload_bytes: payload_bytes as u32,
                        payload_crc: self.settings.checks_payloads.then_some(0),
                        ..header(Kind::Data, &running.call, outgoing.offset as u64)
                    };
                    return Some(Transmit::Segment { operation: id, header, range: outgoing.range });
                }
            }
        }
        None
    }

    /// The segment that [`Engine::poll_transmit`] gave for `peer` has been sent whole.
    pub fn transmitted(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        let Some(id) = link.in_flight.take() else { return };
        let Some(running) = self.operations.get_mut(&id) else { return };
        running.transmitted(peer);
        if !running.sends_to(peer) {
            link.has_sent(id);
        }
        self.settle(id);
    }

    /// The segment that [`Verdict::Apply`] asked for has been received and applied; `was_stored` before that.
    pub fn applied(&mut self, operation: OpId, peer: Rank, header: &Header, was_stored: bool) {
        let bytes = header.payload_bytes as usize;
        let key = self.key_of(operation);
        let link = self.links.entry(peer).or_default();
        if was_stored && let Some(key) = key {
            link.unstore(key, bytes);
        }
        if header.eager
            && let Some(used) = link.make_use(bytes)
        {
            link.control.push_back(Header { kind: Kind::Credit, offset: used, ..Header::EMPTY });
        }
        if let Some(running) = self.operations.get_mut(&operation) {
            running.applied(peer);
        }
        self.tell_ready(operation);
        self.settle(operation);
    }

    /// This rank has no more to do: peers are told goodbye.
    pub fn close(&mut self) {
        self.closing = true;
    }

    fn next_id(&mut self) -> OpId {
        self.next_id += 1;
        OpId(self.next_id)
    }

    fn call(now: Timestamp, begin: Begin, key: Key) -> Call {
        let Begin { group, contract, timeout, site } = begin;
        Call { key, group, contract, site, deadline: now.saturating_add(timeout), timeout }
    }

    fn start(&mut self, id: OpId, call: Call, schedule: Schedule) -> Result<OpId, Failure> {
        let segment_elements = (self.settings.segment_bytes / call.contract.dtype.size_bytes()).max(1);
        let mut running = Running::new(call, schedule, segment_elements);
        let mut gone = None;
        for peer in running.peers().collect::<Vec<_>>() {
            let link = self.links.entry(peer).or_default();
            let is_gone = link.left || link.lost;
            if is_gone && running.needs(peer, link.stored_segments(call.key)) {
                gone.get_or_insert(peer);
            }
            if link.announced.remove(&call.key) {
                running.tell_when_ready(peer);
            }
            if let Some(messages) = link.cleared.remove(&call.key) {
                running.cleared(peer, messages);
            }
        }
        for peer in running.receivers() {
            self.links.entry(peer).or_default().sending.insert(id);
        }
        self.deadlines.insert((call.deadline, id));
        self.by_key.insert(call.key, id);
        self.operations.insert(id, running);
        if let Some(peer) = gone {
            return Err(self.fail_left(peer));
        }
        self.tell_ready(id);
        self.settle(id);
        Ok(id)
    }

    /// Joins a receive and its message into an operation.
    fn unite(&mut self, posted: &Posted, key: Key, envelope: Envelope) -> Result<(), Failure> {
        let Posted { id, call, .. } = *posted;
        let asked = call.contract;
        self.deadlines.remove(&(call.deadline, id));
        if envelope.contract.dtype != asked.dtype || envelope.contract.count > asked.count {
            let Key::Message { sequence, .. } = key else { return Ok(()) };
            let cause = self.mismatch(
                (call.group, sequence),
                (asked, call.site),
                (envelope.source, envelope.contract),
            );
            return Err(self.fail(cause));
        }
        let receive = Inbound {
            peer: envelope.source,
            range: 0..envelope.contract.count as usize,
            action: Action::Copy,
            after: None,
        };
        self.envelopes.insert(id, envelope);
        if envelope.source == self.settings.rank {
            self.hand_over(id, key);
            return Ok(());
        }
        let call = Call { key, contract: envelope.contract, ..call };
        let schedule = Schedule { steps: vec![Step { send: None, receive: Some(receive) }] };
        self.start(id, call, schedule).map(|_| ())
    }

    /// Tells peers for what we have become ready.
    fn tell_ready(&mut self, id: OpId) {
        let Some(running) = self.operations.get_mut(&id) else { return };
        for (peer, messages) in running.take_ready() {
            let header = header(Kind::Ready, &running.call, messages as u64);
            self.links.entry(peer).or_default().control.push_back(header);
        }
    }

    /// Takes note if an operation has ended.
    fn settle(&mut self, id: OpId) {
        if self.operations.get(&id).is_some_and(Running::is_complete)
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
fn header(kind: Kind, call: &Call, offset: u64) -> Header {
    let contract = call.contract;
    Header { kind, group: call.group, sequence: call.sequence(), contract, offset, ..Header::EMPTY }
}
