//! The encoding of the results of a run as words of 4 bytes, so that one rank can send them to the other ranks.

use super::TrainError;
use super::report::Report;
use super::run::Summary;

/// The maximum length of the report of a run, in words of 4 bytes.
pub(super) const REPORT_WORDS_MAX: usize = 1 << 28;

/// Encodes the results of a run as words: the bits of the parameters, the length of the report in bytes, and the
/// report as JSON.
pub(super) fn encode_summary(summary: &Summary) -> Result<Vec<u32>, TrainError> {
    let text = serde_json::to_vec(&summary.report).map_err(|error| TrainError::Options(error.to_string()))?;
    let mut words: Vec<u32> = summary.parameters.iter().map(|value| value.to_bits()).collect();
    words.push(text.len() as u32);
    words.extend(text.chunks(4).map(|chunk| {
        let mut bytes = [b' '; 4];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u32::from_ne_bytes(bytes)
    }));
    Ok(words)
}

/// Decodes the results of a run of a model with `parameter_count` parameters. Returns `None` if the words have
/// another format.
pub(super) fn decode_summary(words: &[u32], parameter_count: usize) -> Option<Summary> {
    let (parameters, rest) = words.split_at_checked(parameter_count)?;
    let (&length, rest) = rest.split_first()?;
    let text: &[u8] = bytemuck::cast_slice(rest);
    let report: Report = serde_json::from_slice(text.get(..length as usize)?).ok()?;
    Some(Summary { report, parameters: parameters.iter().map(|&bits| f32::from_bits(bits)).collect() })
}
