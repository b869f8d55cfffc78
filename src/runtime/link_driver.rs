//! Connects the engine to a transport: begins operations, sends frames, and copies or reduces the segments that arrive.
//!
//! [`LinkDriver::poll`] does all work that needs no waiting. It reads the clock only for a profile, so simulations can run it.

pub mod direct;
mod leaving;

use std::io::IoSliceMut;

use super::gathering::Gathering;
use super::link_io::{
    ActiveOperation, ActiveOperations, AlignedBytes, FramePayload, IncomingFrame, LinkIo, OutgoingFrame,
    PayloadTarget,
};
use super::measurements::{LinkBytes, ProfilePart};
use super::memory::Memory;
use crate::engine::{
    Engine, Envelope, Failure, OpId, OperationKey, OperationRequest, Pattern, Settings, Timestamp,
};
use crate::reduce::Kernels;
use crate::schedule::{Action, Schedule};
use crate::shm::SegmentMemory;
use crate::transport::local_links::LinkTransport;
use crate::transport::{SocketTransport, TransferError};
use crate::types::{Contract, Rank, RankMap, Site};
use crate::wire::frame::HEADER_BYTES;

/// The most times that one [`LinkDriver::poll`] sends and receives on every link. Then it returns to its caller.
const TRANSFER_ROUNDS_MAX: usize = 64;
const DISCARD_BYTES: usize = 16 << 10;
const NO_MEMORY: &str =
    "there is not enough memory for the buffers of all ranks: choose an algorithm that needs less memory";

/// An engine, its links, and the frames that are partly sent or received. `S`: the sockets; `M`: the memory of the queues.
pub struct LinkDriver<S, M> {
    pub(crate) engine: Engine,
    pub(crate) transport: LinkTransport<S, M>,
    links: RankMap<LinkIo>,
    /// The peers in `links`, in the order in which the links were opened.
    peers: Vec<Rank>,
    rank: Rank,
    pub(crate) operations: ActiveOperations,
    /// The number of threads that are in a probe for messages at the moment.
    pub(crate) probing_threads: usize,
}

impl<S: SocketTransport, M: SegmentMemory> LinkDriver<S, M> {
    pub fn new(settings: Settings, transport: LinkTransport<S, M>) -> Self {
        Self {
            rank: settings.rank,
            engine: Engine::new(settings),
            transport,
            links: RankMap::default(),
            peers: Vec::new(),
            operations: ActiveOperations::default(),
            probing_threads: 0,
        }
    }

    /// Returns the numbers of bytes that each link has carried. A link that was not opened has no entry.
    pub fn link_bytes(&self) -> impl Iterator<Item = LinkBytes> {
        self.links.iter().map(|(_, link)| link.counters)
    }

    pub fn connect(&mut self, now: Timestamp, peer: Rank) {
        // Messages of a rank to itself need no link.
        if peer != self.rank && !self.links.contains(peer) {
            self.transport.sockets.connect(now, peer);
            self.links.insert(peer, LinkIo::new(peer));
            self.peers.push(peer);
        }
    }

    /// Begins a collective, or a block of a hierarchical collective. See [`Engine::begin`].
    pub fn begin(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        sequence: u64,
        schedule: Schedule,
        (mut memory, kernels): (Memory, Option<Kernels>),
    ) -> Result<OpId, Failure> {
        for peer in schedule.peers() {
            self.connect(now, peer);
        }
        let mut gathering = None;
        if let Some(workspace) = schedule.workspace {
            let element_bytes = request.contract.dtype.size_bytes();
            let begun = Gathering::begin(workspace, memory, element_bytes);
            let Some((workspace, begun)) = begun else { return Err(self.engine.abort(NO_MEMORY)) };
            (memory, gathering) = (workspace, Some(Box::new(begun)));
        }
        let id = self.engine.begin(now, request, sequence, schedule)?;
        self.add_operation(id, request, (memory, kernels), gathering);
        Ok(id)
    }

    /// Begins to send a message to `to`. See [`Engine::send`].
    pub fn send_message(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        to: Rank,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        self.connect(now, to);
        let id = self.engine.send(now, request, to)?;
        self.add_operation(id, request, (memory, None), None);
        if to == self.rank {
            self.operations.copy_message_to_self(id, request.contract.count as usize);
            self.operations.deliver_messages_to_self(&mut self.engine);
        }
        Ok(id)
    }

    /// Begins to receive a message that fits the pattern. See [`Engine::receive`].
    pub fn receive_message(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        pattern: Pattern,
        memory: Memory,
    ) -> Result<OpId, Failure> {
        if let Some(source) = pattern.source {
            self.connect(now, source);
        }
        let id = self.engine.receive(now, request, pattern)?;
        self.add_operation(id, request, (memory, None), None);
        self.operations.deliver_messages_to_self(&mut self.engine);
        Ok(id)
    }

    /// Assigns the next number of a group to a collective of the program. See [`Engine::assign_number`]. Also fails if a rank has
    /// already sent a frame of a different operation with this number.
    pub fn assign_number(&mut self, group: u32, contract_and_site: (Contract, Site)) -> Result<u64, Failure> {
        let sequence = self.engine.assign_number(group, contract_and_site)?;
        // The engine checks the frames that arrive from now on. A frame that arrived earlier is stored, and is checked here.
        let keys = OperationKey::of_other_kind(group, sequence, &contract_and_site.0);
        if let Some((peer, header)) = self.operations.first_stored(keys) {
            self.engine.handle_late_frame(peer, &header);
        }
        self.engine.failure().map_or(Ok(sequence), |failure| Err(failure.clone()))
    }

    /// Adds an operation that the engine has begun, and applies its stored frames.
    fn add_operation(
        &mut self,
        id: OpId,
        request: OperationRequest,
        (memory, kernels): (Memory, Option<Kernels>),
        gathering: Option<Box<Gathering>>,
    ) {
        let element_bytes = request.contract.dtype.size_bytes();
        let active = ActiveOperation { memory, element_bytes, kernels, gathering };
        self.operations.active.insert(id, active);
        if let Some(key) = self.engine.key_of(id) {
            self.operations.apply_stored(key, &mut self.engine);
        }
    }

    /// Sends and receives on all links, at most [`TRANSFER_ROUNDS_MAX`] times. Returns whether more can be done now.
    pub fn poll(&mut self, now: Timestamp) -> bool {
        self.engine.advance(now);
        self.add_incoming_links();
        let (mut moved, mut rounds) = (true, 0);
        while moved && rounds < TRANSFER_ROUNDS_MAX && self.engine.failure().is_none() && self.has_work() {
            moved = false;
            for index in 0..self.peers.len() {
                let peer = self.peers[index];
                moved |= self.receive(peer);
                moved |= self.send(peer);
            }
            rounds += 1;
        }
        self.send_control_frames();
        self.engine.handle_timeout(now);
        moved && self.has_work()
    }

    pub fn send_control_frames(&mut self) {
        for index in 0..self.peers.len() {
            let peer = self.peers[index];
            while self.engine.has_control_frames(peer) && self.send(peer) {}
        }
    }

    fn has_work(&self) -> bool {
        self.probing_threads > 0 || !self.engine.is_idle()
    }

    fn add_incoming_links(&mut self) {
        while let Some(peer) = self.transport.sockets.take_incoming_link() {
            if !self.links.contains(peer) {
                self.links.insert(peer, LinkIo::new(peer));
                self.peers.push(peer);
            }
        }
    }

    /// Removes the operation that succeeded first. Returns its buffer, and its envelope if it is a receive.
    pub fn take_completed(&mut self) -> Option<(OpId, Memory, Option<Envelope>)> {
        let (operation, envelope) = self.engine.take_completed()?;
        let memory = match self.operations.active.remove(&operation) {
            Some(ActiveOperation { memory, kernels: Some(kernels), gathering: Some(gathering), .. }) => {
                let finish = || gathering.finish(&memory, &kernels);
                self.operations.meter.time(ProfilePart::Reduce, finish)
            }
            Some(active) => active.memory,
            None => Memory::none(),
        };
        Some((operation, memory, envelope))
    }

    /// See [`Engine::cancel`].
    pub fn cancel(&mut self, operation: OpId) -> bool {
        if !self.engine.cancel(operation) {
            return false;
        }
        self.operations.active.remove(&operation);
        true
    }

    /// Sends bytes to `peer` with one call of the transport. Returns whether anything has changed.
    fn send(&mut self, peer: Rank) -> bool {
        let Self { engine, transport, links, operations, .. } = self;
        let Some(link) = links.get_mut(peer).filter(|link| !link.is_lost && !link.is_closed_for_sending)
        else {
            return false;
        };
        if link.outgoing.is_none() {
            link.outgoing = engine.poll_transmit(peer).map(|frame| OutgoingFrame::new(frame, operations));
        }
        let Some(outgoing) = &mut link.outgoing else { return false };
        let payload = match &outgoing.payload {
            FramePayload::Segment(operation, range) => {
                operations.active.get(operation).and_then(|active| active.memory.bytes(range.clone()))
            }
            FramePayload::Control(bytes) => Some(&bytes[..]),
        };
        // After a failure the buffer is released. A segment that is partly sent cannot be completed, so close our side.
        let Some(payload) = payload else {
            link.outgoing = None;
            link.is_closed_for_sending = true;
            transport.close_sending(peer);
            return false;
        };
        let mut started = operations.meter.start();
        let moved = transport.send(peer, &outgoing.unsent(payload));
        let bytes = moved.as_ref().ok().copied().filter(|&bytes| bytes > 0);
        operations.meter.end_transfer(ProfilePart::Send, &mut started, peer, bytes);
        match moved {
            Ok(0) => return false,
            Ok(count) => {
                link.counters.bytes_sent += count as u64;
                outgoing.sent += count;
                if outgoing.sent == HEADER_BYTES + payload.len() {
                    if let FramePayload::Segment(operation, _) = outgoing.payload {
                        let key = engine.key_of(operation);
                        engine.handle_sent_segment(operation, peer);
                        // A stored segment may have waited until the elements that it overwrites had been sent.
                        if let Some(key) = key {
                            operations.apply_stored(key, engine);
                        }
                    }
                    link.outgoing = None;
                }
            }
            Err(TransferError::Lost(detail) | TransferError::Corrupt(detail)) => {
                // The peer may have sent the root cause before the link was lost. So continue to read.
                link.outgoing = None;
                link.is_closed_for_sending = true;
                if matches!(link.incoming, IncomingFrame::Refused) {
                    link.handle_loss(peer, &detail, engine);
                }
            }
        }
        true
    }

    /// Receives bytes from `peer` with one call of the transport. Returns whether anything has changed.
    fn receive(&mut self, peer: Rank) -> bool {
        let Self { engine, transport, links, operations, .. } = self;
        let Some(link) = links.get_mut(peer).filter(|link| !link.is_lost) else { return false };
        let LinkIo { incoming, header, header_filled, scratch, .. } = link;
        let mut started = operations.meter.start();
        // The call that reads a payload also reads the next header. That saves a system call for each segment.
        let mut buffer_bytes = 0;
        let (target, next_header) = match incoming {
            IncomingFrame::Direct { .. } | IncomingFrame::Refused => return false,
            IncomingFrame::Header => (&mut header[*header_filled..], None),
            IncomingFrame::Payload { length, filled, target } => match target {
                PayloadTarget::Discarded => {
                    (first_bytes(scratch, (*length - *filled).min(DISCARD_BYTES)), None)
                }
                PayloadTarget::Kept { payload, .. } => {
                    (&mut first_bytes(payload, *length)[*filled..], Some(header))
                }
                PayloadTarget::Segment { operation, bytes, action, .. } => {
                    let payload = if *action == Action::Copy {
                        let active = operations.active.get_mut(operation);
                        buffer_bytes = active.as_ref().map_or(0, |active| active.memory.length());
                        active.and_then(|active| active.memory.bytes_mut(bytes.clone())).unwrap_or_default()
                    } else {
                        first_bytes(scratch, *length)
                    };
                    (&mut payload[*filled..], Some(header))
                }
            },
        };
        let moved = match next_header {
            Some(header) => {
                let parts = &mut [IoSliceMut::new(target), IoSliceMut::new(header)];
                transport.receive(peer, parts, buffer_bytes)
            }
            None => transport.receive(peer, &mut [IoSliceMut::new(target)], 0),
        };
        let bytes = moved.as_ref().ok().copied().filter(|&bytes| bytes > 0);
        operations.meter.end_transfer(ProfilePart::Receive, &mut started, peer, bytes);
        match moved {
            Ok(0) => return false,
            Ok(count) => {
                link.counters.bytes_received += count as u64;
                link.count_received(count);
                link.handle_complete_frames(peer, engine, operations);
            }
            Err(TransferError::Lost(detail)) => link.handle_loss(peer, &detail, engine),
            Err(TransferError::Corrupt(detail)) => link.refuse(peer, detail, engine),
        }
        true
    }
}

/// Returns the first `length` bytes of the memory, which grows if it is too short. New bytes are 0.
fn first_bytes(memory: &mut AlignedBytes, length: usize) -> &mut [u8] {
    if size_of_val(&memory[..]) < length {
        memory.resize(length.div_ceil(size_of::<u64>()), 0);
    }
    &mut bytemuck::cast_slice_mut(memory)[..length]
}
