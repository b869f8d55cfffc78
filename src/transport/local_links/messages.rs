//! Sends and receives messages that go through a queue without a frame. A link can also receive these messages as frames.

use std::io::IoSliceMut;

use super::message::{LocalMessage, NextFrame};
use super::{LinkTransport, Receiving, SocketTransport};
use crate::shm::{NextEntry, QueueMessage, SegmentMemory};
use crate::transport::TransferResult;
use crate::types::Rank;

impl<S: SocketTransport, M: SegmentMemory> LinkTransport<S, M> {
    /// Sends a whole message. Returns false if it was not sent: there is no space, or the link has no queue. The caller must not
    /// be in the middle of a frame.
    pub fn send_message(&mut self, peer: Rank, message: &LocalMessage, payload: &[u8]) -> bool {
        let Some((link, mut context)) = self.local_link(peer) else { return false };
        if !link.is_sending || link.full_at.is_some() || link.problem.is_some() {
            return false;
        }
        match link.sender.write_message(message.label(), payload) {
            Ok(true) => {
                link.wake_receiver(&mut context);
                true
            }
            Ok(false) => false,
            Err(error) => {
                link.problem = Some(error);
                false
            }
        }
    }

    /// Returns what this rank receives next from `peer`. The caller must have received all frames before.
    pub fn next_frame(&mut self, peer: Rank) -> NextFrame {
        let Some((link, _)) = self.local_link(peer) else { return NextFrame::Other };
        if link.receiving != Receiving::Queue || link.problem.is_some() || link.header_left > 0 {
            return NextFrame::Other;
        }
        match link.receiver.peek() {
            Ok(NextEntry::Nothing) if link.socket_end.is_none() => NextFrame::Nothing,
            // An error is found again when the link is received as bytes.
            Ok(NextEntry::Nothing | NextEntry::Bytes) | Err(_) => NextFrame::Other,
            Ok(NextEntry::Message(entry)) => {
                LocalMessage::from_entry(&entry).map_or(NextFrame::Other, NextFrame::Message)
            }
        }
    }

    /// Receives the message that [`LinkTransport::next_frame`] has returned, as far as its first entry contains it, and returns
    /// the number of bytes. [`LinkTransport::receive_from_queue`] then returns the other bytes. Returns `None` if the peer has
    /// changed the entry.
    pub fn receive_message(
        &mut self,
        peer: Rank,
        message: &LocalMessage,
        target: &mut [u8],
    ) -> Option<usize> {
        let (link, mut context) = self.local_link(peer)?;
        let entry = QueueMessage { label: message.label(), bytes: message.bytes };
        let received =
            link.receiver.begin_message(&entry).and_then(|()| match target.get_mut(..message.bytes) {
                Some([]) | None => Ok(0),
                Some(target) => link.receiver.read(&mut [IoSliceMut::new(target)], 0).map(|read| read.bytes),
            });
        match received {
            Ok(count) => {
                link.report_freed_space(&mut context);
                Some(count)
            }
            Err(error) => {
                link.problem = Some(error);
                None
            }
        }
    }

    /// Receives bytes from the queue, as many as are there, and does not read the socket.
    pub fn receive_from_queue(&mut self, peer: Rank, target: &mut [u8]) -> TransferResult {
        let Some((link, mut context)) = self.local_link(peer) else { return TransferResult::Blocked };
        match link.receive_from_queue(&mut context, &mut [IoSliceMut::new(target)]) {
            Ok(0) => TransferResult::Blocked,
            Ok(count) => TransferResult::Bytes(count),
            Err(why) => link.refuse(&context, why),
        }
    }
}
