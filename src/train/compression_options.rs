//! Checks `--compression-momentum` and `--compression-warmup`, and the compressions that depend on other options.

use super::compression_rules::CompressionRules;
use super::optimizer::Rule;
use super::strategies::StrategySpec;
use crate::codec::Compression;

/// The options of a run that `--compression-momentum` and `--compression-warmup` depend on.
#[expect(clippy::struct_excessive_bools, reason = "each is a separate option")]
pub(super) struct CompressionOptions<'a> {
    pub(super) compression: Compression,
    pub(super) rules: &'a CompressionRules,
    /// Whether ranks apply the momentum before they compress.
    pub(super) momentum: bool,
    pub(super) has_warmup: bool,
    /// The optimizer; `None` if the run chooses it.
    pub(super) rule: Option<Rule>,
    pub(super) strategy: StrategySpec,
    pub(super) shards_optimizer: bool,
    /// Whether the norm of the gradient has a limit.
    pub(super) clips: bool,
}

impl CompressionOptions<'_> {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which options do not fit together and what to do.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.shards_optimizer
            && let Some(codec) = self.rules.codecs(self.compression).find(|codec| codec.adds_last_result())
        {
            return Err(format!(
                "--compression {codec} does not apply to --shard-optimizer, because each rank needs the sums of all parameters, but gets \
                 only those of its part; \
                 leave one of them out"
            ));
        }
        if self.momentum {
            self.check_momentum()?;
        }
        if !self.has_warmup {
            return Ok(());
        }
        let freezes_variance = self.momentum && self.rule.is_some_and(|rule| rule.adam_options().is_some());
        if !freezes_variance && !self.is_any_codec_sparse() {
            return Err("--compression-warmup is for --compression topk and randomk, and for --optimizer adam and adamw with \
                    --compression-momentum; leave it out"
            .into());
        }
        Ok(())
    }

    fn check_momentum(&self) -> Result<(), String> {
        let strategy = self.strategy;
        if !matches!(strategy, StrategySpec::AllReduce | StrategySpec::Hybrid { .. }) {
            return Err(format!(
                "--compression-momentum is for strategies with which the ranks sum gradients in each step; pass --strategy allreduce or \
             hybrid, not {strategy}"
            ));
        }
        if self.shards_optimizer {
            return Err("--compression-momentum does not apply to --shard-optimizer, because each rank needs the momentum of all \
                    parameters; leave one of them out"
            .into());
        }
        if self.clips && strategy != StrategySpec::AllReduce {
            return Err(format!(
                "--clip-norm with --compression-momentum needs the norm of the rank's whole gradient, but with --strategy {strategy} a \
             rank has only a part; leave out --clip-norm"
            ));
        }
        match self.rule {
            Some(Rule::Momentum { .. } | Rule::Nesterov { .. })
                if self.rules.codecs(self.compression).any(Compression::adds_last_result) =>
            {
                Err(format!(
                    "--compression-momentum with --optimizer {} does not apply to ef21, which delays no elements; leave one of them out",
                    self.rule.map_or("auto", Rule::name)
                ))
            }
            Some(Rule::Momentum { .. } | Rule::Nesterov { .. }) if self.is_any_codec_sparse() => Ok(()),
            Some(rule @ (Rule::Momentum { .. } | Rule::Nesterov { .. })) => Err(format!(
                "--compression-momentum with --optimizer {} is for --compression topk and randomk, which delay most elements; leave it \
             out",
                rule.name()
            )),
            Some(Rule::Adam(_) | Rule::AdamW(_)) => self.check_frozen_variance(),
            rule => Err(format!(
                "--compression-momentum needs --optimizer momentum, nesterov, adam or adamw, not {}",
                rule.map_or("auto", Rule::name)
            )),
        }
    }

    fn check_frozen_variance(&self) -> Result<(), String> {
        if self.compression == Compression::None {
            return Err("--compression-momentum needs --compression, for example onebit".into());
        }
        // The trials of `auto` are not meant to begin after a warm-up, with first moments in place of gradients.
        let is_refused = |codec: &Compression| {
            matches!(codec, Compression::SignSgd | Compression::PowerSgd(_) | Compression::Auto(_))
        };
        if let Some(codec) = self.rules.codecs(self.compression).find(is_refused) {
            return Err(format!(
                "--compression-momentum with --optimizer adam and adamw does not apply to --compression {codec}; pass onebit, or another \
             codec"
            ));
        }
        if !self.has_warmup {
            return Err("--compression-momentum with --optimizer adam and adamw needs --compression-warmup, the first part of the run, \
                    in which Adam learns the variance of the gradients: for example a fifth of the epochs"
            .into());
        }
        Ok(())
    }

    fn is_any_codec_sparse(&self) -> bool {
        let is_sparse = |codec| matches!(codec, Compression::TopK(_) | Compression::RandomK(_));
        self.rules.codecs(self.compression).any(is_sparse)
    }
}
