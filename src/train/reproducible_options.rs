//! Checks the options of a run with `--reproducible`.

use std::num::NonZeroU32;

use super::logical_shards::SHARDS_MAX;
use super::strategies::StrategySpec;
use crate::codec::Compression;

/// The options of a run that `--reproducible` depends on.
pub(super) struct ReproducibleOptions {
    /// The number of logical shards; `None` without `--reproducible`.
    pub(super) shards: Option<NonZeroU32>,
    pub(super) strategy: StrategySpec,
    pub(super) compression: Compression,
    /// Whether any tensor is compressed.
    pub(super) compresses: bool,
    pub(super) scales_learning_rate: bool,
}

impl ReproducibleOptions {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which options do not fit together and what to do.
    pub(super) fn check(&self) -> Result<(), String> {
        let Some(shards) = self.shards else { return Ok(()) };
        if shards.get() > SHARDS_MAX {
            return Err(format!("--shards {shards}: it must be from 1 to {SHARDS_MAX}"));
        }
        if self.strategy != StrategySpec::AllReduce {
            return Err(format!(
                "--reproducible is for --strategy allreduce; with {}, the result depends on the number of ranks",
                self.strategy
            ));
        }
        if self.compresses {
            return Err(format!(
                "--reproducible does not apply to --compression {}, because the number of rounded sums depends on the number \
                 of ranks; leave out --compression",
                self.compression
            ));
        }
        if self.scales_learning_rate {
            return Err("--reproducible does not apply to --scale-lr, which multiplies the learning rate by the number of ranks; \
                        leave out --scale-lr"
                .into());
        }
        Ok(())
    }
}
