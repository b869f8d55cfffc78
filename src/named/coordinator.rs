//! Rank 0's state of all ranks: which ranks have submitted which tensors, which are ready, and what to send to the
//! ranks. Time is an argument.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::cache::CacheDirectory;
use super::client::TENSORS_MAX;
use super::error::Violation;
use super::message::{
    AnnouncedTensor, CoordinatorMessage, Instruction, REFUSALS_MAX, REQUESTS_MAX, RefusalKind, Report,
    Request, Signature, TensorOp,
};
use super::stalls::StallWatch;
use crate::types::{Rank, ReduceOp};

/// Time since the coordinator's start.
pub(super) type Timestamp = std::time::Duration;

/// The limits of the coordinator.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoordinatorLimits {
    /// The most bytes that are fused into one operation.
    pub(super) fusion_bytes: u64,
    /// The number of tensors in the response cache.
    pub(super) capacity: u16,
    /// The largest number of operations under way. Tensors that become ready meanwhile are fused.
    pub(super) outstanding_max: usize,
}

/// The coordinator's state of the negotiation.
pub(super) struct Coordinator {
    rules: CoordinatorLimits,
    pub(super) members: Arc<[Rank]>,
    pub(super) ranks: Vec<RankStatus>,
    /// The number of ranks that submit nothing for now.
    silent: usize,
    pub(super) table: BTreeMap<String, PendingTensor>,
    ready: VecDeque<Request>,
    refused: VecDeque<Instruction>,
    directory: CacheDirectory,
    /// The number of messages sent so far.
    messages: u64,
    outstanding: usize,
    last_joined: Option<Rank>,
    has_ended: bool,
    pub(super) watch: StallWatch,
}

/// The state of one rank.
#[derive(Clone, Copy, Default)]
pub(super) struct RankStatus {
    /// The number of messages that it has read.
    seen: u64,
    pub(super) has_joined: bool,
    pub(super) has_closed: bool,
    /// The number of its tensors in the table.
    waiting: usize,
}

impl RankStatus {
    /// Whether it submits nothing for now.
    pub(super) fn is_silent(self) -> bool {
        self.has_joined || self.has_closed
    }
}

/// A tensor that some ranks have submitted.
pub(super) struct PendingTensor {
    pub(super) asked: BTreeMap<Rank, Signature>,
    pub(super) since: Timestamp,
}

impl Coordinator {
    /// `members` are the ranks' numbers in the job, for error messages.
    pub(super) fn new(rules: CoordinatorLimits, members: Arc<[Rank]>, watch: StallWatch) -> Self {
        Self {
            rules,
            ranks: vec![RankStatus::default(); members.len()],
            silent: 0,
            members,
            table: BTreeMap::new(),
            ready: VecDeque::new(),
            refused: VecDeque::new(),
            directory: CacheDirectory::new(rules.capacity),
            messages: 0,
            outstanding: 0,
            last_joined: None,
            has_ended: false,
            watch,
        }
    }

    /// Whether a rank other than the coordinator's own sends further reports.
    pub(super) fn is_expecting_others(&self) -> bool {
        self.ranks.iter().skip(1).any(|status| !status.has_closed)
    }

    /// Processes a report of a rank.
    pub(super) fn report(&mut self, now: Timestamp, from: Rank, report: Report) -> Result<(), Violation> {
        let messages = self.messages;
        let Some(status) = self.ranks.get_mut(from.index()) else {
            return Err(Violation("it is not in the group".into()));
        };
        if status.has_closed {
            return Err(Violation("it has closed before".into()));
        }
        if status.has_joined && !(report.slots.is_empty() && report.requests.is_empty() && !report.joins) {
            return Err(Violation("it has joined before".into()));
        }
        if report.seen < status.seen || report.seen > messages {
            return Err(Violation(format!("it has read {} messages of {messages}", report.seen)));
        }
        status.seen = report.seen;
        self.watch.touch(now);
        for slot in report.slots {
            let request = self.directory.resolve(slot).cloned();
            let request = request.ok_or_else(|| Violation(format!("slot {slot} is empty")))?;
            self.submit(now, from, request)?;
        }
        for request in report.requests {
            self.submit(now, from, request)?;
        }
        let status = &mut self.ranks[from.index()];
        status.has_joined |= report.joins;
        status.has_closed |= report.closes;
        if report.joins {
            self.last_joined = Some(from);
        }
        if report.joins || report.closes {
            self.silent = self.ranks.iter().filter(|status| status.is_silent()).count();
            let names: Vec<String> = self.table.keys().cloned().collect();
            for name in names {
                self.settle(&name);
            }
        }
        Ok(())
    }

    fn submit(&mut self, now: Timestamp, from: Rank, request: Request) -> Result<(), Violation> {
        let status = &mut self.ranks[from.index()];
        status.waiting += 1;
        if status.waiting > TENSORS_MAX {
            return Err(Violation(format!("it has more than {TENSORS_MAX} tensors in flight")));
        }
        let Request { name, signature } = request;
        let fresh = || PendingTensor { asked: BTreeMap::new(), since: now };
        let entry = self.table.entry(name.clone()).or_insert_with(fresh);
        if entry.asked.insert(from, signature).is_some() {
            return Err(Violation(format!("it has submitted `{name}` twice")));
        }
        self.settle(&name);
        Ok(())
    }

    /// Decides about a tensor if all ranks have submitted it, or if some never will.
    fn settle(&mut self, name: &str) {
        let Some(entry) = self.table.get(name) else { return };
        let (mut joined, mut closed, mut is_awaited) = (Vec::new(), Vec::new(), false);
        if entry.asked.len() < self.ranks.len() {
            if self.silent == 0 {
                return;
            }
            for (index, status) in self.ranks.iter().enumerate() {
                let rank = Rank::new(index as u32);
                match status {
                    _ if entry.asked.contains_key(&rank) => {}
                    RankStatus { has_closed: true, .. } => closed.push(rank),
                    RankStatus { has_joined: true, .. } => joined.push(rank),
                    _ => is_awaited = true,
                }
            }
        }
        if is_awaited && closed.is_empty() {
            return;
        }
        let Some(entry) = self.take(name) else { return };
        let Some(&signature) = entry.asked.values().next() else { return };
        let keeps_zeros = matches!(
            signature.kind,
            TensorOp::AllReduce(ReduceOp::Sum | ReduceOp::Average)
                | TensorOp::ReduceScatter(ReduceOp::Sum | ReduceOp::Average)
        );
        let (refusal, reason) = if !closed.is_empty() {
            (RefusalKind::Left, format!("{} closed without submitting it", self.text_of(&closed)))
        } else if entry.asked.values().any(|other| *other != signature) {
            (RefusalKind::Disagreement, self.disagreement(&entry))
        } else if !joined.is_empty() && !keeps_zeros {
            let who = self.text_of(&joined);
            let reason = format!(
                "it is {signature}, and {who} joined; only sums and averages treat a joined rank as zeros"
            );
            (RefusalKind::WithoutJoined, reason)
        } else {
            return self.ready.push_back(Request { name: name.to_owned(), signature });
        };
        self.refused.push_back(Instruction::Refuse { name: name.to_owned(), refusal, reason });
    }

    fn take(&mut self, name: &str) -> Option<PendingTensor> {
        let entry = self.table.remove(name)?;
        self.watch.forget(name);
        for rank in entry.asked.keys() {
            self.ranks[rank.index()].waiting -= 1;
        }
        Some(entry)
    }

    /// The request of each rank.
    fn disagreement(&self, entry: &PendingTensor) -> String {
        let mut by_signature: BTreeMap<Signature, Vec<Rank>> = BTreeMap::new();
        for (&rank, &signature) in &entry.asked {
            by_signature.entry(signature).or_default().push(rank);
        }
        let mut parts: Vec<_> = by_signature.into_iter().collect();
        parts.sort_by_key(|(_, ranks)| ranks[0]);
        let text =
            |(signature, ranks): &(Signature, Vec<Rank>)| format!("{}: {signature}", self.text_of(ranks));
        parts.iter().map(text).collect::<Vec<_>>().join("; ")
    }

    /// Names these ranks of the group by their numbers in the job.
    pub(super) fn text_of(&self, ranks: &[Rank]) -> String {
        super::stalls::text_of(ranks.iter().map(|rank| self.members[rank.index()]))
    }

    /// Records that an operation has ended on this rank: another may begin.
    pub(super) fn complete(&mut self, now: Timestamp) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.watch.touch(now);
    }

    /// The next message to all ranks, if there is one.
    pub(super) fn next_message(&mut self) -> Option<CoordinatorMessage> {
        let number = self.messages + 1;
        let mut message = CoordinatorMessage::default();
        let refused = self.refused.len().min(REFUSALS_MAX);
        message.instructions.extend(self.refused.drain(..refused));
        let mut tensors_left = REQUESTS_MAX;
        if !self.ready.is_empty() && self.outstanding < self.rules.outstanding_max {
            self.directory.release(self.read_by_all());
        }
        while tensors_left > 0 && self.outstanding < self.rules.outstanding_max && !self.ready.is_empty() {
            let fused = self.fuse(tensors_left);
            tensors_left -= fused.len();
            let retired = &mut message.retired;
            let announce = |request| self.directory.announce(request, number, retired);
            let tensors: Vec<AnnouncedTensor> = fused.into_iter().map(announce).collect();
            message.instructions.push(Instruction::Run(tensors));
            self.outstanding += 1;
        }
        if self.ready.is_empty() && self.refused.is_empty() {
            message.instructions.extend(self.conclude(number));
        }
        if message.instructions.is_empty() {
            return None;
        }
        self.messages = number;
        Some(message)
    }

    /// The first tensor that is ready, and similar ones as far as they fit.
    fn fuse(&mut self, tensors_left: usize) -> Vec<Request> {
        let mut fused: Vec<Request> = Vec::new();
        let mut bytes = 0u64;
        let mut left = VecDeque::with_capacity(self.ready.len());
        for request in self.ready.drain(..) {
            let fits = fused.first().is_none_or(|first: &Request| {
                let alike = (first.signature.kind, first.signature.dtype)
                    == (request.signature.kind, request.signature.dtype);
                // The parts of a gathered or scattered buffer belong to ranks; several tensors would have to be
                // interleaved.
                alike
                    && !matches!(request.signature.kind, TensorOp::AllGather | TensorOp::ReduceScatter(_))
                    && bytes.saturating_add(request.signature.bytes()) <= self.rules.fusion_bytes
            });
            if fits && fused.len() < tensors_left {
                bytes = bytes.saturating_add(request.signature.bytes());
                fused.push(request);
            } else {
                left.push_back(request);
            }
        }
        self.ready = left;
        fused
    }

    /// The message that all ranks have joined or closed, which is sent when there is no other.
    fn conclude(&mut self, number: u64) -> Option<Instruction> {
        if self.has_ended {
            return None;
        }
        if self.ranks.iter().all(|status| status.has_closed) {
            self.has_ended = true;
            return Some(Instruction::End);
        }
        if !self.ranks.iter().all(|status| status.is_silent()) {
            return None;
        }
        let last = self.last_joined.take()?;
        for status in &mut self.ranks {
            // A rank that has joined reads this before it reports anything again.
            if std::mem::take(&mut status.has_joined) {
                status.seen = number;
            }
        }
        self.silent = self.ranks.iter().filter(|status| status.is_silent()).count();
        Some(Instruction::Joined(last))
    }

    /// The last message that all ranks have read. Joined and closed ranks do not count, because they name no slot
    /// before they have read all messages.
    fn read_by_all(&self) -> u64 {
        let speaking = self.ranks.iter().filter(|status| !status.is_silent());
        speaking.map(|status| status.seen).min().unwrap_or(self.messages)
    }
}
