//! The order in which operations send on a link.
//!
//! Operations take turns, segment by segment, so that no operation waits for the end of another operation. Messages are numbered
//! on their link, and their first frames leave in the order of these numbers. So among the messages that have sent no frame, only
//! the one with the lowest number takes turns. If this message is short, the next messages are sent in the same turn, until the
//! messages together fill a segment.

use std::collections::VecDeque;

use super::interface::{OpId, OperationKey};
use crate::types::{SortedMap, SortedSet};
use crate::wire::frame::HEADER_BYTES;

/// The operations that have data to send to one peer. Each operation is in exactly one of `runnable`, `waiting_for_data`,
/// `waiting_for_credit` and `waiting_for_ready`, is a message in `unopened` but not the first one there, or has a segment that
/// the driver is sending.
#[derive(Default)]
pub(super) struct SendQueue {
    /// The operations that take turns, because they may be able to send. The first one has the next turn.
    pub(super) runnable: VecDeque<OpId>,
    /// The operations that can send only after they have received and applied a further segment.
    pub(super) waiting_for_data: SortedSet<OpId>,
    /// The messages that have sent no frame, in the order of their numbers.
    pub(super) unopened: VecDeque<OpId>,
    turn_bytes: usize,
    /// The operations that wait for credit or for a ready frame, with the credit in bytes that each of them needs.
    waiting_for_credit: SortedMap<OpId, usize>,
    /// The operations that wait for a ready frame, because they may not send on credit.
    waiting_for_ready: SortedSet<OpId>,
    /// The operations that were announced and that no ready frame has answered: all of this rank that the peer stores.
    announced: SortedSet<OperationKey>,
    /// The operations in `waiting_for_credit` or `waiting_for_ready` whose announcement waits because `announced` is full.
    unannounced: SortedSet<OpId>,
}

impl SendQueue {
    pub(super) fn add_message(&mut self, id: OpId) {
        self.unopened.push_back(id);
        if self.unopened.len() == 1 {
            self.runnable.push_back(id);
        }
    }

    pub(super) fn resume_after_data(&mut self, id: OpId) {
        if self.waiting_for_data.remove(&id) {
            self.runnable.push_back(id);
        }
    }

    /// Suspends an operation until a ready frame arrives or, with `credit_needed`, there are so many bytes of credit.
    pub(super) fn suspend(&mut self, id: OpId, credit_needed: Option<usize>) {
        match credit_needed {
            Some(credit_needed) => {
                self.waiting_for_credit.insert(id, credit_needed);
            }
            None => {
                self.waiting_for_ready.insert(id);
            }
        }
    }

    /// Returns whether an operation may be announced now, and records its announcement. If `announced_max` announcements are
    /// unanswered, the operation is announced after a ready frame has answered one.
    pub(super) fn try_announce(&mut self, id: OpId, key: OperationKey, announced_max: usize) -> bool {
        let may_announce = self.announced.len() < announced_max;
        if may_announce {
            self.announced.insert(key);
        } else {
            self.unannounced.insert(id);
        }
        may_announce
    }

    /// Records that a frame of an operation is sent. After the first frame of a message, the next message takes turns.
    pub(super) fn record_frame(&mut self, id: OpId, payload_bytes: usize, segment_bytes: usize) {
        if self.unopened.front() != Some(&id) {
            return;
        }
        self.unopened.pop_front();
        self.turn_bytes += payload_bytes + HEADER_BYTES;
        let Some(&next) = self.unopened.front() else { return };
        if self.turn_bytes < segment_bytes {
            self.runnable.push_front(next);
        } else {
            self.turn_bytes = 0;
            self.runnable.push_back(next);
        }
    }

    /// Handles a ready frame for an operation. `id` is `None` if the operation is not active on this rank.
    pub(super) fn handle_ready(&mut self, key: OperationKey, id: Option<OpId>) {
        if self.announced.remove(&key)
            && let Some(unannounced) = self.unannounced.first().copied()
        {
            self.resume_suspended(unannounced);
        }
        if let Some(id) = id {
            self.resume_suspended(id);
        }
    }

    /// Resumes the oldest operations that waited for credit, as many as `credit` bytes suffice for.
    pub(super) fn resume_with_credit(&mut self, mut credit: usize) {
        while let Some((&id, &credit_needed)) = self.waiting_for_credit.first()
            && credit_needed <= credit
        {
            credit -= credit_needed;
            self.resume_suspended(id);
        }
    }

    /// Resumes an operation that waited for credit or for a ready frame.
    fn resume_suspended(&mut self, id: OpId) {
        self.unannounced.remove(&id);
        if self.waiting_for_credit.remove(&id).is_some() | self.waiting_for_ready.remove(&id) {
            self.runnable.push_back(id);
        }
    }
}
