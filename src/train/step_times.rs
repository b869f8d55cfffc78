//! Measures how long the parts of steps take.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::group::Group;

/// How long the parts of a rank's steps took. The three parts together are the whole duration of the steps.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct StepTimes {
    /// The number of steps.
    pub steps: u64,
    /// The time in seconds in which the rank computed: forward and backward passes, and the updates of the optimizer.
    pub compute_seconds: f64,
    /// The time in seconds in which the rank only waited for other ranks and computed nothing.
    pub exposed_communication_seconds: f64,
    /// The time in seconds in which the rank shuffled the samples and gathered the features of its batches.
    pub data_seconds: f64,
}

impl StepTimes {
    /// Returns the duration of the steps in seconds.
    pub fn seconds(&self) -> f64 {
        self.compute_seconds + self.exposed_communication_seconds + self.data_seconds
    }

    /// Returns the time in seconds in which the rank did not wait for other ranks.
    pub fn busy_seconds(&self) -> f64 {
        self.compute_seconds + self.data_seconds
    }

    /// Returns the times of the steps since an `earlier` measurement.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            steps: self.steps.saturating_sub(earlier.steps),
            compute_seconds: self.compute_seconds - earlier.compute_seconds,
            exposed_communication_seconds: self.exposed_communication_seconds
                - earlier.exposed_communication_seconds,
            data_seconds: self.data_seconds - earlier.data_seconds,
        }
    }

    /// Returns these times together with the times of other steps.
    #[must_use]
    pub(crate) fn plus(mut self, other: &Self) -> Self {
        self.add(other);
        self
    }

    /// Adds the times of further steps.
    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.compute_seconds += other.compute_seconds;
        self.exposed_communication_seconds += other.exposed_communication_seconds;
        self.data_seconds += other.data_seconds;
    }
}

/// Writes the mean times of a step, for example `step 1.95 ms (compute 1.20, communication 0.65, data 0.10)`.
impl fmt::Display for StepTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps.max(1) as f64;
        let mean = self.seconds() / steps;
        let (factor, unit, digits) = match mean {
            1.0.. => (1.0, "s", 2),
            1e-3.. => (1e3, "ms", 2),
            _ => (1e6, "us", 0),
        };
        let scale = |seconds: f64| format!("{:.digits$}", seconds / steps * factor);
        write!(
            f,
            "step {} {unit} (compute {}, communication {}, data {})",
            scale(self.seconds()),
            scale(self.compute_seconds),
            scale(self.exposed_communication_seconds),
            scale(self.data_seconds),
        )
    }
}

/// Measures the times of steps.
pub(crate) struct StepTimer {
    started: Instant,
    /// The value of `group.statistics().exposed` at the start of the measurement.
    exposed_at_start: Duration,
    /// The time since the start of the measurement in which this rank shuffled samples and gathered features of batches.
    pub(crate) data_time: Duration,
    /// The number of steps since the start of the measurement.
    steps: u64,
}

impl StepTimer {
    /// Begins a measurement.
    pub(crate) fn start(group: &Group) -> Self {
        Self {
            started: Instant::now(),
            exposed_at_start: group.statistics().exposed,
            data_time: Duration::ZERO,
            steps: 0,
        }
    }

    /// Counts a step.
    pub(crate) fn count_step(&mut self) {
        self.steps += 1;
    }

    /// Adds the time since `started` to the time for data.
    pub(crate) fn add_data_time(&mut self, started: Instant) {
        self.data_time += started.elapsed();
    }

    /// Adds the time since `started` to the time for data, except for the time in which this rank waited for other
    /// ranks. `exposed` is the value of `group.statistics().exposed` at the time `started`.
    pub(crate) fn add_exchange_time(&mut self, (started, exposed): (Instant, Duration), group: &Group) {
        let waited = group.statistics().exposed.saturating_sub(exposed);
        self.data_time += started.elapsed().saturating_sub(waited);
    }

    /// Returns the times since the start of the measurement.
    pub(crate) fn times_since_start(&self, group: &Group) -> StepTimes {
        let total = self.started.elapsed();
        let data = self.data_time.min(total);
        // The runtime only estimates the time of messages of at most 64 KiB, and of collectives of at most 4 KiB.
        // So `exposed` can be too large.
        let exposed = group.statistics().exposed.saturating_sub(self.exposed_at_start);
        let exposed = exposed.min(total.saturating_sub(data));
        StepTimes {
            steps: self.steps,
            compute_seconds: total.saturating_sub(data + exposed).as_secs_f64(),
            exposed_communication_seconds: exposed.as_secs_f64(),
            data_seconds: data.as_secs_f64(),
        }
    }
}

/// Measures the times of the steps of a rank that waits for other ranks only in certain calls.
pub(crate) struct PartTimer {
    /// The end of the previous part.
    last: Instant,
    times: StepTimes,
}

impl PartTimer {
    /// Begins a measurement.
    pub(crate) fn start() -> Self {
        Self { last: Instant::now(), times: StepTimes::default() }
    }

    /// Leaves out the time since the previous part.
    pub(crate) fn skip(&mut self) {
        self.last = Instant::now();
    }

    /// Ends a part in which the rank waited for other ranks.
    pub(crate) fn end_wait(&mut self) {
        self.times.exposed_communication_seconds += self.seconds_since_last();
    }

    /// Ends a part in which the rank computed, except for `data`, the time for shuffling and gathering samples.
    pub(crate) fn end_computation(&mut self, data: Duration) {
        let seconds = self.seconds_since_last();
        let data = data.as_secs_f64().min(seconds);
        self.times.data_seconds += data;
        self.times.compute_seconds += seconds - data;
    }

    /// Counts a step.
    pub(crate) fn count_step(&mut self) {
        self.times.steps += 1;
    }

    /// Returns the times since the last call.
    pub(crate) fn take_times(&mut self) -> StepTimes {
        std::mem::take(&mut self.times)
    }

    fn seconds_since_last(&mut self) -> f64 {
        let now = Instant::now();
        now.saturating_duration_since(std::mem::replace(&mut self.last, now)).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_depends_on_the_mean_time_of_a_step() {
        for (steps, compute, exposed, data, expected) in [
            (100, 0.12, 0.065, 0.01, "step 1.95 ms (compute 1.20, communication 0.65, data 0.10)"),
            (10, 0.0005, 0.0, 0.0002, "step 70 us (compute 50, communication 0, data 20)"),
            (2, 4.0, 2.0, 1.0, "step 3.50 s (compute 2.00, communication 1.00, data 0.50)"),
            (0, 0.0, 0.0, 0.0, "step 0 us (compute 0, communication 0, data 0)"),
        ] {
            let times = StepTimes {
                steps,
                compute_seconds: compute,
                exposed_communication_seconds: exposed,
                data_seconds: data,
            };
            assert_eq!(times.to_string(), expected);
        }
    }

    #[test]
    fn the_parts_together_are_the_whole_duration() {
        let group = Group::solo();
        let timer = StepTimer::start(&group);
        let mut timer =
            StepTimer { started: timer.started.checked_sub(Duration::from_secs(2)).unwrap(), ..timer };
        timer.add_data_time(Instant::now().checked_sub(Duration::from_secs(1)).unwrap());
        timer.count_step();
        let times = timer.times_since_start(&group);
        assert_eq!((times.steps, times.exposed_communication_seconds), (1, 0.0));
        assert!(
            times.data_seconds >= 1.0 && times.compute_seconds >= 0.5 && times.seconds() >= 2.0,
            "{times:?}"
        );
        // The data time of one minute is longer than the total time.
        timer.add_data_time(Instant::now().checked_sub(Duration::from_mins(1)).unwrap());
        let times = timer.times_since_start(&group);
        assert!(times.compute_seconds == 0.0 && times.seconds() < 60.0, "{times:?}");
    }
}
