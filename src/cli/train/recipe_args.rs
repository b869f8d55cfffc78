//! The options of `ringtrain` that change how a model is trained, besides the optimizer and the data.

use std::num::NonZeroU32;

use clap::Args;

use super::optimizer_args::check_number;
use crate::train::{
    ClassWeights, Recipe, SHARDS_DEFAULT, VALIDATION_FRACTION_DEFAULT, Validation, check_class_weights,
};

/// The options of a [`Recipe`].
#[derive(Args, Debug)]
pub(super) struct RecipeArgs {
    /// How the learning rate changes. constant: the rate does not change. step:EPOCHS,FACTOR: after every EPOCHS
    /// epochs, multiply the rate by FACTOR. cosine: lower the rate along a cosine to 0 at the end of the run
    #[arg(
        long,
        value_name = "constant|step:EPOCHS,FACTOR|cosine",
        default_value = "constant",
        help_heading = "Training"
    )]
    schedule: String,

    /// Raise the learning rate linearly at the start of the run. 500 means during the first 500 steps. 5e means
    /// during the first 5 epochs
    #[arg(
        long,
        value_name = "STEPS|COUNTe",
        default_value = "0",
        allow_negative_numbers = true,
        help_heading = "Training"
    )]
    warmup: String,

    /// Multiply the learning rate by the number of ranks. Use this option if --batch-size also grows with the number of
    /// ranks. A resumed run continues with the learning rate of the checkpoint, and does not multiply this rate again
    #[arg(long, help_heading = "Training")]
    scale_lr: bool,

    /// Scale the gradients down before a step if the norm of all gradients together is larger than NORM, as
    /// `torch.nn.utils.clip_grad_norm_` does
    #[arg(long, value_name = "NORM", allow_negative_numbers = true, help_heading = "Training")]
    clip_norm: Option<f32>,

    /// Spread this fraction of each target evenly over all classes, as torch.nn.CrossEntropyLoss does. Reported
    /// losses include the smoothing
    #[arg(
        long,
        value_name = "FRACTION",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Training"
    )]
    label_smoothing: f32,

    /// The weights of the classes in the loss. balanced: every class has the same total weight. W,W,...: one weight
    /// for each class in sorted order, as in 1,2.5. FILE: a CSV file with the columns class,weight. Reported losses
    /// include the weights
    #[arg(long, value_name = "balanced|W,W,...|FILE", allow_hyphen_values = true, help_heading = "Training")]
    class_weights: Option<String>,

    /// Compute parameters whose bits do not depend on the number of ranks. Only with --strategy allreduce, and not
    /// with --compression, --scale-lr, --model gpt:... or batchnorm layers
    #[arg(long, help_heading = "Training")]
    reproducible: bool,

    /// The number of parts (shards) into which --reproducible divides each batch. The job may have at most COUNT ranks
    /// [default: 8]
    #[arg(long, value_name = "COUNT", help_heading = "Training")]
    shards: Option<NonZeroU32>,

    /// Hold out a part of the training set for validation. Stop if the validation loss has not reached a new minimum
    /// for COUNT reported epochs in a row. The result and the last checkpoint have the parameters with the lowest
    /// validation loss
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true, help_heading = "Training")]
    patience: Option<u64>,

    /// Hold out this fraction of the training set for validation, and report its loss. Without --patience, the validation
    /// loss does not end the run and does not change its result [default: 0.1 with --patience, otherwise none]
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true, help_heading = "Training")]
    validation_fraction: Option<f64>,
}

impl RecipeArgs {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong and what to do.
    pub(super) fn to_recipe(&self) -> Result<Recipe, String> {
        let smoothing = self.label_smoothing;
        let is_allowed = (0.0..1.0).contains(&smoothing);
        check_number("--label-smoothing", smoothing, is_allowed, "at least 0 and below 1")?;
        let schedule = &self.schedule;
        if let Some(norm) = self.clip_norm {
            check_number("--clip-norm", norm, norm > 0.0, "a number above 0")?;
        }
        Ok(Recipe {
            schedule: schedule.parse().map_err(|why| format!("--schedule {schedule}: {why}"))?,
            warmup: self.warmup.parse().map_err(|why| format!("--warmup: {why}"))?,
            scale_learning_rate: self.scale_lr,
            clip_norm: self.clip_norm,
            label_smoothing: self.label_smoothing,
            class_weights: self.parse_class_weights()?,
            reproducible_shards: self.parse_shards()?,
            validation: self.parse_validation()?,
        })
    }

    /// Returns the number of shards of each batch, or `None` without `--reproducible`.
    fn parse_shards(&self) -> Result<Option<NonZeroU32>, String> {
        match (self.reproducible, self.shards) {
            (true, shards) => Ok(Some(shards.unwrap_or(SHARDS_DEFAULT))),
            (false, None) => Ok(None),
            (false, Some(_)) => {
                Err("--shards needs --reproducible, which divides each batch into shards".into())
            }
        }
    }

    /// Returns which samples are held out for validation, and when the run stops early.
    fn parse_validation(&self) -> Result<Option<Validation>, String> {
        if self.patience == Some(0) {
            return Err("--patience 0: it must be at least 1".into());
        }
        if self.patience.is_none() && self.validation_fraction.is_none() {
            return Ok(None);
        }
        let fraction = self.validation_fraction.unwrap_or(VALIDATION_FRACTION_DEFAULT);
        let is_allowed = fraction > 0.0 && fraction < 1.0;
        check_number("--validation-fraction", fraction, is_allowed, "above 0 and below 1")?;
        Ok(Some(Validation { fraction, patience: self.patience }))
    }

    fn parse_class_weights(&self) -> Result<ClassWeights, String> {
        let Some(text) = &self.class_weights else { return Ok(ClassWeights::Equal) };
        let Ok(weights) = text.parse();
        if let ClassWeights::List(list) = &weights {
            check_class_weights(list).map_err(|why| format!("--class-weights {text}: {why}"))?;
        }
        Ok(weights)
    }
}
