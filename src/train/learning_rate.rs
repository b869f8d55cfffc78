//! The learning rate of each step: the schedule and the warm-up.
//!
//! The rate depends only on the number of the step, so a resumed run has the same rates as an uninterrupted run. All
//! hosts compute the same bits. This module does not use `cos` and `powi` of the standard library, because their
//! rounding may differ between hosts.

use std::fmt;
use std::str::FromStr;

use super::data::DataError;
use super::optimizer::power;
use crate::types::counted;

/// How the learning rate changes during the run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum RateSchedule {
    /// The rate does not change.
    #[default]
    Constant,
    /// The rate is multiplied by `factor` after every `epochs` epochs, as with `PyTorch`'s `StepLR`.
    Step {
        /// The number of epochs between two changes; at least 1.
        epochs: u64,
        /// The rate is multiplied by this factor. Above 0 and at most 1.
        factor: f64,
    },
    /// After the warm-up, the rate falls along half a period of a cosine to 0 at the end of the run (Loshchilov and
    /// Hutter 2017).
    Cosine,
}

/// The first steps of a run. In the warm-up of the learning rate, the rate grows linearly to its full value (Goyal et al. 2017).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Warmup {
    /// The warm-up takes this number of steps. 0 means no warm-up.
    Steps(u64),
    /// The warm-up takes this number of epochs.
    Epochs(u64),
}

impl Default for Warmup {
    fn default() -> Self {
        Self::Steps(0)
    }
}

/// The maximum number of steps or epochs of a schedule.
const SCHEDULE_COUNT_MAX: u64 = 1 << 40;

/// Parses a number of steps or epochs from 1 to [`SCHEDULE_COUNT_MAX`].
fn parse_count(text: &str) -> Option<u64> {
    text.parse().ok().filter(|count| (1..=SCHEDULE_COUNT_MAX).contains(count))
}

impl FromStr for RateSchedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "constant" => return Ok(Self::Constant),
            "cosine" => return Ok(Self::Cosine),
            _ => {}
        }
        let step =
            text.strip_prefix("step:").ok_or("it must be one of constant, step:EPOCHS,FACTOR, cosine")?;
        let (epochs, factor) = step.split_once(',').ok_or("pass EPOCHS,FACTOR, as in step:10,0.1")?;
        let epochs = parse_count(epochs)
            .ok_or_else(|| format!("`{epochs}` is not a number of epochs from 1 to {SCHEDULE_COUNT_MAX}"))?;
        let factor = factor.parse().ok().filter(|&factor| factor > 0.0 && factor <= 1.0);
        let factor = factor.ok_or("FACTOR must be a number above 0 and at most 1, as in step:10,0.1")?;
        Ok(Self::Step { epochs, factor })
    }
}

impl fmt::Display for RateSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant => f.write_str("constant"),
            Self::Step { epochs, factor } => write!(f, "step:{epochs},{factor}"),
            Self::Cosine => f.write_str("cosine"),
        }
    }
}

impl FromStr for Warmup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fail = || format!("`{text}` is neither a number of steps, as in 500, nor of epochs, as in 5e");
        match text.strip_suffix('e') {
            Some(epochs) => parse_count(epochs).map(Self::Epochs).ok_or_else(fail),
            None if text == "0" => Ok(Self::Steps(0)),
            None => parse_count(text).map(Self::Steps).ok_or_else(fail),
        }
    }
}

impl fmt::Display for Warmup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Epochs(epochs) => write!(f, "{epochs}e"),
        }
    }
}

impl Warmup {
    /// Returns the number of steps.
    pub(crate) fn steps(self, steps_per_epoch: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Epochs(epochs) => epochs.saturating_mul(steps_per_epoch),
        }
    }
}

/// The learning rates of all steps of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LearningRates {
    schedule: RateSchedule,
    warmup_steps: u64,
    steps_per_epoch: u64,
    /// The number of steps of the whole run.
    steps: u64,
}

impl LearningRates {
    /// Returns the learning rates of a run with `epochs` epochs.
    ///
    /// # Errors
    ///
    /// If the schedule is [`RateSchedule::Cosine`] and the warm-up takes all steps of the run.
    pub(crate) fn new(
        schedule: RateSchedule,
        warmup: Warmup,
        steps_per_epoch: u64,
        epochs: u64,
    ) -> Result<Self, DataError> {
        let steps = epochs.saturating_mul(steps_per_epoch);
        let warmup_steps = warmup.steps(steps_per_epoch);
        if schedule == RateSchedule::Cosine && warmup_steps >= steps {
            return Err(DataError::Unsuitable(format!(
                "--warmup {warmup} takes {}, but the run takes only {}, so that --schedule cosine has no step left; lower --warmup \
                 or raise --epochs",
                counted(warmup_steps, "step"),
                counted(steps, "step")
            )));
        }
        Ok(Self { schedule, warmup_steps, steps_per_epoch: steps_per_epoch.max(1), steps })
    }

    /// Returns the rate of step `step`, counted from 0. `peak` is the rate after the warm-up.
    pub(crate) fn rate_at_step(&self, peak: f32, step: u64) -> f32 {
        let factor = match self.schedule {
            RateSchedule::Constant => 1.0,
            RateSchedule::Step { epochs, factor } => power(factor, step / self.steps_per_epoch / epochs),
            RateSchedule::Cosine => {
                let steps_done = step.saturating_sub(self.warmup_steps);
                let steps_after_warmup = self.steps - self.warmup_steps;
                0.5 * (1.0 + cosine_of_pi_times(steps_done as f64 / steps_after_warmup as f64))
            }
        };
        let warmup_factor =
            if step < self.warmup_steps { (step + 1) as f64 / self.warmup_steps as f64 } else { 1.0 };
        (f64::from(peak) * factor * warmup_factor) as f32
    }
}

/// Returns the cosine of `fraction` * pi, with an error of at most 1e-15. `fraction` is from 0 to 1.
fn cosine_of_pi_times(fraction: f64) -> f64 {
    if fraction > 0.5 {
        return -cosine_of_pi_times(1.0 - fraction.min(1.0));
    }
    let angle = fraction * std::f64::consts::PI;
    let (mut term, mut sum) = (1.0, 1.0);
    // The Taylor series. For angles up to pi / 2, every term after the twelfth is below 1e-17.
    for index in 1..=12 {
        let n = f64::from(2 * index);
        term *= -angle * angle / (n * (n - 1.0));
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_names_are_parsed_and_printed_unchanged() {
        for text in ["constant", "step:10,0.1", "step:1,1", "cosine"] {
            assert_eq!(text.parse::<RateSchedule>().unwrap().to_string(), text);
        }
        for text in ["0", "500", "5e"] {
            assert_eq!(text.parse::<Warmup>().unwrap().to_string(), text);
        }
        let bad =
            ["", "step", "step:", "step:5", "step:0,0.1", "step:5,0", "step:5,2", "step:5,nan", "linear"];
        for text in bad {
            assert!(text.parse::<RateSchedule>().is_err(), "{text}");
        }
        for text in ["", "e", "0e", "-1", "1.5", "5E", "99999999999999999999", "2000000000000"] {
            assert!(text.parse::<Warmup>().is_err(), "{text}");
        }
    }

    /// The expected rates were computed by hand. The rates equal those of `PyTorch`'s `StepLR` and
    /// `CosineAnnealingLR`.
    #[test]
    fn each_schedule_gives_the_expected_rates() {
        let constant = RateSchedule::Constant;
        let step = RateSchedule::Step { epochs: 2, factor: 0.1 };
        let root = 0.5_f64.sqrt();
        // An epoch has 4 steps, and the run has 5 epochs.
        let cases: [(RateSchedule, Warmup, u64, f64); 15] = [
            (constant, Warmup::Steps(0), 0, 1.0),
            (constant, Warmup::Steps(0), 1000, 1.0),
            (constant, Warmup::Steps(5), 0, 0.2),
            (constant, Warmup::Steps(5), 3, 0.8),
            (constant, Warmup::Steps(5), 5, 1.0),
            (constant, Warmup::Epochs(1), 1, 0.5),
            (step, Warmup::Steps(0), 7, 1.0),
            (step, Warmup::Steps(0), 8, 0.1),
            (step, Warmup::Steps(0), 16, 0.01),
            (step, Warmup::Steps(10), 8, 0.09),
            (RateSchedule::Cosine, Warmup::Steps(0), 0, 1.0),
            (RateSchedule::Cosine, Warmup::Steps(0), 5, 0.5 + 0.5 * root),
            (RateSchedule::Cosine, Warmup::Steps(0), 15, 0.5 - 0.5 * root),
            (RateSchedule::Cosine, Warmup::Epochs(1), 4, 1.0),
            (RateSchedule::Cosine, Warmup::Epochs(1), 12, 0.5),
        ];
        for (schedule, warmup, step, expected) in cases {
            let rates = LearningRates::new(schedule, warmup, 4, 5).unwrap();
            let found = f64::from(rates.rate_at_step(2.0, step));
            assert!((found - 2.0 * expected).abs() < 1e-7, "{schedule} {warmup} {step}: {found}");
        }
        let error = LearningRates::new(RateSchedule::Cosine, Warmup::Epochs(5), 4, 5).unwrap_err();
        assert!(error.to_string().contains("--warmup 5e takes 20 steps"), "{error}");
    }

    #[test]
    fn the_cosine_equals_that_of_the_standard_library_up_to_rounding() {
        for index in 0..=1000 {
            let fraction = f64::from(index) / 1000.0;
            let expected = (fraction * std::f64::consts::PI).cos();
            assert!((cosine_of_pi_times(fraction) - expected).abs() < 2e-15, "{fraction}");
        }
    }

    /// A run has more steps than planned if it is resumed with more epochs.
    #[test]
    fn rates_stay_finite_after_the_planned_end() {
        let rates = LearningRates::new(RateSchedule::Cosine, Warmup::Steps(2), 4, 5).unwrap();
        assert_eq!(rates.rate_at_step(1.0, u64::MAX), 0.0);
    }
}
