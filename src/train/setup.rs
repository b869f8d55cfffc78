//! The data, the model and the settings of a run, which do not change during the run.

use super::batch_norm_options::{check_batch_norm_options, check_batch_norm_samples};
use super::batches::ShuffleBlocks;
use super::checkpoint::{IdentityEntry, RunIdentity, SHUFFLE_OF_WHOLE_EPOCH};
use super::compression_schedule::CompressionSchedule;
use super::config::{Config, default_model};
use super::data::{
    ColumnEncoding, DataError, Dataset, LoadOptions, SharedSamples, Standardizer, TargetStatistics, Task,
    check_test_classes,
};
use super::learning_rate::LearningRates;
use super::model::{InputShape, Loss, ModelSpec, Network, OwnLoss, TargetScale};
use super::optimizer::{AdamOptions, Rule};
use super::portable_math::ln;
use super::rank_checks::{check_all_succeeded, check_same_data, short_digest};
use super::recipe::Recipe;
use super::report::parameters_hash;
use super::strategies::StrategySpec;
use super::stream_options::check_streamed_batch;
use super::{RunPhase, TrainError};
use crate::group::Group;
use crate::types::{WorldSize, counted};

/// Each rank holds all samples if the features of all samples together have at most this many bytes: for example, a table
/// with 65,536 cells.
const REPLICATED_BYTES_MAX: usize = 1 << 18;

/// By default, a convex model trains with one batch per epoch if the training set has at most this many values (rows
/// times features).
const FULL_BATCH_VALUES_MAX: usize = 1 << 24;
/// If the whole training set is one batch, the default number of epochs is this number divided by the number of
/// values in the training set, but at least 1,000 and at most 5,000.
const FULL_BATCH_VALUES_PER_RUN: usize = 1 << 32;
/// A run with the default number of epochs makes about this many records. With each record, the run tests the model,
/// prints a line and saves a checkpoint.
const RECORDS_PER_RUN_DEFAULT: u64 = 40;
/// The default batch size in samples, unless the whole training set is one batch.
pub const BATCH_SIZE_DEFAULT: usize = 128;
/// The default batch size for a text, in windows.
const BATCH_WINDOWS_DEFAULT: usize = 32;
/// The default number of epochs for a text, with the same exceptions as [`EPOCHS_DEFAULT`].
const EPOCHS_OF_TEXTS_DEFAULT: u64 = 10;
/// The default number of epochs, unless the whole training set is one batch. On small data sets the default is
/// larger, so that a run takes at least [`STEPS_DEFAULT_MIN`] steps.
pub const EPOCHS_DEFAULT: u64 = 40;
/// The minimum number of steps of a run without `--epochs` and `--batch-size`. The built-in handwritten digits reach
/// this number in 40 epochs. With far fewer steps, Adam stops far from the optimum.
pub const STEPS_DEFAULT_MIN: u64 = 480;
/// The entry `shuffle` of a checkpoint's identity, if the samples of an epoch are shuffled in blocks.
const SHUFFLE_IN_BLOCKS: &str = "in blocks";
/// The maximum number of input names in a warning about inputs that count as constant.
const CONSTANT_INPUTS_NAMED_MAX: usize = 8;

/// The data, the model and the settings of a run.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) dataset: Dataset<SharedSamples>,
    /// The samples that are held out of the training set for validation.
    pub(crate) validation: Option<SharedSamples>,
    /// The architecture, in the words of `--model`.
    pub(crate) model: ModelSpec,
    /// The layers and the loss of the model.
    pub(crate) network: Network,
    /// Scales the features. `None` if the model uses the features unchanged.
    pub(crate) standardizer: Option<Standardizer>,
    /// The digest of the data.
    pub(crate) digest: [u8; 32],
    pub(crate) settings: TrainingSettings,
    /// The blocks in which the samples of an epoch are shuffled. `None` shuffles all samples of an epoch together.
    pub(crate) shuffle_blocks: Option<ShuffleBlocks>,
    pub(crate) learning_rates: LearningRates,
    pub(crate) compression_schedule: CompressionSchedule,
}

/// The settings of the step loop: the user's options, and defaults for the options that the user did not set.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct TrainingSettings {
    pub(crate) rule: Rule,
    /// The number of samples that all ranks together process in a step.
    pub(crate) batch_size: usize,
    /// The maximum number of epochs.
    pub(crate) epochs: u64,
    /// Whether the run ends when the loss no longer falls.
    pub(crate) stops_when_converged: bool,
    /// The number of epochs between two records. With each record, the run tests the model, prints a line and saves a
    /// checkpoint.
    pub(crate) epochs_between_records: u64,
}

impl TrainingSettings {
    /// Chooses the settings. By default, a convex model on a table of moderate size is trained with
    /// [`Rule::Accelerated`] and the whole training set as one batch, until the loss no longer falls.
    /// [`Rule::Accelerated`] needs no tuning and reaches the optimum of the loss. Small batches at a constant rate do
    /// not reach the optimum.
    fn new(config: &Config, model: &ModelSpec, dataset: &Dataset<SharedSamples>) -> Self {
        let (rows, columns) = (dataset.train.len(), dataset.train.columns());
        let convex = model.is_convex();
        let is_small = rows.saturating_mul(columns) <= FULL_BATCH_VALUES_MAX;
        let is_synchronous = config.strategy == StrategySpec::AllReduce;
        let suits_accelerated = convex
            && dataset.tabular
            && is_small
            && config.batch_size.is_none()
            && config.stream_directory.is_none()
            && is_synchronous
            && !(config.shard_optimizer && config.recipe.reproducible_shards.is_some())
            && config.recipe.allows_accelerated_rule();
        let adam = Rule::Adam(AdamOptions::DEFAULT);
        let rule = config.rule.unwrap_or(if suits_accelerated { Rule::Accelerated } else { adam });
        let batch_size = config.batch_size.unwrap_or(match rule {
            Rule::Accelerated => rows,
            _ if dataset.task() == Task::Text => BATCH_WINDOWS_DEFAULT,
            _ => BATCH_SIZE_DEFAULT,
        });
        let whole_batch = rule == Rule::Accelerated && batch_size >= rows;
        let values = (rows * columns.max(1)).max(1);
        let whole_batch_epochs = (FULL_BATCH_VALUES_PER_RUN / values).clamp(1000, 5000) as u64;
        let steps_per_epoch = rows.div_ceil(batch_size).max(1) as u64;
        let usual_epochs =
            if dataset.task() == Task::Text { EPOCHS_OF_TEXTS_DEFAULT } else { EPOCHS_DEFAULT };
        let epochs_default = match config.batch_size {
            _ if whole_batch => whole_batch_epochs,
            None => usual_epochs.max(STEPS_DEFAULT_MIN.div_ceil(steps_per_epoch)),
            Some(_) => usual_epochs,
        };
        let epochs = config.epochs.unwrap_or(epochs_default);
        let usual_epochs_per_record =
            if whole_batch || config.epochs.is_none() { epochs.div_ceil(RECORDS_PER_RUN_DEFAULT) } else { 1 };
        Self {
            rule,
            batch_size,
            epochs,
            stops_when_converged: whole_batch && config.epochs.is_none(),
            epochs_between_records: config.strategy.epochs_between_records(usual_epochs_per_record, epochs),
        }
    }

    /// Checks that these settings fit the network and the options. All ranks return the same result.
    fn check(&self, config: &Config, network: &Network, size: WorldSize) -> Result<(), TrainError> {
        let Self { batch_size, epochs, epochs_between_records, .. } = *self;
        if config.recipe.patience().is_some() && epochs > 1 && epochs_between_records >= epochs {
            return Err(DataError::Unsuitable(format!(
                "--patience needs several tests of the model, but with --strategy {} the run of {epochs} epochs tests the model \
                 only at its end; raise --epochs, or leave out --patience",
                config.strategy
            ))
            .into());
        }
        if config.recipe.reproducible_shards.is_some() && !network.is_reproducible() {
            let problem = "--reproducible does not apply to this model, because a layer of the model, for example a layer \
                           that candle computes, adds numbers in an order that depends on the number of samples on a rank; \
                           leave out --reproducible";
            return Err(TrainError::Options(problem.into()));
        }
        let servers = if config.strategy.uses_parameter_server() { config.server_count().get() } else { 0 };
        let workers = size.get().saturating_sub(servers);
        if network.uses_sums_over_ranks() {
            check_batch_norm_options(config).map_err(TrainError::Options)?;
            check_batch_norm_samples(config, (batch_size, workers)).map_err(TrainError::Options)?;
        }
        Ok(())
    }
}

impl Setup {
    /// Reads the data and chooses the model and the settings. All ranks must call this function.
    pub(crate) fn new(config: &Config, group: &mut Group) -> Result<Self, TrainError> {
        let options = LoadOptions {
            target: config.target.clone(),
            table: config.table.clone(),
            text: config.text,
            test_fraction: config.test_fraction,
            test_source: config.test_source.clone(),
            task: config.task(),
            validation_fraction: config.recipe.validation.map(|validation| validation.fraction),
            stream_directory: config.stream_directory.clone(),
        };
        // A rank that is alone with its files reads all samples. Only rank 0 has a standard input.
        let mut solo = Group::solo();
        let is_alone = config.replicate_data && !config.reads_standard_input();
        let loaded = config.source.load_on_ranks(&options, if is_alone { &mut solo } else { &mut *group });
        let mut dataset = check_all_succeeded(group, RunPhase::Data, loaded)?;
        dataset.notes.extend(describe_missing_test_set(config, &dataset));
        let class_count = dataset.class_count();
        let bytes = dataset.train.feature_bytes().saturating_add(dataset.test.feature_bytes());
        if config.replicate_data || !config.strategy.divides_batches() || bytes <= REPLICATED_BYTES_MAX {
            let directory = config.stream_directory.as_deref().filter(|_| bytes > REPLICATED_BYTES_MAX);
            dataset.train = dataset.train.gather_on_all_ranks(class_count, (directory, group))?;
            dataset.test = dataset.test.gather_on_all_ranks(class_count, (directory, group))?;
        }
        let digest = dataset.digest(group)?;
        // The collectives below need the same data on all ranks.
        check_same_data(group, &[short_digest(&digest)], |_| dataset.name.clone())?;
        let mut validation = match config.recipe.validation {
            Some(validation) => Some(dataset.train.hold_out(validation.fraction)?),
            None => None,
        };
        for samples in [&mut dataset.train, &mut dataset.test].into_iter().chain(&mut validation) {
            samples.measure_targets(class_count, group)?;
        }
        dataset.notes.extend(check_test_classes(&dataset, validation.as_ref(), config.test_source.as_ref())?);
        let model = config.model.clone().unwrap_or_else(|| default_model(dataset.task()));
        // Standardize pixels only for a linear model, which converges faster with standardized pixels. Other models
        // can use pixels from 0 to 1.
        let standardize = config.standardize && (dataset.tabular || model == ModelSpec::Linear);
        let fitted = if standardize { Some(Standardizer::fit(&dataset.train, group)?) } else { None };
        let (standardizer, ignored) = fitted.unzip();
        dataset.notes.extend(ignored.and_then(|ignored| describe_ignored_inputs(&dataset, &ignored)));
        let (loss, outputs) = choose_loss(config, &dataset)?;
        let input = InputShape { features: dataset.train.columns(), image: dataset.image };
        let network = Network::new(&model, input, outputs, loss).map_err(|why| {
            let features = input.features;
            DataError::Unsuitable(format!(
                "--model {model} does not suit {features} features: the model {why}"
            ))
        })?;
        let settings = TrainingSettings::new(config, &model, &dataset);
        settings.check(config, &network, group.size())?;
        if dataset.train.held.in_memory().is_none() {
            check_streamed_batch(settings.batch_size, dataset.train.len())?;
        }
        let blocks = ShuffleBlocks::for_sample_bytes(
            dataset.train.feature_bytes().div_ceil(dataset.train.len().max(1)),
        );
        let shuffle_blocks = config.stream_directory.as_ref().map(|_| blocks);
        let steps_per_epoch = dataset.train.len().div_ceil(settings.batch_size).max(1) as u64;
        let Recipe { schedule, warmup, .. } = config.recipe;
        let learning_rates = LearningRates::new(schedule, warmup, steps_per_epoch, settings.epochs)?;
        let compression_schedule = config.compression_schedule(settings.rule, steps_per_epoch);
        Ok(Self {
            dataset,
            validation,
            model,
            network,
            standardizer,
            digest,
            settings,
            shuffle_blocks,
            learning_rates,
            compression_schedule,
        })
    }

    /// Returns the properties that a resumed run must have in common with its checkpoint, because these properties
    /// determine the loss and the steps. A resumed run may use another learning rate, another number of epochs and another
    /// compression of gradients.
    pub(crate) fn identity(&self, config: &Config) -> RunIdentity {
        let digest: Vec<f32> = self.digest.iter().map(|&byte| f32::from(byte)).collect();
        let momentum = self.settings.rule.momentum().map_or("none".into(), |momentum| momentum.to_string());
        let adam_options = match self.settings.rule.adam_options() {
            Some(options) if options != AdamOptions::DEFAULT => options.to_string(),
            _ => "default".into(),
        };
        let shuffle = self.shuffle_blocks.map_or(SHUFFLE_OF_WHOLE_EPOCH, |_| SHUFFLE_IN_BLOCKS);
        let entry = |key, option, value| IdentityEntry { key, option, value };
        let mut entries = vec![
            entry("model", "--model", self.model.to_string()),
            entry("task", "--task", self.dataset.task().name().to_owned()),
            entry("target", "--target", config.target.clone().unwrap_or_else(|| "none".into())),
            entry("test_fraction", "--test-fraction", config.test_fraction.to_string()),
            entry("standardize", "standardization (--no-standardize)", config.standardize.to_string()),
            entry("optimizer", "--optimizer", self.settings.rule.name().to_owned()),
            entry("momentum", "--momentum", momentum),
            entry("adam_options", "--betas and --epsilon", adam_options),
            entry("weight_decay", "--weight-decay", config.weight_decay.to_string()),
            entry("batch_size", "--batch-size", self.settings.batch_size.to_string()),
            entry("strategy", "--strategy", config.strategy.strategy_in_checkpoint().to_string()),
            entry("seed", "--seed", config.seed.to_string()),
            entry("shuffle", "samples (--stream) shuffled", shuffle.to_owned()),
            entry(
                "compression_momentum",
                "--compression-momentum and --compression-warmup",
                self.compression_schedule.identity(),
            ),
        ];
        if let Some(encoding) = &self.dataset.encoding {
            let columns: Vec<&str> = encoding.columns.iter().map(|column| column.name.as_str()).collect();
            entries.push(entry("missing", "--missing", encoding.missing.to_string()));
            entries.push(entry("columns", "the feature columns (--features, --drop)", columns.join(",")));
            entries.push(entry("categorical", "--categorical", config.table.categorical.join(",")));
            if !config.table.dates.is_empty() {
                entries.push(entry("dates", "--dates", config.table.dates.join(",")));
            }
            entries.push(entry(
                "max_categories",
                "--max-categories",
                config.table.categories_max.to_string(),
            ));
        }
        if self.dataset.text.is_some() {
            entries.push(entry("tokens", "--tokens", config.text.tokens.to_string()));
            entries.push(entry("context", "--context", config.text.context.to_string()));
        }
        if let (ModelSpec::Cnn(_), Some(image)) = (&self.model, self.dataset.image) {
            entries.push(entry("image", "shape of the images", image.to_string()));
        }
        entries.extend(config.recipe.identity_entries(self.settings.epochs, self.network.loss()));
        // An error names the first entry that differs. The sizes come last, because other entries may explain a
        // different size.
        entries.extend([
            entry("features", "number of features", self.dataset.train.columns().to_string()),
            entry("train_samples", "number of training samples", self.dataset.train.len().to_string()),
        ]);
        let scale = self.network.loss().target_scale().unwrap_or(TargetScale::IDENTITY);
        RunIdentity {
            entries,
            data_name: self.dataset.name.clone(),
            data_hash: parameters_hash(&digest),
            steps_per_epoch: self.dataset.train.len().div_ceil(self.settings.batch_size).max(1) as u64,
            keeps_best: config.recipe.patience().is_some(),
            optimizer_names: self.optimizer_state_names(),
            strategy_names: config.strategy.state_names(),
            compression_vectors: 0,
            standardizer: self.standardizer.clone(),
            scale,
            classes: self.dataset.classes.clone(),
            encoding: self.dataset.encoding.as_ref().map(|encoding| encoding.to_json()),
            options: config.checkpoint.as_ref().and_then(|checkpoint| checkpoint.options.clone()),
        }
    }

    /// Returns the names of the state vectors of the optimizer. Without state, the momentum is in the memory of compressed sums.
    pub(crate) fn optimizer_state_names(&self) -> &'static [&'static str] {
        self.compression_schedule.rule_after_sum(self.settings.rule, 0.0).0.state_names()
    }

    /// Returns the mean training loss of the best constant prediction. For regression, this is the variance of the
    /// targets. For classification, it is the entropy of the classes, with class weights and label smoothing. For a
    /// text, it is the entropy of the tokens. For a loss of the program, it is unknown, and the function returns 0.
    pub(crate) fn constant_prediction_loss(&self) -> f64 {
        let count = self.dataset.train.len() as f64;
        let TargetStatistics { sum_of_squares, class_counts, .. } = &self.dataset.train.statistics;
        match self.network.loss() {
            Loss::Own(_) => return 0.0,
            Loss::SquaredError(_) => return sum_of_squares / count,
            Loss::WeightedCrossEntropy(targets) => return targets.constant_prediction_loss(class_counts),
            Loss::CrossEntropy | Loss::NextToken => {}
        }
        let count = class_counts.iter().sum::<u64>() as f64;
        let fractions = class_counts.iter().filter(|&&found| found > 0).map(|&found| found as f64 / count);
        fractions.map(|fraction| -fraction * ln(fraction)).sum()
    }
}

/// Returns the loss, and the number of outputs of the model.
fn choose_loss(config: &Config, dataset: &Dataset<SharedSamples>) -> Result<(Loss, usize), DataError> {
    let TargetStatistics { mean, sum_of_squares, class_counts } = &dataset.train.statistics;
    let own = if let Some(ModelSpec::Own(model)) = &config.model { model.loss().cloned() } else { None };
    Ok(match dataset.task() {
        Task::Regression => {
            config.recipe.check_no_class_options(Task::Regression)?;
            let variance = sum_of_squares / dataset.train.len() as f64;
            let scale =
                if config.standardize { TargetScale::new(*mean, variance) } else { TargetScale::IDENTITY };
            match own {
                Some(function) => {
                    let outputs = function.outputs_for_number();
                    (Loss::Own(OwnLoss { function, scale: Some(scale) }), outputs)
                }
                None => (Loss::SquaredError(scale), 1),
            }
        }
        Task::Classification => {
            let loss = match (own, config.recipe.classification_loss(&dataset.classes, class_counts)?) {
                (None, loss) => loss,
                (Some(function), Loss::CrossEntropy) => Loss::Own(OwnLoss { function, scale: None }),
                (Some(_), _) => {
                    let problem = "--label-smoothing and --class-weights do not apply to the loss of your own that the model \
                                   has; leave them out";
                    return Err(DataError::Unsuitable(problem.into()));
                }
            };
            (loss, dataset.classes.len())
        }
        Task::Text if own.is_some() => {
            let problem = "a loss of your own is for numbers and classes, and not for texts; leave out `OwnModel::with_loss`";
            return Err(DataError::Unsuitable(problem.into()));
        }
        Task::Text => {
            config.recipe.check_no_class_options(Task::Text)?;
            (Loss::NextToken, dataset.train.columns() * dataset.class_count())
        }
    })
}

/// Returns a message for the user if the data has too few samples for the test set that `--test-fraction` selects.
fn describe_missing_test_set(config: &Config, dataset: &Dataset<SharedSamples>) -> Option<String> {
    let (fraction, samples) = (config.test_fraction, dataset.train.len());
    let is_missing = dataset.test.is_empty() && fraction > 0.0 && config.test_source.is_none();
    is_missing.then(|| {
        format!(
            "there is no test set, because --test-fraction {fraction} selects none of the {}, so the results show only how the model \
             fits the samples that it was trained on; pass a larger --test-fraction, or other samples with --test-data",
            counted(samples, "sample")
        )
    })
}

/// Returns a warning about the inputs `ignored`, whose values differ so little that they count as constant. Returns `None`
/// if there are no such inputs, and for images.
fn describe_ignored_inputs<S>(dataset: &Dataset<S>, ignored: &[usize]) -> Option<String> {
    if ignored.is_empty() || !dataset.tabular {
        return None;
    }
    let names: Option<Vec<String>> = dataset
        .encoding
        .as_ref()
        .map(|encoding| encoding.columns.iter().flat_map(ColumnEncoding::input_names).collect());
    let name = |index: usize| names.as_ref().map_or_else(|| index.to_string(), |names| names[index].clone());
    let shown: Vec<String> =
        ignored.iter().take(CONSTANT_INPUTS_NAMED_MAX).map(|&index| format!("`{}`", name(index))).collect();
    let more = if ignored.len() > shown.len() { ", ..." } else { "" };
    Some(format!(
        "inputs whose values differ too little for 32-bit floating-point numbers: {}{more}. They count as constant, so the model \
         does not use them; multiply such a column by a large number, or subtract a constant from it",
        shown.join(", ")
    ))
}
