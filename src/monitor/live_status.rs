//! The status of a rank, as `/status` shows it in JSON.

use serde::{Deserialize, Serialize};

/// What a rank knows about itself and about its run. All times are in seconds, and all totals are since the process began to
/// train, except for `step`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LiveRankStatus {
    /// The version of the program.
    pub(crate) version: String,
    /// A name of the job, the same on all its ranks.
    pub(crate) job: String,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// The address at which the rank serves its status.
    pub(crate) address: String,
    /// `tcp`, `shm`, `shm+tcp`, or `none` for a single rank.
    pub(crate) transport: String,
    pub(crate) strategy: String,
    pub(crate) stage: RunStage,
    /// The epoch in progress, counted from 1.
    pub(crate) epoch: u64,
    /// The number of epochs of the run.
    pub(crate) epochs: u64,
    /// The number of steps since the run began, including the steps before a resumption.
    pub(crate) step: u64,
    /// The mean loss of the samples of the last step. `None` if it is not finite, or before the first step.
    pub(crate) loss: Option<f64>,
    pub(crate) learning_rate: Option<f64>,
    /// The number of samples that all ranks together processed.
    pub(crate) samples: u64,
    /// The number of samples per second of all ranks together, in about the last second of the steps.
    pub(crate) samples_per_second: f64,
    /// The time since the process began to train.
    pub(crate) seconds: f64,
    /// The time since the last step ended.
    pub(crate) seconds_since_step: Option<f64>,
    /// How long the parts of the rank's steps took.
    pub(crate) step_seconds: PartSeconds,
    /// How long the parts of the steps of about the last second took.
    pub(crate) recent_step_seconds: PartSeconds,
    /// The number of completed operations.
    pub(crate) operations: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    /// The number of elements that compression encoded, and their bytes.
    pub(crate) encoded_elements: u64,
    pub(crate) encoded_bytes: u64,
    pub(crate) links: Vec<LinkStatus>,
    /// The rank for which the others wait. `None` if no rank is clearly slower than the others.
    pub(crate) slowest: Option<SlowestStatus>,
    /// The results of the last recorded epoch.
    pub(crate) last_epoch: Option<EpochStatus>,
}

/// What the rank does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RunStage {
    /// Reads the data, or waits for other ranks before the first step.
    #[default]
    Starting,
    /// Takes steps.
    Training,
    /// Tests the model, saves it, or has completed the run.
    Testing,
}

impl RunStage {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Training => "training",
            Self::Testing => "testing",
        }
    }
}

/// The parts of the duration of steps. The parts together are the whole duration.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PartSeconds {
    /// The number of steps.
    pub(crate) steps: u64,
    pub(crate) compute: f64,
    /// The time in which the rank only waited for other ranks.
    pub(crate) communication: f64,
    pub(crate) data: f64,
}

/// The bytes that one link has carried.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LinkStatus {
    pub(crate) peer: u32,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    /// The bytes per second of about the last second.
    pub(crate) sent_per_second: f64,
    pub(crate) received_per_second: f64,
}

/// The rank for which the other ranks wait, and why.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SlowestStatus {
    pub(crate) rank: u32,
    /// The part of a step that takes longer than on the other ranks: `compute` or `data`.
    pub(crate) cause: String,
    /// The mean time of a step in which this rank did not wait, and the mean of the other ranks.
    pub(crate) busy_seconds_per_step: f64,
    pub(crate) others_seconds_per_step: f64,
}

/// The results of an epoch. Numbers that do not apply or are not finite are `None`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EpochStatus {
    pub(crate) epoch: u64,
    pub(crate) train_loss: Option<f64>,
    pub(crate) test_loss: Option<f64>,
    pub(crate) test_accuracy: Option<f64>,
    pub(crate) test_r2: Option<f64>,
    pub(crate) validation_loss: Option<f64>,
}
