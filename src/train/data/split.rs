//! Splits samples into a training set and a test set.

use super::row_map::RowMap;
use super::{Column, DataError, HeldFeatures, UninterpretedSamples};
use crate::train::random;

/// The seed of the split. This seed does not depend on `--seed`, so that runs with different seeds are tested on the same
/// samples.
const SPLIT_SEED: u64 = 1998;

/// The samples of a set that this rank holds, and which rank holds which samples. The map is `None` if each rank holds all
/// samples.
pub(crate) type HeldSet = (UninterpretedSamples<HeldFeatures>, Option<RowMap>);

impl Column {
    /// Returns a copy of the values whose indices are in `rows`.
    pub(crate) fn select(&self, rows: &[usize]) -> Self {
        match self {
            Self::Numbers(values) => Self::Numbers(rows.iter().map(|&row| values[row]).collect()),
            Self::Text(texts) => Self::Text(texts.select(rows)),
        }
    }

    /// Adds the values of more rows of the same column.
    pub(crate) fn append(&mut self, other: Self) {
        match (self, other) {
            (Self::Numbers(values), Self::Numbers(more)) => values.extend(more),
            (Self::Text(texts), Self::Text(more)) => texts.append(more),
            _ => unreachable!("all blocks of a column have the same type"),
        }
    }
}

impl UninterpretedSamples<HeldFeatures> {
    /// Returns a copy of the samples whose indices are in `rows`, which must be sorted.
    fn select(&self, rows: &[usize]) -> Self {
        Self { features: self.features.select(rows), target: self.target.select(rows) }
    }
}

/// Returns the training set and the test set. A shuffle with a fixed seed selects `fraction` of the samples (rounded) for
/// the test set. Both sets keep the order of the samples. `samples` are the samples that this rank holds, and `row_map` says
/// which rank holds which samples; it is `None` if each rank holds all samples.
///
/// # Errors
///
/// If no sample remains for training.
pub(crate) fn split_samples(
    samples: &UninterpretedSamples<HeldFeatures>,
    row_map: Option<&RowMap>,
    fraction: f64,
) -> Result<[HeldSet; 2], DataError> {
    let (train, test) = split_rows(row_map.map_or_else(|| samples.features.rows(), RowMap::rows), fraction)?;
    Ok([train, test].map(|rows| match row_map {
        Some(map) => (samples.select(&map.indices_of_held_rows(&rows)), Some(map.restrict_to_rows(&rows))),
        None => (samples.select(&rows), None),
    }))
}

/// Does what [`split_samples`] does for `rows` samples, but returns only the indices of the training and test samples.
pub(crate) fn split_rows(rows: usize, fraction: f64) -> Result<(Vec<usize>, Vec<usize>), DataError> {
    let test_rows = (rows as f64 * fraction).round() as usize;
    if rows == test_rows {
        let problem = format!("--test-fraction {fraction} leaves none of the {rows} rows for training");
        return Err(DataError::Unsuitable(problem));
    }
    let count = u32::try_from(rows).map_err(|_| {
        DataError::Unsuitable(format!("the data has {rows} rows; the maximum is {}", u32::MAX))
    })?;
    let order = random::permutation(&mut random::random_stream("split", SPLIT_SEED, 0), count);
    let sorted = |chosen: &[u32]| {
        let mut rows: Vec<usize> = chosen.iter().map(|&row| row as usize).collect();
        rows.sort_unstable();
        rows
    };
    let (test, train) = order.split_at(test_rows);
    Ok((sorted(train), sorted(test)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::data::digits;

    #[test]
    fn split_moves_the_given_fraction_of_the_digits_to_the_test_set() {
        let UninterpretedSamples { features, target } = digits::load_digits();
        let held = UninterpretedSamples { features: HeldFeatures::InMemory(features.clone()), target };
        let split = |fraction| {
            split_samples(&held, None, fraction).map(|sets| {
                sets.map(|(set, _)| UninterpretedSamples {
                    features: set.features.into_memory(),
                    target: set.target,
                })
            })
        };
        let samples = UninterpretedSamples { features, target: held.target.clone() };
        let [train, test] = split(0.2).unwrap();
        assert_eq!((train.features.rows(), test.features.rows()), (1438, 359));
        assert_eq!(split(0.2).unwrap()[1], test);
        assert_eq!(split(0.0).unwrap()[0], samples);
        assert!(split(0.9999).is_err());
    }
}
