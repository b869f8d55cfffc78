//! Reads rows of new data from image folders and LIBSVM files.

use ndarray::{ArrayViewMut2, s};

use super::Truth;
use super::arrays::{check_model_needs_no_table, check_numeric_columns};
use super::input::RowReader;
use super::truth::TruthParser;
use crate::train::data::{Column, DataError, Features, LoadedRows};
use crate::train::model_file::ModelDescription;

/// The rows of an image folder or a LIBSVM file. All rows are in memory. Errors name the file or the line of a row.
pub(super) struct RowsInMemory {
    loaded: LoadedRows,
    /// The inputs are divided by this number if they are not yet divided.
    pixel_divisor: Option<f32>,
    /// The number of rows that have been read.
    rows_read: usize,
    /// The number of rows that the last call of `read_rows` returned.
    last_block_rows: usize,
    /// Converts the targets. `None` if the rows need no targets.
    truth_parser: Option<TruthParser>,
}

impl RowsInMemory {
    /// Checks that the rows have the columns of the model. `name` is the name of the data in messages.
    pub(super) fn new(
        name: &str,
        mut loaded: LoadedRows,
        needs_target: bool,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let wanted = description.columns.len();
        let features = &mut loaded.samples.features;
        if let Features::Sparse(rows) = features
            && !rows.widen(wanted)
        {
            return Err(DataError::Unsuitable(format!(
                "{name} has the index {}, but the model was trained on {wanted} features",
                rows.columns()
            )));
        }
        check_numeric_columns(name, features.columns(), description)?;
        check_model_needs_no_table(name, description)?;
        Ok(Self {
            loaded,
            pixel_divisor: description.pixel_divisor,
            rows_read: 0,
            last_block_rows: 0,
            truth_parser: needs_target.then(|| TruthParser::new(description)),
        })
    }
}

impl RowReader for RowsInMemory {
    fn read_rows(
        &mut self,
        mut inputs: ArrayViewMut2<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<usize, DataError> {
        let LoadedRows { samples, origins, .. } = &self.loaded;
        let count = inputs.nrows().min(samples.features.rows() - self.rows_read);
        let rows = self.rows_read..self.rows_read + count;
        samples.features.write_rows(rows.clone(), None, inputs.slice_mut(s![..count, ..]));
        let is_divided = matches!(samples.features, Features::Pixels { .. });
        if let Some(divisor) = self.pixel_divisor.filter(|_| !is_divided) {
            inputs.mapv_inplace(|value| value / divisor);
        }
        if let Some(parser) = &self.truth_parser {
            for row in rows {
                let truth = match &samples.target {
                    Column::Numbers(values) => parser.convert_number(values[row]),
                    Column::Text(texts) => match &*texts.distinct[texts.indices[row] as usize] {
                        "" => Err("the image is not in the folder of a class".into()),
                        class => parser.parse(class),
                    },
                };
                truths.push(truth.map_err(|why| origins.error(row, &why))?);
            }
        }
        self.rows_read += count;
        self.last_block_rows = count;
        Ok(count)
    }

    fn row_error(&self, index: usize, problem: &str) -> DataError {
        self.loaded.origins.error(self.rows_read - self.last_block_rows + index, problem)
    }
}
