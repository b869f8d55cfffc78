//! Splits a table into a training set and a test set.

use super::{Column, DataError, Table};
use crate::train::random;

/// The seed of the split. This seed does not depend on `--seed`, so that runs with different seeds are tested on the same
/// samples.
const SPLIT_SEED: u64 = 1998;

impl Column {
    /// Returns a copy of the values whose indices are in `rows`.
    fn select(&self, rows: &[usize]) -> Self {
        match self {
            Self::Numbers(values) => Self::Numbers(rows.iter().map(|&row| values[row]).collect()),
            Self::Text(values) => Self::Text(rows.iter().map(|&row| values[row].clone()).collect()),
        }
    }
}

/// Returns the training set and the test set. The test set is `fraction` of the rows (rounded), chosen by a fixed shuffle. Both
/// sets keep the order of the table.
///
/// # Errors
///
/// If no row remains for training.
pub(crate) fn split(table: &Table, fraction: f64) -> Result<(Table, Table), DataError> {
    let rows = table.features.rows();
    let test_rows = (rows as f64 * fraction).round() as usize;
    if rows == test_rows {
        let problem = format!("--test-fraction {fraction} leaves none of the {rows} rows for training");
        return Err(DataError::Unsuitable(problem));
    }
    let count =
        u32::try_from(rows).map_err(|_| DataError::Unsuitable(format!("{rows} rows are too many")))?;
    let order = random::permutation(&mut random::stream("split", SPLIT_SEED, 0), count);
    let select = |chosen: &[u32]| {
        let mut rows: Vec<usize> = chosen.iter().map(|&row| row as usize).collect();
        rows.sort_unstable();
        Table { features: table.features.select(&rows), target: table.target.select(&rows) }
    };
    let (test, train) = order.split_at(test_rows);
    Ok((select(train), select(test)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::data::digits;

    #[test]
    fn a_fifth_of_the_digits_is_used_for_testing() {
        let table = digits::load();
        let (train, test) = split(&table, 0.2).unwrap();
        assert_eq!((train.features.rows(), test.features.rows()), (1438, 359));
        assert_eq!(split(&table, 0.2).unwrap().1, test);
        assert_eq!(split(&table, 0.0).unwrap().0, table);
        assert!(split(&table, 0.9999).is_err());
    }
}
