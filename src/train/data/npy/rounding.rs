//! What the numbers of arrays lose when they are rounded.

use std::path::{Path, PathBuf};

use ndarray::Array2;

use super::NpyArray;
use crate::group::{Error, Group};
use crate::train::data::CLASS_NUMBER_LIMIT;
use crate::train::data::numbers::{NumberRange, merge_ranges};
use crate::types::{ReduceOp, plural};

/// A message about rounded numbers names at most this many columns of the data.
const ROUNDED_COLUMNS_SHOWN_MAX: usize = 8;

/// What the numbers of an array of features and of an array of targets lose when they are rounded.
#[derive(Debug)]
pub(crate) struct ArrayRounding {
    /// The files of the features and of the targets.
    paths: [PathBuf; 2],
    /// For each file, the number of integers that f64 may hold only rounded.
    rounded_integers: [u64; 2],
    /// The range of the numbers of each column of the features.
    ranges: Vec<NumberRange>,
}

impl ArrayRounding {
    /// `paths` are the files of the features and of the targets.
    pub(super) fn new(paths: [&Path; 2]) -> Self {
        Self { paths: paths.map(Path::to_owned), rounded_integers: [0; 2], ranges: Vec::new() }
    }

    /// Counts the rounded integers of rows of two arrays: the features and the targets.
    pub(super) fn count_rounded_integers(&mut self, arrays: [&NpyArray; 2]) {
        for (count, array) in self.rounded_integers.iter_mut().zip(arrays) {
            *count += count_rounded_integers(array);
        }
    }

    /// Extends the ranges of the columns of the features by the values of rows.
    pub(super) fn add_features(&mut self, values: &Array2<f64>) {
        self.ranges.resize(values.ncols(), NumberRange::EMPTY);
        for row in values.rows() {
            self.ranges.iter_mut().zip(row).for_each(|(range, &value)| range.add(value));
        }
    }

    /// Returns messages for the user about the arrays of all ranks. All ranks must call this function.
    pub(crate) fn into_notes(mut self, group: &mut Group) -> Result<Vec<String>, Error> {
        group.all_reduce(&mut self.rounded_integers, ReduceOp::Sum)?;
        merge_ranges(group, &mut self.ranges)?;
        let mut notes = Vec::new();
        for (path, count) in self.paths.iter().zip(self.rounded_integers) {
            if count > 0 {
                notes.push(format!(
                    "{}: {count} {} a magnitude of 2^53 or more; ringtrain rounds to 64-bit floating-point numbers",
                    path.display(),
                    plural(count, "integer has", "integers have")
                ));
            }
        }
        notes.extend(describe_rounding(&self.ranges, &self.paths[0]));
        Ok(notes)
    }
}

/// Returns the number of integers that [`NpyArray::values`] may hold only rounded.
fn count_rounded_integers(array: &NpyArray) -> u64 {
    if !array.element_type.is_wide_integer() {
        return 0;
    }
    array.values.iter().filter(|value| value.abs() >= CLASS_NUMBER_LIMIT).count() as u64
}

/// Returns a message for the user that names the columns whose differences f32 cannot represent.
fn describe_rounding(ranges: &[NumberRange], path: &Path) -> Option<String> {
    let rounded = ranges.iter().enumerate().filter(|(_, range)| range.needs_f64());
    let columns: Vec<String> = rounded.map(|(column, _)| column.to_string()).collect();
    let shown =
        columns.iter().take(ROUNDED_COLUMNS_SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if columns.len() > ROUNDED_COLUMNS_SHOWN_MAX { ", ..." } else { "" };
    (!columns.is_empty()).then(|| {
        format!(
            "{}, column {shown}{more} (counted from 0): large numbers that differ little lose their differences as 32-bit \
             floating-point numbers; subtract a constant, such as the mean, from the column before you save the array",
            path.display()
        )
    })
}
