//! The coordinator side of the negotiation, in which the ranks agree on the tensors of the next operations. Rank 0 of
//! the group runs the coordinator. The coordinator records which ranks have submitted which tensors, and decides
//! which tensors run. The coordinator uses no clock and no IO: the time since the start of the coordinator is an
//! argument.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::cache::CoordinatorCache;
use super::client::UNFINISHED_TENSORS_MAX;
use super::error::Violation;
use super::message::{
    AnnouncedTensor, CoordinatorMessage, Instruction, REFUSALS_MAX, REQUESTS_MAX, RankReport, RefusalKind,
    Request, Signature, TensorOp,
};
use super::stalls::StallWatch;
use crate::types::{Rank, ReduceOp};

/// The limits of the coordinator.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoordinatorLimits {
    /// The largest total size in bytes of the tensors that are fused into one operation.
    pub(super) fusion_bytes: u64,
    /// The number of slots of the response cache.
    pub(super) cache_capacity: u16,
    /// The largest number of operations that run at the same time. While this number of operations runs, further
    /// tensors wait, and can be fused into one operation.
    pub(super) running_operations_max: usize,
}

/// The state machine that decides when each tensor runs.
pub(super) struct Coordinator {
    limits: CoordinatorLimits,
    /// For each rank of the group, the number of this rank in the job.
    pub(super) job_ranks: Arc<[Rank]>,
    /// The state of each rank of the group.
    pub(super) rank_states: Vec<NegotiatingRank>,
    /// The number of ranks that have called `join` or `close`.
    inactive_count: usize,
    /// The tensors that wait for a decision ([`Self::run_or_refuse_tensor`]), by name. At least one rank has submitted
    /// each of these tensors.
    pub(super) pending: BTreeMap<String, PendingTensor>,
    /// The tensors that can run.
    ready: VecDeque<Request>,
    /// The refusals to send. When a rank receives a refusal, the handle of the tensor returns an error.
    refused: VecDeque<Instruction>,
    cache: CoordinatorCache,
    /// The number of messages that the coordinator has sent.
    messages_sent: u64,
    /// The number of running operations.
    running_operations: usize,
    /// The rank that joined last; `None` if no rank has joined since the last [`Instruction::Joined`].
    last_joined: Option<Rank>,
    /// Whether the coordinator has sent [`Instruction::End`].
    has_ended: bool,
    pub(super) stall_watch: StallWatch,
}

/// The state of one rank of the group, as the coordinator knows it from the reports of the rank.
#[derive(Clone, Copy, Default)]
pub(super) struct NegotiatingRank {
    /// How many messages of the coordinator the rank has read.
    messages_read: u64,
    pub(super) has_joined: bool,
    pub(super) has_closed: bool,
    /// The number of pending tensors that the rank has submitted.
    pending_count: usize,
}

impl NegotiatingRank {
    /// Returns whether the rank submits no tensors at present, because it has joined (has no more data) or closed.
    pub(super) fn is_inactive(self) -> bool {
        self.has_joined || self.has_closed
    }
}

/// A tensor that at least one rank has submitted.
pub(super) struct PendingTensor {
    pub(super) submissions: BTreeMap<Rank, Signature>,
    pub(super) first_submission_time: Duration,
}

impl Coordinator {
    /// Creates a coordinator. `job_ranks` contains, for each rank of the group, the number of this rank in the job.
    /// Error messages show ranks by their numbers in the job.
    pub(super) fn new(limits: CoordinatorLimits, job_ranks: Arc<[Rank]>, stall_watch: StallWatch) -> Self {
        Self {
            limits,
            rank_states: vec![NegotiatingRank::default(); job_ranks.len()],
            inactive_count: 0,
            job_ranks,
            pending: BTreeMap::new(),
            ready: VecDeque::new(),
            refused: VecDeque::new(),
            cache: CoordinatorCache::new(limits.cache_capacity),
            messages_sent: 0,
            running_operations: 0,
            last_joined: None,
            has_ended: false,
            stall_watch,
        }
    }

    /// Returns whether a rank other than rank 0 may send further reports.
    pub(super) fn expects_reports(&self) -> bool {
        self.rank_states.iter().skip(1).any(|status| !status.has_closed)
    }

    /// Processes a report of a rank.
    pub(super) fn handle_report(
        &mut self,
        now: Duration,
        from: Rank,
        report: RankReport,
    ) -> Result<(), Violation> {
        let messages_sent = self.messages_sent;
        let Some(status) = self.rank_states.get_mut(from.index()) else {
            return Err(Violation("it is not a rank of the group".into()));
        };
        if status.has_closed {
            return Err(Violation("it sent a report after it had closed".into()));
        }
        if status.has_joined && !(report.slots.is_empty() && report.requests.is_empty() && !report.joins) {
            return Err(Violation("it submitted tensors after it had joined".into()));
        }
        if report.messages_read < status.messages_read || report.messages_read > messages_sent {
            let (before, read) = (status.messages_read, report.messages_read);
            return Err(Violation(format!(
                "it reported that it has read {read} messages, which is not from {before} to {messages_sent}"
            )));
        }
        status.messages_read = report.messages_read;
        self.stall_watch.record_activity(now);
        for slot in report.slots {
            let request = self.cache.request_in_slot(slot).cloned();
            let request =
                request.ok_or_else(|| Violation(format!("it named slot {slot}, which is empty")))?;
            self.record_submission(now, from, request)?;
        }
        for request in report.requests {
            self.record_submission(now, from, request)?;
        }
        let status = &mut self.rank_states[from.index()];
        status.has_joined |= report.joins;
        status.has_closed |= report.closes;
        if report.joins {
            self.last_joined = Some(from);
        }
        if report.joins || report.closes {
            self.inactive_count = self.rank_states.iter().filter(|status| status.is_inactive()).count();
            let names: Vec<String> = self.pending.keys().cloned().collect();
            for name in names {
                self.run_or_refuse_tensor(&name);
            }
        }
        Ok(())
    }

    /// Records that a rank has submitted a tensor.
    fn record_submission(&mut self, now: Duration, from: Rank, request: Request) -> Result<(), Violation> {
        let status = &mut self.rank_states[from.index()];
        status.pending_count += 1;
        if status.pending_count > UNFINISHED_TENSORS_MAX {
            return Err(Violation(format!("it has more than {UNFINISHED_TENSORS_MAX} tensors in flight")));
        }
        let Request { name, signature } = request;
        let new_tensor = || PendingTensor { submissions: BTreeMap::new(), first_submission_time: now };
        let entry = self.pending.entry(name.clone()).or_insert_with(new_tensor);
        if entry.submissions.insert(from, signature).is_some() {
            return Err(Violation(format!("it submitted `{name}` twice")));
        }
        self.run_or_refuse_tensor(&name);
        Ok(())
    }

    /// Decides whether a tensor runs or is refused. If a rank has closed without submitting the tensor, refuses the
    /// tensor at once. If no such rank exists, does nothing until each rank has submitted the tensor or has joined.
    fn run_or_refuse_tensor(&mut self, name: &str) {
        let Some(entry) = self.pending.get(name) else { return };
        let (mut joined, mut closed, mut is_rank_missing) = (Vec::new(), Vec::new(), false);
        if entry.submissions.len() < self.rank_states.len() {
            if self.inactive_count == 0 {
                return;
            }
            for (index, status) in self.rank_states.iter().enumerate() {
                let rank = Rank::new(index as u32);
                match status {
                    _ if entry.submissions.contains_key(&rank) => {}
                    NegotiatingRank { has_closed: true, .. } => closed.push(rank),
                    NegotiatingRank { has_joined: true, .. } => joined.push(rank),
                    _ => is_rank_missing = true,
                }
            }
        }
        if is_rank_missing && closed.is_empty() {
            return;
        }
        let Some(entry) = self.remove_pending(name) else { return };
        let Some(&signature) = entry.submissions.values().next() else { return };
        let allows_zeros = matches!(
            signature.kind,
            TensorOp::AllReduce(ReduceOp::Sum | ReduceOp::Average)
                | TensorOp::ReduceScatter(ReduceOp::Sum | ReduceOp::Average)
        );
        let (refusal, reason) = if !closed.is_empty() {
            (
                RefusalKind::RankClosed,
                format!("{} closed without submitting it", self.describe_ranks(&closed)),
            )
        } else if entry.submissions.values().any(|other| *other != signature) {
            (RefusalKind::Disagreement, self.describe_disagreement(&entry))
        } else if !joined.is_empty() && !allows_zeros {
            let who = self.describe_ranks(&joined);
            let reason = format!(
                "it is {signature}, and {who} joined; a rank that has joined contributes only to sums and averages"
            );
            (RefusalKind::NeedsJoinedRanks, reason)
        } else {
            return self.ready.push_back(Request { name: name.to_owned(), signature });
        };
        self.refused.push_back(Instruction::Refuse { name: name.to_owned(), refusal, reason });
    }

    /// Removes a tensor from the pending tensors. Returns `None` if the tensor is not pending.
    fn remove_pending(&mut self, name: &str) -> Option<PendingTensor> {
        let entry = self.pending.remove(name)?;
        self.stall_watch.forget_tensor(name);
        for rank in entry.submissions.keys() {
            self.rank_states[rank.index()].pending_count -= 1;
        }
        Some(entry)
    }

    /// Returns a text that lists each submitted signature, and the ranks that have submitted it.
    fn describe_disagreement(&self, entry: &PendingTensor) -> String {
        let mut by_signature: BTreeMap<Signature, Vec<Rank>> = BTreeMap::new();
        for (&rank, &signature) in &entry.submissions {
            by_signature.entry(signature).or_default().push(rank);
        }
        let mut parts: Vec<_> = by_signature.into_iter().collect();
        parts.sort_by_key(|(_, ranks)| ranks[0]);
        let text = |(signature, ranks): &(Signature, Vec<Rank>)| {
            format!("{}: {signature}", self.describe_ranks(ranks))
        };
        parts.iter().map(text).collect::<Vec<_>>().join("; ")
    }

    /// Formats ranks of the group as text, for example `ranks 1, 2 and 3`. The text contains the ranks' numbers in
    /// the job.
    pub(super) fn describe_ranks(&self, ranks: &[Rank]) -> String {
        super::stalls::describe_ranks(ranks.iter().map(|rank| self.job_ranks[rank.index()]))
    }

    /// Records that an operation has ended on rank 0. The coordinator can then start another operation.
    pub(super) fn record_completion(&mut self, now: Duration) {
        self.running_operations = self.running_operations.saturating_sub(1);
        self.stall_watch.record_activity(now);
    }

    /// Returns the next message to all ranks, if there is one.
    pub(super) fn next_message(&mut self) -> Option<CoordinatorMessage> {
        let message_number = self.messages_sent + 1;
        let mut message = CoordinatorMessage::default();
        let refusal_count = self.refused.len().min(REFUSALS_MAX);
        message.instructions.extend(self.refused.drain(..refusal_count));
        let mut tensors_left = REQUESTS_MAX;
        if !self.ready.is_empty() && self.running_operations < self.limits.running_operations_max {
            self.cache.free_retired_slots(self.last_message_read_by_all());
        }
        while tensors_left > 0
            && self.running_operations < self.limits.running_operations_max
            && !self.ready.is_empty()
        {
            let fused = self.take_fusable_tensors(tensors_left);
            tensors_left -= fused.len();
            let retired = &mut message.retired;
            let announce = |request| self.cache.announce(request, message_number, retired);
            let tensors: Vec<AnnouncedTensor> = fused.into_iter().map(announce).collect();
            message.instructions.push(Instruction::Run(tensors));
            self.running_operations += 1;
        }
        if self.ready.is_empty() && self.refused.is_empty() {
            message.instructions.extend(self.take_join_or_end_instruction(message_number));
        }
        if message.instructions.is_empty() {
            return None;
        }
        self.messages_sent = message_number;
        Some(message)
    }

    /// Takes the tensors of the next operation: the first ready tensor, and all ready tensors that can be fused with
    /// the first ready tensor within the limits.
    fn take_fusable_tensors(&mut self, tensors_left: usize) -> Vec<Request> {
        let mut fused: Vec<Request> = Vec::new();
        let mut bytes = 0u64;
        let mut not_fused = VecDeque::with_capacity(self.ready.len());
        for request in self.ready.drain(..) {
            let fits = fused.first().is_none_or(|first: &Request| {
                let is_same_kind = (first.signature.kind, first.signature.dtype)
                    == (request.signature.kind, request.signature.dtype);
                // The buffer of an all-gather or reduce-scatter has one part for each rank, so a fused operation would
                // have to interleave the parts of several tensors.
                is_same_kind
                    && !matches!(request.signature.kind, TensorOp::AllGather | TensorOp::ReduceScatter(_))
                    && bytes.saturating_add(request.signature.bytes()) <= self.limits.fusion_bytes
            });
            if fits && fused.len() < tensors_left {
                bytes = bytes.saturating_add(request.signature.bytes());
                fused.push(request);
            } else {
                not_fused.push_back(request);
            }
        }
        self.ready = not_fused;
        fused
    }

    /// Returns the instruction to send after all other instructions: `End` if all ranks have closed, and `Joined` if all
    /// ranks have joined or closed. Returns `None` if a rank has neither joined nor closed.
    fn take_join_or_end_instruction(&mut self, message_number: u64) -> Option<Instruction> {
        if self.has_ended {
            return None;
        }
        if self.rank_states.iter().all(|status| status.has_closed) {
            self.has_ended = true;
            return Some(Instruction::End);
        }
        if !self.rank_states.iter().all(|status| status.is_inactive()) {
            return None;
        }
        let last_joined = self.last_joined.take()?;
        for status in &mut self.rank_states {
            // A rank that has joined reads `Joined` before it sends another report, so count `Joined` as read.
            if std::mem::take(&mut status.has_joined) {
                status.messages_read = message_number;
            }
        }
        self.inactive_count = self.rank_states.iter().filter(|status| status.is_inactive()).count();
        Some(Instruction::Joined(last_joined))
    }

    /// Returns the number of the last message that all ranks have read. Ignores ranks that have joined or closed: these
    /// ranks read all messages before they use a slot again.
    fn last_message_read_by_all(&self) -> u64 {
        let active = self.rank_states.iter().filter(|status| !status.is_inactive());
        active.map(|status| status.messages_read).min().unwrap_or(self.messages_sent)
    }
}
