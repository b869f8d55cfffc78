//! Writes predictions as CSV or as an array in numpy's format.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};
use std::path::PathBuf;

use super::for_each_row;
use super::input::{InputOptions, RowReader, TargetColumn, open_prediction_input};
use super::text::{TokenPrediction, for_each_token, read_tokens};
use crate::train::atomic_file::ReplacementFile;
use crate::train::data::DataError;
use crate::train::model::{LayerError, Prediction};
use crate::train::model_file::{ModelDescription, SavedModel};
use crate::types::debug_as_display;

/// The length in bytes of the header of a `.npy` file. Any number of rows fits into a header of this length.
const NPY_HEADER_BYTES: usize = 128;

/// The columns of the predictions for a text.
const TEXT_COLUMNS: [&str; 3] = ["token", "log_probability", "prediction"];

/// Where to write predictions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PredictionOutput {
    /// Comma-separated values on standard output.
    StandardOutput,
    /// A file with comma-separated values.
    Csv(PathBuf),
    /// A file in numpy's format: the probabilities of all classes as `f32`, or the predicted numbers or the logarithms of the
    /// probabilities of tokens as `f64`.
    Npy(PathBuf),
}

/// The reason why predictions cannot be written.
#[derive(thiserror::Error)]
#[error("cannot write the predictions to {output_name}: {source}")]
pub struct OutputError {
    /// The path of the output file, or `standard output`.
    output_name: String,
    /// The error of the operating system.
    source: io::Error,
}

debug_as_display!(OutputError);

/// The reason why predictions cannot be computed or written.
#[derive(thiserror::Error, Debug)]
#[non_exhaustive]
pub enum PredictError {
    /// The new data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A layer of a program's own model failed.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The output cannot be written.
    #[error(transparent)]
    Output(#[from] OutputError),
}

impl PredictionOutput {
    /// Returns [`Npy`](Self::Npy) if the name of the file ends in `.npy`, otherwise [`Csv`](Self::Csv).
    pub fn from_path(path: PathBuf) -> Self {
        let is_npy = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy"));
        if is_npy { Self::Npy(path) } else { Self::Csv(path) }
    }

    /// Returns the name of the output in messages.
    fn name(&self) -> String {
        match self {
            Self::StandardOutput => "standard output".into(),
            Self::Csv(path) | Self::Npy(path) => path.display().to_string(),
        }
    }
}

/// Computes a prediction for each row of new data, or for each token of a text except the first, and writes the
/// predictions in the same order. Returns their number. Memory does not grow with the number of rows of a table or of an
/// array in row-major order. Replaces an earlier file only after all predictions are written. If the reader of standard
/// output closes the pipe, returns without an error.
///
/// # Errors
///
/// See [`PredictError`].
pub fn predict(
    model: &mut SavedModel,
    input: &InputOptions,
    output: &PredictionOutput,
) -> Result<u64, PredictError> {
    let input = InputOptions { target: TargetColumn::Unread, ..input.clone() };
    let mut data = match &model.description().text {
        Some(encoding) => OpenInput::Tokens(read_tokens(&input, encoding)?),
        None => OpenInput::Rows(open_prediction_input(&input, model.description())?),
    };
    let output_name = output.name();
    let fail = |source| PredictError::Output(OutputError { output_name: output_name.clone(), source });
    let mut writer = PredictionWriter::create(output, model.description()).map_err(fail)?;
    let result = match &mut data {
        OpenInput::Tokens(tokens) => {
            for_each_token(model, tokens, |prediction| writer.write_token(prediction).map_err(fail))
        }
        OpenInput::Rows(reader) => {
            for_each_row(model, &mut **reader, |prediction, _| writer.write(prediction).map_err(fail))
        }
    };
    match result {
        Ok(rows) => match writer.commit(rows).map_err(fail) {
            Err(error) if is_closed_pipe(&error, output) => Ok(rows),
            committed => committed.map(|()| rows),
        },
        Err(error) if is_closed_pipe(&error, output) => Ok(0),
        Err(error) => Err(error),
    }
}

/// The new data: the tokens of a text, or rows.
enum OpenInput {
    Tokens(Vec<u16>),
    Rows(Box<dyn RowReader>),
}

/// Returns whether an error says that the reader of standard output has closed the pipe.
fn is_closed_pipe(error: &PredictError, output: &PredictionOutput) -> bool {
    let kind = match error {
        PredictError::Output(OutputError { source, .. }) => source.kind(),
        PredictError::Data(_) | PredictError::Layer(_) => return false,
    };
    *output == PredictionOutput::StandardOutput && kind == io::ErrorKind::BrokenPipe
}

/// Writes predictions to an open output.
struct PredictionWriter {
    format: PredictionFormat,
    /// The names of the columns, which are written before the first prediction, so that standard output stays empty if the first
    /// rows cannot be read. `None` after they are written, and for a `.npy` file.
    header: Option<Vec<String>>,
    /// The names of the classes. Empty for regression and for texts.
    classes: Vec<String>,
    /// The output file, which [`commit`](Self::commit) replaces. `None` for standard output.
    file: Option<ReplacementFile>,
}

/// The writer of each output format.
enum PredictionFormat {
    Csv(Box<csv::Writer<Box<dyn Write>>>),
    Npy(BufWriter<File>),
}

impl PredictionWriter {
    /// Opens the output.
    fn create(output: &PredictionOutput, description: &ModelDescription) -> io::Result<Self> {
        let file = match output {
            PredictionOutput::StandardOutput => None,
            PredictionOutput::Csv(path) | PredictionOutput::Npy(path) => Some(ReplacementFile::create(path)?),
        };
        let classes = description.classes.clone();
        let (format, header) = match (&file, output) {
            (Some(file), PredictionOutput::Npy(_)) => {
                (PredictionFormat::Npy(reserve_npy_header(file.file())?), None)
            }
            (file, _) => {
                let sink: Box<dyn Write> = match file {
                    Some(file) => Box::new(file.file().try_clone()?),
                    None => Box::new(io::stdout()),
                };
                let writer = csv::WriterBuilder::new().buffer_capacity(1 << 16).from_writer(sink);
                let columns = if description.text.is_some() {
                    TEXT_COLUMNS.map(str::to_owned).to_vec()
                } else {
                    let probabilities = classes.iter().map(|class| format!("probability_{class}"));
                    std::iter::once("prediction".to_owned()).chain(probabilities).collect()
                };
                (PredictionFormat::Csv(Box::new(writer)), Some(columns))
            }
        };
        Ok(Self { format, header, classes, file })
    }

    /// Writes the names of the columns, if they are not written yet.
    fn write_header(&mut self) -> io::Result<()> {
        match (&mut self.format, self.header.take()) {
            (PredictionFormat::Csv(writer), Some(columns)) => {
                writer.write_record(columns).map_err(to_io_error)
            }
            _ => Ok(()),
        }
    }

    /// Writes the prediction for a row.
    fn write(&mut self, prediction: &Prediction) -> io::Result<()> {
        self.write_header()?;
        match (&mut self.format, prediction) {
            (PredictionFormat::Npy(buffer), Prediction::Number(value)) => {
                buffer.write_all(&value.to_le_bytes())
            }
            (PredictionFormat::Npy(buffer), Prediction::Class { probabilities, .. }) => {
                probabilities.iter().try_for_each(|&value| buffer.write_all(&(value as f32).to_le_bytes()))
            }
            // `Debug` writes very small and very large numbers with an exponent, unlike `Display`.
            (PredictionFormat::Csv(writer), Prediction::Number(value)) => {
                writer.write_record([format!("{value:?}")]).map_err(to_io_error)
            }
            (PredictionFormat::Csv(writer), Prediction::Class { class, probabilities }) => {
                writer.write_field(&self.classes[*class]).map_err(to_io_error)?;
                for &probability in probabilities {
                    writer.write_field(format!("{:?}", probability as f32)).map_err(to_io_error)?;
                }
                writer.write_record(None::<&[u8]>).map_err(to_io_error)
            }
        }
    }

    /// Writes the prediction for a token.
    fn write_token(&mut self, prediction: &TokenPrediction) -> io::Result<()> {
        self.write_header()?;
        let TokenPrediction { token, log_probability, likeliest } = prediction;
        match &mut self.format {
            PredictionFormat::Npy(buffer) => buffer.write_all(&log_probability.to_le_bytes()),
            PredictionFormat::Csv(writer) => {
                let number = format!("{log_probability:?}");
                writer.write_record([token, &number, likeliest]).map_err(to_io_error)
            }
        }
    }

    /// Writes the buffered predictions and the number of rows, and replaces the output file.
    fn commit(mut self, rows: u64) -> io::Result<()> {
        self.write_header()?;
        match self.format {
            PredictionFormat::Csv(mut writer) => writer.flush()?,
            PredictionFormat::Npy(mut buffer) => {
                let columns = (!self.classes.is_empty()).then_some(self.classes.len());
                buffer.seek(SeekFrom::Start(0))?;
                buffer.write_all(&npy_header(rows, columns))?;
                buffer.flush()?;
            }
        }
        self.file.map_or(Ok(()), ReplacementFile::commit)
    }
}

/// Returns the error of the operating system that an error of the crate `csv` contains. The conversion with `From` would
/// lose the kind of the error.
fn to_io_error(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

/// Reserves space for the header at the start of a `.npy` file. The header contains the number of rows, so it is
/// written last.
fn reserve_npy_header(file: &File) -> io::Result<BufWriter<File>> {
    if !file.metadata()?.is_file() {
        return Err(io::Error::other(
            "a .npy file must be a regular file, because its header is written last",
        ));
    }
    let mut buffer = BufWriter::with_capacity(1 << 16, file.try_clone()?);
    buffer.write_all(&[0; NPY_HEADER_BYTES])?;
    Ok(buffer)
}

/// Returns the header of a `.npy` file. If there are `columns`, the array has the shape (rows, columns) and holds
/// `f32`. Otherwise the array has the shape (rows) and holds `f64`. Format:
/// <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.
fn npy_header(rows: u64, columns: Option<usize>) -> Vec<u8> {
    let (element, shape) = match columns {
        Some(columns) => ("<f4", format!("({rows}, {columns})")),
        None => ("<f8", format!("({rows},)")),
    };
    let text = format!("{{'descr': '{element}', 'fortran_order': False, 'shape': {shape}, }}");
    let text_bytes = NPY_HEADER_BYTES - 10;
    let length = (text_bytes as u16).to_le_bytes();
    let padded = text_bytes - 1;
    [&b"\x93NUMPY\x01\x00"[..], &length, format!("{text:padded$}\n").as_bytes()].concat()
}
