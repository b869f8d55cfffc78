//! What a run is asked to do.

use std::path::PathBuf;

use super::data::{Source, Task};
use super::model::ModelSpec;
use super::optimizer::Rule;
use crate::codec::Compression;

/// A checked configuration. All ranks must have the same, up to paths.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Where the data is.
    pub source: Source,
    /// The target's column in a table.
    pub target: Option<String>,
    /// The part of the rows that is kept for testing, where the data comes in one piece; at least 0, below 1.
    pub test_fraction: f64,
    /// The model; `None` for [`default_model`].
    pub model: Option<ModelSpec>,
    /// What is learned; `None` where model and data decide.
    pub task: Option<Task>,
    /// Whether features and numeric targets are brought to mean 0 and deviation 1.
    pub standardize: bool,
    /// The optimiser.
    pub rule: Rule,
    /// Its learning rate; `None` for [`default_learning_rate`].
    pub learning_rate: Option<f32>,
    /// L2 regularisation.
    pub weight_decay: f32,
    /// Samples of a step, all ranks' together; at least 1.
    pub batch_size: usize,
    /// Passes over the training set, those before a resumption included.
    pub epochs: u64,
    /// Decides the initial parameters and the order of the samples.
    pub seed: u64,
    /// How gradients travel.
    pub compression: Compression,
    /// Bytes of gradients that travel together while the backward pass still computes; `None` to reduce them all after it.
    pub bucket_bytes: Option<usize>,
    /// Where to save.
    pub checkpoint: Option<Checkpoint>,
    /// Where rank 0 writes its report.
    pub report: Option<PathBuf>,
}

/// Where to save, and what to do with what is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// The directory.
    pub directory: PathBuf,
    /// What to do with a checkpoint that is there.
    pub existing: Existing,
}

/// What to do with a checkpoint that is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Existing {
    /// Go on from it.
    Resume,
    /// End with an error: it would be overwritten.
    Refuse,
}

/// The batch size where nobody names one.
pub const BATCH_SIZE_DEFAULT: usize = 128;
/// The epochs where nobody names them.
pub const EPOCHS_DEFAULT: u64 = 40;

/// The model where nobody names one.
pub fn default_model(task: Task) -> ModelSpec {
    match task {
        Task::Classification => ModelSpec::Mlp(vec![128]),
        Task::Regression => ModelSpec::Linear,
    }
}

/// The learning rate where nobody names one. Models without hidden layers are convex and bear larger steps of Adam;
/// plain steps they bear only in proportion to 1 / features, as the curvature of their loss grows with the features.
pub fn default_learning_rate(rule: Rule, model: &ModelSpec) -> f32 {
    match (rule, model) {
        (Rule::Sgd, ModelSpec::Linear) => 0.01,
        (Rule::Momentum { .. }, ModelSpec::Linear) | (Rule::Adam, ModelSpec::Mlp(_)) => 0.001,
        (Rule::Sgd, _) => 0.1,
        (Rule::Momentum { .. } | Rule::Adam, _) => 0.01,
    }
}

impl Config {
    /// What the model and `--task` together say about the target; `None` where the target itself decides.
    pub fn task(&self) -> Option<Task> {
        match &self.model {
            Some(ModelSpec::Linear) => Some(Task::Regression),
            Some(ModelSpec::Softmax) => Some(Task::Classification),
            _ => self.task,
        }
    }

    /// The learning rate for `model`, given or by default.
    pub fn learning_rate(&self, model: &ModelSpec) -> f32 {
        self.learning_rate.unwrap_or_else(|| default_learning_rate(self.rule, model))
    }

    /// Everything that must be the same on all ranks: flag and value.
    pub(crate) fn shared(&self) -> Vec<(&'static str, String)> {
        vec![
            // The paths of data may differ between hosts; its content is compared when it has been read.
            ("--target", format!("{:?}", self.target)),
            ("--test-fraction", self.test_fraction.to_string()),
            ("--model", format!("{:?}", self.model)),
            ("--task", format!("{:?}", self.task)),
            ("--no-standardize", self.standardize.to_string()),
            ("--optimizer or --momentum", format!("{:?}", self.rule)),
            ("--lr", format!("{:?}", self.learning_rate)),
            ("--weight-decay", self.weight_decay.to_string()),
            ("--batch-size", self.batch_size.to_string()),
            ("--epochs", self.epochs.to_string()),
            ("--seed", self.seed.to_string()),
            ("--compression", self.compression.to_string()),
            ("--bucket-bytes or --no-overlap", format!("{:?}", self.bucket_bytes)),
            ("--checkpoint", self.checkpoint.is_some().to_string()),
            ("--resume", format!("{:?}", self.checkpoint.as_ref().map(|checkpoint| checkpoint.existing))),
        ]
    }
}
