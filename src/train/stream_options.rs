//! Checks the options of a run that reads its samples from temporary files (`--stream`).

use super::config::Config;
use super::data::{DataError, DataSource};
use super::optimizer::Rule;

/// Checks that the options of a run fit `--stream`.
///
/// # Errors
///
/// Returns a sentence that says which options do not fit together and what to do.
pub(super) fn check_stream_options(config: &Config) -> Result<(), String> {
    if config.stream_directory.is_none() {
        return Ok(());
    }
    if matches!(config.source, DataSource::Digits | DataSource::Synthetic { .. }) {
        return Err(format!("--stream is for data in files; leave it out with --data {}", config.source));
    }
    if config.rule == Some(Rule::Accelerated) {
        return Err("--optimizer accelerated uses all samples in each step, which --stream cannot hold in memory; pass \
                    --optimizer adam, momentum or sgd"
            .into());
    }
    Ok(())
}

/// Checks that a batch is smaller than a training set that is too large for memory.
pub(super) fn check_streamed_batch(batch_size: usize, train_samples: usize) -> Result<(), DataError> {
    if batch_size < train_samples {
        return Ok(());
    }
    Err(DataError::Unsuitable(format!(
        "--batch-size {batch_size} is not smaller than the training set of {train_samples} samples, so --stream would hold all \
         samples in memory; pass a smaller --batch-size, or leave out --stream"
    )))
}
