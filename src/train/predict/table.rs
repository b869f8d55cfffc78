//! Reads the rows of a table one after the other, and converts them to inputs of a model.

use std::io;
use std::path::{Path, PathBuf};

use csv::ByteRecord;
use ndarray::{Array1, ArrayViewMut1, ArrayViewMut2};

use super::Truth;
use super::columns::find_columns;
use super::input::{InputOptions, RowReader, TargetColumn};
use super::truth::TruthParser;
use super::unknown_values::UnknownValues;
#[cfg(feature = "parquet")]
use crate::train::data::ParquetFile;
use crate::train::data::{
    Cell, ColumnInputs, DataError, MissingPolicy, Records, RowCursor, RowPlace, STANDARD_INPUT_NAME,
    Separator, TableEncoding, check_header, detect_header, find_column, is_column_number, read_header,
};
use crate::train::model_file::{ColumnOrigin, ModelDescription};

/// The maximum number of rows that are examined to detect the separator and the header.
const FORMAT_DETECTION_ROWS: usize = 1000;

/// Reads the rows of a table, which may consist of several files.
pub(super) struct TableRows {
    /// The paths of the files of the table, in reading order.
    files: Vec<PathBuf>,
    /// The index of the current file in `files`.
    file_index: usize,
    format: TableFormat,
    /// The rows of the current file.
    rows: Box<dyn RowCursor>,
    /// For each row that the last call of `read_rows` has read: the index of its file in `files`, and its place in this file.
    row_origins: Vec<(usize, RowPlace)>,
    /// The names of the columns of the table.
    header: Vec<String>,
    encoding: TableEncoding,
    /// See [`ModelDescription::pixel_divisor`].
    pixel_divisor: Option<f32>,
    /// For each column of the model, the index of the same column in the table.
    column_indices: Vec<usize>,
    /// For each column of the model, the cell of the current row as a number; see [`ColumnInputs`].
    cells: Array1<f32>,
    /// For each column of the model, the rows with a text that no training row has.
    unknown_values: Vec<UnknownValues>,
    /// The index of the target column, and the parser of its cells. `None` if no targets are read.
    target: Option<(usize, TruthParser)>,
    /// The number of rows that were skipped because their target is missing.
    rows_without_target: u64,
}

/// How to open the files of a table after the first one.
enum TableFormat {
    /// Text.
    Text {
        /// Whether each file has the names of the columns.
        has_header: bool,
        /// The option `separator` of [`InputOptions`].
        separator: Option<Separator>,
    },
    #[cfg(feature = "parquet")]
    Parquet,
}

/// The names of the columns of a table, and the columns that a model needs.
struct FoundColumns {
    /// The names of the columns of the table.
    header: Vec<String>,
    /// For each column of the model, the index of the same column in the table.
    column_indices: Vec<usize>,
    /// The index of the target column. `None` if no targets are read.
    target: Option<usize>,
}

impl FoundColumns {
    /// Finds the columns of the model and the target column. `has_header` is `false` if the names in `header` are only numbers.
    /// An error says what is wrong with the table.
    fn find(
        (header, has_header): (Vec<String>, bool),
        wanted_target: &TargetColumn,
        description: &ModelDescription,
    ) -> Result<Self, String> {
        let target = match (wanted_target, &description.target.name) {
            (TargetColumn::Unread, _) => None,
            (TargetColumn::Named(name), _) | (TargetColumn::SameName, Some(name)) => {
                Some(find_column(&header, name)?)
            }
            (TargetColumn::SameName, None) => {
                return Err("is a table; pass the name of the column with the targets to --target".into());
            }
        };
        let column_indices = find_columns(description, &header, has_header, target)?;
        Ok(Self { header, column_indices, target })
    }
}

impl TableRows {
    /// Opens a table of text and finds the columns of the model. All files must have the same columns.
    pub(super) fn open(
        files: &[PathBuf],
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let first = files.first().ok_or_else(no_files_error)?;
        let records = Records::open(first, options.separator, FORMAT_DETECTION_ROWS + 1)?;
        Self::begin_text(files.to_vec(), records, options, description)
    }

    /// Reads a table of text from standard input.
    pub(super) fn open_standard_input(
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let name = PathBuf::from(STANDARD_INPUT_NAME);
        let input = Box::new(io::stdin());
        let records = Records::from_reader(&name, input, options.separator, FORMAT_DETECTION_ROWS + 1)?;
        Self::begin_text(vec![name], records, options, description)
    }

    /// Opens Parquet files and finds the columns of the model. All files must have the same columns.
    #[cfg(feature = "parquet")]
    pub(super) fn open_parquet(
        files: &[PathBuf],
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let first = files.first().ok_or_else(no_files_error)?;
        let file = ParquetFile::open(first)?;
        let columns = FoundColumns::find((file.column_names(), true), &options.target, description)
            .map_err(|problem| DataError::malformed(first, problem))?;
        let used_columns = columns.column_indices.iter().copied().chain(columns.target).collect::<Vec<_>>();
        let rows = Box::new(file.into_rows(&used_columns, None)?);
        Ok(Self::new(files.to_vec(), (TableFormat::Parquet, rows), columns, description))
    }

    /// Reads the names of the columns of a table of text, and finds the columns of the model. `records` holds the rows of the
    /// first file.
    fn begin_text(
        files: Vec<PathBuf>,
        mut records: Records<'static>,
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        records.advance_to_first_row()?;
        // A table for a model whose training table had no header is expected to have no header either.
        let names_by_number = |first: &ByteRecord| {
            let target = match &options.target {
                TargetColumn::Unread => None,
                TargetColumn::SameName => description.target.name.as_ref(),
                TargetColumn::Named(name) => Some(name),
            };
            description.columns_from == ColumnOrigin::Position
                && target.is_none_or(|name| is_column_number(name, first))
        };
        let has_header = detect_header(&records, options.header, names_by_number)?;
        let header = read_header(&records, has_header)?;
        let columns = FoundColumns::find((header, has_header), &options.target, description)
            .map_err(|problem| records.error(problem))?;
        if !has_header {
            records.keep_row();
        }
        let format = TableFormat::Text { has_header, separator: options.separator };
        Ok(Self::new(files, (format, Box::new(records)), columns, description))
    }

    fn new(
        files: Vec<PathBuf>,
        (format, rows): (TableFormat, Box<dyn RowCursor>),
        FoundColumns { header, column_indices, target }: FoundColumns,
        description: &ModelDescription,
    ) -> Self {
        Self {
            files,
            file_index: 0,
            format,
            rows,
            row_origins: Vec::new(),
            header,
            encoding: description.encoding(),
            pixel_divisor: description.pixel_divisor,
            column_indices,
            cells: Array1::zeros(description.columns.len()),
            unknown_values: vec![UnknownValues::default(); description.columns.len()],
            target: target.map(|index| (index, TruthParser::new(description))),
            rows_without_target: 0,
        }
    }

    /// Reads the next row. After the last row of a file, opens the next file. Returns `false` at the end of the last
    /// file.
    fn move_to_next_row(&mut self) -> Result<bool, DataError> {
        loop {
            if self.rows.advance()? {
                return Ok(true);
            }
            if self.file_index + 1 == self.files.len() {
                return Ok(false);
            }
            self.file_index += 1;
            self.rows = self.open_later_file(&self.files[self.file_index])?;
        }
    }

    /// Opens a file after the first one, and checks that the file has the columns of the first file.
    fn open_later_file(&self, path: &Path) -> Result<Box<dyn RowCursor>, DataError> {
        match self.format {
            TableFormat::Text { has_header, separator } => {
                let mut records = Records::open(path, separator, 0)?;
                records.advance_to_first_row()?;
                if has_header {
                    check_header(&records, self.header.iter().map(String::as_str), &self.files[0])?;
                } else {
                    records.keep_row();
                }
                Ok(Box::new(records))
            }
            #[cfg(feature = "parquet")]
            TableFormat::Parquet => {
                let file = ParquetFile::open(path)?;
                file.check_column_names(&self.header, &self.files[0])?;
                let target = self.target.as_ref().map(|(index, _)| *index);
                let used_columns = self.column_indices.iter().copied().chain(target).collect::<Vec<_>>();
                Ok(Box::new(file.into_rows(&used_columns, None)?))
            }
        }
    }

    /// Returns an error that names the place of the current row and the column with this index in the table.
    fn cell_error(&self, index: usize, problem: &str) -> DataError {
        let (place, name) = (self.rows.place(), &self.header[index]);
        self.rows.error(format!("{place}, column `{name}`: {problem}"))
    }

    /// Converts a cell of the current row to a number; see [`ColumnInputs`]. `column` is the index of the column in the model.
    fn parse_cell(&self, column: usize) -> Result<f32, DataError> {
        let index = self.column_indices[column];
        let cell = self.rows.cell(index);
        let encoding = &self.encoding.columns[column];
        match (&encoding.inputs, cell) {
            (_, Cell::Missing)
                if matches!(self.encoding.missing, MissingPolicy::Error | MissingPolicy::Drop) =>
            {
                let policy = self.encoding.missing;
                Err(self.cell_error(
                    index,
                    &format!(
                        "the value is missing; fill it in or drop the row. The model was trained with --missing {policy}; a \
                         model that was trained with --missing mean or --missing indicator accepts missing values"
                    ),
                ))
            }
            (ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. }, Cell::Missing) => Ok(f32::NAN),
            (ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. }, _) => {
                let number = if encoding.is_date { cell.date() } else { cell.number() };
                Ok(encoding.cell_of_number(number.map_err(|why| self.cell_error(index, &why))?))
            }
            (_, Cell::Missing) => Ok(encoding.cell_of_text("")),
            (_, _) => {
                let text = cell.text().map_err(|why| self.cell_error(index, &why))?;
                Ok(encoding.cell_of_text(&text))
            }
        }
    }

    /// Writes the inputs of the model for the current row to `inputs`, and appends the target to `truths` if targets are read.
    /// If the row must have a target but has none, counts the row and returns `false`.
    fn convert_current_row(
        &mut self,
        mut inputs: ArrayViewMut1<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<bool, DataError> {
        self.rows.check_cell_count(self.header.len())?;
        if let Some((index, parser)) = &self.target {
            let cell = self.rows.cell(*index);
            if cell == Cell::Missing {
                self.rows_without_target += 1;
                return Ok(false);
            }
            let text = cell.text().map_err(|why| self.cell_error(*index, &why))?;
            truths.push(parser.parse(&text).map_err(|why| self.cell_error(*index, &why))?);
        }
        for column in 0..self.cells.len() {
            let cell = self.parse_cell(column)?;
            if cell.is_nan() && !self.encoding.columns[column].is_number() {
                let text = self.rows.cell(self.column_indices[column]).text().unwrap_or_default();
                let place = (self.files[self.file_index].as_path(), self.rows.place());
                self.unknown_values[column].add(&text, place);
            }
            self.cells[column] = cell;
        }
        self.encoding.write_inputs(&self.cells.view(), inputs.view_mut());
        if let Some(divisor) = self.pixel_divisor {
            inputs.mapv_inplace(|value| value / divisor);
        }
        Ok(true)
    }
}

impl RowReader for TableRows {
    fn read_rows(
        &mut self,
        mut inputs: ArrayViewMut2<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<usize, DataError> {
        self.row_origins.clear();
        while self.row_origins.len() < inputs.nrows() && self.move_to_next_row()? {
            if self.convert_current_row(inputs.row_mut(self.row_origins.len()), truths)? {
                self.row_origins.push((self.file_index, self.rows.place()));
            }
        }
        Ok(self.row_origins.len())
    }

    fn row_error(&self, index: usize, problem: &str) -> DataError {
        let (file_index, place) = self.row_origins[index];
        DataError::malformed(&self.files[file_index], format!("{place}: {problem}"))
    }

    fn warnings(&self) -> Vec<String> {
        let columns = self.unknown_values.iter().zip(&self.encoding.columns);
        columns.filter_map(|(values, column)| values.describe(&column.name)).collect()
    }

    fn rows_without_target(&self) -> u64 {
        self.rows_without_target
    }
}

fn no_files_error() -> DataError {
    DataError::Unsuitable("the table has no files".into())
}
