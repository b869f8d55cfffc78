//! Holds the features of samples, and copies features into batches.

use std::sync::Arc;

use ndarray::{Array2, ArrayViewMut2, Axis};
use sha2::{Digest, Sha256};

use super::TableEncoding;
use super::sparse::SparseRows;

/// Features of samples: a row per sample, a column per feature.
#[derive(Clone, PartialEq, Debug)]
pub enum Features {
    /// Numbers, which are used unchanged.
    Numbers(Array2<f32>),
    /// Pixels: each feature is a byte divided by `divisor`. Bytes need a quarter of the memory of f32.
    /// [`gather`](Self::gather) divides the bytes.
    Pixels {
        /// The bytes.
        values: Array2<u8>,
        /// Every byte is divided by this number. A byte with this value becomes 1.
        divisor: f32,
    },
    /// The cells of a table for which [`TableEncoding::is_plain`] is `false`. The features need much more memory than
    /// the cells, so [`gather`](Self::gather) computes them for each batch.
    Encoded {
        /// A row of cells for each sample; see [`ColumnInputs`](super::ColumnInputs).
        cells: Array2<f32>,
        /// How cells become features.
        encoding: Arc<TableEncoding>,
    },
    /// Numbers, most of which are 0.
    Sparse(SparseRows),
}

impl Features {
    /// Returns the number of samples.
    pub fn rows(&self) -> usize {
        match self {
            Self::Numbers(values) => values.nrows(),
            Self::Pixels { values, .. } => values.nrows(),
            Self::Encoded { cells, .. } => cells.nrows(),
            Self::Sparse(rows) => rows.rows(),
        }
    }

    /// Returns the number of features of each sample.
    pub fn columns(&self) -> usize {
        match self {
            Self::Numbers(values) => values.ncols(),
            Self::Pixels { values, .. } => values.ncols(),
            Self::Encoded { encoding, .. } => encoding.width(),
            Self::Sparse(rows) => rows.columns(),
        }
    }

    /// Returns a copy of the samples whose indices are in `rows`.
    ///
    /// # Panics
    ///
    /// If an index in `rows` is out of range.
    #[must_use]
    pub fn select(&self, rows: &[usize]) -> Self {
        match self {
            Self::Numbers(values) => Self::Numbers(values.select(Axis(0), rows)),
            Self::Pixels { values, divisor } => {
                Self::Pixels { values: values.select(Axis(0), rows), divisor: *divisor }
            }
            Self::Encoded { cells, encoding } => {
                Self::Encoded { cells: cells.select(Axis(0), rows), encoding: Arc::clone(encoding) }
            }
            Self::Sparse(values) => Self::Sparse(values.select(rows)),
        }
    }

    /// Copies the samples whose indices are in `rows` to the first rows of `out`. Standardizes the copies if there is
    /// a `standardizer`.
    ///
    /// # Panics
    ///
    /// If an index in `rows` is out of range, or if `out` does not have one column for each feature.
    pub fn gather(
        &self,
        rows: impl Iterator<Item = usize>,
        standardizer: Option<&Standardizer>,
        mut out: ArrayViewMut2<'_, f32>,
    ) {
        for (row, mut target) in rows.zip(out.rows_mut()) {
            match self {
                Self::Numbers(values) => target.assign(&values.row(row)),
                Self::Pixels { values, divisor } => {
                    target.zip_mut_with(&values.row(row), |to, &from| *to = f32::from(from) / divisor);
                }
                Self::Encoded { cells, encoding } => encoding.expand(&cells.row(row), target.view_mut()),
                Self::Sparse(rows) => {
                    target.fill(0.0);
                    rows.row(row).for_each(|(column, value)| target[column] = value);
                }
            }
            if let Some(Standardizer { mean, inverse_deviation }) = standardizer {
                for ((value, mean), inverse) in target.iter_mut().zip(mean).zip(inverse_deviation) {
                    *value = (*value - mean) * inverse;
                }
            }
        }
    }

    /// Adds the shape and the values to `hasher`.
    pub(crate) fn digest(&self, hasher: &mut Sha256) {
        hasher.update((self.rows() as u64).to_le_bytes());
        hasher.update((self.columns() as u64).to_le_bytes());
        match self {
            Self::Numbers(values) => digest_numbers(values, hasher),
            Self::Pixels { values, divisor } => {
                hasher.update(divisor.to_le_bytes());
                for row in values.rows() {
                    hasher.update(row.to_vec());
                }
            }
            Self::Encoded { cells, encoding } => {
                encoding.digest(hasher);
                digest_numbers(cells, hasher);
            }
            Self::Sparse(rows) => {
                for row in 0..rows.rows() {
                    for (column, value) in rows.row(row) {
                        hasher.update((column as u64).to_le_bytes());
                        hasher.update(value.to_le_bytes());
                    }
                    hasher.update(u64::MAX.to_le_bytes());
                }
            }
        }
    }
}

/// Adds the numbers to a digest, row by row.
fn digest_numbers(values: &Array2<f32>, hasher: &mut Sha256) {
    for row in values.rows() {
        let bits: Vec<[u8; 4]> = row.iter().map(|value| value.to_le_bytes()).collect();
        hasher.update(bits.as_flattened());
    }
}

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
    /// Computes the mean and the standard deviation of each feature. The computation uses f64 and two passes, so that
    /// large means do not reduce the precision. Also returns the indices of the features that differ too little to be
    /// scaled. Like constant features, these features become 0.
    pub fn fit(features: &Features) -> (Self, Vec<usize>) {
        let (rows, columns) = (features.rows(), features.columns());
        let mut row_values = Array2::<f32>::zeros((1, columns));
        let mut mean = vec![0.0_f64; columns];
        let mut is_constant = vec![true; columns];
        let mut first_values: Option<Vec<f32>> = None;
        for row in 0..rows {
            features.gather(std::iter::once(row), None, row_values.view_mut());
            mean.iter_mut().zip(&row_values).for_each(|(sum, &value)| *sum += f64::from(value));
            let first_values = first_values.get_or_insert_with(|| row_values.iter().copied().collect());
            for ((is_constant, value), first) in is_constant.iter_mut().zip(&row_values).zip(first_values) {
                *is_constant &= value == first;
            }
        }
        for sum in &mut mean {
            *sum /= rows.max(1) as f64;
        }
        let mut variance = vec![0.0_f64; columns];
        for row in 0..rows {
            features.gather(std::iter::once(row), None, row_values.view_mut());
            for ((sum, &value), mean) in variance.iter_mut().zip(&row_values).zip(&mean) {
                *sum += (f64::from(value) - mean).powi(2);
            }
        }
        let deviations = variance.iter().map(|sum| (sum / rows.max(1) as f64).sqrt());
        let inverse_deviation: Vec<f32> =
            deviations.zip(&mean).map(|(deviation, mean)| invert_deviation(deviation, *mean)).collect();
        let is_ignored = |&column: &usize| !is_constant[column] && inverse_deviation[column] == 0.0;
        let ignored = (0..columns).filter(is_ignored).collect();
        (Self { mean: mean.iter().map(|&mean| mean as f32).collect(), inverse_deviation }, ignored)
    }
}

/// Returns 1 / `deviation`. Returns 0 if `deviation` may be a rounding error, or if the inverse is not finite as f32.
fn invert_deviation(deviation: f64, mean: f64) -> f32 {
    let inverse = (1.0 / deviation) as f32;
    if deviation <= 1e-7 * mean.abs() || !inverse.is_finite() { 0.0 } else { inverse }
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn standardized_features_have_mean_0_and_deviation_1() {
        let features =
            Features::Numbers(array![[1.0, 7.7, 1e6], [2.0, 7.7, 1e6 + 2.0], [6.0, 7.7, 1e6 + 4.0]]);
        let (standardizer, ignored) = Standardizer::fit(&features);
        assert!(ignored.is_empty(), "{ignored:?}");
        let mut out = Array2::zeros((3, 3));
        features.gather(0..3, Some(&standardizer), out.view_mut());
        for (column, deviation) in [1.0, 0.0, 1.0].into_iter().enumerate() {
            let values = out.column(column);
            assert!(values.mean().unwrap().abs() < 1e-5, "{values}");
            assert!((values.std(0.0) - deviation).abs() < 1e-3, "{values}");
        }
    }

    /// Regression test: before the fix, the inverse of a tiny deviation was infinite, so the loss was NaN.
    #[test]
    fn features_that_differ_too_little_become_0_and_are_named() {
        let features = Features::Numbers(array![
            [1e-39, 1e-38, 7.7, 16_777_216.0, 0.0],
            [2e-39, 3e-38, 7.7, 16_777_218.0, 0.0],
            [3e-39, 2e-38, 7.7, 16_777_216.0, 0.0]
        ]);
        let (standardizer, ignored) = Standardizer::fit(&features);
        assert_eq!(ignored, [0, 3]);
        let is_used: Vec<bool> =
            standardizer.inverse_deviation.iter().map(|&inverse| inverse > 0.0).collect();
        assert_eq!(is_used, [false, true, false, false, false]);
        assert!(standardizer.inverse_deviation.iter().all(|inverse| inverse.is_finite()));
    }

    #[test]
    fn gather_divides_pixels_by_their_divisor() {
        let features = Features::Pixels { values: array![[0, 255], [51, 102]], divisor: 255.0 };
        let mut out = Array2::zeros((2, 2));
        features.gather([1, 0].into_iter(), None, out.view_mut());
        assert_eq!(out, array![[0.2, 0.4], [0.0, 1.0]]);
    }
}
