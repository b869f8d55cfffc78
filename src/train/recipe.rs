//! The options that change how a model is trained, besides the optimizer and the data.

use std::fmt;
use std::num::NonZeroU32;

use super::checkpoint::IdentityEntry;
use super::class_weights::ClassWeights;
use super::data::{DataError, Task};
use super::early_stopping::Validation;
use super::learning_rate::{RateSchedule, Warmup};
use super::logical_shards::LogicalShards;
use super::model::{CrossEntropyOptions, Loss};

/// Options that change how a model is trained. The default changes nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Recipe {
    /// How the learning rate changes during the run.
    pub schedule: RateSchedule,
    /// The steps in which the learning rate grows to its full value.
    pub warmup: Warmup,
    /// Whether the learning rate is multiplied by the number of ranks (Goyal et al. 2017). A resumed run without
    /// [`Config::learning_rate`](super::Config::learning_rate) continues with the rate of the checkpoint, even if the
    /// number of ranks has changed.
    pub scale_learning_rate: bool,
    /// The maximum norm of the gradient of the whole model: finite and above 0. A gradient with a larger norm is
    /// scaled to this norm before the step.
    pub clip_norm: Option<f32>,
    /// The part of each target that is spread evenly over all classes: at least 0 and below 1.
    pub label_smoothing: f32,
    /// The weight of the samples of each class in the loss.
    pub class_weights: ClassWeights,
    /// The number of logical shards of a reproducible run, from 1 to [`SHARDS_MAX`](super::SHARDS_MAX). The
    /// parameters have the same bits for every number of ranks up to this number: see `docs/reproducible.md`.
    pub reproducible_shards: Option<NonZeroU32>,
    /// The samples that are held out for validation, and when the run stops early. With `None`, no samples are held out.
    pub validation: Option<Validation>,
}

impl Recipe {
    /// Returns whether these options can be used with [`Rule::Accelerated`](super::optimizer::Rule::Accelerated), which
    /// computes its learning rate from the data and does not clip gradients.
    pub fn allows_accelerated_rule(&self) -> bool {
        self.schedule == RateSchedule::Constant
            && self.warmup == Warmup::default()
            && !self.scale_learning_rate
            && self.clip_norm.is_none()
    }

    /// Returns what the user can change if the loss of a run with this learning rate becomes too large, infinite or NaN.
    pub(crate) fn advise_after_divergence(&self, learning_rate: f32) -> String {
        let clip = if self.clip_norm.is_none() { ", or clip the gradients with --clip-norm 1" } else { "" };
        format!("lower --lr (now {learning_rate}){clip}")
    }

    /// Returns the number of reported epochs without a lower validation loss after which the run ends, or `None` if the
    /// run does not stop early.
    pub(crate) fn patience(&self) -> Option<u64> {
        self.validation.and_then(|validation| validation.patience)
    }

    /// Returns the logical shards of a reproducible run. Returns `None` for other runs.
    pub(crate) fn logical_shards(&self) -> Option<LogicalShards> {
        self.reproducible_shards.map(LogicalShards::new)
    }

    /// Returns the names and values of the options that must be the same on all ranks.
    pub(crate) fn options_equal_on_all_ranks(&self) -> Vec<(&'static str, String)> {
        let class_weights = match &self.class_weights {
            ClassWeights::File(_) => "file".into(),
            other => format!("{other:?}"),
        };
        vec![
            ("--schedule", self.schedule.to_string()),
            ("--warmup", self.warmup.to_string()),
            ("--scale-lr", self.scale_learning_rate.to_string()),
            ("--clip-norm", format!("{:?}", self.clip_norm)),
            ("--label-smoothing", self.label_smoothing.to_string()),
            ("--reproducible or --shards", format!("{:?}", self.reproducible_shards)),
            // Each host may have the file at a different path. After reading, the ranks compare the contents.
            ("--class-weights", class_weights),
            ("--patience or --validation-fraction", format!("{:?}", self.validation)),
        ]
    }

    /// Returns the loss of a classification. `counts[i]` is the number of training samples of `classes[i]`.
    pub(crate) fn classification_loss(&self, classes: &[String], counts: &[u64]) -> Result<Loss, DataError> {
        if self.label_smoothing == 0.0 && self.class_weights == ClassWeights::Equal {
            return Ok(Loss::CrossEntropy);
        }
        let weights = self.class_weights.weight_of_each_class(classes, counts)?;
        Ok(Loss::WeightedCrossEntropy(CrossEntropyOptions::new(self.label_smoothing, weights)))
    }

    /// Returns an error if `--label-smoothing` or `--class-weights` is set. Called for tasks without classes.
    pub(crate) fn check_no_class_options(&self, task: Task) -> Result<(), DataError> {
        for (flag, given) in [
            ("--label-smoothing", self.label_smoothing != 0.0),
            ("--class-weights", self.class_weights != ClassWeights::Equal),
        ] {
            if given {
                return Err(DataError::Unsuitable(match task {
                    Task::Text => format!("{flag} is for classes and not for texts; leave it out"),
                    _ => format!(
                        "{flag} is for classes, but the target holds numbers; pass --task classification if the numbers are \
                         classes"
                    ),
                }));
            }
        }
        Ok(())
    }

    /// Returns the options that a resumed run must not change.
    pub(crate) fn identity_entries(&self, epochs: u64, loss: &Loss) -> Vec<IdentityEntry> {
        let class_weights = match (&self.class_weights, loss) {
            (ClassWeights::Equal, _) => "none".into(),
            (_, Loss::WeightedCrossEntropy(targets)) => {
                targets.weights().iter().map(f32::to_string).collect::<Vec<_>>().join(",")
            }
            _ => "none".into(),
        };
        let schedule = match self.schedule {
            // The cosine schedule computes the rate of every step from `epochs`.
            RateSchedule::Cosine => format!("cosine over {epochs} epochs"),
            other => other.to_string(),
        };
        let clip_norm = self.clip_norm.map_or("none".into(), |norm| norm.to_string());
        // The value of `--patience` may change, because it only decides when the run ends.
        let validation_fraction =
            self.validation.map_or("none".into(), |validation| validation.fraction.to_string());
        let shards = self.reproducible_shards.map_or("none".into(), |count| format!("{count} shards"));
        let entry = |key, option, value| IdentityEntry { key, option, value };
        vec![
            entry("schedule", "--schedule", schedule),
            entry("warmup", "--warmup", self.warmup.to_string()),
            entry("clip_norm", "--clip-norm", clip_norm),
            entry("label_smoothing", "--label-smoothing", self.label_smoothing.to_string()),
            entry("class_weights", "--class-weights", class_weights),
            entry("reproducible", "--reproducible and --shards", shards),
            entry("validation_fraction", "--validation-fraction (or --patience)", validation_fraction),
        ]
    }
}

/// Writes the options that are not the default, as in ` (schedule cosine, warm-up 5e)`.
impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let mut parts = Vec::new();
        if self.schedule != default.schedule {
            parts.push(format!("schedule {}", self.schedule));
        }
        if self.warmup != default.warmup {
            parts.push(format!("warm-up {}", self.warmup));
        }
        if let Some(norm) = self.clip_norm {
            parts.push(format!("gradient norm at most {norm}"));
        }
        if self.label_smoothing != 0.0 {
            parts.push(format!("label smoothing {}", self.label_smoothing));
        }
        match &self.class_weights {
            ClassWeights::Equal => {}
            ClassWeights::Balanced => parts.push("balanced classes".into()),
            ClassWeights::List(_) | ClassWeights::File(_) => parts.push("weighted classes".into()),
        }
        if self.reproducible_shards.is_some() {
            parts.push("reproducible".into());
        }
        match self.validation {
            Some(Validation { patience: Some(reported_epochs), .. }) => {
                parts.push(format!("patience {reported_epochs}"));
            }
            Some(Validation { fraction, patience: None }) => {
                parts.push(format!("validation fraction {fraction}"));
            }
            None => {}
        }
        if parts.is_empty() { Ok(()) } else { write!(f, " ({})", parts.join(", ")) }
    }
}
