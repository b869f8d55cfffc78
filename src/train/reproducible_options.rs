//! Checks the options of a run with `--reproducible`.

use super::config::Config;
use super::logical_shards::SHARDS_MAX;
use super::strategies::StrategySpec;

/// Checks that the options fit `--reproducible`.
///
/// # Errors
///
/// Returns a sentence that says which options do not fit together and what to do.
pub(super) fn check_reproducible_options(config: &Config) -> Result<(), String> {
    let Some(shards) = config.recipe.reproducible_shards else { return Ok(()) };
    if shards.get() > SHARDS_MAX {
        return Err(format!("--shards {shards}: it must be from 1 to {SHARDS_MAX}"));
    }
    if config.strategy != StrategySpec::AllReduce {
        return Err(format!(
            "--reproducible is for --strategy allreduce; with {}, the result depends on the number of ranks",
            config.strategy
        ));
    }
    if config.compresses() {
        return Err(format!(
            "--reproducible does not apply to --compression {}, because the number of rounded sums depends on the number \
             of ranks; leave out --compression",
            config.compression
        ));
    }
    if config.recipe.scale_learning_rate {
        return Err("--reproducible does not apply to --scale-lr, which multiplies the learning rate by the number of ranks; \
                    leave out --scale-lr"
            .into());
    }
    Ok(())
}
