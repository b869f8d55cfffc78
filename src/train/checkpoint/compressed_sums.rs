//! The tensors of checkpoints that hold what ranks remember of compressed sums.

use crate::train::compression_memory::CompressionMemory;

/// The name of the tensor that holds [`CompressionMemory::results`].
const RESULTS_TENSOR: &str = "compression.results";
/// The name of the tensor that holds [`CompressionMemory::factors`].
const FACTORS_TENSOR: &str = "compression.factors";

/// Returns the name of the tensor that holds what a rank has not sent.
fn residual_tensor(rank: u32) -> String {
    format!("compression.residual.{rank}")
}

/// Returns the name of the tensor that holds the velocity of a rank.
fn velocity_tensor(rank: u32) -> String {
    format!("compression.velocity.{rank}")
}

/// Returns the names and the values of the tensors of `memory`.
pub(super) fn compression_tensors(memory: &CompressionMemory) -> impl Iterator<Item = (String, &Vec<f32>)> {
    let residuals = memory.residuals.iter().zip(0..).map(|(values, rank)| (residual_tensor(rank), values));
    let velocities = memory.velocities.iter().zip(0..).map(|(values, rank)| (velocity_tensor(rank), values));
    let common = [(RESULTS_TENSOR, &memory.results), (FACTORS_TENSOR, &memory.factors)];
    let common = common.into_iter().filter(|(_, values)| !values.is_empty());
    residuals.chain(velocities).chain(common.map(|(name, values)| (name.to_owned(), values)))
}

/// Reads the tensors of [`compression_tensors`]. `names` are the names of all tensors of the checkpoint, and `read` reads one of
/// them.
pub(super) fn read_compression_memory<E>(
    names: &[&str],
    read: impl Fn(&str) -> Result<Vec<f32>, E>,
) -> Result<CompressionMemory, E> {
    let mut memory = CompressionMemory::default();
    for name in (0..).map(residual_tensor).take_while(|name| names.contains(&name.as_str())) {
        memory.residuals.push(read(&name)?);
    }
    for name in (0..).map(velocity_tensor).take_while(|name| names.contains(&name.as_str())) {
        memory.velocities.push(read(&name)?);
    }
    for (name, values) in [(RESULTS_TENSOR, &mut memory.results), (FACTORS_TENSOR, &mut memory.factors)] {
        if names.contains(&name) {
            *values = read(name)?;
        }
    }
    Ok(memory)
}
