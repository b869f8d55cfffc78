//! Reductions of half-precision types. For each block of elements, a reduction converts the elements to `f32`,
//! reduces them, and rounds each result once. A block is small enough for the processor's L1 cache.

use super::arithmetic::{BinaryReduction, FinalStep, reduce_slice};
use crate::simd::HalfFloat;

/// The number of elements of a block. As `f32`, a block takes 2 KiB.
const BLOCK_ELEMENTS: usize = 512;

/// Computes `accumulator[i] = F::apply(R::combine(accumulator[i], input[i]), average_divisor)` for all elements, in blocks
/// of `f32`.
#[inline(always)]
pub(super) fn reduce_half_slice<H: HalfFloat, R: BinaryReduction<f32>, F: FinalStep<f32>>(
    accumulator: &mut [H],
    input: &[H],
    average_divisor: u32,
) {
    let (mut wide_a, mut wide_b) = ([0f32; BLOCK_ELEMENTS], [0f32; BLOCK_ELEMENTS]);
    for (a, b) in accumulator.chunks_mut(BLOCK_ELEMENTS).zip(input.chunks(BLOCK_ELEMENTS)) {
        let (wide_a, wide_b) = (&mut wide_a[..a.len()], &mut wide_b[..b.len()]);
        H::widen(a, wide_a);
        H::widen(b, wide_b);
        reduce_slice::<f32, R, F>(wide_a, wide_b, average_divisor);
        H::round(wide_a, a);
    }
}
