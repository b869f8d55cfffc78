//! The options of `ringtrain` that say where and when to save checkpoints.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::optimizer_args::check_number;
use crate::train::{Checkpoint, Existing};

/// The maximum of `--checkpoint-minutes`: a month of 30 days.
const MINUTES_MAX: f64 = 43_200.0;

/// Where and when to save checkpoints.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub(super) struct CheckpointArgs {
    /// Save a checkpoint to DIR/checkpoint.safetensors after each epoch that is reported and after a stop signal.
    /// Rank 0 writes the checkpoint while training continues. If a checkpoint cannot be written, for example because
    /// the disk is full, the previous checkpoint remains and training continues; the run fails at its end if the last
    /// checkpoint cannot be written
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,

    /// Also save a checkpoint every N steps
    #[arg(long, value_name = "N")]
    checkpoint_steps: Option<NonZeroU64>,

    /// Also save a checkpoint every M minutes, such as 10 or 0.5
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    checkpoint_minutes: Option<f64>,

    /// Keep the last K checkpoints. The name of an earlier checkpoint is checkpoint-STEPS.safetensors, where STEPS is
    /// the number of steps that the run had taken [default: 1]
    #[arg(long, value_name = "K")]
    keep_checkpoints: Option<NonZeroU32>,

    /// Also keep the checkpoint of the best reported epoch, as DIR/checkpoint-best.safetensors. With --patience, the best
    /// epoch has the lowest validation loss; otherwise, the lowest test loss; without test samples, the lowest training
    /// loss
    #[arg(long)]
    keep_best: bool,

    /// Continue from the checkpoint in the directory of --checkpoint. If there is no checkpoint yet, start from the
    /// beginning
    #[arg(long)]
    resume: bool,
}

impl CheckpointArgs {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong and what to do.
    pub(super) fn choose(self) -> Result<Option<Checkpoint>, String> {
        let Some(directory) = self.checkpoint else {
            let given = [
                ("--resume", self.resume),
                ("--checkpoint-steps", self.checkpoint_steps.is_some()),
                ("--checkpoint-minutes", self.checkpoint_minutes.is_some()),
                ("--keep-checkpoints", self.keep_checkpoints.is_some()),
                ("--keep-best", self.keep_best),
            ];
            return match given.iter().find(|(_, given)| *given) {
                Some((flag, _)) => {
                    Err(format!("{flag} needs --checkpoint DIR, the directory of the checkpoint"))
                }
                None => Ok(None),
            };
        };
        if let Some(minutes) = self.checkpoint_minutes {
            let is_allowed = minutes > 0.0 && minutes <= MINUTES_MAX;
            let range = format!("above 0 and at most {MINUTES_MAX}");
            check_number("--checkpoint-minutes", minutes, is_allowed, &range)?;
        }
        let existing = if self.resume { Existing::Resume } else { Existing::Refuse };
        Ok(Some(Checkpoint {
            steps: self.checkpoint_steps,
            interval: self.checkpoint_minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
            keep: self.keep_checkpoints.unwrap_or(NonZeroU32::MIN),
            keeps_best: self.keep_best,
            ..Checkpoint::new(directory, existing)
        }))
    }
}
