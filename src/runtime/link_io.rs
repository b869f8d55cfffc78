//! The state of one link: the frame that is partly sent and the frame that is partly received.

use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::ops::{Range, RangeInclusive};

use bytes::Bytes;

use super::gathering::Gathering;
use super::measurements::{LinkBytes, Meter, ProfilePart};
use super::memory::Memory;
use crate::engine::{Engine, FrameVerdict, OpId, OperationKey, Transmit};
use crate::reduce::{self, Kernels};
use crate::schedule::Action;
use crate::transport::local_links::LocalMessage;
use crate::types::{Rank, SortedMap};
use crate::wire::frame::HEADER_BYTES;
use crate::wire::{FrameHeader, FrameKind};

pub(crate) const FUNCTION_PANICKED: &str = "the program's reduction function panicked";

pub(crate) struct ActiveOperation {
    pub(crate) memory: Memory,
    pub(crate) element_bytes: usize,
    pub(crate) kernels: Option<Kernels>,
    /// The buffer, if the memory is a workspace.
    pub(crate) gathering: Option<Box<Gathering>>,
}

#[derive(Default)]
pub(crate) struct ActiveOperations {
    pub(crate) active: SortedMap<OpId, ActiveOperation>,
    /// The segments that have arrived too early, by operation and sender, in the order of their arrival.
    pub(crate) stored: BTreeMap<(OperationKey, Rank), VecDeque<(FrameHeader, AlignedBytes)>>,
    /// The bytes of the messages from this rank to itself that no receive has matched, by the operation that sends the message.
    pub(crate) messages_to_self: BTreeMap<OpId, Vec<u8>>,
    pub(crate) meter: Meter,
}

/// Memory for bytes that is aligned for every element type. The last bytes may be unused.
pub(crate) type AlignedBytes = Vec<u64>;

pub(crate) struct LinkIo {
    pub(crate) incoming: IncomingFrame,
    /// The header of the next incoming frame. The first `header_filled` bytes have arrived.
    pub(crate) header: [u8; HEADER_BYTES],
    pub(crate) header_filled: usize,
    pub(crate) outgoing: Option<OutgoingFrame>,
    /// The payload of a segment that will be reduced, or of which a part is thrown away. It is at most one segment long.
    pub(crate) scratch: AlignedBytes,
    /// Whether the link is closed, or could not be opened.
    pub(crate) is_lost: bool,
    pub(crate) is_closed_for_sending: bool,
    pub(crate) counters: LinkBytes,
}

/// The part of the incoming data that is being received. `filled` is the number of bytes of the payload that have arrived.
pub(crate) enum IncomingFrame {
    /// The header of the next frame.
    Header,
    Payload {
        length: usize,
        filled: usize,
        target: PayloadTarget,
    },
    /// A message that a thread receives without an operation (`link_driver/direct.rs`). Only this thread reads the link now.
    Direct {
        message: LocalMessage,
        filled: usize,
    },
    /// Nothing more is read from this link, because the peer broke the protocol.
    Refused,
}

pub(crate) enum PayloadTarget {
    /// The payload of a segment, which is applied as soon as it is complete.
    Segment { header: FrameHeader, operation: OpId, bytes: Range<usize>, action: Action },
    /// The payload of a segment that has to be stored under this key, or of a control frame, which has no key.
    Kept { header: FrameHeader, key: Option<OperationKey>, payload: AlignedBytes },
    /// The payload is thrown away.
    Discarded,
}

pub(crate) struct OutgoingFrame {
    pub(crate) header: [u8; HEADER_BYTES],
    pub(crate) payload: FramePayload,
    /// The number of bytes of header and payload that have been sent.
    pub(crate) sent: usize,
}

pub(crate) enum FramePayload {
    /// A segment: these bytes of the operation's buffer.
    Segment(OpId, Range<usize>),
    Control(Bytes),
}

impl ActiveOperations {
    /// Copies or reduces a segment that has arrived outside of the operation's buffer.
    fn apply(
        &mut self,
        operation: OpId,
        bytes: &Range<usize>,
        action: Action,
        arrived: &[u8],
        engine: &mut Engine,
    ) {
        let Some(ActiveOperation { memory, kernels, .. }) = self.active.get_mut(&operation) else { return };
        let Some(own) = memory.bytes_mut(bytes.clone()) else { return };
        let mut started = self.meter.start();
        let applied = reduce::catch_panic(|| match (action, kernels) {
            (Action::Reduce, Some(kernels)) => kernels.reduce.apply(own, arrived),
            (Action::ReduceLast, Some(kernels)) => kernels.reduce_last.apply(own, arrived),
            _ => own.copy_from_slice(arrived),
        });
        self.meter.end(ProfilePart::of(action), &mut started);
        if applied.is_none() {
            engine.abort(FUNCTION_PANICKED);
        }
    }

    /// Returns the sender and the header of the first frame that is stored for operations with these keys.
    pub(crate) fn first_stored(&self, keys: RangeInclusive<OperationKey>) -> Option<(Rank, FrameHeader)> {
        let (first, last) = keys.into_inner();
        let (&(_, peer), frames) =
            self.stored.range((first, Rank::ZERO)..=(last, Rank::new(u32::MAX))).next()?;
        Some((peer, frames.front()?.0))
    }

    pub(crate) fn apply_stored(&mut self, key: OperationKey, engine: &mut Engine) {
        let (lowest, highest) = ((key, Rank::ZERO), (key, Rank::new(u32::MAX)));
        while !self.stored.is_empty() {
            let applicable = self.stored.range_mut(lowest..=highest).find_map(|(&(_, peer), frames)| {
                match engine.check_stored_frame(peer, &frames.front()?.0) {
                    FrameVerdict::Apply { operation, range, action } => {
                        Some((peer, frames.pop_front()?, frames.is_empty(), (operation, range, action)))
                    }
                    _ => None,
                }
            });
            let Some((peer, (header, payload), was_last, (operation, range, action))) = applicable else {
                return;
            };
            if was_last {
                self.stored.remove(&(key, peer));
            }
            let Some(bytes) = self.prepare_buffer(engine, operation, &range) else { return };
            let payload = &bytemuck::cast_slice(&payload)[..header.payload_bytes as usize];
            self.apply(operation, &bytes, action, payload, engine);
            engine.handle_applied_segment(operation, peer, &header, true);
        }
    }

    /// Returns the byte range of a range of elements in the operation's buffer. Allocates the buffer if a receive has none. If
    /// there is not enough memory, fails the job and returns `None`.
    fn prepare_buffer(
        &mut self,
        engine: &mut Engine,
        operation: OpId,
        range: &Range<usize>,
    ) -> Option<Range<usize>> {
        let Some(ActiveOperation { memory, element_bytes, .. }) = self.active.get_mut(&operation) else {
            return Some(0..0);
        };
        let count = engine.envelope(operation).map(|envelope| envelope.contract.count as usize);
        if let Some(count) = count.filter(|&count| !memory.allocate_for_message(count, *element_bytes)) {
            engine.abort(&format!("there is not enough memory for a message of {count} elements"));
            return None;
        }
        Some(range.start * *element_bytes..range.end * *element_bytes)
    }

    pub(crate) fn copy_message_to_self(&mut self, operation: OpId, count: usize) {
        let Some(ActiveOperation { memory, element_bytes, .. }) = self.active.get(&operation) else { return };
        let bytes = memory.bytes(0..count * element_bytes).unwrap_or_default();
        self.messages_to_self.insert(operation, bytes.to_vec());
    }

    /// Copies the matched messages of this rank to itself into the buffers of the receives.
    pub(crate) fn deliver_messages_to_self(&mut self, engine: &mut Engine) {
        while let Some((send, receive)) = engine.take_self_delivery() {
            let Some(bytes) = self.messages_to_self.remove(&send) else { continue };
            let count = engine.envelope(receive).map_or(0, |envelope| envelope.contract.count as usize);
            let Some(range) = self.prepare_buffer(engine, receive, &(0..count)) else { return };
            self.apply(receive, &range, Action::Copy, &bytes, engine);
        }
    }
}

impl LinkIo {
    pub(crate) fn new(peer: Rank) -> Self {
        Self {
            incoming: IncomingFrame::Header,
            header: [0; HEADER_BYTES],
            header_filled: 0,
            outgoing: None,
            scratch: AlignedBytes::new(),
            is_lost: false,
            is_closed_for_sending: false,
            counters: LinkBytes { peer, bytes_sent: 0, bytes_received: 0 },
        }
    }

    pub(crate) fn handle_loss(&mut self, peer: Rank, detail: &str, engine: &mut Engine) {
        self.is_lost = true;
        let LinkBytes { bytes_sent, bytes_received, .. } = self.counters;
        engine.handle_lost_link(peer, detail, bytes_sent > 0 || bytes_received > 0);
    }

    /// Fails the job because bytes from the peer are corrupt. Then nothing more is read from the peer.
    pub(crate) fn refuse(&mut self, peer: Rank, detail: String, engine: &mut Engine) {
        engine.report_misbehavior(peer, detail);
        self.incoming = IncomingFrame::Refused;
    }

    /// Counts `count` received bytes, first for the payload and then for the next header.
    pub(crate) fn count_received(&mut self, count: usize) {
        match &mut self.incoming {
            IncomingFrame::Header => self.header_filled += count,
            IncomingFrame::Payload { length, filled, .. } => {
                let payload_count = count.min(*length - *filled);
                *filled += payload_count;
                self.header_filled = count - payload_count;
            }
            IncomingFrame::Direct { .. } | IncomingFrame::Refused => {}
        }
    }

    /// Handles the payload and the header that have been received completely. A payload and the next header may arrive together.
    pub(crate) fn handle_complete_frames(
        &mut self,
        peer: Rank,
        engine: &mut Engine,
        operations: &mut ActiveOperations,
    ) {
        loop {
            match &mut self.incoming {
                IncomingFrame::Payload { length, filled, .. } if filled == length => {
                    self.handle_complete_payload(peer, engine, operations);
                }
                IncomingFrame::Header if self.header_filled == HEADER_BYTES => {
                    self.header_filled = 0;
                    match FrameHeader::decode(&self.header) {
                        Ok(header) => self.incoming = Self::handle_header(peer, header, engine, operations),
                        Err(error) => self.refuse(peer, error.to_string(), engine),
                    }
                }
                _ => return,
            }
        }
    }

    /// Passes a header to the engine, and returns the state for receiving the payload.
    fn handle_header(
        peer: Rank,
        header: FrameHeader,
        engine: &mut Engine,
        operations: &mut ActiveOperations,
    ) -> IncomingFrame {
        let length = header.payload_bytes as usize;
        let keep = |key| {
            let payload = vec![0; length.div_ceil(size_of::<u64>())];
            PayloadTarget::Kept { header, key, payload }
        };
        let target = match engine.handle_header(peer, &header) {
            FrameVerdict::Refuse => return IncomingFrame::Refused,
            FrameVerdict::Discard => PayloadTarget::Discarded,
            FrameVerdict::Control => keep(None),
            FrameVerdict::Store(key) => keep(Some(key)),
            FrameVerdict::Apply { operation, range, action } => {
                match operations.prepare_buffer(engine, operation, &range) {
                    Some(bytes) => PayloadTarget::Segment { header, operation, bytes, action },
                    None => PayloadTarget::Discarded,
                }
            }
        };
        IncomingFrame::Payload { length, filled: 0, target }
    }

    /// Receives the rest of a message as a frame with this header. The first bytes of its payload have been received.
    pub(crate) fn receive_rest(
        &mut self,
        peer: Rank,
        header: FrameHeader,
        first_bytes: &[u8],
        engine: &mut Engine,
        operations: &mut ActiveOperations,
    ) {
        self.incoming = Self::handle_header(peer, header, engine, operations);
        let count = first_bytes.len();
        if let IncomingFrame::Payload { target, .. } = &mut self.incoming {
            let payload = match target {
                PayloadTarget::Kept { payload, .. } => Some(bytemuck::cast_slice_mut(payload)),
                PayloadTarget::Segment { operation, bytes, .. } => {
                    let active = operations.active.get_mut(operation);
                    active.and_then(|active| active.memory.bytes_mut(bytes.clone()))
                }
                PayloadTarget::Discarded => None,
            };
            if let Some(payload) = payload {
                payload[..count].copy_from_slice(first_bytes);
            }
        }
        self.count_received(count);
        self.handle_complete_frames(peer, engine, operations);
    }

    /// Applies or stores the complete segment, or passes on the control frame. Refuses a payload with a wrong checksum.
    fn handle_complete_payload(
        &mut self,
        peer: Rank,
        engine: &mut Engine,
        operations: &mut ActiveOperations,
    ) {
        let incoming = std::mem::replace(&mut self.incoming, IncomingFrame::Header);
        let IncomingFrame::Payload { length, target, .. } = incoming else { return };
        match target {
            PayloadTarget::Discarded => {}
            PayloadTarget::Segment { header, operation, bytes, action } => {
                let in_scratch = || &bytemuck::cast_slice(&self.scratch)[..length];
                let arrived = (action != Action::Copy).then(in_scratch);
                if header.payload_crc.is_some() {
                    let active = operations.active.get(&operation);
                    let in_buffer = active.and_then(|active| active.memory.bytes(bytes.clone()));
                    if let Err(detail) = check_payload_crc(&header, arrived.or(in_buffer).unwrap_or_default())
                    {
                        return self.refuse(peer, detail, engine);
                    }
                }
                if let Some(arrived) = arrived {
                    operations.apply(operation, &bytes, action, arrived, engine);
                }
                let key = engine.key_of(operation);
                engine.handle_applied_segment(operation, peer, &header, false);
                if let Some(key) = key {
                    operations.apply_stored(key, engine);
                }
            }
            PayloadTarget::Kept { header, key, payload } => {
                let bytes = &bytemuck::cast_slice(&payload)[..length];
                if let Err(detail) = check_payload_crc(&header, bytes) {
                    return self.refuse(peer, detail, engine);
                }
                let Some(key) = key else { return engine.handle_control_frame(peer, &header, bytes) };
                operations.stored.entry((key, peer)).or_default().push_back((header, payload));
                // The operation may have begun while the segment arrived.
                operations.apply_stored(key, engine);
            }
        }
    }
}

/// Checks the payload of a frame that has a checksum. Returns an error that describes a wrong payload.
fn check_payload_crc(header: &FrameHeader, payload: &[u8]) -> Result<(), String> {
    let Some(expected) = header.payload_crc else { return Ok(()) };
    let found = crate::wire::crc32c(payload);
    if found == expected {
        return Ok(());
    }
    let what = match header.kind {
        FrameKind::Data => format!("a segment of operation {}", header.sequence),
        _ => "a control frame".into(),
    };
    Err(format!("{what} arrived corrupt (checksum {found:08x}, should be {expected:08x})"))
}

impl OutgoingFrame {
    /// Returns the bytes of the header and of the payload that have not been sent.
    pub(crate) fn unsent<'a>(&'a self, payload: &'a [u8]) -> [IoSlice<'a>; 2] {
        let sent_header = self.sent.min(HEADER_BYTES);
        [IoSlice::new(&self.header[sent_header..]), IoSlice::new(&payload[self.sent - sent_header..])]
    }

    /// Returns a frame of which nothing has been sent. Computes the checksum of a segment's payload if the link uses checksums.
    pub(crate) fn new(transmit: Transmit, operations: &ActiveOperations) -> Self {
        let (header, payload) = match transmit {
            Transmit::Control { header, payload } => (header, FramePayload::Control(payload)),
            Transmit::Segment { operation, mut header, range } => {
                let active = operations.active.get(&operation);
                let element_bytes = active.map_or(0, |active| active.element_bytes);
                let bytes = range.start * element_bytes..range.end * element_bytes;
                if header.payload_crc.is_some() {
                    let payload = active.and_then(|active| active.memory.bytes(bytes.clone()));
                    header.payload_crc = Some(crate::wire::crc32c(payload.unwrap_or_default()));
                }
                (header, FramePayload::Segment(operation, bytes))
            }
        };
        Self { header: header.encode(), payload, sent: 0 }
    }
}
