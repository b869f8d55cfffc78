//! Prints the content of a model file or a checkpoint as text or as JSON.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::Path;

use safetensors::Dtype;
use serde::Serialize;

use super::storage::{
    FileEntries, FileTensor, INVERSE_DEVIATION_TENSOR, MEAN_TENSOR, MODEL_FORMAT_VERSION, read_entries,
};
use super::{ColumnOrigin, ModelDescription, ModelFileError, SavedModel};
use crate::train::data::{ColumnEncoding, ColumnInputs, Standardizer, Task, TextEncoding, Vocabulary};
use crate::types::{counted, plural};

/// The maximum number of columns, of names or of tensors that [`Inspection`] prints as text. The JSON lists all.
const LISTED_ENTRIES_MAX: usize = 20;

/// The content of a file that ringtrain wrote. [`Display`](fmt::Display) prints the content as text, and `Serialize`
/// as JSON.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Inspection {
    /// A model file.
    Model {
        /// The path.
        path: String,
        /// The version of the format.
        version: u64,
        /// The description of the model.
        description: Box<ModelDescription>,
        /// The number of inputs.
        inputs: usize,
        /// The number of parameters.
        parameters: usize,
        /// The tensors.
        tensors: Vec<TensorSummary>,
        /// The mean of each input. `None` if the inputs are not scaled.
        mean: Option<Vec<f32>>,
        /// 1 / the standard deviation of each input. 0 for a constant input.
        inverse_deviation: Option<Vec<f32>>,
    },
    /// A checkpoint.
    Checkpoint {
        /// The path.
        path: String,
        /// The metadata. `ringtrain --resume` checks the hashes in the metadata, but [`Inspection::read`] does not.
        metadata: BTreeMap<String, String>,
        /// The tensors.
        tensors: Vec<TensorSummary>,
    },
}

/// A tensor of a file.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TensorSummary {
    /// The name.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The smallest value. `None` if the tensor is empty, does not hold F32, or has no finite smallest value.
    pub min: Option<f32>,
    /// The largest value. `None` in the same cases as `min`.
    pub max: Option<f32>,
}

impl TensorSummary {
    fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Self {
        let values = if dtype == Dtype::F32 { bytes.as_chunks().0 } else { &[] };
        let values = values.iter().map(|&bytes| f32::from_le_bytes(bytes));
        let min = values.clone().reduce(f32::min).filter(|value| value.is_finite());
        let max = values.reduce(f32::max).filter(|value| value.is_finite());
        Self { name: name.to_owned(), shape: shape.to_vec(), min, max }
    }
}

impl Inspection {
    /// Reads a model file or a checkpoint.
    ///
    /// # Errors
    ///
    /// The errors of [`SavedModel::load`], except for [`ModelFileError::Checkpoint`].
    pub fn read(path: &Path) -> Result<Self, ModelFileError> {
        let file = path.display().to_string();
        let FileEntries { metadata, tensors } = read_entries(path)?;
        let summaries = tensors
            .iter()
            .map(|FileTensor { name, dtype, shape, bytes }| TensorSummary::new(name, *dtype, shape, bytes))
            .collect();
        match SavedModel::load(path) {
            Ok(model) => Ok(Self::Model {
                path: file,
                version: MODEL_FORMAT_VERSION,
                description: Box::new(model.description().clone()),
                inputs: model.description().inputs(),
                parameters: model.parameters().len(),
                tensors: summaries,
                mean: model.standardizer().map(|found| found.mean.clone()),
                inverse_deviation: model.standardizer().map(|found| found.inverse_deviation.clone()),
            }),
            Err(ModelFileError::Checkpoint { .. }) => Ok(Self::Checkpoint {
                path: file,
                metadata: metadata.into_iter().collect(),
                tensors: summaries,
            }),
            Err(error) => Err(error),
        }
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model {
                path, version, description, parameters, tensors, mean, inverse_deviation, ..
            } => {
                writeln!(
                    f,
                    "{path}: model file, format version {version}, {}",
                    printable(&description.written_by)
                )?;
                write_model(f, description, *parameters)?;
                let standardizer = mean.clone().zip(inverse_deviation.clone());
                let standardizer =
                    standardizer.map(|(mean, inverse_deviation)| Standardizer { mean, inverse_deviation });
                write_columns(f, description, standardizer.as_ref())?;
                write_tensors(f, tensors)
            }
            Self::Checkpoint { path, metadata, tensors } => {
                writeln!(f, "{path}: checkpoint")?;
                for (key, value) in metadata.iter().filter(|(key, _)| *key != "history") {
                    writeln!(f, "{:<14} {}", printable(key), printable(value))?;
                }
                write_tensors(f, tensors)
            }
        }
    }
}

/// Escapes the control characters in a text, so that names from a file cannot control the terminal.
fn printable(text: &str) -> String {
    text.chars().fold(String::new(), |mut line, character| {
        match character {
            control if control.is_control() => {
                write!(line, "{}", control.escape_default()).expect("writing to a string succeeds");
            }
            other => line.push(other),
        }
        line
    })
}

/// Returns the first [`LISTED_ENTRIES_MAX`] names as text, separated by commas.
fn join_first_names(names: &[String]) -> String {
    let listed: Vec<String> = names.iter().take(LISTED_ENTRIES_MAX).map(|name| printable(name)).collect();
    let more = if names.len() > LISTED_ENTRIES_MAX { ", ..." } else { "" };
    listed.join(", ") + more
}

fn write_model(f: &mut fmt::Formatter<'_>, description: &ModelDescription, parameters: usize) -> fmt::Result {
    let ModelDescription { task, model, target, classes, training, .. } = description;
    match task {
        Task::Classification => {
            writeln!(f, "task           {} classes: {}", classes.len(), join_first_names(classes))?;
        }
        Task::Text => writeln!(f, "task           text: predicts the next token")?,
        Task::Regression => writeln!(
            f,
            "task           regression; prediction = {} + {} x output",
            target.mean, target.deviation
        )?,
    }
    writeln!(f, "model          {model}, {}", counted(parameters, "parameter"))?;
    if let Some(name) = &target.name {
        writeln!(f, "target         {}", printable(name))?;
    }
    writeln!(
        f,
        "training       {}: {} training and {}; {}, {}, {}, seed {}{}",
        printable(&training.data),
        training.train_samples,
        counted(training.test_samples, "test sample"),
        printable(&training.optimizer),
        counted(training.epochs, "epoch"),
        counted(training.steps, "step"),
        training.seed,
        if training.stopped { ", stopped by a signal" } else { "" },
    )?;
    write!(f, "results        train loss {:.6}", training.train_loss)?;
    for (name, value) in [
        ("test loss", training.test_loss),
        ("test accuracy", training.test_accuracy),
        ("test R²", training.test_r2),
    ] {
        if let Some(value) = value {
            write!(f, ", {name} {value:.4}")?;
        }
    }
    writeln!(f)
}

fn write_columns(
    f: &mut fmt::Formatter<'_>,
    description: &ModelDescription,
    standardizer: Option<&Standardizer>,
) -> fmt::Result {
    if let Some(TextEncoding { context, vocabulary }) = &description.text {
        let tokens = match vocabulary {
            Vocabulary::Bytes => "each byte is a token".into(),
            Vocabulary::Characters { characters } => {
                format!(
                    "{} {:?}",
                    counted(characters.chars().count(), "character"),
                    characters.chars().take(100).collect::<String>()
                )
            }
            Vocabulary::BytePairs { .. } => "byte pairs".to_owned(),
        };
        return writeln!(f, "text           windows of {}; {tokens}", counted(context, "token"));
    }
    let found = match description.columns_from {
        ColumnOrigin::Header => "found by name",
        ColumnOrigin::Position => "found by position",
    };
    writeln!(f, "columns        {}, {found}", description.columns.len())?;
    if let Some(divisor) = description.pixel_divisor {
        writeln!(f, "pixels         divided by {divisor}")?;
    }
    if let Some(image) = description.image {
        writeln!(f, "images         {image} (channels, height, width)")?;
    }
    let mut input = 0;
    for column in description.columns.iter().take(LISTED_ENTRIES_MAX) {
        let ColumnEncoding { name, is_date, inputs } = column;
        let kind = if *is_date { "days since 1970" } else { "number" };
        write!(f, "  {:<20} ", printable(name))?;
        match inputs {
            ColumnInputs::Number { fill, .. } | ColumnInputs::ShiftedNumber { fill, .. } => {
                match inputs {
                    ColumnInputs::ShiftedNumber { offset, .. } => write!(f, "{kind} - {offset}")?,
                    _ => write!(f, "{kind}")?,
                }
                if let Some(Standardizer { mean, inverse_deviation }) = standardizer {
                    match inverse_deviation[input] {
                        0.0 => write!(f, ", constant {}", mean[input])?,
                        inverse => write!(f, ", mean {}, deviation {}", mean[input], 1.0 / inverse)?,
                    }
                }
                if let Some(fill) = fill {
                    write!(f, ", missing values become {fill}")?;
                }
                if column.width() > 1 {
                    write!(f, " and set a second input")?;
                }
            }
            ColumnInputs::OneHot { categories } => {
                let noun = plural(categories.len(), "category", "categories");
                write!(f, "{} {noun}: {}", categories.len(), join_first_names(categories))?;
            }
            ColumnInputs::Hashed { buckets } => write!(f, "text, hashed to {}", counted(buckets, "input"))?,
        }
        writeln!(f)?;
        input += column.width();
    }
    write_omitted_count(f, description.columns.len())
}

fn write_tensors(f: &mut fmt::Formatter<'_>, tensors: &[TensorSummary]) -> fmt::Result {
    let tensors: Vec<&TensorSummary> =
        tensors.iter().filter(|tensor| !is_standardizer_tensor(tensor)).collect();
    writeln!(f, "tensors        {}", tensors.len())?;
    for TensorSummary { name, shape, min, max } in tensors.iter().take(LISTED_ENTRIES_MAX) {
        let lengths: Vec<String> = shape.iter().map(usize::to_string).collect();
        write!(f, "  {:<20} {}", printable(name), lengths.join(" x "))?;
        if let (Some(min), Some(max)) = (min, max) {
            write!(f, ", from {min} to {max}")?;
        }
        writeln!(f)?;
    }
    write_omitted_count(f, tensors.len())
}

/// Returns whether the tensor holds the scaling of the inputs. [`write_tensors`] does not list these tensors, because
/// [`write_columns`] writes the scaling of a model.
fn is_standardizer_tensor(tensor: &TensorSummary) -> bool {
    [MEAN_TENSOR, INVERSE_DEVIATION_TENSOR].contains(&tensor.name.as_str())
}

/// Writes how many of `count` entries were left out after the first [`LISTED_ENTRIES_MAX`].
fn write_omitted_count(f: &mut fmt::Formatter<'_>, count: usize) -> fmt::Result {
    match count.saturating_sub(LISTED_ENTRIES_MAX) {
        0 => Ok(()),
        rest => writeln!(f, "  ... and {rest} more; --json lists all"),
    }
}
