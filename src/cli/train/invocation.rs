//! Collects the options of one start of `ringtrain` from the command line, from a configuration file, and from the
//! checkpoint from which the run resumes.

use std::ffi::OsString;
use std::path::Path;

use clap::{Command, FromArgMatches as _, Parser as _};

use super::args::TrainArgs;
use super::config_file;
use super::option_set::{self, OptionOrigin, OptionSet};
use super::output_args::OutputArgs;
use super::service::ServiceArgs;
use crate::cli::group_args::GroupArgs;
use crate::train::{CHECKPOINT_FILE_NAME, Config, options_refused_by, read_options, would_replace};

/// The options with which the user started `ringtrain`.
pub(super) struct Invocation {
    command: Command,
    /// The options of the command line and of the configuration file.
    options: OptionSet,
    /// The parsed `options`.
    args: TrainArgs,
}

/// Why the arguments cannot be used.
pub(super) enum ArgumentError {
    /// A wrong argument, or the text of `--help` or `--version`.
    Clap(clap::Error),
    /// A sentence that says what is wrong and what to do.
    Wrong(String),
}

/// The checkpoint from which a run resumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ResumeSource<'a> {
    /// The directory of the checkpoint.
    pub(super) directory: &'a Path,
    /// Whether a missing checkpoint is an error. If this is `false`, a run without a checkpoint starts from the
    /// beginning.
    pub(super) must_exist: bool,
}

impl ResumeSource<'_> {
    /// Returns whether the directory contains a checkpoint.
    pub(super) fn has_checkpoint(&self) -> bool {
        self.directory.join(CHECKPOINT_FILE_NAME).exists()
    }

    /// Returns the options that the checkpoint stores, as TOML. Returns `None` if there is no checkpoint, or if the
    /// checkpoint stores no options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says why the checkpoint cannot be read.
    pub(super) fn read_stored_options(&self) -> Result<Option<String>, String> {
        if self.must_exist && !self.has_checkpoint() {
            let directory = self.directory.display();
            return Err(format!(
                "cannot resume: there is no {CHECKPOINT_FILE_NAME} in {directory}; pass the directory of an earlier --checkpoint"
            ));
        }
        read_options(self.directory).map_err(|error| error.to_string())
    }
}

impl Invocation {
    /// Parses the arguments, and reads the configuration file. The first argument is the program's name.
    pub(super) fn parse(arguments: Vec<OsString>) -> Result<Self, ArgumentError> {
        let command = option_set::command();
        let matches = command.clone().try_get_matches_from(arguments).map_err(ArgumentError::Clap)?;
        let mut args = TrainArgs::from_arg_matches(&matches).map_err(ArgumentError::Clap)?;
        let mut options = OptionSet::from_matches(&command, &matches);
        if let Some(path) = &args.config {
            options.add_missing(
                &command,
                config_file::read_config_file(&command, path).map_err(ArgumentError::Wrong)?,
            );
            args = parse_options(&command, &options).map_err(ArgumentError::Wrong)?;
        }
        Ok(Self { command, options, args })
    }

    /// Returns the options that say how this rank joins the job.
    pub(super) fn group_args(&self) -> &GroupArgs {
        &self.args.group
    }

    /// Returns the options for running as a service.
    pub(super) fn service_args(&self) -> &ServiceArgs {
        &self.args.service
    }

    /// Returns the checkpoint from which the run resumes, or `None` if the run does not resume.
    pub(super) fn resume_source(&self) -> Option<ResumeSource<'_>> {
        self.args.checkpoint.resume_source()
    }

    /// Checks the options and returns the configuration and the options of the output. `stored_options` is the
    /// TOML text of the options in the checkpoint from which the run resumes. Options of the command line and of the
    /// configuration file override the stored options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong, where it was given and what to do.
    pub(super) fn to_config_and_output(
        &self,
        stored_options: Option<&str>,
    ) -> Result<(Config, OutputArgs), String> {
        let mut options = self.options.clone();
        let directory = self.resume_source().map(|source| source.directory.display().to_string());
        if let (Some(text), Some(directory)) = (stored_options, directory) {
            let origin = |_| OptionOrigin::Checkpoint(directory.clone());
            let stored = config_file::parse_toml_options(&self.command, text, origin)?;
            // Drop the stored options that the new strategy refuses, because the user has no way to unset a stored
            // option.
            let strategy = options.first_value("strategy").and_then(|text| text.parse().ok());
            let refused_options = strategy.map_or(&[][..], options_refused_by);
            let stored = stored.without_options_of_one_start().without_learning_rate();
            options.add_missing(&self.command, stored.without_options(refused_options));
        }
        let args = parse_options(&self.command, &options)?;
        let output = args.output.clone();
        let mut config = args.into_config().map_err(|message| options.append_option_origins(&message))?;
        self.check_config_file_is_not_overwritten(&config)?;
        if let Some(checkpoint) = &mut config.checkpoint {
            checkpoint.options = Some(options.to_toml(&self.command)?);
        }
        Ok((config, output))
    }

    /// Checks that the run does not write a file over the configuration file.
    fn check_config_file_is_not_overwritten(&self, config: &Config) -> Result<(), String> {
        let Some(config_path) = &self.args.config else { return Ok(()) };
        let output_options = [
            ("--report", &config.report),
            ("--save-model", &config.model_file),
            ("--plot", &config.curves.plot),
            ("--html", &config.curves.html),
        ];
        match output_options
            .into_iter()
            .find(|(_, path)| path.as_ref().is_some_and(|path| would_replace(path, config_path)))
        {
            Some((option, _)) => Err(format!(
                "{option} would replace {}, the file of --config; pass another path to {option}",
                config_path.display()
            )),
            None => Ok(()),
        }
    }
}

/// Parses options from the command line, a configuration file and a checkpoint together.
fn parse_options(command: &Command, options: &OptionSet) -> Result<TrainArgs, String> {
    TrainArgs::try_parse_from(options.to_arguments(command)).map_err(|error| {
        let text = error.to_string();
        let lines: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
        options.append_option_origins(lines.join(" ").trim_start_matches("error: "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Compression;
    use crate::train::{BucketBytes, ConsoleLines, ExistingCheckpoint, ProgressDisplay, RateSchedule};

    impl Invocation {
        fn to_config(&self, stored_options: Option<&str>) -> Result<Config, String> {
            self.to_config_and_output(stored_options).map(|(config, _)| config)
        }
    }

    fn parse_line(line: &str) -> Result<Invocation, String> {
        let arguments = std::iter::once("ringtrain").chain(line.split_whitespace());
        Invocation::parse(arguments.map(OsString::from).collect()).map_err(|error| match error {
            ArgumentError::Clap(error) => error.to_string(),
            ArgumentError::Wrong(message) => message,
        })
    }

    /// Parses `line`, in which `run.toml` names a file with the contents `text`.
    fn parse_with_file(line: &str, text: &str) -> Result<Config, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        let path_text = path.to_str().unwrap();
        let config = parse_line(&line.replace("run.toml", path_text)).and_then(|found| found.to_config(None));
        config.map_err(|error| error.replace(path_text, "run.toml"))
    }

    #[test]
    fn a_file_gives_options_and_the_command_line_overrides_them() {
        let text = "# A comment.\nepochs = 7\nbatch_size = 1_000\nlr = 1e-2\nschedule = \"cosine\"\nscale-lr = true\n\
                    data = ['a.csv', \"b.csv\"]\ntarget = 0\nfeatures = [\"x y\", \"z\"]\nclass-weights = \"1,2\"\n\
                    no-overlap = true\nno-header = true\ncheckpoint = \"c\"\nresume = true\n";
        let config = parse_with_file("--config run.toml", text).unwrap();
        assert_eq!(
            (config.epochs, config.batch_size, config.learning_rate),
            (Some(7), Some(1000), Some(0.01))
        );
        assert_eq!((config.recipe.schedule, config.bucket_bytes), (RateSchedule::Cosine, None));
        assert_eq!((config.target.as_deref(), config.table.features.len()), (Some("0"), 2));
        assert_eq!(config.source.table_files().unwrap().len(), 2);
        assert_eq!(config.checkpoint.unwrap().existing, ExistingCheckpoint::Resume);
        for (value, expected) in [("512", BucketBytes::Fixed(512)), ("\"auto\"", BucketBytes::Auto)] {
            let config = parse_with_file("--config run.toml", &format!("bucket-bytes = {value}")).unwrap();
            assert_eq!(config.bucket_bytes, Some(expected));
        }
        let line = "--config run.toml --epochs 9 --bucket-bytes 512 --data c.csv --features q --header --schedule constant";
        let config = parse_with_file(line, text).unwrap();
        assert_eq!(
            (config.epochs, config.bucket_bytes, config.batch_size),
            (Some(9), Some(BucketBytes::Fixed(512)), Some(1000))
        );
        assert_eq!(
            (config.table.features, config.recipe.schedule),
            (vec!["q".into()], RateSchedule::Constant)
        );
        assert_eq!(config.source.table_files().unwrap().len(), 1);
    }

    #[test]
    fn wrong_files_are_rejected_with_file_line_and_reason() {
        for (text, expected) in [
            ("epochs = 5\nepoch = 7", "run.toml:2: unknown option `epoch`; a similar option is `epochs`"),
            ("\nquux = 7", "run.toml:2: unknown option `quux`; `ringtrain --help` lists all options"),
            ("epochs = 5\nepochs = 6", "run.toml:2: duplicate key"),
            (
                "batch-size = 5\nbatch_size = 6",
                "run.toml:2: `batch_size` is given twice, first in run.toml:1",
            ),
            ("epochs = \"ten\"", "run.toml:1: `epochs` must be a number, not a string"),
            ("epochs = [1]", "run.toml:1: `epochs` must be a number, not a list"),
            ("epochs = 1.5", "run.toml:1: invalid value '1.5' for '--epochs <COUNT>'"),
            ("epochs = 0x10", "run.toml:1: `epochs` must be written as a decimal number"),
            ("epochs = 1979-05-27", "run.toml:1: `epochs` must be a number, not a date"),
            ("model = true", "run.toml:1: `model` must be a string, not true or false"),
            ("scale-lr = 1", "run.toml:1: `scale-lr` must be true or false, not a number"),
            ("data = []", "run.toml:1: `data` is an empty list"),
            (
                "[training]\nepochs = 5",
                "run.toml:1: `training` is a table; write all options at the top level",
            ),
            ("config = \"other.toml\"", "run.toml:1: a configuration file cannot name another one"),
            ("help = true", "run.toml:1: unknown option `help`"),
            ("epochs 5", "run.toml:1: "),
            ("seed = 1\nschedule = \"sine\"", "--schedule sine: it"),
            ("seed = 1\nschedule = \"sine\"", "(--schedule is given in run.toml:2)"),
            (
                "keep-best = true",
                "--keep-best needs --checkpoint DIR, the directory of the checkpoint (--keep-best is given in run.toml:1)",
            ),
            ("rank = 1", "the following required arguments were not provided: --peers <FILE>"),
        ] {
            let error = parse_with_file("--config run.toml", text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = parse_with_file("--config absent.toml", "").unwrap_err();
        assert!(error.contains("cannot read the configuration file absent.toml: No such file"), "{error}");
    }

    /// Options that are written to a checkpoint and read again must give the same configuration.
    #[test]
    fn stored_options_give_the_same_configuration_and_flags_override_them() {
        let line = "--checkpoint c --keep-checkpoints 3 --data a.csv b\"\\.csv --target y --lr 0.5 --seed 7 --drop a,b \
                    --optimizer adam --betas 0.5,0.9 --scale-lr --no-overlap --timeout 5 --no-header --checkpoint-minutes 0.5 --quiet";
        let first = parse_line(line).unwrap().to_config(None).unwrap();
        let text = first.checkpoint.as_ref().unwrap().options.clone().unwrap();
        assert!(["checkpoint =", "timeout", "quiet"].iter().all(|part| !text.contains(part)), "{text}");
        assert!(text.contains("\n# strategy = \"allreduce\"\n") && text.contains("seed = 7\n"), "{text}");
        let resumed = parse_line("--resume c").unwrap();
        assert_eq!(resumed.resume_source().map(|source| source.must_exist), Some(true));
        let mut resumed = resumed.to_config(Some(&text)).unwrap();
        // A resumed run takes the learning rate from the state of the run in the checkpoint.
        assert_eq!(resumed.learning_rate, None);
        resumed.learning_rate = first.learning_rate;
        let checkpoint = resumed.checkpoint.as_mut().unwrap();
        assert_eq!(checkpoint.existing, ExistingCheckpoint::Resume);
        checkpoint.existing = ExistingCheckpoint::Refuse;
        checkpoint.options.clone_from(&first.checkpoint.as_ref().unwrap().options);
        assert_eq!(resumed, first);
        let line = "--checkpoint c --resume --seed 8 --bucket-bytes 64 --lr 0.25";
        let changed = parse_line(line).unwrap().to_config(Some(&text)).unwrap();
        assert_eq!(
            (changed.seed, changed.bucket_bytes, changed.learning_rate),
            (8, Some(BucketBytes::Fixed(64)), Some(0.25))
        );
        let error = parse_line("--resume c --optimizer sgd").unwrap().to_config(Some(&text)).unwrap_err();
        let expected = "--betas does not apply to --optimizer sgd; pass --optimizer adam, adamw or lamb (--betas is given in the \
                        checkpoint in c)";
        assert_eq!(error, expected);
    }

    /// Regression test: the resumed run printed nothing, because the checkpoint of a run with `--quiet` stored the option.
    #[test]
    fn a_run_that_resumes_a_quiet_run_prints_its_lines() {
        let stored = "model = \"mlp:8\"\nquiet = true\n";
        for (line, lines) in
            [("--resume c", ConsoleLines::All), ("--resume c --quiet", ConsoleLines::Warnings)]
        {
            let (_, output) = parse_line(line).unwrap().to_config_and_output(Some(stored)).unwrap();
            assert_eq!(output.console_options(ProgressDisplay::None).lines, lines, "{line}");
        }
    }

    /// Regression test: before the fix, a run with `--micro-batches` could not continue with `allreduce`, because no
    /// option removes a stored option.
    #[test]
    fn stored_options_that_another_strategy_refuses_are_left_out() {
        let stored = "model = \"mlp:8\"\nstrategy = \"pipeline:2\"\nmicro-batches = 3\n";
        let resumed = |line: &str, stored| parse_line(line).unwrap().to_config(Some(stored));
        assert_eq!(resumed("--resume c", stored).unwrap().pipeline_micro_batches.unwrap().get(), 3);
        let kept = resumed("--resume c --strategy hybrid:2x2", stored).unwrap();
        assert_eq!(kept.pipeline_micro_batches.unwrap().get(), 3);
        for strategy in ["allreduce", "tensor"] {
            let line = format!("--resume c --strategy {strategy}");
            assert_eq!(resumed(&line, stored).unwrap().pipeline_micro_batches, None);
            let error = resumed(&format!("{line} --micro-batches 3"), stored).unwrap_err();
            assert!(error.contains("--micro-batches is for --strategy pipeline and hybrid"), "{error}");
        }
        let stored = "model = \"mlp:8\"\naccumulate = 2\nscale-lr = true\ncompression = \"fp16\"\n";
        for strategy in ["pipeline:2", "hybrid:2x2", "tensor"] {
            let config = resumed(&format!("--resume c --strategy {strategy}"), stored).unwrap();
            let is_hybrid = strategy.starts_with("hybrid");
            assert_eq!(config.recipe.scale_learning_rate, is_hybrid, "{strategy}");
            assert_eq!(config.compression != Compression::None, is_hybrid, "{strategy}");
            assert_eq!(config.micro_batches.get(), if strategy == "tensor" { 2 } else { 1 }, "{strategy}");
        }
    }

    #[test]
    fn resume_needs_one_directory() {
        for (line, expected) in [
            (
                "--resume",
                Err("--resume needs the directory of a checkpoint: pass --resume DIR, or --checkpoint DIR"),
            ),
            ("--resume a --checkpoint b", Err("--resume a and --checkpoint b name different directories")),
            ("--resume a --checkpoint a", Ok("a")),
            ("--resume --checkpoint a", Ok("a")),
            ("--resume a", Ok("a")),
        ] {
            let found = parse_line(line).unwrap().to_config(None);
            let found = found.map(|config| config.checkpoint.unwrap().directory);
            match expected {
                Ok(directory) => assert_eq!(found.unwrap(), Path::new(directory), "{line}"),
                Err(expected) => {
                    let error = found.unwrap_err();
                    assert!(error.contains(expected), "{line}: {error}");
                }
            }
        }
    }
}
