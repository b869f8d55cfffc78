//! Collects the numbers of a column without losing small differences between large numbers.
//!
//! The inputs of a model are f32 numbers, which have 24 significant bits. As f32, times in seconds since 1970 are
//! rounded to multiples of 128 s. A column whose numbers are much closer to each other than to 0 is stored as f64
//! until its encoding is chosen. The encoding `ShiftedNumber` subtracts the mean before the numbers become f32.

use std::sync::Arc;

use super::DataError;
use super::stream_file::StreamFile;
use super::value_store::{ValueReader, ValueStore};
use crate::group::{Error, Group};
use crate::types::ReduceOp;

/// A column is narrow if its range times this factor is less than its largest magnitude. In a column that is not narrow,
/// rounding to f32 changes the numbers by at most 2^-14 of their range.
const NARROW_IF_MAGNITUDE_OVER_RANGE: f64 = 1024.0;
/// For a column whose numbers are all exact as f32, this factor replaces [`NARROW_IF_MAGNITUDE_OVER_RANGE`]. In such a
/// column, rounding to f32 changes only the mean, and not the numbers.
const VERY_NARROW_IF_MAGNITUDE_OVER_RANGE: f64 = (1_u64 << 20) as f64;
/// A column counts as constant if its range times this factor is less than its largest magnitude: rounding of f64
/// numbers may have caused the differences.
const CONSTANT_IF_MAGNITUDE_OVER_RANGE: f64 = (1_u64 << 44) as f64;

/// The numbers of a column. NaN represents a missing value.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq))]
pub(crate) enum Numbers {
    /// Numbers that an f32 represents well enough.
    Single(ValueStore<f32>),
    /// Numbers whose differences would be lost or inexact as f32.
    Double(ValueStore<f64>),
}

impl Numbers {
    /// Returns a reader of the numbers.
    pub(crate) fn reader(&self) -> NumberReader<'_> {
        match self {
            Self::Single(values) => NumberReader::Single(values.reader()),
            Self::Double(values) => NumberReader::Double(values.reader()),
        }
    }
}

/// Reads the numbers of a column. Access is fast if successive rows are close to each other.
#[derive(Debug)]
pub(crate) enum NumberReader<'a> {
    Single(ValueReader<'a, f32>),
    Double(ValueReader<'a, f64>),
}

impl NumberReader<'_> {
    /// Returns the number of a row.
    pub(crate) fn get(&mut self, row: usize) -> Result<f64, DataError> {
        match self {
            Self::Single(values) => values.get(row).map(f64::from),
            Self::Double(values) => values.get(row),
        }
    }
}

/// The range of numbers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct NumberRange {
    /// The smallest number.
    low: f64,
    /// The largest number.
    high: f64,
    /// Whether every number is an exact f32.
    is_exact: bool,
}

impl NumberRange {
    /// The range of no numbers.
    pub(crate) const EMPTY: Self = Self { low: f64::INFINITY, high: f64::NEG_INFINITY, is_exact: true };

    /// Extends the range by a number.
    pub(crate) fn add(&mut self, value: f64) {
        self.low = self.low.min(value);
        self.high = self.high.max(value);
        self.is_exact &= f64::from(value as f32) == value;
    }

    /// Returns whether the range times `ratio` is less than the largest magnitude. A result of `false` stays `false`
    /// when more numbers are added.
    fn is_narrow(&self, ratio: f64) -> bool {
        (self.high - self.low) * ratio < self.low.abs().max(self.high.abs())
    }

    /// Returns whether differences between the numbers are lost or inexact as f32.
    pub(crate) fn needs_f64(&self) -> bool {
        let is_inexact = !self.is_exact || self.is_narrow(VERY_NARROW_IF_MAGNITUDE_OVER_RANGE);
        self.low < self.high && self.is_narrow(NARROW_IF_MAGNITUDE_OVER_RANGE) && is_inexact
    }

    /// Returns whether the numbers differ by more than the rounding of f64 numbers can explain.
    pub(crate) fn has_differences(&self) -> bool {
        self.low < self.high && !self.is_narrow(CONSTANT_IF_MAGNITUDE_OVER_RANGE)
    }
}

/// Extends each range by the numbers of the other ranks. All ranks must pass the same number of ranges.
pub(crate) fn merge_ranges(group: &mut Group, ranges: &mut [NumberRange]) -> Result<(), Error> {
    let bounds = |range: &NumberRange| [range.low, -range.high, f64::from(u8::from(range.is_exact))];
    let mut lowest: Vec<f64> = ranges.iter().flat_map(bounds).collect();
    group.all_reduce(&mut lowest, ReduceOp::Min)?;
    for (range, &[low, negative_high, is_exact]) in ranges.iter_mut().zip(lowest.as_chunks().0) {
        *range = NumberRange { low, high: -negative_high, is_exact: is_exact > 0.0 };
    }
    Ok(())
}

/// Collects the numbers of a column. Stores the numbers as f64 while their range is narrow, and otherwise as f32.
#[derive(Debug)]
pub(crate) struct NumberCollector {
    numbers: Numbers,
    range: NumberRange,
}

impl NumberCollector {
    /// Creates a column without numbers. The numbers are stored in memory, or in `file` if there is one.
    pub(crate) fn new(file: Option<Arc<StreamFile>>) -> Self {
        Self { numbers: Numbers::Double(ValueStore::new(file)), range: NumberRange::EMPTY }
    }

    /// Adds the number of the next row, or NaN for a missing value.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or written.
    pub(crate) fn push(&mut self, value: f64) -> Result<(), DataError> {
        if !value.is_nan() {
            self.range.add(value);
        }
        match &mut self.numbers {
            Numbers::Single(values) => values.push(value as f32)?,
            Numbers::Double(values) => {
                values.push(value)?;
                if !value.is_nan() && !self.range.is_narrow(NARROW_IF_MAGNITUDE_OVER_RANGE) {
                    self.numbers = Numbers::Single(to_f32(values)?);
                }
            }
        }
        Ok(())
    }

    /// Returns the range of the numbers of this rank.
    pub(crate) fn range(&self) -> NumberRange {
        self.range
    }

    /// Returns the collected numbers. `range` is the range of the numbers of all ranks, so that all ranks choose the
    /// same type.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or written.
    pub(crate) fn into_numbers(self, range: NumberRange) -> Result<Numbers, DataError> {
        Ok(match self.numbers {
            Numbers::Double(values) if !range.needs_f64() => Numbers::Single(to_f32(&values)?),
            // If the range of this rank is not narrow, the range of all ranks is not narrow either.
            numbers => numbers,
        })
    }
}

fn to_f32(values: &ValueStore<f64>) -> Result<ValueStore<f32>, DataError> {
    values.map(|value| value as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_close_to_each_other_stay_exact() {
        let collect = |values: &[f64]| {
            let mut collector = NumberCollector::new(None);
            for &value in values {
                collector.push(value).unwrap();
            }
            let range = collector.range();
            collector.into_numbers(range).unwrap()
        };
        for values in [
            &[1_700_000_000.0, f64::NAN, 1_700_000_001.0][..],
            &[-16_777_217.0, -16_777_216.0],
            // The numbers are exact as f32, but their mean is not.
            &[16_777_215.0, 16_777_216.0],
            &[1000.1, 1000.2],
            &[1e-3, 1.000_001e-3],
            &[1.0, 1.0 + 1e-15],
        ] {
            let Numbers::Double(found) = collect(values) else { panic!("{values:?} became f32") };
            let found = found.to_vec();
            assert!(found.iter().zip(values).all(|(a, b)| a.to_bits() == b.to_bits()), "{found:?}");
        }
        for values in [
            &[][..],
            &[f64::NAN],
            &[0.0],
            &[7.7, 7.7, f64::NAN],
            &[0.1, 0.2],
            // The numbers are exact as f32.
            &[2013.0, 2014.0],
            // The last number, or the first number, is far from the others.
            &[1_700_000_000.0, 1_700_000_001.0, f64::NAN, 0.0],
            &[0.0, f64::NAN, 1_700_000_000.0, 1_700_000_001.0],
        ] {
            let Numbers::Single(found) = collect(values) else { panic!("{values:?} stayed f64") };
            let found = found.to_vec();
            let expected: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{found:?}");
            assert_eq!(found.len(), values.len());
        }
    }
}
