//! How the engine fails: one root cause, which all ranks come to share.

use std::time::Duration;

use bytes::Bytes;

use super::history::CallerContract;
use super::operation::{OperationInfo, OperationKey, RunningOperation};
use super::{Engine, FrameVerdict, OpId, Timestamp, Transmit};
use crate::types::{Contract, INTERNAL_GROUP_BITS, Operation, Rank, Site};
use crate::wire::cause::{AWAITED_RANKS_MAX, SilentLink, WaitingRank};
use crate::wire::{Cause, FrameHeader, FrameKind};

/// How long others may take to tell why a peer cannot be reached.
const UNREACHED_FOR: Duration = Duration::from_millis(500);

/// A peer that could not be reached.
pub(super) struct Unreached {
    rank: Rank,
    detail: String,
    /// When that is taken for the root cause.
    pub(super) due: Timestamp,
}

/// Why and by whom the job failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The root cause.
    pub cause: Cause,
    /// The rank that told us, if we did not see it ourselves.
    pub reported_by: Option<Rank>,
}

impl Engine {
    /// Ends the job if an operation's deadline has passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.failure.is_some() {
            return;
        }
        if let Some(unreached) = self.unreached.take_if(|unreached| now >= unreached.due) {
            self.fail_unreached(unreached);
            return;
        }
        let Some(&(deadline, id)) = self.deadlines.first() else { return };
        if now < deadline {
            return;
        }
        self.overdue = Some(id);
        let timeout = self.call_of(id).map_or(0, |call| call.timeout.as_millis() as u64);
        let cause = self.own_timeout(timeout);
        self.fail(cause);
    }

    /// A control frame's payload has arrived.
    pub fn control(&mut self, peer: Rank, header: &FrameHeader, payload: &[u8]) {
        if header.kind != FrameKind::Abort {
            return;
        }
        let Some(cause) = Cause::decode(payload) else {
            let cause = self.misbehaved(peer, "it sent an abort that cannot be read".into());
            self.fail(cause);
            return;
        };
        self.links.entry(peer).or_default().heard = Some(cause.clone());
        let known = self.failure.as_ref().map(|failure| failure.cause.clone());
        match known {
            None => {
                let cause = self.with_own_words(cause);
                self.failure = Some(Failure { cause, reported_by: Some(peer) });
            }
            Some(known) => {
                let cause = self.with_own_words(known.clone().join(cause));
                if cause != known {
                    self.failure = Some(Failure { cause, reported_by: Some(peer) });
                }
            }
        }
    }

    /// The link to `peer` is gone; `detail` is what the transport says about it.
    pub fn link_lost(&mut self, peer: Rank, detail: &str) {
        let host = self.host(peer);
        let link = self.links.entry(peer).or_default();
        let already_lost = std::mem::replace(&mut link.lost, true);
        if link.left || already_lost || self.closing {
            return;
        }
        let silence = self.now.saturating_sub(link.last_frame);
        let detail = format!("{detail}, {:.1} s after the last frame from it", silence.as_secs_f32());
        self.fail(Cause::PeerLost { rank: peer, host, seen_by: self.settings.rank, detail });
    }

    /// No link to `peer` could be opened; `detail` is what the transport says about it. It may be gone because the job has
    /// failed, of which others have been told: they have a moment to say so.
    pub fn link_not_opened(&mut self, peer: Rank, detail: &str) {
        let link = self.links.entry(peer).or_default();
        let already_lost = std::mem::replace(&mut link.lost, true);
        if !link.left && !already_lost && !self.closing {
            let due = self.now.saturating_add(UNREACHED_FOR);
            self.unreached.get_or_insert(Unreached { rank: peer, detail: detail.to_owned(), due });
        }
    }

    /// Bytes that came from `peer` are wrong: a corrupt header or payload.
    pub fn corrupt(&mut self, peer: Rank, detail: String) {
        let cause = self.misbehaved(peer, detail);
        self.fail(cause);
    }

    /// This rank gives up, and says why.
    pub fn abort(&mut self, message: &str) -> Failure {
        let rank = self.settings.rank;
        self.fail(Cause::Aborted { rank, host: self.host(rank), message: message.to_owned() })
    }

    /// Whether every peer that can still be heard has told us the same root cause, or nothing is to be learnt from it.
    pub fn is_settled(&self) -> bool {
        let Some(Failure { cause, .. }) = &self.failure else { return true };
        !cause.other_ranks_may_add_reports()
            || self.links.values().all(|link| link.lost || link.left || link.heard.as_ref() == Some(cause))
    }

    /// The first failure is the one that counts, as far as this rank has seen it itself.
    pub(super) fn fail(&mut self, cause: Cause) -> Failure {
        self.failure.get_or_insert(Failure { cause, reported_by: None }).clone()
    }

    pub(super) fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn fail_unreached(&mut self, Unreached { rank, detail, .. }: Unreached) -> Failure {
        self.fail(Cause::PeerLost { rank, host: self.host(rank), seen_by: self.settings.rank, detail })
    }

    /// A peer that is needed has left: in order, so that one which cannot be reached is the more likely culprit.
    pub(super) fn fail_left(&mut self, rank: Rank) -> Failure {
        if let Some(unreached) = self.unreached.take() {
            return self.fail_unreached(unreached);
        }
        let cause = Cause::PeerLeft { rank, host: self.host(rank) };
        self.fail(cause)
    }

    pub(super) fn peer_left(&mut self, peer: Rank) {
        let link = self.links.entry(peer).or_default();
        link.left = true;
        self.alerts += 1;
        let waits_for_it = self.matching.posted().any(|posted| posted.pattern.source == Some(peer));
        let needs = |running: &RunningOperation| running.needs(peer, link.stored_segments(running.call.key));
        if waits_for_it || self.operations.values().any(needs) {
            self.fail_left(peer);
        }
    }

    /// The job fails because of what `peer` sent, and nothing more is read from it.
    pub(super) fn refuse(&mut self, peer: Rank, detail: String) -> FrameVerdict {
        let cause = self.misbehaved(peer, detail);
        self.fail(cause);
        FrameVerdict::Refuse
    }

    /// A segment of an operation that is over here: a root, say, ends a broadcast without hearing from anybody, and learns
    /// only now that others meant another root.
    pub fn belated(&mut self, peer: Rank, header: &FrameHeader) -> FrameVerdict {
        let history = self.history(header.group, header.sequence);
        match history {
            Some((contract, site)) if contract != header.contract => {
                let place = (header.group, header.sequence);
                let cause = self.mismatch(place, (contract, site), (peer, header.contract));
                self.fail(cause);
                FrameVerdict::Discard
            }
            _ => self.refuse(peer, format!("it repeats operation {}, which is over", header.sequence)),
        }
    }

    /// The same words on whichever of the two ranks they are found.
    pub(super) fn mismatch(
        &self,
        (group, sequence): (u32, u64),
        (asked, site): CallerContract,
        (peer, peer_asked): (Rank, Contract),
    ) -> Cause {
        let one = (self.settings.rank, asked, site.to_string());
        let other = (peer, peer_asked, String::new());
        let (first, second) = if one.0 < other.0 { (one, other) } else { (other, one) };
        Cause::Mismatch {
            group,
            sequence,
            first: first.0,
            first_asked: first.1,
            first_site: first.2,
            second: second.0,
            second_asked: second.1,
            second_site: second.2,
        }
    }

    /// The abort or goodbye that `peer` has not been told yet.
    pub(super) fn notification(&mut self, peer: Rank) -> Option<Transmit> {
        let link = self.links.entry(peer).or_default();
        if link.lost {
            return None;
        }
        let (kind, payload) = match &self.failure {
            Some(Failure { cause, .. }) => {
                // It is told even what it told us, if others may know more: that is how it learns that we agree.
                let knows = link.told.as_ref() == Some(cause)
                    || (link.heard.as_ref() == Some(cause) && !cause.other_ranks_may_add_reports());
                if knows {
                    return None;
                }
                link.told = Some(cause.clone());
                (FrameKind::Abort, Bytes::from(cause.encode()))
            }
            None if std::mem::replace(&mut link.said_goodbye, true) => return None,
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

    /// The host of `peer` does not acknowledge the data of this rank, although they were sent again.
    pub fn report_unacknowledged(&mut self, peer: Rank) {
        self.unacknowledged.insert(peer);
        for link in self.silent_links.iter_mut().filter(|link| link.peer == peer) {
            link.is_acknowledged = false;
        }
        if let Some(Failure { cause: known @ Cause::Timeout { .. }, reported_by }) = self.failure.clone() {
            let cause = self.with_own_words(known);
            self.failure = Some(Failure { cause, reported_by });
        }
    }

    /// The cause that this rank's own operations give for a missed deadline.
    fn own_timeout(&mut self, timeout_ms: u64) -> Cause {
        let waiting = self.waiting();
        if self.silent_links.is_empty()
            && let Some(waiting) = &waiting
        {
            self.silent_links = self.links_to(waiting);
        }
        Cause::Timeout {
            timeout_ms,
            waiting: waiting.into_iter().collect(),
            links: self.silent_links.clone(),
        }
    }

    /// Returns the links on which this rank waits. An operation in shared memory waits on no link.
    fn links_to(&self, waiting: &WaitingRank) -> Vec<SilentLink> {
        if self.waiting_operation().is_some_and(|id| self.external.contains_key(&id)) {
            return Vec::new();
        }
        let peers = waiting.awaited.iter().map(|&(peer, _)| peer).filter(|&peer| peer != waiting.rank);
        let link_to = |peer| {
            let link = self.links.get(&peer)?;
            Some(SilentLink {
                rank: waiting.rank,
                peer,
                silence_ms: self.now.saturating_sub(link.last_frame).as_millis().min(u32::MAX.into()) as u32,
                is_acknowledged: !self.unacknowledged.contains(&peer),
            })
        };
        peers.filter_map(link_to).collect()
    }

    /// What this rank itself can add to a cause.
    fn with_own_words(&mut self, mut cause: Cause) -> Cause {
        match &cause {
            Cause::Timeout { timeout_ms, .. } => {
                let own = self.own_timeout(*timeout_ms);
                cause.join(own)
            }
            Cause::Mismatch { group, sequence, first, first_asked, second, .. } => {
                let own = self.settings.rank;
                let peer = if *first == own { *second } else { *first };
                let site = match first_asked.operation {
                    // Its receiver is who found out and has said so, so this rank sent it.
                    Operation::Message => self.sent_at(peer, *sequence),
                    _ => self.history(*group, *sequence).map(|(_, site)| site),
                };
                if let Some(site) = site {
                    cause.add_site(own, &site.to_string());
                }
                cause
            }
            _ => cause,
        }
    }

    /// What this rank waits in: the operation whose deadline has passed, or else the oldest that has had half of its time.
    /// Whoever comes only when the others' patience has ended is the one they waited for.
    fn waiting_operation(&self) -> Option<OpId> {
        let has_waited = |call: &OperationInfo| {
            let began = call.deadline.saturating_sub(call.timeout);
            self.now.saturating_sub(began) >= call.timeout / 2
        };
        let running = self.operations.iter().find(|(_, running)| has_waited(&running.call));
        let posted = self.matching.posted().find(|posted| has_waited(&posted.call));
        let external = self.external.iter().find(|(_, external)| has_waited(&external.call));
        let all = [running.map(|(&id, _)| id), posted.map(|posted| posted.id), external.map(|(&id, _)| id)];
        self.overdue.or(all.into_iter().flatten().min())
    }

    fn waiting(&self) -> Option<WaitingRank> {
        let id = self.waiting_operation()?;
        let call = self.call_of(id)?;
        let awaited: Vec<Rank> = match (self.operations.get(&id), self.external.get(&id)) {
            (Some(running), _) => running.awaited().take(AWAITED_RANKS_MAX).collect(),
            (None, Some(external)) => external.awaited.iter().copied().take(AWAITED_RANKS_MAX).collect(),
            (None, None) => self.matching.find_posted(id)?.pattern.source.into_iter().collect(),
        };
        let sequence = if call.sequence() == u64::MAX { 0 } else { call.sequence() };
        Some(WaitingRank {
            rank: self.settings.rank,
            group: call.group & !INTERNAL_GROUP_BITS,
            sequence,
            asked: call.contract,
            site: call.site.to_string(),
            awaited: awaited.into_iter().map(|rank| (rank, self.host(rank))).collect(),
        })
    }

    fn call_of(&self, id: OpId) -> Option<&OperationInfo> {
        let posted = || self.matching.find_posted(id).map(|posted| &posted.call);
        let external = || self.external.get(&id).map(|external| &external.call);
        self.operations.get(&id).map(|running| &running.call).or_else(external).or_else(posted)
    }

    /// What this rank asked for in an operation of a group, and where, if it remembers.
    fn history(&self, group: u32, sequence: u64) -> Option<CallerContract> {
        let key = OperationKey::Collective { group, sequence };
        let running = self.running(key).map(|running| &running.call);
        let mut external = self.external.values().map(|external| &external.call);
        let call = running.or_else(|| external.find(|call| call.key == key));
        let asked = call.map(|call| (call.contract, call.site));
        asked.or_else(|| self.history.find(group, sequence))
    }

    /// Where this rank sent a message, if it remembers: one that is still on its way, or one of the last.
    fn sent_at(&self, to: Rank, sequence: u64) -> Option<Site> {
        let running = self.running(OperationKey::Message { from: self.settings.rank, to, sequence });
        let site = running.map(|running| running.call.site);
        site.or_else(|| self.links.get(&to)?.site_of(sequence))
    }

    fn running(&self, key: OperationKey) -> Option<&RunningOperation> {
        self.operations.get(self.by_key.get(&key)?)
    }

    pub(super) fn misbehaved(&self, rank: Rank, detail: String) -> Cause {
        Cause::Misbehaved { rank, host: self.host(rank), detail }
    }

    pub(super) fn host(&self, rank: Rank) -> String {
        self.settings.hosts.get(rank.index()).cloned().unwrap_or_else(|| "an unknown host".into())
    }
}
