//! The options of `ringtrain` that say where and when to save checkpoints.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::invocation::ResumeSource;
use super::optimizer_args::check_number;
use crate::train::{CheckpointSettings, ExistingCheckpoint};

/// The maximum of `--checkpoint-minutes`: a month of 30 days.
const CHECKPOINT_MINUTES_MAX: f64 = 43_200.0;

/// Where and when to save checkpoints.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub(super) struct CheckpointArgs {
    /// Save a checkpoint to DIR/checkpoint.safetensors after each reported epoch and after a stop signal. Rank 0
    /// writes the checkpoint while training continues. If a write fails, for example on a full disk, the previous
    /// checkpoint remains and training continues. If the last write fails, the run fails at its end
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,

    /// Also save a checkpoint every N steps. With local-sgd, diloco and model-average, the ranks save when they next average
    /// their parameters
    #[arg(long, value_name = "N")]
    checkpoint_steps: Option<NonZeroU64>,

    /// Also save a checkpoint every M minutes, such as 10 or 0.5
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    checkpoint_minutes: Option<f64>,

    /// Keep the last K checkpoints. The newest checkpoint is checkpoint.safetensors. The name of an
    /// older checkpoint contains its step: checkpoint-500.safetensors was saved after 500 steps [default: 1]
    #[arg(long, value_name = "K")]
    keep_checkpoints: Option<NonZeroU32>,

    /// Also keep the checkpoint of the best reported epoch as DIR/checkpoint-best.safetensors. With --patience or
    /// --validation-fraction, the best epoch has the lowest validation loss. Otherwise, the best epoch has the lowest test
    /// loss, or the lowest training loss if there are no test samples
    #[arg(long)]
    keep_best: bool,

    /// Continue from the checkpoint in DIR, with the options of the checkpoint. Options that you pass override the
    /// options of the checkpoint. Some options, such as --model, must keep their values. The run saves its
    /// checkpoints in DIR too. To start a new run if DIR has no checkpoint,
    /// pass --checkpoint DIR --resume
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    #[allow(clippy::option_option, reason = "clap: the option is absent, has no value, or has a value")]
    resume: Option<Option<PathBuf>>,
}

impl CheckpointArgs {
    /// Returns the checkpoint from which the run resumes, or `None` if the run does not resume.
    pub(super) fn resume_source(&self) -> Option<ResumeSource<'_>> {
        let resume = self.resume.as_ref()?;
        let directory = resume.as_ref().or(self.checkpoint.as_ref())?;
        Some(ResumeSource { directory, must_exist: resume.is_some() })
    }

    /// Checks the options, and returns the settings for checkpoints. Returns `None` if the run saves no checkpoints.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong and what to do.
    pub(super) fn into_checkpoint_settings(self) -> Result<Option<CheckpointSettings>, String> {
        let existing =
            if self.resume.is_some() { ExistingCheckpoint::Resume } else { ExistingCheckpoint::Refuse };
        let directory = match (self.checkpoint, self.resume) {
            (Some(checkpoint), Some(Some(resume))) if checkpoint != resume => {
                return Err(format!(
                    "--resume {} and --checkpoint {} name different directories; to save into another directory, copy the \
                     checkpoint there",
                    resume.display(),
                    checkpoint.display()
                ));
            }
            (None, Some(None)) => {
                return Err(
                    "--resume needs the directory of a checkpoint: pass --resume DIR, or --checkpoint DIR"
                        .into(),
                );
            }
            (directory, None | Some(None)) | (_, Some(directory)) => directory,
        };
        let Some(directory) = directory else {
            let given = [
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
            let is_allowed = minutes > 0.0 && minutes <= CHECKPOINT_MINUTES_MAX;
            let range = format!("above 0 and at most {CHECKPOINT_MINUTES_MAX}");
            check_number("--checkpoint-minutes", minutes, is_allowed, &range)?;
        }
        Ok(Some(CheckpointSettings {
            steps: self.checkpoint_steps,
            interval: self.checkpoint_minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
            checkpoints_kept: self.keep_checkpoints.unwrap_or(NonZeroU32::MIN),
            keeps_best: self.keep_best,
            ..CheckpointSettings::new(directory, existing)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::train::args::tests::parse_config;

    #[test]
    fn checkpoint_options_need_a_directory_and_valid_values() {
        for (line, expected) in [
            ("--checkpoint-steps 5", "--checkpoint-steps needs --checkpoint"),
            ("--checkpoint-minutes 5", "--checkpoint-minutes needs --checkpoint"),
            ("--keep-checkpoints 5", "--keep-checkpoints needs --checkpoint"),
            ("--keep-best", "--keep-best needs --checkpoint"),
            ("--checkpoint d --checkpoint-steps 0", "'0'"),
            ("--checkpoint d --keep-checkpoints 0", "'0'"),
            ("--checkpoint d --checkpoint-minutes 0", "--checkpoint-minutes 0: it must be above 0"),
            ("--checkpoint d --checkpoint-minutes nan", "above 0"),
            (
                "--checkpoint d --checkpoint-minutes 1 --strategy model-average",
                "do not apply to --strategy model-average, because",
            ),
        ] {
            let error = parse_config(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
        let line =
            "--checkpoint d --checkpoint-steps 5 --checkpoint-minutes 0.5 --keep-checkpoints 3 --keep-best";
        let found = parse_config(line).unwrap().checkpoint.unwrap();
        assert_eq!((found.steps.unwrap().get(), found.interval.unwrap().as_secs()), (5, 30));
        assert_eq!(
            (found.checkpoints_kept.get(), found.keeps_best, found.existing),
            (3, true, ExistingCheckpoint::Refuse)
        );
    }
}
