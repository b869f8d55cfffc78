//! Checks the options of a run whose model has batch normalization.

use super::config::Config;
use super::strategies::StrategySpec;

/// The minimum number of samples for the statistics of a micro-batch. The variance of a single value is 0.
const NORMALIZED_SAMPLES_MIN: usize = 2;

/// Checks that the options fit a model with batch normalization, or with another layer that sums over ranks
/// (`SumOverRanks`).
///
/// # Errors
///
/// Returns a sentence that says which options do not fit together and what to do.
pub(super) fn check_batch_norm_options(config: &Config) -> Result<(), String> {
    let strategy = config.strategy;
    if strategy == StrategySpec::Tensor {
        return Err(
            "the model has `batchnorm`, which --strategy tensor cannot divide, because it divides fully connected layers in pairs; \
             pass --strategy allreduce or pipeline, or leave `batchnorm` out of --model"
                .into(),
        );
    }
    if matches!(strategy, StrategySpec::PsAsync { .. }) {
        return Err(format!(
            "the model has `batchnorm`, but with --strategy {strategy} late gradients would move its running statistics too far; \
             pass --strategy ps-sync or allreduce, or leave `batchnorm` out of --model"
        ));
    }
    if config.recipe.logical_shards().is_some() {
        return Err("the model has `batchnorm`, whose statistics depend on the number of ranks in their last bits, so \
                    --reproducible does not apply; leave out --reproducible, or leave `batchnorm` out of --model"
            .into());
    }
    Ok(())
}

/// Checks that a micro-batch has enough samples for batch normalization. `batch_size` is the number of samples
/// of all ranks together, and `ranks` is the number of ranks that compute gradients.
///
/// # Errors
///
/// Returns a sentence that says what to do.
pub(super) fn check_batch_norm_samples(
    config: &Config,
    (batch_size, ranks): (usize, u32),
) -> Result<(), String> {
    let micro_batches = config.micro_batches_per_step().get() as usize;
    let option = if config.strategy.pipeline_shape().is_some() { "--micro-batches" } else { "--accumulate" };
    // The number of parts of the batch for which statistics are computed separately.
    let parts = match (config.strategy, config.strategy.pipeline_shape()) {
        (StrategySpec::AllReduce, _) => 1,
        (_, Some((pipelines, _))) => pipelines as usize,
        (_, None) => ranks.max(1) as usize,
    };
    let least = match (config.strategy, micro_batches) {
        // All ranks together compute the statistics. Each rank then has at least one sample of each micro-batch.
        (StrategySpec::AllReduce, 2..) => NORMALIZED_SAMPLES_MIN.max(ranks as usize),
        _ => NORMALIZED_SAMPLES_MIN * parts,
    };
    let least = least.saturating_mul(micro_batches);
    if batch_size >= least {
        return Ok(());
    }
    let parts = match (parts, config.strategy.pipeline_shape()) {
        (1, _) => String::new(),
        (_, Some(_)) => format!(" on each of the {parts} pipelines"),
        (_, None) => format!(" on each of the {parts} ranks"),
    };
    let (name, or_less) = match micro_batches {
        1 => ("batch".to_owned(), String::new()),
        _ => (format!("micro-batch ({option} {micro_batches})"), format!(", or a smaller {option}")),
    };
    Err(format!(
        "the model has `batchnorm`, which needs at least {NORMALIZED_SAMPLES_MIN} samples in a {name}{parts}, but \
         --batch-size is {batch_size}; pass --batch-size {least} or more{or_less}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::data::DataSource;

    #[test]
    fn batches_with_one_sample_for_the_statistics_are_refused() {
        for (strategy, micro_batches, ranks, least) in [
            ("allreduce", 1, 4, 2),
            ("allreduce", 3, 1, 6),
            ("allreduce", 3, 4, 12),
            ("local-sgd:3", 1, 3, 6),
            ("local-sgd:3", 2, 3, 12),
            ("ps-sync", 1, 1, 2),
            ("pipeline:2", 5, 2, 10),
            ("hybrid:3x2", 4, 6, 24),
        ] {
            let mut config =
                Config { strategy: strategy.parse().unwrap(), ..Config::new(DataSource::Digits) };
            if config.strategy.pipeline_shape().is_some() {
                config.pipeline_micro_batches = micro_batches.try_into().ok();
            } else {
                config.micro_batches = micro_batches.try_into().unwrap();
            }
            let check = |size| check_batch_norm_samples(&config, (size, ranks));
            assert_eq!(check(least), Ok(()), "{strategy}");
            let error = check(least - 1).unwrap_err();
            let expected = format!("pass --batch-size {least} or more");
            assert!(error.contains(&expected), "{error}");
            assert_eq!(error.contains("or a smaller --"), micro_batches > 1, "{error}");
        }
    }
}
