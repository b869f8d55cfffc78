//! Describes the model of a training run for its model file.

use std::collections::BTreeSet;
use std::path::Path;

use super::storage::{FORMAT, read_entries};
use super::{
    COLUMNS_MAX, ColumnOrigin, ModelDescription, ModelFileError, SavedModel, TargetDescription,
    TrainingRecord,
};
use crate::train::atomic_file;
use crate::train::config::Config;
use crate::train::data::{ColumnEncoding, ColumnInputs, Features, HeaderRow, MissingPolicy};
use crate::train::model::{Loss, Scale};
use crate::train::report::Report;
use crate::train::setup::Setup;

/// The maximum size in bytes of the descriptions of all columns. In the file, quotation marks are escaped, which may
/// double this size.
const COLUMN_BYTES_MAX: usize = 45_000_000;
/// The size in bytes that is assumed for the rest of the header.
const HEADER_BYTES_ASSUMED: u64 = 1 << 16;

/// Returns the trained model of a run. Errors name `path`, the file to which the caller saves the model.
///
/// # Errors
///
/// If the model exceeds a limit of the format. [`check_before_training`] has already checked the limits that are
/// known before training.
pub(crate) fn describe(
    path: &Path,
    config: &Config,
    setup: &Setup,
    report: &Report,
    parameters: &[f32],
) -> Result<SavedModel, ModelFileError> {
    let scale = match setup.network.loss() {
        Loss::SquaredError(scale) => *scale,
        Loss::CrossEntropy | Loss::WeightedCrossEntropy(_) => Scale::IDENTITY,
    };
    let encoding = setup.dataset.encoding.as_deref();
    let (columns_from, columns) = describe_columns(config, setup);
    let pixel_divisor = match &setup.dataset.train.features {
        Features::Pixels { divisor, .. } => Some(*divisor),
        Features::Numbers(_) | Features::Encoded { .. } => None,
    };
    let description = ModelDescription {
        written_by: concat!("ringtrain ", env!("CARGO_PKG_VERSION")).into(),
        task: setup.dataset.task(),
        model: setup.model.to_string(),
        columns_from,
        columns,
        layout: setup.dataset.layout.clone(),
        missing: encoding.map_or(MissingPolicy::Error, |encoding| encoding.missing),
        pixel_divisor,
        target: TargetDescription {
            name: encoding.map(|encoding| encoding.target.clone()),
            mean: scale.mean,
            deviation: scale.deviation,
        },
        classes: setup.dataset.classes.clone(),
        training: TrainingRecord {
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
        },
    };
    SavedModel::new(description, setup.standardizer.clone(), parameters.to_vec())
        .map_err(|problem| ModelFileError::Unsuitable { path: path.to_owned(), problem })
}

/// Returns where the names of the feature columns come from, and the feature columns.
fn describe_columns(config: &Config, setup: &Setup) -> (ColumnOrigin, Vec<ColumnEncoding>) {
    let Some(encoding) = &setup.dataset.encoding else {
        let column = |index: usize| ColumnEncoding {
            name: index.to_string(),
            inputs: ColumnInputs::Number { fill: None, indicator: false },
        };
        return (ColumnOrigin::Position, (0..setup.dataset.train.features.columns()).map(column).collect());
    };
    let columns = encoding.columns.clone();
    let distinct: BTreeSet<&String> = encoding.columns.iter().map(|column| &column.name).collect();
    if distinct.len() == columns.len() {
        let has_header = config.table.header != HeaderRow::Absent;
        return (if has_header { ColumnOrigin::Header } else { ColumnOrigin::Position }, columns);
    }
    // Two columns have the same name, so columns are found by number.
    let numbers = setup.dataset.layout.iter().flat_map(|layout| &layout.features);
    let number = |(number, column)| ColumnEncoding { name: usize::to_string(number), ..column };
    (ColumnOrigin::Position, numbers.zip(columns).map(number).collect())
}

/// Checks that the model of a run can be saved to `path` after training.
///
/// # Errors
///
/// If the model has too many columns, if the file cannot be written, or if the file exists and is not a model file.
pub(crate) fn check_before_training(
    path: &Path,
    config: &Config,
    setup: &Setup,
) -> Result<(), ModelFileError> {
    let (_, columns) = describe_columns(config, setup);
    let json_bytes = serde_json::to_string(&columns).map_or(0, |text| text.len());
    let columns = columns.len();
    if columns > COLUMNS_MAX || json_bytes > COLUMN_BYTES_MAX {
        let problem = format!(
            "the data has {columns} columns, whose names and categories need {json_bytes} bytes; a model file has at most \
             {COLUMNS_MAX} columns, which need at most {COLUMN_BYTES_MAX} bytes"
        );
        return Err(ModelFileError::Unsuitable { path: path.to_owned(), problem });
    }
    let is_filled = path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0);
    let is_model =
        || read_entries(path).is_ok_and(|file| file.metadata.get("format").is_some_and(|f| f == FORMAT));
    if is_filled && !is_model() {
        return Err(ModelFileError::Occupied { path: path.to_owned() });
    }
    let inputs = setup.dataset.train.features.columns();
    let tensor_bytes = 4 * (setup.network.parameter_count() + 2 * inputs) as u64;
    let bytes = tensor_bytes + 2 * json_bytes as u64 + HEADER_BYTES_ASSUMED;
    atomic_file::check_space(path, bytes).map_err(|source| ModelFileError::io("write", path, source))
}
