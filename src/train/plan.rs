//! From a configuration and data to everything that stays the same while a run goes on.

use std::collections::BTreeMap;

use super::checkpoint::Identity;
use super::config::{Config, default_model};
use super::data::{DataError, Dataset, Samples, Standardizer, Targets, Task};
use super::model::{Loss, ModelSpec, Network, Scale};
use super::report::parameters_hash;

/// What stays the same while a run goes on.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) dataset: Dataset,
    pub(crate) model: ModelSpec,
    pub(crate) network: Network,
    pub(crate) standardizer: Option<Standardizer>,
    pub(crate) digest: [u8; 32],
}

impl Plan {
    /// Reads the data and fits the model to it.
    pub(crate) fn new(config: &Config) -> Result<Self, DataError> {
        let dataset = config.source.load(config.target.as_deref(), config.test_fraction, config.task())?;
        let model = config.model.clone().unwrap_or_else(|| default_model(dataset.task()));
        // Pixels already are from 0 to 1, which deep models like; a linear model's convergence depends on it all the same.
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
        Ok(Self { dataset, model, network, standardizer, digest })
    }

    /// What a checkpoint must have been made with for this run to go on from it.
    pub(crate) fn identity(&self, config: &Config) -> Identity {
        let digest: Vec<f32> = self.digest.iter().map(|&byte| f32::from(byte)).collect();
        let task = if self.dataset.task() == Task::Classification { "classification" } else { "regression" };
        let values = BTreeMap::from([
            ("model", self.model.to_string()),
            ("task", task.to_owned()),
            ("data", parameters_hash(&digest)),
            ("features", self.dataset.train.features.columns().to_string()),
            ("train_samples", self.dataset.train.len().to_string()),
            ("seed", config.seed.to_string()),
            ("batch_size", config.batch_size.to_string()),
            ("optimizer", config.rule.name().to_owned()),
            ("standardize", config.standardize.to_string()),
        ]);
        let scale = match self.network.loss() {
            Loss::SquaredError(scale) => scale,
            Loss::CrossEntropy => Scale::IDENTITY,
        };
        Identity {
            values,
            optimizer_names: config.rule.state_names(),
            standardizer: self.standardizer.clone(),
            scale,
            classes: self.dataset.classes.clone(),
        }
    }
}

/// Sum of the squared differences of the targets from their mean: what R² compares a loss with. 0 for classes.
pub(crate) fn spread(samples: &Samples) -> f64 {
    match &samples.targets {
        Targets::Numbers(values) => {
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            values.iter().map(|value| (value - mean).powi(2)).sum()
        }
        Targets::Classes(_) => 0.0,
    }
}
