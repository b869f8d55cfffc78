//! Compares the predictions of a model with the targets of data.

use super::input::{InputOptions, TargetColumn, open_prediction_input};
use super::text::evaluate_text;
use super::{PredictError, for_each_row};
use crate::train::data::DataError;
use crate::train::metrics::{Evaluation, MetricSums};
use crate::train::model_file::SavedModel;

/// Computes a prediction for each row of data and compares the prediction with the target. For a model of texts, computes the
/// loss of all tokens. `top_k` is the k of the top-k accuracy (default: 5).
///
/// The evaluation of a model with two classes needs 16 bytes of memory for each row. The evaluation of a model of texts
/// needs 2 bytes for each token. For other models, memory does not grow with the number of rows.
///
/// # Errors
///
/// See [`PredictError`]. Also fails if a target is a class that did not occur in training.
pub fn evaluate(
    model: &mut SavedModel,
    input: &InputOptions,
    top_k: Option<usize>,
) -> Result<Evaluation, PredictError> {
    if model.description().text.is_some() {
        return evaluate_text(model, input);
    }
    let target = match &input.target {
        TargetColumn::Unread => TargetColumn::SameName,
        given => given.clone(),
    };
    let mut reader = open_prediction_input(&InputOptions { target, ..input.clone() }, model.description())?;
    let classes = model.description().classes.clone();
    let mut sums = MetricSums::new(classes.len(), top_k);
    let rows = for_each_row(model, &mut *reader, |prediction, truth| {
        if let Some(truth) = truth {
            sums.add(prediction, truth);
        }
        Ok::<_, PredictError>(())
    })?;
    if rows == 0 {
        return Err(
            DataError::Unsuitable("the data has no rows, so there is nothing to compare".into()).into()
        );
    }
    Ok(sums.into_evaluation(reader.rows_without_target(), &classes))
}
