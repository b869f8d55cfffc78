//! A table whose columns are not encoded yet. Each rank holds a part of the rows. [`RawTable::encode`] chooses the
//! encoding of each column, and then encodes the rows. The choice depends on the rows of all ranks, and is the same on
//! all ranks.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ndarray::Array2;

use super::dates::parse_date;
use super::disk_features::FeatureWriter;
use super::encoding::{ColumnEncoding, ColumnInputs, MissingPolicy, TableEncoding};
use super::exact_sum::{self, ExactSum};
use super::numbers::{NumberRange, NumberReader, Numbers, merge_ranges};
use super::row_map::RowMap;
use super::texts::advise_about_commas;
use super::value_store::{ValueReader, ValueStore};
use super::{Column, DataError, Features, HeldFeatures, TableLayout, UninterpretedSamples};
use crate::group::Group;
use crate::train::rank_checks::check_all_succeeded;
use crate::train::{RunPhase, TrainError};
use crate::types::{ReduceOp, counted, plural};

/// The maximum number of bytes of all category names of a column. The model file and the checkpoint hold these names.
const CATEGORY_BYTES_MAX: usize = 1 << 24;

/// If the first distinct texts of a text column are all dates, a message suggests the option `--dates`. At most this
/// number of texts are parsed.
const TEXTS_TRIED_AS_DATES_MAX: usize = 20;

/// The number of rows that are encoded at once.
const ENCODED_ROWS: usize = 1024;

/// A table that was read from files, and whose columns are not encoded yet.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq))]
pub(crate) struct RawTable {
    /// Which rank holds which rows. The columns and the target hold the rows of this rank.
    pub(crate) row_map: RowMap,
    /// The number of the first row of the test source. `None` if there is no test source.
    pub(crate) first_test_row: Option<usize>,
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

/// A feature column that is not encoded yet.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq))]
pub(crate) struct RawColumn {
    pub(crate) name: String,
    /// Whether the values are dates. Dates are stored as numbers.
    pub(crate) is_date: bool,
    pub(crate) values: RawValues,
}

/// The values of a feature column that is not encoded yet.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq))]
pub(crate) enum RawValues {
    /// Numbers.
    Numbers(Numbers),
    /// Texts. The empty text stands for a missing value.
    Texts(RawTexts),
}

/// The texts of a feature column that is not encoded yet.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq))]
pub(crate) struct RawTexts {
    /// The index in `distinct` of the text of each row.
    pub(crate) indices: ValueStore<u32>,
    /// The distinct texts.
    pub(crate) distinct: Vec<Arc<str>>,
}

impl RawTexts {
    /// Returns the distinct texts that occur in `rows`, in the order of `distinct`.
    fn distinct_in(&self, rows: &[usize]) -> Result<impl Iterator<Item = &str>, DataError> {
        let mut used = vec![false; self.distinct.len()];
        let mut indices = self.indices.reader();
        for &row in rows {
            used[indices.get(row)? as usize] = true;
        }
        Ok(self.distinct.iter().zip(used).filter(|(_, used)| *used).map(|(text, _)| &**text))
    }
}

/// The rows of all ranks, divided into sets. Each set holds row numbers in ascending order.
pub(crate) struct RowSets {
    /// The training rows on which the encoding is fitted. Rows that early stopping holds out are not included.
    pub(crate) fitted: Vec<usize>,
    /// All training rows, including the rows that early stopping holds out.
    pub(crate) train: Vec<usize>,
    /// The test rows.
    pub(crate) test: Vec<usize>,
}

/// The encoded training rows and test rows of this rank.
pub(crate) struct EncodedTable {
    pub(crate) train: UninterpretedSamples<HeldFeatures>,
    pub(crate) test: UninterpretedSamples<HeldFeatures>,
    /// Which rank holds which training rows.
    pub(crate) train_row_map: RowMap,
    /// Which rank holds which test rows.
    pub(crate) test_row_map: RowMap,
    pub(crate) encoding: Arc<TableEncoding>,
    pub(crate) layout: TableLayout,
    /// Messages for the user.
    pub(crate) notes: Vec<String>,
}

impl RawTable {
    /// Fits the encoding on the rows in `fitted`, and encodes this rank's rows of `train` and `test`. A text column with
    /// at most `categories_max` distinct texts in the fitted rows has an input for each text. A text column with more
    /// distinct texts is hashed to `categories_max` inputs. The encoded rows are stored in memory, or in files in
    /// `stream_directory` if there is one. All ranks must call this function.
    pub(crate) fn encode(
        self,
        RowSets { fitted, train, test }: &RowSets,
        (missing, categories_max): (MissingPolicy, usize),
        stream_directory: Option<&Path>,
        group: &mut Group,
    ) -> Result<EncodedTable, TrainError> {
        let [fitted_here, train_here, test_here] =
            [fitted, train, test].map(|set| self.row_map.indices_of_held_rows(set));
        let inputs = self.fit_columns(&fitted_here, (missing, categories_max), group)?;
        let mut notes = self.notes;
        let mut columns = Vec::with_capacity(self.columns.len());
        for (column, inputs) in self.columns.iter().zip(inputs) {
            notes.extend(column.note_about_inputs(&inputs));
            columns.push(ColumnEncoding { name: column.name.clone(), is_date: column.is_date, inputs });
        }
        let encoding = Arc::new(TableEncoding { target: self.target_name, missing, columns });
        let make_features = |cells: Array2<f32>| {
            if encoding.inputs_equal_cells() {
                Features::Numbers(cells)
            } else {
                Features::Encoded { cells, encoding: Arc::clone(&encoding) }
            }
        };
        let width = self.columns.len();
        let encode_set = |rows: &[usize]| -> Result<_, DataError> {
            if let Some(directory) = stream_directory {
                let mut writer = FeatureWriter::create(directory, &make_features(Array2::zeros((0, width))))?;
                let append = |block| writer.append(&make_features(block));
                let unknown = encode_rows(&self.columns, rows, &encoding, append)?;
                return Ok((HeldFeatures::OnDisk(writer.finish()), unknown));
            }
            let mut cells = Vec::with_capacity(rows.len() * width);
            let append = |block: Array2<f32>| {
                cells.extend(block);
                Ok(())
            };
            let unknown = encode_rows(&self.columns, rows, &encoding, append)?;
            let cells = Array2::from_shape_vec((rows.len(), width), cells).expect("each row has its cells");
            Ok((HeldFeatures::InMemory(make_features(cells)), unknown))
        };
        let encoded = encode_set(&train_here).and_then(|train| Ok((train, encode_set(&test_here)?)));
        let ((train_features, unknown_in_validation), (test_features, unknown_in_test)) =
            check_all_succeeded(group, RunPhase::Data, encoded.map_err(TrainError::from))?;
        let mut unknown = [unknown_in_validation, unknown_in_test].concat();
        group.all_reduce(&mut unknown, ReduceOp::Sum)?;
        for (set, unknown) in
            ["validation", "test"].into_iter().zip(unknown.chunks(self.columns.len().max(1)))
        {
            for (column, count) in self.columns.iter().zip(unknown).filter(|(_, count)| **count > 0) {
                notes.push(format!(
                    "{count} {set} {} a value of `{}` that no training row has; its inputs are 0 there",
                    plural(count, "row has", "rows have"),
                    column.name
                ));
            }
        }
        let make_samples =
            |features, rows: &[usize]| UninterpretedSamples { features, target: self.target.select(rows) };
        Ok(EncodedTable {
            train: make_samples(train_features, &train_here),
            test: make_samples(test_features, &test_here),
            train_row_map: self.row_map.restrict_to_rows(train),
            test_row_map: self.row_map.restrict_to_rows(test),
            encoding,
            layout: self.layout,
            notes,
        })
    }

    /// Fits the encoding of each column. `rows` holds the indices of this rank's rows on which the encoding is
    /// fitted.
    fn fit_columns(
        &self,
        rows: &[usize],
        (missing, categories_max): (MissingPolicy, usize),
        group: &mut Group,
    ) -> Result<Vec<ColumnInputs>, TrainError> {
        let read_columns = self.columns.iter().map(|column| -> Result<_, DataError> {
            Ok((column.number_statistics(rows)?, column.distinct_texts(rows, categories_max)?))
        });
        let read_columns: Result<Vec<_>, _> = read_columns.collect();
        let read_columns =
            check_all_succeeded(group, RunPhase::Data, read_columns.map_err(TrainError::from))?;
        let (mut numbers, texts): (Vec<_>, Vec<_>) = read_columns.into_iter().unzip();
        merge_statistics(group, &mut numbers)?;
        let texts = merge_distinct_texts(group, &texts, categories_max)?;
        let mut row_count = [rows.len() as u64];
        group.all_reduce(&mut row_count, ReduceOp::Sum)?;
        let columns = self.columns.iter().zip(numbers.iter().zip(texts));
        let inputs = columns.map(|(column, (numbers, texts))| match &column.values {
            RawValues::Numbers(_) => column.fit_numbers(numbers, row_count[0], missing),
            RawValues::Texts(_) => column.fit_texts(texts, categories_max),
        });
        Ok(inputs.collect::<Result<_, DataError>>()?)
    }
}

/// Statistics of the numbers of a column. Missing numbers do not count.
struct NumberStatistics {
    range: NumberRange,
    sum: ExactSum,
    /// The number of values that are not missing.
    count: u64,
}

/// Replaces the statistics of this rank by the statistics of all ranks.
fn merge_statistics(group: &mut Group, statistics: &mut [NumberStatistics]) -> Result<(), TrainError> {
    let mut ranges: Vec<NumberRange> = statistics.iter().map(|column| column.range).collect();
    merge_ranges(group, &mut ranges)?;
    let mut sums: Vec<ExactSum> = statistics.iter().map(|column| column.sum.clone()).collect();
    exact_sum::add_sums_of_ranks(group, &mut sums)?;
    let mut counts: Vec<u64> = statistics.iter().map(|column| column.count).collect();
    group.all_reduce(&mut counts, ReduceOp::Sum)?;
    let merged = ranges.into_iter().zip(sums).zip(counts);
    for (column, ((range, sum), count)) in statistics.iter_mut().zip(merged) {
        *column = NumberStatistics { range, sum, count };
    }
    Ok(())
}

/// Merges the distinct texts of all ranks. `columns` holds the distinct texts of each column on this rank. Returns the
/// distinct texts of each column on all ranks, or `None` for a column that has more than `count_max` distinct texts.
fn merge_distinct_texts(
    group: &mut Group,
    columns: &[Option<BTreeSet<&str>>],
    count_max: usize,
) -> Result<Vec<Option<BTreeSet<String>>>, TrainError> {
    let own: Vec<Option<Vec<String>>> = columns
        .iter()
        .map(|texts| texts.as_ref().map(|texts| texts.iter().map(|&text| text.to_owned()).collect()))
        .collect();
    let mut merged = vec![Some(BTreeSet::new()); columns.len()];
    for rank in group.all_gather_object(&own)? {
        for (merged, texts) in merged.iter_mut().zip(rank) {
            *merged = merged.take().zip(texts).and_then(|(mut merged, texts)| {
                merged.extend(texts);
                (merged.len() <= count_max).then_some(merged)
            });
        }
    }
    Ok(merged)
}

impl RawColumn {
    /// Returns the distinct texts in `rows`. Returns `None` if there are more than `count_max` of them, and an empty
    /// set for a column of numbers.
    fn distinct_texts(&self, rows: &[usize], count_max: usize) -> Result<Option<BTreeSet<&str>>, DataError> {
        let RawValues::Texts(texts) = &self.values else { return Ok(Some(BTreeSet::new())) };
        let distinct: BTreeSet<&str> = texts.distinct_in(rows)?.take(count_max + 1).collect();
        Ok((distinct.len() <= count_max).then_some(distinct))
    }

    /// Fits the encoding of a text column. `texts` holds the distinct texts, or `None` if there are more than
    /// `categories_max`.
    fn fit_texts(
        &self,
        texts: Option<BTreeSet<String>>,
        categories_max: usize,
    ) -> Result<ColumnInputs, DataError> {
        let Some(categories) = texts else {
            return Ok(ColumnInputs::Hashed { buckets: categories_max as u32 });
        };
        let bytes: usize = categories.iter().map(String::len).sum();
        if bytes > CATEGORY_BYTES_MAX {
            let (name, count) = (&self.name, categories.len());
            return Err(DataError::Unsuitable(format!(
                "the {count} distinct texts of column `{name}` have {bytes} bytes; the limit for a column with an input for each \
                 text is {CATEGORY_BYTES_MAX}; pass a smaller --max-categories to hash the texts, or --drop {name} to leave out \
                 the column"
            )));
        }
        Ok(ColumnInputs::OneHot { categories: categories.into_iter().collect() })
    }

    /// Returns the statistics of the numbers in `rows`. A text column has no numbers.
    fn number_statistics(&self, rows: &[usize]) -> Result<NumberStatistics, DataError> {
        let mut statistics = NumberStatistics { range: NumberRange::EMPTY, sum: ExactSum::ZERO, count: 0 };
        let RawValues::Numbers(numbers) = &self.values else { return Ok(statistics) };
        let mut numbers = numbers.reader();
        for &row in rows {
            let value = numbers.get(row)?;
            if !value.is_nan() {
                statistics.range.add(value);
                statistics.sum.add(value);
                statistics.count += 1;
            }
        }
        Ok(statistics)
    }

    /// Fits the encoding of a column of numbers to its statistics. `row_count` is the number of rows, including rows in
    /// which the number is missing.
    fn fit_numbers(
        &self,
        NumberStatistics { range, sum, count }: &NumberStatistics,
        row_count: u64,
        missing: MissingPolicy,
    ) -> Result<ColumnInputs, DataError> {
        let (mean, count) = (sum.value() / *count as f64, *count);
        let is_filled = matches!(missing, MissingPolicy::Mean | MissingPolicy::Indicator);
        if is_filled && count == 0 {
            let name = &self.name;
            return Err(DataError::Unsuitable(format!(
                "column `{name}` holds no value in the training rows, so it has no mean; pass --drop {name}"
            )));
        }
        let indicator = missing == MissingPolicy::Indicator && count < row_count;
        if matches!(self.values, RawValues::Numbers(Numbers::Double(_))) && range.has_differences() {
            return Ok(ColumnInputs::ShiftedNumber {
                offset: mean,
                fill: is_filled.then_some(0.0),
                indicator,
            });
        }
        Ok(ColumnInputs::Number { fill: is_filled.then_some(mean as f32), indicator })
    }

    /// Returns whether the first texts of a text column are all dates.
    fn texts_are_dates(&self) -> bool {
        let RawValues::Texts(texts) = &self.values else { return false };
        let mut shown =
            texts.distinct.iter().filter(|text| !text.is_empty()).take(TEXTS_TRIED_AS_DATES_MAX).peekable();
        shown.peek().is_some() && shown.all(|text| parse_date(text.as_bytes()).is_ok())
    }

    /// Returns a message for the user if the column holds text, or numbers that are stored as f64.
    fn note_about_inputs(&self, inputs: &ColumnInputs) -> Option<String> {
        let name = &self.name;
        if matches!(self.values, RawValues::Numbers(Numbers::Single(_))) {
            return None;
        }
        let advice = match &self.values {
            _ if self.texts_are_dates() => format!("; if these are dates, pass --dates {name}"),
            RawValues::Texts(texts) => advise_about_commas(&texts.distinct),
            RawValues::Numbers(_) => String::new(),
        };
        Some(match inputs {
            ColumnInputs::Hashed { buckets } => format!(
                "column `{name}` holds text with more than {buckets} distinct values: hashed to {buckets} inputs; see \
                 --max-categories, or leave out the column with --drop {name}{advice}"
            ),
            ColumnInputs::OneHot { categories } => {
                format!(
                    "column `{name}` holds text with {}: one input for each value{advice}",
                    counted(categories.len(), "distinct value")
                )
            }
            ColumnInputs::ShiftedNumber { offset, .. } => format!(
                "column `{name}` holds large numbers that differ little: {offset} is subtracted from each number, because 32-bit \
                 floating-point numbers would lose the differences"
            ),
            ColumnInputs::Number { .. } => format!(
                "column `{name}` holds large numbers that differ too little: treated as constant; subtract a constant from the \
                 column, or leave out the column with --drop {name}"
            ),
        })
    }
}

/// Computes the cells of the rows of a column.
enum CellEncoder<'a> {
    Numbers {
        numbers: NumberReader<'a>,
        /// The cell of a missing number.
        fill: f32,
        encoding: &'a ColumnEncoding,
    },
    Texts {
        /// The index of the distinct text of each row.
        indices: ValueReader<'a, u32>,
        /// The cell of each distinct text.
        cells: Vec<f32>,
    },
}

impl<'a> CellEncoder<'a> {
    /// Creates the encoder of a column. `cells_are_inputs` says whether the cells of the table are the inputs of the model.
    fn new(column: &'a RawColumn, encoding: &'a ColumnEncoding, cells_are_inputs: bool) -> Self {
        match &column.values {
            RawValues::Numbers(numbers) => Self::Numbers {
                numbers: numbers.reader(),
                fill: encoding.fill_value().filter(|_| cells_are_inputs).unwrap_or(f32::NAN),
                encoding,
            },
            RawValues::Texts(RawTexts { indices, distinct }) => Self::Texts {
                indices: indices.reader(),
                cells: distinct.iter().map(|text| encoding.cell_of_text(text)).collect(),
            },
        }
    }

    /// Returns the cell of a row.
    fn cell(&mut self, row: usize) -> Result<f32, DataError> {
        match self {
            Self::Numbers { numbers, fill, encoding } => {
                let value = numbers.get(row)?;
                Ok(if value.is_nan() { *fill } else { encoding.cell_of_number(value) })
            }
            Self::Texts { indices, cells } => Ok(cells[indices.get(row)? as usize]),
        }
    }
}

/// Calls `append` with the cells of `rows`, block by block. Returns for each column the number of texts without a category.
fn encode_rows(
    columns: &[RawColumn],
    rows: &[usize],
    encoding: &TableEncoding,
    mut append: impl FnMut(Array2<f32>) -> Result<(), DataError>,
) -> Result<Vec<u64>, DataError> {
    let cells_are_inputs = encoding.inputs_equal_cells();
    let columns = columns.iter().zip(&encoding.columns);
    let mut encoders: Vec<CellEncoder<'_>> =
        columns.map(|(column, encoding)| CellEncoder::new(column, encoding, cells_are_inputs)).collect();
    let mut unknown = vec![0; encoders.len()];
    for block in rows.chunks(ENCODED_ROWS) {
        let mut block_cells = Array2::zeros((block.len(), encoders.len()));
        let columns = block_cells.columns_mut().into_iter();
        for ((encoder, column), unknown) in encoders.iter_mut().zip(columns).zip(&mut unknown) {
            let is_text = matches!(encoder, CellEncoder::Texts { .. });
            for (cell, &row) in column.into_iter().zip(block) {
                *cell = encoder.cell(row)?;
                *unknown += u64::from(is_text && cell.is_nan());
            }
        }
        append(block_cells)?;
    }
    Ok(unknown)
}
