//! Measures compressed all-reduces and reduce-scatters (`--compression`).

use std::io::{self, Write};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;

use super::operation::BenchOperation;
use super::plan::BenchCase;
use crate::codec::Compression;
use crate::group::verbs::{AllReduce, ReduceScatter};
use crate::group::{Compressor, Error, Group};
use crate::types::ReduceOp;

/// What compression changes in a row.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CompressionResult {
    /// The codec.
    pub codec: String,
    /// The bytes of all encoded elements that rank 0 sent, divided by the bytes that they take without compression. `None` if
    /// nothing was encoded, because all ranks share memory or `auto` sends exact elements.
    pub fraction_of_bytes: Option<f64>,
    /// The relative error of a result: the Euclidean norm of its error, divided by that of the exact result. The inputs are
    /// random numbers with a mean of 0. `None` without `--check`.
    pub relative_error: Option<f64>,
}

/// Returns a random number. Sums of uniform numbers are nearly normal, like gradients.
fn random_value(random: &mut StdRng) -> f32 {
    (0..4).map(|_| random.random_range(-1.0f32..1.0)).sum()
}

/// Returns the contribution of a rank to the timed calls.
pub(super) fn random_values(count: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random_value(&mut random)).collect()
}

/// Returns the codec that a compressor uses now.
pub(super) fn used_codec(compressor: &Compressor) -> Compression {
    compressor.report().map_or(compressor.compression(), |report| report.compression)
}

/// Returns the name of the compression, and the codec that it has chosen.
pub(super) fn codec_name(compressor: &Compressor) -> String {
    match compressor.report() {
        Some(report) => format!("{} chose {}", compressor.compression(), report.compression),
        None => compressor.compression().to_string(),
    }
}

/// Runs the operation of a compressed case once, in place.
pub(super) fn run_once(
    group: &mut Group,
    case: BenchCase,
    buffer: &mut [f32],
    compressor: &Compressor,
) -> Result<(), Error> {
    let op = case.reduction.unwrap_or(ReduceOp::Sum);
    if case.operation == BenchOperation::ReduceScatter {
        group.call(ReduceScatter::new(op).compressed(compressor)).run(buffer).map(drop)
    } else {
        group.call(AllReduce::new(op).compressed(compressor)).run(buffer).map(drop)
    }
}

/// Runs the operation with random input. Returns the number of elements that have different bits on different ranks, and the
/// relative error of the result.
pub(super) fn check(
    group: &mut Group,
    case: BenchCase,
    compression: Compression,
    seed: u64,
) -> Result<(u64, f64), Error> {
    let mut random = StdRng::seed_from_u64(seed << 32 | u64::from(group.rank().get()));
    let mut found: Vec<f32> = (0..case.count).map(|_| random_value(&mut random)).collect();
    let mut exact: Vec<f64> = found.iter().map(|&element| f64::from(element)).collect();
    group.all_reduce(&mut exact, case.reduction.unwrap_or(ReduceOp::Sum))?;
    run_once(group, case, &mut found, &Compressor::new(compression))?;
    let (result, wrong) = if case.operation == BenchOperation::ReduceScatter {
        (group.chunk(case.count, group.rank()), 0)
    } else {
        let bits: Vec<u32> = found.iter().map(|element| element.to_bits()).collect();
        let (mut lowest, mut highest) = (bits.clone(), bits);
        group.all_reduce(&mut lowest, ReduceOp::Min)?;
        group.all_reduce(&mut highest, ReduceOp::Max)?;
        (0..case.count, lowest.iter().zip(&highest).filter(|(low, high)| low != high).count() as u64)
    };
    let squares =
        |error: &dyn Fn(usize) -> f64| result.clone().map(|index| error(index).powi(2)).sum::<f64>();
    let mut sums = [squares(&|index| f64::from(found[index]) - exact[index]), squares(&|index| exact[index])];
    group.all_reduce(&mut sums, ReduceOp::Sum)?;
    Ok((wrong, (sums[0] / sums[1].max(f64::MIN_POSITIVE)).sqrt()))
}

/// Returns the fraction of bytes that a group has sent since `before`, which are its number of encoded elements and of their
/// bytes.
pub(super) fn fraction_of_bytes(group: &Group, before: (u64, u64)) -> Option<f64> {
    let (elements, bytes) = encoded(group);
    let unencoded_bytes = (elements - before.0) * size_of::<f32>() as u64;
    (unencoded_bytes > 0).then(|| (bytes - before.1) as f64 / unencoded_bytes as f64)
}

/// Returns the number of elements that this rank has encoded, and of their bytes.
pub(super) fn encoded(group: &Group) -> (u64, u64) {
    let statistics = group.statistics();
    (statistics.encoded_elements, statistics.encoded_bytes)
}

impl CompressionResult {
    /// Writes the line below the row.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let bytes = match self.fraction_of_bytes {
            Some(fraction) => format!("{fraction:.4} of the bytes"),
            None => "nothing was encoded".into(),
        };
        let error =
            self.relative_error.map_or_else(String::new, |error| format!(", relative error {error:.2e}"));
        writeln!(out, "#   {}: {bytes}{error}", self.codec)
    }
}
