//! Reads rows of new data from arrays.

use std::path::{Path, PathBuf};

use ndarray::{Array1, Array2, ArrayView1, ArrayViewMut1, ArrayViewMut2, s};

use super::Truth;
use super::input::RowReader;
use super::truth::TruthParser;
use crate::train::data::{
    ColumnEncoding, ColumnInputs, DataError, FeatureShape, ImageShape, NpyStream, TableEncoding, npy,
};
use crate::train::model_file::ModelDescription;
use crate::types::counted;

/// Returns an error if the data has a different number of columns than the model, or if a column of the model holds
/// text. `name` is the name of the data in messages, and `found` is the number of its columns.
pub(super) fn check_numeric_columns(
    name: &str,
    found: usize,
    description: &ModelDescription,
) -> Result<(), DataError> {
    let wanted = description.columns.len();
    if found != wanted {
        let problem =
            format!("{name} has {}, but the model was trained on {wanted}", counted(found, "feature"));
        return Err(DataError::Unsuitable(problem));
    }
    match description.columns.iter().find(|column| !column.is_number()) {
        Some(text) => Err(DataError::Unsuitable(format!(
            "{name} holds numbers, but column `{}` of the model holds categories; pass a table",
            text.name
        ))),
        None => Ok(()),
    }
}

/// Returns an error if the images do not have the shape of the images on which the model was trained. `found` is the
/// shape of the images, or `None` if the data has no images.
pub(super) fn check_image_shape(
    name: &str,
    found: Option<ImageShape>,
    description: &ModelDescription,
) -> Result<(), DataError> {
    match (found, description.image) {
        (Some(found), Some(wanted)) if found != wanted => Err(DataError::Unsuitable(format!(
            "{name} has images of the shape {found} (channels, height, width), but the model was trained on images of the shape \
             {wanted}"
        ))),
        _ => Ok(()),
    }
}

/// Returns an error if the model needs a table, because a column of the model holds texts, is shifted (see
/// [`ColumnInputs`]), or has an input for missing values.
pub(super) fn check_model_needs_no_table(
    name: &str,
    description: &ModelDescription,
) -> Result<(), DataError> {
    let is_plain_number =
        |column: &ColumnEncoding| matches!(column.inputs, ColumnInputs::Number { indicator: false, .. });
    match description.columns.iter().find(|column| !is_plain_number(column)) {
        Some(column) => Err(DataError::Unsuitable(format!(
            "{name} is not a table, but the model converts column `{}` of a table to other inputs; pass a table",
            column.name
        ))),
        None => Ok(()),
    }
}

/// Encodes the cells of a row as inputs. If there is a `divisor` (for pixels), divides the inputs by this number.
fn encode_row(
    encoding: &TableEncoding,
    divisor: Option<f32>,
    cells: &ArrayView1<'_, f32>,
    mut inputs: ArrayViewMut1<'_, f32>,
) {
    encoding.write_inputs(cells, inputs.view_mut());
    if let Some(divisor) = divisor {
        inputs.mapv_inplace(|value| value / divisor);
    }
}

/// The rows of an array in numpy's format. An array in row-major order is read block by block.
pub(super) struct NpyRows {
    path: PathBuf,
    data: NpyData,
    encoding: TableEncoding,
    /// The inputs are divided by this number. `None` if the model was not trained on pixels.
    pixel_divisor: Option<f32>,
    /// The number of rows that have been read.
    rows_read: usize,
    /// The number of all rows.
    row_count: usize,
    /// The number of rows that the last call of `read_rows` returned.
    last_block_rows: usize,
    /// The file of the targets, the targets, and the parser that converts targets.
    targets: Option<(PathBuf, Vec<f64>, TruthParser)>,
}

/// The elements of an array.
enum NpyData {
    /// An array in row-major order, which is read block by block.
    Stream(NpyStream),
    /// An array in column-major order. The whole file has been read.
    Whole(Array2<f64>),
}

impl NpyRows {
    /// Opens the array of features at `path`, and reads the targets at `targets_path`. Checks that both fit the model.
    pub(super) fn open(
        path: &Path,
        targets_path: Option<&Path>,
        description: &ModelDescription,
    ) -> Result<Self, DataError> {
        let stream = npy::open_npy_stream(path)?;
        let FeatureShape { rows, columns, image } =
            FeatureShape::new(&stream.shape).map_err(|why| DataError::malformed(path, why))?;
        let name = path.display().to_string();
        check_image_shape(&name, image, description)?;
        check_numeric_columns(&name, columns, description)?;
        let data = if stream.fortran_order {
            let rows = npy::read_npy_file(path)?.into_rows();
            NpyData::Whole(rows.map_err(|why| DataError::malformed(path, why))?)
        } else {
            NpyData::Stream(stream)
        };
        let targets = match targets_path {
            None => None,
            Some(targets_path) => {
                let array = npy::read_npy_file(targets_path)?;
                if !matches!(array.shape.as_slice(), [_] | [_, 1]) || array.values.len() != rows {
                    let problem = format!(
                        "has shape {:?}, but it needs one value for each of {rows} rows",
                        array.shape
                    );
                    return Err(DataError::malformed(targets_path, problem));
                }
                Some((targets_path.to_owned(), array.values, TruthParser::new(description)))
            }
        };
        let (encoding, pixel_divisor) = (description.encoding(), description.pixel_divisor);
        Ok(Self {
            path: path.to_owned(),
            data,
            encoding,
            pixel_divisor,
            rows_read: 0,
            row_count: rows,
            last_block_rows: 0,
            targets,
        })
    }
}

impl RowReader for NpyRows {
    fn read_rows(
        &mut self,
        mut inputs: ArrayViewMut2<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<usize, DataError> {
        let count = inputs.nrows().min(self.row_count - self.rows_read);
        if count == 0 {
            return Ok(0);
        }
        let columns = self.encoding.columns.len();
        let rows = self.rows_read..self.rows_read + count;
        let values = match &mut self.data {
            NpyData::Stream(stream) => {
                let values =
                    stream.read_values((count * columns) as u64, rows.end == self.row_count, &self.path)?;
                Array2::from_shape_vec((count, columns), values).expect("`count * columns` values were read")
            }
            NpyData::Whole(array) => array.slice(s![rows.clone(), ..]).to_owned(),
        };
        for (index, row) in rows.enumerate() {
            for (column, value) in values.row(index).iter().enumerate() {
                if !(*value as f32).is_finite() {
                    let place = format!("row {row}, column {column} (both counted from 0)");
                    let problem = format!("{place}: {value} is not a finite number");
                    return Err(DataError::malformed(&self.path, problem));
                }
            }
            let columns = self.encoding.columns.iter();
            let cells: Array1<f32> =
                columns.zip(values.row(index)).map(|(column, &value)| column.cell_of_number(value)).collect();
            encode_row(&self.encoding, self.pixel_divisor, &cells.view(), inputs.row_mut(index));
            if let Some((path, targets, parser)) = &self.targets {
                let truth = parser.convert_number(targets[row]);
                truths.push(truth.map_err(|why| {
                    DataError::malformed(path, format!("row {row} (counted from 0): {why}"))
                })?);
            }
        }
        self.rows_read += count;
        self.last_block_rows = count;
        Ok(count)
    }

    fn row_error(&self, index: usize, problem: &str) -> DataError {
        let row = self.rows_read - self.last_block_rows + index;
        DataError::malformed(&self.path, format!("row {row} (counted from 0): {problem}"))
    }
}
