//! What is under way on one link: a frame half sent, a frame half received.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use bytes::Bytes;

use super::memory::Memory;
use super::profile::{Meter, ProfilePart};
use crate::engine::{Engine, FrameVerdict, OpId, OperationKey, Transmit};
use crate::reduce::Kernels;
use crate::schedule::Action;
use crate::types::Rank;
use crate::wire::FrameHeader;
use crate::wire::frame::HEADER_BYTES;

thread_local! {
    /// Whether this thread reduces, perhaps by a function of the program's own.
    static REDUCING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread reduces, perhaps by a function of the program's own.
pub(super) fn is_reducing() -> bool {
    REDUCING.get()
}

/// Reduces. A function of the program's own may panic, in whatever thread happens to do it.
pub(super) fn reducing<R>(reduce: impl FnOnce() -> R) -> thread::Result<R> {
    REDUCING.set(true);
    let result = catch_unwind(AssertUnwindSafe(reduce));
    REDUCING.set(false);
    result
}

/// Bytes moved since the start, headers included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ByteCounters {
    /// Sent.
    pub bytes_sent: u64,
    /// Received.
    pub bytes_received: u64,
}

/// How an operation treats bytes.
pub(super) struct ActiveOperation {
    pub(super) memory: Memory,
    pub(super) element_bytes: usize,
    pub(super) kernels: Option<Kernels>,
    pub(super) divisor: u32,
}

/// The operations under way, and the segments that came before their time, in the order of their links.
#[derive(Default)]
pub(super) struct ActiveOperations {
    pub(super) under_way: BTreeMap<OpId, ActiveOperation>,
    pub(super) stored: BTreeMap<(OperationKey, Rank), VecDeque<StoredFrame>>,
    /// Messages of this rank to itself that no receive has taken.
    own: BTreeMap<OpId, Vec<u8>>,
    pub(super) meter: Meter,
}

/// Bytes in words, so that every element type is aligned.
#[derive(Default)]
pub(super) struct Words {
    words: Vec<u64>,
    length: usize,
}

/// A segment that came before its time.
pub(super) struct StoredFrame {
    pub(super) header: FrameHeader,
    payload: Words,
}

/// What is under way on one link.
pub(super) struct LinkIo {
    pub(super) incoming: IncomingFrame,
    pub(super) header: [u8; HEADER_BYTES],
    pub(super) header_filled: usize,
    pub(super) outgoing: Option<OutgoingFrame>,
    /// Where a segment waits to be reduced: at most one segment long.
    pub(super) scratch: Words,
    /// Something has passed.
    pub(super) has_opened: bool,
    pub(super) is_lost: bool,
    pub(super) is_finished: bool,
}

pub(super) enum IncomingFrame {
    Header,
    Segment {
        header: FrameHeader,
        operation: OpId,
        bytes: Range<usize>,
        action: Action,
        filled: usize,
    },
    Stored {
        header: FrameHeader,
        key: OperationKey,
        payload: Words,
        filled: usize,
    },
    Control {
        header: FrameHeader,
        payload: Vec<u8>,
        filled: usize,
    },
    /// So many bytes are of no interest.
    Waste {
        left: usize,
    },
    /// Nothing more is read.
    Refused,
}

pub(super) struct OutgoingFrame {
    pub(super) header: [u8; HEADER_BYTES],
    pub(super) payload: FramePayload,
    pub(super) sent: usize,
}

pub(super) enum FramePayload {
    Segment(OpId, Range<usize>),
    Control(Bytes),
}

impl Words {
    fn new(length: usize) -> Self {
        Self { words: vec![0; length.div_ceil(size_of::<u64>())], length }
    }

    /// At least `length` bytes; what they hold is left over.
    pub(super) fn resize(&mut self, length: usize) {
        let words = length.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.length = length;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.length]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.length]
    }
}

impl ActiveOperations {
    /// Gives up all memory. Returns how elements were reduced.
    pub(super) fn release(&mut self) -> Vec<Kernels> {
        self.stored.clear();
        self.own.clear();
        let under_way = std::mem::take(&mut self.under_way);
        under_way.into_values().filter_map(|task| task.kernels).collect()
    }

    /// Applies a segment to its operation's memory. `arrived` is `None` if it has been received in place.
    fn apply(
        &mut self,
        operation: OpId,
        bytes: &Range<usize>,
        action: Action,
        arrived: Option<&[u8]>,
        engine: &mut Engine,
    ) {
        let Some(task) = self.under_way.get_mut(&operation) else { return };
        let (Some(arrived), Some(own)) = (arrived, task.memory.bytes_mut(bytes.clone())) else { return };
        let (kernels, divisor) = (&task.kernels, task.divisor);
        let mut started = self.meter.start();
        let applied = reducing(|| match (action, kernels) {
            (Action::Reduce, Some(kernels)) => kernels.reduce.apply(own, arrived, divisor),
            (Action::ReduceLast, Some(kernels)) => kernels.reduce_last.apply(own, arrived, divisor),
            _ => own.copy_from_slice(arrived),
        });
        self.meter.end(ProfilePart::of(action), &mut started);
        if applied.is_err() {
            engine.abort("the program's own reduction panicked there");
        }
    }

    /// The sender and header of the first frame that is stored for an operation.
    pub(super) fn first_stored(&self, key: OperationKey) -> Option<(Rank, FrameHeader)> {
        let (&(_, peer), frames) =
            self.stored.range((key, Rank::ZERO)..=(key, Rank::new(u32::MAX))).next()?;
        Some((peer, frames.front()?.header))
    }

    /// Applies what is stored for an operation, as far as its time has come.
    pub(super) fn replay(&mut self, key: OperationKey, engine: &mut Engine) {
        let (first, last) = ((key, Rank::ZERO), (key, Rank::new(u32::MAX)));
        while !self.stored.is_empty() {
            let ready = self.stored.range(first..=last).find_map(|(&place, frames)| {
                match engine.stored_frame(place.1, &frames.front()?.header) {
                    FrameVerdict::Apply { operation, range, action } => {
                        Some((place, operation, range, action))
                    }
                    _ => None,
                }
            });
            let Some((place, operation, range, action)) = ready else { return };
            let Some(frames) = self.stored.get_mut(&place) else { return };
            let Some(StoredFrame { header, payload }) = frames.pop_front() else { return };
            if frames.is_empty() {
                self.stored.remove(&place);
            }
            let Some(bytes) = self.prepare(engine, operation, &range) else { return };
            self.apply(operation, &bytes, action, Some(payload.bytes()), engine);
            engine.applied(operation, place.1, &header, true);
        }
    }

    /// The bytes of elements, in memory that now exists; `None`, and the job fails, if there is not so much.
    fn prepare(
        &mut self,
        engine: &mut Engine,
        operation: OpId,
        range: &Range<usize>,
    ) -> Option<Range<usize>> {
        let Some(task) = self.under_way.get_mut(&operation) else { return Some(0..0) };
        let count = engine.envelope(operation).map(|envelope| envelope.contract.count as usize);
        if let Some(count) = count.filter(|&count| !task.memory.prepare(count)) {
            engine.abort(&format!("there is no memory for a message of {count} elements"));
            return None;
        }
        Some(range.start * task.element_bytes..range.end * task.element_bytes)
    }

    /// Keeps what an operation of this rank sends to itself.
    pub(super) fn keep(&mut self, operation: OpId, count: usize) {
        let Some(task) = self.under_way.get(&operation) else { return };
        let bytes = task.memory.bytes(0..count * task.element_bytes).unwrap_or_default();
        self.own.insert(operation, bytes.to_vec());
    }

    /// Puts this rank's messages to itself into the buffers of the receives that have found them.
    pub(super) fn deliver_to_itself(&mut self, engine: &mut Engine) {
        while let Some((message, receive)) = engine.take_self_delivery() {
            let Some(bytes) = self.own.remove(&message) else { continue };
            let count = engine.envelope(receive).map_or(0, |envelope| envelope.contract.count as usize);
            let Some(range) = self.prepare(engine, receive, &(0..count)) else { return };
            self.apply(receive, &range, Action::Copy, Some(&bytes), engine);
        }
    }
}

impl LinkIo {
    pub(super) fn new() -> Self {
        Self {
            incoming: IncomingFrame::Header,
            header: [0; HEADER_BYTES],
            header_filled: 0,
            outgoing: None,
            scratch: Words::default(),
            has_opened: false,
            is_lost: false,
            is_finished: false,
        }
    }

    /// The link is gone, or has never been there.
    pub(super) fn lose(&mut self, peer: Rank, detail: &str, engine: &mut Engine) {
        self.is_lost = true;
        if self.has_opened {
            engine.link_lost(peer, detail);
        } else {
            engine.link_not_opened(peer, detail);
        }
    }

    /// What comes is wrong, and nothing more of it is looked at.
    pub(super) fn refuse(&mut self, peer: Rank, detail: String, engine: &mut Engine) {
        engine.report_corrupt_bytes(peer, detail);
        self.incoming = IncomingFrame::Refused;
    }

    /// Whether reading goes on when writing has failed.
    pub(super) fn may_still_be_read(&self) -> bool {
        !matches!(self.incoming, IncomingFrame::Refused)
    }

    /// Takes note of `count` bytes received.
    pub(super) fn advance(&mut self, count: usize) {
        let (filled, length) = match &mut self.incoming {
            IncomingFrame::Header => {
                self.header_filled += count;
                return;
            }
            IncomingFrame::Segment { bytes, filled, .. } => (filled, bytes.len()),
            IncomingFrame::Stored { payload, filled, .. } => (filled, payload.length),
            IncomingFrame::Control { filled, payload, .. } => (filled, payload.len()),
            IncomingFrame::Waste { left } => {
                *left -= count;
                return;
            }
            IncomingFrame::Refused => return,
        };
        let own = count.min(length - *filled);
        *filled += own;
        self.header_filled = count - own;
    }

    /// Acts on whatever is whole: applies a segment, then looks at the header that may have come along.
    pub(super) fn settle(&mut self, peer: Rank, engine: &mut Engine, tasks: &mut ActiveOperations) {
        loop {
            match &mut self.incoming {
                IncomingFrame::Segment { bytes, filled, .. } if *filled == bytes.len() => {
                    self.finish_segment(peer, engine, tasks);
                }
                IncomingFrame::Stored { payload, filled, .. } if *filled == payload.length => {
                    self.finish_stored(peer, engine, tasks);
                }
                IncomingFrame::Control { header, payload, filled } if *filled == payload.len() => {
                    if header.payload_crc.is_some_and(|crc| crc != crate::wire::crc32c(payload)) {
                        engine.report_corrupt_bytes(peer, "a control frame's payload is corrupt".into());
                    } else {
                        engine.control(peer, header, payload);
                    }
                    self.incoming = IncomingFrame::Header;
                }
                IncomingFrame::Waste { left: 0 } => self.incoming = IncomingFrame::Header,
                IncomingFrame::Header if self.header_filled == HEADER_BYTES => {
                    self.header_filled = 0;
                    match FrameHeader::decode(&self.header) {
                        Ok(header) => self.incoming = self.judge(peer, header, engine, tasks),
                        Err(error) => {
                            engine.report_corrupt_bytes(peer, error.to_string());
                            self.incoming = IncomingFrame::Refused;
                        }
                    }
                }
                _ => return,
            }
        }
    }

    fn judge(
        &mut self,
        peer: Rank,
        header: FrameHeader,
        engine: &mut Engine,
        tasks: &mut ActiveOperations,
    ) -> IncomingFrame {
        let length = header.payload_bytes as usize;
        match engine.frame(peer, &header) {
            FrameVerdict::Handled => IncomingFrame::Header,
            FrameVerdict::Discard => IncomingFrame::Waste { left: length },
            FrameVerdict::Refuse => IncomingFrame::Refused,
            FrameVerdict::Control => IncomingFrame::Control { header, payload: vec![0; length], filled: 0 },
            FrameVerdict::Store(key) => {
                IncomingFrame::Stored { header, key, payload: Words::new(length), filled: 0 }
            }
            FrameVerdict::Apply { operation, range, action } => {
                let Some(bytes) = tasks.prepare(engine, operation, &range) else {
                    return IncomingFrame::Waste { left: length };
                };
                if action != Action::Copy {
                    self.scratch.resize(bytes.len());
                }
                IncomingFrame::Segment { header, operation, bytes, action, filled: 0 }
            }
        }
    }

    /// Applies a whole segment, if it is sound.
    fn finish_segment(&mut self, peer: Rank, engine: &mut Engine, tasks: &mut ActiveOperations) {
        let incoming = std::mem::replace(&mut self.incoming, IncomingFrame::Header);
        let IncomingFrame::Segment { header, operation, bytes, action, .. } = incoming else { return };
        let in_place = action == Action::Copy;
        if header.payload_crc.is_some() {
            let memory = tasks.under_way.get(&operation).map(|task| &task.memory);
            let copied = memory.and_then(|memory| memory.bytes(bytes.clone()));
            let arrived = if in_place { copied.unwrap_or_default() } else { self.scratch.bytes() };
            if !is_sound(peer, &header, arrived, engine) {
                self.incoming = IncomingFrame::Refused;
                return;
            }
        }
        let arrived = (!in_place).then(|| self.scratch.bytes());
        tasks.apply(operation, &bytes, action, arrived, engine);
        let key = engine.key_of(operation);
        engine.applied(operation, peer, &header, false);
        if let Some(key) = key {
            tasks.replay(key, engine);
        }
    }

    fn finish_stored(&mut self, peer: Rank, engine: &mut Engine, tasks: &mut ActiveOperations) {
        let incoming = std::mem::replace(&mut self.incoming, IncomingFrame::Header);
        let IncomingFrame::Stored { header, key, payload, .. } = incoming else { return };
        if !is_sound(peer, &header, payload.bytes(), engine) {
            self.incoming = IncomingFrame::Refused;
            return;
        }
        tasks.stored.entry((key, peer)).or_default().push_back(StoredFrame { header, payload });
        // Its operation may have begun while it came.
        tasks.replay(key, engine);
    }
}

/// Whether a payload's checksum, if it has one, fits it; otherwise the job fails.
fn is_sound(peer: Rank, header: &FrameHeader, payload: &[u8], engine: &mut Engine) -> bool {
    let Some(expected) = header.payload_crc else { return true };
    let found = crate::wire::crc32c(payload);
    if found != expected {
        let sequence = header.sequence;
        let detail = format!(
            "a segment of operation {sequence} arrived corrupt (checksum {found:08x}, should be {expected:08x})"
        );
        engine.report_corrupt_bytes(peer, detail);
    }
    found == expected
}

impl OutgoingFrame {
    /// What has not been sent: of the header, which may be nothing, and of the payload.
    pub(super) fn rest<'a>(&'a self, payload: &'a [u8]) -> [IoSlice<'a>; 2] {
        let of_header = self.sent.min(HEADER_BYTES);
        [IoSlice::new(&self.header[of_header..]), IoSlice::new(&payload[self.sent - of_header..])]
    }

    pub(super) fn new(transmit: Transmit, tasks: &ActiveOperations) -> Self {
        match transmit {
            Transmit::Control { header, payload } => {
                Self { header: header.encode(), payload: FramePayload::Control(payload), sent: 0 }
            }
            Transmit::Segment { operation, mut header, range } => {
                let task = tasks.under_way.get(&operation);
                let size = task.map_or(0, |task| task.element_bytes);
                let bytes = range.start * size..range.end * size;
                if header.payload_crc.is_some() {
                    let payload = task.and_then(|task| task.memory.bytes(bytes.clone()));
                    header.payload_crc = Some(crate::wire::crc32c(payload.unwrap_or_default()));
                }
                Self { header: header.encode(), payload: FramePayload::Segment(operation, bytes), sent: 0 }
            }
        }
    }
}
