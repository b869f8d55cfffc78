//! External operations: operations in shared memory, which the engine does not execute. The engine keeps their deadlines and
//! the ranks for which they wait, and fails them if the job fails.

use super::operation::{OperationInfo, OperationKey};
use super::{Engine, Failure, OpId, OperationRequest, Timestamp, begin};
use crate::types::{Contract, Rank, Site};
use crate::wire::{FrameHeader, FrameKind};

/// The part of an external operation that the engine knows.
pub(super) struct ExternalOperation {
    pub(super) info: OperationInfo,
    /// The ranks for which the operation waits.
    pub(super) awaited: Vec<Rank>,
}

impl Engine {
    /// Begins an external operation. `sequence` is the number of the operation in its group.
    ///
    /// # Errors
    ///
    /// The failure, if the job has already failed.
    pub fn begin_external(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        sequence: u64,
    ) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.next_id();
        let info =
            begin::operation_info(now, request, OperationKey::Collective { group: request.group, sequence });
        self.deadlines.insert((info.deadline, id));
        self.external.insert(id, ExternalOperation { info, awaited: Vec::new() });
        Ok(id)
    }

    /// Assigns the next number of a group to an operation that consists of several internal operations. The engine then
    /// detects a rank that calls a different operation under this number.
    ///
    /// # Errors
    ///
    /// The failure, if a rank has already announced a different operation with this number.
    pub fn assign_number(
        &mut self,
        group: u32,
        caller_contract: (Contract, Site),
    ) -> Result<(OpId, OperationKey), Failure> {
        let sequence = self.history.record_next(group, caller_contract);
        let key = OperationKey::Collective { group, sequence };
        let mut links = self.links.iter_mut();
        let mismatch = links.find_map(|(&peer, link)| Some((peer, link.announced.remove(&key)?)));
        if let Some(mismatch) = mismatch {
            let cause = self.mismatch((group, sequence), caller_contract, mismatch);
            return Err(self.fail(cause));
        }
        Ok((self.next_id(), key))
    }

    /// Stores the contract of an external operation, so that the engine can detect a rank that calls a different operation
    /// later.
    pub fn record_external(&mut self, group: u32, sequence: u64, caller_contract: (Contract, Site)) {
        self.history.record_numbered(group, sequence, caller_contract);
    }

    /// Sets the ranks for which an external operation waits. Fails the job if one of them has left.
    pub fn await_ranks(&mut self, id: OpId, ranks: Vec<Rank>) {
        let has_gone = |rank: &&Rank| self.links.get(rank).is_some_and(|link| link.left || link.lost);
        let gone_rank = ranks.iter().find(has_gone).copied();
        if let Some(external) = self.external.get_mut(&id) {
            external.awaited = ranks;
            if let Some(rank) = gone_rank {
                self.fail_because_peer_left(rank);
            }
        }
    }

    /// Ends an external operation.
    pub fn end_external(&mut self, id: OpId) {
        if let Some(external) = self.external.remove(&id) {
            self.deadlines.remove(&(external.info.deadline, id));
        }
    }

    /// Fails the job because `peer` called a different operation. `place` is the group and the number of the operation.
    /// `caller_contract` is the peer's contract, or `None` if it is unknown.
    pub fn report_mismatch(
        &mut self,
        place: (u32, u64),
        own: (Contract, Site),
        (peer, contract): (Rank, Option<Contract>),
    ) {
        let cause = match contract {
            Some(contract) if contract != own.0 => self.mismatch(place, own, (peer, contract)),
            _ => self.misbehaved(peer, format!("it called a different operation than number {}", place.1)),
        };
        self.fail(cause);
    }

    /// Fails the job because `peer` wrote invalid values to shared memory. `what` describes the error.
    pub fn report_misbehavior(&mut self, peer: Rank, what: &str) {
        let cause = self.misbehaved(peer, what.to_owned());
        self.fail(cause);
    }

    /// Sends a wake frame to a peer that sleeps although the shared memory has changed.
    pub fn wake(&mut self, peer: Rank) {
        self.links
            .entry(peer)
            .or_default()
            .control
            .push_back(FrameHeader { kind: FrameKind::Wake, ..FrameHeader::EMPTY });
    }

    /// Returns the number of events for which a thread that sleeps in shared memory must wake up: wake frames and goodbyes.
    pub fn wake_events(&self) -> u64 {
        self.wake_events
    }
}
