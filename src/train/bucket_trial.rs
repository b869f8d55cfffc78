//! `--bucket-bytes auto`: chooses the sizes of buckets by measurement.
//!
//! After the first steps of a run, a trial takes some steps with each of a few divisions of the gradients, and measures whole
//! steps: the backward pass, the codec, the link and the optimizer. These are ordinary steps of the run. Then the ranks compare
//! their times, and use the fastest division; one that is hardly faster than the default, or than a coarser one, is not chosen.
//!
//! All ranks must divide the gradients in the same way in the same step. So all decisions depend only on the number of steps
//! and on numbers that are the same on all ranks: the largest time of any rank. The trial never reads a clock.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::bucket_ranges::BucketSizes;
use crate::types::counted;

/// The first steps of a process do not count, because they allocate memory and fill caches.
const WARMUP_STEPS: u64 = 3;

/// The number of times that a trial goes through all sizes: from the first to the last, and back, so that a slow change of the
/// speed has the same effect on all sizes.
const ROUNDS: usize = 2;

/// The steps with each size in each round. The first one allocates buffers, so its time does not count.
const STEPS: usize = 5;

/// Other sizes must take at most this part of the time of the best earlier sizes. Smaller differences are noise.
const WORTHWHILE: f64 = 0.95;

/// The measurements of one run. It is the same on all ranks, except for the times before the comparison.
#[derive(Debug)]
pub(crate) struct BucketTrial {
    /// The default, and then other sizes from coarse to fine.
    candidates: Vec<TriedSizes>,
    /// The first step of the run, counted from 0, that can belong to the trial.
    first_step: u64,
    phase: TrialPhase,
}

/// The sizes of a division that a trial measures.
#[derive(Clone, Debug)]
struct TriedSizes {
    sizes: BucketSizes,
    bucket_count: usize,
    /// The times of steps on this rank, in seconds.
    times: Vec<f64>,
    /// The time of a step on the slowest rank.
    seconds: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum TrialPhase {
    /// This number of steps has been taken before the trial, with the default.
    WarmUp { steps: u64 },
    /// This number of steps of the trial has been taken.
    Trial { steps: usize },
    /// The ranks compare their times.
    Comparison,
    /// The run uses the candidate with this index.
    Chosen(usize),
}

/// What a rank does after a step. All ranks do the same after the same step.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum TrialAction {
    /// Nothing.
    Continue,
    /// The gradients of the next steps have buckets of these sizes.
    Divide(BucketSizes),
    /// The ranks compute the largest of each of these times, and pass the result to [`BucketTrial::handle_times`].
    Compare(Vec<f64>),
}

/// What `--bucket-bytes auto` has measured and chosen. It is the same on all ranks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BucketReport {
    /// The size in bytes of the chosen buckets. `None` if the run ended before the end of the trial.
    pub chosen_bytes: Option<usize>,
    /// The sizes that were tried: first the default, and then the others from coarse to fine.
    pub candidates: Vec<BucketTime>,
}

/// The time of a step with buckets of one size.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct BucketTime {
    /// The size of a bucket in bytes. The first bucket has a quarter of this size if there are several buckets, and the last one
    /// may be shorter.
    pub bytes: usize,
    /// The number of buckets.
    pub buckets: usize,
    /// The median time of a step in seconds, on the slowest rank. `None` before the end of the trial.
    pub seconds: Option<f64>,
}

impl BucketTrial {
    /// Creates the trial of a run whose gradients have `parameter_count` elements. It begins at step `first_step` of the run,
    /// counted from 0, or later. Returns `None` if there is only one size to try.
    pub(crate) fn new(parameter_count: usize, first_step: u64) -> Option<Self> {
        let candidate = |sizes: BucketSizes| {
            let bucket_count = sizes.ranges(parameter_count).count();
            TriedSizes { sizes, bucket_count, times: Vec::new(), seconds: None }
        };
        let candidates: Vec<TriedSizes> =
            BucketSizes::candidates(parameter_count).into_iter().map(candidate).collect();
        let phase = TrialPhase::WarmUp { steps: 0 };
        (candidates.len() > 1).then_some(Self { candidates, first_step, phase })
    }

    /// Handles the time of a step on this rank. `next_step` is the number of the next step of the run, counted from 0.
    pub(crate) fn handle_step(&mut self, next_step: u64, time: Duration) -> TrialAction {
        match self.phase {
            TrialPhase::WarmUp { steps } => {
                let is_over = steps + 1 >= WARMUP_STEPS && next_step >= self.first_step;
                self.phase = if is_over {
                    TrialPhase::Trial { steps: 0 }
                } else {
                    TrialPhase::WarmUp { steps: steps + 1 }
                };
                TrialAction::Continue
            }
            TrialPhase::Trial { steps } => {
                let current = self.candidate_of_step(steps);
                if steps % STEPS > 0 {
                    self.candidates[current].times.push(time.as_secs_f64());
                }
                if steps + 1 == ROUNDS * self.candidates.len() * STEPS {
                    self.phase = TrialPhase::Comparison;
                    let medians = self.candidates.iter_mut().map(|candidate| median(&mut candidate.times));
                    return TrialAction::Compare(medians.collect());
                }
                self.phase = TrialPhase::Trial { steps: steps + 1 };
                match self.candidate_of_step(steps + 1) {
                    next if next == current => TrialAction::Continue,
                    next => TrialAction::Divide(self.candidates[next].sizes),
                }
            }
            TrialPhase::Comparison | TrialPhase::Chosen(_) => TrialAction::Continue,
        }
    }

    /// Handles the largest time of any rank, for each time of [`TrialAction::Compare`]. Returns the sizes for the rest of the
    /// run.
    pub(crate) fn handle_times(&mut self, times: &[f64]) -> BucketSizes {
        let mut best = 0;
        for (index, seconds) in times.iter().enumerate() {
            self.candidates[index].seconds = Some(*seconds);
            if *seconds < WORTHWHILE * times[best] {
                best = index;
            }
        }
        self.phase = TrialPhase::Chosen(best);
        self.candidates[best].sizes
    }

    /// Returns what was measured and chosen.
    pub(crate) fn report(&self) -> BucketReport {
        let chosen_bytes = match self.phase {
            TrialPhase::Chosen(index) => Some(self.candidates[index].sizes.bytes()),
            _ => None,
        };
        let time = |TriedSizes { sizes, bucket_count, seconds, .. }: &TriedSizes| BucketTime {
            bytes: sizes.bytes(),
            buckets: *bucket_count,
            seconds: *seconds,
        };
        BucketReport { chosen_bytes, candidates: self.candidates.iter().map(time).collect() }
    }

    /// Returns the index of the candidate that step `step` of the trial uses. Every second round goes back.
    fn candidate_of_step(&self, step: usize) -> usize {
        let count = self.candidates.len();
        let (round, index) = (step / STEPS / count, step / STEPS % count);
        if round.is_multiple_of(2) { index } else { count - 1 - index }
    }
}

impl fmt::Display for BucketReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(chosen) = self.chosen_bytes else {
            return f.write_str("--bucket-bytes auto has not chosen a size yet");
        };
        write!(f, "--bucket-bytes auto chose {chosen}; times of a step:")?;
        let mut before = " ";
        for BucketTime { bytes, buckets, seconds } in &self.candidates {
            let buckets = counted(buckets, "bucket");
            let milliseconds = seconds.unwrap_or_default() * 1e3;
            write!(f, "{before}{milliseconds:.3} ms with {buckets} of {bytes}")?;
            before = ", ";
        }
        Ok(())
    }
}

/// Returns the median of times; 0 if there are none.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let Some(last) = times.len().checked_sub(1) else { return 0.0 };
    f64::midpoint(times[last / 2], times[last.div_ceil(2)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model with the candidates (buckets): 5 (the default), 1, 3 and 9.
    const PARAMETERS: usize = 235_146;

    /// Takes steps from number `start` of a run until the trial ends. `milliseconds` has the time of a step with each
    /// candidate, on each rank. Returns the number of steps that the trial took, and the trial of each rank.
    fn run_trial(milliseconds: &[[u64; 4]], (start, first_step): (u64, u64)) -> (u64, Vec<BucketTrial>) {
        let new_trial = |_| BucketTrial::new(PARAMETERS, first_step).unwrap();
        let mut trials: Vec<BucketTrial> = milliseconds.iter().map(new_trial).collect();
        let candidates = BucketSizes::candidates(PARAMETERS);
        let mut current = candidates[0];
        for step in start.. {
            let index = candidates.iter().position(|sizes| *sizes == current).unwrap();
            let handle = |(trial, times): (&mut BucketTrial, &[u64; 4])| {
                trial.handle_step(step + 1, Duration::from_millis(times[index]))
            };
            let actions: Vec<TrialAction> = trials.iter_mut().zip(milliseconds).map(handle).collect();
            match &actions[0] {
                TrialAction::Compare(first) => {
                    let largest = |index: usize| {
                        let times = actions.iter().map(|action| match action {
                            TrialAction::Compare(times) => times[index],
                            action => panic!("another rank compares times, and this rank does {action:?}"),
                        });
                        times.fold(0.0, f64::max)
                    };
                    let largest: Vec<f64> = (0..first.len()).map(largest).collect();
                    let sizes: Vec<BucketSizes> =
                        trials.iter_mut().map(|trial| trial.handle_times(&largest)).collect();
                    assert!(sizes.iter().all(|other| *other == sizes[0]), "{sizes:?}");
                    return (step + 1 - start, trials);
                }
                action => {
                    assert!(actions.iter().all(|other| other == action), "{actions:?}");
                    if let TrialAction::Divide(sizes) = action {
                        current = *sizes;
                    }
                }
            }
        }
        unreachable!("a trial ends")
    }

    #[test]
    fn the_division_that_is_fastest_on_the_slowest_rank_is_chosen() {
        for (milliseconds, buckets) in [
            (&[[100, 90, 80, 70]][..], 9),
            (&[[100, 120, 110, 130]], 5),
            // A small gain is noise, also compared with a coarser division.
            (&[[100, 97, 96, 98]], 5),
            (&[[100, 80, 79, 77]], 1),
            (&[[100, 80, 70, 69]], 3),
            // The third candidate is the fastest one on rank 0, but not on rank 1.
            (&[[100, 90, 10, 80], [100, 90, 200, 80]], 9),
            (&[[100, 50, 50, 50], [100, 100, 100, 100], [100, 50, 50, 50]], 5),
        ] {
            let (steps, trials) = run_trial(milliseconds, (0, 0));
            let report = trials[0].report();
            let chosen = report.candidates.iter().find(|time| Some(time.bytes) == report.chosen_bytes);
            assert_eq!(chosen.unwrap().buckets, buckets, "{milliseconds:?}: {report:?}");
            assert!(trials.iter().all(|trial| trial.report() == report), "{milliseconds:?}");
            assert_eq!(steps, WARMUP_STEPS + (ROUNDS * STEPS * 4) as u64);
        }
    }

    #[test]
    fn a_trial_begins_after_the_warm_up_and_changes_nothing_after_its_end() {
        let trial_steps = (ROUNDS * STEPS * 4) as u64;
        for (start, first_step, warmup) in [(0, 0, 3), (0, 10, 10), (8, 10, 3), (90, 10, 3), (0, 2, 3)] {
            let (steps, mut trials) = run_trial(&[[100, 90, 80, 70]], (start, first_step));
            assert_eq!(steps, warmup + trial_steps, "{start}, {first_step}");
            for step in 0..500 {
                let time = Duration::from_millis(step % 7);
                assert_eq!(trials[0].handle_step(1000 + step, time), TrialAction::Continue);
            }
        }
        assert!(BucketTrial::new(1000, 0).is_none(), "a small model has one bucket");
    }

    /// A slow phase of the host must not decide. Without the second round, the slow first half would exclude the default.
    #[test]
    fn a_host_that_becomes_faster_does_not_change_the_choice() {
        let mut trial = BucketTrial::new(PARAMETERS, 0).unwrap();
        for step in 1.. {
            let speed = Duration::from_micros(100_000 - 1500 * step);
            if let TrialAction::Compare(times) = trial.handle_step(step, speed) {
                trial.handle_times(&times);
                break;
            }
        }
        let report = trial.report();
        assert_eq!(report.chosen_bytes, Some(report.candidates[0].bytes), "{report}");
    }

    #[test]
    fn the_text_names_the_choice_and_all_times() {
        let mut trial = BucketTrial::new(PARAMETERS, 0).unwrap();
        assert_eq!(trial.report().to_string(), "--bucket-bytes auto has not chosen a size yet");
        trial.handle_times(&[0.003, 0.0021, 0.0025, 0.004]);
        assert_eq!(
            trial.report().to_string(),
            "--bucket-bytes auto chose 940584; times of a step: 3.000 ms with 5 buckets of 235144, 2.100 ms with 1 bucket of \
             940584, 2.500 ms with 3 buckets of 470292, 4.000 ms with 9 buckets of 117572"
        );
    }
}
