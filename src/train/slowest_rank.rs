//! Finds the slowest rank: the rank for which the others wait. About once per second, the ranks exchange how long they computed
//! and gathered data since the last exchange. The exchange goes on while the next step computes.

use super::TrainError;
use super::measurements::{SlowestRank, SlownessCause};
use super::runtime::{PendingTotals, Runtime as _};
use super::step_times::StepTimes;
use crate::group::Group;
use crate::types::Rank;

/// The time in seconds between two exchanges. The number of steps between them follows from the mean duration of a step.
const EXCHANGE_INTERVAL_SECONDS: f64 = 1.0;
/// The maximum number of steps between two exchanges. The last interval may have had much shorter steps than the next one.
const STEPS_BETWEEN_MAX: u64 = 10_000;
/// A rank is the slowest if its busy time is at least this many times the mean of the other ranks.
const SLOWNESS_RATIO_MIN: f64 = 1.05;

/// Searches for the slowest rank. The ranks make the same calls after the same steps.
pub(crate) struct SlowestRankSearch {
    /// The exchange in progress.
    pending: Option<PendingTotals>,
    /// The times at the start of the last exchange.
    times_before: StepTimes,
    /// The number of steps until the next exchange. The same on all ranks.
    steps_left: u64,
    slowest: Option<SlowestRank>,
}

impl SlowestRankSearch {
    pub(crate) fn new() -> Self {
        Self { pending: None, times_before: StepTimes::default(), steps_left: 1, slowest: None }
    }

    /// Returns the slowest rank at the last exchange. Returns `None` if no rank was clearly slower than the others.
    pub(crate) fn slowest(&self) -> Option<SlowestRank> {
        self.slowest
    }

    /// Ends the exchange that the previous step began, or begins one if it is due. All ranks call this function after
    /// each step. `times` returns the times of this rank since the start of the run.
    pub(crate) fn continue_after_step(
        &mut self,
        group: &mut Group,
        times: impl FnOnce(&Group) -> StepTimes,
    ) -> Result<(), TrainError> {
        if let Some(pending) = self.pending.take() {
            let totals = pending.wait()?;
            // The totals have the same bits on all ranks, so all ranks begin the next exchange after the same step.
            self.steps_left = steps_until_next_exchange(&totals);
            self.slowest = find_slowest(&totals);
            return Ok(());
        }
        self.steps_left = self.steps_left.saturating_sub(1);
        if self.steps_left > 0 {
            return Ok(());
        }
        let times = times(group);
        let recent = times.since(&self.times_before);
        self.times_before = times;
        let steps = recent.steps.max(1) as f64;
        let own = [recent.compute_seconds, recent.data_seconds, recent.exposed_communication_seconds];
        let mut totals = vec![0.0; PARTS * group.size().as_usize()];
        let start = PARTS * group.rank().index();
        totals[start..start + PARTS].copy_from_slice(&own.map(|seconds| seconds / steps));
        self.pending = Some(group.start_sum_of_totals(totals)?);
        Ok(())
    }
}

/// The number of values of each rank in an exchange: its mean times of a step for computation, data and communication.
const PARTS: usize = 3;

fn steps_until_next_exchange(totals: &[f64]) -> u64 {
    let ranks = (totals.len() / PARTS).max(1) as f64;
    let step_seconds = totals.iter().sum::<f64>() / ranks;
    ((EXCHANGE_INTERVAL_SECONDS / step_seconds.max(1e-9)) as u64).clamp(1, STEPS_BETWEEN_MAX)
}

/// Returns the rank with the longest busy time, if it is clearly longer than the mean of the other ranks.
fn find_slowest(totals: &[f64]) -> Option<SlowestRank> {
    let (ranks, _) = totals.as_chunks::<PARTS>();
    let others = ranks.len().checked_sub(1).filter(|&others| others > 0)? as f64;
    let busy = |[compute, data, _]: &[f64; PARTS]| compute + data;
    let (index, slowest) = ranks.iter().enumerate().max_by(|a, b| busy(a.1).total_cmp(&busy(b.1)))?;
    let mean_of_others =
        |get: fn(&[f64; PARTS]) -> f64| (ranks.iter().map(get).sum::<f64>() - get(slowest)) / others;
    let (compute, data) = (mean_of_others(|parts| parts[0]), mean_of_others(|parts| parts[1]));
    if busy(slowest) <= SLOWNESS_RATIO_MIN * (compute + data) {
        return None;
    }
    let is_data = slowest[1] - data > slowest[0] - compute;
    Some(SlowestRank {
        rank: Rank::new(index as u32),
        cause: if is_data { SlownessCause::Data } else { SlownessCause::Compute },
        busy_seconds_per_step: busy(slowest),
        others_seconds_per_step: compute + data,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_waits_least_is_the_slowest() {
        for (totals, expected) in [
            (&[1.0, 0.25, 0.75, 1.75, 0.25, 0.0][..], Some((1, SlownessCause::Compute, 2.0, 1.25))),
            (&[1.0, 0.75, 0.0, 1.0, 0.25, 0.5, 1.0, 0.25, 0.5], Some((0, SlownessCause::Data, 1.75, 1.25))),
            (&[1.0, 0.25, 0.0, 1.03125, 0.25, 0.0], None),
            (&[0.0; 6], None),
            (&[1.0, 1.0, 1.0], None),
            (&[], None),
        ] {
            let found = find_slowest(totals);
            let found = found.map(|slowest| {
                let SlowestRank { rank, cause, busy_seconds_per_step, others_seconds_per_step } = slowest;
                (rank.get(), cause, busy_seconds_per_step, others_seconds_per_step)
            });
            assert_eq!(found, expected, "{totals:?}");
        }
    }

    #[test]
    fn exchanges_are_about_a_second_apart() {
        for (totals, steps) in [
            (&[0.125, 0.0, 0.125, 0.25, 0.0, 0.0][..], 4),
            (&[20.0, 0.0, 0.0, 20.0, 0.0, 0.0], 1),
            (&[1e-6, 0.0, 0.0], STEPS_BETWEEN_MAX),
            (&[f64::NAN, 0.0, 0.0], STEPS_BETWEEN_MAX),
        ] {
            assert_eq!(steps_until_next_exchange(totals), steps, "{totals:?}");
        }
    }
}
