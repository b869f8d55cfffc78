//! Checks the options of a run whose model has batch normalization.

use super::config::Config;
use super::strategies::StrategySpec;

/// The minimum number of samples for the statistics of a batch. The variance of a single value is 0.
const NORMALIZED_SAMPLES_MIN: usize = 2;

/// Checks that the options fit a model with batch normalization, or with another layer that sums over ranks
/// (`SumOverRanks`).
///
/// # Errors
///
/// Returns a sentence that says which options do not fit together and what to do.
pub(super) fn check_batch_norm_options(config: &Config) -> Result<(), String> {
    let strategy = config.strategy;
    if strategy.divides_model() {
        return Err(format!(
            "the model has `batchnorm`, which --strategy {strategy} cannot divide over ranks; pass --strategy allreduce, or leave \
             `batchnorm` out of --model"
        ));
    }
    if matches!(strategy, StrategySpec::PsAsync { .. }) {
        return Err(format!(
            "the model has `batchnorm`, but with --strategy {strategy} late gradients would move its running statistics too far; \
             pass --strategy ps-sync or allreduce, or leave `batchnorm` out of --model"
        ));
    }
    if config.shard_optimizer {
        return Err("the model has `batchnorm`, whose running statistics --shard-optimizer cannot divide over ranks; leave out \
                    --shard-optimizer, or leave `batchnorm` out of --model"
            .into());
    }
    if config.recipe.logical_shards().is_some() {
        return Err("the model has `batchnorm`, whose statistics depend on the number of ranks in their last bits, so \
                    --reproducible does not apply; leave out --reproducible, or leave `batchnorm` out of --model"
            .into());
    }
    if config.micro_batches.get() > 1 {
        return Err(format!(
            "the model has `batchnorm`, which needs the statistics of the whole batch, but --accumulate {} computes parts of the \
             batch one after the other; leave out --accumulate, or leave `batchnorm` out of --model",
            config.micro_batches
        ));
    }
    Ok(())
}

/// Checks that a batch has enough samples for batch normalization. `batch_size` is the number of samples
/// of all ranks together, and `ranks` is the number of ranks that compute gradients.
///
/// # Errors
///
/// Returns a sentence that says what to do.
pub(super) fn check_batch_norm_samples(
    strategy: StrategySpec,
    (batch_size, ranks): (usize, u32),
) -> Result<(), String> {
    // With `allreduce`, all ranks together compute the statistics of a batch.
    let parts = if strategy == StrategySpec::AllReduce { 1 } else { ranks.max(1) as usize };
    if batch_size / parts >= NORMALIZED_SAMPLES_MIN {
        return Ok(());
    }
    let least = NORMALIZED_SAMPLES_MIN * parts;
    let on_each_rank = if parts == 1 { String::new() } else { format!(" on each of the {parts} ranks") };
    Err(format!(
        "the model has `batchnorm`, which needs at least {NORMALIZED_SAMPLES_MIN} samples in a batch{on_each_rank}, but \
         --batch-size is {batch_size}; pass --batch-size {least} or more"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_with_one_sample_for_the_statistics_are_refused() {
        for (strategy, ranks, least) in [("allreduce", 4, 2), ("local-sgd:3", 3, 6), ("ps-sync", 1, 2)] {
            let strategy = strategy.parse().unwrap();
            let check = |size| check_batch_norm_samples(strategy, (size, ranks));
            assert_eq!(check(least), Ok(()), "{strategy}");
            let error = check(least - 1).unwrap_err();
            assert!(error.ends_with(&format!("pass --batch-size {least} or more")), "{error}");
        }
    }
}
