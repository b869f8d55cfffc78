//! Decides when a run saves a checkpoint within an epoch.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use super::CheckpointSettings;

/// The schedule of the checkpoints within an epoch.
#[derive(Clone, Debug)]
pub(crate) struct SaveSchedule {
    /// A save is due when the number of steps reaches a multiple of this number.
    steps: Option<NonZeroU64>,
    /// A save is due when this time has passed since the last save.
    interval: Option<Duration>,
    /// The number of steps and the time at which the last save began. Before the first save: the start of the run.
    last_save: (u64, Instant),
}

impl SaveSchedule {
    /// Creates the schedule of a run that starts after `steps_total` steps.
    pub(crate) fn new(settings: &CheckpointSettings, steps_total: u64, now: Instant) -> Self {
        Self { steps: settings.steps, interval: settings.interval, last_save: (steps_total, now) }
    }

    /// Returns whether a save is due when the run has taken `steps_total` steps.
    pub(crate) fn is_due(&self, steps_total: u64, now: Instant) -> bool {
        // If a save must wait for the previous save, the new save stays due until it begins.
        let by_steps = self.steps.is_some_and(|every| steps_total / every > self.last_save.0 / every);
        by_steps || self.is_interval_over(now)
    }

    /// Returns whether a save is due because of the time since the last save.
    pub(crate) fn is_interval_over(&self, now: Instant) -> bool {
        self.interval.is_some_and(|every| now.saturating_duration_since(self.last_save.1) >= every)
    }

    /// Records that a save began.
    pub(crate) fn record_save_start(&mut self, steps_total: u64, now: Instant) {
        self.last_save = (steps_total, now);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExistingCheckpoint;
    use super::*;

    #[test]
    fn saves_are_due_at_multiples_of_the_steps_and_after_the_interval() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (steps, interval, first, saves, expected) in [
            (Some(10), None, 0, &[][..], (10, 0)),
            (Some(10), None, 15, &[], (20, 0)),
            (Some(10), None, 0, &[10, 13], (20, 0)),
            (None, Some(60), 0, &[], (0, 60)),
            (Some(10), Some(60), 7, &[], (10, 60)),
            (None, None, 0, &[], (u64::MAX, u64::MAX)),
        ] {
            let settings = CheckpointSettings {
                steps: steps.and_then(NonZeroU64::new),
                interval: interval.map(Duration::from_secs),
                ..CheckpointSettings::new("", ExistingCheckpoint::Refuse)
            };
            let mut schedule = SaveSchedule::new(&settings, first, start);
            for &save in saves {
                schedule.record_save_start(save, start);
            }
            let now = saves.last().copied().unwrap_or(first);
            if steps.is_some() {
                assert!(!schedule.is_due(expected.0 - 1, start) && schedule.is_due(expected.0, start));
                assert!(schedule.is_due(expected.0 + 5, start), "a save that waits stays due");
            }
            if interval.is_some() {
                assert!(!schedule.is_due(now, at(expected.1 - 1)) && schedule.is_due(now, at(expected.1)));
            }
            if steps.is_none() && interval.is_none() {
                assert!(!schedule.is_due(u64::MAX, at(1 << 30)));
            }
        }
    }
}
