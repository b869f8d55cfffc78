//! The arguments of `ringtrain`, and their conversion to a checked configuration.

use std::path::PathBuf;

use clap::Parser;

use crate::cli::group_args::GroupArgs;
use crate::codec::Compression;
use crate::train::data::{DataSource, Header, Task};
use crate::train::model::ModelSpec;
use crate::train::optimizer::Rule;
use crate::train::{BUCKET_BYTES, Checkpoint, Config, Existing};

const AFTER_HELP: &str = "\
Examples:
  ringtrain                                      train on the built-in digits in one process
  ringrun -n 4 ringtrain                         the same in four processes on this machine
  ringtrain --peers hosts.txt --rank 1           the second of the ranks that hosts.txt lists
  ringrun -n 4 ringtrain --data /usr/share/datasets/fashion-mnist --model mlp:256,128 --epochs 10
  ringtrain --data houses.csv --target price --report result.json
  ringtrain --data X.npy,y.npy --model mlp:64 --task regression
  ringtrain --checkpoint run1 --resume           go on from the last checkpoint, or start if there is none

Defaults:
  --model       mlp:128 if the target holds classes, linear if it holds numbers
  --task        classes if the target is text, or integers of at most 100 distinct values with at least 10 rows of each on
                average (or with only two values); numbers otherwise; the choice is printed
  --optimizer   nesterov for linear and softmax on tables of at most 16 million values, unless --batch-size is given;
                adam otherwise
  --batch-size  nesterov: the whole training set; others: 128
  --epochs      nesterov: until the loss no longer falls, at most 5000 epochs, on large tables 1000; others: 40
  --lr          nesterov: 1 / the largest curvature of the loss, which is computed from the features;
                mlp: adam 0.001, momentum and nesterov 0.01, sgd 0.1;  softmax: adam and momentum 0.01, sgd 0.1;
                linear: adam 0.01, momentum 0.001, sgd 0.01

With --resume, --lr, --epochs, --compression, --bucket-bytes and the number of ranks may change. Without --lr the checkpoint's is
used. All other options of training and data must be the same.

SIGTERM or Ctrl-C on any rank: all ranks finish the step, save to --checkpoint, write --report and exit with 0. They do not
evaluate. A second signal ends the process at once.

After each epoch the ranks compare hashes of their parameters. A difference ends the job with exit code 16.

Exit codes:
  0  success, also after a signal            8  an operation passed its deadline
  1  any other failure                       9  training diverged: the loss is NaN, infinite, or more than 10
  2  unknown option or bad combination          times that of a constant prediction; or a rank aborted
  3  peers file, secret file, environment   10  a checkpoint or report cannot be read or written
     or arguments wrong, or not the same    11  the listening port is in use
     on all ranks                           12  a peer has another secret
  4  data missing, truncated or wrong       13  a peer has another protocol version
  5  not all ranks started in time          14  a peer broke the protocol
  6  a rank was lost                        16  ranks hold different parameters
  7  ranks called different operations";

/// Trains a model on all ranks of a job. Each rank computes its part of every batch, and the ranks add up their gradients.
#[derive(Parser, Debug)]
#[command(name = "ringtrain", version, after_help = AFTER_HELP)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(super) struct LowArgs {
    /// How to join the job.
    #[command(flatten)]
    pub(super) group: GroupArgs,

    /// linear (least squares), softmax (logistic regression), or mlp:WIDTH,WIDTH,... (rectified hidden layers)
    #[arg(long, value_name = "MODEL", help_heading = "Training")]
    model: Option<String>,

    /// digits (1,797 handwritten digits, UCI, CC BY 4.0, built in); a directory of IDX files (MNIST, Fashion-MNIST;
    /// plain or .gz); a .csv or .tsv table (needs --target; see --no-header); FEATURES.npy,TARGETS.npy;
    /// or synthetic:ROWSxFEATURES
    #[arg(long, value_name = "DATA", default_value = "digits", help_heading = "Data")]
    data: String,

    /// The column of a table to predict: its name, or its number counted from 0
    #[arg(long, value_name = "COLUMN", help_heading = "Data")]
    target: Option<String>,

    /// The table has no header: the first row is data, and --target is a column's number
    #[arg(long, conflicts_with = "header", help_heading = "Data")]
    no_header: bool,

    /// The first row is a header although it holds numbers
    #[arg(long, help_heading = "Data")]
    header: bool,

    /// The part of the rows that is kept for testing; which rows does not depend on --seed. IDX data has its own test set
    /// [default: 0.2]
    #[arg(long, value_name = "FRACTION", help_heading = "Data")]
    test_fraction: Option<f64>,

    /// Whether the target holds classes or numbers; see Defaults below
    #[arg(
        long,
        value_name = "auto|classification|regression",
        default_value = "auto",
        help_heading = "Data"
    )]
    task: String,

    /// Keep features and numeric targets in their own units. By default the columns of a table (for linear, pixels too) and
    /// numeric targets are scaled to mean 0 and standard deviation 1; losses are always reported in the target's unit
    #[arg(long, help_heading = "Data")]
    no_standardize: bool,

    /// Samples of one step, of all ranks together [default: see below]
    #[arg(long, value_name = "SAMPLES", help_heading = "Training")]
    batch_size: Option<u64>,

    /// Passes over the training set, including those before --resume [default: see below]
    #[arg(long, value_name = "COUNT", help_heading = "Training")]
    epochs: Option<u64>,

    /// auto, sgd, momentum, nesterov or adam; see Defaults below
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Training")]
    optimizer: String,

    /// Learning rate [default: see below]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Training")]
    lr: Option<f32>,

    /// The part of the velocity that --optimizer momentum keeps [default: 0.9]
    #[arg(long, value_name = "PART", allow_negative_numbers = true, help_heading = "Training")]
    momentum: Option<f32>,

    /// L2 regularisation: this times each parameter is added to its gradient, as torch.optim does
    #[arg(
        long,
        value_name = "RATE",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Training"
    )]
    weight_decay: f32,

    /// Seed of the initial parameters and of the order of the samples; the same seed gives the same run
    #[arg(long, value_name = "NUMBER", default_value_t = 0, help_heading = "Training")]
    seed: u64,

    /// How gradients are sent: none (4 bytes each), fp16 or bf16 (2 bytes each)
    #[arg(long, value_name = "none|fp16|bf16", default_value = "none", help_heading = "Training")]
    compression: String,

    /// Reduce gradients in buckets of this size while the rest is still computed. Another size may change the last bits of sums
    #[arg(long, value_name = "BYTES", default_value_t = BUCKET_BYTES, conflicts_with = "no_overlap", help_heading = "Training")]
    bucket_bytes: usize,

    /// Reduce all gradients after the backward pass
    #[arg(long, help_heading = "Training")]
    no_overlap: bool,

    /// Save to DIR/checkpoint.safetensors after each epoch and after a stop signal (rank 0 writes)
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    checkpoint: Option<PathBuf>,

    /// Go on from the checkpoint in --checkpoint; start from the beginning if there is none yet
    #[arg(long, help_heading = "Output")]
    resume: bool,

    /// Write a report as JSON (rank 0)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
}

/// Refuses a value that is not finite or not allowed; `range` says in words which values are.
fn number(flag: &str, value: f32, allowed: bool, range: &str) -> Result<(), String> {
    if value.is_finite() && allowed { Ok(()) } else { Err(format!("{flag} {value}: it must be {range}")) }
}

impl LowArgs {
    /// Checks the arguments one by one and together.
    ///
    /// # Errors
    ///
    /// A sentence that says which argument is wrong and what to do.
    pub(super) fn lift(self) -> Result<Config, String> {
        let source: DataSource = self.data.parse().map_err(|why| format!("--data {} {why}", self.data))?;
        let model = self
            .model
            .as_ref()
            .map(|text| text.parse::<ModelSpec>().map_err(|why| format!("--model {text}: {why}")));
        let model = model.transpose()?;
        let task = self.checked_task(model.as_ref())?;
        let compression =
            self.compression.parse::<Compression>().map_err(|why| format!("--compression {why}"))?;
        match (&source, &self.target) {
            (DataSource::Csv(path), None) => {
                return Err(format!(
                    "--data {} is a table: name the column to predict with --target",
                    path.display()
                ));
            }
            (DataSource::Csv(_), Some(_)) | (_, None) => {}
            (_, Some(_)) => {
                return Err(format!("--target is for tables; --data {source} has its target built in"));
            }
        }
        let test_fraction = self.test_fraction.unwrap_or(0.2);
        if !(0.0..1.0).contains(&test_fraction) {
            return Err(format!("--test-fraction {test_fraction}: it must be at least 0 and below 1"));
        }
        if self.test_fraction.is_some() && matches!(source, DataSource::Idx(_)) {
            return Err("--test-fraction does not apply: IDX data has its own test set (t10k-*)".into());
        }
        let header = self.checked_header(&source)?;
        let batch_size = self.checked_batch_size()?;
        if self.bucket_bytes == 0 {
            return Err(
                "--bucket-bytes 0: a bucket holds at least one byte; to use no buckets, pass --no-overlap"
                    .into(),
            );
        }
        if self.epochs == Some(0) {
            return Err("--epochs 0: there must be at least 1".into());
        }
        if let Some(rate) = self.lr {
            number("--lr", rate, rate > 0.0, "a number above 0")?;
        }
        number("--weight-decay", self.weight_decay, self.weight_decay >= 0.0, "a number of at least 0")?;
        if self.resume && self.checkpoint.is_none() {
            return Err("--resume needs --checkpoint DIR, the directory of the checkpoint".into());
        }
        let existing = if self.resume { Existing::Resume } else { Existing::Refuse };
        Ok(Config {
            rule: self.rule()?,
            source,
            target: self.target,
            header,
            test_fraction,
            model,
            task,
            standardize: !self.no_standardize,
            learning_rate: self.lr,
            weight_decay: self.weight_decay,
            batch_size,
            epochs: self.epochs,
            seed: self.seed,
            compression,
            bucket_bytes: (!self.no_overlap).then_some(self.bucket_bytes),
            checkpoint: self.checkpoint.map(|directory| Checkpoint { directory, existing }),
            report: self.report,
        })
    }

    fn checked_header(&self, source: &DataSource) -> Result<Header, String> {
        let header = match (self.header, self.no_header) {
            (true, _) => Header::Present,
            (_, true) => Header::Absent,
            _ => return Ok(Header::Expected),
        };
        if matches!(source, DataSource::Csv(_)) {
            Ok(header)
        } else {
            Err(format!("--header and --no-header are for tables; --data {source} is none"))
        }
    }

    fn checked_batch_size(&self) -> Result<Option<usize>, String> {
        let check = |size: u64| {
            let checked = usize::try_from(size).ok().filter(|size| (1..=1 << 31).contains(size));
            checked.ok_or(format!("--batch-size {size}: it must be from 1 to 2^31"))
        };
        self.batch_size.map(check).transpose()
    }

    fn checked_task(&self, model: Option<&ModelSpec>) -> Result<Option<Task>, String> {
        let task = match self.task.as_str() {
            "auto" => None,
            "classification" => Some(Task::Classification),
            "regression" => Some(Task::Regression),
            other => return Err(format!("--task {other}: it is one of auto, classification, regression")),
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
            _ => Ok(task),
        }
    }

    fn rule(&self) -> Result<Option<Rule>, String> {
        let rule = match self.optimizer.as_str() {
            "auto" if self.momentum.is_none() => return Ok(None),
            "auto" => return Err("--momentum needs --optimizer momentum".into()),
            "nesterov" => Rule::Nesterov,
            "sgd" => Rule::Sgd,
            "momentum" => Rule::Momentum { momentum: self.momentum.unwrap_or(0.9) },
            "adam" => Rule::Adam,
            other => {
                return Err(format!("--optimizer {other}: it is one of auto, sgd, momentum, nesterov, adam"));
            }
        };
        match (rule, self.momentum) {
            (Rule::Momentum { momentum }, _) => {
                number("--momentum", momentum, (0.0..1.0).contains(&momentum), "at least 0 and below 1")?;
            }
            (_, Some(_)) => {
                let name = rule.name();
                return Err(format!(
                    "--momentum does not apply to --optimizer {name}; pass --optimizer momentum"
                ));
            }
            _ => {}
        }
        Ok(Some(rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lift(line: &str) -> Result<Config, String> {
        LowArgs::try_parse_from(std::iter::once("ringtrain").chain(line.split_whitespace()))
            .map_err(|error| error.to_string())?
            .lift()
    }

    #[test]
    fn the_defaults_are_good() {
        let config = lift("").unwrap();
        assert_eq!((config.source, config.batch_size, config.rule), (DataSource::Digits, None, None));
        assert!(lift("--data a.csv --target y --optimizer momentum --momentum 0.5").is_ok());
        assert!(lift("--checkpoint d --resume").is_ok());
    }

    #[test]
    fn impossible_combinations_are_refused_in_a_sentence() {
        let cases = [
            ("--resume", "needs --checkpoint"),
            ("--target x", "for tables"),
            ("--data a.csv", "name the column"),
            ("--no-header", "for tables"),
            ("--data a.csv --target 0 --header --no-header", "cannot be used with"),
            ("--data x.npy", "pair"),
            ("--momentum 0.9", "needs --optimizer momentum"),
            ("--momentum 0.9 --optimizer adam", "does not apply to --optimizer adam"),
            ("--optimizer momentum --momentum 1", "below 1"),
            ("--optimizer lion", "one of auto"),
            ("--batch-size 0", "from 1"),
            ("--epochs 0", "at least 1"),
            ("--lr 0", "above 0"),
            ("--lr -1", "above 0"),
            ("--lr nan", "above 0"),
            ("--lr inf", "above 0"),
            ("--weight-decay -0.1", "at least 0"),
            ("--model mlp:0", "0 units"),
            ("--model tree", "one of linear"),
            ("--model linear --task classification", "predicts numbers"),
            ("--model softmax --task regression", "predicts classes"),
            ("--task both", "one of auto"),
            ("--compression zip", "one of none"),
            ("--test-fraction 1", "below 1"),
            ("--test-fraction nan", "below 1"),
            ("--data some/directory --test-fraction 0.5", "own test set"),
            ("--no-such-flag", "--no-such-flag"),
        ];
        for (line, expected) in cases {
            let error = lift(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
