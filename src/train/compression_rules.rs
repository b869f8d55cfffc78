//! Which compression each tensor of a model has.

use glob::Pattern;

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
    /// Returns an error if a pattern is not valid. The sentence says what to do.
    pub(crate) fn check(&self) -> Result<(), String> {
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
