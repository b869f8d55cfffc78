//! Sends and receives messages that go through a queue without a frame. A link can also receive these messages as frames.

use super::message::{LocalMessage, NextFrame};
use super::{LinkTransport, Receiving, SocketTransport};
use crate::shm::{NextEntry, SegmentMemory};
use crate::transport::TransferResult;
use crate::types::Rank;

impl<S: SocketTransport, M: SegmentMemory> LinkTransport<S, M> {
    /// Sends a whole message, but not in the middle of a frame. Returns false if it was not sent: there is no space or no queue.
    pub fn send_message(&mut self, peer: Rank, message: &LocalMessage, payload: &[u8]) -> bool {
        let Some((link, mut context)) = self.local_link(peer) else { return false };
        if !link.is_sending || link.full_at.is_some() || link.problem.is_some() {
            return false;
        }
        match link.sender.write_message(message.label(), payload, &mut link.receiver.owned) {
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

    /// If the next frame of the link to `peer` is a credit frame, receives it. If it is a message that `accepts` accepts, copies
    /// its first bytes, as many as are there, to `target`; [`LinkTransport::receive_rest`] then returns the others. `target` must
    /// be at least as long as the message. The caller has received all frames before. Looks at most `looks` times for each entry.
    pub fn receive_message(
        &mut self,
        peer: Rank,
        target: &mut [u8],
        looks: u32,
        accepts: impl FnOnce(&LocalMessage) -> bool,
    ) -> NextFrame {
        let Some((link, mut context)) = self.local_link(peer) else { return NextFrame::Other };
        if link.receiving != Receiving::Queue || link.problem.is_some() || link.header_left > 0 {
            return NextFrame::Other;
        }
        link.receiver.await_entry(looks);
        let entry = match link.receiver.peek() {
            Ok(NextEntry::Nothing) if link.socket_end.is_none() => return NextFrame::Nothing,
            Ok(NextEntry::Bytes) => return link.take_credit(&mut context),
            // An error is found again when the link is received as bytes.
            Ok(NextEntry::Nothing) | Err(_) => return NextFrame::Other,
            Ok(NextEntry::Message(entry)) => entry,
        };
        let Ok(message) = LocalMessage::from_entry(&entry) else { return NextFrame::Other };
        if !accepts(&message) {
            return NextFrame::Other;
        }
        let mut count = link.receiver.read_message(&entry, target);
        if count < message.bytes {
            match link.receiver.read_rest(&mut target[count..message.bytes], looks) {
                Ok(bytes) => count += bytes,
                Err(error) => link.problem = Some(error),
            }
        }
        link.report_freed_space(&mut context);
        NextFrame::Message(message, count)
    }

    /// Receives more bytes of a message that has been received in part. `target` is its rest. Looks at most `looks` times each.
    pub fn receive_rest(&mut self, peer: Rank, target: &mut [u8], looks: u32) -> TransferResult {
        let Some((link, mut context)) = self.local_link(peer) else { return Ok(0) };
        match link.problem.take().map_or_else(|| link.receiver.read_rest(target, looks), Err) {
            Ok(0) => Ok(0),
            Ok(count) => {
                link.report_freed_space(&mut context);
                Ok(count)
            }
            Err(error) => link.refuse(&context, error.to_string()),
        }
    }
}
