//! Reads rows of new data from IDX files, image folders, LIBSVM files and built-in data.

use ndarray::{ArrayViewMut2, s};

use super::Truth;
use super::arrays::{check_image_shape, check_model_needs_no_table, check_numeric_columns};
use super::input::RowReader;
use super::truth::TruthParser;
use crate::train::data::{BlockReader, Column, DataError, Features, RowOrigins, SampleBlock, SampleStream};
use crate::train::model_file::ModelDescription;

/// The rows of IDX files, of an image folder, of a LIBSVM file or of built-in data, which are read block by block.
pub(super) struct SampleRows {
    /// The name of the data in messages.
    name: String,
    reader: Box<dyn BlockReader>,
    /// The origins of the rows that the last call of `read_rows` returned.
    origins: RowOrigins,
    /// The inputs are divided by this number if they are not yet divided.
    pixel_divisor: Option<f32>,
    /// Converts the targets. `None` if the rows need no targets.
    truth_parser: Option<TruthParser>,
}

impl SampleRows {
    /// Checks that the rows have the columns of the model. `name` is the name of the data in messages.
    pub(super) fn new(
        name: String,
        SampleStream { columns, image, reader }: SampleStream,
        needs_target: bool,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        check_image_shape(&name, image, description)?;
        check_numeric_columns(&name, columns, description)?;
        check_model_needs_no_table(&name, description)?;
        Ok(Self {
            name,
            reader,
            origins: RowOrigins::Files(Vec::new()),
            pixel_divisor: description.pixel_divisor,
            truth_parser: needs_target.then(|| TruthParser::new(description)),
        })
    }
}

impl RowReader for SampleRows {
    fn read_rows(
        &mut self,
        mut inputs: ArrayViewMut2<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<usize, DataError> {
        let wanted = inputs.ncols();
        let SampleBlock { mut samples, origins } = self.reader.read_block(inputs.nrows())?;
        if let Features::Sparse(rows) = &mut samples.features
            && !rows.widen(wanted)
        {
            return Err(DataError::Unsuitable(format!(
                "{} has the index {}, but the model was trained on {wanted} features",
                self.name,
                rows.columns()
            )));
        }
        let count = samples.features.rows();
        let mut inputs = inputs.slice_mut(s![..count, ..]);
        samples.features.write_rows(0..count, None, inputs.view_mut());
        // `write_rows` has already divided the values of `Features::Pixels`.
        let is_divided = matches!(samples.features, Features::Pixels { .. });
        if let Some(divisor) = self.pixel_divisor.filter(|_| !is_divided) {
            inputs.mapv_inplace(|value| value / divisor);
        }
        if let Some(parser) = &self.truth_parser {
            for row in 0..count {
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
        self.origins = origins;
        Ok(count)
    }

    fn row_error(&self, index: usize, problem: &str) -> DataError {
        self.origins.error(index, problem)
    }
}
