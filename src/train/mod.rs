//! Training: data, models, optimisers, the step loop and its checkpoints. Sees of the rest only the group's public API.
//!
//! All ranks draw the same batches and each computes its part of every batch ([`Batches`], [`part`]); gradients, already
//! divided by the global batch, are summed, and every rank takes the same step. So a run computes the same mathematics
//! on any number of ranks, up to the order in which floating-point numbers are added.

mod agree;
pub(crate) mod atomic_file;
mod batches;
mod buckets;
mod checkpoint;
mod config;
pub mod data;
mod error;
pub mod model;
pub mod optimizer;
mod plan;
mod progress;
mod random;
mod report;
mod run;
mod trainer;

pub use batches::{Batches, part};
pub use buckets::BUCKET_BYTES;
pub use checkpoint::{CheckpointError, FILE_NAME as CHECKPOINT_FILE_NAME};
pub use config::{
    BATCH_SIZE_DEFAULT, Checkpoint, Config, EPOCHS_DEFAULT, Existing, default_learning_rate, default_model,
};
pub use error::{Phase, TrainError};
pub use progress::{Console, Display, Observer, Silent};
pub use report::{EpochRecord, Report, parameters_hash};
pub use run::{Summary, run};
