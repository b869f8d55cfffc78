//! External operations: operations that the engine does not execute. They are the operations in shared memory, and the
//! synchronous sends of this rank to itself. The engine keeps their deadlines and the ranks for which they wait.

use super::link::Link;
use super::operation::ExternalOperation;
use super::{Engine, Failure, OpId, OperationKey, OperationRequest, Timestamp};
use crate::types::{Contract, Rank, Site};
use crate::wire::{FrameHeader, FrameKind};

impl Engine {
    /// Begins an operation in shared memory, which has the number `sequence` in its group. Fails if the job has already failed.
    pub fn begin_external(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        sequence: u64,
    ) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.new_id();
        let key = OperationKey::Collective { group: request.group, sequence };
        let info = request.begun(now);
        self.deadlines.insert((info.deadline(), id));
        self.external.insert(id, ExternalOperation { key, info, awaited: Vec::new() });
        Ok(id)
    }

    /// Stores the contract of an operation in shared memory, for the error about a late rank that calls another operation.
    pub fn record_external(&mut self, group: u32, sequence: u64, contract_and_site: (Contract, Site)) {
        let (group, call) = OperationKey::call_of(group, sequence);
        if self.history.find(group, call).is_none() {
            self.history.push(group, call, contract_and_site);
        }
        if let Some(Failure { cause, .. }) = &self.failure
            && cause.ranks_without_line() != [None; 2]
        {
            self.add_own_report();
        }
    }

    /// Sets the ranks for which an external operation waits. Fails the job if one of these ranks has left.
    pub fn set_awaited_ranks(&mut self, id: OpId, ranks: Vec<Rank>) {
        let has_gone = |rank: &&Rank| self.links.get(**rank).is_some_and(Link::is_gone);
        let gone_rank = ranks.iter().find(has_gone).copied();
        if let Some(external) = self.external.get_mut(&id) {
            external.awaited = ranks;
            if let Some(rank) = gone_rank {
                self.fail_because_peer_left(rank);
            }
        }
    }

    pub fn end_external(&mut self, id: OpId) {
        if let Some(external) = self.external.remove(&id) {
            self.deadlines.remove(&(external.info.deadline(), id));
        }
    }

    /// Fails the job because `peer` executes a different operation in shared memory than this rank: an operation with another
    /// number or another contract. The peer's contract is `None` if it cannot be decoded.
    pub fn report_mismatch(
        &mut self,
        group: u32,
        (sequence, own_call): (u64, (Contract, Site)),
        (peer, (peer_sequence, peer_contract)): (Rank, (u64, Option<Contract>)),
    ) {
        let Some(contract) =
            peer_contract.filter(|&contract| (peer_sequence, contract) != (sequence, own_call.0))
        else {
            let detail = format!("its call of operation {sequence} differs from the call of this rank");
            self.report_misbehavior(peer, detail);
            return;
        };
        // The calls of the two ranks differ from the lower of the two numbers on. If the lower number is this rank's, this rank
        // does not know the peer's call with this number. The peer adds it.
        let earlier_call = self.find_contract(group, peer_sequence).filter(|_| peer_sequence < sequence);
        let (sequence, own_call) = earlier_call.map_or((sequence, own_call), |call| (peer_sequence, call));
        self.fail_because_mismatch((group, sequence), own_call, (peer, contract));
    }

    /// Sends a wake frame to a peer, because the peer sleeps although the shared memory has changed.
    pub fn send_wake_frame(&mut self, peer: Rank) {
        let header = FrameHeader { kind: FrameKind::Wake, ..FrameHeader::EMPTY };
        self.links.get_or_default(peer).control_frames.push_back(header);
    }
}
