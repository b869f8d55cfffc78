//! The size of buckets of gradients that a user chooses, and the options that fit it.

use std::fmt;
use std::str::FromStr;

use super::config::Config;
use super::strategies::StrategySpec;
use crate::codec::Compression;

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
            (_, Ok(0)) => {
                Err("a bucket holds at least one byte; to use no buckets, pass --no-overlap".into())
            }
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

/// Checks that the options fit the size of buckets.
///
/// # Errors
///
/// Returns a sentence that says which options do not fit together and what to do.
pub(super) fn check_bucket_options(config: &Config) -> Result<(), String> {
    match config.bucket_bytes {
        Some(BucketBytes::Auto) => {}
        Some(BucketBytes::Fixed(0)) => {
            return Err(
                "--bucket-bytes 0: a bucket holds at least one byte; to use no buckets, pass --no-overlap"
                    .into(),
            );
        }
        _ => return Ok(()),
    }
    let refuse = |option: &str, why: &str| {
        Err(format!(
            "--bucket-bytes auto does not apply to {option}, {why}; pass a number of bytes, or leave out one of the two options"
        ))
    };
    let strategy = config.strategy;
    let is_auto = |codec: &Compression| matches!(codec, Compression::Auto(_));
    if strategy != StrategySpec::AllReduce {
        refuse(&format!("--strategy {strategy}"), "which has no buckets")
    } else if !config.overlap {
        refuse("--no-overlap", "with which there is a single bucket")
    } else if config.recipe.reproducible_shards.is_some() {
        refuse("--reproducible", "because measured times differ from run to run")
    } else if config.shard_optimizer {
        refuse("--shard-optimizer", "because the buckets say which rank holds which part of the state")
    } else if let Some(codec) = config.compression_rules.codecs(config.compression).find(is_auto) {
        refuse(&format!("--compression {codec}"), "which measures codecs in the same steps")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::data::DataSource;
    use crate::train::logical_shards::SHARDS_DEFAULT;

    #[test]
    fn auto_is_refused_if_it_does_not_apply() {
        let auto = || Config { bucket_bytes: Some(BucketBytes::Auto), ..Config::new(DataSource::Digits) };
        for compression in ["none", "int8", "topk", "powersgd"] {
            let config = Config { compression: compression.parse().unwrap(), ..auto() };
            assert_eq!(config.check(), Ok(()), "{compression}");
        }
        let mut reproducible = auto();
        reproducible.recipe.reproducible_shards = Some(SHARDS_DEFAULT);
        for (config, expected) in [
            (Config { overlap: false, ..auto() }, "does not apply to --no-overlap"),
            (reproducible, "does not apply to --reproducible"),
            (Config { shard_optimizer: true, ..auto() }, "does not apply to --shard-optimizer"),
            (
                Config { strategy: "pipeline:2".parse().unwrap(), ..auto() },
                "--strategy pipeline:2, which has no buckets",
            ),
            (Config { strategy: "local-sgd:3".parse().unwrap(), ..auto() }, "--strategy local-sgd:3"),
            (Config { compression: "auto".parse().unwrap(), ..auto() }, "which measures codecs"),
            (Config { bucket_bytes: Some(BucketBytes::Fixed(0)), ..auto() }, "at least one byte"),
        ] {
            let error = config.check().unwrap_err();
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
