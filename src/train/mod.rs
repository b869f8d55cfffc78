//! Training: data, models, optimizers, the step loop and its checkpoints. This module communicates only through the public API
//! of [`Group`](crate::Group).
//!
//! All ranks draw the same batches, and each rank computes the gradients of its part of every batch ([`Batches`],
//! [`range_of_rank`]). With the default strategy, each rank divides its gradients by the size of the global batch.
//! The ranks sum their gradients, and every rank takes the same step. The number of ranks changes only the order in
//! which floating-point numbers are added. So the results of two runs with different numbers of ranks differ only by
//! rounding. With some other strategies ([`StrategySpec`]), each rank takes steps alone, and the ranks average their
//! parameters. With others, the ranks divide the model.

mod arithmetic_check;
mod assigned_batches;
pub(crate) mod atomic_file;
mod batch_exchange;
mod batch_norm_options;
mod batch_queue;
mod batches;
mod bucket_options;
mod bucket_ranges;
mod bucket_trial;
mod buckets;
mod checkpoint;
mod class_weights;
mod clipping;
mod compression_memory;
mod compression_options;
mod compression_plan;
mod compression_reach;
mod compression_report;
mod compression_rules;
mod compression_schedule;
mod config;
mod console;
mod convergence;
mod curvature;
mod curve_files;
pub mod data;
mod divided_model_options;
mod early_stopping;
mod error;
mod evaluation_work;
mod failed_rank;
mod gossip;
mod gradient_work;
mod learning_rate;
mod local_momentum;
mod logical_shards;
mod low_rank;
mod low_rank_products;
mod measurements;
mod metrics;
pub mod model;
pub mod model_file;
pub mod onnx;
pub mod optimizer;
mod output_paths;
mod parameter_server;
mod partition;
mod peer_link;
pub mod plot;
mod portable_math;
pub mod predict;
mod progress;
mod random;
mod range_sum;
mod rank_checks;
mod recipe;
mod report;
mod reproducible_options;
mod run;
mod run_messages;
mod runtime;
mod server_run;
mod setup;
mod shard_exchange;
mod slowest_rank;
mod state_distribution;
mod step_times;
mod strategies;
mod stream_options;
mod summary_words;
mod summation_tree;
mod tensorboard;
mod text_words;
mod trainer;
mod window_prefetch;

pub use batches::{Batches, ShuffleBlocks, range_of_rank};
pub use bucket_options::BucketBytes;
pub use bucket_ranges::BUCKET_BYTES_MAX;
pub use bucket_trial::{BucketReport, BucketTime};
pub use checkpoint::{
    CheckpointError, CheckpointSettings, ExistingCheckpoint, LATEST_FILE_NAME as CHECKPOINT_FILE_NAME,
    read_options,
};
pub use class_weights::ClassWeights;
pub(crate) use class_weights::check_class_weights;
pub use compression_reach::CompressionReach;
pub use compression_report::{CodecChoice, CompressionReport};
pub use compression_rules::{COMPRESSION_MIN_DEFAULT, CompressionRules};
pub use config::{Config, ServerSettings, TEST_FRACTION_DEFAULT, default_learning_rate, default_model};
pub use console::{Console, ConsoleLines, ConsoleOptions, ProgressDisplay};
pub use curve_files::CurveFiles;
pub(crate) use divided_model_options::options_refused_by;
pub use early_stopping::{VALIDATION_FRACTION_DEFAULT, Validation};
pub use error::{RunPhase, TrainError};
pub use failed_rank::run;
pub use gossip::{AverageCounts, Gossip, GossipError, GossipOptions};
pub use learning_rate::{RateSchedule, Warmup};
pub use logical_shards::{SHARDS_DEFAULT, SHARDS_MAX};
pub use measurements::{RankMeasurements, SlowestRank, SlownessCause};
pub(crate) use output_paths::would_replace;
pub use parameter_server::{
    ParameterServer, ParameterServerError, ParameterServerOptions, PushOutcome, RefusalReason,
};
pub use progress::{CompletedStep, Observer, SilentObserver};
pub use recipe::Recipe;
pub(crate) use report::f64_with_same_digits;
pub use report::{EpochRecord, GossipReport, RankResults, Report, ServerReport, parameters_hash};
pub use run::Summary;
pub use setup::{BATCH_SIZE_DEFAULT, EPOCHS_DEFAULT, STEPS_DEFAULT_MIN};
pub use step_times::StepTimes;
pub use strategies::StrategySpec;
pub use tensorboard::{STEP_INTERVAL_DEFAULT, TensorBoard};
