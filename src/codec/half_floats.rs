//! Compression to half-precision types. Each `f32` is rounded to the nearest half-precision value, with ties to even.

use std::fmt::Debug;
use std::marker::PhantomData;

use super::interface::{DecodeError, RandomKeys};
use super::vectorised::{CodecLoops, TILE};
use crate::simd::HalfFloat;

/// The codec of a half-precision type: `f16` (IEEE 754 binary16) or `bf16` (bfloat16). Rounds to nearest, ties to even.
///
/// - Cost: 2 bytes for each element. The last word of an odd number of elements is half used.
/// - Error: relative, at most 2^-11 (`f16`, for absolute values from 2^-14 to 65,504) or 2^-8 (`bf16`).
/// - `f16`: absolute values below 2^-14 have an error of at most 2^-25; absolute values from 65,520 become infinite.
/// - NaN and infinities are kept, and a NaN becomes quiet. Zeros keep their sign. Subnormal `f32` become zero as `f16`,
///   and keep an error of at most 2^-134 as `bf16`. As `bf16`, values that round beyond the largest finite value become
///   infinite.
#[derive(Clone, Copy, Debug)]
pub(super) struct HalfFloats<H>(PhantomData<H>);

impl<H> HalfFloats<H> {
    /// Creates the codec.
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<H: HalfFloat + Send + Sync + Debug> CodecLoops for HalfFloats<H> {
    fn encoded_words(&self, count: usize) -> usize {
        count.div_ceil(2)
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], _: RandomKeys, words: &mut [u32]) {
        // The second half of the last word may belong to no element.
        if let Some(last) = words.last_mut() {
            *last = 0;
        }
        H::round(values, &mut bytemuck::cast_slice_mut::<u32, H>(words)[..values.len()]);
    }

    #[inline(always)]
    fn decode(&self, words: &[u32], _: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        H::widen(&bytemuck::cast_slice::<u32, H>(words)[..values.len()], values);
        Ok(())
    }

    fn tile_elements(&self) -> Option<usize> {
        Some(TILE)
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::test_support::{
        KEYS, check_against_reference, check_finite_chunks, check_hostile_words, encode, lengths, round_trip,
    };
    use super::*;

    /// 2^-134, half a unit in the last place of a subnormal `bf16`.
    const SUBNORMAL_ERROR: f32 = f32::from_bits(1 << 15);

    /// Packs two halves in each word.
    fn pack(halves: impl Iterator<Item = u16>) -> Vec<u32> {
        let halves: Vec<u32> = halves.map(u32::from).collect();
        halves.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 16).collect()
    }

    fn half_at(words: &[u32], index: usize) -> u16 {
        (words[index / 2] >> (16 * (index % 2))) as u16
    }

    #[test]
    fn half_precision_gives_the_same_bits_as_the_half_crate() {
        check_against_reference(
            HalfFloats::<f16>::new(),
            lengths(32),
            |values| pack(values.iter().map(|&value| f16::from_f32_const(value).to_bits())),
            |words, count| (0..count).map(|i| f16::from_bits(half_at(words, i)).to_f32_const()).collect(),
        );
        check_against_reference(
            HalfFloats::<bf16>::new(),
            lengths(32),
            |values| pack(values.iter().map(|&value| bf16::from_f32_const(value).to_bits())),
            |words, count| (0..count).map(|i| bf16::from_bits(half_at(words, i)).to_f32_const()).collect(),
        );
    }

    #[test]
    fn errors_are_within_their_bounds() {
        check_finite_chunks(HalfFloats::<f16>::new(), |values, decoded| {
            for (&value, &decoded) in values.iter().zip(decoded) {
                let bound = (value.abs() * 2f32.powi(-11)).max(2f32.powi(-25));
                let is_close =
                    (value - decoded).abs() <= bound || value.abs() >= 65_520.0 && decoded.is_infinite();
                assert!(is_close, "{value} decodes to {decoded}");
            }
        });
        check_finite_chunks(HalfFloats::<bf16>::new(), |values, decoded| {
            for (&value, &decoded) in values.iter().zip(decoded) {
                let bound = (value.abs() * 2f32.powi(-8)).max(SUBNORMAL_ERROR);
                let is_close =
                    (value - decoded).abs() <= bound || value.abs() > 3.38e38 && decoded.is_infinite();
                assert!(is_close, "{value} decodes to {decoded}");
            }
        });
    }

    #[test]
    fn special_values_are_kept_and_large_values_overflow() {
        let values =
            [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 65_519.0, 65_520.0, f32::MAX, 1e-40, f32::NAN];
        let f16s = round_trip(HalfFloats::<f16>::new(), &values, KEYS);
        let infinite = f32::INFINITY;
        assert_eq!(f16s[..8], [0.0, -0.0, infinite, -infinite, 65_504.0, infinite, infinite, 0.0]);
        assert!(f16s[8].is_nan() && f16s[1].is_sign_negative());
        let bf16s = round_trip(HalfFloats::<bf16>::new(), &values, KEYS);
        assert_eq!(bf16s[..7], [0.0, -0.0, infinite, -infinite, 65_536.0, 65_536.0, infinite]);
        assert!(bf16s[8].is_nan() && (bf16s[7] - 1e-40).abs() <= SUBNORMAL_ERROR);
    }

    #[test]
    fn any_words_decode() {
        check_hostile_words(HalfFloats::<f16>::new());
        check_hostile_words(HalfFloats::<bf16>::new());
        assert_eq!(encode(HalfFloats::<f16>::new(), &[1.0; 3], KEYS), [0x3c00_3c00, 0x3c00]);
    }
}
