//! The state of the link to one peer: credit, queues, announcements and stored segments.

use std::collections::{BTreeMap, VecDeque};

use super::interface::{OperationKey, Timestamp};
use super::operation::credit_cost;
use super::send_queue::SendQueue;
use crate::types::{Contract, Site};
use crate::wire::{Cause, FrameHeader, FrameKind};

/// The most bytes of early data of all operations that a rank may have sent to one peer and that the peer has not consumed. Early
/// data are data that the peer may have to store, because the peer may not have begun their operation.
pub const CREDIT_BYTES: u64 = 1 << 20;
/// The most frames of early data that a rank may have sent to one peer and that the peer has not consumed.
pub const CREDIT_FRAMES_MAX: usize = CREDIT_BYTES as usize / credit_cost(0);
/// The most operations that a rank may have announced to one peer and that the peer has not begun. All ranks have the same value.
pub(super) const ANNOUNCED_MAX: usize = 1 << 20;
/// So many last call sites of messages to a peer are stored for errors. Messages in a row from the same line count once.
const SITES_MAX: usize = 256;

const _: () = assert!(credit_cost(super::operation::EAGER_BYTES) as u64 <= CREDIT_BYTES / 2);

#[derive(Default)]
pub(super) struct Link {
    /// Whether the peer has sent a goodbye.
    pub(super) has_left: bool,
    /// Whether the connection is closed or could not be opened.
    pub(super) is_lost: bool,
    pub(super) last_frame_at: Timestamp,
    pub(super) has_said_goodbye: bool,
    pub(super) cause_sent: Option<Cause>,
    pub(super) cause_received: Option<Cause>,
    pub(super) send_queue: SendQueue,
    /// The control frames without payload that wait to be sent. They are sent before any segment.
    pub(super) control_frames: VecDeque<FrameHeader>,
    /// The operations that the peer has announced and this rank has not begun, with the peer's contracts.
    pub(super) announced: BTreeMap<OperationKey, Contract>,
    /// For operations that this rank has not begun: the number of transfers for which the peer sent a ready frame.
    pub(super) ready_transfers: BTreeMap<OperationKey, u64>,
    /// The number of messages to the peer, which is also the number of the next message.
    pub(super) messages_sent: u64,
    pub(super) messages_received: u64,
    /// The lines of the caller's program that sent the last messages to the peer, oldest first. Of several messages in a row from
    /// the same line, only the first one is here, with its number.
    message_sites: VecDeque<(u64, Site)>,
    /// The credit in bytes that this rank has spent on this link since the start. This field and the four fields below include
    /// the overhead of each segment ([`credit_cost`]).
    credit_spent: u64,
    /// The part of `credit_spent` that the peer has returned.
    credit_returned: u64,
    /// The bytes that the peer sent on credit and that this rank has consumed since the start.
    bytes_consumed: u64,
    /// The value of `bytes_consumed` in the last credit frame to the peer.
    bytes_consumed_reported: u64,
    /// The bytes of the peer's early data that the driver stores now.
    stored_bytes: u64,
    /// For each operation: the number of the peer's segments that the driver stores now.
    pub(super) stored_segments: BTreeMap<OperationKey, usize>,
}

impl Link {
    pub(super) fn is_gone(&self) -> bool {
        self.has_left || self.is_lost
    }

    pub(super) fn credit(&self) -> usize {
        (CREDIT_BYTES - (self.credit_spent - self.credit_returned).min(CREDIT_BYTES)) as usize
    }

    pub(super) fn spend_credit(&mut self, bytes: usize) {
        self.credit_spent += credit_cost(bytes) as u64;
    }

    /// Returns the number of the next message to the peer, and stores its call site, if that has changed.
    pub(super) fn number_message(&mut self, site: Site) -> u64 {
        if !self.message_sites.back().is_some_and(|(_, last)| last.is_same_place(site)) {
            if self.message_sites.len() == SITES_MAX {
                self.message_sites.pop_front();
            }
            self.message_sites.push_back((self.messages_sent, site));
        }
        self.messages_sent += 1;
        self.messages_sent - 1
    }

    pub(super) fn site_of(&self, sequence: u64) -> Option<Site> {
        let later = self.message_sites.partition_point(|&(first, _)| first <= sequence);
        let (_, site) = self.message_sites.get(later.checked_sub(1)?)?;
        (sequence < self.messages_sent).then_some(*site)
    }

    /// Handles a credit frame: the peer has consumed `bytes_consumed` bytes since the start. Returns false if that is impossible.
    pub(super) fn accept_credit(&mut self, bytes_consumed: u64) -> bool {
        let is_possible = bytes_consumed <= self.credit_spent && bytes_consumed >= self.credit_returned;
        if is_possible {
            self.credit_returned = bytes_consumed;
            let credit = self.credit();
            self.send_queue.resume_with_credit(credit);
        }
        is_possible
    }

    /// Counts a segment of `bytes` bytes of early data that has to be stored. Returns whether the peer had enough credit.
    pub(super) fn count_early_segment(&mut self, key: OperationKey, bytes: usize) -> bool {
        self.stored_bytes += credit_cost(bytes) as u64;
        *self.stored_segments.entry(key).or_default() += 1;
        self.stored_bytes <= CREDIT_BYTES
    }

    /// Forgets a stored segment that has been applied. `was_eager` says whether the peer sent the segment on credit.
    pub(super) fn forget_stored_segment(&mut self, key: OperationKey, bytes: usize, was_eager: bool) {
        if was_eager {
            self.stored_bytes -= (credit_cost(bytes) as u64).min(self.stored_bytes);
        }
        if let Some(segments) = self.stored_segments.get_mut(&key) {
            *segments -= 1;
            if *segments == 0 {
                self.stored_segments.remove(&key);
            }
        }
    }

    pub(super) fn stored_segments(&self, key: OperationKey) -> usize {
        self.stored_segments.get(&key).copied().unwrap_or_default()
    }

    /// Counts a segment of `bytes` bytes that came on credit and has been applied. Adds a credit frame if the peer needs one now.
    pub(super) fn return_credit(&mut self, bytes: usize) {
        self.bytes_consumed += credit_cost(bytes) as u64;
        if self.bytes_consumed - self.bytes_consumed_reported < CREDIT_BYTES / 2 {
            return;
        }
        self.bytes_consumed_reported = self.bytes_consumed;
        let offset = self.bytes_consumed;
        self.control_frames.push_back(FrameHeader { kind: FrameKind::Credit, offset, ..FrameHeader::EMPTY });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_site_is_stored_once_for_messages_in_a_row() {
        let mut link = Link::default();
        let site = |line| Site::new("train.py", line);
        let lines: Vec<u32> = [1, 1, 2, 1].into_iter().chain(3..=SITES_MAX as u32).collect();
        for (number, &line) in (0..).zip(&lines) {
            assert_eq!((link.number_message(site(line)), link.site_of(number + 1)), (number, None));
        }
        // There was one line too many, so the first one is gone.
        for (number, &line) in (0..).zip(&lines) {
            assert_eq!(link.site_of(number), (number >= 2).then(|| site(line)));
        }
    }
}
