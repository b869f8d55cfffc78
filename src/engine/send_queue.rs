//! Who sends next on a link.
//!
//! Operations take turns, segment by segment, so that none waits for the end of another. The one exception is where the
//! protocol needs an order: messages are numbered on their link, and the first frame of each leaves after that of the one
//! before it. Only the first of those of which nothing has left takes part in the turns; a run of short ones has one turn
//! for each segment's worth of bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::OpId;
use super::operation::OperationKey;
use crate::wire::frame::HEADER_BYTES;

/// The operations that have something to send to one peer. Each is in one of `ready`, `waiting`, `starved`, `held` and
/// `in_flight`, or further back in `unopened`.
#[derive(Default)]
pub(super) struct SendQueue {
    /// Those that may be able to send, the next one first.
    ready: VecDeque<OpId>,
    /// Those that can send nothing before something of theirs has been applied: nobody asks them until then, however many
    /// there are.
    waiting: BTreeSet<OpId>,
    /// Messages of which nothing has left, in their order.
    unopened: VecDeque<OpId>,
    /// Bytes of messages that were opened one after another.
    opened_bytes: usize,
    /// Those that can do nothing without so much credit, or the peer's word that it is ready.
    starved: BTreeMap<OpId, usize>,
    /// Those that can do nothing before the peer is ready.
    held: BTreeSet<OpId>,
    /// What has been announced and not been answered yet. The peer knows no more of it than is here.
    announcing: BTreeSet<OperationKey>,
    /// Those that would be announced if there were room; they are among the starved or the held.
    unannounced: BTreeSet<OpId>,
    /// The one whose segment has been given out.
    in_flight: Option<OpId>,
}

impl SendQueue {
    /// A collective begins to send.
    pub(super) fn enter(&mut self, id: OpId) {
        self.ready.push_back(id);
    }

    /// A message begins to be sent, after all those before it.
    pub(super) fn enter_message(&mut self, id: OpId) {
        self.unopened.push_back(id);
        if self.unopened.len() == 1 {
            self.ready.push_back(id);
        }
    }

    /// How many are to be asked before nothing more can be sent.
    pub(super) fn len(&self) -> usize {
        self.ready.len()
    }

    /// The operation whose turn it is; it is put somewhere else by one of the following.
    pub(super) fn take(&mut self) -> Option<OpId> {
        self.ready.pop_front()
    }

    /// It has had its turn, and may have more to send.
    pub(super) fn pass(&mut self, id: OpId) {
        self.ready.push_back(id);
    }

    /// It has nothing to send before something else of it has been applied.
    pub(super) fn wait(&mut self, id: OpId) {
        self.waiting.insert(id);
    }

    /// Something of it has been applied.
    pub(super) fn resume(&mut self, id: OpId) {
        if self.waiting.remove(&id) {
            self.ready.push_back(id);
        }
    }

    /// It can do nothing before the peer is ready, or with `charge` bytes of credit.
    pub(super) fn park(&mut self, id: OpId, charge: Option<usize>) {
        match charge {
            Some(charge) => {
                self.starved.insert(id, charge);
            }
            None => {
                self.held.insert(id);
            }
        }
    }

    /// It is to be announced; whether it may be now, of at most `limit` at a time.
    pub(super) fn announce(&mut self, id: OpId, key: OperationKey, limit: usize) -> bool {
        let may = self.announcing.len() < limit;
        if may {
            self.announcing.insert(key);
        } else {
            self.unannounced.insert(id);
        }
        may
    }

    /// A frame of it leaves, with so many bytes of payload. The next message may follow the first frame of one.
    pub(super) fn leaves(&mut self, id: OpId, payload_bytes: usize, segment_bytes: usize) {
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

    /// Its segment has been given out.
    pub(super) fn mark_in_flight(&mut self, id: OpId) {
        self.in_flight = Some(id);
    }

    /// The segment that was given out has been sent; whose it was.
    pub(super) fn take_in_flight(&mut self) -> Option<OpId> {
        self.in_flight.take()
    }

    /// The peer is ready for more of the operation, if it is still under way here.
    pub(super) fn unpark(&mut self, key: OperationKey, id: Option<OpId>) {
        if self.announcing.remove(&key)
            && let Some(first) = self.unannounced.first().copied()
        {
            self.revive(first);
        }
        if let Some(id) = id {
            self.revive(id);
        }
    }

    /// There are `credit` bytes of credit.
    pub(super) fn feed(&mut self, mut credit: usize) {
        while let Some((&id, &charge)) = self.starved.first_key_value()
            && charge <= credit
        {
            credit -= charge;
            self.revive(id);
        }
    }

    fn revive(&mut self, id: OpId) {
        self.unannounced.remove(&id);
        if self.starved.remove(&id).is_some() | self.held.remove(&id) {
            self.ready.push_back(id);
        }
    }
}
