//! Operations whose progress is seen elsewhere: ranks that share memory do them there. The engine keeps their deadlines, knows
//! whom they wait for, and fails them with the job.

use super::operation::{OperationInfo, OperationKey};
use super::{Begin, Engine, Failure, OpId, Timestamp, begin};
use crate::types::{Contract, Rank, Site};
use crate::wire::{FrameHeader, FrameKind};

/// An operation of which only this is known.
pub(super) struct ExternalOperation {
    pub(super) call: OperationInfo,
    /// The ranks that have to do something before it can go on.
    pub(super) awaited: Vec<Rank>,
}

impl Engine {
    /// Takes note of an operation, the one of this number in its group.
    ///
    /// # Errors
    ///
    /// The failure, if the job has failed before.
    pub fn begin_external(&mut self, now: Timestamp, asked: Begin, sequence: u64) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.next_id();
        let call = begin::call(now, asked, OperationKey::Collective { group: asked.group, sequence });
        self.deadlines.insert((call.deadline, id));
        self.external.insert(id, ExternalOperation { call, awaited: Vec::new() });
        Ok(id)
    }

    /// Gives the next number of a group to an operation that consists of others, which have numbers elsewhere: a rank that
    /// has another operation of that number asks for something else.
    ///
    /// # Errors
    ///
    /// The failure, if a rank has already announced another operation of that number.
    pub fn number(&mut self, group: u32, asked: (Contract, Site)) -> Result<(OpId, OperationKey), Failure> {
        let sequence = self.history.begin(group, asked);
        let key = OperationKey::Collective { group, sequence };
        let mut links = self.links.iter_mut();
        let other = links.find_map(|(&peer, link)| Some((peer, link.announced.remove(&key)?)));
        if let Some(other) = other {
            let cause = self.mismatch((group, sequence), asked, other);
            return Err(self.fail(cause));
        }
        Ok((self.next_id(), key))
    }

    /// Takes note of an operation that is over, for a rank that comes to it later and asks for something else.
    pub fn remember(&mut self, group: u32, sequence: u64, asked: (Contract, Site)) {
        self.history.note(group, sequence, asked);
    }

    /// An operation that is watched waits for these ranks. One of them that has left ends the job.
    pub fn await_ranks(&mut self, id: OpId, ranks: Vec<Rank>) {
        let gone = |rank: &&Rank| self.links.get(rank).is_some_and(|link| link.left || link.lost);
        let gone = ranks.iter().find(gone).copied();
        if let Some(external) = self.external.get_mut(&id) {
            external.awaited = ranks;
            if let Some(rank) = gone {
                self.fail_left(rank);
            }
        }
    }

    /// An operation that was watched is over.
    pub fn end_external(&mut self, id: OpId) {
        if let Some(external) = self.external.remove(&id) {
            self.deadlines.remove(&(external.call.deadline, id));
        }
    }

    /// In an operation, whose group and number these are, a rank asks for something else; `None` if nobody can tell what.
    pub fn disagree(
        &mut self,
        place: (u32, u64),
        own: (Contract, Site),
        (peer, asked): (Rank, Option<Contract>),
    ) {
        let cause = match asked {
            Some(asked) if asked != own.0 => self.mismatch(place, own, (peer, asked)),
            _ => self.misbehaved(peer, format!("it is at another operation than number {}", place.1)),
        };
        self.fail(cause);
    }

    /// A rank has posted in shared memory what cannot be, and this is wrong with it.
    pub fn blame(&mut self, peer: Rank, what: &str) {
        let cause = self.misbehaved(peer, what.to_owned());
        self.fail(cause);
    }

    /// Wakes a peer that sleeps and has something to see in the memory that it shares with this rank.
    pub fn wake(&mut self, peer: Rank) {
        self.links
            .entry(peer)
            .or_default()
            .control
            .push_back(FrameHeader { kind: FrameKind::Wake, ..FrameHeader::EMPTY });
    }

    /// How often something has come that whoever sleeps at a board has to know of: it was woken, or a peer has left.
    pub fn alerts(&self) -> u64 {
        self.alerts
    }
}
