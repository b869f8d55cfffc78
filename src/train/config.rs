//! The configuration of a run.

use std::num::NonZeroU32;
use std::path::PathBuf;

use super::batch_norm_options;
use super::bucket_options::{BucketBytes, BucketOptions};
use super::checkpoint::CheckpointSettings;
use super::compression_options::CompressionOptions;
use super::compression_rules::CompressionRules;
use super::compression_schedule::{CompressedMomentum, CompressionSchedule};
use super::curve_files::CurveFiles;
use super::data::text::CONTEXT_MAX;
use super::data::{DataSource, TableOptions, Task, TextOptions};
use super::divided_model_options;
use super::learning_rate::Warmup;
use super::model::{CANDLE_NEEDED, GptSpec, MlpSpec, ModelSpec};
use super::optimizer::Rule;
use super::output_paths;
use super::parameter_server::StalenessRule;
use super::recipe::Recipe;
use super::reproducible_options::ReproducibleOptions;
use super::strategies::StrategySpec;
use super::stream_options;
use crate::codec::Compression;

/// The configuration of a run. The configuration must be the same on all ranks, except for paths.
#[expect(clippy::struct_excessive_bools, reason = "each is a separate option of `ringtrain`")]
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// The source of the data.
    pub source: DataSource,
    /// The name or number of the column to predict. Only a table needs this option.
    pub target: Option<String>,
    /// How to read a table.
    pub table: TableOptions,
    /// How to read a text.
    pub text: TextOptions,
    /// The fraction of the rows, or of the text, that becomes the test set: at least 0 and below 1. Ignored if there is a
    /// `test_source`, or if the data has a test set.
    pub test_fraction: f64,
    /// The source of the test set, with the same format and the same features as `source`. If this is `None`, and the
    /// data has no test set, `test_fraction` of `source` becomes the test set.
    pub test_source: Option<DataSource>,
    /// The directory for temporary files. The files hold the samples, so that memory holds only a few samples at a time,
    /// and the samples of an epoch are shuffled in blocks. `None` holds all samples in memory.
    pub stream_directory: Option<PathBuf>,
    /// Whether each rank reads and holds all samples. `false` divides the samples over the ranks if the strategy allows it. The
    /// ranks then send each other the samples of the next batches.
    pub replicate_data: bool,
    /// The model. `None` selects [`default_model`].
    pub model: Option<ModelSpec>,
    /// Whether to predict classes or numbers. `None` chooses the task that fits the model and the target.
    pub task: Option<Task>,
    /// Whether features and numeric targets are scaled to mean 0 and standard deviation 1.
    pub standardize: bool,
    /// The update rule of the optimizer. `None` selects [`Rule::Accelerated`] if the model has no hidden layers, the
    /// data is a table of at most 2^24 values, no batch size is given, the strategy is [`StrategySpec::AllReduce`],
    /// and the recipe suits this rule. In all other runs, `None` selects [`Rule::Adam`].
    pub rule: Option<Rule>,
    /// The learning rate. If `None`, a resumed run uses the rate of the checkpoint, and a new run uses the default
    /// for the rule and the model.
    pub learning_rate: Option<f32>,
    /// The weight decay: see [`Optimizer`](super::optimizer::Optimizer).
    pub weight_decay: f32,
    /// Options that change how the model is trained.
    pub recipe: Recipe,
    /// The number of samples that all ranks together process in a step; at least 1. `None` selects the whole training
    /// set for [`Rule::Accelerated`], and [`BATCH_SIZE_DEFAULT`](super::BATCH_SIZE_DEFAULT) for other rules.
    pub batch_size: Option<usize>,
    /// The number of micro-batches into which each rank divides its part of a batch. The rank computes the gradients
    /// of the micro-batches one after the other and adds them, so the rank needs memory only for the activations of one
    /// micro-batch. The batch, the step and the number of messages stay the same; the result is the same except for
    /// rounding.
    pub micro_batches: NonZeroU32,
    /// The number of passes over the training set, including the passes before a resumption. If `None`, a run with
    /// [`Rule::Accelerated`] whose batch is the whole training set ends when the loss no longer falls. Any other run
    /// takes [`EPOCHS_DEFAULT`](super::EPOCHS_DEFAULT) epochs, or more epochs if `batch_size` is `None`, until the
    /// run has [`STEPS_DEFAULT_MIN`](super::STEPS_DEFAULT_MIN) steps.
    pub epochs: Option<u64>,
    /// The seed for the initial parameters and the order of the samples.
    pub seed: u64,
    /// How ranks divide the work, and when they exchange gradients or parameters.
    pub strategy: StrategySpec,
    /// The number of micro-batches into which [`StrategySpec::Pipeline`] and [`StrategySpec::Hybrid`] divide a
    /// pipeline's part of a batch. `None` selects 4 for each stage. If the part has fewer samples, each sample is a
    /// micro-batch.
    pub pipeline_micro_batches: Option<NonZeroU32>,
    /// The options of the strategies with a parameter server.
    pub parameter_server: ServerSettings,
    /// How gradients, or changes of parameters, are sent to other hosts.
    pub compression: Compression,
    /// The tensors that have another compression, or none.
    pub compression_rules: CompressionRules,
    /// Whether each rank applies the momentum to its own gradient, before compression: momentum correction with
    /// [`Rule::Momentum`] and [`Rule::Nesterov`], and 1-bit Adam with [`Rule::Adam`] and [`Rule::AdamW`]. See
    /// `docs/compressed-momentum.md`.
    pub compression_momentum: bool,
    /// The first steps of a run, in which ranks compress less: top-k and random-k send more elements, and with
    /// `compression_momentum`, Adam sums exact gradients.
    pub compression_warmup: Warmup,
    /// Whether each rank holds the state of the optimizer for only a part of the parameters. Only for
    /// [`StrategySpec::AllReduce`].
    pub shard_optimizer: bool,
    /// The size in bytes of a bucket of gradients. `None` chooses a size that suits the model: at most
    /// [`BUCKET_BYTES_MAX`](super::BUCKET_BYTES_MAX).
    pub bucket_bytes: Option<BucketBytes>,
    /// Whether each bucket is reduced while the backward pass computes the next bucket. If not, all gradients are reduced
    /// after the backward pass.
    pub overlap: bool,
    /// Where to save checkpoints. `None` saves no checkpoints.
    pub checkpoint: Option<CheckpointSettings>,
    /// The path at which rank 0 writes its report. `None` writes no report.
    pub report: Option<PathBuf>,
    /// The files with the curves of the run.
    pub curves: CurveFiles,
    /// Whether the ranks exchange the times of their steps about once per second, so that each rank knows the slowest rank. Has
    /// no effect with a parameter server and with [`StrategySpec::Gossip`].
    pub exchange_step_times: bool,
    /// The path at which rank 0 writes the model file. `None` writes no model file.
    pub model_file: Option<PathBuf>,
}

/// Options of [`StrategySpec::PsSync`] and [`StrategySpec::PsAsync`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerSettings {
    /// The number of ranks that hold parameters. `None` selects 1.
    pub servers: Option<NonZeroU32>,
    /// Whether [`StrategySpec::PsAsync`] divides the learning rate by the staleness of a gradient.
    pub staleness_aware: bool,
}

/// The default number of micro-batches for each stage. With m micro-batches and S stages, a rank is idle during
/// (S - 1) / (m + S - 1) of each step: with m = 4S, less than a fifth.
const MICRO_BATCHES_PER_STAGE: u32 = 4;

/// The default staleness limit of [`StrategySpec::PsAsync`] is this number times the number of workers.
const STALENESS_MAX_PER_WORKER: u64 = 16;

/// The default fraction of the rows of a data set that become its test set.
pub const TEST_FRACTION_DEFAULT: f64 = 0.2;

/// Returns the default model for a task.
pub fn default_model(task: Task) -> ModelSpec {
    match task {
        Task::Classification => ModelSpec::Mlp(MlpSpec::default()),
        Task::Regression => ModelSpec::Linear,
        Task::Text => ModelSpec::Gpt(GptSpec { layers: 4, heads: 4, width: 128 }),
    }
}

/// With Adam and a linear model, runs with at least this many steps have a smaller default rate.
const LONG_RUN_STEPS: u64 = 10_000;

/// Returns the default learning rate of a run with this number of `steps`. The loss of a model without hidden layers
/// is convex, so Adam can use a larger rate. With SGD or momentum, linear regression needs a smaller rate, because
/// the curvature of its loss grows with the number of features.
///
/// Near the optimum of linear regression, Adam with a constant rate leaves an error that grows with the rate. A long
/// run uses a smaller rate, and still has enough steps to reach the optimum.
///
/// A run with [`Rule::Accelerated`] and a model without hidden layers uses 1 / (the largest curvature of the loss)
/// instead of the returned rate.
pub fn default_learning_rate(rule: Rule, model: &ModelSpec, steps: u64) -> f32 {
    match (rule, model) {
        (Rule::Adam(_) | Rule::AdamW(_), ModelSpec::Linear) if steps >= LONG_RUN_STEPS => 0.001,
        (Rule::Sgd, ModelSpec::Linear) => 0.01,
        (Rule::Sgd, _) => 0.1,
        // LARS multiplies its steps by the trust coefficient 0.001, so its learning rate is larger.
        (Rule::Lars { .. }, _) => 3.0,
        (Rule::Momentum { .. } | Rule::Nesterov { .. } | Rule::Accelerated, ModelSpec::Linear)
        | (
            Rule::Adam(_) | Rule::AdamW(_),
            ModelSpec::Mlp(_) | ModelSpec::Cnn(_) | ModelSpec::Gpt(_) | ModelSpec::Own(_),
        ) => 0.001,
        (_, _) => 0.01,
    }
}

impl Config {
    /// Creates the default configuration for a source of data. A run with this configuration writes no file.
    pub fn new(source: DataSource) -> Self {
        Self {
            source,
            target: None,
            table: TableOptions::default(),
            text: TextOptions::default(),
            test_fraction: TEST_FRACTION_DEFAULT,
            test_source: None,
            stream_directory: None,
            replicate_data: false,
            model: None,
            task: None,
            standardize: true,
            rule: None,
            learning_rate: None,
            weight_decay: 0.0,
            recipe: Recipe::default(),
            batch_size: None,
            micro_batches: NonZeroU32::MIN,
            epochs: None,
            seed: 0,
            strategy: StrategySpec::AllReduce,
            pipeline_micro_batches: None,
            parameter_server: ServerSettings::default(),
            compression: Compression::None,
            compression_rules: CompressionRules::default(),
            compression_momentum: false,
            compression_warmup: Warmup::default(),
            shard_optimizer: false,
            bucket_bytes: None,
            overlap: true,
            checkpoint: None,
            report: None,
            curves: CurveFiles::default(),
            exchange_step_times: false,
            model_file: None,
        }
    }

    /// Returns the task that the model or `--task` requires, or `None` if the target determines the task.
    pub fn task(&self) -> Option<Task> {
        match &self.model {
            Some(ModelSpec::Linear) => Some(Task::Regression),
            Some(ModelSpec::Softmax) => Some(Task::Classification),
            Some(ModelSpec::Gpt(_)) => Some(Task::Text),
            Some(ModelSpec::Own(_)) if matches!(self.source, DataSource::Text(_)) => Some(Task::Text),
            _ => self.task,
        }
    }

    /// Checks that the options fit together.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which options do not fit together and what to do.
    pub fn check(&self) -> Result<(), String> {
        self.check_text_model()?;
        self.check_parameter_server_options()?;
        self.check_checkpoint_options()?;
        divided_model_options::check_divided_model_options(self)?;
        stream_options::check_stream_options(self)?;
        self.compression_rules.check_options(self.compression, self.strategy)?;
        CompressionOptions {
            compression: self.compression,
            rules: &self.compression_rules,
            momentum: self.compression_momentum,
            has_warmup: self.compression_warmup != Warmup::default(),
            rule: self.rule,
            strategy: self.strategy,
            shards_optimizer: self.shard_optimizer,
            clips: self.recipe.clip_norm.is_some(),
        }
        .check()?;
        ReproducibleOptions {
            shards: self.recipe.reproducible_shards,
            strategy: self.strategy,
            compression: self.compression,
            compresses: self.compresses(),
            scales_learning_rate: self.recipe.scale_learning_rate,
        }
        .check()?;
        BucketOptions {
            bucket_bytes: self.bucket_bytes,
            overlap: self.overlap,
            strategy: self.strategy,
            is_reproducible: self.recipe.reproducible_shards.is_some(),
            shards_optimizer: self.shard_optimizer,
            compression: self.compression,
            rules: &self.compression_rules,
        }
        .check()?;
        if self.model.as_ref().is_some_and(ModelSpec::has_batch_norm) {
            batch_norm_options::check_batch_norm_options(self)?;
        }
        self.check_shard_optimizer_options()?;
        match (self.rule, self.strategy) {
            (Some(Rule::Accelerated), _) if !self.recipe.allows_accelerated_rule() => {
                Err("--schedule, --warmup, --scale-lr and --clip-norm do not apply to --optimizer accelerated, which \
                     computes its learning rate from the data; pass another --optimizer"
                    .into())
            }
            (_, StrategySpec::AllReduce) => Ok(()),
            (_, StrategySpec::ModelAverage { epochs: None }) if self.recipe.patience().is_some() => {
                Err("--patience needs several tests of the model, but with --strategy model-average the ranks average and test \
                     their models only at the end of the run; pass --strategy model-average:EPOCHS, or leave out --patience"
                    .into())
            }
            (Some(Rule::Accelerated), strategy) => Err(format!(
                "--optimizer accelerated needs the gradient of the whole training set in each step, but with --strategy \
                 {strategy} a rank knows only the gradient of its own samples; pass --optimizer adam, momentum or sgd"
            )),
            _ => Ok(()),
        }
    }

    /// Checks that this run does not write a file over another file of the run. Only rank 0 writes files, so only its
    /// paths matter.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which options name the same file.
    pub fn check_paths(&self) -> Result<(), String> {
        output_paths::check_output_paths(self)
    }

    /// Checks that a GPT is trained on a text, and the other built-in models on other data.
    fn check_text_model(&self) -> Result<(), String> {
        let is_text = matches!(self.source, DataSource::Text(_));
        match &self.model {
            Some(model @ ModelSpec::Gpt(_)) if cfg!(not(feature = "candle")) => {
                Err(format!("--model {model} {CANDLE_NEEDED}"))
            }
            Some(model @ ModelSpec::Gpt(_)) if !is_text => {
                Err(format!("--model {model} learns from plain text; pass --data FILE.txt"))
            }
            Some(ModelSpec::Gpt(_) | ModelSpec::Own(_))
                if is_text && !(1..=CONTEXT_MAX).contains(&self.text.context) =>
            {
                Err(format!("--context {}: it must be from 1 to {CONTEXT_MAX}", self.text.context))
            }
            Some(ModelSpec::Gpt(_) | ModelSpec::Own(_)) => Ok(()),
            _ if is_text => {
                Err(format!("--data {} is plain text; pass --model gpt:LAYERS,HEADS,WIDTH", self.source))
            }
            _ => Ok(()),
        }
    }

    /// Returns how the compression changes during a run with the optimizer `rule`.
    pub(crate) fn compression_schedule(&self, rule: Rule, steps_per_epoch: u64) -> CompressionSchedule {
        let momentum = match rule {
            Rule::Momentum { momentum } | Rule::Nesterov { momentum } => {
                let is_nesterov = matches!(rule, Rule::Nesterov { .. });
                let weight_decay = self.weight_decay;
                Some(CompressedMomentum::Corrected { momentum, is_nesterov, weight_decay })
            }
            _ => rule.adam_options().map(|options| CompressedMomentum::FrozenVariance {
                beta_1: options.beta_1 as f32,
                one_minus_beta_1: (1.0 - options.beta_1) as f32,
            }),
        };
        let warmup_steps = self.compression_warmup.steps(steps_per_epoch);
        CompressionSchedule { warmup_steps, momentum: momentum.filter(|_| self.compression_momentum) }
    }

    /// Returns whether the ranks compress any tensor.
    pub(crate) fn compresses(&self) -> bool {
        self.compression_rules.codecs(self.compression).any(|codec| codec != Compression::None)
    }

    fn check_checkpoint_options(&self) -> Result<(), String> {
        match &self.checkpoint {
            Some(checkpoint) if checkpoint.is_periodic() && !self.strategy.has_model_during_run() => {
                Err("--checkpoint-steps and --checkpoint-minutes do not apply to --strategy model-average, because the ranks average \
                     their models only at the end of the run; pass --strategy model-average:EPOCHS, or leave out both options"
                    .into())
            }
            _ => Ok(()),
        }
    }

    fn check_shard_optimizer_options(&self) -> Result<(), String> {
        if !self.shard_optimizer {
            return Ok(());
        }
        if self.strategy != StrategySpec::AllReduce {
            return Err(format!(
                "--shard-optimizer is for --strategy allreduce, with which all ranks take the same step; leave it out with \
                 --strategy {}",
                self.strategy
            ));
        }
        match self.rule {
            Some(rule)
                if self.recipe.reproducible_shards.is_some() && !rule.updates_elements_independently() =>
            {
                Err(format!(
                    "--reproducible does not apply to --shard-optimizer with --optimizer {}, because the ranks would add norms in an \
                     order that depends on the number of ranks; pass --optimizer adam, momentum or sgd",
                    rule.name()
                ))
            }
            _ => Ok(()),
        }
    }

    fn check_parameter_server_options(&self) -> Result<(), String> {
        let ServerSettings { servers, staleness_aware } = self.parameter_server;
        let strategy = self.strategy;
        if staleness_aware && !matches!(strategy, StrategySpec::PsAsync { .. }) {
            return Err(format!(
                "--staleness-aware is for --strategy ps-async; with {strategy}, no gradient is stale"
            ));
        }
        if !strategy.uses_parameter_server() {
            return match servers {
                Some(_) => Err(format!(
                    "--servers is for --strategy ps-sync and ps-async; {strategy} has no servers"
                )),
                None => Ok(()),
            };
        }
        if self.recipe.scale_learning_rate && strategy != StrategySpec::PsSync {
            return Err(format!(
                "--scale-lr does not apply to --strategy {strategy}, because each update uses one batch, with any number of workers"
            ));
        }
        if strategy == StrategySpec::PsSync
            && self.recipe.clip_norm.is_some()
            && self.server_count().get() > 1
        {
            return Err("--clip-norm with --strategy ps-sync needs the norm of the whole gradient, but each of several \
                        servers has only a part; pass --servers 1"
                .into());
        }
        Ok(())
    }

    /// Returns the number of micro-batches into which each rank divides its part of a batch.
    pub(crate) fn micro_batches_per_step(&self) -> NonZeroU32 {
        let Some((_, stages)) = self.strategy.pipeline_shape() else { return self.micro_batches };
        let default = NonZeroU32::new(stages.saturating_mul(MICRO_BATCHES_PER_STAGE));
        self.pipeline_micro_batches.or(default).unwrap_or(NonZeroU32::MIN)
    }

    /// Returns the number of servers.
    pub(crate) fn server_count(&self) -> NonZeroU32 {
        self.parameter_server.servers.unwrap_or(NonZeroU32::MIN)
    }

    /// Returns how a server treats old gradients in a run with this number of workers.
    pub(crate) fn staleness_rule(&self, workers: usize) -> StalenessRule {
        let max = match self.strategy {
            StrategySpec::PsAsync { staleness: Some(max) } => max,
            _ => STALENESS_MAX_PER_WORKER * workers as u64,
        };
        StalenessRule { max, scales_rate: self.parameter_server.staleness_aware }
    }

    /// Returns whether rank 0 reads the data or the test set from its standard input.
    pub(crate) fn reads_standard_input(&self) -> bool {
        [Some(&self.source), self.test_source.as_ref()].contains(&Some(&DataSource::StandardInput))
    }

    /// Returns the names and values of the options that must be the same on all ranks.
    pub(crate) fn options_equal_on_all_ranks(&self) -> Vec<(&'static str, String)> {
        let mut options = vec![
            // The list does not contain the paths in `--data`, because hosts may store the data under different paths. The
            // ranks compare the content of the data after they have read it.
            ("--data - or --test-data -", format!("{:?}", self.reads_standard_input())),
            ("--target", format!("{:?}", self.target)),
            ("--test-fraction", self.test_fraction.to_string()),
            ("--stream", self.stream_directory.is_some().to_string()),
            ("--replicate-data", self.replicate_data.to_string()),
            ("--model", format!("{:?}", self.model)),
            ("--task", format!("{:?}", self.task)),
            ("--no-standardize", self.standardize.to_string()),
            ("--optimizer, --momentum, --betas or --epsilon", format!("{:?}", self.rule)),
            ("--lr", format!("{:?}", self.learning_rate)),
            ("--weight-decay", self.weight_decay.to_string()),
            ("--batch-size", format!("{:?}", self.batch_size)),
            ("--accumulate", self.micro_batches.to_string()),
            ("--epochs", format!("{:?}", self.epochs)),
            ("--seed", self.seed.to_string()),
            ("--strategy", self.strategy.to_string()),
            ("--micro-batches", format!("{:?}", self.pipeline_micro_batches)),
            ("--servers or --staleness-aware", format!("{:?}", self.parameter_server)),
            ("--compression", self.compression.to_string()),
            (
                "--compression-exclude, --compression-tensor or --compression-min",
                format!("{:?}", self.compression_rules),
            ),
            (
                "--compression-momentum or --compression-warmup",
                format!("{} {}", self.compression_momentum, self.compression_warmup),
            ),
            ("--shard-optimizer", self.shard_optimizer.to_string()),
            ("--bucket-bytes or --no-overlap", format!("{:?}", (self.bucket_bytes, self.overlap))),
            ("--checkpoint", self.checkpoint.is_some().to_string()),
            ("--metrics", self.exchange_step_times.to_string()),
            ("--save-model", self.model_file.is_some().to_string()),
            ("--resume", format!("{:?}", self.checkpoint.as_ref().map(|checkpoint| checkpoint.existing))),
            (
                "--checkpoint-steps or --checkpoint-minutes",
                format!(
                    "{:?}",
                    self.checkpoint.as_ref().map(|checkpoint| (checkpoint.steps, checkpoint.interval))
                ),
            ),
        ];
        options.extend(self.recipe.options_equal_on_all_ranks());
        options.extend(self.table.options_equal_on_all_ranks());
        options.extend(self.text.options_equal_on_all_ranks());
        options
    }
}
