//! How operations begin: collectives, messages, and receives that wait for one.

use super::matching::{Envelope, Pattern, PostedReceive};
use super::operation::{OperationInfo, OperationKey, RunningOperation};
use super::{Begin, Engine, Failure, OpId, Timestamp};
use crate::schedule::{Action, InboundElements, OutboundElements, Schedule, Step};
use crate::types::{Contract, Rank};

impl Engine {
    /// Begins the next operation of a group; every rank of the group has to begin the same one. The schedule's ranks are
    /// those of the world.
    ///
    /// # Errors
    ///
    /// The failure, if the job has failed before or a peer that is needed has already left.
    pub fn begin(&mut self, now: Timestamp, begin: Begin, schedule: Schedule) -> Result<OpId, Failure> {
        self.check()?;
        let Begin { group, contract, site, .. } = begin;
        let sequence = self.history.begin(group, (contract, site));
        let id = self.next_id();
        self.start(id, call(now, begin, OperationKey::Collective { group, sequence }), schedule)
    }

    /// The group begins nothing more.
    pub fn retire(&mut self, group: u32) {
        self.history.retire(group);
    }

    /// Begins to send a message of elements `0..count` of a buffer. The contract's `layout` is its tag. A message from this
    /// rank to itself is complete at once, or, if it is synchronous, when a receive has matched it; the driver keeps its
    /// bytes ([`Engine::take_handed_over`]).
    ///
    /// # Errors
    ///
    /// As [`Engine::begin`].
    pub fn send(&mut self, now: Timestamp, begin: Begin, to: Rank) -> Result<OpId, Failure> {
        self.check()?;
        if to == self.settings.rank {
            return self.send_to_itself(now, begin);
        }
        let sequence = self.links.entry(to).or_default().number_message(begin.site);
        let key = OperationKey::Message { from: self.settings.rank, to, sequence };
        let range = 0..begin.contract.count as usize;
        let step = Step { send: Some(OutboundElements { peer: to, range, after: None }), receive: None };
        let id = self.next_id();
        self.start(id, call(now, begin, key), Schedule { steps: vec![step] })
    }

    /// Begins to receive a message of at most the contract's `count` elements into `0..` of a buffer. Which message it is,
    /// and how long, [`Engine::envelope`] says once it has been found.
    ///
    /// # Errors
    ///
    /// As [`Engine::begin`], and when the message that fits is longer or of another element type.
    pub fn receive(&mut self, now: Timestamp, begin: Begin, pattern: Pattern) -> Result<OpId, Failure> {
        self.check()?;
        let id = self.next_id();
        // It has no key before it has a message.
        let call = call(now, begin, OperationKey::Collective { group: begin.group, sequence: u64::MAX });
        let posted = PostedReceive { id, pattern, call };
        if let Some((key, envelope)) = self.matching.take_arrived(&pattern) {
            self.unite(&posted, key, envelope)?;
            return Ok(id);
        }
        if let Some(source) = pattern.source
            && self.links.get(&source).is_some_and(|link| link.left || link.lost)
        {
            return Err(self.fail_left(source));
        }
        self.deadlines.insert((call.deadline, id));
        self.matching.post(posted);
        Ok(id)
    }

    /// Withdraws a receive that has found no message yet; whether it was one. Everything else goes on, for other ranks
    /// count on it.
    pub fn cancel(&mut self, receive: OpId) -> bool {
        let Some(posted) = self.matching.withdraw(receive) else { return false };
        self.deadlines.remove(&(posted.call.deadline, receive));
        true
    }

    pub(super) fn next_id(&mut self) -> OpId {
        self.next_id += 1;
        OpId(self.next_id)
    }

    fn start(&mut self, id: OpId, call: OperationInfo, schedule: Schedule) -> Result<OpId, Failure> {
        let segment_elements = (self.settings.segment_bytes / call.contract.dtype.size_bytes()).max(1);
        let mut running = RunningOperation::new(call, schedule, segment_elements);
        let mut gone = None;
        let mut other: Option<(Rank, Contract)> = None;
        for index in 0..running.peers() {
            let (peer, is_sent_to) = running.peer(index);
            let link = self.links.entry(peer).or_default();
            let is_gone = link.left || link.lost;
            if is_gone && running.needs(peer, link.stored_segments(call.key)) {
                gone.get_or_insert(peer);
            }
            if let Some(asked) = link.announced.remove(&call.key) {
                running.tell_when_ready(peer);
                if asked != call.contract {
                    other.get_or_insert((peer, asked));
                }
            }
            if let Some(messages) = link.cleared.remove(&call.key) {
                running.cleared(peer, messages);
            }
            match call.key {
                _ if !is_sent_to => {}
                OperationKey::Collective { .. } => link.send_queue.enter(id),
                OperationKey::Message { .. } => link.send_queue.enter_message(id),
            }
        }
        self.deadlines.insert((call.deadline, id));
        self.by_key.insert(call.key, id);
        self.operations.insert(id, running);
        if let Some(other) = other {
            let cause = self.mismatch((call.group, call.sequence()), (call.contract, call.site), other);
            return Err(self.fail(cause));
        }
        if let Some(peer) = gone {
            return Err(self.fail_left(peer));
        }
        self.tell_ready(id);
        self.settle(id);
        Ok(id)
    }

    /// Joins a receive and its message into an operation.
    pub(super) fn unite(
        &mut self,
        posted: &PostedReceive,
        key: OperationKey,
        envelope: Envelope,
    ) -> Result<(), Failure> {
        let PostedReceive { id, call, .. } = *posted;
        let asked = call.contract;
        self.deadlines.remove(&(call.deadline, id));
        if envelope.contract.dtype != asked.dtype || envelope.contract.count > asked.count {
            let OperationKey::Message { sequence, .. } = key else { return Ok(()) };
            let cause = self.mismatch(
                (call.group, sequence),
                (asked, call.site),
                (envelope.source, envelope.contract),
            );
            return Err(self.fail(cause));
        }
        let receive = InboundElements {
            peer: envelope.source,
            range: 0..envelope.contract.count as usize,
            action: Action::Copy,
            after: None,
        };
        self.envelopes.insert(id, envelope);
        if envelope.source == self.settings.rank {
            self.hand_over(id, key);
            return Ok(());
        }
        let call = OperationInfo { key, contract: envelope.contract, ..call };
        let schedule = Schedule { steps: vec![Step { send: None, receive: Some(receive) }] };
        self.start(id, call, schedule).map(|_| ())
    }
}

pub(super) fn call(now: Timestamp, begin: Begin, key: OperationKey) -> OperationInfo {
    let Begin { group, contract, timeout, spent, site, mode } = begin;
    let left = timeout.saturating_sub(spent);
    OperationInfo { key, group, contract, site, deadline: now.saturating_add(left), timeout, mode }
}
