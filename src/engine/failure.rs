//! Failures. All ranks of a job report the same root cause.

use std::time::Duration;

use bytes::Bytes;

use super::history::ContractAndSite;
use super::link::Link;
use super::operation::RunningOperation;
use super::{Engine, Failure, FrameVerdict, OpId, OperationKey, OperationRequest, Timestamp, Transmit};
use crate::types::{Contract, INTERNAL_GROUP_BITS, Operation, Rank, Site};
use crate::wire::cause::{AWAITED_RANKS_MAX, SilentLink, WaitingRank};
use crate::wire::{Cause, FrameHeader, FrameKind};

/// A peer to which no link can be opened is reported as lost after this time. Meanwhile another rank may send the root cause.
const UNREACHABLE_DELAY: Duration = Duration::from_millis(500);

impl Engine {
    /// Fails the job if the deadline of an operation, or the delay for an unreachable peer, has passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.failure.is_some() {
            return;
        }
        if let Some((_, cause)) = self.unreachable_peer.take_if(|(report_at, _)| now >= *report_at) {
            self.fail(cause);
            return;
        }
        let Some(&(deadline, id)) = self.deadlines.first() else { return };
        if now < deadline {
            return;
        }
        self.overdue_operation = Some(id);
        let timeout = self.info_of(id).map_or(0, |info| info.timeout.as_millis() as u64);
        let cause = self.timeout_cause(timeout);
        self.fail(cause);
    }

    /// Handles an abort frame with its payload. Control frames of other kinds need no more than [`Engine::handle_header`].
    pub fn handle_control_frame(&mut self, peer: Rank, header: &FrameHeader, payload: &[u8]) {
        if header.kind != FrameKind::Abort {
            return;
        }
        let Some(cause) = Cause::decode(payload) else {
            self.report_misbehavior(peer, "it sent an abort frame that cannot be decoded");
            return;
        };
        self.links.get_or_default(peer).cause_received = Some(cause.clone());
        let known = self.failure.as_ref().map(|failure| failure.cause.clone());
        let combined = known.clone().map_or(cause.clone(), |known| known.combine_with(cause));
        let cause = self.with_own_report(combined);
        if known.as_ref() != Some(&cause) {
            self.failure = Some(Failure { cause, reported_by: Some(peer) });
        }
    }

    /// Handles a link to `peer` that is lost or could not be opened. `detail` is the error of the transport. If it could not be
    /// opened, the peer may have exited because the job failed, so the engine first waits for a report of that failure.
    pub fn handle_lost_link(&mut self, peer: Rank, detail: &str, was_opened: bool) {
        let (host, seen_by) = (self.host(peer), self.settings.rank);
        let link = self.links.get_or_default(peer);
        let already_lost = std::mem::replace(&mut link.is_lost, true);
        if link.has_left || already_lost || self.is_closing {
            return;
        }
        let silence = self.now.saturating_sub(link.last_frame_at).as_secs_f32();
        if was_opened {
            let detail = format!("{detail}, {silence:.1} s after the last frame from it");
            self.fail(Cause::PeerLost { rank: peer, host, seen_by, detail });
        } else {
            let cause = Cause::PeerLost { rank: peer, host, seen_by, detail: detail.to_owned() };
            self.unreachable_peer.get_or_insert((self.now.saturating_add(UNREACHABLE_DELAY), cause));
        }
    }

    /// Fails the job because `peer` broke the protocol: its frames are corrupt or not allowed, or it wrote invalid values to
    /// shared memory. `detail` says what is wrong.
    pub fn report_misbehavior(&mut self, peer: Rank, detail: impl Into<String>) {
        self.fail(Cause::Misbehaved { rank: peer, host: self.host(peer), detail: detail.into() });
    }

    /// Fails the job because the program of this rank aborts it. `message` is the reason.
    pub fn abort(&mut self, message: &str) -> Failure {
        let rank = self.settings.rank;
        self.fail(Cause::Aborted { rank, host: self.host(rank), message: message.to_owned() })
    }

    /// Returns whether this rank need not wait for the causes of its peers: they have sent the same one or cannot add anything.
    /// They may agree on a mismatch to which a rank without a link to this rank has yet to add its line.
    pub fn do_peers_agree(&self) -> bool {
        let Some(Failure { cause, .. }) = &self.failure else { return true };
        let mut connected = self.links.iter().filter(|(_, link)| !link.is_gone()).peekable();
        let is_gone = |rank| self.links.get(rank).is_some_and(Link::is_gone);
        !cause.other_ranks_may_add_reports()
            || connected.peek().is_none()
            || (cause.ranks_without_line().into_iter().flatten().all(is_gone)
                && connected.all(|(_, link)| link.cause_received.as_ref() == Some(cause)))
    }

    /// Adds what this rank knows to the cause of a failure, after it has learned more.
    pub(super) fn add_own_report(&mut self) {
        if let Some(Failure { cause: known, reported_by }) = self.failure.clone() {
            let cause = self.with_own_report(known);
            self.failure = Some(Failure { cause, reported_by });
        }
    }

    /// Records a failure that this rank has detected, and returns it. If the job has already failed, returns the first failure.
    pub(super) fn fail(&mut self, cause: Cause) -> Failure {
        self.failure.get_or_insert(Failure { cause, reported_by: None }).clone()
    }

    /// Fails the job because `rank` left although this rank still needs it. An unreachable peer is the more likely root cause.
    pub(super) fn fail_because_peer_left(&mut self, rank: Rank) -> Failure {
        let unreachable = self.unreachable_peer.take().map(|(_, cause)| cause);
        let cause = unreachable.unwrap_or_else(|| Cause::PeerLeft { rank, host: self.host(rank) });
        self.fail(cause)
    }

    /// Handles the goodbye of `peer`. Fails the job if this rank still needs the peer.
    pub(super) fn handle_goodbye(&mut self, peer: Rank) {
        let link = self.links.get_or_default(peer);
        link.has_left = true;
        self.wake_events += 1;
        let is_awaited_sender =
            self.matching.posted.values().any(|posted| posted.pattern.source == Some(peer));
        let needs = |running: &RunningOperation| running.needs(peer, link.stored_segments(running.key));
        if is_awaited_sender || self.operations.values().any(needs) {
            self.fail_because_peer_left(peer);
        }
    }

    /// Fails the job because `peer` broke the protocol, and reads nothing more from the peer.
    pub(super) fn refuse(&mut self, peer: Rank, detail: impl Into<String>) -> FrameVerdict {
        self.report_misbehavior(peer, detail);
        FrameVerdict::Refuse
    }

    /// Handles a frame of an operation that is complete on this rank. Such a frame shows a mismatch: for example, the root of
    /// a broadcast waits for no frame, and learns only now that another rank called the broadcast with another root.
    pub fn handle_late_frame(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        match self.find_contract(header.group, header.sequence) {
            Some(own_call) if own_call.0 != header.contract => {
                let group_and_sequence = (header.group, header.sequence);
                self.fail_because_mismatch(group_and_sequence, own_call, (peer, header.contract));
                FrameVerdict::Discard
            }
            _ => self
                .refuse(peer, format!("it sent a frame of operation {}, which is complete", header.sequence)),
        }
    }

    /// Fails the job because this rank and `peer` called different operations with this number. Both create the same cause.
    pub(super) fn fail_because_mismatch(
        &mut self,
        (group, sequence): (u32, u64),
        (contract, site): ContractAndSite,
        (peer, peer_contract): (Rank, Contract),
    ) -> Failure {
        let (group, sequence) = OperationKey::call_of(group, sequence);
        let own_call = (self.settings.rank, contract, site.to_string());
        let mut calls = [(peer, peer_contract, String::new()), own_call];
        calls.sort_by_key(|call| call.0);
        let [(first, first_contract, first_site), (second, second_contract, second_site)] = calls;
        self.fail(Cause::Mismatch {
            group,
            sequence,
            first,
            first_contract,
            first_site,
            second,
            second_contract,
            second_site,
        })
    }

    /// Returns the abort or goodbye frame to send to `peer`, or `None` if the peer already has it.
    pub(super) fn take_notification(&mut self, peer: Rank) -> Option<Transmit> {
        let link = self.links.get_or_default(peer);
        if link.is_lost {
            return None;
        }
        let (kind, payload) = match &self.failure {
            Some(Failure { cause, .. }) => {
                // If other ranks may add reports, this rank sends back the cause that the peer sent, to show that both agree.
                let peer_knows = link.cause_sent.as_ref() == Some(cause)
                    || (link.cause_received.as_ref() == Some(cause) && !cause.other_ranks_may_add_reports());
                if peer_knows {
                    return None;
                }
                link.cause_sent = Some(cause.clone());
                (FrameKind::Abort, Bytes::from(cause.encode()))
            }
            None if std::mem::replace(&mut link.has_said_goodbye, true) => return None,
            None => (FrameKind::Goodbye, Bytes::new()),
        };
        let header = FrameHeader {
            kind,
            payload_bytes: payload.len() as u32,
            payload_crc: Some(crate::wire::crc32c(&payload)),
            ..FrameHeader::EMPTY
        };
        Some(Transmit::Control { header, payload })
    }

    /// Records that the host of `peer` has not acknowledged data of this rank, although the data were sent again.
    pub fn report_unacknowledged(&mut self, peer: Rank) {
        self.peers_without_acks.insert(peer);
        if matches!(&self.failure, Some(Failure { cause: Cause::Timeout { .. }, .. })) {
            self.add_own_report();
        }
    }

    /// Returns the cause for a missed deadline, with the operation in which this rank waits, and the links on which it waits.
    fn timeout_cause(&mut self, timeout_ms: u64) -> Cause {
        let waiting = self.waiting_report();
        if self.silent_links.is_empty() {
            self.silent_links = waiting.as_ref().map(|waiting| self.links_to(waiting)).unwrap_or_default();
        }
        for link in &mut self.silent_links {
            link.is_acknowledged = !self.peers_without_acks.contains(&link.peer);
        }
        let links = self.silent_links.clone();
        Cause::Timeout { timeout_ms, waiting: waiting.into_iter().collect(), links }
    }

    /// Returns the links to the ranks in `waiting.awaited`. Returns no link for an operation in shared memory.
    fn links_to(&self, waiting: &WaitingRank) -> Vec<SilentLink> {
        if self.waiting_operation().is_some_and(|id| self.external.contains_key(&id)) {
            return Vec::new();
        }
        let peers = waiting.awaited.iter().map(|&(peer, _)| peer).filter(|&peer| peer != waiting.rank);
        let link_to = |peer| {
            let silence = self.now.saturating_sub(self.links.get(peer)?.last_frame_at);
            let silence_ms = silence.as_millis().min(u32::MAX.into()) as u32;
            Some(SilentLink { rank: waiting.rank, peer, silence_ms, is_acknowledged: true })
        };
        peers.filter_map(link_to).collect()
    }

    /// Adds what this rank knows: for a timeout the operation in which it waits, for a mismatch the line of its call.
    fn with_own_report(&mut self, mut cause: Cause) -> Cause {
        match &cause {
            Cause::Timeout { timeout_ms, .. } => {
                let own_cause = self.timeout_cause(*timeout_ms);
                cause.combine_with(own_cause)
            }
            Cause::Mismatch { group, sequence, first, first_contract, second, .. } => {
                let own_rank = self.settings.rank;
                let peer = if *first == own_rank { *second } else { *first };
                let (contract, site) = match first_contract.operation {
                    // The receiver of the message detected and reported the mismatch. So this rank is the sender.
                    Operation::Message => (None, self.site_of_message(peer, *sequence)),
                    _ => self.find_contract(*group, *sequence).unzip(),
                };
                if let Some(contract) = contract {
                    cause.add_contract(own_rank, contract);
                }
                if let Some(site) = site {
                    cause.add_site(own_rank, &site.to_string());
                }
                cause
            }
            _ => cause,
        }
    }

    /// Returns the operation whose deadline has passed. If there is none, returns the oldest operation that has been active for
    /// at least half of its timeout. The other ranks waited for a rank that began later than that.
    fn waiting_operation(&self) -> Option<OpId> {
        let has_waited = |info: &OperationRequest| {
            self.now.saturating_sub(info.began.unwrap_or_default()) >= info.timeout / 2
        };
        let waiting = self.active_operations().filter(|(_, info)| has_waited(info));
        self.overdue_operation.or(waiting.map(|(id, _)| id).min())
    }

    /// Returns the contract and the line of the operation in which this rank was when the job failed: the operation whose
    /// deadline has passed or, if there is none, the oldest active operation.
    pub fn failed_operation(&self) -> Option<(Contract, Site)> {
        let oldest = self.active_operations().map(|(id, _)| id).min();
        self.info_of(self.overdue_operation.or(oldest)?).map(|info| (info.contract, info.site))
    }

    fn active_operations(&self) -> impl Iterator<Item = (OpId, &OperationRequest)> {
        let running = self.operations.iter().map(|(&id, running)| (id, &running.info));
        let posted = self.matching.posted.values().map(|posted| (posted.id, &posted.info));
        running.chain(posted).chain(self.external.iter().map(|(&id, external)| (id, &external.info)))
    }

    fn waiting_report(&self) -> Option<WaitingRank> {
        let id = self.waiting_operation()?;
        let info = self.info_of(id)?;
        let key = self.key_of(id).or_else(|| self.external.get(&id).map(|external| external.key));
        // A receive that has not matched a message has no number yet.
        let sequence = key.map_or(0, OperationKey::sequence);
        let (group, sequence) = OperationKey::call_of(info.group, sequence);
        Some(WaitingRank {
            rank: self.settings.rank,
            group: group & !INTERNAL_GROUP_BITS,
            sequence,
            contract: info.contract,
            site: info.site.to_string(),
            awaited: self.awaited_ranks_of(id).into_iter().map(|rank| (rank, self.host(rank))).collect(),
        })
    }

    /// Returns the ranks for which an active operation waits, at most [`AWAITED_RANKS_MAX`].
    fn awaited_ranks_of(&self, id: OpId) -> Vec<Rank> {
        match (self.operations.get(&id), self.external.get(&id)) {
            (Some(running), _) => running.awaited_peers().take(AWAITED_RANKS_MAX).collect(),
            (None, Some(external)) => external.awaited.iter().copied().take(AWAITED_RANKS_MAX).collect(),
            (None, None) => {
                self.matching.posted.get(&id).and_then(|posted| posted.pattern.source).into_iter().collect()
            }
        }
    }

    pub fn awaited_ranks(&self) -> Vec<(OpId, Vec<Rank>)> {
        self.active_operations().map(|(id, _)| (id, self.awaited_ranks_of(id))).collect()
    }

    fn info_of(&self, id: OpId) -> Option<&OperationRequest> {
        self.active_operations().find(|&(active, _)| active == id).map(|(_, info)| info)
    }

    /// Returns this rank's contract and call site of a collective or a block, if they are still stored.
    pub(super) fn find_contract(&self, group: u32, sequence: u64) -> Option<ContractAndSite> {
        let key = OperationKey::Collective { group, sequence };
        let running = self.find_running(key).map(|running| &running.info);
        let mut external = self.external.values().filter(|external| external.key == key);
        let info = running.or_else(|| external.next().map(|external| &external.info));
        let (group, call) = OperationKey::call_of(group, sequence);
        info.map(|info| (info.contract, info.site)).or_else(|| self.history.find(group, call))
    }

    /// Returns the line that sent a message to `to`, if the message is still being sent or is one of the last messages.
    fn site_of_message(&self, to: Rank, sequence: u64) -> Option<Site> {
        let running = self.find_running(OperationKey::Message { from: self.settings.rank, to, sequence });
        let site = running.map(|running| running.info.site);
        site.or_else(|| self.links.get(to)?.site_of(sequence))
    }

    fn find_running(&self, key: OperationKey) -> Option<&RunningOperation> {
        self.operations.get(self.by_key.get(&key)?)
    }

    pub fn host(&self, rank: Rank) -> String {
        self.settings.host_names.get(rank.index()).cloned().unwrap_or_else(|| "an unknown host".into())
    }
}
