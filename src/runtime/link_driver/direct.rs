//! Messages between ranks of a host that need no operation: the link driver moves them between the caller's buffer and a queue.

use super::LinkDriver;
use crate::engine::{Envelope, OperationRequest, Pattern, SendMode, Timestamp};
use crate::runtime::link_io::IncomingFrame;
use crate::runtime::measurements::ProfilePart;
use crate::shm::SegmentMemory;
use crate::transport::local_links::{LocalMessage, NextFrame};
use crate::transport::{SocketTransport, TransferResult};
use crate::types::Rank;
use crate::wire::frame::HEADER_BYTES;

/// How often a rank looks for a message, or for its next bytes, before it releases the lock of the core: about half a
/// microsecond. A thread that has the lock when the message arrives receives it sooner, and the sender writes a message without a
/// pause, unless its processor does something else.
pub const LOOKS: u32 = 200;

/// The result of [`LinkDriver::try_receive_directly`] and [`LinkDriver::continue_receive`].
pub enum DirectReceive {
    /// The message is in the buffer.
    Received(Envelope),
    /// Nothing has arrived from the source.
    NotYet,
    /// A part of the message is in the buffer. The caller must pass the same buffer to [`LinkDriver::continue_receive`], or call
    /// [`LinkDriver::interrupt_receive`].
    Begun,
    /// Only an operation can receive the message.
    NeedsOperation,
}

impl<S: SocketTransport, M: SegmentMemory> LinkDriver<S, M> {
    /// Sends a message without an operation. Returns false if it was not sent, and needs an operation.
    pub fn try_send_directly(&mut self, request: &OperationRequest, to: Rank, payload: &[u8]) -> bool {
        let Self { engine, transport, links, operations, .. } = self;
        let is_between_frames =
            |link: &&mut super::LinkIo| link.outgoing.is_none() && !link.is_closed_for_sending;
        if request.mode != SendMode::Standard {
            return false;
        }
        let Some(link) = links.get_mut(to).filter(is_between_frames) else { return false };
        let Some(sequence) = engine.next_direct_send(to, payload.len()) else { return false };
        let message = LocalMessage {
            group: request.group,
            tag: request.contract.layout,
            sequence,
            dtype: request.contract.dtype,
            bytes: payload.len(),
        };
        let mut started = operations.meter.start();
        let is_sent = transport.send_message(to, &message, payload);
        let sent_bytes = is_sent.then_some(payload.len());
        operations.meter.end_transfer(ProfilePart::Send, &mut started, to, sent_bytes);
        if is_sent {
            link.counters.bytes_sent += (HEADER_BYTES + payload.len()) as u64;
            engine.record_direct_send(to, payload.len(), request.site);
        }
        is_sent
    }

    /// Receives a message into the start of `target`, if it is the next thing that arrives from `source` and fits the pattern.
    /// If nothing has arrived, looks again for `looks` times. `now` is the time, if the caller knows it.
    pub fn try_receive_directly(
        &mut self,
        request: &OperationRequest,
        (pattern, source): (Pattern, Rank),
        (target, looks): (&mut [u8], u32),
        now: Option<Timestamp>,
    ) -> DirectReceive {
        let Self { engine, transport, links, operations, .. } = self;
        let is_between_frames =
            |link: &super::LinkIo| matches!(link.incoming, IncomingFrame::Header) && link.header_filled == 0;
        let Some(sequence) = engine.next_direct_receive(source) else { return DirectReceive::NeedsOperation };
        if !links.get(source).is_some_and(is_between_frames) {
            return DirectReceive::NeedsOperation;
        }
        let room = target.len();
        let fits = |message: &LocalMessage| {
            message.group == pattern.group
                && pattern.tag.is_none_or(|tag| tag == message.tag)
                && message.dtype == request.contract.dtype
                && message.bytes <= room
                && message.sequence == sequence
        };
        let mut started = operations.meter.start();
        let (message, filled) = match transport.receive_message(source, target, looks, fits) {
            NextFrame::Nothing => return DirectReceive::NotYet,
            NextFrame::Other => return DirectReceive::NeedsOperation,
            NextFrame::Message(message, filled) => (message, filled),
        };
        operations.meter.end(ProfilePart::Receive, &mut started);
        if filled == message.bytes {
            return self.record_received(source, &message, now);
        }
        if let Some(link) = links.get_mut(source) {
            link.incoming = IncomingFrame::Direct { message, filled };
        }
        DirectReceive::Begun
    }

    /// Receives more of the message of which a part is already in `target`.
    pub fn continue_receive(
        &mut self,
        source: Rank,
        target: &mut [u8],
        now: Option<Timestamp>,
    ) -> DirectReceive {
        let Self { engine, transport, links, operations, .. } = self;
        let Some(link) = links.get_mut(source) else { return DirectReceive::NeedsOperation };
        let IncomingFrame::Direct { message, filled } = &mut link.incoming else {
            return DirectReceive::NeedsOperation;
        };
        let message = *message;
        let mut started = operations.meter.start();
        let received = transport.receive_rest(source, &mut target[*filled..message.bytes], LOOKS);
        operations.meter.end(ProfilePart::Receive, &mut started);
        match received {
            TransferResult::Bytes(count) => *filled += count,
            TransferResult::Blocked => {}
            TransferResult::Lost(why) | TransferResult::Corrupt(why) => {
                link.refuse(source, why, engine);
                return DirectReceive::NeedsOperation;
            }
        }
        if *filled < message.bytes {
            return DirectReceive::Begun;
        }
        link.incoming = IncomingFrame::Header;
        self.record_received(source, &message, now)
    }

    /// Records that a whole message has been received without an operation.
    #[inline]
    fn record_received(
        &mut self,
        source: Rank,
        message: &LocalMessage,
        now: Option<Timestamp>,
    ) -> DirectReceive {
        let LocalMessage { group, tag, bytes, .. } = *message;
        if let Some(link) = self.links.get_mut(source) {
            link.counters.bytes_received += (HEADER_BYTES + bytes) as u64;
        }
        if self.engine.record_direct_receive(source, bytes, now) {
            self.send_control_frames();
        }
        DirectReceive::Received(Envelope { group, source, tag, contract: message.contract() })
    }

    /// Passes a message of which a part is already in `target` on to the link driver, so that an operation can receive it.
    pub fn interrupt_receive(&mut self, source: Rank, target: &[u8]) {
        let Self { engine, links, operations, .. } = self;
        let Some(link) = links.get_mut(source) else { return };
        if let IncomingFrame::Direct { message, filled } = link.incoming {
            link.counters.bytes_received += (HEADER_BYTES + filled) as u64;
            link.receive_rest(source, message.header(), &target[..filled], engine, operations);
        }
    }
}
