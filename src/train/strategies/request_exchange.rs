//! Exchanges requests between ranks that do not exchange gradients in each step: to stop, or to save a checkpoint.
//!
//! An asynchronous sum of the requests of all ranks is always in progress. About every
//! [`EXCHANGE_INTERVAL_SECONDS`], the ranks wait for this sum and start the next sum. So all ranks learn of a request
//! after the same step, at most about two intervals later. The sums also keep the ranks within two intervals of each
//! other. Without these sums, a fast rank could be so far ahead of a slow rank that the next operation of the fast rank
//! times out.

use std::time::Instant;

use crate::group::Error;
use crate::train::runtime::{PendingTotals, Runtime};
use crate::types::WorldSize;

/// The intended time between two exchanges, in seconds.
const EXCHANGE_INTERVAL_SECONDS: f64 = 0.25;
/// The number of steps of an interval is at most this factor times the number of steps of the previous interval.
const INTERVAL_GROWTH_FACTOR_MAX: u64 = 4;

/// What a rank asks of all ranks, or what any rank has asked of all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RankRequests {
    /// To stop, because of a stop signal.
    pub(crate) stop: bool,
    /// To save a checkpoint within the epoch.
    pub(crate) save: bool,
}

/// This rank's part of the exchange of requests.
pub(crate) struct RequestExchange {
    /// The sum that is in progress.
    pending: Option<PendingTotals>,
    /// The number of steps of the current interval.
    steps: u64,
    /// The number of steps until the end of the current interval.
    steps_left: u64,
    /// The start of the current interval.
    start: Instant,
}

impl RequestExchange {
    pub(crate) fn new() -> Self {
        Self { pending: None, steps: 1, steps_left: 1, start: Instant::now() }
    }

    /// Call this function after each step. `own` has the requests of this rank. Returns the requests of all ranks after
    /// the same step on all ranks, at the second exchange after a rank has begun to request something.
    pub(crate) fn after_step(
        &mut self,
        runtime: &mut dyn Runtime,
        own: RankRequests,
    ) -> Result<RankRequests, Error> {
        let (_, size) = runtime.rank_and_size();
        if size == WorldSize::ONE {
            return Ok(own);
        }
        self.steps_left -= 1;
        if self.steps_left > 0 {
            return Ok(RankRequests::default());
        }
        let seconds_per_step = self.start.elapsed().as_secs_f64() / self.steps as f64;
        let mut requests = RankRequests::default();
        if let Some(pending) = self.pending.take() {
            let totals = pending.wait()?;
            requests = RankRequests { stop: totals[0] > 0.0, save: totals[1] > 0.0 };
            self.steps = steps_of_next_interval(self.steps, totals[2] / f64::from(size.get()));
        }
        // A save that all ranks now know of is not requested again.
        let save = own.save && !requests.save;
        let flags = [own.stop, save].map(|flag| f64::from(u8::from(flag)));
        self.pending = Some(runtime.start_sum_of_totals(vec![flags[0], flags[1], seconds_per_step])?);
        self.steps_left = self.steps;
        self.start = Instant::now();
        Ok(requests)
    }
}

/// Returns the number of steps of the next interval. `seconds_per_step` is the mean over all ranks, so all ranks get
/// the same number.
fn steps_of_next_interval(steps: u64, seconds_per_step: f64) -> u64 {
    let wanted = EXCHANGE_INTERVAL_SECONDS / seconds_per_step;
    // `as` converts a number that is too large to `u64::MAX`.
    (wanted as u64).clamp(1, steps.saturating_mul(INTERVAL_GROWTH_FACTOR_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_grow_slowly_and_have_at_least_one_step() {
        for (steps, seconds, expected) in [
            (1, 0.01, 4),
            (16, 0.01, 25),
            (100, 0.01, 25),
            (100, 5.0, 1),
            (5, 0.0, 20),
            (u64::MAX, 0.0, u64::MAX),
        ] {
            assert_eq!(steps_of_next_interval(steps, seconds), expected, "{steps} {seconds}");
        }
    }
}
