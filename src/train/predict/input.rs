//! The sources of new data for predictions.

use std::path::{Path, PathBuf};

use ndarray::ArrayViewMut2;

use super::Truth;
use super::arrays::NpyRows;
use super::samples::SampleRows;
use super::table::TableRows;
#[cfg(not(feature = "parquet"))]
use crate::train::data::NO_PARQUET_MESSAGE;
use crate::train::data::{DataError, DataSource, HeaderRow, NpzFile, Separator, WantedImages};
use crate::train::model_file::ModelDescription;

/// The new data that the user passes to `ringtrain predict` or `ringtrain eval` with `--data`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PredictionInput {
    /// One or more files of a table.
    Table(Vec<PathBuf>),
    /// A table on standard input.
    StandardInput,
    /// An array of features, and optionally an array of targets, each in a `.npy` file or in a `.npz` file (`d.npz/x.npy`).
    Npy(PathBuf, Option<PathBuf>),
    /// Any other data that [`DataSource`] can read.
    Source(DataSource),
}

/// The source of new data, and the options for reading it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputOptions {
    /// The data.
    pub data: PredictionInput,
    /// Whether the first row of a table holds the names of the columns.
    pub header: HeaderRow,
    /// The character between the cells of a table. If `None`, the separator is detected from the first rows.
    pub separator: Option<Separator>,
    /// The column of a table from which targets are read.
    pub target: TargetColumn,
}

/// The column of a table from which targets are read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetColumn {
    /// Read no targets.
    Unread,
    /// Read the targets from the column with the same name as the target column of the training data.
    SameName,
    /// Read the targets from the column with this name or number.
    Named(String),
}

impl InputOptions {
    /// Returns whether `--header`, `--no-header` or `--separator` is given. These options apply only to tables of text.
    pub(crate) fn has_options_of_text_tables(&self) -> bool {
        self.header != HeaderRow::Expected || self.separator.is_some()
    }
}

impl PredictionInput {
    /// Parses the values of `--data`. Accepts the values of [`DataSource::from_values`], and a `.npy` file without targets.
    ///
    /// # Errors
    ///
    /// A text that says which value is wrong.
    pub fn from_values(values: &[String]) -> Result<Self, String> {
        if let [text] = values {
            let is_npy =
                Path::new(text).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy"));
            if is_npy && !text.contains(".npy,") {
                return Ok(Self::Npy(text.into(), None));
            }
        }
        DataSource::from_values("--data", values).map(Self::from_source)
    }

    /// Converts a [`DataSource`] to the source of new data.
    pub fn from_source(source: DataSource) -> Self {
        match source {
            DataSource::Csv(path) => Self::Table(vec![path]),
            DataSource::CsvFiles(paths) => Self::Table(paths),
            DataSource::StandardInput => Self::StandardInput,
            DataSource::Npy(features, targets) => Self::Npy(features, Some(targets)),
            other => Self::Source(other),
        }
    }
}

/// Reads rows block by block, and encodes their features.
pub(super) trait RowReader {
    /// Reads up to `inputs.nrows()` rows. Writes the encoded features of each row to a row of `inputs`. Pushes the
    /// target of each row to `truths` if targets are read. Returns the number of rows: 0 at the end of the data.
    fn read_rows(
        &mut self,
        inputs: ArrayViewMut2<'_, f32>,
        truths: &mut Vec<Truth>,
    ) -> Result<usize, DataError>;

    /// Returns an error with the text `problem` that also says where a row comes from. `index` counts the rows that the
    /// last call of [`read_rows`](Self::read_rows) returned, from 0.
    fn row_error(&self, index: usize, problem: &str) -> DataError;

    /// Returns warnings about the rows that were read.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the number of rows that were left out because their target is missing.
    fn rows_without_target(&self) -> u64 {
        0
    }
}

/// Opens new data for a model that does not read texts.
///
/// # Errors
///
/// If the data cannot be read, or if it does not have the columns that the model needs.
pub(super) fn open_prediction_input(
    options: &InputOptions,
    description: &ModelDescription,
) -> Result<Box<dyn RowReader>, DataError> {
    let needs_target = options.target != TargetColumn::Unread;
    Ok(match &options.data {
        PredictionInput::Table(paths) => Box::new(TableRows::open(paths, options, description)?),
        PredictionInput::StandardInput => Box::new(TableRows::open_standard_input(options, description)?),
        PredictionInput::Npy(features, None) if needs_target => {
            let problem = "has no targets; pass a pair: --data FEATURES.npy,TARGETS.npy";
            return Err(DataError::malformed(features, problem));
        }
        PredictionInput::Npy(features, targets) => {
            let targets = targets.as_deref().filter(|_| needs_target);
            Box::new(NpyRows::open(features, targets, description)?)
        }
        PredictionInput::Source(DataSource::Npz(path)) => {
            let (features, targets) = NpzFile::open(path)?.arrays_to_predict();
            let data = PredictionInput::Npy(features, targets);
            return open_prediction_input(&InputOptions { data, ..options.clone() }, description);
        }
        PredictionInput::Source(DataSource::Text(_)) => {
            let model = &description.model;
            let problem = format!(
                "--format text is for models that were trained with --model gpt:..., and not for {model}"
            );
            return Err(DataError::Unsuitable(problem));
        }
        #[cfg(feature = "parquet")]
        PredictionInput::Source(DataSource::Parquet(paths)) => {
            Box::new(TableRows::open_parquet(paths, options, description)?)
        }
        #[cfg(not(feature = "parquet"))]
        PredictionInput::Source(source @ DataSource::Parquet(_)) => {
            return Err(DataError::Unsuitable(format!("{source} {NO_PARQUET_MESSAGE}")));
        }
        PredictionInput::Source(source) => {
            let wanted = WantedImages { inputs: description.inputs(), shape: description.image };
            let Some(stream) = source.open_samples(description.task, wanted)? else {
                // The caller passed a table or a pair of arrays as `Source`.
                let data = PredictionInput::from_source(source.clone());
                return open_prediction_input(&InputOptions { data, ..options.clone() }, description);
            };
            Box::new(SampleRows::new(source.to_string(), stream, needs_target, description)?)
        }
    })
}
