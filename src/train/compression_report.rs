//! What compression has saved in a run, and which codecs `auto` has chosen.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::group::{AutoReport, Statistics};

/// The effect of `--compression` on what rank 0 sent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CompressionReport {
    /// The bytes of the encoded elements that rank 0 sent to other hosts, without frame headers. The factors of `PowerSGD` do not
    /// count. 0 if all ranks share memory.
    pub encoded_bytes: u64,
    /// The bytes that these elements take without compression.
    pub unencoded_bytes: u64,
    /// With `auto`: the choice for each buffer at the end of the run. Empty with other compressions.
    pub choices: Vec<CodecChoice>,
}

/// What `auto` has chosen for a buffer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CodecChoice {
    /// The name of the codec.
    pub codec: String,
    /// The relative error of a result with this codec. `None` if it was not measured.
    pub relative_error: Option<f32>,
    /// The time of a sum in the last trial, in seconds, on the slowest rank. `None` before the end of the first trial, or if all
    /// ranks are on one host.
    pub seconds: Option<f32>,
}

impl CompressionReport {
    /// Creates the report of a run, from the group's statistics at its start and at its end, and from the choices of `auto`.
    pub(crate) fn new(start: &Statistics, end: &Statistics, choices: Vec<AutoReport>) -> Self {
        let elements = end.encoded_elements - start.encoded_elements;
        Self {
            encoded_bytes: end.encoded_bytes - start.encoded_bytes,
            unencoded_bytes: elements * size_of::<f32>() as u64,
            choices: choices.into_iter().map(CodecChoice::from).collect(),
        }
    }
}

impl From<AutoReport> for CodecChoice {
    fn from(AutoReport { compression, relative_error, seconds, .. }: AutoReport) -> Self {
        Self { codec: compression.to_string(), relative_error, seconds }
    }
}

impl fmt::Display for CompressionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        write!(
            f,
            "compressed {:.1} MB of gradients to {:.1} MB",
            megabytes(self.unencoded_bytes),
            megabytes(self.encoded_bytes)
        )?;
        let mut counts = BTreeMap::new();
        for CodecChoice { codec, .. } in &self.choices {
            *counts.entry(codec.as_str()).or_insert(0) += 1;
        }
        let mut before = "; auto chose";
        for (codec, count) in counts {
            write!(f, "{before} {codec} for {count} of {} buffers", self.choices.len())?;
            before = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_bytes_and_the_choices() {
        let choice = |codec: &str| CodecChoice { codec: codec.into(), relative_error: None, seconds: None };
        let choices = ["int8", "none", "int8"].map(choice).to_vec();
        let report = CompressionReport { encoded_bytes: 1_260_000, unencoded_bytes: 5_000_000, choices };
        let expected = "compressed 5.0 MB of gradients to 1.3 MB; auto chose int8 for 2 of 3 buffers, none for 1 of 3 buffers";
        assert_eq!(report.to_string(), expected);
        assert_eq!(CompressionReport::default().to_string(), "compressed 0.0 MB of gradients to 0.0 MB");
    }
}
