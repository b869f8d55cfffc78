//! The arguments of `ringtrain`, and their conversion to a checked configuration.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Parser;

use super::checkpoint_args::CheckpointArgs;
use super::compression_args::{CompressionArgs, CompressionChoice};
use super::data_args::{TrainingDataArgs, name_absent_path};
use super::help::AFTER_OPTIONS;
use super::optimizer_args::{OptimizerArgs, OptimizerChoice};
use super::output_args::OutputArgs;
use super::pipeline_args::PipelineArgs;
use super::recipe_args::RecipeArgs;
use super::server_args::ServerArgs;
use super::service::ServiceArgs;
use super::table_args::TableArgs;
use super::text_args::TextArgs;
use crate::cli::group_args::GroupArgs;
use crate::cli::version::LONG_VERSION;
use crate::train::data::{DataSource, Task};
use crate::train::model::ModelSpec;
use crate::train::{BucketBytes, Config, StrategySpec, TEST_FRACTION_DEFAULT};

/// Trains a model on all ranks of a job. Each rank computes the gradients of its part of every batch, and the ranks
/// sum these gradients.
#[derive(Parser, Debug)]
#[command(name = "ringtrain", version, long_version = LONG_VERSION, after_help = AFTER_OPTIONS)]
pub(super) struct TrainArgs {
    /// How to join the job.
    #[command(flatten)]
    pub(super) group: GroupArgs,

    /// The model. linear: least squares. softmax: logistic regression. mlp:WIDTH,WIDTH,...: hidden layers of these
    /// widths with relu. cnn: convolutional network with the layers conv16x3,pool2,conv32x3,pool2,dense128.
    /// cnn:LAYER,LAYER,...: convolutional network with these layers (see Layers below). gpt:LAYERS,HEADS,WIDTH:
    /// transformer that learns from plain text; needs a program built with the feature `candle` [default: see
    /// Defaults below]
    #[arg(long, value_name = "MODEL", help_heading = "Training")]
    model: Option<String>,

    /// The data and its format.
    #[command(flatten)]
    data: TrainingDataArgs,

    /// The table column to predict: its name, or its number counted from 0
    #[arg(long, value_name = "COLUMN", help_heading = "Data")]
    target: Option<String>,

    /// How to read a table.
    #[command(flatten)]
    table: TableArgs,

    /// How to read a text.
    #[command(flatten)]
    text: TextArgs,

    /// The fraction of the rows to use for testing. The choice of these rows does not depend on --seed. The test set of
    /// a text is the last part of the text. IDX data has its own test set, so this option does not apply to IDX data
    /// [default: 0.2]
    #[arg(long, value_name = "FRACTION", help_heading = "Data")]
    test_fraction: Option<f64>,

    /// What the model predicts: classes (classification) or numbers (regression). auto chooses by the values of the
    /// target; see Defaults below
    #[arg(
        long,
        value_name = "auto|classification|regression",
        default_value = "auto",
        help_heading = "Data"
    )]
    task: String,

    /// Do not scale features and numeric targets. By default, ringtrain scales the columns of a table and numeric
    /// targets to mean 0 and standard deviation 1. With --model linear, ringtrain also scales pixels. Reported losses
    /// always refer to the unscaled target
    #[arg(long, help_heading = "Data")]
    no_standardize: bool,

    /// The number of samples that all ranks together use in one step [default: see Defaults below]
    #[arg(long, value_name = "SAMPLES", help_heading = "Training")]
    batch_size: Option<u64>,

    /// Divide each rank's part of a batch into COUNT micro-batches. A rank computes the gradients of one micro-batch
    /// at a time, which needs less memory, and adds these gradients. The number of messages does not change, and the
    /// result changes only by rounding
    #[arg(long, value_name = "COUNT", default_value = "1", help_heading = "Training")]
    accumulate: NonZeroU32,

    /// The number of passes over the training set. A resumed run counts the passes before the checkpoint too
    /// [default: see Defaults below]
    #[arg(long, value_name = "COUNT", help_heading = "Training")]
    epochs: Option<u64>,

    /// The optimizer and its constants.
    #[command(flatten)]
    optimizer: OptimizerArgs,

    /// The learning rate schedule, the class weights and further training options.
    #[command(flatten)]
    recipe: RecipeArgs,

    /// The seed of the initial parameters and of the order of the samples
    #[arg(long, value_name = "NUMBER", default_value_t = 0, help_heading = "Training")]
    seed: u64,

    /// How ranks divide the work: allreduce, model-average[:EPOCHS], local-sgd:STEPS,
    /// diloco:STEPS[,DELAY], ps-sync, ps-async[:STALENESS], gossip[:STEPS], tensor, pipeline:STAGES or
    /// hybrid:PIPELINESxSTAGES. The section Strategies below explains each value
    #[arg(long, value_name = "STRATEGY", default_value = "allreduce", help_heading = "Training")]
    strategy: String,

    #[command(flatten)]
    server: ServerArgs,

    #[command(flatten)]
    pipeline: PipelineArgs,

    /// How ranks send gradients and changes of parameters to other hosts.
    #[command(flatten)]
    compression: CompressionArgs,

    /// Divide the gradients into buckets of this size in bytes. The ranks reduce a bucket while the backward pass
    /// computes the next bucket. Another size can change the last bits of the gradients. auto: measure steps with
    /// several sizes at the start of the run, and use the fastest, so that two runs can differ [default: a quarter of
    /// the model, but at most 1 MiB, and a first bucket that is smaller; a single bucket if the model has at most 256 KiB]
    #[arg(long, value_name = "BYTES|auto", conflicts_with = "no_overlap", help_heading = "Training")]
    bucket_bytes: Option<BucketBytes>,

    /// Reduce all gradients at once after the backward pass
    #[arg(long, help_heading = "Training")]
    no_overlap: bool,

    /// Where and when to save checkpoints.
    #[command(flatten)]
    pub(super) checkpoint: CheckpointArgs,

    /// Read options from the TOML file FILE, one option per line, such as epochs = 20. Options on the command line
    /// override the options in FILE. With --checkpoint DIR, ringtrain writes the options of the run to
    /// DIR/config.toml, which --config can read
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) config: Option<PathBuf>,

    /// What to print and to write.
    #[command(flatten)]
    pub(super) output: OutputArgs,

    #[command(flatten)]
    pub(super) service: ServiceArgs,
}

impl TrainArgs {
    /// Checks each argument alone and all arguments together, and returns the configuration.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong and what to do.
    pub(super) fn into_config(self) -> Result<Config, String> {
        let model = self
            .model
            .as_ref()
            .map(|text| text.parse::<ModelSpec>().map_err(|why| format!("--model {text}: {why}")));
        let model = model.transpose()?;
        let source = match &model {
            Some(model @ ModelSpec::Gpt(_)) => self.data.text_source(model)?,
            _ => self.data.source()?,
        };
        let test_source = self.data.test_source(&source)?;
        let task = self.parse_task(model.as_ref())?;
        let CompressionChoice { compression, rules, momentum, warmup } =
            self.compression.to_compression_choice()?;
        let strategy: StrategySpec =
            self.strategy.parse().map_err(|why| format!("--strategy {}: {why}", self.strategy))?;
        let name_absent_path = |why| name_absent_path(why, &source, test_source.as_ref());
        self.check_target_column(&source).map_err(name_absent_path)?;
        let test_fraction = self.parse_test_fraction()?;
        if let Some(name) = self.test_fraction.and_then(|_| source.name_of_own_test_set()) {
            return Err(name_absent_path(format!("--test-fraction does not apply: {name}")));
        }
        let batch_size = self.parse_batch_size()?;
        if self.epochs == Some(0) {
            return Err("--epochs 0: it must be at least 1".into());
        }
        let OptimizerChoice { rule, learning_rate, weight_decay, shard_optimizer } =
            self.optimizer.to_optimizer_choice()?;
        let table = self.table.into_table_options(&source).map_err(name_absent_path)?;
        let text = self.text.to_text_options(model.as_ref())?;
        let curves = self.output.curve_files()?;
        let config = Config {
            rule,
            source,
            target: self.target,
            table,
            text,
            test_fraction,
            test_source,
            stream_directory: self.data.stream,
            replicate_data: self.data.replicate_data,
            model,
            task,
            standardize: !self.no_standardize,
            learning_rate,
            weight_decay,
            recipe: self.recipe.to_recipe()?,
            batch_size,
            micro_batches: self.accumulate,
            epochs: self.epochs,
            seed: self.seed,
            strategy,
            pipeline_micro_batches: self.pipeline.micro_batches(),
            parameter_server: self.server.to_server_settings(),
            compression,
            compression_rules: rules,
            compression_momentum: momentum,
            compression_warmup: warmup,
            shard_optimizer,
            bucket_bytes: self.bucket_bytes,
            overlap: !self.no_overlap,
            checkpoint: self.checkpoint.into_checkpoint_settings()?,
            report: self.output.report,
            curves,
            exchange_step_times: self.output.metrics.is_some(),
            model_file: self.output.save_model,
        };
        config.check()?;
        config.check_paths()?;
        Ok(config)
    }

    /// Checks that `--target` is given for a table, and not given for other data.
    fn check_target_column(&self, source: &DataSource) -> Result<(), String> {
        match (source.is_table(), &self.target) {
            (true, None) => {
                Err(format!("--data {source} is a table: name the column to predict with --target"))
            }
            (false, Some(_)) => {
                Err(format!("--target is for tables; --data {source} has its target built in"))
            }
            _ => Ok(()),
        }
    }

    fn parse_test_fraction(&self) -> Result<f64, String> {
        let test_fraction = self.test_fraction.unwrap_or(TEST_FRACTION_DEFAULT);
        if !(0.0..1.0).contains(&test_fraction) {
            return Err(format!("--test-fraction {test_fraction}: it must be at least 0 and below 1"));
        }
        Ok(test_fraction)
    }

    fn parse_batch_size(&self) -> Result<Option<usize>, String> {
        let check = |size: u64| {
            let checked = usize::try_from(size).ok().filter(|size| (1..=1 << 31).contains(size));
            checked.ok_or(format!("--batch-size {size}: it must be from 1 to 2^31"))
        };
        self.batch_size.map(check).transpose()
    }

    /// Returns the value of `--task`, or `None` for `--task auto`.
    fn parse_task(&self, model: Option<&ModelSpec>) -> Result<Option<Task>, String> {
        let task = match self.task.as_str() {
            "auto" => None,
            "classification" => Some(Task::Classification),
            "regression" => Some(Task::Regression),
            other => {
                return Err(format!("--task {other}: it must be one of auto, classification, regression"));
            }
        };
        match (model, task) {
            (Some(ModelSpec::Linear), Some(Task::Classification)) => Err(
                "--model linear predicts numbers; for --task classification pass --model softmax or mlp:..."
                    .into(),
            ),
            (Some(ModelSpec::Softmax), Some(Task::Regression)) => {
                Err("--model softmax predicts classes; for --task regression pass --model linear or mlp:..."
                    .into())
            }
            (Some(ModelSpec::Gpt(_)), Some(_)) => Err(format!(
                "--task {} does not apply to --model gpt:..., which predicts the next token",
                self.task
            )),
            _ => Ok(task),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::train::data::{HeaderRow, Separator, TableOptions};
    use crate::train::optimizer::{AdamOptions, Rule};
    use crate::train::{RateSchedule, Validation, Warmup};

    /// Returns the configuration that the arguments in `line` select.
    pub(crate) fn parse_config(line: &str) -> Result<Config, String> {
        TrainArgs::try_parse_from(std::iter::once("ringtrain").chain(line.split_whitespace()))
            .map_err(|error| error.to_string())?
            .into_config()
    }

    #[test]
    fn the_defaults_are_accepted() {
        let config = parse_config("").unwrap();
        assert_eq!((config.source, config.batch_size, config.rule), (DataSource::Digits, None, None));
        assert!(parse_config("--data a.csv --target y --optimizer momentum --momentum 0.5").is_ok());
        assert!(parse_config("--checkpoint d --resume").is_ok());
        let recipe = parse_config("--schedule step:5,0.5 --warmup 2e --scale-lr").unwrap().recipe;
        assert_eq!(recipe.schedule, RateSchedule::Step { epochs: 5, factor: 0.5 });
        assert_eq!((recipe.warmup, recipe.scale_learning_rate), (Warmup::Epochs(2), true));
        for (line, fraction, patience) in [
            ("--validation-fraction 0.2", 0.2, None),
            ("--patience 3", 0.1, Some(3)),
            ("--patience 3 --validation-fraction 0.2", 0.2, Some(3)),
        ] {
            let found = parse_config(line).unwrap().recipe.validation;
            assert_eq!(found, Some(Validation { fraction, patience }), "{line}");
        }
        let table =
            parse_config("--data a.csv.zip --target y --separator \\t --no-header --drop a,b").unwrap().table;
        assert_eq!((table.separator, table.header), (Some(Separator::TAB), HeaderRow::Absent));
        assert_eq!(table.drop, ["a", "b"]);
        let table = parse_config("--data a.csv --target y").unwrap().table;
        assert_eq!(table, TableOptions::default());
    }

    #[test]
    fn optimizers_get_their_constants_and_their_default_weight_decay() {
        let options = AdamOptions { beta_1: 0.8, beta_2: 0.99, epsilon: 1e-6 };
        for (line, rule, decay) in [
            ("--optimizer adam", Rule::Adam(AdamOptions::DEFAULT), 0.0),
            ("--optimizer adam --betas 0.8,0.99 --epsilon 1e-6", Rule::Adam(options), 0.0),
            ("--optimizer adamw --betas 0.8,0.99 --epsilon 1e-6", Rule::AdamW(options), 0.01),
            ("--optimizer adamw --weight-decay 0", Rule::AdamW(AdamOptions::DEFAULT), 0.0),
            ("--optimizer nesterov", Rule::Nesterov { momentum: 0.9 }, 0.0),
            ("--optimizer momentum --momentum 0.5 --weight-decay 1", Rule::Momentum { momentum: 0.5 }, 1.0),
            ("--optimizer accelerated", Rule::Accelerated, 0.0),
            ("--optimizer lamb --epsilon 1e-6 --betas 0.8,0.99", Rule::Lamb(options), 0.01),
        ] {
            let config = parse_config(line).unwrap();
            assert_eq!((config.rule, config.weight_decay), (Some(rule), decay), "{line}");
        }
    }

    #[test]
    fn data_that_cannot_be_a_table_is_rejected_with_a_reason() {
        for (line, expected) in [
            ("--data absent --target x", "--data absent: there is no such file or directory"),
            ("--data t.csv.xz --target y", "--data t.csv.xz has the compression .xz"),
            ("--format xml", "--format xml: it is not one of table, parquet, libsvm, idx, images"),
            ("--data a b --format libsvm", "--data has 2 values, but --format libsvm takes one"),
            ("--data a.libsvm --target x", "--target is for tables"),
        ] {
            let error = parse_config(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn options_of_compressed_momentum_need_a_codec_and_an_optimizer_that_use_them() {
        for (line, expected) in [
            ("--compression topk --compression-warmup 5x", "--compression-warmup: `5x` is neither"),
            ("--compression int8 --compression-warmup 5e", "--compression-warmup is for --compression topk"),
            ("--compression topk --compression-momentum", "adam or adamw, not auto"),
            ("--compression topk --compression-momentum --optimizer sgd", "adam or adamw, not sgd"),
            ("--compression int8 --compression-momentum --optimizer momentum", "is for --compression topk"),
            ("--compression-momentum --optimizer adam", "needs --compression, for example onebit"),
            ("--compression onebit --compression-momentum --optimizer adam", "needs --compression-warmup"),
            (
                "--compression powersgd --compression-momentum --optimizer adam --compression-warmup 9",
                "does not apply to --compression powersgd:4; pass onebit",
            ),
            (
                "--compression topk --compression-momentum --optimizer momentum --strategy local-sgd:3",
                "allreduce or hybrid, not local-sgd:3",
            ),
            (
                "--compression topk --compression-momentum --optimizer momentum --shard-optimizer",
                "does not apply to --shard-optimizer",
            ),
            (
                "--compression topk --compression-momentum --optimizer momentum --strategy hybrid:2x1 --clip-norm 1",
                "leave out --clip-norm",
            ),
        ] {
            let error = parse_config(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn invalid_values_and_combinations_are_rejected_with_a_reason() {
        let cases = [
            ("--resume", "--resume needs the directory"),
            ("--target x", "for tables"),
            ("--data a.csv", "name the column"),
            ("--no-header", "--no-header is for tables"),
            ("--data a.csv b.csv", "and 1 more file is a table: name the column"),
            ("--data a.csv folder --target y", "--data folder: only tables"),
            ("--data none-*.csv --target y", "no file matches"),
            ("--separator tab", "--separator is for tables"),
            ("--missing mean", "--missing is for tables"),
            ("--features a", "--features is for tables"),
            ("--drop a", "--drop is for tables"),
            ("--categorical a", "--categorical is for tables"),
            ("--max-categories 9", "--max-categories is for tables"),
            ("--data a.csv --target y --missing median", "--missing median: it is not one of error"),
            ("--data a.csv --target y --max-categories 1", "from 2 to"),
            ("--data a.csv --target y --separator ab", "--separator ab: it is not one of comma, tab"),
            ("--data a.csv --target y --separator \"", "must not be a quotation mark"),
            ("--data a.csv --target 0 --header --no-header", "cannot be used with"),
            ("--data x.npy", "pair"),
            ("--momentum 0.9", "needs --optimizer momentum"),
            ("--betas 0.9,0.99", "needs --optimizer adam"),
            ("--betas 0.9,0.99 --optimizer sgd", "does not apply to --optimizer sgd"),
            ("--betas 0.9 --optimizer adam", "two numbers"),
            ("--betas 0.9,1 --optimizer adam", "below 1"),
            ("--betas 0.9,x --optimizer adam", "`x` is not a number"),
            ("--epsilon 1e-6 --optimizer momentum", "does not apply to --optimizer momentum"),
            ("--epsilon 0 --optimizer adamw", "above 0"),
            ("--optimizer momentum --momentum 1", "below 1"),
            ("--optimizer lion", "one of auto"),
            ("--batch-size 0", "from 1"),
            ("--bucket-bytes 0", "at least one byte; to use no buckets, pass --no-overlap"),
            ("--bucket-bytes 1k", "it must be a number of bytes, or auto"),
            ("--bucket-bytes auto --no-overlap", "cannot be used with"),
            ("--bucket-bytes auto --strategy tensor", "--strategy tensor, which has no buckets"),
            ("--epochs 0", "at least 1"),
            ("--schedule sine", "one of constant"),
            ("--schedule step:5,2", "above 0 and at most 1"),
            ("--warmup 5x", "`5x` is neither"),
            ("--warmup 5e --optimizer accelerated", "do not apply to --optimizer accelerated"),
            ("--clip-norm 0", "above 0"),
            ("--clip-norm nan", "above 0"),
            ("--clip-norm 1 --optimizer accelerated", "do not apply to --optimizer accelerated"),
            ("--label-smoothing 1", "below 1"),
            ("--label-smoothing -0.1", "at least 0"),
            ("--class-weights -1,2", "`-1` is not a weight"),
            ("--class-weights 0,0", "all weights are 0"),
            ("--patience 0", "at least 1"),
            ("--validation-fraction 0", "above 0 and below 1"),
            ("--lr 0", "above 0"),
            ("--lr nan", "above 0"),
            ("--lr inf", "above 0"),
            ("--weight-decay -0.1", "at least 0"),
            ("--model mlp:0", "the number 0 must be from 1"),
            ("--model tree", "one of linear"),
            ("--model linear --task classification", "predicts numbers"),
            ("--model softmax --task regression", "predicts classes"),
            ("--task both", "one of auto"),
            ("--compression zip", "one of none"),
            ("--strategy ring", "one of allreduce"),
            ("--strategy local-sgd", "such as local-sgd:8"),
            ("--strategy local-sgd:8 --optimizer accelerated", "pass --optimizer adam"),
            ("--test-fraction 1", "below 1"),
            ("--data src/engine --test-fraction 0.5", "own test set"),
            ("--no-such-flag", "--no-such-flag"),
        ];
        for (line, expected) in cases {
            let error = parse_config(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn a_batch_has_at_least_one_micro_batch() {
        assert_eq!(parse_config("--accumulate 8").unwrap().micro_batches.get(), 8);
        let config = parse_config("--strategy pipeline:2 --micro-batches 3").unwrap();
        assert_eq!(config.pipeline_micro_batches.map(NonZeroU32::get), Some(3));
        for (line, expected) in [
            ("--accumulate 0", "--accumulate"),
            ("--accumulate=-1", "--accumulate"),
            ("--strategy pipeline:2 --micro-batches 0", "--micro-batches"),
            ("--micro-batches 4", "--micro-batches is for --strategy pipeline and hybrid"),
        ] {
            let error = parse_config(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn options_of_the_parameter_server_need_a_strategy_that_uses_them() {
        for (line, expected) in [
            ("--strategy ps-async:x", "not a number"),
            ("--strategy ps-async --compression topk", "ps-async; pass bf16, fp16"),
            ("--strategy ps-sync --clip-norm 1 --servers 2", "pass --servers 1"),
            ("--strategy ps-async --scale-lr", "each update uses one batch"),
            ("--strategy ps-sync --staleness-aware", "for --strategy ps-async"),
            ("--servers 2", "allreduce has no servers"),
            ("--strategy gossip --servers 2", "gossip has no servers"),
            ("--strategy gossip --compression fp16", "gossip, which sends f32"),
            ("--servers 0 --strategy ps-sync", "0"),
        ] {
            let error = parse_config(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
