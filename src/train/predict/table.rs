//! Reads the rows of a table one after the other.

use std::io;
use std::path::PathBuf;

use ndarray::{Array1, ArrayViewMut1, ArrayViewMut2};

use super::Truth;
use super::columns::find_columns;
use super::input::{InputOptions, RowReader, TargetColumn};
use super::truth::TruthParser;
use crate::train::data::{
    ColumnInputs, DataError, HeaderRow, MissingPolicy, Records, Separator, TableEncoding, check_header,
    find_column, is_missing, parse_date, parse_number, read_header,
};
use crate::train::model_file::ModelDescription;

/// The number of rows that are examined to detect the separator and the header.
const FORMAT_DETECTION_ROWS: usize = 1000;

/// The rows of a table.
pub(super) struct TableRows {
    /// The paths of the files of the table, in reading order.
    files: Vec<PathBuf>,
    /// The index of the current file.
    file: usize,
    records: Records,
    /// The options `header` and `separator` of [`InputOptions`].
    format: (HeaderRow, Option<Separator>),
    /// For each row of the last block, the index of its file in `files` and its line number.
    places: Vec<(usize, u64)>,
    /// Whether `records` has already read the first row of data, because the table has no header.
    has_pending_row: bool,
    /// The names of the columns of the table.
    header: Vec<String>,
    encoding: TableEncoding,
    pixel_divisor: Option<f32>,
    /// For each column of the model, the index of the same column in the table.
    indices: Vec<usize>,
    /// The cells of the current row, as numbers; see [`ColumnInputs`].
    cells: Array1<f32>,
    /// The index of the target column, and the parser of its cells. `None` if no targets are read.
    target: Option<(usize, TruthParser)>,
    rows_without_target: u64,
}

impl TableRows {
    /// Opens a table and finds the columns of the model. All files must have the same columns.
    pub(super) fn open(
        files: &[PathBuf],
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let first = files.first().ok_or_else(|| DataError::Unsuitable("the table has no files".into()))?;
        let records = Records::open(first, options.separator, FORMAT_DETECTION_ROWS + 1)?;
        Self::new(files.to_vec(), records, options, description)
    }

    /// Reads a table from standard input.
    pub(super) fn open_standard_input(
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let name = PathBuf::from("standard input");
        let input = Box::new(io::stdin());
        let records = Records::from_reader(&name, input, options.separator, FORMAT_DETECTION_ROWS + 1)?;
        Self::new(vec![name], records, options, description)
    }

    /// Finds the columns of the model and the target column in the header. `records` holds the rows of the first file.
    fn new(
        files: Vec<PathBuf>,
        mut records: Records,
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        if !records.advance()? {
            return Err(records.error("is empty"));
        }
        let header = read_header(&records, options.header)?;
        let target = match (&options.target, &description.target.name) {
            (TargetColumn::Unread, _) => None,
            (TargetColumn::Named(name), _) | (TargetColumn::SameName, Some(name)) => {
                Some(find_column(&header, name).map_err(|problem| records.error(problem))?)
            }
            (TargetColumn::SameName, None) => {
                return Err(
                    records.error("is a table; pass the name of the column with the targets to --target")
                );
            }
        };
        let has_header = options.header != HeaderRow::Absent;
        let indices = find_columns(description, &header, has_header, target);
        Ok(Self {
            files,
            file: 0,
            format: (options.header, options.separator),
            places: Vec::new(),
            has_pending_row: !has_header,
            indices: indices.map_err(|problem| records.error(problem))?,
            records,
            header,
            encoding: description.encoding(),
            pixel_divisor: description.pixel_divisor,
            cells: Array1::zeros(description.columns.len()),
            target: target.map(|index| (index, TruthParser::new(description))),
            rows_without_target: 0,
        })
    }

    /// Reads the next row. After the last row of a file, opens the next file. Returns `false` at the end of the last
    /// file.
    fn move_to_next_row(&mut self) -> Result<bool, DataError> {
        loop {
            if std::mem::take(&mut self.has_pending_row) || self.records.advance()? {
                return Ok(true);
            }
            if self.file + 1 == self.files.len() {
                return Ok(false);
            }
            self.file += 1;
            let (header, separator) = self.format;
            self.records = Records::open(&self.files[self.file], separator, 0)?;
            if !self.records.advance()? {
                return Err(self.records.error("is empty"));
            }
            if header == HeaderRow::Absent {
                self.has_pending_row = true;
            } else {
                check_header(&self.records, self.header.iter().map(String::as_str), &self.files[0])?;
            }
        }
    }

    /// Returns an error that names the line of the current row and a column.
    fn cell_error(&self, index: usize, problem: &str) -> DataError {
        let (line, name) = (self.records.line(), &self.header[index]);
        self.records.error(format!("line {line}, column `{name}`: {problem}"))
    }

    /// Converts a cell of the current row to a number; see [`ColumnInputs`].
    fn parse_cell(&self, column: usize) -> Result<f32, DataError> {
        let index = self.indices[column];
        let cell = self.records.row()[index].trim_ascii();
        let encoding = &self.encoding.columns[column];
        match (&encoding.inputs, is_missing(cell)) {
            (_, true) if matches!(self.encoding.missing, MissingPolicy::Error | MissingPolicy::Drop) => {
                let policy = self.encoding.missing;
                Err(self.cell_error(
                    index,
                    &format!(
                        "the value is missing; fill it in or drop the row. The model was trained with --missing {policy}; a \
                         model that was trained with --missing mean or --missing indicator accepts missing values"
                    ),
                ))
            }
            (ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. }, true) => Ok(f32::NAN),
            (ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. }, false) => {
                let parse = if encoding.is_date { parse_date } else { parse_number };
                let number = parse(cell).map_err(|why| self.cell_error(index, &why))?;
                Ok(encoding.cell_of_number(number))
            }
            (_, true) => Ok(encoding.cell_of_text("")),
            (_, false) => {
                let text = std::str::from_utf8(cell);
                Ok(encoding.cell_of_text(text.map_err(|_| self.cell_error(index, "the text is not UTF-8"))?))
            }
        }
    }

    /// Converts the current row. Returns `false` if the row has no target.
    fn read_row(
        &mut self,
        mut inputs: ArrayViewMut1<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<bool, DataError> {
        self.records.check_cell_count(self.header.len())?;
        if let Some((index, parser)) = &self.target {
            let cell = self.records.row()[*index].trim_ascii();
            if is_missing(cell) {
                self.rows_without_target += 1;
                return Ok(false);
            }
            let text =
                std::str::from_utf8(cell).map_err(|_| self.cell_error(*index, "the text is not UTF-8"))?;
            truths.push(parser.parse(text).map_err(|why| self.cell_error(*index, &why))?);
        }
        for column in 0..self.cells.len() {
            self.cells[column] = self.parse_cell(column)?;
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
        self.places.clear();
        while self.places.len() < inputs.nrows() && self.move_to_next_row()? {
            if self.read_row(inputs.row_mut(self.places.len()), truths)? {
                self.places.push((self.file, self.records.line()));
            }
        }
        Ok(self.places.len())
    }

    fn row_error(&self, index: usize, problem: &str) -> DataError {
        let (file, line) = self.places[index];
        DataError::malformed(&self.files[file], format!("line {line}: {problem}"))
    }

    fn rows_without_target(&self) -> u64 {
        self.rows_without_target
    }
}
