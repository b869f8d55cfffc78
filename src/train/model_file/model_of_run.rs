//! Creates the saved model of a training run. Checks before training that a model file can hold the model.

use std::collections::BTreeSet;
use std::path::Path;

use super::storage::{HEADER_BYTES_MAX, MODEL_FORMAT, read_entries};
use super::{ColumnOrigin, ModelDescription, ModelFileError, SavedModel, TargetDescription, TrainingRecord};
use crate::train::atomic_file;
use crate::train::config::Config;
use crate::train::data::{ColumnEncoding, ColumnInputs, Features, MissingPolicy};
use crate::train::model::{ModelSpec, OwnModel, TargetScale};
use crate::train::report::Report;
use crate::train::setup::Setup;

/// The number of bytes that [`estimate_header_bytes`] assumes for the names of the tensors and for the results of training,
/// which are not known before training.
const RESULT_HEADER_BYTES_ASSUMED: u64 = 1 << 16;

/// Returns the trained model of a run. The caller will save the model to `path`, which appears only in errors.
///
/// # Errors
///
/// The model exceeds a limit of the format. [`check_model_can_be_saved`] has already checked the limits that do not
/// depend on the results of training.
pub(crate) fn make_saved_model(
    path: &Path,
    config: &Config,
    setup: &Setup,
    report: &Report,
    parameters: &[f32],
) -> Result<SavedModel, ModelFileError> {
    let training = TrainingRecord {
        data: report.dataset.clone(),
        train_samples: report.train_samples,
        test_samples: report.test_samples,
        optimizer: report.optimizer.clone(),
        epochs: report.epochs,
        steps: report.steps,
        seed: report.seed,
        stopped: report.stopped,
        train_loss: report.train_loss,
        test_loss: report.test_loss,
        test_accuracy: report.test_accuracy,
        test_r2: report.test_r2,
        parameters_hash: report.parameters_hash.clone(),
    };
    let description = describe_run(setup, training);
    SavedModel::new(description, own_model(config), setup.standardizer.clone(), parameters.to_vec())
        .map_err(|problem| ModelFileError::Unsuitable { path: path.to_owned(), problem })
}

/// Returns the program's own model, or `None` if a run trains a built-in model.
fn own_model(config: &Config) -> Option<&OwnModel> {
    match &config.model {
        Some(ModelSpec::Own(own)) => Some(own),
        _ => None,
    }
}

/// Returns the description of the model of a run.
fn describe_run(setup: &Setup, training: TrainingRecord) -> ModelDescription {
    let scale = setup.network.loss().target_scale().unwrap_or(TargetScale::IDENTITY);
    let encoding = setup.dataset.encoding.as_deref();
    let (columns_from, columns) = describe_columns(setup);
    let pixel_divisor = match setup.dataset.train.held.feature_format() {
        Features::Pixels { divisor, .. } => Some(*divisor),
        Features::Numbers(_) | Features::Encoded { .. } | Features::Sparse(_) | Features::Tokens(_) => None,
    };
    ModelDescription {
        written_by: concat!("ringtrain ", env!("CARGO_PKG_VERSION")).into(),
        task: setup.dataset.task(),
        model: setup.model.to_string(),
        columns_from,
        columns,
        layout: setup.dataset.layout.clone(),
        missing: encoding.map_or(MissingPolicy::Error, |encoding| encoding.missing),
        pixel_divisor,
        image: setup.dataset.image,
        text: setup.dataset.text.as_deref().cloned(),
        target: TargetDescription {
            name: encoding.map(|encoding| encoding.target.clone()),
            mean: scale.mean,
            deviation: scale.deviation,
        },
        classes: setup.dataset.classes.clone(),
        training,
    }
}

/// Returns the origin of the names of the feature columns, and the columns with their names.
fn describe_columns(setup: &Setup) -> (ColumnOrigin, Vec<ColumnEncoding>) {
    if setup.dataset.text.is_some() {
        return (ColumnOrigin::Position, Vec::new());
    }
    let Some(encoding) = &setup.dataset.encoding else {
        let column = |index: usize| ColumnEncoding {
            name: index.to_string(),
            is_date: false,
            inputs: ColumnInputs::Number { fill: None, indicator: false },
        };
        return (ColumnOrigin::Position, (0..setup.dataset.train.columns()).map(column).collect());
    };
    let columns = encoding.columns.clone();
    let distinct: BTreeSet<&String> = encoding.columns.iter().map(|column| &column.name).collect();
    if distinct.len() == columns.len() {
        let has_header = setup.dataset.layout.as_ref().is_some_and(|layout| layout.has_header);
        return (if has_header { ColumnOrigin::Header } else { ColumnOrigin::Position }, columns);
    }
    // If two columns have the same name, the number of each column becomes its name.
    let numbers = setup.dataset.layout.iter().flat_map(|layout| &layout.features);
    let number = |(number, column)| ColumnEncoding { name: usize::to_string(number), ..column };
    (ColumnOrigin::Position, numbers.zip(columns).map(number).collect())
}

/// Checks that the model of a run can be saved to `path` after training.
///
/// # Errors
///
/// The description of the model exceeds a limit of the format, the file cannot be written, or the file exists and is
/// not a model file.
pub(crate) fn check_model_can_be_saved(
    path: &Path,
    config: &Config,
    setup: &Setup,
) -> Result<(), ModelFileError> {
    let training = TrainingRecord { data: setup.dataset.name.clone(), ..TrainingRecord::default() };
    let description = describe_run(setup, training);
    let header_bytes = check_description(&description, own_model(config), HEADER_BYTES_MAX)
        .map_err(|problem| ModelFileError::Unsuitable { path: path.to_owned(), problem })?;
    let is_filled = path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0);
    let is_model = || {
        read_entries(path).is_ok_and(|file| file.metadata.get("format").is_some_and(|f| f == MODEL_FORMAT))
    };
    if is_filled && !is_model() {
        return Err(ModelFileError::WouldOverwrite { path: path.to_owned() });
    }
    let inputs = setup.dataset.train.columns();
    let tensor_bytes = 4 * (setup.network.parameter_count() + 2 * inputs) as u64;
    let bytes = tensor_bytes + header_bytes;
    atomic_file::check_disk_space(path, bytes).map_err(|source| ModelFileError::io("write", path, source))
}

/// Checks that a description fits in a header of at most `bytes_max` bytes. Returns an upper bound for the size of the
/// header in bytes.
fn check_description(
    description: &ModelDescription,
    own: Option<&OwnModel>,
    bytes_max: u64,
) -> Result<u64, String> {
    description.check(own)?;
    let bytes = estimate_header_bytes(description);
    if bytes <= bytes_max {
        return Ok(bytes);
    }
    Err(format!(
        "the names of {} columns, of their categories and of {} classes need {bytes} bytes, but a model file holds at most \
         {bytes_max}; leave out columns of text (--drop), or use shorter names",
        description.columns.len(),
        description.classes.len()
    ))
}

/// Returns an upper bound for the size in bytes of the header of a model file with this description. The header holds the
/// description as a JSON string.
fn estimate_header_bytes(description: &ModelDescription) -> u64 {
    let to_json = |text: String| serde_json::to_string(&text).map_or(u64::MAX, |text| text.len() as u64);
    let bytes = serde_json::to_string(description).map_or(u64::MAX, to_json);
    bytes.saturating_add(RESULT_HEADER_BYTES_ASSUMED)
}

#[cfg(test)]
mod tests {
    use super::super::storage::encode_model;
    use super::super::tests::{example_description, example_model};
    use super::*;

    /// Regression test: before the fix, the check ignored the lengths of class names. So a run could train a model that
    /// does not fit in a model file.
    #[test]
    fn names_that_do_not_fit_are_refused_before_training() {
        let file = encode_model(&example_model()).unwrap();
        let header = u64::from_le_bytes(*file.first_chunk().unwrap());
        let bytes = check_description(&example_description(), None, HEADER_BYTES_MAX).unwrap();
        assert!((header..header + RESULT_HEADER_BYTES_ASSUMED).contains(&bytes), "{bytes} {header}");
        for (class_count, name_bytes, bytes_max, expected) in [
            (10, 1000, HEADER_BYTES_MAX, None),
            (10, 1000, bytes + 30_000, Some("2 columns, of their categories and of 10 classes need")),
            (10_001, 1, HEADER_BYTES_MAX, Some("from 2 to 10000 classes")),
        ] {
            let name = "\"".repeat(name_bytes);
            let classes = (0..class_count).map(|index| format!("{name}{index}")).collect();
            match (
                check_description(&ModelDescription { classes, ..example_description() }, None, bytes_max),
                expected,
            ) {
                // Each quotation mark in a name becomes `\\\"`, four characters, because the JSON is escaped twice.
                (Ok(found), None) => assert!(found > bytes + 40_000),
                (Err(error), Some(expected)) => assert!(error.contains(expected), "{error}"),
                (found, _) => panic!("{found:?}"),
            }
        }
    }
}
