//! Messages between ranks of a host that need no operation: the link driver moves them between the caller's buffer and a queue.

use super::LinkDriver;
use crate::engine::{Envelope, OperationRequest, Pattern, SendMode, Timestamp};
use crate::runtime::link_io::IncomingFrame;
use crate::runtime::measurements::ProfilePart;
use crate::shm::SegmentMemory;
use crate::transport::local_links::{LocalMessage, NextFrame};
use crate::transport::{SocketTransport, TransferError};
use crate::types::Rank;
use crate::wire::frame::HEADER_BYTES;
use crate::wire::{FrameHeader, FrameKind};

/// How often a rank looks for a message, or for its next bytes, before it releases the lock of the core: about half a
/// microsecond. A thread that has the lock when the message arrives receives it sooner, and the sender writes a message without a
/// pause, unless its processor does something else.
pub const LOOKS: u32 = 200;

/// The result of [`LinkDriver::receive_directly`].
pub enum DirectReceive {
    /// The message is in the buffer.
    Received(Envelope),
    /// No message has arrived from the source.
    NotYet,
    /// A part of the message is in the buffer. Pass the same buffer again, or call [`LinkDriver::interrupt_receive`].
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

    /// Receives a message into the start of `target`, if it is the next thing that arrives from `source` and fits the pattern. If
    /// nothing has arrived, looks again for `looks` times. If the caller `has_begun`, receives more of the message of which a
    /// part is already in `target`. `now` is the time, if the caller knows it.
    pub fn receive_directly(
        &mut self,
        request: &OperationRequest,
        (pattern, source): (Pattern, Rank),
        (target, looks, has_begun): (&mut [u8], u32, bool),
        now: Option<Timestamp>,
    ) -> DirectReceive {
        let Self { engine, transport, links, operations, .. } = self;
        let Some(link) = links.get_mut(source) else { return DirectReceive::NeedsOperation };
        let mut started = operations.meter.start();
        let (message, filled) = match link.incoming {
            IncomingFrame::Header if link.header_filled == 0 && !has_begun => {
                let Some(sequence) = engine.next_direct_receive(source) else {
                    return DirectReceive::NeedsOperation;
                };
                let room = target.len();
                let fits = |message: &LocalMessage| {
                    message.group == pattern.group
                        && pattern.tag.is_none_or(|tag| tag == message.tag)
                        && message.dtype == request.contract.dtype
                        && message.bytes <= room
                        && message.sequence == sequence
                };
                match transport.receive_message(source, target, looks, fits) {
                    NextFrame::Nothing => return DirectReceive::NotYet,
                    NextFrame::Credit(offset) => {
                        let header = FrameHeader { kind: FrameKind::Credit, offset, ..FrameHeader::EMPTY };
                        link.counters.bytes_received += HEADER_BYTES as u64;
                        link.receive_rest(source, header, &[], engine, operations);
                        let is_refused = matches!(link.incoming, IncomingFrame::Refused);
                        return if is_refused {
                            DirectReceive::NeedsOperation
                        } else {
                            DirectReceive::NotYet
                        };
                    }
                    NextFrame::Other => return DirectReceive::NeedsOperation,
                    NextFrame::Message(message, filled) => (message, filled),
                }
            }
            IncomingFrame::Direct { message, filled } if has_begun => {
                match transport.receive_rest(source, &mut target[filled..message.bytes], LOOKS) {
                    Ok(count) => (message, filled + count),
                    Err(TransferError::Lost(why) | TransferError::Corrupt(why)) => {
                        link.refuse(source, why, engine);
                        return DirectReceive::NeedsOperation;
                    }
                }
            }
            _ => return DirectReceive::NeedsOperation,
        };
        operations.meter.end(ProfilePart::Receive, &mut started);
        if filled < message.bytes {
            link.incoming = IncomingFrame::Direct { message, filled };
            return DirectReceive::Begun;
        }
        if has_begun {
            link.incoming = IncomingFrame::Header;
        }
        let LocalMessage { group, tag, bytes, .. } = message;
        link.counters.bytes_received += (HEADER_BYTES + bytes) as u64;
        if engine.record_direct_receive(source, bytes, now) {
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
