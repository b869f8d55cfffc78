//! What a rank has measured since the run began, for observers.

use serde::{Deserialize, Serialize};

use super::step_times::{StepTimer, StepTimes};
use crate::group::{Group, LinkBytes, Statistics};
use crate::types::Rank;

/// What this rank has measured since the process began to train. Each function takes about a microsecond, so call them only
/// when you need the values.
pub struct RankMeasurements<'a> {
    pub(crate) group: &'a Group,
    /// The steps since the last epoch record, and the times of all steps before.
    pub(crate) timer: (&'a StepTimer, &'a StepTimes),
    pub(crate) slowest: Option<SlowestRank>,
}

impl RankMeasurements<'_> {
    /// Returns how long the parts of this rank's steps took. The steps before a resumption do not count.
    pub fn step_times(&self) -> StepTimes {
        self.timer.0.times_since_start(self.group).plus(self.timer.1)
    }

    /// Returns the statistics of this rank's operations.
    pub fn statistics(&self) -> Statistics {
        self.group.statistics()
    }

    /// Returns the bytes that each link of this rank has carried.
    pub fn link_bytes(&self) -> Vec<LinkBytes> {
        self.group.link_bytes()
    }

    /// Returns the slowest rank of about the last second. Returns `None` if no rank is clearly slower than the others, and if
    /// the run does not exchange the times of steps
    /// ([`Config::exchange_step_times`](super::Config::exchange_step_times)).
    pub fn slowest(&self) -> Option<SlowestRank> {
        self.slowest
    }
}

/// The rank for which the other ranks wait.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SlowestRank {
    /// The rank.
    pub rank: Rank,
    /// The part of a step that takes longer than on the other ranks.
    pub cause: SlownessCause,
    /// The mean time in seconds of this rank's steps in which it did not wait for other ranks.
    pub busy_seconds_per_step: f64,
    /// The mean of the same time over all other ranks, in seconds.
    pub others_seconds_per_step: f64,
}

/// The part of a step that makes a rank slower than the other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SlownessCause {
    /// Forward and backward passes, and the updates of the optimizer.
    Compute,
    /// Shuffling the samples, and gathering the features of batches.
    Data,
}

impl std::fmt::Display for SlownessCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Compute => "compute",
            Self::Data => "data",
        })
    }
}
