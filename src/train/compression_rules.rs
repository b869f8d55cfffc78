//! Which compression each tensor of a model has.

use glob::Pattern;

use super::strategies::StrategySpec;
use crate::codec::Compression;

/// The default of [`CompressionRules::elements_min`]. Smaller tensors are a small part of a model, but errors in biases and
/// norms cost accuracy.
pub const COMPRESSION_MIN_DEFAULT: usize = 1024;
/// The number of names of tensors in an error message.
const NAMES_SHOWN_MAX: usize = 8;

/// Exceptions from [`Config::compression`](super::Config::compression) for some tensors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompressionRules {
    /// Patterns and the compressions of the tensors whose names they match, such as `layers.0.weight`. A pattern matches a name
    /// as a glob (`layers.*.weight`), or if the name contains the pattern. The first pattern that matches counts.
    pub tensors: Vec<(String, Compression)>,
    /// Tensors that no pattern matches stay exact if they have fewer elements, or only one dimension, as biases and norms have.
    /// With 0, all tensors are compressed.
    pub elements_min: usize,
}

impl Default for CompressionRules {
    fn default() -> Self {
        Self { tensors: Vec::new(), elements_min: COMPRESSION_MIN_DEFAULT }
    }
}

impl CompressionRules {
    /// Returns the compressions of the rules, and `default`, the compression of all other tensors.
    pub(crate) fn codecs(&self, default: Compression) -> impl Iterator<Item = Compression> {
        self.tensors.iter().map(|(_, codec)| *codec).chain([default])
    }

    /// Returns the largest number of vectors, as long as the parameters, that a checkpoint has because of compression on `ranks`
    /// ranks.
    pub(crate) fn saved_vectors(
        &self,
        default: Compression,
        (strategy, ranks): (StrategySpec, usize),
    ) -> usize {
        let with_feedback = self.codecs(default).any(Compression::needs_error_feedback);
        let with_results = self.codecs(default).any(Compression::adds_last_result);
        let with_factors = self.codecs(default).any(|codec| matches!(codec, Compression::PowerSgd(_)));
        // Workers do not save what they have not pushed.
        let ranks = if strategy.uses_parameter_server() { 0 } else { ranks };
        ranks * usize::from(with_feedback) + usize::from(with_results) + usize::from(with_factors)
    }

    /// Checks that the compressions fit the strategy.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which options do not fit together and what to do.
    pub(crate) fn check_options(&self, default: Compression, strategy: StrategySpec) -> Result<(), String> {
        self.check_patterns()?;
        if self.codecs(default).all(|codec| codec == Compression::None) {
            return match self.tensors.first() {
                Some((pattern, _)) => Err(format!(
                    "--compression-exclude {pattern} needs --compression, which says how the other tensors are sent"
                )),
                None => Ok(()),
            };
        }
        match strategy {
            StrategySpec::Gossip { .. } => Err(format!(
                "--compression {default} does not apply to --strategy {strategy}, which sends f32; leave out --compression"
            )),
            StrategySpec::PsSync | StrategySpec::PsAsync { .. } => self.check_with_servers(default, strategy),
            StrategySpec::LocalSgd { .. }
            | StrategySpec::DiLoCo { .. }
            | StrategySpec::ModelAverage { .. }
                if self.codecs(default).any(|codec| codec == Compression::SignSgd) =>
            {
                Err(format!(
                    "--compression signsgd is for gradients, but with --strategy {strategy} the ranks average changes of parameters, \
                     and the votes say nothing about their size; pass --compression onebit"
                ))
            }
            _ => Ok(()),
        }
    }

    /// A server encodes whole shards, also biases, so the codec must be exact enough for biases.
    fn check_with_servers(&self, default: Compression, strategy: StrategySpec) -> Result<(), String> {
        use Compression::{Bf16, Fp8, Fp16, Int8};
        if !matches!(default, Fp16 | Bf16 | Fp8(_) | Int8(_)) {
            return Err(format!(
                "--compression {default} does not apply to --strategy {strategy}; pass bf16, fp16, fp8-e4m3, fp8-e5m2, int8 or \
                 int8-stochastic"
            ));
        }
        if !self.tensors.is_empty() {
            return Err(format!(
                "--compression-exclude and --compression-tensor do not apply to --strategy {strategy}, which compresses all \
                 gradients; leave them out"
            ));
        }
        Ok(())
    }

    /// Returns an error if a pattern is not valid.
    fn check_patterns(&self) -> Result<(), String> {
        for (pattern, _) in &self.tensors {
            if pattern.is_empty() {
                return Err("the pattern of --compression-exclude or --compression-tensor is empty; pass a part of the name of a \
                            tensor, such as layers.0."
                    .into());
            }
            if let Err(error) = Pattern::new(pattern) {
                return Err(format!(
                    "the pattern `{pattern}` of --compression-exclude or --compression-tensor is not valid ({error})"
                ));
            }
        }
        Ok(())
    }

    /// Returns the compression of a tensor.
    pub(crate) fn compression_of(&self, name: &str, shape: &[usize], default: Compression) -> Compression {
        let matching = self.tensors.iter().find(|(pattern, _)| matches_name(pattern, name));
        let elements: usize = shape.iter().product();
        let is_small = elements < self.elements_min || self.elements_min > 0 && shape.len() < 2;
        match matching {
            Some((_, compression)) => *compression,
            None if is_small => Compression::None,
            None => default,
        }
    }

    /// Returns an error if a pattern matches none of the names, because it is probably misspelled.
    pub(crate) fn check_all_match(&self, names: &[&str]) -> Result<(), String> {
        for (pattern, _) in &self.tensors {
            if !names.iter().any(|name| matches_name(pattern, name)) {
                let shown = &names[..names.len().min(NAMES_SHOWN_MAX)];
                let more = if names.len() > NAMES_SHOWN_MAX { ", ..." } else { "" };
                return Err(format!(
                    "the pattern `{pattern}` of --compression-exclude or --compression-tensor matches no tensor of the model; its \
                     tensors are {}{more}",
                    shown.join(", ")
                ));
            }
        }
        Ok(())
    }
}

fn matches_name(pattern: &str, name: &str) -> bool {
    name.contains(pattern) || Pattern::new(pattern).is_ok_and(|glob| glob.matches(name))
}
