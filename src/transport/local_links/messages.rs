//! Sends and receives messages that are entries of a queue. A link also receives such an entry as the bytes of a frame.

use std::io::IoSliceMut;

use super::message::{LocalMessage, NextFrame};
use super::{LinkTransport, Receiving, SocketTransport};
use crate::shm::{NextEntry, QueueMessage, SegmentMemory};
use crate::types::Rank;

impl<S: SocketTransport, M: SegmentMemory> LinkTransport<S, M> {
    /// Sends a whole message. Returns false if it was not sent: there is no space, the message is too long, or the link has no
    /// queue. The caller must not be in the middle of a frame.
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

    /// Receives the message that [`LinkTransport::next_frame`] has returned. Returns false if the peer has changed its entry.
    pub fn receive_message(&mut self, peer: Rank, message: &LocalMessage, target: &mut [u8]) -> bool {
        let Some((link, mut context)) = self.local_link(peer) else { return false };
        let entry = QueueMessage { label: message.label(), bytes: message.bytes };
        let received =
            link.receiver.begin_message(&entry).and_then(|()| match target.get_mut(..message.bytes) {
                Some([]) | None => Ok(()),
                Some(target) => link.receiver.read(&mut [IoSliceMut::new(target)], 0).map(|_| ()),
            });
        match received {
            Ok(()) => {
                link.report_freed_space(&mut context);
                true
            }
            Err(error) => {
                link.problem = Some(error);
                false
            }
        }
    }
}
