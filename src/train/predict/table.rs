//! Reads the rows of a table one after the other.

use std::path::Path;

use ndarray::{Array1, ArrayViewMut1, ArrayViewMut2};

use super::columns::find_columns;
use super::input::{InputOptions, RowReader, TargetColumn};
use super::truth::{Truth, TruthParser};
use crate::train::data::{
    ColumnInputs, DataError, HeaderRow, MissingPolicy, Records, TableEncoding, find_column, is_missing,
    parse_number, read_header,
};
use crate::train::model_file::ModelDescription;

/// The number of rows from which the separator and the header are recognised.
const SAMPLE_ROWS: usize = 1000;

/// The rows of a table.
pub(super) struct TableRows {
    records: Records,
    /// Whether the current row of `records` is the next row to read, because the table has no header.
    has_pending_row: bool,
    /// The names of the columns of the table.
    header: Vec<String>,
    encoding: TableEncoding,
    pixel_divisor: Option<f32>,
    /// For each column of the model, the index of the same column in the table.
    indices: Vec<usize>,
    /// The cells of the current row, as numbers; see [`ColumnInputs`].
    cells: Array1<f32>,
    target: Option<(usize, TruthParser)>,
    rows_without_target: u64,
}

impl TableRows {
    /// Opens a table and finds the columns of the model. Without a path, reads standard input.
    pub(super) fn open(
        path: Option<&Path>,
        options: &InputOptions,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let path = path.unwrap_or(Path::new("/dev/stdin"));
        let mut records = Records::open(path, options.separator, SAMPLE_ROWS + 1)?;
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
                return Err(records.error("is a table: name the column to compare with in --target"));
            }
        };
        let has_header = options.header != HeaderRow::Absent;
        let indices = find_columns(description, &header, has_header, target);
        Ok(Self {
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

    /// Returns an error that names the line of the current row and a column.
    fn cell_error(&self, index: usize, problem: &str) -> DataError {
        let (line, name) = (self.records.line(), &self.header[index]);
        self.records.error(format!("line {line}, column `{name}`: {problem}"))
    }

    /// Converts a cell of the current row to a number; see [`ColumnInputs`].
    fn cell(&self, column: usize) -> Result<f32, DataError> {
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
            (ColumnInputs::Number { .. }, true) => Ok(f32::NAN),
            (ColumnInputs::Number { .. }, false) => {
                Ok(parse_number(cell).map_err(|why| self.cell_error(index, &why))? as f32)
            }
            (_, true) => Ok(encoding.text_cell("")),
            (_, false) => {
                let text = std::str::from_utf8(cell);
                Ok(encoding.text_cell(text.map_err(|_| self.cell_error(index, "the text is not UTF-8"))?))
            }
        }
    }

    /// Converts the current row. Returns `false` if the row has no target.
    fn read_row(
        &mut self,
        mut inputs: ArrayViewMut1<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<bool, DataError> {
        self.records.check_length(self.header.len())?;
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
            self.cells[column] = self.cell(column)?;
        }
        self.encoding.expand(&self.cells.view(), inputs.view_mut());
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
        let mut count = 0;
        while count < inputs.nrows() {
            let is_pending = std::mem::take(&mut self.has_pending_row);
            if !is_pending && !self.records.advance()? {
                break;
            }
            count += usize::from(self.read_row(inputs.row_mut(count), truths)?);
        }
        Ok(count)
    }

    fn rows_without_target(&self) -> u64 {
        self.rows_without_target
    }
}
