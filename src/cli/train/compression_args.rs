//! The options of `ringtrain` for compressing gradients.

use clap::Args;

use crate::codec::Compression;
use crate::train::{COMPRESSION_MIN_DEFAULT, CompressionRules, Warmup};

/// How ranks send gradients and changes of parameters to other hosts.
#[derive(Args, Debug)]
pub(super) struct CompressionArgs {
    /// How ranks encode gradients and changes of parameters for other hosts: none, fp16, bf16, fp8-e4m3, fp8-e5m2, int8,
    /// int8-stochastic, int4, int4-stochastic, qsgd:BITS, onebit, signsgd, topk:FRACTION, randomk:FRACTION,
    /// powersgd:RANK, auto, which measures which codec is fastest, or ef21:CODEC. Ranks that share memory exchange exact values
    #[arg(long, value_name = "CODEC", default_value = "none", help_heading = "Training")]
    compression: String,

    /// Do not compress the tensors whose names match PATTERN: a glob such as 'layers.*.weight', or a part of the name.
    /// `ringtrain inspect` prints the names of the tensors of a model. The option may be given several times
    #[arg(long, value_name = "PATTERN", help_heading = "Training")]
    compression_exclude: Vec<String>,

    /// Encode the tensors whose names match PATTERN with CODEC, as in layers.0.=int8. The option may be given several times.
    /// The first pattern that matches counts, but first those of --compression-exclude
    #[arg(long, value_name = "PATTERN=CODEC", help_heading = "Training")]
    compression_tensor: Vec<String>,

    /// Do not compress tensors with fewer elements, unless --compression-tensor names them. Tensors of one dimension, such as
    /// biases, also stay exact. 0 compresses all tensors
    #[arg(long, value_name = "ELEMENTS", default_value_t = COMPRESSION_MIN_DEFAULT, help_heading = "Training")]
    compression_min: usize,

    /// Apply the momentum on each rank before compression. With --optimizer momentum and nesterov, for topk and randomk:
    /// momentum correction of Deep Gradient Compression; --clip-norm then clips the gradient of each rank to NORM divided by
    /// the root of the number of ranks. With adam and adamw: 1-bit Adam, which sums exact gradients in the warm-up, then keeps
    /// the variance and compresses the momentum; use it with --compression onebit and --compression-warmup
    #[arg(long, help_heading = "Training")]
    compression_momentum: bool,

    /// Compress less at the start of the run. topk and randomk send four falling fractions: with 0.001, 25%, 6.3%, 1.6% and
    /// 0.4%. Adam with --compression-momentum sums exact gradients. 500 means during the first 500 steps. 4e means during
    /// the first 4 epochs
    #[arg(
        long,
        value_name = "STEPS|COUNTe",
        default_value = "0",
        allow_negative_numbers = true,
        help_heading = "Training"
    )]
    compression_warmup: String,
}

/// The checked values of [`CompressionArgs`].
pub(super) struct CompressionChoice {
    pub(super) compression: Compression,
    pub(super) rules: CompressionRules,
    /// Whether the momentum is applied before compression.
    pub(super) momentum: bool,
    pub(super) warmup: Warmup,
}

impl CompressionArgs {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong and what to do.
    pub(super) fn to_compression_choice(&self) -> Result<CompressionChoice, String> {
        let compression =
            self.compression.parse::<Compression>().map_err(|why| format!("--compression {why}"))?;
        let excluded =
            self.compression_exclude.iter().map(|pattern| Ok((pattern.clone(), Compression::None)));
        let named = self.compression_tensor.iter().map(|text| {
            let (pattern, codec) = text.rsplit_once('=').ok_or_else(|| {
                format!("--compression-tensor {text}: it must be PATTERN=CODEC, such as layers.0.=int8")
            })?;
            let codec = codec.parse().map_err(|why| format!("--compression-tensor {text}: {why}"))?;
            Ok((pattern.to_owned(), codec))
        });
        let tensors = excluded.chain(named).collect::<Result<Vec<_>, String>>()?;
        let warmup = self.compression_warmup.parse().map_err(|why| format!("--compression-warmup: {why}"))?;
        let rules = CompressionRules { tensors, elements_min: self.compression_min };
        Ok(CompressionChoice { compression, rules, momentum: self.compression_momentum, warmup })
    }
}
