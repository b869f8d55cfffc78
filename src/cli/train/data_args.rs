//! The arguments that name the data and its format.

use std::path::PathBuf;

use clap::Args;

use crate::train::data::{DataFormat, DataSource};
use crate::train::model::ModelSpec;
use crate::train::predict::PredictionInput;

/// The data of a training run.
#[derive(Args, Debug)]
#[command(next_help_heading = "Data")]
pub(super) struct TrainingDataArgs {
    /// The training data. digits: 1,797 built-in handwritten digits (UCI, CC BY 4.0). DIR: a directory of IDX files
    /// such as MNIST, plain or .gz, or a directory with a folder of PNG or JPEG images for each class. FILE.csv or
    /// FILE.tsv: a table, plain or .gz, .zip or .zst (needs --target). FILE.parquet: a table in the format Parquet
    /// (needs --target and a program that was built with the feature parquet). Several files, as in a.csv b.csv or
    /// 'part-*.csv': one table. -: a table of text on the standard input of rank 0, not compressed.
    /// FEATURES.npy,TARGETS.npy: two arrays; features may be images of the shape (samples, height, width) or (samples,
    /// channels, height, width). FILE.npz: two arrays with the names x and y, features and targets, or images and labels;
    /// with `_train` and `_test` after the names, a training set and a test set.
    /// FILE.npz/FEATURES.npy,FILE.npz/TARGETS.npy: arrays with other names. FILE.libsvm: sparse rows, plain or compressed.
    /// synthetic:ROWSxFEATURES: random data of this shape. With --model gpt:..., DATA is one or more text files,
    /// plain or compressed
    #[arg(long, value_name = "DATA", num_args = 1.., default_value = "digits", help_heading = "Data")]
    data: Vec<String>,

    /// Test the model on these samples. The samples must have the same format and the same columns or features as
    /// --data. Without this option, --test-fraction splits off a test set
    #[arg(long, value_name = "DATA", num_args = 1.., conflicts_with = "test_fraction", help_heading = "Data")]
    test_data: Vec<String>,

    /// For data in files that are larger than memory: hold the samples in temporary files in the directory DIR, and read them
    /// while the model is trained. The files of a table take up to 16 bytes for each cell while the table is read, and 4 bytes
    /// later; pixels take 1 byte, and tokens of a text 2 bytes. The samples of an epoch are shuffled in blocks: first blocks of
    /// about 1 MiB, and then the samples of every 64 consecutive blocks
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(super) stream: Option<PathBuf>,

    /// Read and hold all samples on each rank. Without this option, each rank holds a part of the samples, and during the run the
    /// ranks send each other the samples of the next batches. Use this option if the network is slow and each rank has enough
    /// memory
    #[arg(long, help_heading = "Data")]
    pub(super) replicate_data: bool,

    #[command(flatten)]
    format: DataFormatArgs,
}

impl TrainingDataArgs {
    /// Returns the source of the data.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong.
    pub(super) fn source(&self) -> Result<DataSource, String> {
        self.format.source("--data", &self.data)
    }

    /// Returns the source of the test set. Returns `None` if `--test-data` is not given.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong.
    pub(super) fn test_source(&self, source: &DataSource) -> Result<Option<DataSource>, String> {
        if self.test_data.is_empty() {
            return Ok(None);
        }
        let test = match source {
            DataSource::Text(_) => {
                DataSource::from_values_with_format("--test-data", &self.test_data, DataFormat::Text)?
            }
            _ => self.format.source("--test-data", &self.test_data)?,
        };
        match source.check_test_source(&test) {
            Ok(()) => Ok(Some(test)),
            Err(why) => Err(name_absent_path(why, source, Some(&test))),
        }
    }

    /// Returns the text files that `--data` names, for a model that learns from text.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong.
    pub(super) fn text_source(&self, model: &ModelSpec) -> Result<DataSource, String> {
        match self.format.parse_format()? {
            None | Some(DataFormat::Text) => {}
            Some(other) => {
                return Err(format!(
                    "--format {other} does not suit --model {model}, which learns from plain text"
                ));
            }
        }
        if self.data == ["digits"] {
            return Err(format!("--model {model} learns from plain text; pass --data FILE.txt"));
        }
        DataSource::from_values_with_format("--data", &self.data, DataFormat::Text)
    }
}

/// Returns the error `why`, which depends on the kind of the data. If a file or directory of the data does not exist, the error
/// begins with this fault. If the missing file's name does not show its kind either, the error consists of this fault alone.
pub(super) fn name_absent_path(why: String, source: &DataSource, test: Option<&DataSource>) -> String {
    for (option, source) in [("--data", Some(source)), ("--test-data", test)] {
        let paths = source.map(DataSource::paths).unwrap_or_default();
        if let Some(absent) = paths.into_iter().find(|path| !path.exists()) {
            let error = format!("{option} {}: there is no such file or directory", absent.display());
            let is_kind_known = !matches!(source, Some(DataSource::Idx(_)));
            return if is_kind_known { format!("{error}; {why}") } else { error };
        }
    }
    why
}

/// The format of the data.
#[derive(Args, Debug)]
pub(super) struct DataFormatArgs {
    /// The format of --data. table: a table of text, such as CSV. parquet: a table in the format Parquet. libsvm:
    /// sparse rows of the form TARGET INDEX:VALUE ..., with indices from 1. idx: a directory of IDX files. images: a
    /// directory with a folder of images for each class. text: plain text, only for models gpt:... Without this
    /// option, models gpt:... read all files as text. For other models, .parquet and .pq files have the format parquet,
    /// and .libsvm, .svmlight and .svm files have the format libsvm. .npy and .npz files are read as arrays. Other files
    /// have the format table, except that a file with an unknown ending has the format parquet if it begins with the
    /// bytes PAR1. A directory of images or folders has the format images, and other directories have the format idx
    #[arg(long, value_name = "table|parquet|libsvm|idx|images|text")]
    format: Option<String>,
}

impl DataFormatArgs {
    /// Returns the value of `--format`, or `None` without this option.
    fn parse_format(&self) -> Result<Option<DataFormat>, String> {
        let parse = |text: &String| text.parse().map_err(|why| format!("--format {text}: it {why}"));
        self.format.as_ref().map(parse).transpose()
    }

    /// Returns the source that the values of `option` name. `option` is `--data` or `--test-data`.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which value is wrong.
    pub(super) fn source(&self, option: &str, data_values: &[String]) -> Result<DataSource, String> {
        match self.parse_format()? {
            Some(format) => DataSource::from_values_with_format(option, data_values, format),
            None => DataSource::from_values(option, data_values),
        }
    }

    /// Returns the input of a prediction that the values of `--data` name.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which value is wrong.
    pub(super) fn prediction_input(&self, data_values: &[String]) -> Result<PredictionInput, String> {
        match self.parse_format()? {
            Some(format) => DataSource::from_values_with_format("--data", data_values, format)
                .map(PredictionInput::from_source),
            None => PredictionInput::from_values(data_values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse_config;

    /// In an earlier version, the errors said that `--target` is missing, or that the data have another format or a test set,
    /// although the file did not exist.
    #[test]
    fn the_error_names_a_missing_file_first() {
        const ABSENT: &str = "there is no such file or directory";
        for (line, option) in [
            ("--data missing.csv", "--data"),
            ("--data Cargo.toml missing.csv", "--data"),
            ("--data Cargo.toml --test-data missing.csv", "--test-data"),
            ("--data Cargo.toml --target x --test-data missing", "--test-data"),
            ("--data missing --test-data Cargo.toml", "--data"),
            ("--data missing --test-fraction 0.5", "--data"),
            ("--data missing --no-header", "--data"),
            ("--data missing.npy,missing.npy --target x", "--data"),
            ("--data missing.libsvm --drop a", "--data"),
        ] {
            let error = parse_config(line).unwrap_err();
            assert!(
                error.starts_with(&format!("{option} missing")) && error.contains(ABSENT),
                "{line}: {error}"
            );
        }
        let error = parse_config("--data missing.csv").unwrap_err();
        assert!(error.contains("name the column to predict with --target"), "{error}");
        assert_eq!(
            parse_config("--data missing --no-header").unwrap_err(),
            format!("--data missing: {ABSENT}")
        );
    }
}
