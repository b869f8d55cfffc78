//! A table as it was read from files. [`RawTable::encode`] chooses how each column is encoded, and then encodes the
//! rows.

use std::collections::BTreeSet;
use std::sync::Arc;

use ndarray::Array2;

use super::encoding::{ColumnEncoding, ColumnInputs, MissingPolicy, TableEncoding};
use super::numbers::{NumberRange, Numbers};
use super::{Column, DataError, Features, Table, TableLayout, Texts};

/// The maximum number of bytes of all category names of a column. The model file and the checkpoint hold these names.
const CATEGORY_BYTES_MAX: usize = 1 << 24;

/// A table as it was read from files.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct RawTable {
    /// The feature columns.
    pub(crate) columns: Vec<RawColumn>,
    /// The name of the column with the target.
    pub(crate) target_name: String,
    /// The target of each row. No target is missing.
    pub(crate) target: Column,
    /// Where the columns are in the files.
    pub(crate) layout: TableLayout,
    /// Messages for the user.
    pub(crate) notes: Vec<String>,
}

/// A column of a feature.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct RawColumn {
    pub(crate) name: String,
    pub(crate) values: RawValues,
}

/// The values of a column.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum RawValues {
    /// Numbers.
    Numbers(Numbers),
    /// Texts. The empty text stands for a missing value.
    Texts(Texts),
}

/// The indices of the rows of a table, divided into sets.
pub(crate) struct RowSets {
    /// The training rows on which the encoding is fitted. Rows that early stopping holds out are not included.
    pub(crate) fitted: Vec<usize>,
    /// All training rows, including the rows that early stopping holds out.
    pub(crate) train: Vec<usize>,
    /// The test rows.
    pub(crate) test: Vec<usize>,
}

/// The training rows and the test rows of a table after encoding.
pub(crate) struct EncodedTable {
    pub(crate) train: Table,
    pub(crate) test: Table,
    pub(crate) encoding: Arc<TableEncoding>,
    pub(crate) layout: TableLayout,
    /// Messages for the user.
    pub(crate) notes: Vec<String>,
}

impl RawTable {
    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.target.len()
    }

    /// Fits the encoding on the rows `fitted`, and encodes the rows `train` and `test`. A text column with at most
    /// `categories_max` distinct texts in the fitted rows has an input for each text. A text column with more
    /// distinct texts is hashed to `categories_max` inputs.
    pub(crate) fn encode(
        self,
        RowSets { fitted, train, test }: &RowSets,
        missing: MissingPolicy,
        categories_max: usize,
    ) -> Result<EncodedTable, DataError> {
        let mut notes = self.notes;
        let mut columns = Vec::with_capacity(self.columns.len());
        for column in &self.columns {
            let inputs = column.fit(fitted, missing, categories_max)?;
            notes.extend(column.describe(&inputs));
            columns.push(ColumnEncoding { name: column.name.clone(), inputs });
        }
        let encoding = Arc::new(TableEncoding { target: self.target_name, missing, columns });
        let (train_cells, unknown_in_validation) = encode_rows(&self.columns, train, &encoding);
        let (test_cells, unknown_in_test) = encode_rows(&self.columns, test, &encoding);
        for (set, unknown) in [("validation", unknown_in_validation), ("test", unknown_in_test)] {
            for (column, count) in self.columns.iter().zip(unknown).filter(|(_, count)| *count > 0) {
                notes.push(format!(
                    "{count} {set} rows have a value of `{}` that no training row has; its inputs are 0 in these rows",
                    column.name
                ));
            }
        }
        let table = |cells, rows| {
            let features = if encoding.is_plain() {
                Features::Numbers(cells)
            } else {
                Features::Encoded { cells, encoding: Arc::clone(&encoding) }
            };
            Table { features, target: self.target.select(rows) }
        };
        let (train, test) = (table(train_cells, train), table(test_cells, test));
        Ok(EncodedTable { train, test, encoding, layout: self.layout, notes })
    }
}

impl RawColumn {
    /// Fits the encoding of this column on `rows`.
    fn fit(
        &self,
        rows: &[usize],
        missing: MissingPolicy,
        categories_max: usize,
    ) -> Result<ColumnInputs, DataError> {
        match &self.values {
            RawValues::Numbers(numbers) => self.fit_numbers(numbers, rows, missing),
            RawValues::Texts(texts) => {
                let categories: BTreeSet<&str> = texts.distinct_in(rows.iter().copied()).collect();
                if categories.len() > categories_max {
                    return Ok(ColumnInputs::Hashed { buckets: categories_max as u32 });
                }
                let bytes: usize = categories.iter().map(|category| category.len()).sum();
                if bytes > CATEGORY_BYTES_MAX {
                    let (name, count) = (&self.name, categories.len());
                    return Err(DataError::Unsuitable(format!(
                        "the {count} distinct texts of column `{name}` have {bytes} bytes; the limit for a column with an \
                         input for each text is {CATEGORY_BYTES_MAX}; pass a smaller --max-categories to hash the texts, or \
                         --drop {name} to leave out the column"
                    )));
                }
                Ok(ColumnInputs::OneHot { categories: categories.into_iter().map(str::to_owned).collect() })
            }
        }
    }

    /// Fits the encoding of a column of numbers on `rows`.
    fn fit_numbers(
        &self,
        numbers: &Numbers,
        rows: &[usize],
        missing: MissingPolicy,
    ) -> Result<ColumnInputs, DataError> {
        let (mut range, mut sum, mut count) = (NumberRange::EMPTY, 0.0, 0_usize);
        // The sum keeps more digits if the first number is subtracted from each large number.
        let mut first = None;
        for value in rows.iter().map(|&row| numbers.get(row)).filter(|value| !value.is_nan()) {
            range.add(value);
            sum += value
                - *first.get_or_insert(match numbers {
                    Numbers::Single(_) => 0.0,
                    Numbers::Double(_) => value,
                });
            count += 1;
        }
        let mean = first.unwrap_or_default() + sum / count as f64;
        let is_filled = matches!(missing, MissingPolicy::Mean | MissingPolicy::Indicator);
        if is_filled && count == 0 {
            let name = &self.name;
            return Err(DataError::Unsuitable(format!(
                "column `{name}` holds no value in the training rows, so it has no mean; pass --drop {name}"
            )));
        }
        let indicator = missing == MissingPolicy::Indicator && count < rows.len();
        if matches!(numbers, Numbers::Double(_)) && range.has_differences() {
            return Ok(ColumnInputs::ShiftedNumber {
                offset: mean,
                fill: is_filled.then_some(0.0),
                indicator,
            });
        }
        Ok(ColumnInputs::Number { fill: is_filled.then_some(mean as f32), indicator })
    }

    /// Returns a message for the user if the column holds text, or numbers that are stored as f64.
    fn describe(&self, inputs: &ColumnInputs) -> Option<String> {
        let name = &self.name;
        let count = match &self.values {
            RawValues::Texts(texts) => texts.distinct.len(),
            RawValues::Numbers(Numbers::Single(_)) => return None,
            RawValues::Numbers(Numbers::Double(_)) => 0,
        };
        Some(match inputs {
            ColumnInputs::Hashed { buckets } => format!(
                "column `{name}` holds text with {count} distinct values: hashed to {buckets} inputs; see --max-categories, or \
                 leave it out with --drop {name}"
            ),
            ColumnInputs::OneHot { .. } => {
                format!("column `{name}` holds text with {count} distinct values: one input for each value")
            }
            ColumnInputs::ShiftedNumber { offset, .. } => format!(
                "column `{name}` holds large numbers that differ little: {offset} is subtracted from each number, because 32-bit \
                 floating-point numbers would lose the differences"
            ),
            ColumnInputs::Number { .. } => format!(
                "column `{name}` holds large numbers that differ too little: treated as constant; subtract a constant from the \
                 column, or leave it out with --drop {name}"
            ),
        })
    }
}

/// Returns the cells of `rows`, and for each column the number of texts without a category.
fn encode_rows(columns: &[RawColumn], rows: &[usize], encoding: &TableEncoding) -> (Array2<f32>, Vec<usize>) {
    let mut cells = Array2::zeros((rows.len(), columns.len()));
    let mut unknown = vec![0; columns.len()];
    let plain = encoding.is_plain();
    for (index, (column, encoding)) in columns.iter().zip(&encoding.columns).enumerate() {
        let to = cells.column_mut(index);
        match &column.values {
            RawValues::Numbers(numbers) => {
                let fill = encoding.fill().filter(|_| plain).unwrap_or(f32::NAN);
                for (cell, &row) in to.into_iter().zip(rows) {
                    let value = numbers.get(row);
                    *cell = if value.is_nan() { fill } else { encoding.number_cell(value) };
                }
            }
            RawValues::Texts(Texts { indices, distinct }) => {
                let cell_of: Vec<f32> = distinct.iter().map(|text| encoding.text_cell(text)).collect();
                for (cell, &row) in to.into_iter().zip(rows) {
                    *cell = cell_of[indices[row] as usize];
                    unknown[index] += usize::from(cell.is_nan());
                }
            }
        }
    }
    (cells, unknown)
}
