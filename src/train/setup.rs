//! What stays the same while a run goes on, derived from the configuration and the data.

use super::checkpoint::{IdentityEntry, RunIdentity};
use super::config::{Config, default_model};
use super::data::{DataError, Dataset, LoadOptions, Samples, Standardizer, Targets, Task};
use super::model::{Loss, ModelSpec, Network, Scale};
use super::optimizer::Rule;
use super::report::parameters_hash;

/// The largest table, in values (rows times features), that the default optimiser of a convex model takes as one batch.
const WHOLE_BATCH_VALUES_MAX: usize = 1 << 24;
/// With automatic epochs, a whole-batch run reads at most about this many values in all (within the limits below): some seconds
/// on one processor.
const WHOLE_BATCH_WORK: usize = 1 << 32;
/// How often a whole-batch run tests, prints and saves in all, where every step is an epoch.
const WHOLE_BATCH_RECORDS: u64 = 40;
/// The default batch size in samples, except where the whole training set is a batch.
pub const BATCH_SIZE_DEFAULT: usize = 128;
/// The default number of epochs, except where the whole training set is a batch.
pub const EPOCHS_DEFAULT: u64 = 40;

/// What stays the same while a run goes on.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) dataset: Dataset,
    pub(crate) model: ModelSpec,
    pub(crate) network: Network,
    pub(crate) standardizer: Option<Standardizer>,
    pub(crate) digest: [u8; 32],
    pub(crate) settings: Settings,
}

/// The settings of the step loop: those of the command line, and the defaults for this model and table.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Settings {
    pub(crate) rule: Rule,
    /// Samples of a step, of all ranks together.
    pub(crate) batch_size: usize,
    /// The last epoch, if the run does not stop before.
    pub(crate) epochs: u64,
    /// Whether the run ends when the loss no longer falls.
    pub(crate) stops_when_converged: bool,
    /// Epochs from one test, line of output and checkpoint to the next.
    pub(crate) epochs_per_record: u64,
}

impl Settings {
    /// A convex model on a table of moderate size is trained by Nesterov's rule with the whole training set as the batch, until
    /// the loss no longer falls. That needs no tuning and reaches the optimum; small batches at a constant rate do not.
    fn new(config: &Config, model: &ModelSpec, dataset: &Dataset) -> Self {
        let (rows, columns) = (dataset.train.len(), dataset.train.features.columns());
        let convex = model.hidden().is_empty();
        let suits = convex && dataset.tabular && rows.saturating_mul(columns) <= WHOLE_BATCH_VALUES_MAX;
        let automatic = if suits && config.batch_size.is_none() { Rule::Nesterov } else { Rule::Adam };
        let rule = config.rule.unwrap_or(automatic);
        let batch_size = config.batch_size.unwrap_or(match rule {
            Rule::Nesterov => rows,
            _ => BATCH_SIZE_DEFAULT,
        });
        let whole = rule == Rule::Nesterov && batch_size >= rows;
        let work = rows * columns.max(1);
        let epochs_default =
            if whole { (WHOLE_BATCH_WORK / work.max(1)).clamp(1000, 5000) as u64 } else { EPOCHS_DEFAULT };
        let epochs = config.epochs.unwrap_or(epochs_default);
        Self {
            rule,
            batch_size,
            epochs,
            stops_when_converged: whole && config.epochs.is_none(),
            epochs_per_record: if whole { epochs.div_ceil(WHOLE_BATCH_RECORDS) } else { 1 },
        }
    }
}

impl Setup {
    /// Reads the data and fits the model to it.
    pub(crate) fn new(config: &Config) -> Result<Self, DataError> {
        let dataset = config.source.load(&LoadOptions {
            target: config.target.clone(),
            header: config.header,
            test_fraction: config.test_fraction,
            task: config.task(),
        })?;
        let model = config.model.clone().unwrap_or_else(|| default_model(dataset.task()));
        // Pixels are from 0 to 1, which suits networks. A linear model converges faster if they are standardised too.
        let standardize = config.standardize && (dataset.tabular || model == ModelSpec::Linear);
        let standardizer = standardize.then(|| Standardizer::fit(&dataset.train.features));
        let (loss, outputs) = match &dataset.train.targets {
            Targets::Numbers(values) if config.standardize => (Loss::SquaredError(Scale::fit(values)), 1),
            Targets::Numbers(_) => (Loss::SquaredError(Scale::IDENTITY), 1),
            Targets::Classes(_) => (Loss::CrossEntropy, dataset.classes.len()),
        };
        let network =
            Network::new(&model, dataset.train.features.columns(), outputs, loss).ok_or_else(|| {
                let columns = dataset.train.features.columns();
                DataError::Unsuitable(format!("{model} on {columns} features has too many parameters"))
            })?;
        let digest = dataset.digest();
        let settings = Settings::new(config, &model, &dataset);
        Ok(Self { dataset, model, network, standardizer, digest, settings })
    }

    /// What must be the same for a run to go on from a checkpoint: everything that decides which loss is minimised and
    /// which steps are taken. The learning rate, the number of epochs and how gradients are sent may change.
    pub(crate) fn identity(&self, config: &Config) -> RunIdentity {
        let digest: Vec<f32> = self.digest.iter().map(|&byte| f32::from(byte)).collect();
        let task = if self.dataset.task() == Task::Classification { "classification" } else { "regression" };
        let momentum = match self.settings.rule {
            Rule::Momentum { momentum } => momentum.to_string(),
            _ => "none".into(),
        };
        let entry = |key, option, value| IdentityEntry { key, option, value };
        let entries = vec![
            entry("model", "--model", self.model.to_string()),
            entry("task", "--task", task.to_owned()),
            entry("target", "--target", config.target.clone().unwrap_or_else(|| "none".into())),
            entry("test_fraction", "--test-fraction", config.test_fraction.to_string()),
            entry("standardize", "standardisation (--no-standardize)", config.standardize.to_string()),
            entry("optimizer", "--optimizer", self.settings.rule.name().to_owned()),
            entry("momentum", "--momentum", momentum),
            entry("weight_decay", "--weight-decay", config.weight_decay.to_string()),
            entry("batch_size", "--batch-size", self.settings.batch_size.to_string()),
            entry("seed", "--seed", config.seed.to_string()),
            entry("features", "number of features", self.dataset.train.features.columns().to_string()),
            entry("train_samples", "number of training samples", self.dataset.train.len().to_string()),
        ];
        let scale = match self.network.loss() {
            Loss::SquaredError(scale) => scale,
            Loss::CrossEntropy => Scale::IDENTITY,
        };
        RunIdentity {
            entries,
            data_name: self.dataset.name.clone(),
            data_hash: parameters_hash(&digest),
            optimizer_names: self.settings.rule.state_names(),
            standardizer: self.standardizer.clone(),
            scale,
            classes: self.dataset.classes.clone(),
        }
    }

    /// The mean training loss of the best constant prediction: the variance of numbers, the entropy of classes.
    pub(crate) fn constant_loss(&self) -> f64 {
        let samples = &self.dataset.train;
        let count = samples.len() as f64;
        let Targets::Classes(classes) = &samples.targets else { return spread(samples) / count };
        let mut counts = vec![0_u64; self.dataset.classes.len()];
        for &class in classes {
            counts[class as usize] += 1;
        }
        let shares = counts.iter().filter(|&&found| found > 0).map(|&found| found as f64 / count);
        shares.map(|share| -share * share.ln()).sum()
    }
}

/// Sum of the squared differences of the targets from their mean, with which R² compares a loss. 0 for classes.
pub(crate) fn spread(samples: &Samples) -> f64 {
    match &samples.targets {
        Targets::Numbers(values) => {
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            values.iter().map(|value| (value - mean).powi(2)).sum()
        }
        Targets::Classes(_) => 0.0,
    }
}
