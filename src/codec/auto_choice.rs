//! Chooses the codec of a compressor with [`Compression::Auto`]. `docs/compression.md` describes its trials and checks.
//!
//! All ranks must choose the same codec in the same call. So all decisions depend only on the number of calls and on numbers
//! that are the same on all ranks: errors of results, and the largest time of any rank.

use crate::types::{Compression, Rounding};

/// The codecs that a trial tries, from the most exact one to the coarsest one.
const CANDIDATES: [Compression; 5] = [
    Compression::None,
    Compression::Bf16,
    Compression::Int8(Rounding::Nearest),
    Compression::Int4(Rounding::Nearest),
    Compression::OneBit,
];

/// The calls with each codec in which a trial measures the time. The median counts.
const TIMED_CALLS: usize = 5;

/// A codec must take at most this part of the time of exact elements. Smaller differences may be noise, or cost processor time.
const WORTHWHILE: f32 = 0.85;

/// After this many calls, the ranks check the error and the time again.
const CHECK_PERIOD: u64 = 100;

/// The calls before a check whose times count.
const RECENT_TIMES: usize = 15;

/// A new trial begins if calls take this many times as long as in the last trial, in two comparisons one after the other.
const SLOWER: f32 = 1.5;

/// The calls from the first trial to the second one. After each trial with the same result, the number doubles, so that trials
/// take less and less of the time. Slow calls can begin a trial after a quarter of this number.
const TRIAL_PERIOD: u64 = 1000;
const TRIAL_PERIOD_MAX: u64 = 64_000;

/// What a compressor with [`Compression::Auto`] has measured and chosen. It is the same on all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AutoReport {
    /// The codec of the last call.
    pub compression: Compression,
    /// Whether a trial is in progress: whether the compressor tries one codec after the other.
    pub is_trial: bool,
    /// The relative error of a result with this codec: the Euclidean norm of the error of a sample, divided by the norm of the
    /// exact result, without error feedback. `None` if it was not measured. It is 0 for [`Compression::None`].
    pub relative_error: Option<f32>,
    /// The time of a call with this codec in the last trial, in seconds, on the slowest rank. `None` before the end of the first
    /// trial, or if all ranks are on one host.
    pub seconds: Option<f32>,
}

#[derive(PartialEq, Debug)]
pub(crate) struct AutoStep {
    pub(crate) compression: Compression,
    /// Whether the ranks measure the error of this codec. [`AutoChoice::handle_error`] gets the result before the next call.
    pub(crate) is_checked: bool,
    /// The times of this rank that the ranks compare. [`AutoChoice::handle_times`] gets the largest ones before the next call.
    pub(crate) times_to_compare: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) struct AutoChoice {
    error_max: f32,
    candidates: [Candidate; CANDIDATES.len()],
    current: usize,
    chosen: Option<usize>,
    phase: AutoPhase,
    /// The times of the last calls on this rank, in seconds.
    times: Vec<f32>,
    /// The calls after a trial until the next one.
    trial_period: u64,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    compression: Compression,
    error: Option<f32>,
    /// The time of a call: on this rank during a trial, then on the slowest rank. Infinite if it was not measured.
    seconds: f32,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum AutoPhase {
    /// `calls` calls of the trial have used the current codec.
    Trial { calls: usize },
    /// The trial has ended, and the ranks compare their times.
    Comparison,
    /// `calls` calls have used the result of the last trial. `was_slow` is the result of the last comparison of times.
    Use { calls: u64, was_slow: bool },
}

impl AutoChoice {
    pub(crate) fn new(error_max: f64) -> Self {
        let candidates = CANDIDATES.map(|compression| {
            let error = (compression == Compression::None).then_some(0.0);
            Candidate { compression, error, seconds: f32::INFINITY }
        });
        let phase = AutoPhase::Trial { calls: 0 };
        let error_max = error_max as f32;
        let (times, trial_period) = (Vec::new(), TRIAL_PERIOD);
        Self { error_max, candidates, current: 0, chosen: None, phase, times, trial_period }
    }

    pub(crate) fn report(&self) -> AutoReport {
        let Candidate { compression, error, seconds } = self.candidates[self.current];
        let is_trial = !matches!(self.phase, AutoPhase::Use { .. });
        AutoReport {
            compression,
            is_trial,
            relative_error: error,
            seconds: Some(seconds).filter(|seconds| !is_trial && seconds.is_finite()),
        }
    }

    /// Chooses to send exact elements, because all ranks are on one host.
    pub(crate) fn use_exact_elements(&mut self) {
        self.current = 0;
        self.phase = AutoPhase::Use { calls: 0, was_slow: false };
    }

    pub(crate) fn begin_call(&mut self) -> AutoStep {
        let mut step = AutoStep { compression: Compression::None, is_checked: false, times_to_compare: None };
        match &mut self.phase {
            AutoPhase::Trial { calls } => {
                // The first call also measures the error, which takes time.
                if *calls == 0 {
                    step.is_checked = self.candidates[self.current].compression != Compression::None;
                } else if *calls == 1 {
                    self.times.clear();
                }
                if *calls <= TIMED_CALLS {
                    *calls += 1;
                } else {
                    self.end_candidate();
                    return self.begin_call();
                }
            }
            AutoPhase::Comparison => {
                let times = self.candidates.iter().map(|candidate| candidate.seconds);
                step.times_to_compare = Some(times.collect());
            }
            AutoPhase::Use { calls, .. } => {
                *calls += 1;
                if *calls >= self.trial_period {
                    self.begin_trial();
                    return self.begin_call();
                }
                let is_lossy = self.candidates[self.current].compression != Compression::None;
                step.is_checked = is_lossy && *calls % CHECK_PERIOD == 0;
                if *calls % CHECK_PERIOD == CHECK_PERIOD / 2 {
                    step.times_to_compare = Some(vec![median(&mut self.times)]);
                    self.times.clear();
                }
            }
        }
        step.compression = self.candidates[self.current].compression;
        step
    }

    pub(crate) fn record_time(&mut self, seconds: f32) {
        if self.times.len() >= RECENT_TIMES {
            self.times.remove(0);
        }
        self.times.push(seconds);
    }

    /// Handles the relative error of the codec of the last call. It is NaN if the elements had no finite norm.
    pub(crate) fn handle_error(&mut self, error: f32) {
        if error.is_nan() {
            if let AutoPhase::Trial { calls } = &mut self.phase {
                // Without its error, a codec must not be chosen. So measure again.
                *calls = 0;
            }
            return;
        }
        self.candidates[self.current].error = Some(error);
        if error <= self.error_max {
            return;
        }
        if let AutoPhase::Trial { .. } = self.phase {
            // The remaining codecs are coarser.
            self.current -= 1;
            self.phase = AutoPhase::Comparison;
        } else {
            self.candidates[self.current].seconds = f32::INFINITY;
            self.choose();
        }
    }

    /// Handles the largest time of any rank, for each time that [`AutoChoice::begin_call`] has returned.
    pub(crate) fn handle_times(&mut self, times: &[f32]) {
        match self.phase {
            AutoPhase::Comparison => {
                for (candidate, seconds) in self.candidates.iter_mut().zip(times) {
                    candidate.seconds = *seconds;
                }
                self.choose();
            }
            AutoPhase::Use { calls, was_slow } => {
                let promised = self.candidates[self.current].seconds;
                let is_slow = times.iter().any(|&seconds| seconds > SLOWER * promised);
                if is_slow && was_slow && calls >= self.trial_period / 4 {
                    self.begin_trial();
                } else {
                    self.phase = AutoPhase::Use { calls, was_slow: is_slow };
                }
            }
            AutoPhase::Trial { .. } => {}
        }
    }

    fn choose(&mut self) {
        let mut best = 0;
        for (index, candidate) in self.candidates.iter().enumerate() {
            let is_exact_enough = candidate.error.is_some_and(|error| error <= self.error_max);
            let best_seconds = self.candidates[best].seconds;
            let is_better = match best {
                0 => candidate.seconds < WORTHWHILE * best_seconds,
                // Of two codecs with the same time, the coarser one leaves more of the line to other calls.
                _ => candidate.seconds <= best_seconds,
            };
            if is_exact_enough && is_better {
                best = index;
            }
        }
        let is_unchanged = self.chosen == Some(best);
        self.trial_period =
            if is_unchanged { (2 * self.trial_period).min(TRIAL_PERIOD_MAX) } else { TRIAL_PERIOD };
        (self.current, self.chosen) = (best, Some(best));
        self.phase = AutoPhase::Use { calls: 0, was_slow: false };
        self.times.clear();
    }

    fn begin_trial(&mut self) {
        self.phase = AutoPhase::Trial { calls: 0 };
        self.current = 0;
        for candidate in &mut self.candidates {
            candidate.seconds = f32::INFINITY;
        }
    }

    /// Ends the trial of the current codec, and goes to the next one.
    fn end_candidate(&mut self) {
        self.candidates[self.current].seconds = median(&mut self.times);
        self.phase = if self.current + 1 < self.candidates.len() {
            self.current += 1;
            AutoPhase::Trial { calls: 0 }
        } else {
            AutoPhase::Comparison
        };
    }
}

/// Returns the median of times; 0 if there are none, so that the other ranks decide.
fn median(times: &mut [f32]) -> f32 {
    times.sort_by(f32::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated rank: the time and the error of each candidate.
    struct SimulatedCodecs {
        seconds: [f32; CANDIDATES.len()],
        errors: [f32; CANDIDATES.len()],
    }

    /// The errors of gradients, about.
    const ERRORS: [f32; CANDIDATES.len()] = [0.0, 0.003, 0.01, 0.15, 0.7];

    fn run(choice: &mut AutoChoice, network: &SimulatedCodecs, calls: usize) -> Vec<Compression> {
        let index_of = |codec| CANDIDATES.iter().position(|candidate| *candidate == codec).unwrap();
        let make_call = |_| {
            let step = choice.begin_call();
            let index = index_of(step.compression);
            choice.record_time(network.seconds[index]);
            if let Some(times) = &step.times_to_compare {
                choice.handle_times(times);
            }
            if step.is_checked {
                choice.handle_error(network.errors[index]);
            }
            step.compression
        };
        (0..calls).map(make_call).collect()
    }

    #[test]
    fn the_fastest_codec_within_the_largest_error_is_chosen() {
        let slow_link = [1.0, 0.5, 0.25, 0.13, 0.05];
        for (error_max, seconds, expected) in [
            (0.05, slow_link, "int8"),
            (0.2, slow_link, "int4"),
            (1.0, slow_link, "onebit"),
            (0.001, slow_link, "none"),
            // On a fast link, encoding takes longer than sending.
            (0.2, [1.0, 1.2, 1.1, 3.0, 2.0], "none"),
            // A small gain may be noise.
            (0.2, [1.0, 0.88, 1.0, 1.0, 1.0], "none"),
            (0.2, [1.0, 0.5, 0.51, 0.6, 1.0], "bf16"),
            // Fewer bytes in the same time leave more of the line to other calls.
            (0.2, [1.0, 0.5, 0.5, 0.6, 1.0], "int8"),
        ] {
            let mut choice = AutoChoice::new(error_max);
            let network = SimulatedCodecs { seconds, errors: ERRORS };
            let used = run(&mut choice, &network, 50);
            assert!(!choice.report().is_trial);
            assert_eq!(choice.report().compression.to_string(), expected, "{error_max} {seconds:?}");
            assert_eq!(used[49].to_string(), expected);
            // A codec with too large an error is used once.
            for (codec, error) in CANDIDATES.iter().zip(ERRORS) {
                let uses = used.iter().filter(|used| *used == codec).count();
                assert!(f64::from(error) <= error_max || uses <= 1, "{codec}: {uses}");
            }
        }
    }

    #[test]
    fn a_larger_error_or_a_slower_network_changes_the_choice() {
        let mut choice = AutoChoice::new(0.2);
        let mut network = SimulatedCodecs { seconds: [1.0, 0.5, 0.25, 0.13, 0.05], errors: ERRORS };
        run(&mut choice, &network, 50);
        assert_eq!(choice.report().compression.to_string(), "int4");
        network.errors[3] = 0.3;
        run(&mut choice, &network, CHECK_PERIOD as usize);
        assert_eq!(choice.report().compression.to_string(), "int8", "the error of int4 has become too large");
        network.seconds = [0.1, 0.5, 0.5, 0.5, 0.5];
        run(&mut choice, &network, TRIAL_PERIOD as usize);
        assert_eq!(
            choice.report().compression.to_string(),
            "none",
            "the network has become faster, and the processor slower"
        );
    }

    #[test]
    fn a_single_slow_comparison_begins_no_trial() {
        let mut choice = AutoChoice::new(0.05);
        let network = SimulatedCodecs { seconds: [1.0, 0.5, 0.25, 0.13, 0.05], errors: ERRORS };
        run(&mut choice, &network, 500);
        choice.handle_times(&[9.0]);
        assert!(!choice.report().is_trial);
        choice.handle_times(&[9.0]);
        assert!(choice.report().is_trial);
    }

    #[test]
    fn trials_become_rarer_if_their_result_is_the_same() {
        let mut choice = AutoChoice::new(0.05);
        let network = SimulatedCodecs { seconds: [1.0, 1.5, 1.5, 1.5, 1.5], errors: ERRORS };
        let used = run(&mut choice, &network, 100_000);
        let lossy = used.iter().filter(|codec| **codec != Compression::None).count();
        assert!(lossy < 150, "{lossy} of 100000 calls used a codec that is slower than none");
    }

    #[test]
    fn a_codec_whose_error_is_unknown_is_not_chosen() {
        let mut choice = AutoChoice::new(0.05);
        let errors = [0.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN];
        run(&mut choice, &SimulatedCodecs { seconds: [1.0; CANDIDATES.len()], errors }, 100);
        let AutoReport { compression, is_trial, relative_error, seconds } = choice.report();
        assert_eq!((compression, is_trial, relative_error, seconds), (Compression::Bf16, true, None, None));
    }
}
