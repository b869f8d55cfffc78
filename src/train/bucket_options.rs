//! The size of buckets of gradients that a user chooses, and the options that fit it.

use std::fmt;
use std::str::FromStr;

use super::compression_rules::CompressionRules;
use super::strategies::StrategySpec;
use crate::codec::Compression;

const NO_BYTES: &str = "a bucket holds at least one byte; to use no buckets, pass --no-overlap";

/// How the size of a bucket of gradients is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketBytes {
    /// All buckets have this number of bytes, which is at least 1.
    Fixed(usize),
    /// The ranks measure steps with buckets of several sizes at the start of the run, and use the fastest. Another size can
    /// change the last bits of sums, and with compression more than the last bits, so two runs can have different results.
    /// Only for [`StrategySpec::AllReduce`]; see `docs/compressed-training.md`.
    Auto,
}

impl FromStr for BucketBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(0)) => Err(NO_BYTES.into()),
            (_, Ok(bytes)) => Ok(Self::Fixed(bytes)),
            _ => Err("it must be a number of bytes, or auto".into()),
        }
    }
}

impl fmt::Display for BucketBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(bytes) => write!(f, "{bytes}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// The options of a run that the size of buckets depends on.
#[derive(Clone)]
pub(super) struct BucketOptions<'a> {
    pub(super) bucket_bytes: Option<BucketBytes>,
    /// Whether buckets are reduced during the backward pass.
    pub(super) overlap: bool,
    pub(super) strategy: StrategySpec,
    pub(super) is_reproducible: bool,
    pub(super) shards_optimizer: bool,
    pub(super) compression: Compression,
    pub(super) rules: &'a CompressionRules,
}

impl BucketOptions<'_> {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which options do not fit together and what to do.
    pub(super) fn check(&self) -> Result<(), String> {
        match self.bucket_bytes {
            Some(BucketBytes::Auto) => self.check_auto(),
            Some(BucketBytes::Fixed(0)) => Err(format!("--bucket-bytes 0: {NO_BYTES}")),
            _ => Ok(()),
        }
    }

    fn check_auto(&self) -> Result<(), String> {
        let refuse = |option: &str, why: &str| {
            Err(format!(
                "--bucket-bytes auto does not apply to {option}, {why}; pass a number of bytes, or leave out one of the two \
                 options"
            ))
        };
        let strategy = self.strategy;
        let is_auto = |codec: &Compression| matches!(codec, Compression::Auto(_));
        if strategy != StrategySpec::AllReduce {
            refuse(&format!("--strategy {strategy}"), "which has no buckets")
        } else if !self.overlap {
            refuse("--no-overlap", "with which there is a single bucket")
        } else if self.is_reproducible {
            refuse("--reproducible", "because measured times differ from run to run")
        } else if self.shards_optimizer {
            refuse("--shard-optimizer", "because the buckets say which rank holds which part of the state")
        } else if let Some(codec) = self.rules.codecs(self.compression).find(is_auto) {
            refuse(&format!("--compression {codec}"), "which measures codecs in the same steps")
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_refused_if_it_does_not_apply() {
        let auto = BucketOptions {
            bucket_bytes: Some(BucketBytes::Auto),
            overlap: true,
            strategy: StrategySpec::AllReduce,
            is_reproducible: false,
            shards_optimizer: false,
            compression: Compression::None,
            rules: &CompressionRules::default(),
        };
        for compression in ["none", "int8", "topk", "powersgd"] {
            let options = BucketOptions { compression: compression.parse().unwrap(), ..auto.clone() };
            assert_eq!(options.check(), Ok(()), "{compression}");
        }
        let with_strategy =
            |strategy: &str| BucketOptions { strategy: strategy.parse().unwrap(), ..auto.clone() };
        for (options, expected) in [
            (BucketOptions { overlap: false, ..auto.clone() }, "does not apply to --no-overlap"),
            (BucketOptions { is_reproducible: true, ..auto.clone() }, "does not apply to --reproducible"),
            (BucketOptions { shards_optimizer: true, ..auto.clone() }, "does not apply to --shard-optimizer"),
            (with_strategy("pipeline:2"), "--strategy pipeline:2, which has no buckets"),
            (with_strategy("local-sgd:3"), "--strategy local-sgd:3"),
            (BucketOptions { compression: "auto".parse().unwrap(), ..auto.clone() }, "measures codecs"),
            (
                BucketOptions { bucket_bytes: Some(BucketBytes::Fixed(0)), ..auto.clone() },
                "at least one byte",
            ),
        ] {
            let error = options.check().unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn sizes_are_numbers_or_auto() {
        for (text, expected) in [("auto", BucketBytes::Auto), ("4096", BucketBytes::Fixed(4096))] {
            let found: BucketBytes = text.parse().unwrap();
            assert_eq!((found, found.to_string()), (expected, text.to_owned()));
        }
        for (text, expected) in [("0", "at least one byte"), ("1k", "a number of bytes"), ("-1", "or auto")] {
            let error = text.parse::<BucketBytes>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
