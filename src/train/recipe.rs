//! The options that change how a model is trained, besides the optimizer and the data.

use std::fmt;

use super::checkpoint::IdentityEntry;
use super::class_weights::ClassWeights;
use super::data::DataError;
use super::early_stopping::Patience;
use super::learning_rate::{RateSchedule, Warmup};
use super::model::{ClassTargets, Loss};

/// Options that change how a model is trained. The default changes nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Recipe {
    /// How the learning rate changes during the run.
    pub schedule: RateSchedule,
    /// The steps in which the learning rate grows to its full value.
    pub warmup: Warmup,
    /// Whether the learning rate is multiplied by the number of ranks (Goyal et al. 2017). A resumed run without
    /// [`Config::learning_rate`](super::Config::learning_rate) continues with the rate of the checkpoint, also on another
    /// number of ranks.
    pub scale_learning_rate: bool,
    /// The maximum norm of the gradients: gradients with a larger norm are scaled to this norm before each step. The norm is that
    /// of all reduced gradients together. Finite and above 0.
    pub clip_norm: Option<f32>,
    /// The part of each target that is spread evenly over all classes: at least 0 and below 1.
    pub label_smoothing: f32,
    /// The weight of the samples of each class in the loss.
    pub class_weights: ClassWeights,
    /// When to stop early. `None` uses the whole training set for training, and ends with the parameters of the last step.
    pub patience: Option<Patience>,
}

impl Recipe {
    /// Returns whether every option suits [`Rule::Accelerated`](super::optimizer::Rule::Accelerated). This rule
    /// computes its learning rate from the data and does not clip gradients.
    pub fn suits_accelerated(&self) -> bool {
        self.schedule == RateSchedule::Constant
            && self.warmup == Warmup::default()
            && !self.scale_learning_rate
            && self.clip_norm.is_none()
    }

    /// Returns the names and values of the options that must be the same on all ranks.
    pub(crate) fn shared_options(&self) -> Vec<(&'static str, String)> {
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
            // The ranks compare the content of a file after they have read it, because the file may have a different
            // path on each host.
            ("--class-weights", class_weights),
            ("--patience or --validation-fraction", format!("{:?}", self.patience)),
        ]
    }

    /// Returns the loss for classes with `counts` training samples of each class.
    pub(crate) fn class_loss(&self, classes: &[String], counts: &[u64]) -> Result<Loss, DataError> {
        if self.label_smoothing == 0.0 && self.class_weights == ClassWeights::Equal {
            return Ok(Loss::CrossEntropy);
        }
        let weights = self.class_weights.resolve(classes, counts)?;
        Ok(Loss::WeightedCrossEntropy(ClassTargets::new(self.label_smoothing, weights)))
    }

    /// Returns an error if an option is given that needs classes. Called if the target holds numbers.
    pub(crate) fn refuse_class_options(&self) -> Result<(), DataError> {
        for (flag, given) in [
            ("--label-smoothing", self.label_smoothing != 0.0),
            ("--class-weights", self.class_weights != ClassWeights::Equal),
        ] {
            if given {
                return Err(DataError::Unsuitable(format!(
                    "{flag} is for classes, but the target holds numbers; pass --task classification if the numbers are classes"
                )));
            }
        }
        Ok(())
    }

    /// Returns the options that must be the same when a run of `epochs` epochs with this loss resumes.
    pub(crate) fn identity(&self, epochs: u64, loss: &Loss) -> Vec<IdentityEntry> {
        let class_weights = match (&self.class_weights, loss) {
            (ClassWeights::Equal, _) => "none".into(),
            (_, Loss::WeightedCrossEntropy(targets)) => {
                targets.weights().iter().map(f32::to_string).collect::<Vec<_>>().join(",")
            }
            _ => "none".into(),
        };
        let schedule = match self.schedule {
            // With another number of epochs, the rates of all steps would change.
            RateSchedule::Cosine => format!("cosine over {epochs} epochs"),
            other => other.to_string(),
        };
        let clip_norm = self.clip_norm.map_or("none".into(), |norm| norm.to_string());
        // The value of `--patience` may change, because it only decides when the run ends.
        let validation_fraction =
            self.patience.map_or("none".into(), |patience| patience.validation_fraction.to_string());
        let entry = |key, option, value| IdentityEntry { key, option, value };
        vec![
            entry("schedule", "--schedule", schedule),
            entry("warmup", "--warmup", self.warmup.to_string()),
            entry("clip_norm", "--clip-norm", clip_norm),
            entry("label_smoothing", "--label-smoothing", self.label_smoothing.to_string()),
            entry("class_weights", "--class-weights", class_weights),
            entry("validation_fraction", "--patience with --validation-fraction", validation_fraction),
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
            parts.push(format!("norm at most {norm}"));
        }
        if self.label_smoothing != 0.0 {
            parts.push(format!("label smoothing {}", self.label_smoothing));
        }
        match &self.class_weights {
            ClassWeights::Equal => {}
            ClassWeights::Balanced => parts.push("balanced classes".into()),
            ClassWeights::List(_) | ClassWeights::File(_) => parts.push("weighted classes".into()),
        }
        if let Some(Patience { records, .. }) = self.patience {
            parts.push(format!("patience {records}"));
        }
        if parts.is_empty() { Ok(()) } else { write!(f, " ({})", parts.join(", ")) }
    }
}
