//! Validation and early stopping: a part of the training set is held out, and the run computes the loss on this part. With a
//! patience, the run also keeps the parameters with the lowest loss on this part, and may stop early.

use serde::{Deserialize, Serialize};

use super::data::DataError;
use super::random;
use super::report::EpochRecord;
use crate::types::counted;

/// The seed of the shuffle that chooses the held-out samples. This seed does not depend on `--seed`, so that runs
/// with different seeds are compared on the same samples.
const SPLIT_SEED: u64 = 1998;

/// Which part of the training set is held out for validation, and whether its loss ends the run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Validation {
    /// The fraction of the training set that is held out: above 0 and below 1.
    pub fraction: f64,
    /// If `Some`, the run ends after this many consecutive reported epochs without a new minimum of the validation loss, and
    /// its result has the parameters with the lowest validation loss. At least 1. If `None`, the run only reports the
    /// validation loss, and its result has the parameters of the last step.
    pub patience: Option<u64>,
}

/// The fraction of the training set that is held out by default, as in scikit-learn's `MLPClassifier`.
pub const VALIDATION_FRACTION_DEFAULT: f64 = 0.1;

/// The record with the lowest validation loss of all records that the run has made.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct BestRecord {
    /// The validation loss of this record. `None` before the first record.
    pub(crate) loss: Option<f64>,
    /// The epoch of this record, counted from 1; 0 before the first record.
    pub(crate) epoch: u64,
    /// The number of records after the best record.
    pub(crate) records_since: u64,
    /// Whether the run has ended with the parameters of this record.
    pub(crate) selected: bool,
}

/// The parameters with the lowest validation loss of all records that the run has made.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct BestParameters {
    pub(crate) record: BestRecord,
    /// While the run continues: the parameters of the best record. After [`BestParameters::swap_parameters`]: the
    /// parameters of the last step, from which a resumed run continues.
    pub(crate) parameters: Vec<f32>,
}

impl BestParameters {
    /// Returns the state of a run that begins with `parameters`. `record` is the record of these parameters, if the run resumes
    /// from a checkpoint that was saved without `--patience` after a record.
    pub(crate) fn new(parameters: &[f32], record: Option<&EpochRecord>) -> Self {
        let loss = record.and_then(|record| record.validation_loss);
        let epoch = record.filter(|_| loss.is_some()).map_or(0, |record| record.epoch);
        let record = BestRecord { loss, epoch, records_since: 0, selected: false };
        Self { record, parameters: parameters.to_vec() }
    }

    /// Records the validation loss after `epoch`. If `loss` is a new minimum, keeps a copy of `parameters`. All ranks
    /// pass the same loss.
    pub(crate) fn keep_if_lowest_loss(&mut self, loss: f64, epoch: u64, parameters: &[f32]) {
        if self.record.loss.is_none_or(|best| loss < best) {
            self.record = BestRecord { loss: Some(loss), epoch, records_since: 0, selected: false };
            self.parameters.copy_from_slice(parameters);
        } else {
            self.record.records_since += 1;
        }
    }

    /// Swaps `parameters` with the parameters of the best record. The caller swaps when a run ends, and swaps back
    /// when a completed run is resumed.
    pub(crate) fn swap_parameters(&mut self, parameters: &mut Vec<f32>) {
        std::mem::swap(&mut self.parameters, parameters);
        self.record.selected = !self.record.selected;
    }
}

/// Chooses the samples that are held out of a training set with `count` samples. `fraction` of the samples are held
/// out. A shuffle with a fixed seed chooses these samples. Returns the indices of the training samples and the
/// indices of the held-out samples, each in ascending order.
///
/// # Errors
///
/// If either set would be empty.
pub(crate) fn hold_out_rows(count: usize, fraction: f64) -> Result<(Vec<usize>, Vec<usize>), DataError> {
    let validation_count = (count as f64 * fraction).round() as usize;
    if validation_count == 0 || validation_count >= count {
        return Err(DataError::Unsuitable(format!(
            "--validation-fraction {fraction} of {count} training samples gives {} for validation and \
             leaves {} for training; both need at least one",
            counted(validation_count, "sample"),
            count.saturating_sub(validation_count),
        )));
    }
    let count = u32::try_from(count)
        .map_err(|_| DataError::Unsuitable(format!("{count} training samples are too many")))?;
    let order = random::permutation(&mut random::random_stream("validation", SPLIT_SEED, 0), count);
    let sorted = |chosen: &[u32]| {
        let mut rows: Vec<usize> = chosen.iter().map(|&row| row as usize).collect();
        rows.sort_unstable();
        rows
    };
    let (validation, training) = order.split_at(validation_count);
    Ok((sorted(training), sorted(validation)))
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::train::data::{Features, Samples, SharedSamples, Targets};

    fn numbered_samples(count: usize) -> SharedSamples {
        let values: Vec<f64> = (0..count).map(|row| row as f64).collect();
        let features = Array2::from_shape_fn((count, 1), |(row, _)| row as f32);
        let targets = Targets::Numbers(values);
        SharedSamples::held_by_each_rank(Samples { features: Features::Numbers(features), targets })
    }

    #[test]
    fn held_out_samples_and_the_rest_are_the_whole_set() {
        let mut training = numbered_samples(50);
        let validation = training.hold_out(0.1).unwrap();
        let mut found = Vec::new();
        for (samples, expected) in [(&training, 45), (&validation, 5)] {
            let samples = samples.held.in_memory().unwrap();
            let Features::Numbers(features) = &samples.features else { panic!() };
            let Targets::Numbers(targets) = &samples.targets else { panic!() };
            assert_eq!((features.nrows(), targets.len()), (expected, expected));
            assert!(features.iter().zip(targets).all(|(&feature, &target)| f64::from(feature) == target));
            found.extend(targets.iter().map(|&target| target as usize));
        }
        found.sort_unstable();
        assert!(found.into_iter().eq(0..50));
        for (count, fraction) in [(4, 0.1), (4, 0.9), (1, 0.5)] {
            let error = numbered_samples(count).hold_out(fraction).unwrap_err();
            assert!(error.to_string().contains("--validation-fraction"), "{error}");
        }
    }

    #[test]
    fn the_first_of_the_lowest_losses_is_kept() {
        let mut best = BestParameters::new(&[0.0], None);
        for (epoch, loss, expected) in [
            (1, 3.0, (1, 0)),
            (2, 2.0, (2, 0)),
            (3, 2.0, (2, 1)),
            (4, 2.5, (2, 2)),
            (5, 1.0, (5, 0)),
            (6, 9.0, (5, 1)),
        ] {
            best.keep_if_lowest_loss(loss, epoch, &[epoch as f32]);
            assert_eq!((best.record.epoch, best.record.records_since), expected, "{epoch}");
            assert_eq!(best.parameters, [expected.0 as f32]);
        }
        let mut last = vec![6.0];
        best.swap_parameters(&mut last);
        assert_eq!((last[0], best.parameters[0], best.record.selected), (5.0, 6.0, true));
        best.swap_parameters(&mut last);
        assert_eq!((last[0], best.parameters[0], best.record.selected), (6.0, 5.0, false));
    }
}
