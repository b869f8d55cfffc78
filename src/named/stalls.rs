//! Detects tensors that wait for missing ranks for too long.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::coordinator::{Coordinator, Timestamp};
use crate::types::Rank;

/// The largest number of ranks that a message names.
const NAMED_MAX: usize = 8;

/// A tensor, a join or a close that some ranks wait for and others have not submitted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stall {
    /// The tensor's name; `None` if ranks have joined or closed and wait for the others to do the same.
    pub tensor: Option<String>,
    /// The ranks that are missing, with their numbers in the job.
    pub missing: Vec<Rank>,
    /// How long it had waited when the stall was found.
    pub waited: Duration,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = text_of(self.missing.iter().copied());
        let waited = self.waited;
        match &self.tensor {
            Some(name) => write!(f, "tensor `{name}` has waited {waited:.1?} for {who} to submit it"),
            None => write!(f, "ranks that have joined or closed have waited {waited:.1?} for {who}"),
        }
    }
}

/// Lists ranks for messages: `rank 3`, or `ranks 1, 2 and 3`.
pub(super) fn text_of(ranks: impl ExactSizeIterator<Item = Rank>) -> String {
    let count = ranks.len();
    let mut words: Vec<String> = ranks.take(NAMED_MAX).map(|rank| rank.to_string()).collect();
    if count > words.len() {
        words.push(format!("{} more", count - words.len()));
    }
    match words.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, others)) => format!("ranks {} and {last}", others.join(", ")),
        None => "no rank".into(),
    }
}

/// The coordinator's limits for stalls, and the reported stalls.
pub(super) struct StallWatch {
    warning: Duration,
    abort: Option<Duration>,
    /// The last time that a rank sent a report or an operation ended.
    activity: Timestamp,
    /// The reported stalls, by the tensor's name.
    reported: BTreeMap<Option<String>, Stall>,
}

/// The result of a check of the table.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct StallReport {
    /// The stalls found since the last check.
    pub(super) stalls: Vec<Stall>,
    /// The reason to end the job.
    pub(super) abort: Option<String>,
}

impl StallWatch {
    pub(super) fn new(warning: Duration, abort: Option<Duration>) -> Self {
        Self { warning, abort, activity: Timestamp::ZERO, reported: BTreeMap::new() }
    }

    pub(super) fn touch(&mut self, now: Timestamp) {
        self.activity = now;
        self.reported.remove(&None);
    }

    pub(super) fn forget(&mut self, name: &str) {
        if !self.reported.is_empty() {
            self.reported.remove(&Some(name.to_owned()));
        }
    }

    /// The interval of the checks: a stall is found at most a quarter of a limit late.
    pub(super) fn interval(&self) -> Duration {
        let shortest = self.abort.unwrap_or(self.warning).min(self.warning);
        (shortest / 4).max(Duration::from_millis(1))
    }
}

impl Coordinator {
    /// Checks for stalls.
    pub(super) fn check(&mut self, now: Timestamp) -> StallReport {
        let mut report = StallReport::default();
        let mut waiting: Vec<(Option<&str>, Timestamp)> =
            self.table.iter().map(|(name, entry)| (Some(name.as_str()), entry.since)).collect();
        if self.ranks.iter().any(|status| status.is_silent()) {
            waiting.push((None, self.watch.activity));
        }
        let mut fresh = Vec::new();
        for (name, since) in waiting {
            let waited = now.saturating_sub(since);
            let is_reported = || self.watch.reported.contains_key(&name.map(str::to_owned));
            let is_new = waited >= self.watch.warning && !is_reported();
            let is_over = self.watch.abort.is_some_and(|abort| waited >= abort);
            if !is_new && !is_over {
                continue;
            }
            let missing = self.missing(name);
            if missing.is_empty() {
                continue;
            }
            let stall = Stall { tensor: name.map(str::to_owned), missing, waited };
            if is_over && report.abort.is_none() {
                report.abort = Some(stall.to_string());
            }
            if is_new {
                fresh.push(stall);
            }
        }
        for stall in &fresh {
            self.watch.reported.insert(stall.tensor.clone(), stall.clone());
        }
        report.stalls = fresh;
        report
    }

    /// The stalls that have been found and still wait.
    pub(super) fn stalled(&self) -> Vec<Stall> {
        self.watch.reported.values().cloned().collect()
    }

    fn missing(&self, name: Option<&str>) -> Vec<Rank> {
        let entry = name.and_then(|name| self.table.get(name));
        let ranks = self.ranks.iter().zip(self.members.iter()).enumerate();
        let missing = ranks.filter(|(index, (status, _))| {
            let has_asked = entry.is_some_and(|entry| entry.asked.contains_key(&Rank::new(*index as u32)));
            !status.is_silent() && !has_asked
        });
        missing.map(|(_, (_, &member))| member).collect()
    }
}
