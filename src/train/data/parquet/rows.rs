//! Reads the rows of a Parquet file.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use ::parquet::data_type::DataType;
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::reader::FileReader;
use ::parquet::file::serialized_reader::SerializedFileReader;

use super::column_type::{ColumnType, StoredCell, cell_of_f32, cell_of_f64, cell_of_int96};
use super::pages::CheckedPages;
use super::read_errors::read_part;
use crate::train::data::{Cell, DataError, RowCursor, RowPlace};

/// The maximum number of rows in a batch.
const BATCH_ROWS_MAX: u64 = 1024;

/// Reads the rows of a file, or a range of these rows. Decodes several rows at a time, which form a batch.
pub(crate) struct ParquetRows {
    path: PathBuf,
    file: SerializedFileReader<File>,
    /// The columns that are read.
    columns: Vec<UsedColumn>,
    /// For each column of the table, its index in `columns`. `None` for columns that are not used.
    index_in_columns: Vec<Option<usize>>,
    /// The rows that are still to be decoded. The rows of the file are counted from 0, here and in the other fields.
    remaining: Range<u64>,
    /// The number of the next row group.
    next_group: usize,
    /// The rows of the current row group.
    group_rows: Range<u64>,
    /// For each entry of `columns`, the reader of its values in the current row group. Empty before the first batch of the
    /// group.
    readers: Vec<ColumnReader>,
    /// For each entry of `columns`, the cells of the current batch.
    batch: Vec<Vec<StoredCell>>,
    /// The rows of the current batch.
    batch_rows: Range<u64>,
    /// The number of the current row, which is in the current batch.
    row: u64,
}

/// A column that is read.
#[derive(Debug)]
pub(super) struct UsedColumn {
    pub(super) name: String,
    /// The index of the column in the table.
    pub(super) index: usize,
    /// The index of the column among the leaves of the schema.
    pub(super) leaf_index: usize,
    pub(super) column_type: ColumnType,
}

impl ParquetRows {
    /// Creates a cursor over `rows`. `columns` holds the columns that are read, and `column_count` is the number of columns of
    /// the table.
    pub(super) fn new(
        path: PathBuf,
        file: SerializedFileReader<File>,
        (columns, column_count): (Vec<UsedColumn>, usize),
        rows: Range<u64>,
    ) -> Self {
        let mut index_in_columns = vec![None; column_count];
        for (index, column) in columns.iter().enumerate() {
            index_in_columns[column.index] = Some(index);
        }
        Self {
            path,
            file,
            batch: columns.iter().map(|_| Vec::new()).collect(),
            columns,
            index_in_columns,
            remaining: rows,
            next_group: 0,
            group_rows: 0..0,
            readers: Vec::new(),
            batch_rows: 0..0,
            row: 0,
        }
    }

    /// Decodes the next batch. There must be rows that are still to be decoded.
    fn read_batch(&mut self) -> std::result::Result<(), DataError> {
        let start = self.remaining.start;
        while self.group_rows.end <= start {
            let rows = self.file.metadata().row_group(self.next_group).num_rows();
            self.group_rows = self.group_rows.end..self.group_rows.end + rows as u64;
            self.next_group += 1;
            self.readers.clear();
        }
        if self.readers.is_empty() {
            self.open_group(start - self.group_rows.start)?;
        }
        let end = (start + BATCH_ROWS_MAX).min(self.remaining.end).min(self.group_rows.end);
        let count = (end - start) as usize;
        for ((column, reader), cells) in self.columns.iter().zip(&mut self.readers).zip(&mut self.batch) {
            cells.clear();
            read_part(&self.path, &format!("column `{}`", column.name), || {
                read_cells(reader, column.column_type, count, cells)?;
                check_row_count(cells.len(), count)
            })?;
        }
        self.batch_rows = start..end;
        self.remaining.start = end;
        Ok(())
    }

    /// Opens all columns of the current row group, and skips the first `skipped` rows of the group.
    fn open_group(&mut self, skipped: u64) -> std::result::Result<(), DataError> {
        let group_number = self.next_group - 1;
        for column in &self.columns {
            let reader = read_part(&self.path, &format!("column `{}`", column.name), || {
                let group = self.file.get_row_group(group_number)?;
                let pages = CheckedPages::new(group.get_column_page_reader(column.leaf_index)?);
                let descriptor = group.metadata().column(column.leaf_index).column_descr_ptr();
                let mut reader = get_column_reader(descriptor, Box::new(pages));
                check_row_count(skip_rows(&mut reader, skipped as usize)?, skipped as usize)?;
                Ok(reader)
            })?;
            self.readers.push(reader);
        }
        Ok(())
    }
}

impl RowCursor for ParquetRows {
    fn advance(&mut self) -> std::result::Result<bool, DataError> {
        if self.row + 1 < self.batch_rows.end {
            self.row += 1;
            return Ok(true);
        }
        if self.remaining.is_empty() {
            return Ok(false);
        }
        self.read_batch()?;
        self.row = self.batch_rows.start;
        Ok(true)
    }

    fn check_cell_count(&self, _: usize) -> std::result::Result<(), DataError> {
        Ok(())
    }

    fn cell(&self, column: usize) -> Cell<'_> {
        let index = (self.row - self.batch_rows.start) as usize;
        match self.index_in_columns[column].map(|column| &self.batch[column][index]) {
            None | Some(StoredCell::Missing) => Cell::Missing,
            Some(StoredCell::Text(text)) => Cell::from_text(text),
            Some(StoredCell::Typed(value)) => Cell::Typed(*value),
        }
    }

    fn place(&self) -> RowPlace {
        RowPlace::Row(self.row + 1)
    }

    fn error(&self, problem: String) -> DataError {
        DataError::malformed(&self.path, problem)
    }
}

/// Returns an error if a column ends too early: if only `found` of `wanted` rows could be read or skipped.
fn check_row_count(found: usize, wanted: usize) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    Err(ParquetError::General("it has fewer values than its row group has rows".into()))
}

/// Skips `count` rows. Returns the number of rows that were skipped.
fn skip_rows(reader: &mut ColumnReader, count: usize) -> Result<usize> {
    match reader {
        ColumnReader::BoolColumnReader(reader) => reader.skip_records(count),
        ColumnReader::Int32ColumnReader(reader) => reader.skip_records(count),
        ColumnReader::Int64ColumnReader(reader) => reader.skip_records(count),
        ColumnReader::Int96ColumnReader(reader) => reader.skip_records(count),
        ColumnReader::FloatColumnReader(reader) => reader.skip_records(count),
        ColumnReader::DoubleColumnReader(reader) => reader.skip_records(count),
        ColumnReader::ByteArrayColumnReader(reader) => reader.skip_records(count),
        ColumnReader::FixedLenByteArrayColumnReader(reader) => reader.skip_records(count),
    }
}

/// Appends the cells of the next `count` rows to `cells`. If the column ends too early, appends fewer cells.
fn read_cells(
    reader: &mut ColumnReader,
    column_type: ColumnType,
    count: usize,
    cells: &mut Vec<StoredCell>,
) -> Result<()> {
    match reader {
        ColumnReader::BoolColumnReader(reader) => read_values(reader, (count, cells), |value| {
            Ok(StoredCell::Typed(super::TypedValue::Boolean(value)))
        }),
        ColumnReader::Int32ColumnReader(reader) => {
            read_values(reader, (count, cells), |value| Ok(column_type.cell_of_i32(value)))
        }
        ColumnReader::Int64ColumnReader(reader) => {
            read_values(reader, (count, cells), |value| Ok(column_type.cell_of_i64(value)))
        }
        ColumnReader::Int96ColumnReader(reader) => read_values(reader, (count, cells), cell_of_int96),
        ColumnReader::FloatColumnReader(reader) => {
            read_values(reader, (count, cells), |value| Ok(cell_of_f32(value)))
        }
        ColumnReader::DoubleColumnReader(reader) => {
            read_values(reader, (count, cells), |value| Ok(cell_of_f64(value)))
        }
        ColumnReader::ByteArrayColumnReader(reader) => {
            read_values(reader, (count, cells), |value| column_type.cell_of_bytes(value.data()))
        }
        ColumnReader::FixedLenByteArrayColumnReader(reader) => {
            read_values(reader, (count, cells), |value| column_type.cell_of_bytes(value.data()))
        }
    }
}

/// Appends the cells of the next `count` rows to `cells`. `cell_of` converts a value. Its error says what is wrong with
/// the value.
fn read_values<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    (count, cells): (usize, &mut Vec<StoredCell>),
    cell_of: impl Fn(T::T) -> std::result::Result<StoredCell, String>,
) -> Result<()> {
    let (mut levels, mut values) = (Vec::new(), Vec::with_capacity(count));
    let (rows, ..) = reader.read_records(count, Some(&mut levels), None, &mut values)?;
    let mut values = values.into_iter().map(|value| cell_of(value).map_err(ParquetError::General));
    // A column in which no value can be missing has no definition levels. In other columns, the definition level of a
    // value is 1, and that of a missing value is 0.
    let is_missing = |row: usize| levels.get(row) == Some(&0);
    for row in 0..rows {
        let next = if is_missing(row) { None } else { values.next() };
        cells.push(next.transpose()?.unwrap_or(StoredCell::Missing));
    }
    Ok(())
}
