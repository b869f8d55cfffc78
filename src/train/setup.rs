//! The data, the model and the settings of a run, which do not change during the run.

use super::checkpoint::{IdentityEntry, RunIdentity};
use super::config::{Config, default_model};
use super::data::{ColumnEncoding, DataError, Dataset, LoadOptions, Samples, Standardizer, Targets, Task};
use super::early_stopping::hold_out;
use super::learning_rate::LearningRates;
use super::model::{InputShape, Loss, ModelSpec, Network, Scale};
use super::optimizer::{AdamOptions, Rule};
use super::portable::ln;
use super::recipe::Recipe;
use super::report::parameters_hash;
use super::strategies::StrategySpec;

/// By default, a convex model trains with one batch per epoch if the training set has at most this many values (rows
/// times features).
const WHOLE_BATCH_VALUES_MAX: usize = 1 << 24;
/// If the whole training set is one batch, the default number of epochs is this number divided by the number of
/// values in the training set, but at least 1,000 and at most 5,000.
const WHOLE_BATCH_VALUES_READ: usize = 1 << 32;
/// A run with the default number of epochs makes about this many records. With each record, the run tests the model,
/// prints a line and saves a checkpoint.
const RECORDS_DEFAULT: u64 = 40;
/// The default batch size in samples, unless the whole training set is one batch.
pub const BATCH_SIZE_DEFAULT: usize = 128;
/// The default number of epochs, unless the whole training set is one batch. On small data sets the default is
/// larger, so that a run takes at least [`STEPS_DEFAULT_MIN`] steps.
pub const EPOCHS_DEFAULT: u64 = 40;
/// The minimum number of steps of a run without `--epochs` and `--batch-size`. The built-in handwritten digits reach
/// this number in 40 epochs. With far fewer steps, Adam stops far from the optimum.
pub const STEPS_DEFAULT_MIN: u64 = 480;
/// A warning about inputs that count as constant names at most this many of them.
const CONSTANT_INPUTS_SHOWN: usize = 8;

/// The data, the model and the settings of a run.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) dataset: Dataset,
    /// The samples that are held out of the training set for validation.
    pub(crate) validation: Option<Samples>,
    pub(crate) model: ModelSpec,
    pub(crate) network: Network,
    pub(crate) standardizer: Option<Standardizer>,
    /// The digest of the data.
    pub(crate) digest: [u8; 32],
    pub(crate) settings: TrainingSettings,
    pub(crate) learning_rates: LearningRates,
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
    pub(crate) epochs_per_record: u64,
}

impl TrainingSettings {
    /// Chooses the settings. By default, a convex model on a table of moderate size is trained with
    /// [`Rule::Accelerated`] and the whole training set as one batch, until the loss no longer falls.
    /// [`Rule::Accelerated`] needs no tuning and reaches the optimum of the loss. Small batches at a constant rate do
    /// not reach the optimum.
    fn new(config: &Config, model: &ModelSpec, dataset: &Dataset) -> Self {
        let (rows, columns) = (dataset.train.len(), dataset.train.features.columns());
        let convex = model.is_convex();
        let is_small = rows.saturating_mul(columns) <= WHOLE_BATCH_VALUES_MAX;
        let is_synchronous = config.strategy == StrategySpec::AllReduce;
        let suits_accelerated = convex
            && dataset.tabular
            && is_small
            && config.batch_size.is_none()
            && is_synchronous
            && config.recipe.suits_accelerated();
        let adam = Rule::Adam(AdamOptions::DEFAULT);
        let rule = config.rule.unwrap_or(if suits_accelerated { Rule::Accelerated } else { adam });
        let batch_size = config.batch_size.unwrap_or(match rule {
            Rule::Accelerated => rows,
            _ => BATCH_SIZE_DEFAULT,
        });
        let whole_batch = rule == Rule::Accelerated && batch_size >= rows;
        let values = (rows * columns.max(1)).max(1);
        let whole_batch_epochs = (WHOLE_BATCH_VALUES_READ / values).clamp(1000, 5000) as u64;
        let steps_per_epoch = rows.div_ceil(batch_size).max(1) as u64;
        let epochs_default = match config.batch_size {
            _ if whole_batch => whole_batch_epochs,
            None => EPOCHS_DEFAULT.max(STEPS_DEFAULT_MIN.div_ceil(steps_per_epoch)),
            Some(_) => EPOCHS_DEFAULT,
        };
        let epochs = config.epochs.unwrap_or(epochs_default);
        let usual_epochs_per_record =
            if whole_batch || config.epochs.is_none() { epochs.div_ceil(RECORDS_DEFAULT) } else { 1 };
        Self {
            rule,
            batch_size,
            epochs,
            stops_when_converged: whole_batch && config.epochs.is_none(),
            epochs_per_record: config.strategy.epochs_per_record(usual_epochs_per_record, epochs),
        }
    }
}

impl Setup {
    /// Reads the data and chooses the model and the settings.
    pub(crate) fn new(config: &Config) -> Result<Self, DataError> {
        let mut dataset = config.source.load(&LoadOptions {
            target: config.target.clone(),
            table: config.table.clone(),
            test_fraction: config.test_fraction,
            task: config.task(),
            validation_fraction: config.recipe.patience.map(|patience| patience.validation_fraction),
        })?;
        let digest = dataset.digest();
        let validation = match config.recipe.patience {
            Some(patience) => Some(hold_out(&mut dataset.train, patience.validation_fraction)?),
            None => None,
        };
        let model = config.model.clone().unwrap_or_else(|| default_model(dataset.task()));
        // Standardize pixels only for a linear model, which converges faster with standardized pixels. Other models
        // can use pixels from 0 to 1.
        let standardize = config.standardize && (dataset.tabular || model == ModelSpec::Linear);
        let fitted = standardize.then(|| Standardizer::fit(&dataset.train.features));
        let (standardizer, ignored) = fitted.unzip();
        dataset.notes.extend(ignored.and_then(|ignored| describe_ignored_inputs(&dataset, &ignored)));
        let (loss, outputs) = match &dataset.train.targets {
            Targets::Numbers(values) => {
                config.recipe.refuse_class_options()?;
                (Loss::SquaredError(if config.standardize { Scale::fit(values) } else { Scale::IDENTITY }), 1)
            }
            Targets::Classes(classes) => {
                let counts = count_classes(classes, dataset.classes.len());
                (config.recipe.class_loss(&dataset.classes, &counts)?, dataset.classes.len())
            }
        };
        let input = InputShape { features: dataset.train.features.columns(), image: dataset.image };
        let network = Network::new(&model, input, outputs, loss).map_err(|why| {
            let features = input.features;
            DataError::Unsuitable(format!(
                "--model {model} does not suit {features} features: the model {why}"
            ))
        })?;
        let settings = TrainingSettings::new(config, &model, &dataset);
        let TrainingSettings { epochs, epochs_per_record, .. } = settings;
        if validation.is_some() && epochs > 1 && epochs_per_record >= epochs {
            return Err(DataError::Unsuitable(format!(
                "--patience needs several tests of the model, but with --strategy {} the run of {epochs} epochs tests the model \
                 only at its end; raise --epochs, or leave out --patience",
                config.strategy
            )));
        }
        let steps_per_epoch = dataset.train.len().div_ceil(settings.batch_size).max(1) as u64;
        let Recipe { schedule, warmup, .. } = config.recipe;
        let learning_rates = LearningRates::new(schedule, warmup, steps_per_epoch, settings.epochs)?;
        Ok(Self { dataset, validation, model, network, standardizer, digest, settings, learning_rates })
    }

    /// Returns the properties that a resumed run must have in common with its checkpoint, because they decide the
    /// loss and the steps. A resumed run may use another learning rate, another number of epochs and another
    /// compression of gradients.
    pub(crate) fn identity(&self, config: &Config) -> RunIdentity {
        let digest: Vec<f32> = self.digest.iter().map(|&byte| f32::from(byte)).collect();
        let task = if self.dataset.task() == Task::Classification { "classification" } else { "regression" };
        let momentum = self.settings.rule.momentum().map_or("none".into(), |momentum| momentum.to_string());
        let adam_options = match self.settings.rule.adam_options() {
            Some(options) if options != AdamOptions::DEFAULT => options.to_string(),
            _ => "default".into(),
        };
        let entry = |key, option, value| IdentityEntry { key, option, value };
        let mut entries = vec![
            entry("model", "--model", self.model.to_string()),
            entry("task", "--task", task.to_owned()),
            entry("target", "--target", config.target.clone().unwrap_or_else(|| "none".into())),
            entry("test_fraction", "--test-fraction", config.test_fraction.to_string()),
            entry("standardize", "standardization (--no-standardize)", config.standardize.to_string()),
            entry("optimizer", "--optimizer", self.settings.rule.name().to_owned()),
            entry("momentum", "--momentum", momentum),
            entry("adam_options", "--betas and --epsilon", adam_options),
            entry("weight_decay", "--weight-decay", config.weight_decay.to_string()),
            entry("batch_size", "--batch-size", self.settings.batch_size.to_string()),
            entry("strategy", "--strategy", config.strategy.identity().to_string()),
            entry("seed", "--seed", config.seed.to_string()),
        ];
        if let Some(encoding) = &self.dataset.encoding {
            let columns: Vec<&str> = encoding.columns.iter().map(|column| column.name.as_str()).collect();
            entries.push(entry("missing", "--missing", encoding.missing.to_string()));
            entries.push(entry("columns", "the feature columns (--features, --drop)", columns.join(",")));
            entries.push(entry("categorical", "--categorical", config.table.categorical.join(",")));
            entries.push(entry(
                "max_categories",
                "--max-categories",
                config.table.categories_max.to_string(),
            ));
        }
        if let (ModelSpec::Cnn(_), Some(image)) = (&self.model, self.dataset.image) {
            entries.push(entry("image", "shape of the images", image.to_string()));
        }
        entries.extend(config.recipe.identity(self.settings.epochs, self.network.loss()));
        // An error names the first entry that differs. The sizes come last, because other entries may explain a
        // different size.
        entries.extend([
            entry("features", "number of features", self.dataset.train.features.columns().to_string()),
            entry("train_samples", "number of training samples", self.dataset.train.len().to_string()),
        ]);
        let scale = match self.network.loss() {
            Loss::SquaredError(scale) => *scale,
            Loss::CrossEntropy | Loss::WeightedCrossEntropy(_) => Scale::IDENTITY,
        };
        RunIdentity {
            entries,
            data_name: self.dataset.name.clone(),
            data_hash: parameters_hash(&digest),
            steps_per_epoch: self.dataset.train.len().div_ceil(self.settings.batch_size).max(1) as u64,
            keeps_best: self.validation.is_some(),
            optimizer_names: self.settings.rule.state_names(),
            strategy_names: config.strategy.state_names(),
            standardizer: self.standardizer.clone(),
            scale,
            classes: self.dataset.classes.clone(),
            encoding: self.dataset.encoding.as_ref().map(|encoding| encoding.to_json()),
            options: config.checkpoint.as_ref().and_then(|checkpoint| checkpoint.options.clone()),
        }
    }

    /// Returns the mean training loss of the best constant prediction. For regression, this is the variance of the
    /// targets. For classification, it is the entropy of the classes, with class weights and label smoothing.
    pub(crate) fn constant_loss(&self) -> f64 {
        let samples = &self.dataset.train;
        let count = samples.len() as f64;
        let Targets::Classes(classes) = &samples.targets else {
            return total_sum_of_squares(samples) / count;
        };
        let counts = count_classes(classes, self.dataset.classes.len());
        if let Loss::WeightedCrossEntropy(targets) = self.network.loss() {
            return targets.constant_loss(&counts);
        }
        let fractions = counts.iter().filter(|&&found| found > 0).map(|&found| found as f64 / count);
        fractions.map(|fraction| -fraction * ln(fraction)).sum()
    }
}

/// Returns a warning about inputs whose values differ too little, so that they count as constant. Returns `None` for
/// images.
fn describe_ignored_inputs(dataset: &Dataset, ignored: &[usize]) -> Option<String> {
    if ignored.is_empty() || !dataset.tabular {
        return None;
    }
    let names: Option<Vec<String>> = dataset
        .encoding
        .as_ref()
        .map(|encoding| encoding.columns.iter().flat_map(ColumnEncoding::input_names).collect());
    let name = |index: usize| names.as_ref().map_or_else(|| index.to_string(), |names| names[index].clone());
    let shown: Vec<String> =
        ignored.iter().take(CONSTANT_INPUTS_SHOWN).map(|&index| format!("`{}`", name(index))).collect();
    let more = if ignored.len() > shown.len() { ", ..." } else { "" };
    Some(format!(
        "inputs whose values differ too little for 32-bit floating-point numbers: {}{more}. They count as constant, so the model \
         does not use them; multiply such a column by a large number, or subtract a constant from it",
        shown.join(", ")
    ))
}

/// Returns the number of samples of each class.
fn count_classes(classes: &[u32], class_count: usize) -> Vec<u64> {
    let mut counts = vec![0; class_count];
    for &class in classes {
        counts[class as usize] += 1;
    }
    counts
}

/// Returns the sum of the squared differences between the targets and their mean. R² compares the squared errors of a
/// model with this sum. Returns 0 for classes.
pub(crate) fn total_sum_of_squares(samples: &Samples) -> f64 {
    match &samples.targets {
        Targets::Numbers(values) => {
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            values.iter().map(|value| (value - mean).powi(2)).sum()
        }
        Targets::Classes(_) => 0.0,
    }
}
