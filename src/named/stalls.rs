//! Detects stalls: tensors that some ranks have submitted, and that other ranks have not submitted for a long time.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::coordinator::Coordinator;
use crate::types::Rank;

/// The largest number of ranks that a text lists. For more ranks, the text says `and N more`.
const LISTED_RANKS_MAX: usize = 8;

/// A wait for ranks that have not submitted a tensor, or have not joined or closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stall {
    /// The name of the tensor, or `None` for a join or close.
    pub tensor: Option<String>,
    /// The ranks that have not submitted the tensor, or have not joined or closed. These are ranks of the job, not of
    /// the group.
    pub missing: Vec<Rank>,
    /// How long the tensor, join or close had waited when the stall was detected.
    pub waited: Duration,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = describe_ranks(self.missing.iter().copied());
        let waited = self.waited;
        match &self.tensor {
            Some(name) => write!(f, "tensor `{name}` has waited {waited:.1?} for {who} to submit it"),
            None => write!(f, "ranks that have joined or closed have waited {waited:.1?} for {who}"),
        }
    }
}

/// Returns a list of ranks for messages: `rank 3`, or `ranks 1, 2 and 3`.
pub(super) fn describe_ranks(ranks: impl ExactSizeIterator<Item = Rank>) -> String {
    let count = ranks.len();
    let mut words: Vec<String> = ranks.take(LISTED_RANKS_MAX).map(|rank| rank.to_string()).collect();
    if count > words.len() {
        words.push(format!("{} more", count - words.len()));
    }
    match words.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, others)) => format!("ranks {} and {last}", others.join(", ")),
        None => "no rank".into(),
    }
}

/// The time limits for stalls, and the reported stalls.
pub(super) struct StallWatch {
    /// How long a tensor, join or close waits until it is reported as a stall.
    warn_after: Duration,
    /// How long a tensor, join or close waits until the job ends; `None` if stalls never end the job.
    abort_after: Option<Duration>,
    /// The time of the last activity: a report of a rank, or the end of an operation.
    last_activity: Duration,
    /// The reported stalls that have not ended. The key is the name of the tensor, or `None` for a join or close.
    reported: BTreeMap<Option<String>, Stall>,
}

/// The result of a check for stalls.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct StallReport {
    /// The stalls that are new since the last check.
    pub(super) stalls: Vec<Stall>,
    /// The reason to end the job, if there is one.
    pub(super) abort_reason: Option<String>,
}

impl StallWatch {
    pub(super) fn new(warn_after: Duration, abort_after: Option<Duration>) -> Self {
        Self { warn_after, abort_after, last_activity: Duration::ZERO, reported: BTreeMap::new() }
    }

    /// Records that a rank has sent a report or an operation has ended.
    pub(super) fn record_activity(&mut self, now: Duration) {
        self.last_activity = now;
        self.reported.remove(&None);
    }

    /// Removes the tensor `name` from the reported stalls, because the tensor no longer waits.
    pub(super) fn forget_tensor(&mut self, name: &str) {
        if !self.reported.is_empty() {
            self.reported.remove(&Some(name.to_owned()));
        }
    }

    /// Returns the interval between two checks for stalls: a quarter of `warn_after` or `abort_after`, whichever is
    /// shorter.
    pub(super) fn check_interval(&self) -> Duration {
        let limit_min = self.abort_after.unwrap_or(self.warn_after).min(self.warn_after);
        (limit_min / 4).max(Duration::from_millis(1))
    }
}

impl Coordinator {
    /// Returns the new stalls, and the reason to end the job if a stall has lasted too long.
    pub(super) fn check_for_stalls(&mut self, now: Duration) -> StallReport {
        let mut report = StallReport::default();
        let mut waiting: Vec<(Option<&str>, Duration)> = self
            .pending
            .iter()
            .map(|(name, entry)| (Some(name.as_str()), entry.first_submission_time))
            .collect();
        if self.rank_states.iter().any(|status| status.is_inactive()) {
            waiting.push((None, self.stall_watch.last_activity));
        }
        let mut new_stalls = Vec::new();
        for (name, since) in waiting {
            let waited = now.saturating_sub(since);
            let is_reported = || self.stall_watch.reported.contains_key(&name.map(str::to_owned));
            let is_new = waited >= self.stall_watch.warn_after && !is_reported();
            let is_too_long = self.stall_watch.abort_after.is_some_and(|limit| waited >= limit);
            if !is_new && !is_too_long {
                continue;
            }
            let missing = self.missing_ranks(name);
            if missing.is_empty() {
                continue;
            }
            let stall = Stall { tensor: name.map(str::to_owned), missing, waited };
            if is_too_long && report.abort_reason.is_none() {
                report.abort_reason = Some(stall.to_string());
            }
            if is_new {
                new_stalls.push(stall);
            }
        }
        for stall in &new_stalls {
            self.stall_watch.reported.insert(stall.tensor.clone(), stall.clone());
        }
        report.stalls = new_stalls;
        report
    }

    /// Returns the reported stalls that have not ended.
    pub(super) fn reported_stalls(&self) -> Vec<Stall> {
        self.stall_watch.reported.values().cloned().collect()
    }

    /// Returns the ranks that must still submit the tensor `name`: ranks that have not submitted the tensor, and have
    /// neither joined nor closed. If `name` is `None`, returns all ranks that have neither joined nor closed.
    fn missing_ranks(&self, name: Option<&str>) -> Vec<Rank> {
        let entry = name.and_then(|name| self.pending.get(name));
        let ranks = self.rank_states.iter().zip(self.job_ranks.iter()).enumerate();
        let missing = ranks.filter(|(index, (status, _))| {
            let rank = Rank::new(*index as u32);
            let has_submitted = entry.is_some_and(|entry| entry.submissions.contains_key(&rank));
            !status.is_inactive() && !has_submitted
        });
        missing.map(|(_, (_, &job_rank))| job_rank).collect()
    }
}
