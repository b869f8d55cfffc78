//! Holds the features of samples, and copies features into batches.

use std::sync::Arc;

use ndarray::{Array2, ArrayViewMut2, Axis, concatenate};
use sha2::{Digest, Sha256};

use super::sparse::SparseRows;
use super::text::{TokenWindows, digest_tokens};
use super::{ColumnEncoding, Standardizer, TableEncoding};

/// Features of samples: a row per sample, a column per feature.
#[derive(Clone, PartialEq, Debug)]
pub enum Features {
    /// Numbers, which are used unchanged.
    Numbers(Array2<f32>),
    /// Pixels: each feature is a byte divided by `divisor`. Bytes need a quarter of the memory of f32.
    /// [`write_rows`](Self::write_rows) divides the bytes.
    Pixels {
        /// The bytes: a row for each sample.
        values: Array2<u8>,
        /// Every byte is divided by this number. A byte with this value becomes 1.
        divisor: f32,
    },
    /// The cells of a table for which [`TableEncoding::inputs_equal_cells`] is `false`. The features need much more
    /// memory than the cells, so [`write_rows`](Self::write_rows) computes them for each batch.
    Encoded {
        /// A row of cells for each sample; see [`ColumnInputs`](super::ColumnInputs).
        cells: Array2<f32>,
        /// How cells become features.
        encoding: Arc<TableEncoding>,
    },
    /// Numbers, most of which are 0.
    Sparse(SparseRows),
    /// Windows of a text. Each feature is a token.
    Tokens(TokenWindows),
}

impl Features {
    /// Returns the number of samples.
    pub fn rows(&self) -> usize {
        match self {
            Self::Numbers(values) => values.nrows(),
            Self::Pixels { values, .. } => values.nrows(),
            Self::Encoded { cells, .. } => cells.nrows(),
            Self::Sparse(rows) => rows.rows(),
            Self::Tokens(windows) => windows.len(),
        }
    }

    /// Returns the number of features of each sample.
    pub fn columns(&self) -> usize {
        match self {
            Self::Numbers(values) => values.ncols(),
            Self::Pixels { values, .. } => values.ncols(),
            Self::Encoded { encoding, .. } => encoding.width(),
            Self::Sparse(rows) => rows.columns(),
            Self::Tokens(windows) => windows.context(),
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
            Self::Tokens(windows) => Self::Tokens(windows.select(rows)),
        }
    }

    /// Copies the samples whose indices are in `rows` to the first rows of `out`. Standardizes the copies if there is
    /// a `standardizer`.
    ///
    /// # Panics
    ///
    /// If an index in `rows` is out of range, or if `out` does not have one column for each feature.
    pub fn write_rows(
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
                Self::Encoded { cells, encoding } => {
                    encoding.write_inputs(&cells.row(row), target.view_mut());
                }
                Self::Sparse(rows) => {
                    target.fill(0.0);
                    rows.row(row).for_each(|(column, value)| target[column] = value);
                }
                Self::Tokens(windows) => {
                    let tokens = windows.tokens(row).iter();
                    target.iter_mut().zip(tokens).for_each(|(to, &token)| *to = token.into());
                }
            }
            if let Some(Standardizer { mean, inverse_deviation }) = standardizer {
                for ((value, mean), inverse) in target.iter_mut().zip(mean).zip(inverse_deviation) {
                    *value = (*value - mean) * inverse;
                }
            }
        }
    }

    /// Calls `visit` with the index and the value of each feature that is not 0 in sample `row`.
    pub(crate) fn visit_nonzero_features(&self, row: usize, mut visit: impl FnMut(usize, f32)) {
        let mut visit = |(index, value): (usize, f32)| {
            if value != 0.0 {
                visit(index, value);
            }
        };
        match self {
            Self::Numbers(values) => values.row(row).iter().copied().enumerate().for_each(visit),
            Self::Pixels { values, divisor } => {
                values.row(row).iter().map(|&byte| f32::from(byte) / divisor).enumerate().for_each(visit);
            }
            Self::Encoded { cells, encoding } => {
                encoding.visit_inputs(&cells.row(row), |index, value| visit((index, value)));
            }
            Self::Sparse(rows) => rows.row(row).for_each(visit),
            Self::Tokens(windows) => {
                windows.tokens(row).iter().map(|&token| f32::from(token)).enumerate().for_each(visit);
            }
        }
    }

    /// Returns for each feature whether the feature is a number. Other features have only the values 0 and 1.
    pub(crate) fn which_features_are_numbers(&self) -> Vec<bool> {
        match self {
            Self::Numbers(_) | Self::Pixels { .. } | Self::Sparse(_) | Self::Tokens(_) => {
                vec![true; self.columns()]
            }
            Self::Encoded { encoding, .. } => {
                let inputs = encoding
                    .columns
                    .iter()
                    .flat_map(|column| (0..column.width()).map(|input| input == 0 && column.is_number()));
                inputs.collect()
            }
        }
    }

    /// Returns whether each cell of a text column is NaN or the index of one of the column's inputs, and whether each value
    /// of a sparse row is in one of the columns.
    pub(crate) fn are_valid(&self) -> bool {
        let (cells, encoding) = match self {
            Self::Encoded { cells, encoding } => (cells, encoding),
            Self::Sparse(rows) => return rows.has_valid_columns(),
            Self::Numbers(_) | Self::Pixels { .. } | Self::Tokens(_) => return true,
        };
        let is_valid = |(column, &cell): (&ColumnEncoding, &f32)| {
            column.is_number() || cell.is_nan() || (0.0..column.width() as f32).contains(&cell)
        };
        cells.rows().into_iter().all(|row| encoding.columns.iter().zip(row).all(is_valid))
    }

    /// Returns features with the rows `cells`, and with the columns and the encoding of `self`. Returns `None` for
    /// pixels, sparse rows and texts.
    pub(crate) fn with_cells(&self, cells: Array2<f32>) -> Option<Self> {
        match self {
            Self::Numbers(_) => Some(Self::Numbers(cells)),
            Self::Encoded { encoding, .. } => Some(Self::Encoded { cells, encoding: Arc::clone(encoding) }),
            Self::Pixels { .. } | Self::Sparse(_) | Self::Tokens(_) => None,
        }
    }

    /// Converts pixels of grey images to pixels of colour images with three equal channels. Other features stay as they are.
    pub(super) fn into_colour(self) -> Self {
        match self {
            Self::Pixels { values, divisor } => {
                Self::Pixels { values: concatenate![Axis(1), values, values, values], divisor }
            }
            other => other,
        }
    }

    /// Adds the number of columns, the divisor of pixels and the encoding of a table to a digest.
    pub(crate) fn digest_format(&self, hasher: &mut Sha256) {
        hasher.update((self.columns() as u64).to_le_bytes());
        match self {
            Self::Numbers(_) | Self::Sparse(_) | Self::Tokens(_) => {}
            Self::Pixels { divisor, .. } => hasher.update(divisor.to_le_bytes()),
            Self::Encoded { encoding, .. } => encoding.digest(hasher),
        }
    }

    /// Adds the values of a sample to a digest.
    pub(crate) fn digest_row(&self, row: usize, hasher: &mut Sha256) {
        match self {
            Self::Pixels { values, .. } => hasher.update(values.row(row).to_vec()),
            Self::Numbers(cells) | Self::Encoded { cells, .. } => {
                let bits: Vec<[u8; 4]> = cells.row(row).iter().map(|value| value.to_le_bytes()).collect();
                hasher.update(bits.as_flattened());
            }
            Self::Sparse(rows) => {
                for (column, value) in rows.row(row) {
                    hasher.update((column as u64).to_le_bytes());
                    hasher.update(value.to_le_bytes());
                }
            }
            Self::Tokens(windows) => digest_tokens(windows.tokens(row), hasher),
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn pixels_are_divided_by_their_divisor() {
        let features = Features::Pixels { values: array![[0, 255], [51, 102]], divisor: 255.0 };
        let mut out = Array2::zeros((2, 2));
        features.write_rows([1, 0].into_iter(), None, out.view_mut());
        assert_eq!(out, array![[0.2, 0.4], [0.0, 1.0]]);
    }
}
