//! Scales features to mean 0 and standard deviation 1.

use std::ops::Range;

use super::exact_sum::{self, ExactSum};
use super::{Features, HeldSamples, SharedSamples};
use crate::group::{Error, Group};
use crate::train::rank_checks::check_all_succeeded;
use crate::train::{RunPhase, TrainError};
use crate::types::{Rank, ReduceOp};

/// The tag of the messages in which a rank sends its sums to the next rank.
const SUMS_TAG: u32 = 0;

/// Scales every feature to mean 0 and standard deviation 1 over the training set. Constant features become 0.
#[derive(Clone, PartialEq, Debug)]
pub struct Standardizer {
    /// The mean of each feature.
    pub mean: Vec<f32>,
    /// 1 / s for each feature, where s is the population standard deviation (numpy's `std`). 0 for a constant
    /// feature.
    pub inverse_deviation: Vec<f32>,
}

impl Standardizer {
    /// Computes the mean and the deviation of each feature. All ranks must call this function. The result is the same
    /// on all ranks, and does not depend on the number of ranks.
    ///
    /// Also returns the indices of the features whose values differ too little to be scaled. Like constant features,
    /// these features become 0.
    ///
    /// # Errors
    ///
    /// If a collective fails, or if the samples cannot be read from their file.
    pub(crate) fn fit(samples: &SharedSamples, group: &mut Group) -> Result<(Self, Vec<usize>), TrainError> {
        let held = &samples.held;
        match held.feature_format() {
            Features::Numbers(_) | Features::Encoded { .. } => {
                let rows = samples.own_part(group.rank(), group.size());
                Self::fit_with::<ExactSum>(held, &rows, group)
            }
            // An exact sum needs 544 bytes for each feature, and sparse rows may have millions of features. So the values are
            // added in the order of the samples, one rank after the other.
            Features::Pixels { .. } | Features::Sparse(_) | Features::Tokens(_) => {
                let rows = 0..held.len();
                match samples.row_map() {
                    Some(_) => Self::fit_with::<f64>(held, &rows, group),
                    None => Self::fit_with::<f64>(held, &rows, &mut Group::solo()),
                }
            }
        }
    }

    /// Implements [`fit`](Self::fit): each rank of `group` reads only its `rows`. A second pass adds up the squared
    /// differences between the values and the mean, so that large means do not reduce the precision.
    fn fit_with<S: FeatureSum>(
        held: &HeldSamples,
        rows: &Range<usize>,
        group: &mut Group,
    ) -> Result<(Self, Vec<usize>), TrainError> {
        let is_number = held.feature_format().which_features_are_numbers();
        let columns = is_number.len();
        let mut total = [rows.len() as f64];
        group.all_reduce(&mut total, ReduceOp::Sum)?;
        let total = total[0].max(1.0);
        let values = ValueStatistics::<S>::new(held, rows, &is_number, group)?;
        let mean: Vec<f64> = (0..columns).map(|column| values.sum(column) / total).collect();
        let squares: Vec<S> = sum_squared_differences(held, rows, (&is_number, &mean), group)?;
        let mut squares = squares.iter();
        let inverse_deviation: Vec<f32> = (0..columns)
            .map(|column| {
                let (count, mean) = (values.counts[column] as f64, mean[column]);
                let of_others = if is_number[column] {
                    squares.next().map_or(0.0, FeatureSum::value)
                } else {
                    count * (1.0 - mean).powi(2)
                };
                // `of_others` is the sum of squared differences over the values other than 0. Each 0 adds mean².
                let variance = (of_others + (total - count) * mean.powi(2)) / total;
                invert_deviation(variance.sqrt(), mean)
            })
            .collect();
        let is_ignored =
            |&column: &usize| inverse_deviation[column] == 0.0 && !values.is_constant(column, total);
        let ignored = (0..columns).filter(is_ignored).collect();
        Ok((Self { mean: mean.iter().map(|&mean| mean as f32).collect(), inverse_deviation }, ignored))
    }
}

/// A sum of the values of a feature over all ranks.
trait FeatureSum: Clone {
    /// Returns the sums of `count` features to which this rank adds its values.
    fn begin(count: usize, group: &mut Group) -> Result<Vec<Self>, Error>;

    /// Adds a value to the sum.
    fn add(&mut self, value: f64);

    /// Completes the sums after this rank has added its values. Afterwards every rank has the same sums.
    fn finish(sums: &mut [Self], group: &mut Group) -> Result<(), Error>;

    /// Returns the sum, rounded to the nearest f64.
    fn value(&self) -> f64;
}

impl FeatureSum for ExactSum {
    fn begin(count: usize, _: &mut Group) -> Result<Vec<Self>, Error> {
        Ok(vec![Self::ZERO; count])
    }

    fn add(&mut self, value: f64) {
        self.add(value);
    }

    fn finish(sums: &mut [Self], group: &mut Group) -> Result<(), Error> {
        exact_sum::add_sums_of_ranks(group, sums)
    }

    fn value(&self) -> f64 {
        self.value()
    }
}

/// Each rank waits for the sums of the previous rank, and adds its values to these sums. If each rank holds consecutive
/// samples, the result has the same bits as the sums of one rank that holds all samples.
impl FeatureSum for f64 {
    fn begin(count: usize, group: &mut Group) -> Result<Vec<Self>, Error> {
        let mut sums = vec![0.0; count];
        if let Some(previous) = group.rank().get().checked_sub(1) {
            group.receive(&mut sums, Rank::new(previous), SUMS_TAG)?;
        }
        Ok(sums)
    }

    fn add(&mut self, value: f64) {
        *self += value;
    }

    fn finish(sums: &mut [Self], group: &mut Group) -> Result<(), Error> {
        let last = Rank::new(group.size().get() - 1);
        if group.rank() != last {
            group.send(&*sums, Rank::new(group.rank().get() + 1), SUMS_TAG)?;
        }
        group.broadcast(sums, last)
    }

    fn value(&self) -> f64 {
        *self
    }
}

/// Returns the sums of `count` features over all ranks. `visit` adds the values of this rank.
fn sum_over_ranks<S: FeatureSum>(
    count: usize,
    group: &mut Group,
    visit: impl FnOnce(&mut [S]) -> Result<(), TrainError>,
) -> Result<Vec<S>, TrainError> {
    let mut sums = S::begin(count, group)?;
    let visited = visit(&mut sums);
    // Also after an error, because other ranks wait for the sums.
    S::finish(&mut sums, group)?;
    check_all_succeeded(group, RunPhase::Data, visited)?;
    Ok(sums)
}

/// For each feature that is a number, returns how many features before it are numbers.
fn number_indices(is_number: &[bool]) -> Vec<usize> {
    let count =
        |next: &mut usize, &is_number: &bool| Some(std::mem::replace(next, *next + usize::from(is_number)));
    is_number.iter().scan(0, count).collect()
}

/// For each feature, statistics of its values other than 0.
struct ValueStatistics<S> {
    /// The number of values other than 0.
    counts: Vec<u64>,
    /// The sum of the values. `None` for a feature whose only values are 0 and 1, because its sum is the count.
    sums: Vec<Option<S>>,
    /// The smallest value other than 0.
    low: Vec<f32>,
    /// The largest value other than 0.
    high: Vec<f32>,
}

impl<S: FeatureSum> ValueStatistics<S> {
    /// Computes the statistics over the `rows` of all ranks. `is_number` is the result of
    /// [`Features::which_features_are_numbers`].
    fn new(
        held: &HeldSamples,
        rows: &Range<usize>,
        is_number: &[bool],
        group: &mut Group,
    ) -> Result<Self, TrainError> {
        let columns = is_number.len();
        let mut counts = vec![0_u64; columns];
        let (mut low, mut high) = (vec![f32::INFINITY; columns], vec![f32::NEG_INFINITY; columns]);
        let indices = number_indices(is_number);
        let number_count = is_number.iter().filter(|&&is_number| is_number).count();
        let mut numbers = sum_over_ranks(number_count, group, |sums: &mut [S]| {
            visit_nonzero_features(held, rows, |column, value| {
                counts[column] += 1;
                low[column] = low[column].min(value);
                high[column] = high[column].max(value);
                if is_number[column] {
                    sums[indices[column]].add(value.into());
                }
            })
        })?
        .into_iter();
        group.all_reduce(&mut counts, ReduceOp::Sum)?;
        group.all_reduce(&mut low, ReduceOp::Min)?;
        group.all_reduce(&mut high, ReduceOp::Max)?;
        let sums = is_number.iter().map(|&is_number| if is_number { numbers.next() } else { None }).collect();
        Ok(Self { counts, sums, low, high })
    }

    /// Returns the sum of the values of a feature.
    fn sum(&self, column: usize) -> f64 {
        self.sums[column].as_ref().map_or(self.counts[column] as f64, FeatureSum::value)
    }

    /// Returns whether a feature has the same value in all `total` samples.
    fn is_constant(&self, column: usize, total: f64) -> bool {
        let count = self.counts[column];
        count == 0 || count as f64 == total && self.low[column] == self.high[column]
    }
}

/// Calls `visit` with the index and the value of each feature that is not 0 in the samples `rows`.
fn visit_nonzero_features(
    held: &HeldSamples,
    rows: &Range<usize>,
    mut visit: impl FnMut(usize, f32),
) -> Result<(), TrainError> {
    let visited = held.visit_blocks(rows.clone(), |samples, block| {
        block.for_each(|row| samples.features.visit_nonzero_features(row, &mut visit));
    });
    visited.map_err(TrainError::from)
}

/// For each feature that is a number, returns the sum of the squared differences between the mean and the values
/// other than 0.
fn sum_squared_differences<S: FeatureSum>(
    held: &HeldSamples,
    rows: &Range<usize>,
    (is_number, mean): (&[bool], &[f64]),
    group: &mut Group,
) -> Result<Vec<S>, TrainError> {
    let indices = number_indices(is_number);
    let number_count = is_number.iter().filter(|&&is_number| is_number).count();
    sum_over_ranks(number_count, group, |squares: &mut [S]| {
        visit_nonzero_features(held, rows, |column, value| {
            if is_number[column] {
                squares[indices[column]].add((f64::from(value) - mean[column]).powi(2));
            }
        })
    })
}

/// Returns 1 / `deviation`. Returns 0 if `deviation` may be a rounding error, or if the inverse is not finite as f32.
fn invert_deviation(deviation: f64, mean: f64) -> f32 {
    let inverse = (1.0 / deviation) as f32;
    if deviation <= 1e-7 * mean.abs() || !inverse.is_finite() { 0.0 } else { inverse }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, array};

    use super::*;
    use crate::train::data::sparse::SparseRowsBuilder;
    use crate::train::data::{Samples, Targets};

    fn fit(features: &Features) -> (Standardizer, Vec<usize>) {
        let targets = Targets::Classes(vec![0; features.rows()]);
        let samples = SharedSamples::held_by_each_rank(Samples { features: features.clone(), targets });
        Standardizer::fit(&samples, &mut Group::solo()).unwrap()
    }

    #[test]
    fn standardized_features_have_mean_0_and_deviation_1() {
        let features =
            Features::Numbers(array![[1.0, 7.7, 1e6], [2.0, 7.7, 1e6 + 2.0], [6.0, 7.7, 1e6 + 4.0]]);
        let (standardizer, ignored) = fit(&features);
        assert!(ignored.is_empty(), "{ignored:?}");
        let mut out = Array2::zeros((3, 3));
        features.write_rows(0..3, Some(&standardizer), out.view_mut());
        for (column, deviation) in [1.0, 0.0, 1.0].into_iter().enumerate() {
            let values = out.column(column);
            assert!(values.mean().unwrap().abs() < 1e-5, "{values}");
            assert!((values.std(0.0) - deviation).abs() < 1e-3, "{values}");
        }
    }

    /// Regression test: before the fix, the inverse of a tiny deviation was infinite, so the loss was NaN.
    #[test]
    fn features_that_differ_too_little_become_0_and_their_indices_are_returned() {
        let features = Features::Numbers(array![
            [1e-39, 1e-38, 7.7, 16_777_216.0, 0.0],
            [2e-39, 3e-38, 7.7, 16_777_218.0, 0.0],
            [3e-39, 2e-38, 7.7, 16_777_216.0, 0.0]
        ]);
        let (standardizer, ignored) = fit(&features);
        assert_eq!(ignored, [0, 3]);
        let is_used: Vec<bool> =
            standardizer.inverse_deviation.iter().map(|&inverse| inverse > 0.0).collect();
        assert_eq!(is_used, [false, true, false, false, false]);
        assert!(standardizer.inverse_deviation.iter().all(|inverse| inverse.is_finite()));
    }

    #[test]
    fn sparse_rows_have_the_same_mean_and_deviation_as_dense_rows() {
        let dense = array![[0.0, 2.0, 7.0], [3.0, 0.0, 7.0], [0.0, -4.5, 7.0], [0.0, 0.0, 7.0]];
        let mut builder = SparseRowsBuilder::default();
        for row in dense.rows() {
            row.iter().enumerate().for_each(|(column, &value)| builder.push(column as u32, value));
            builder.end_row();
        }
        assert_eq!(fit(&Features::Sparse(builder.build(3))), fit(&Features::Numbers(dense)));
    }
}
