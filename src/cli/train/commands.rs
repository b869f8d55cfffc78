//! The commands `ringtrain predict`, `ringtrain eval`, `ringtrain inspect`, `ringtrain export` and `ringtrain generate`,
//! which use a trained model, and `ringtrain flight`. They run in one process.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory as _, Parser};

use super::data_args::DataFormatArgs;
use super::flight::{FLIGHT_AFTER_HELP, FlightArgs, compare_flight_records};
use super::generate::{self, GENERATE_AFTER_HELP, GenerateArgs};
use super::table_args::TableFormatArgs;
use super::{ProgramFailure, usage_error};
use crate::cli::version::LONG_VERSION;
use crate::exit::Exit;
use crate::train::data::{DataSource, file_of_array};
use crate::train::model_file::{Inspection, ModelFileError, SavedModel};
use crate::train::onnx::{ExportError, OnnxInputs, OnnxModel};
use crate::train::predict::{
    self, InputOptions, PredictError, PredictionInput, PredictionOutput, TargetColumn, evaluate,
};
use crate::train::would_replace;

const PREDICT_AFTER_HELP: &str = "\
Examples:
  ringtrain predict --model flowers.model --data new.csv                       print predictions
  ringtrain predict --model flowers.model --data new.csv --output out.csv
  ringtrain predict --model digits.model --data X.npy --output probabilities.npy
  zcat big.csv.gz | ringtrain predict --model flowers.model --data - > out.csv

The output has one row for each row of the data, in the same order:
  regression      the column `prediction` holds numbers in the unit of the target
  classification  `prediction` holds the name of the most probable class, and `probability_NAME`
                  holds the probability of the class NAME
  texts           one row for each token of the text except the first. `token` holds the token,
                  `log_probability` the natural logarithm of its probability after the tokens before
                  it, and `prediction` the most probable token at its place
An output file whose name ends in .npy has one array instead:
  regression      the predicted numbers as f64
  classification  the probabilities of all classes as f32, in the shape (rows, classes)
  texts           the values of `log_probability` as f64

Exit codes:
  0   success
  1   the output cannot be written
  2   an option is unknown or has a wrong value, or options do not fit together
  4   the data are missing or wrong
  10  the model file cannot be read";

const EVAL_AFTER_HELP: &str = "\
The results:
  classification  accuracy, top-k accuracy, log loss and macro F1; the precision, recall and F1 of
                  each class; the confusion matrix; for models of two classes also the AUC, with the
                  second class as the positive class
  regression      MAE, RMSE and R²
  texts           the mean loss in nats for each token, and the perplexity

Exit codes:
  0   success
  1   the results cannot be written
  2   an option is unknown or has a wrong value, or options do not fit together
  4   the data are missing or wrong
  10  the model file cannot be read";

const EXPORT_AFTER_HELP: &str = "\
Examples:
  ringtrain export --model flowers.model --output flowers.onnx
  ringtrain export --model houses.model --output houses.onnx --inputs matrix

The ONNX model contains the encoding of the columns, the scaling and the layers, so its inputs take
the values of the table without change. The outputs:
  prediction     the names of the predicted classes, or numbers in the unit of the target
  probabilities  for a classifier, the probability of each class
The command prints the name, type and shape of each input and output. docs/onnx.md describes the
file.

Exit codes:
  0   success
  1   the output cannot be written
  2   an option is unknown or has a wrong value, or options do not fit together
  10  the model file cannot be read";

/// A command with its arguments.
#[derive(Parser, Debug)]
#[command(name = "ringtrain", version, long_version = LONG_VERSION, disable_help_subcommand = true)]
enum ModelCommand {
    /// Predict the target of new rows with a model that `ringtrain --save-model FILE` wrote
    #[command(after_help = PREDICT_AFTER_HELP)]
    Predict(PredictArgs),
    /// Compare the predictions of a model with the targets of test data
    #[command(after_help = EVAL_AFTER_HELP)]
    Eval(EvalArgs),
    /// Print the content of a model file or a checkpoint
    Inspect(InspectArgs),
    /// Convert a model to the ONNX format, which other programs can run
    #[command(after_help = EXPORT_AFTER_HELP)]
    Export(ExportArgs),
    /// Continue a text with a model that was trained with --model gpt:...
    #[command(after_help = GENERATE_AFTER_HELP)]
    Generate(GenerateArgs),
    /// Compare the records that the ranks of a failed job wrote with --flight-recorder DIR
    #[command(after_help = FLIGHT_AFTER_HELP)]
    Flight(FlightArgs),
}

/// The names of the commands.
const COMMAND_NAMES: [&str; 6] = ["predict", "eval", "inspect", "export", "generate", "flight"];

#[derive(Args, Debug)]
struct ModelDataArgs {
    /// The model file, which `ringtrain --save-model FILE` has written
    #[arg(long, value_name = "FILE")]
    model: PathBuf,

    /// The data. One of: a .csv or .tsv table, which may be compressed (.gz, .zip, .zst); several files of one table,
    /// such as a.csv b.csv or 'part-*.csv'; `-` for a table on standard input; an array FEATURES.npy; two arrays
    /// FEATURES.npy,TARGETS.npy; a .npz file (only its test set is used if it has one); a .libsvm file; a directory of
    /// images; a directory of IDX files (only their test set is used); digits; synthetic:ROWSxFEATURES. The order of a
    /// table's columns does not matter if the table has a header
    #[arg(long, value_name = "DATA", num_args = 1.., required = true)]
    data: Vec<String>,

    #[command(flatten)]
    data_format: DataFormatArgs,

    #[command(flatten)]
    table_format: TableFormatArgs,
}

#[derive(Args, Debug)]
struct PredictArgs {
    #[command(flatten)]
    model_and_data: ModelDataArgs,

    /// Write the predictions to FILE: as a numpy array if the name ends in .npy, otherwise as comma-separated values.
    /// An existing file is replaced only after all predictions are written [default: print comma-separated values]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct EvalArgs {
    #[command(flatten)]
    model_and_data: ModelDataArgs,

    /// The table column that holds the targets: its name, or its number counted from 0 [default: the name of the
    /// target in training]
    #[arg(long, value_name = "COLUMN")]
    target: Option<String>,

    /// The K of the top-k accuracy, which counts a prediction as right if the true class is among the K most probable
    /// classes [default: 5]
    #[arg(long, value_name = "K")]
    top_k: Option<u64>,

    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct InspectArgs {
    /// The model file or checkpoint
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print the content as JSON, with all columns, classes and tensors
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct ExportArgs {
    /// The model file, which `ringtrain --save-model FILE` has written
    #[arg(long, value_name = "FILE")]
    model: PathBuf,

    /// Write the model in the ONNX format to FILE. An existing file is replaced only after the new file is complete
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// The inputs of the ONNX model. columns: one input for each column, with the name of the column. matrix: one
    /// input `x` with all columns; no column may hold texts [default: columns if the columns have names or hold texts,
    /// otherwise matrix]
    #[arg(long, value_name = "columns|matrix")]
    inputs: Option<String>,
}

/// Returns the definitions of the commands.
pub(super) fn definitions() -> Vec<clap::Command> {
    ModelCommand::command().get_subcommands().cloned().collect()
}

/// Returns whether the first argument after the program's name is a command.
pub(super) fn is_command(args: &[OsString]) -> bool {
    args.get(1).is_some_and(|name| COMMAND_NAMES.iter().any(|known| name == known))
}

/// Runs a command. The outer `Err` is an error in the arguments, or the text of `--help`. The inner `Err` is a
/// failure of the command.
pub(super) fn run_command(args: &[OsString]) -> Result<Result<(), ProgramFailure>, clap::Error> {
    Ok(match ModelCommand::try_parse_from(args)? {
        ModelCommand::Predict(args) => predict_new_rows(args),
        ModelCommand::Eval(args) => compare_with_targets(args),
        ModelCommand::Inspect(args) => inspect(&args),
        ModelCommand::Export(args) => export(&args),
        ModelCommand::Generate(args) => generate::generate(&args),
        ModelCommand::Flight(args) => compare_flight_records(&args)
            .map_err(|message| ProgramFailure { exit: Exit::Data, message })
            .and_then(|text| print_to_stdout(&text)),
    })
}

/// Returns the error for a command that `ringrun` started on several ranks: commands run in one process. `Err` is an
/// error in the arguments, or the text of `--help`.
pub(super) fn error_for_several_ranks(args: &[OsString]) -> Result<ProgramFailure, clap::Error> {
    ModelCommand::try_parse_from(args)?;
    let name = args.get(1).map(|name| name.to_string_lossy()).unwrap_or_default();
    let message = format!("`ringtrain {name}` runs in one process; start it without ringrun");
    Ok(ProgramFailure { exit: Exit::Usage, message })
}

impl From<ModelFileError> for ProgramFailure {
    fn from(error: ModelFileError) -> Self {
        Self { exit: Exit::Checkpoint, message: error.to_string() }
    }
}

impl From<PredictError> for ProgramFailure {
    fn from(error: PredictError) -> Self {
        let exit = match error {
            PredictError::Data(_) => Exit::Data,
            PredictError::Layer(_) => Exit::Diverged,
            PredictError::Output(_) => Exit::Failure,
        };
        Self { exit, message: error.to_string() }
    }
}

impl From<ExportError> for ProgramFailure {
    fn from(error: ExportError) -> Self {
        let exit = match error {
            ExportError::TextColumn { .. }
            | ExportError::ReadsTexts { .. }
            | ExportError::OwnLayers { .. } => Exit::Usage,
            _ => Exit::Failure,
        };
        Self { exit, message: error.to_string() }
    }
}

impl ModelDataArgs {
    /// Returns the options for reading the data. `target` says which column holds the targets.
    fn input_options(&self, target: TargetColumn) -> Result<InputOptions, ProgramFailure> {
        let data = self.data_format.prediction_input(&self.data).map_err(usage_error)?;
        let (header, separator) = self.table_format.parse_header_and_separator().map_err(usage_error)?;
        let options = InputOptions { data, header, separator, target };
        if !matches!(options.data, PredictionInput::Table(_) | PredictionInput::StandardInput) {
            let name = self.data.join(" ");
            let is_parquet = matches!(options.data, PredictionInput::Source(DataSource::Parquet(_)));
            if options.has_options_of_text_tables() {
                let problem = if is_parquet { "is a Parquet file" } else { "is not a table" };
                return Err(usage_error(format!(
                    "--header, --no-header and --separator are for tables of text; --data {name} {problem}"
                )));
            }
            if let (TargetColumn::Named(_), false) = (&options.target, is_parquet) {
                return Err(usage_error(format!(
                    "--target is for tables; --data {name} has its target built in"
                )));
            }
        }
        Ok(options)
    }
}

/// Runs `ringtrain predict`.
fn predict_new_rows(args: PredictArgs) -> Result<(), ProgramFailure> {
    let input = args.model_and_data.input_options(TargetColumn::Unread)?;
    if let Some(output) = &args.output {
        check_output_is_no_input(output, &args.model_and_data.model, &input.data).map_err(usage_error)?;
    }
    let mut model = SavedModel::load(&args.model_and_data.model)?;
    if model.description().text.is_some() && input.has_options_of_text_tables() {
        let message = "--header, --no-header and --separator do not apply to a model that reads plain text";
        return Err(usage_error(message.into()));
    }
    let output = args.output.map_or(PredictionOutput::StandardOutput, PredictionOutput::from_path);
    predict::predict(&mut model, &input, &output)?;
    Ok(())
}

/// Checks that `output` is neither the model file nor a data file.
fn check_output_is_no_input(output: &Path, model: &Path, data: &PredictionInput) -> Result<(), String> {
    let mut files: Vec<(&str, &Path)> = vec![("--model", model)];
    match data {
        PredictionInput::Table(paths) => files.extend(paths.iter().map(|path| ("--data", path.as_path()))),
        PredictionInput::Npy(features, targets) => {
            files.extend(
                [Some(features), targets.as_ref()]
                    .into_iter()
                    .flatten()
                    .map(|path| ("--data", file_of_array(path))),
            );
        }
        PredictionInput::Source(source) => {
            files.extend(source.files().into_iter().map(|path| ("--data", path)));
        }
        PredictionInput::StandardInput => {}
    }
    match files.iter().find(|(_, path)| would_replace(output, path)) {
        Some((option, _)) => Err(format!(
            "--output would replace {}, which {option} uses; pass another path to --output",
            output.display()
        )),
        None => Ok(()),
    }
}

/// Runs `ringtrain eval`.
fn compare_with_targets(args: EvalArgs) -> Result<(), ProgramFailure> {
    let target = args.target.map_or(TargetColumn::SameName, TargetColumn::Named);
    let input = args.model_and_data.input_options(target)?;
    if args.top_k == Some(0) {
        return Err(usage_error("--top-k 0: it must be at least 1".into()));
    }
    let top_k = args.top_k.map(|k| usize::try_from(k).unwrap_or(usize::MAX));
    let mut model = SavedModel::load(&args.model_and_data.model)?;
    if model.description().text.is_some()
        && (top_k.is_some() || input.target != TargetColumn::SameName || input.has_options_of_text_tables())
    {
        let message = "--target, --top-k, --header, --no-header and --separator do not apply to a model that reads plain text";
        return Err(usage_error(message.into()));
    }
    check_top_k(top_k, model.description().classes.len()).map_err(usage_error)?;
    let evaluation = evaluate(&mut model, &input, top_k)?;
    print_to_stdout(&if args.json { to_json(&evaluation) } else { evaluation.to_string() })
}

/// Checks that `--top-k` is less than the number of classes. `class_count` is 0 for a model that predicts numbers.
fn check_top_k(top_k: Option<usize>, class_count: usize) -> Result<(), String> {
    match top_k {
        Some(k) if class_count == 0 => {
            Err(format!("--top-k {k}: the model predicts numbers and not classes; leave out --top-k"))
        }
        Some(k) if k >= class_count => Err(format!(
            "--top-k {k}: the model has only {class_count} classes, so each prediction would count as right; pass at most {}",
            class_count - 1
        )),
        _ => Ok(()),
    }
}

/// Runs `ringtrain inspect`.
fn inspect(args: &InspectArgs) -> Result<(), ProgramFailure> {
    let inspection = Inspection::read(&args.file)?;
    print_to_stdout(&if args.json { to_json(&inspection) } else { inspection.to_string() })
}

/// Runs `ringtrain export`.
fn export(args: &ExportArgs) -> Result<(), ProgramFailure> {
    let parse_inputs = |text: &String| text.parse().map_err(|why| format!("--inputs {text}: it {why}"));
    let inputs: Option<OnnxInputs> =
        args.inputs.as_ref().map(parse_inputs).transpose().map_err(usage_error)?;
    if would_replace(&args.output, &args.model) {
        let message = format!("--output would replace {}, the model file", args.output.display());
        return Err(usage_error(message + "; pass another path to --output"));
    }
    let exported = OnnxModel::new(&SavedModel::load(&args.model)?, inputs)?;
    exported.save(&args.output)?;
    print_to_stdout(&exported.to_string())
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).expect("strings and numbers are valid JSON") + "\n"
}

/// Writes to standard output. A closed pipe is not an error.
fn print_to_stdout(text: &str) -> Result<(), ProgramFailure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ProgramFailure {
            exit: Exit::Failure,
            message: format!("standard output could not be written: {error}"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_line(line: &str) -> String {
        let args: Vec<OsString> =
            std::iter::once("ringtrain").chain(line.split_whitespace()).map(OsString::from).collect();
        assert!(is_command(&args), "{line}");
        match run_command(&args) {
            Ok(Ok(())) => "success".into(),
            Ok(Err(failure)) => format!("{}: {}", failure.exit as u8, failure.message),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn bad_arguments_are_rejected_with_a_reason() {
        for (line, expected) in [
            ("predict --data a.csv", "--model"),
            (
                "predict --model m --data a.csv -",
                "2: --data -: standard input cannot be one of several files",
            ),
            (
                "predict --model m --data a.csv --output ./m",
                "2: --output would replace ./m, which --model uses",
            ),
            ("predict --model m --data a.csv b.csv --output b.csv", "b.csv, which --data uses"),
            ("predict --model m --data x.npy --output x.npy", "x.npy, which --data uses"),
            ("predict --model m --data none-*.csv", "2: --data none-*.csv: no file matches this pattern"),
            ("predict --model m", "--data"),
            ("predict --model m --data synthetic:1", "shape"),
            (
                "predict --model m --data x.npy --header",
                "2: --header, --no-header and --separator are for tables",
            ),
            ("predict --model m --data a.csv --header --no-header", "cannot be used with"),
            ("predict --model /no/such/file --data a.csv", "10: cannot read the model file /no/such/file"),
            ("eval --model m --data x.npy,y.npy --target y", "2: --target is for tables"),
            ("predict --model m --data a.csv --separator ab", "2: --separator ab: it"),
            ("eval --model m --data a.csv --top-k 0", "2: --top-k 0: it must be at least 1"),
            (
                "predict --model m --data - --format libsvm",
                "2: --data -: standard input must hold a table of text, and not the format libsvm",
            ),
            (
                "predict --model m --data a --format libsvm --header",
                "2: --header, --no-header and --separator",
            ),
            ("predict --model m --data x.libsvm --output x.libsvm", "x.libsvm, which --data uses"),
            ("inspect", "FILE"),
            ("inspect /no/such/file", "10: cannot read the model file /no/such/file: No such file"),
            ("inspect a b", "unexpected argument"),
            ("export --model m", "--output"),
            ("export --model m --output ./m", "2: --output would replace ./m, the model file"),
            (
                "export --model m --output o --inputs rows",
                "2: --inputs rows: it is not one of columns, matrix",
            ),
            ("export --model /no/such/file --output o", "10: cannot read the model file /no/such/file"),
        ] {
            let error = run_line(line);
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    /// Regression test: ringtrain silently ignored a `--top-k` that has no effect.
    #[test]
    fn a_top_k_without_an_effect_is_refused() {
        for (k, classes, expected) in [
            (3, 0, Some("predicts numbers and not classes")),
            (3, 3, Some("has only 3 classes")),
            (9, 2, Some("pass at most 1")),
            (2, 3, None),
        ] {
            let found = check_top_k(Some(k), classes).err();
            let fits = found.as_ref().zip(expected).map(|(error, expected)| error.contains(expected));
            assert_eq!(fits, expected.map(|_| true), "{found:?}");
            assert!(check_top_k(None, classes).is_ok());
        }
    }

    #[test]
    fn ringrun_refuses_commands_and_training_is_not_a_command() {
        let args = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let failure = error_for_several_ranks(&args("ringtrain inspect m")).unwrap();
        assert!(failure.message.contains("without ringrun"), "{}", failure.message);
        assert!(error_for_several_ranks(&args("ringtrain inspect")).is_err());
        assert!(!is_command(&args("ringtrain --epochs 1")) && !is_command(&args("ringtrain")));
    }
}
