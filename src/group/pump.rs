//! Joins the engine to a transport: turns ranges into slices, moves their bytes, and reduces what arrives.
//!
//! A turn of the pump does all that can be done without waiting. It reads no clock, so the simulated network turns it too.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

use crate::engine::{Engine, Failure, Settings, Timestamp, Transmit, Verdict};
use crate::reduce::{Kernels, kernels};
use crate::schedule::{Action, Schedule};
use crate::transport::{Moved, Transport};
use crate::types::{Contract, Rank};
use crate::wire::Header;
use crate::wire::frame::{CONTROL_BYTES_MAX, HEADER_BYTES};

/// An engine, its transport, and what is half sent and half received.
pub struct Pump<T> {
    engine: Engine,
    transport: T,
    lanes: BTreeMap<Rank, Lane>,
    /// The lanes' peers, in the order in which the links were needed.
    peers: Vec<Rank>,
    settings: Settings,
    /// What the running operation needs of memory and arithmetic.
    task: Task,
    counters: Counters,
}

/// How the running operation treats bytes.
struct Task {
    element_bytes: usize,
    kernels: Option<Kernels>,
    divisor: u32,
}

/// Bytes moved since the start, headers included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Sent.
    pub bytes_sent: u64,
    /// Received.
    pub bytes_received: u64,
}

/// What a turn has come to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Turn {
    /// The operation is over.
    Complete,
    /// Nothing more can be done before the transport has waited.
    Blocked,
    /// The job has failed.
    Failed(Failure),
}

/// What is under way on one link.
struct Lane {
    incoming: Incoming,
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    outgoing: Option<Outgoing>,
    /// Where a segment waits to be reduced: at most one segment long, of words so that every element type is aligned.
    scratch: Vec<u64>,
    is_lost: bool,
    is_finished: bool,
}

#[derive(Clone)]
enum Incoming {
    Header,
    /// A whole header that the engine does not want to see yet.
    Held(Header),
    Segment {
        header: Header,
        bytes: Range<usize>,
        action: Action,
        filled: usize,
    },
    Control {
        header: Header,
        payload: Vec<u8>,
        filled: usize,
    },
    /// Nothing more is read.
    Refused,
}

struct Outgoing {
    header: [u8; HEADER_BYTES],
    payload: Payload,
    sent: usize,
}

enum Payload {
    Segment(Range<usize>),
    Control(Bytes),
}

impl<T: Transport> Pump<T> {
    /// A pump with nothing to do.
    pub fn new(settings: Settings, transport: T) -> Self {
        Self {
            engine: Engine::new(settings.clone()),
            transport,
            lanes: BTreeMap::new(),
            peers: Vec::new(),
            settings,
            task: Task { element_bytes: 1, kernels: None, divisor: 1 },
            counters: Counters::default(),
        }
    }

    /// The engine's settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The transport.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// What has been moved so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Why the job failed, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.engine.failure()
    }

    /// Opens a link before the first operation needs it.
    pub fn connect(&mut self, now: Timestamp, peer: Rank) {
        if !self.lanes.contains_key(&peer) {
            self.transport.connect(now, peer);
            self.lanes.insert(peer, Lane::new());
            self.peers.push(peer);
        }
    }

    /// Begins the next operation.
    ///
    /// # Errors
    ///
    /// The job's failure, if it has failed before.
    ///
    /// # Panics
    ///
    /// If the contract's reduction has no kernel for its element type.
    pub fn begin(
        &mut self,
        now: Timestamp,
        contract: Contract,
        schedule: Schedule,
        timeout: Duration,
    ) -> Result<(), Failure> {
        for peer in schedule.peers() {
            self.connect(now, peer);
        }
        self.task = Task {
            element_bytes: contract.dtype.size_bytes(),
            kernels: contract.reduction.map(|op| kernels(contract.dtype, op).expect("a defined reduction")),
            divisor: self.settings.world.get(),
        };
        self.engine.begin(now, contract, schedule, timeout)
    }

    /// Does all that can be done now. `memory` is the operation's whole buffer, the same at every turn until it is over.
    pub fn turn(&mut self, now: Timestamp, memory: &mut [u8]) -> Turn {
        let mut moved = true;
        while moved && self.engine.failure().is_none() && !self.engine.is_idle() {
            moved = false;
            for index in 0..self.peers.len() {
                let peer = self.peers[index];
                moved |= self.receive(peer, memory);
                moved |= self.send(peer, memory);
            }
        }
        self.engine.handle_timeout(now);
        if let Some(failure) = self.engine.failure() {
            return Turn::Failed(failure.clone());
        }
        if self.engine.is_idle() {
            self.engine.finish();
            return Turn::Complete;
        }
        Turn::Blocked
    }

    /// Waits until another turn may get further, or until `until`, or the operation's deadline.
    ///
    /// # Errors
    ///
    /// When the operating system refuses to wait.
    pub fn wait(&mut self, now: Timestamp, until: Option<Timestamp>) -> std::io::Result<()> {
        let until = until.into_iter().chain(self.engine.poll_timeout()).min();
        self.transport.wait(now, until)
    }

    /// When the running operation's deadline is.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.engine.poll_timeout()
    }

    /// This rank gives up, and says why.
    pub fn abort(&mut self, message: &str) -> Failure {
        self.engine.abort(message)
    }

    /// Parts from the peers: tells them why the job failed or says goodbye, closes every link and reads it to its end, so
    /// that no reset destroys the last words. Returns whether all is said and read; until then it wants further turns.
    /// `memory` is the failed operation's buffer, whose half-sent segments are still completed, or empty.
    pub fn part(&mut self, memory: &mut [u8]) -> bool {
        self.engine.close();
        let mut all_parted = true;
        for peer in self.peers.clone() {
            while self.send(peer, memory) {}
            self.drain(peer);
            all_parted &=
                !self.transport.is_open(peer) || self.lanes.get(&peer).is_none_or(|lane| lane.is_lost);
        }
        all_parted
    }

    /// Tells the peers why the job failed. Returns whether all have been told.
    pub fn notify(&mut self, memory: &mut [u8]) -> bool {
        let mut all_told = true;
        for peer in self.peers.clone() {
            while self.send(peer, memory) {}
            let is_told = |lane: &Lane| lane.is_lost || lane.outgoing.is_none();
            all_told &= !self.transport.is_open(peer) || self.lanes.get(&peer).is_none_or(is_told);
        }
        all_told
    }

    /// Moves bytes to `peer` once; whether any moved.
    fn send(&mut self, peer: Rank, memory: &[u8]) -> bool {
        let Self { engine, transport, lanes, task, counters, .. } = self;
        let Some(lane) = lanes.get_mut(&peer).filter(|lane| !lane.is_lost && !lane.is_finished) else {
            return false;
        };
        if lane.outgoing.is_none() {
            lane.outgoing = engine.poll_transmit(peer).map(|transmit| Outgoing::new(transmit, task, memory));
        }
        let Some(outgoing) = &mut lane.outgoing else { return false };
        let payload = match &outgoing.payload {
            Payload::Segment(range) => memory.get(range.clone()),
            Payload::Control(bytes) => Some(&bytes[..]),
        };
        // A failed operation's memory is gone once its call has returned; with it go its half-sent segments.
        let Some(payload) = payload else {
            lane.outgoing = None;
            lane.is_finished = true;
            transport.finish(peer);
            return false;
        };
        let moved = if outgoing.sent < HEADER_BYTES {
            let parts = [IoSlice::new(&outgoing.header[outgoing.sent..]), IoSlice::new(payload)];
            transport.send(peer, &parts)
        } else {
            transport.send(peer, &[IoSlice::new(&payload[outgoing.sent - HEADER_BYTES..])])
        };
        match moved {
            Moved::Bytes(count) => {
                counters.bytes_sent += count as u64;
                outgoing.sent += count;
                if outgoing.sent == HEADER_BYTES + payload.len() {
                    if matches!(outgoing.payload, Payload::Segment(_)) {
                        engine.transmitted(peer);
                    }
                    lane.outgoing = None;
                }
                true
            }
            Moved::Blocked => false,
            Moved::Lost(detail) => {
                // What the peer said before it went, its reason perhaps, may still wait to be read.
                lane.outgoing = None;
                lane.is_finished = true;
                if !lane.may_still_be_read() {
                    engine.link_lost(peer, &detail);
                    lane.is_lost = true;
                }
                true
            }
        }
    }

    /// Moves bytes from `peer` once; whether any moved or were applied.
    fn receive(&mut self, peer: Rank, memory: &mut [u8]) -> bool {
        let Self { engine, transport, lanes, task, counters, .. } = self;
        let Some(lane) = lanes.get_mut(&peer).filter(|lane| !lane.is_lost) else { return false };
        let Lane { incoming, header, header_filled, scratch, .. } = lane;
        let moved = match incoming {
            Incoming::Held(_) => {
                let is_accepted = lane.offer(peer, engine, task);
                // A frame without payload is whole already.
                lane.settle(peer, engine, task, memory);
                return is_accepted;
            }
            Incoming::Refused => return false,
            Incoming::Header => {
                transport.receive(peer, &mut [IoSliceMut::new(&mut header[*header_filled..])])
            }
            Incoming::Control { payload, filled, .. } => {
                transport.receive(peer, &mut [IoSliceMut::new(&mut payload[*filled..])])
            }
            Incoming::Segment { bytes, action, filled, .. } => {
                let target = match action {
                    Action::Copy => &mut memory[bytes.clone()],
                    Action::Reduce | Action::ReduceLast => {
                        let words = bytes.len().div_ceil(size_of::<u64>());
                        if scratch.len() < words {
                            scratch.resize(words, 0);
                        }
                        &mut bytemuck::cast_slice_mut(scratch)[..bytes.len()]
                    }
                };
                // The next header is read along, which saves a system call for each segment.
                let parts = &mut [IoSliceMut::new(&mut target[*filled..]), IoSliceMut::new(header)];
                transport.receive(peer, parts)
            }
        };
        match moved {
            Moved::Bytes(count) => {
                counters.bytes_received += count as u64;
                lane.advance(count);
                lane.settle(peer, engine, task, memory);
                true
            }
            Moved::Blocked => false,
            Moved::Lost(detail) => {
                lane.is_lost = true;
                engine.link_lost(peer, &detail);
                true
            }
        }
    }

    /// Ends our side of a link whose last words are said, and reads the other side's to the end.
    fn drain(&mut self, peer: Rank) {
        let Some(lane) = self.lanes.get_mut(&peer) else { return };
        if lane.is_lost {
            return;
        }
        if lane.outgoing.is_none() && !lane.is_finished {
            lane.is_finished = true;
            self.transport.finish(peer);
        }
        let mut waste = [0; 16 << 10];
        loop {
            match self.transport.receive(peer, &mut [IoSliceMut::new(&mut waste)]) {
                Moved::Bytes(_) => {}
                Moved::Blocked => return,
                Moved::Lost(_) => {
                    lane.is_lost = true;
                    return;
                }
            }
        }
    }
}

impl Lane {
    fn new() -> Self {
        Self {
            incoming: Incoming::Header,
            header: [0; HEADER_BYTES],
            header_filled: 0,
            outgoing: None,
            scratch: Vec::new(),
            is_lost: false,
            is_finished: false,
        }
    }

    /// Whether reading goes on when writing has failed: not while the peer is ahead and its next frame is held.
    fn may_still_be_read(&self) -> bool {
        !matches!(self.incoming, Incoming::Held(_) | Incoming::Refused)
    }

    /// Takes note of `count` bytes received.
    fn advance(&mut self, count: usize) {
        match &mut self.incoming {
            Incoming::Header => self.header_filled += count,
            Incoming::Segment { bytes, filled, .. } => {
                let own = count.min(bytes.len() - *filled);
                *filled += own;
                self.header_filled = count - own;
            }
            Incoming::Control { filled, .. } => *filled += count,
            Incoming::Held(_) | Incoming::Refused => {}
        }
    }

    /// Acts on whatever is whole: applies a segment, then looks at the header that may have come along.
    fn settle(&mut self, peer: Rank, engine: &mut Engine, task: &Task, memory: &mut [u8]) {
        loop {
            match &mut self.incoming {
                Incoming::Segment { bytes, filled, .. } if *filled == bytes.len() => {
                    if !self.apply(peer, engine, task, memory) {
                        self.incoming = Incoming::Refused;
                        return;
                    }
                    self.incoming = Incoming::Header;
                }
                Incoming::Control { header, payload, filled } if *filled == payload.len() => {
                    if header.payload_crc.is_some_and(|crc| crc != crc32c::crc32c(payload)) {
                        engine.corrupt(peer, "a control frame's payload is corrupt".into());
                    } else {
                        engine.control(peer, header, payload);
                    }
                    self.incoming = Incoming::Header;
                }
                Incoming::Header if self.header_filled == HEADER_BYTES => {
                    self.header_filled = 0;
                    match Header::decode(&self.header) {
                        Ok(header) => {
                            self.incoming = Incoming::Held(header);
                            self.offer(peer, engine, task);
                        }
                        Err(error) => {
                            engine.corrupt(peer, error.to_string());
                            self.incoming = Incoming::Refused;
                        }
                    }
                }
                _ => return,
            }
        }
    }

    /// Asks the engine about the header that is held; whether that led anywhere.
    fn offer(&mut self, peer: Rank, engine: &mut Engine, task: &Task) -> bool {
        let Incoming::Held(header) = &self.incoming else { return false };
        let header = *header;
        self.incoming = match engine.frame(peer, &header) {
            Verdict::Hold => return false,
            Verdict::Refuse => Incoming::Refused,
            Verdict::Control => {
                let length = (header.payload_bytes as usize).min(CONTROL_BYTES_MAX);
                Incoming::Control { header, payload: vec![0; length], filled: 0 }
            }
            Verdict::Apply { range, action } => {
                let bytes = range.start * task.element_bytes..range.end * task.element_bytes;
                Incoming::Segment { header, bytes, action, filled: 0 }
            }
        };
        true
    }

    /// Applies a whole segment; whether it was sound.
    fn apply(&mut self, peer: Rank, engine: &mut Engine, task: &Task, memory: &mut [u8]) -> bool {
        let Incoming::Segment { header, bytes, action, .. } = &self.incoming else { return true };
        let arrived = match action {
            Action::Copy => &memory[bytes.clone()],
            Action::Reduce | Action::ReduceLast => &bytemuck::cast_slice(&self.scratch)[..bytes.len()],
        };
        if let Some(expected) = header.payload_crc {
            let found = crc32c::crc32c(arrived);
            if found != expected {
                let detail = format!(
                    "a segment of operation {} arrived corrupt (checksum {found:08x}, should be {expected:08x})",
                    header.sequence
                );
                engine.corrupt(peer, detail);
                return false;
            }
        }
        if let (Some(kernels), false) = (&task.kernels, *action == Action::Copy) {
            let kernel = if *action == Action::ReduceLast { &kernels.reduce_last } else { &kernels.reduce };
            let arrived = &bytemuck::cast_slice(&self.scratch)[..bytes.len()];
            kernel.apply(&mut memory[bytes.clone()], arrived, task.divisor);
        }
        engine.applied(peer);
        true
    }
}

impl Outgoing {
    fn new(transmit: Transmit, task: &Task, memory: &[u8]) -> Self {
        match transmit {
            Transmit::Control { header, payload } => {
                Self { header: header.encode(), payload: Payload::Control(payload), sent: 0 }
            }
            Transmit::Segment { mut header, range } => {
                let bytes = range.start * task.element_bytes..range.end * task.element_bytes;
                header.payload_crc = header.payload_crc.map(|_| crc32c::crc32c(&memory[bytes.clone()]));
                Self { header: header.encode(), payload: Payload::Segment(bytes), sent: 0 }
            }
        }
    }
}
