//! Conversions between `f32` and half-precision types, as loops that the compiler can vectorise.

use half::{bf16, f16};

/// A half-precision type.
pub trait HalfFloat: bytemuck::Pod {
    /// Converts elements to `f32`.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds numbers to elements of this type.
    fn round(from: &[f32], to: &mut [Self]);
}

impl HalfFloat for f16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (wide, narrow) in to.iter_mut().zip(from) {
            *wide = widen_f16(*narrow);
        }
    }

    #[inline(always)]
    fn round(from: &[f32], to: &mut [Self]) {
        for (narrow, wide) in to.iter_mut().zip(from) {
            *narrow = round_to_f16(*wide);
        }
    }
}

/// The index of the lowest exponent bit in an `f32`.
const EXPONENT_SHIFT: u32 = 23;
/// The encoded exponent of 1.0 in an `f32`.
const EXPONENT_OF_ONE: u32 = 127;

/// Converts an `f16` to an `f32`, with the same bits as the processor's own conversion. This code has no branches, so
/// that the compiler can vectorise the loop. A library call for every eight elements would take four times as long. The
/// method is `half_to_float_fast4` by Fabian Giesen.
#[inline(always)]
fn widen_f16(narrow: f16) -> f32 {
    let bits = u32::from(narrow.to_bits());
    let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
    let exponent = magnitude & (0x7c00 << 13);
    let normal = magnitude + ((EXPONENT_OF_ONE - 15) << EXPONENT_SHIFT);
    // A subnormal number is 2^-14 times its fraction. `least` encodes 2^-14, and `magnitude + least` encodes 2^-14
    // times (1 + fraction), so their difference is the number.
    let least = (EXPONENT_OF_ONE - 14) << EXPONENT_SHIFT;
    let subnormal = (f32::from_bits(magnitude + least) - f32::from_bits(least)).to_bits();
    let quiet = u32::from(magnitude > 0x7c00 << 13) << 22;
    let infinite = (normal + (112 << EXPONENT_SHIFT)) | quiet;
    let finite = if exponent == 0 { subnormal } else { normal };
    f32::from_bits(sign | if exponent == 0x7c00 << 13 { infinite } else { finite })
}

/// Rounds an `f32` to the nearest `f16`, ties to even. A NaN keeps its upper bits and becomes quiet. The method is
/// `float_to_half_fast3_rtne` by Fabian Giesen.
#[inline(always)]
fn round_to_f16(wide: f32) -> f16 {
    let bits = wide.to_bits();
    let (sign, magnitude) = ((bits >> 16) as u16 & 0x8000, bits & 0x7fff_ffff);
    // For a subnormal result, the addition of `ulp` rounds the number, and the last bits of the sum are the result.
    let ulp = (EXPONENT_OF_ONE - 15 + 13 + 1) << EXPONENT_SHIFT;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ulp)).to_bits().wrapping_sub(ulp);
    let is_odd = (magnitude >> 13) & 1;
    let normal =
        magnitude.wrapping_sub((EXPONENT_OF_ONE - 15) << EXPONENT_SHIFT).wrapping_add(0xfff + is_odd) >> 13;
    let finite = if magnitude < (EXPONENT_OF_ONE - 14) << EXPONENT_SHIFT { subnormal } else { normal };
    let nan = 0x7e00 | ((magnitude >> 13) & 0x1ff);
    let infinite = if magnitude > 0xff << EXPONENT_SHIFT { nan } else { 0x7c00 };
    let all = if magnitude >= (EXPONENT_OF_ONE + 16) << EXPONENT_SHIFT { infinite } else { finite };
    f16::from_bits(sign | all as u16)
}

impl HalfFloat for bf16 {
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
            // The carry of the addition rounds the upper half to nearest, ties to even. For a NaN, one bit is set
            // instead, so that the result is a quiet NaN.
            let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
            let nan = ((bits >> 16) as u16) | 0x40;
            *narrow = Self::from_bits(if wide.is_nan() { nan } else { rounded });
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    #[test]
    fn widen_f16_agrees_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let narrow = f16::from_bits(bits);
            assert_eq!(widen_f16(narrow).to_bits(), narrow.to_f32_const().to_bits(), "{bits:04x}");
        }
    }

    #[test]
    fn round_to_f16_agrees_with_the_half_crate() {
        let check = |bits: u32| {
            let wide = f32::from_bits(bits);
            assert_eq!(round_to_f16(wide).to_bits(), f16::from_f32_const(wide).to_bits(), "{bits:08x}");
        };
        // Checks every f16, the f32 half-way to the next f16, and the neighbours of these two values.
        for narrow in 0..=u16::MAX {
            let exact = f16::from_bits(narrow).to_f32_const().to_bits();
            for near in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
                check(exact.wrapping_add(near));
                check(exact.wrapping_sub(near));
            }
        }
        let mut random = StdRng::seed_from_u64(16);
        for _ in 0..if cfg!(miri) { 1_000 } else { 1_000_000 } {
            check(random.random());
        }
    }
}
