//! Computes predictions of a [`SavedModel`] for new data, row by row, and compares predictions with targets.

mod arrays;
mod columns;
mod evaluation;
mod input;
mod output;
mod samples;
mod table;
mod text;
mod truth;
mod unknown_values;

use super::data::DataError;
use super::model::{LayerError, Prediction};
use super::model_file::SavedModel;

pub(crate) use super::metrics::Truth;
pub use super::metrics::{ClassReport, Evaluation, TopK};
pub use evaluation::evaluate;
pub use input::{InputOptions, PredictionInput, TargetColumn};
pub use output::{OutputError, PredictError, PredictionOutput, predict};
pub use text::{GenerationOptions, TextGenerator};

use input::RowReader;

/// Calls `each` with the prediction and the target of each row. The target is `None` if `reader` reads no targets.
/// Returns the number of rows. At the end, warns about texts that no training row has.
fn for_each_row<E: From<DataError> + From<LayerError>>(
    model: &mut SavedModel,
    reader: &mut dyn RowReader,
    mut each: impl FnMut(&Prediction, Option<Truth>) -> Result<(), E>,
) -> Result<u64, E> {
    let mut rows = 0;
    let mut truths = Vec::new();
    loop {
        truths.clear();
        let count = reader.read_rows(model.inputs_mut(), &mut truths)?;
        if count == 0 {
            reader.warnings().iter().for_each(|warning| log::warn!("{warning}"));
            return Ok(rows);
        }
        for (index, prediction) in model.predict(count)?.iter().enumerate() {
            rows += 1;
            let is_finite = match prediction {
                Prediction::Number(value) => value.is_finite(),
                Prediction::Class { probabilities, .. } => {
                    probabilities.iter().all(|value| value.is_finite())
                }
            };
            if !is_finite {
                let problem = "the prediction is not finite; a value in this row is far outside the range of the training data";
                return Err(reader.row_error(index, problem).into());
            }
            each(prediction, truths.get(index).copied())?;
        }
    }
}
