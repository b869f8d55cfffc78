//! The settings that say where and when a run saves checkpoints.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

/// Where and when to save checkpoints, how many checkpoints to keep, and how to treat an existing checkpoint.
///
/// A run saves a checkpoint after each epoch that has a record in the report, after a stop signal and at its end. `steps` and
/// `interval` add checkpoints within an epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckpointSettings {
    /// The directory.
    pub directory: PathBuf,
    /// What to do if a checkpoint already exists.
    pub existing: ExistingCheckpoint,
    /// Also save a checkpoint when the number of steps of the run is a multiple of this number.
    pub steps: Option<NonZeroU64>,
    /// Also save a checkpoint when this time has passed since the last save.
    pub interval: Option<Duration>,
    /// The number of checkpoints to keep. The file of the latest checkpoint always has the name
    /// [`CHECKPOINT_FILE_NAME`](crate::train::CHECKPOINT_FILE_NAME). The file of an earlier checkpoint has the name
    /// `checkpoint-STEPS.safetensors`, where STEPS is the number of steps before this checkpoint.
    pub checkpoints_kept: NonZeroU32,
    /// Whether to keep the checkpoint of the best epoch that has a record as `checkpoint-best.safetensors`. The best epoch has
    /// the lowest validation loss. Without validation samples, the test loss decides. Without test samples, the
    /// training loss decides.
    pub keeps_best: bool,
    /// A text that the metadata of each checkpoint holds under the key `options`, for example the options of the
    /// program.
    pub options: Option<String>,
}

impl CheckpointSettings {
    /// Returns settings that save no checkpoints within an epoch, and keep one checkpoint.
    pub fn new(directory: impl Into<PathBuf>, existing: ExistingCheckpoint) -> Self {
        Self {
            directory: directory.into(),
            existing,
            steps: None,
            interval: None,
            checkpoints_kept: NonZeroU32::MIN,
            keeps_best: false,
            options: None,
        }
    }

    /// Returns whether the run saves checkpoints within an epoch.
    pub fn is_periodic(&self) -> bool {
        self.steps.is_some() || self.interval.is_some()
    }
}

/// What to do if a checkpoint already exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExistingCheckpoint {
    /// Resume from the checkpoint.
    Resume,
    /// Return an error, so that the checkpoint is not overwritten.
    Refuse,
}
