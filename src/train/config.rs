//! The configuration of a run.

use std::path::PathBuf;

use super::data::{DataSource, Header, Task};
use super::model::ModelSpec;
use super::optimizer::Rule;
use crate::codec::Compression;

/// A checked configuration. All ranks must have the same one; only paths may differ.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Where the data is.
    pub source: DataSource,
    /// The target's column in a table.
    pub target: Option<String>,
    /// Whether the first row of a table holds the columns' names.
    pub header: Header,
    /// The part of the rows that is kept for testing if the data has no test set; at least 0, below 1.
    pub test_fraction: f64,
    /// The model; `None` for [`default_model`].
    pub model: Option<ModelSpec>,
    /// What is learned; `None` if the model or the target decides.
    pub task: Option<Task>,
    /// Whether features and numeric targets are scaled to mean 0 and standard deviation 1.
    pub standardize: bool,
    /// The optimiser. `None` for [`Rule::Nesterov`] where a model without hidden layers is trained on a table of at most
    /// 2^24 values and no batch size is given, and for [`Rule::Adam`] elsewhere.
    pub rule: Option<Rule>,
    /// Its learning rate. `None` for the checkpoint's if the run goes on from one, else for the default of rule and model.
    pub learning_rate: Option<f32>,
    /// L2 regularisation.
    pub weight_decay: f32,
    /// Samples of a step, of all ranks together; at least 1. `None` for the whole training set with [`Rule::Nesterov`], and
    /// for [`BATCH_SIZE_DEFAULT`](super::BATCH_SIZE_DEFAULT) with other rules.
    pub batch_size: Option<usize>,
    /// Passes over the training set, including those before a resumption. `None` for as many as the loss needs where the
    /// whole training set is a batch, and for [`EPOCHS_DEFAULT`](super::EPOCHS_DEFAULT) elsewhere.
    pub epochs: Option<u64>,
    /// Decides the initial parameters and the order of the samples.
    pub seed: u64,
    /// How gradients are sent.
    pub compression: Compression,
    /// Bytes of gradients that are reduced together while the backward pass still computes; `None` to reduce all after it.
    pub bucket_bytes: Option<usize>,
    /// Where to save.
    pub checkpoint: Option<Checkpoint>,
    /// Where rank 0 writes its report.
    pub report: Option<PathBuf>,
}

/// Where to save, and what to do if there is a checkpoint already.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// The directory.
    pub directory: PathBuf,
    /// What to do if there is a checkpoint already.
    pub existing: Existing,
}

/// What to do if there is a checkpoint already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Existing {
    /// Go on from it.
    Resume,
    /// End with an error, so that it is not overwritten.
    Refuse,
}

/// The default model.
pub fn default_model(task: Task) -> ModelSpec {
    match task {
        Task::Classification => ModelSpec::Mlp(vec![128]),
        Task::Regression => ModelSpec::Linear,
    }
}

/// The default learning rate. Models without hidden layers are convex and allow larger steps of Adam. Their plain steps must
/// shrink in proportion to 1 / features, because the curvature of their loss grows with the number of features.
///
/// For [`Rule::Nesterov`] on a model without hidden layers a run uses 1 / the largest curvature of its loss instead.
pub fn default_learning_rate(rule: Rule, model: &ModelSpec) -> f32 {
    match (rule, model) {
        (Rule::Sgd, ModelSpec::Linear) => 0.01,
        (Rule::Momentum { .. } | Rule::Nesterov, ModelSpec::Linear) | (Rule::Adam, ModelSpec::Mlp(_)) => {
            0.001
        }
        (Rule::Sgd, _) => 0.1,
        (Rule::Momentum { .. } | Rule::Nesterov | Rule::Adam, _) => 0.01,
    }
}

impl Config {
    /// The task that the model or `--task` demands; `None` if the target decides.
    pub fn task(&self) -> Option<Task> {
        match &self.model {
            Some(ModelSpec::Linear) => Some(Task::Regression),
            Some(ModelSpec::Softmax) => Some(Task::Classification),
            _ => self.task,
        }
    }

    /// The options that must be the same on all ranks, with their values.
    pub(crate) fn shared(&self) -> Vec<(&'static str, String)> {
        vec![
            // Paths of data may differ between hosts. Its content is compared after it has been read.
            ("--target", format!("{:?}", self.target)),
            ("--header or --no-header", format!("{:?}", self.header)),
            ("--test-fraction", self.test_fraction.to_string()),
            ("--model", format!("{:?}", self.model)),
            ("--task", format!("{:?}", self.task)),
            ("--no-standardize", self.standardize.to_string()),
            ("--optimizer or --momentum", format!("{:?}", self.rule)),
            ("--lr", format!("{:?}", self.learning_rate)),
            ("--weight-decay", self.weight_decay.to_string()),
            ("--batch-size", format!("{:?}", self.batch_size)),
            ("--epochs", format!("{:?}", self.epochs)),
            ("--seed", self.seed.to_string()),
            ("--compression", self.compression.to_string()),
            ("--bucket-bytes or --no-overlap", format!("{:?}", self.bucket_bytes)),
            ("--checkpoint", self.checkpoint.is_some().to_string()),
            ("--resume", format!("{:?}", self.checkpoint.as_ref().map(|checkpoint| checkpoint.existing))),
        ]
    }
}
