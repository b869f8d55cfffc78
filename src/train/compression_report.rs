//! What compression has saved in a run, and which codecs `auto` has chosen.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::compression_reach::CompressionReach;
use crate::group::{AutoReport, Statistics};

/// The effect of `--compression` on what rank 0 sent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CompressionReport {
    /// The bytes of the encoded elements that rank 0 sent to other hosts, without frame headers. The factors of `PowerSGD` do not
    /// count. 0 if all ranks share memory.
    pub encoded_bytes: u64,
    /// The bytes that these elements take without compression.
    pub unencoded_bytes: u64,
    /// With `auto`: the choice for each buffer at the end of the run. Empty with other compressions, and if `reach` is not
    /// `Full`.
    pub choices: Vec<CodecChoice>,
    /// Whether the ranks could compress anything. Not in reports as JSON.
    #[serde(skip)]
    pub reach: CompressionReach,
}

/// What `auto` has chosen for a buffer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CodecChoice {
    /// The name of the codec.
    pub codec: String,
    /// The relative error of a result with this codec. `None` if it was not measured.
    pub relative_error: Option<f32>,
    /// The time of a sum in the last trial, in seconds, on the slowest rank. `None` before the end of the first trial, or if the
    /// ranks that summed the buffer are on one host.
    pub seconds: Option<f32>,
}

impl CompressionReport {
    /// Creates the report of a run, from the group's statistics at its start and end, and from the choices of `auto`.
    pub(crate) fn new(
        (start, end): (&Statistics, &Statistics),
        choices: Vec<AutoReport>,
        reach: CompressionReach,
    ) -> Self {
        let elements = end.encoded_elements - start.encoded_elements;
        Self {
            encoded_bytes: end.encoded_bytes - start.encoded_bytes,
            unencoded_bytes: elements * size_of::<f32>() as u64,
            choices: choices.into_iter().map(CodecChoice::from).collect(),
            reach,
        }
    }

    /// Describes the effect for the user. Returns `None` if nothing of it was counted, as with `PowerSGD`.
    pub fn describe(&self) -> Option<String> {
        match self.reach {
            CompressionReach::OneRank => {
                return Some("compression had no effect, because there is only one rank".into());
            }
            CompressionReach::SharedMemory => {
                return Some("compression had no effect, because all ranks share memory".into());
            }
            CompressionReach::OneHost => {
                return Some("auto sent exact elements, because all ranks are on one host".into());
            }
            CompressionReach::Full => {}
        }
        let mut text = String::new();
        if self.unencoded_bytes > 0 {
            let (unit, unit_bytes) = if self.unencoded_bytes < 1_000_000 { ("kB", 1e3) } else { ("MB", 1e6) };
            let [before, after] =
                [self.unencoded_bytes, self.encoded_bytes].map(|bytes| bytes as f64 / unit_bytes);
            let _ = write!(text, "compressed {before:.1} {unit} of gradients to {after:.1} {unit}");
        }
        let mut counts = BTreeMap::new();
        for CodecChoice { codec, .. } in &self.choices {
            *counts.entry(codec.as_str()).or_insert(0) += 1;
        }
        for (index, (codec, count)) in counts.into_iter().enumerate() {
            let before = match index {
                0 if text.is_empty() => "auto chose",
                0 => "; auto chose",
                _ => ",",
            };
            let _ = write!(text, "{before} {codec} for {count} of {} buffers", self.choices.len());
        }
        (!text.is_empty()).then_some(text)
    }
}

impl From<AutoReport> for CodecChoice {
    fn from(AutoReport { compression, relative_error, seconds, .. }: AutoReport) -> Self {
        Self { codec: compression.to_string(), relative_error, seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_bytes_and_the_choices_or_the_reason_why_there_are_none() {
        use CompressionReach::{Full, OneHost, OneRank, SharedMemory};
        let choice = |codec: &str| CodecChoice { codec: codec.into(), relative_error: None, seconds: None };
        for (reach, unencoded_bytes, codecs, expected) in [
            (
                Full,
                5_000_000,
                &["int8", "none", "int8"][..],
                "compressed 5.0 MB of gradients to 1.3 MB; auto chose int8 for 2 of 3 buffers, none for 1 of 3 buffers",
            ),
            (Full, 16_000, &[], "compressed 16.0 kB of gradients to 4.0 kB"),
            (Full, 0, &["none"], "auto chose none for 1 of 1 buffers"),
            (Full, 0, &[], ""),
            // Regression test: the text of these runs was "compressed 0.0 MB of gradients to 0.0 MB".
            (OneRank, 0, &[], "compression had no effect, because there is only one rank"),
            (SharedMemory, 0, &[], "compression had no effect, because all ranks share memory"),
            (OneHost, 0, &[], "auto sent exact elements, because all ranks are on one host"),
        ] {
            let choices = codecs.iter().map(|codec| choice(codec)).collect();
            let encoded_bytes = unencoded_bytes * 252 / 1000;
            let report = CompressionReport { encoded_bytes, unencoded_bytes, choices, reach };
            assert_eq!(report.describe().unwrap_or_default(), expected);
        }
    }
}
