//! Half-precision types: widened to `f32` in blocks that stay in L1, combined, rounded once.

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use super::arithmetic::{Finish, Reduction, each};

/// Elements widened at a time: 2 KiB of `f32` on each side.
const BLOCK: usize = 512;

/// A type that is computed with in `f32`.
pub(super) trait Half: bytemuck::Pod {
    fn widen(from: &[Self], to: &mut [f32]);
    fn round(from: &[f32], to: &mut [Self]);
}

impl Half for f16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn round(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Half for bf16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (wide, narrow) in to.iter_mut().zip(from) {
            *wide = f32::from_bits(u32::from(narrow.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn round(from: &[f32], to: &mut [Self]) {
        for (narrow, wide) in to.iter_mut().zip(from) {
            let bits = wide.to_bits();
            // To nearest, ties to even, by carrying into the upper half; a NaN keeps a bit set and stays quiet.
            let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
            let nan = ((bits >> 16) as u16) | 0x40;
            *narrow = Self::from_bits(if wide.is_nan() { nan } else { rounded });
        }
    }
}

/// The loop over half-precision numbers, block by block through `f32`.
#[inline(always)]
pub(super) fn each_half<H: Half, R: Reduction<f32>, F: Finish<f32>>(
    accumulator: &mut [H],
    input: &[H],
    divisor: u32,
) {
    let (mut wide_a, mut wide_b) = ([0f32; BLOCK], [0f32; BLOCK]);
    for (a, b) in accumulator.chunks_mut(BLOCK).zip(input.chunks(BLOCK)) {
        let (wide_a, wide_b) = (&mut wide_a[..a.len()], &mut wide_b[..b.len()]);
        H::widen(a, wide_a);
        H::widen(b, wide_b);
        each::<f32, R, F>(wide_a, wide_b, divisor);
        H::round(wide_a, a);
    }
}
