//! External operations: operations that the engine does not execute. They are the operations in shared memory, and the
//! synchronous sends of this rank to itself. The engine keeps their deadlines and the ranks for which they wait.

use super::link::Link;
use super::operation::{ExternalOperation, OperationInfo};
use super::{Engine, Failure, OpId, OperationKey, OperationRequest, Timestamp};
use crate::types::{Contract, Rank, Site};
use crate::wire::{FrameHeader, FrameKind};

impl Engine {
    /// Begins an operation in shared memory. `sequence` is the number of the operation in its group.
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
        let id = self.new_id();
        let info =
            OperationInfo::new(now, request, OperationKey::Collective { group: request.group, sequence });
        self.deadlines.insert((info.deadline, id));
        self.external.insert(id, ExternalOperation { info, awaited: Vec::new() });
        Ok(id)
    }

    /// Assigns the next number of a group to an operation that consists of several internal operations. If another rank calls a
    /// different operation under this number, the engine detects the mismatch.
    ///
    /// # Errors
    ///
    /// The failure, if a rank has already announced a different operation with this number.
    pub fn assign_number(
        &mut self,
        group: u32,
        contract_and_site: (Contract, Site),
    ) -> Result<(OpId, OperationKey), Failure> {
        let sequence = self.history.record_next(group, contract_and_site);
        let key = OperationKey::Collective { group, sequence };
        let mut links = self.links.iter_mut();
        let mismatch = links.find_map(|(&peer, link)| Some((peer, link.announced.remove(&key)?)));
        if let Some(mismatch) = mismatch {
            return Err(self.fail_because_mismatch((group, sequence), contract_and_site, mismatch));
        }
        Ok((self.new_id(), key))
    }

    /// Stores the contract of an operation in shared memory. If a late rank calls a different operation under the same number,
    /// the error message shows the stored contract.
    pub fn record_external(&mut self, group: u32, sequence: u64, contract_and_site: (Contract, Site)) {
        self.history.record_numbered(group, sequence, contract_and_site);
    }

    /// Sets the ranks for which an external operation waits. Fails the job if one of these ranks has left.
    pub fn set_awaited_ranks(&mut self, id: OpId, ranks: Vec<Rank>) {
        let has_gone = |rank: &&Rank| self.links.get(rank).is_some_and(Link::is_gone);
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

    /// Fails the job because `peer` called a different operation than this rank under the same number. The peer's contract is
    /// `None` if it is unknown.
    pub fn report_mismatch(
        &mut self,
        (group, sequence): (u32, u64),
        own_contract_and_site: (Contract, Site),
        (peer, peer_contract): (Rank, Option<Contract>),
    ) {
        if let Some(contract) = peer_contract.filter(|contract| *contract != own_contract_and_site.0) {
            self.fail_because_mismatch((group, sequence), own_contract_and_site, (peer, contract));
        } else {
            let detail = format!("its call of operation {sequence} differs from the call of this rank");
            self.report_misbehavior(peer, detail);
        }
    }

    /// Sends a wake frame to a peer, because the peer sleeps although the shared memory has changed.
    pub fn send_wake_frame(&mut self, peer: Rank) {
        self.links
            .entry(peer)
            .or_default()
            .control_frames
            .push_back(FrameHeader { kind: FrameKind::Wake, ..FrameHeader::EMPTY });
    }
}
