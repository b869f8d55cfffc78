//! The order in which operations send on a link.
//!
//! Operations take turns, segment by segment, so that no operation waits for the end of another operation. Messages also have
//! to keep an order: they are numbered on their link, and the first frames of the messages leave in the order of the numbers.
//! So of the messages that have sent nothing, only the first one takes turns. Several short messages share one turn, until
//! their bytes fill a segment.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::OpId;
use super::operation::OperationKey;
use crate::wire::frame::HEADER_BYTES;

/// The operations that have data to send to one peer. Each operation is in exactly one of `ready`, `waiting_for_data`,
/// `waiting_for_credit`, `waiting_for_ready` and `in_flight`, or is a message in `unopened` behind the first one.
#[derive(Default)]
pub(super) struct SendQueue {
    /// The operations that may be able to send. The first one has the next turn.
    ready: VecDeque<OpId>,
    /// The operations that can send only after a segment of theirs has been received and applied. They take no turns.
    waiting_for_data: BTreeSet<OpId>,
    /// The messages that have sent no frame, in the order of their numbers.
    unopened: VecDeque<OpId>,
    /// The bytes of short messages that were sent in the current turn.
    opened_bytes: usize,
    /// The operations that wait for credit or for a ready frame, with the number of credit bytes that they need.
    waiting_for_credit: BTreeMap<OpId, usize>,
    /// The operations that wait for a ready frame.
    waiting_for_ready: BTreeSet<OpId>,
    /// The operations that were announced and that no ready frame has answered. The peer stores no other
    /// announcements.
    announced: BTreeSet<OperationKey>,
    /// The operations whose announcement waits because `announced` has reached its limit. They are also in
    /// `waiting_for_credit` or `waiting_for_ready`.
    unannounced: BTreeSet<OpId>,
    /// The operation whose segment the driver is sending.
    in_flight: Option<OpId>,
}

impl SendQueue {
    /// Adds a collective.
    pub(super) fn add_collective(&mut self, id: OpId) {
        self.ready.push_back(id);
    }

    /// Adds a message behind all earlier messages.
    pub(super) fn add_message(&mut self, id: OpId) {
        self.unopened.push_back(id);
        if self.unopened.len() == 1 {
            self.ready.push_back(id);
        }
    }

    /// Returns the number of operations that may be able to send.
    pub(super) fn len(&self) -> usize {
        self.ready.len()
    }

    /// Removes and returns the operation that has the next turn. The caller then passes the operation to one of the following
    /// methods, or drops it if it has nothing more to send.
    pub(super) fn take_next(&mut self) -> Option<OpId> {
        self.ready.pop_front()
    }

    /// Puts an operation that may have more to send behind all others.
    pub(super) fn requeue(&mut self, id: OpId) {
        self.ready.push_back(id);
    }

    /// Suspends an operation until [`SendQueue::resume`].
    pub(super) fn wait_for_data(&mut self, id: OpId) {
        self.waiting_for_data.insert(id);
    }

    /// Resumes an operation that waited for data, because a segment of it has been applied.
    pub(super) fn resume(&mut self, id: OpId) {
        if self.waiting_for_data.remove(&id) {
            self.ready.push_back(id);
        }
    }

    /// Suspends an operation until a ready frame arrives, or until there are `charge` bytes of credit if `charge` is given.
    pub(super) fn suspend(&mut self, id: OpId, charge: Option<usize>) {
        match charge {
            Some(charge) => {
                self.waiting_for_credit.insert(id, charge);
            }
            None => {
                self.waiting_for_ready.insert(id);
            }
        }
    }

    /// Returns whether an operation may be announced now. At most `limit` announcements may be unanswered. At the limit, the
    /// operation is announced after the next ready frame.
    pub(super) fn try_announce(&mut self, id: OpId, key: OperationKey, limit: usize) -> bool {
        let may_announce = self.announced.len() < limit;
        if may_announce {
            self.announced.insert(key);
        } else {
            self.unannounced.insert(id);
        }
        may_announce
    }

    /// Records that a frame of an operation is sent. After the first frame of a message, the next message may send.
    pub(super) fn record_frame(&mut self, id: OpId, payload_bytes: usize, segment_bytes: usize) {
        if self.unopened.front() != Some(&id) {
            return;
        }
        self.unopened.pop_front();
        self.opened_bytes += payload_bytes + HEADER_BYTES;
        let Some(&next) = self.unopened.front() else { return };
        if self.opened_bytes < segment_bytes {
            self.ready.push_front(next);
        } else {
            self.opened_bytes = 0;
            self.ready.push_back(next);
        }
    }

    /// Records that the driver is sending a segment of the operation.
    pub(super) fn mark_in_flight(&mut self, id: OpId) {
        self.in_flight = Some(id);
    }

    /// Returns the operation whose segment the driver was sending, because the segment has been sent.
    pub(super) fn take_in_flight(&mut self) -> Option<OpId> {
        self.in_flight.take()
    }

    /// Handles a ready frame for an operation. `id` is `None` if the operation is complete on this rank.
    pub(super) fn handle_ready(&mut self, key: OperationKey, id: Option<OpId>) {
        if self.announced.remove(&key)
            && let Some(first) = self.unannounced.first().copied()
        {
            self.resume_suspended(first);
        }
        if let Some(id) = id {
            self.resume_suspended(id);
        }
    }

    /// Resumes operations that waited for credit, as far as `credit` bytes suffice.
    pub(super) fn resume_with_credit(&mut self, mut credit: usize) {
        while let Some((&id, &charge)) = self.waiting_for_credit.first_key_value()
            && charge <= credit
        {
            credit -= charge;
            self.resume_suspended(id);
        }
    }

    /// Resumes an operation that waited for credit or for a ready frame.
    fn resume_suspended(&mut self, id: OpId) {
        self.unannounced.remove(&id);
        if self.waiting_for_credit.remove(&id).is_some() | self.waiting_for_ready.remove(&id) {
            self.ready.push_back(id);
        }
    }
}
