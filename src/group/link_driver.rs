//! Joins the engine to a transport: turns ranges into slices, moves their bytes, and reduces what arrives.
//!
//! [`LinkDriver::poll`] does all that can be done without waiting. It reads no clock except for a profile, so the simulated
//! network drives it too.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::IoSliceMut;

pub use super::link_io::ByteCounters;
use super::link_io::{ActiveOperation, ActiveOperations, FramePayload, IncomingFrame, LinkIo, OutgoingFrame};
use super::memory::Memory;
use super::profile::{Meter, ProfilePart};
use crate::engine::{Begin, Engine, Envelope, Failure, OpId, Pattern, Settings, Timestamp};
use crate::reduce::Kernels;
use crate::schedule::{Action, Schedule};
use crate::transport::{TransferResult, Transport};
use crate::types::{Contract, Rank, Site};
use crate::wire::frame::HEADER_BYTES;

/// How many times bytes are moved before the pump's driver gets a chance to do something else.
const MOVES_MAX: usize = 64;

/// Bytes of no interest that are read at a time.
const WASTE_BYTES: usize = 16 << 10;

/// An engine, its transport, and what is half sent and half received.
pub struct LinkDriver<T> {
    engine: Engine,
    transport: T,
    links: BTreeMap<Rank, LinkIo>,
    /// The lanes' peers, in the order in which the links were needed.
    peers: Vec<Rank>,
    settings: Settings,
    tasks: ActiveOperations,
    counters: ByteCounters,
    /// Callers that look for messages without receiving them.
    probes: usize,
}

/// What a turn has come to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PollOutcome {
    /// More can be done at once.
    Busy,
    /// Nothing more can be done before the transport has waited.
    Blocked,
    /// The job has failed.
    Failed(Failure),
}

/// An operation that has ended well.
pub struct Finished {
    /// Which.
    pub operation: OpId,
    /// Its memory.
    pub memory: Memory,
    /// What was received, if it was a receive.
    pub envelope: Option<Envelope>,
    /// How its elements were reduced, if they were.
    pub kernels: Option<Kernels>,
}

/// What an operation does to bytes.
pub struct OperationBuffers {
    /// The whole buffer.
    pub memory: Memory,
    /// How elements are reduced, if they are.
    pub kernels: Option<Kernels>,
    /// By what an average is divided: the group's size.
    pub divisor: u32,
}

impl<T: Transport> LinkDriver<T> {
    /// A driver with nothing to do.
    pub fn new(settings: Settings, transport: T) -> Self {
        Self {
            engine: Engine::new(settings.clone()),
            transport,
            links: BTreeMap::new(),
            peers: Vec::new(),
            settings,
            tasks: ActiveOperations::default(),
            counters: ByteCounters::default(),
            probes: 0,
        }
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The transport.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// The transport, to be told of events.
    pub fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// What measures where time goes.
    pub(super) fn meter(&self) -> &Meter {
        &self.tasks.meter
    }

    /// What has been moved so far.
    pub fn counters(&self) -> ByteCounters {
        self.counters
    }

    /// Why the job failed, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.engine.failure()
    }

    /// Opens a link before the first operation needs it.
    pub fn connect(&mut self, now: Timestamp, peer: Rank) {
        // What a rank has for itself takes no link.
        if peer != self.settings.rank && !self.links.contains_key(&peer) {
            self.transport.connect(now, peer);
            self.links.insert(peer, LinkIo::new());
            self.peers.push(peer);
        }
    }

    /// Begins the next operation of a group.
    ///
    /// # Errors
    ///
    /// The job's failure, if it has failed before.
    pub fn begin(
        &mut self,
        now: Timestamp,
        begin: Begin,
        schedule: Schedule,
        work: OperationBuffers,
    ) -> Result<OpId, Failure> {
        for peer in schedule.peers() {
            self.connect(now, peer);
        }
        let id = self.engine.begin(now, begin, schedule)?;
        self.take_up(id, begin, work);
        Ok(id)
    }

    /// Begins to send a message; the contract's `layout` is its tag.
    ///
    /// # Errors
    ///
    /// As [`LinkDriver::begin`].
    pub fn send_message(
        &mut self,
        now: Timestamp,
        begin: Begin,
        to: Rank,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        self.connect(now, to);
        let id = self.engine.send(now, begin, to)?;
        self.take_up(id, begin, OperationBuffers { memory, kernels: None, divisor: 1 });
        if to == self.settings.rank {
            self.tasks.keep(id, begin.contract.count as usize);
            self.tasks.deliver_to_itself(&mut self.engine);
        }
        Ok(id)
    }

    /// Begins to receive a message.
    ///
    /// # Errors
    ///
    /// As [`LinkDriver::begin`].
    pub fn receive_message(
        &mut self,
        now: Timestamp,
        begin: Begin,
        pattern: Pattern,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        if let Some(source) = pattern.source {
            self.connect(now, source);
        }
        let id = self.engine.receive(now, begin, pattern)?;
        self.take_up(id, begin, OperationBuffers { memory, kernels: None, divisor: 1 });
        self.tasks.deliver_to_itself(&mut self.engine);
        Ok(id)
    }

    /// The first message that fits and has no receive yet.
    pub fn probe(&self, pattern: &Pattern) -> Option<Envelope> {
        self.engine.probe(pattern)
    }

    /// Takes note of an operation whose progress is seen elsewhere.
    ///
    /// # Errors
    ///
    /// As [`LinkDriver::begin`].
    pub fn begin_external(&mut self, now: Timestamp, begin: Begin, sequence: u64) -> Result<OpId, Failure> {
        self.engine.begin_external(now, begin, sequence)
    }

    /// Gives the next number of a group to an operation that consists of others. See [`Engine::assign_number`].
    ///
    /// # Errors
    ///
    /// The failure, if a rank has already sent a frame of another operation of that number.
    pub fn assign_number(&mut self, group: u32, asked: (Contract, Site)) -> Result<OpId, Failure> {
        let (id, key) = self.engine.assign_number(group, asked)?;
        // The engine compares frames that arrive from now on. One that arrived before is stored.
        if let Some((peer, header)) = self.tasks.first_stored(key) {
            self.engine.handle_late_frame(peer, &header);
        }
        self.engine.failure().map_or(Ok(id), |failure| Err(failure.clone()))
    }

    /// The engine, for its word about operations whose progress is seen elsewhere.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    fn take_up(&mut self, id: OpId, begin: Begin, work: OperationBuffers) {
        let OperationBuffers { memory, kernels, divisor } = work;
        let element_bytes = begin.contract.dtype.size_bytes();
        self.tasks.under_way.insert(id, ActiveOperation { memory, element_bytes, kernels, divisor });
        if let Some(key) = self.engine.key_of(id) {
            self.tasks.replay(key, &mut self.engine);
        }
    }

    /// Does all that can be done now, or a good part of it.
    pub fn poll(&mut self, now: Timestamp) -> PollOutcome {
        self.engine.advance(now);
        self.admit();
        let (mut moved, mut moves) = (true, 0);
        while moved && moves < MOVES_MAX && self.engine.failure().is_none() && self.is_wanted() {
            moved = false;
            for index in 0..self.peers.len() {
                let peer = self.peers[index];
                moved |= self.receive(peer);
                moved |= self.send(peer);
            }
            moves += 1;
        }
        self.tell();
        self.engine.handle_timeout(now);
        match self.engine.failure() {
            Some(failure) => PollOutcome::Failed(failure.clone()),
            None if moved && self.is_wanted() => PollOutcome::Busy,
            None => PollOutcome::Blocked,
        }
    }

    /// Sends the words about operations that wait to be sent.
    pub fn tell(&mut self) {
        for index in 0..self.peers.len() {
            let peer = self.peers[index];
            while self.engine.has_control(peer) && self.send(peer) {}
        }
    }

    /// Whether anything waits for bytes.
    fn is_wanted(&self) -> bool {
        self.probes > 0 || !self.engine.is_idle()
    }

    /// A caller starts or stops looking for messages.
    pub fn set_probing(&mut self, is_probing: bool) {
        self.probes = if is_probing { self.probes + 1 } else { self.probes - 1 };
    }

    /// How many messages have come that had no receive yet.
    pub fn arrivals(&self) -> u64 {
        self.engine.arrivals()
    }

    /// How often something has come that whoever sleeps at a board has to know of.
    pub fn wake_events(&self) -> u64 {
        self.engine.wake_events()
    }

    /// Makes lanes for peers that have opened links of their own accord.
    fn admit(&mut self) {
        while let Some(peer) = self.transport.take_incoming_link() {
            if let Entry::Vacant(place) = self.links.entry(peer) {
                place.insert(LinkIo::new());
                self.peers.push(peer);
            }
        }
    }

    /// An operation that has ended well since the last call, with its memory.
    pub fn take_finished(&mut self) -> Option<Finished> {
        let (operation, envelope) = self.engine.take_completed()?;
        let (memory, kernels) = match self.tasks.under_way.remove(&operation) {
            Some(task) => (task.memory, task.kernels),
            None => (Memory::none(), None),
        };
        Some(Finished { operation, memory, envelope, kernels })
    }

    /// Withdraws a receive that has found no message yet; whether it was one.
    pub fn cancel(&mut self, receive: OpId) -> bool {
        let is_cancelled = self.engine.cancel(receive);
        if is_cancelled {
            self.tasks.under_way.remove(&receive);
        }
        is_cancelled
    }

    /// The group begins nothing more.
    pub fn retire(&mut self, group: u32) {
        self.engine.retire_group(group);
    }

    /// Gives up all memory: the job has failed, and its peers have been told. What was half sent stays so. Returns how
    /// elements were reduced, which may be a program's own.
    pub fn release(&mut self) -> Vec<Kernels> {
        let kernels = self.tasks.release();
        for link in self.links.values_mut() {
            if let IncomingFrame::Segment { bytes, filled, .. } = &link.incoming {
                link.incoming = IncomingFrame::Waste { left: bytes.len() - filled };
            }
        }
        kernels
    }

    /// When something is due even if nothing comes from outside.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.engine.poll_timeout()
    }

    /// This rank gives up, and says why.
    pub fn abort(&mut self, message: &str) -> Failure {
        self.engine.abort(message)
    }

    /// Parts from the peers: tells them why the job failed or says goodbye, closes every link and reads it to its end, so
    /// that no reset destroys the last words. Returns whether all is said and read; until then it wants further turns.
    pub fn part(&mut self) -> bool {
        self.admit();
        self.engine.close();
        let mut all_parted = true;
        for peer in self.peers.clone() {
            while self.send(peer) {}
            self.drain(peer);
            all_parted &=
                !self.transport.is_open(peer) || self.links.get(&peer).is_none_or(|link| link.is_lost);
        }
        all_parted
    }

    /// Tells the peers why the job failed, and hears what they know of it. Returns whether all have been told and agree.
    pub fn notify(&mut self) -> bool {
        self.admit();
        let mut all_told = true;
        for peer in self.peers.clone() {
            while self.receive(peer) {}
            while self.send(peer) {}
            let is_told = |link: &LinkIo| link.is_lost || link.outgoing.is_none();
            all_told &= !self.transport.is_open(peer) || self.links.get(&peer).is_none_or(is_told);
        }
        all_told && self.engine.do_peers_agree()
    }

    /// Moves bytes to `peer` once; whether any moved.
    fn send(&mut self, peer: Rank) -> bool {
        let Self { engine, transport, links, tasks, counters, .. } = self;
        let Some(link) = links.get_mut(&peer).filter(|link| !link.is_lost && !link.is_finished) else {
            return false;
        };
        if link.outgoing.is_none() {
            link.outgoing = engine.poll_transmit(peer).map(|transmit| OutgoingFrame::new(transmit, tasks));
        }
        let Some(outgoing) = &mut link.outgoing else { return false };
        let payload = match &outgoing.payload {
            FramePayload::Segment(operation, range) => {
                tasks.under_way.get(operation).and_then(|task| task.memory.bytes(range.clone()))
            }
            FramePayload::Control(bytes) => Some(&bytes[..]),
        };
        // A failed operation's memory is gone once its call has returned; with it go its half-sent segments.
        let Some(payload) = payload else {
            link.outgoing = None;
            link.is_finished = true;
            transport.finish(peer);
            return false;
        };
        let mut started = tasks.meter.start();
        let moved = transport.send(peer, &outgoing.rest(payload));
        tasks.meter.end(ProfilePart::Send, &mut started);
        match moved {
            TransferResult::Bytes(count) => {
                counters.bytes_sent += count as u64;
                link.has_opened = true;
                outgoing.sent += count;
                if outgoing.sent == HEADER_BYTES + payload.len() {
                    if let FramePayload::Segment(operation, _) = outgoing.payload {
                        let key = engine.key_of(operation);
                        engine.transmitted(peer);
                        // What has come may have waited for this to leave.
                        if let Some(key) = key {
                            tasks.replay(key, engine);
                        }
                    }
                    link.outgoing = None;
                }
                true
            }
            TransferResult::Blocked => false,
            TransferResult::Lost(detail) | TransferResult::Corrupt(detail) => {
                // What the peer said before it went, its reason perhaps, may still wait to be read.
                link.outgoing = None;
                link.is_finished = true;
                if !link.may_still_be_read() {
                    link.lose(peer, &detail, engine);
                }
                true
            }
        }
    }

    /// Moves bytes from `peer` once; whether any moved.
    fn receive(&mut self, peer: Rank) -> bool {
        let Self { engine, transport, links, tasks, counters, .. } = self;
        let Some(link) = links.get_mut(&peer).filter(|link| !link.is_lost) else { return false };
        let LinkIo { incoming, header, header_filled, scratch, .. } = link;
        let mut started = tasks.meter.start();
        // The next header is read along with a payload, which saves a system call for each segment.
        let (target, with_header) = match incoming {
            IncomingFrame::Refused => return false,
            IncomingFrame::Header => (&mut header[*header_filled..], None),
            IncomingFrame::Control { payload, filled, .. } => (&mut payload[*filled..], None),
            IncomingFrame::Waste { left } => {
                scratch.resize((*left).min(WASTE_BYTES));
                (scratch.bytes_mut(), None)
            }
            IncomingFrame::Stored { payload, filled, .. } => {
                (&mut payload.bytes_mut()[*filled..], Some(header))
            }
            IncomingFrame::Segment { operation, bytes, action, filled, .. } => {
                let target = if *action == Action::Copy {
                    let task = tasks.under_way.get_mut(operation);
                    task.and_then(|task| task.memory.bytes_mut(bytes.clone())).unwrap_or_default()
                } else {
                    scratch.bytes_mut()
                };
                (&mut target[*filled..], Some(header))
            }
        };
        let moved = match with_header {
            Some(header) => transport.receive(peer, &mut [IoSliceMut::new(target), IoSliceMut::new(header)]),
            None => transport.receive(peer, &mut [IoSliceMut::new(target)]),
        };
        tasks.meter.end(ProfilePart::Receive, &mut started);
        match moved {
            TransferResult::Bytes(count) => {
                counters.bytes_received += count as u64;
                link.has_opened = true;
                link.advance(count);
                link.settle(peer, engine, tasks);
                true
            }
            TransferResult::Blocked => false,
            TransferResult::Lost(detail) => {
                link.lose(peer, &detail, engine);
                true
            }
            TransferResult::Corrupt(detail) => {
                link.refuse(peer, detail, engine);
                true
            }
        }
    }

    /// Ends our side of a link whose last words are said, and reads the other side's to the end.
    fn drain(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        if link.is_lost {
            return;
        }
        if link.outgoing.is_none() && !link.is_finished {
            link.is_finished = true;
            self.transport.finish(peer);
        }
        let mut waste = [0; 16 << 10];
        loop {
            match self.transport.receive(peer, &mut [IoSliceMut::new(&mut waste)]) {
                TransferResult::Bytes(_) | TransferResult::Corrupt(_) => {}
                TransferResult::Blocked => return,
                TransferResult::Lost(_) => break,
            }
        }
        link.is_lost = true;
    }
}
