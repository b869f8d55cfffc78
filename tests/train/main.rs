//! Tests of training: with the library, and with the program `ringtrain` on one rank and on several ranks.

mod batch_norm;
#[cfg(feature = "candle")]
mod candle_modules;
mod checkpoints;
mod cnn;
mod command_line;
mod compressed_momentum;
mod compression;
mod convergence;
mod divided_models;
mod emulated_processors;
mod fashion;
mod few_samples;
mod formats;
mod gossip;
mod gossip_failures;
mod gossip_library;
mod gpt;
mod killed_jobs;
mod library;
mod measured_buckets;
mod model_files;
mod own_model;
mod parameter_server;
mod parquet;
mod periodic_checkpoints;
mod program;
mod recipes;
mod reproducible;
mod server_memory;
mod server_options;
mod several_ranks;
mod sharded_optimizer;
mod shared_formats;
mod shared_tables;
mod slow_and_killed_workers;
mod standard_input;
mod strategies;
mod streaming;
mod synchronous;
mod tables;
mod test_sets;
#[path = "../util/mod.rs"]
mod util;
