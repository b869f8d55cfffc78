//! 8-bit floats with one scale for each block of elements.

use std::fmt::Debug;
use std::marker::PhantomData;

use super::blocks::{BlockFormat, BlockRandom, largest_magnitude, pack_bytes, scale_of, write_not_finite};

/// The number of elements that share a scale.
pub(super) const FP8_BLOCK: usize = 256;

/// The number of mantissa bits of an `f32`.
const F32_MANTISSA_BITS: u32 = 23;
/// The encoded exponent of 1.0 in an `f32`.
const F32_BIAS: u32 = 127;
/// The bit of the sign in a code.
const SIGN: u32 = 0x80;

/// A format of 8-bit floats: a sign, an exponent and a mantissa, from the upper bits to the lower bits.
pub(super) trait Fp8Layout: Copy + Send + Sync + Debug {
    /// The number of mantissa bits.
    const MANTISSA_BITS: u32;
    /// The encoded exponent of 1.0.
    const BIAS: u32;
    /// The code of the largest finite value. Larger codes are infinity and NaNs.
    const LARGEST_CODE: u32;
    /// The largest finite value.
    const LARGEST: f32;
}

/// 4 bits of exponent and 3 bits of mantissa. This format has a NaN, but no infinity.
#[derive(Clone, Copy, Debug)]
pub(super) struct E4M3;

impl Fp8Layout for E4M3 {
    const MANTISSA_BITS: u32 = 3;
    const BIAS: u32 = 7;
    const LARGEST_CODE: u32 = 0x7e;
    const LARGEST: f32 = 448.0;
}

/// 5 bits of exponent and 2 bits of mantissa.
#[derive(Clone, Copy, Debug)]
pub(super) struct E5M2;

impl Fp8Layout for E5M2 {
    const MANTISSA_BITS: u32 = 2;
    const BIAS: u32 = 15;
    const LARGEST_CODE: u32 = 0x7b;
    const LARGEST: f32 = 57_344.0;
}

/// 8-bit floats. The scale of each block of 256 elements maps the largest absolute value to the largest finite 8-bit
/// float. An element is its 8-bit float times the scale. Rounds to nearest, ties to even.
///
/// - Cost: 1 byte for each element, and 4 bytes for each block: 1.016 bytes for each element.
/// - Error: relative, at most 2^-4 (E4M3, for absolute values from 2^-14.8 of the largest absolute value of the block)
///   or 2^-3 (E5M2, from 2^-29.8). Smaller elements have an absolute error of at most 2^-18.8 (E4M3) or 2^-32.8 (E5M2)
///   of the largest.
/// - All zeros decode to zeros, with their signs. If a block contains a NaN or an infinity, the whole block decodes to NaN.
/// - The scale is at least 2^-126, the smallest normal `f32`. So the absolute error of a subnormal element is at most 2^-127.
/// - Codes of infinity and NaN, which no encoder writes, decode to NaN.
/// - Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; Open Compute Project, "OCP 8-bit Floating Point
///   Specification (OFP8)", 2023.
///
/// The words of a block are the scale and the codes, one byte each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8<L>(PhantomData<L>);

impl<L> Fp8<L> {
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<L: Fp8Layout> BlockFormat<FP8_BLOCK> for Fp8<L> {
    #[inline(always)]
    fn block_words(&self, count: usize) -> usize {
        usize::from(count > 0) + count.div_ceil(4)
    }

    #[inline(always)]
    fn encode_block(&self, values: &[f32; FP8_BLOCK], _: usize, _: BlockRandom, words: &mut [u32]) {
        let Some(largest) = largest_magnitude(values) else { return write_not_finite(words) };
        let scale = scale_of(largest, L::LARGEST);
        words[0] = scale.to_bits();
        let (inverse, mut codes) = (1.0 / scale, [0; FP8_BLOCK]);
        for (code, &value) in codes.iter_mut().zip(values) {
            *code = encode_number::<L>(value * inverse);
        }
        pack_bytes(&codes, &mut words[1..]);
    }

    #[inline(always)]
    fn decode_block(&self, words: &[u32], values: &mut [f32; FP8_BLOCK]) {
        let scale = f32::from_bits(words[0]);
        for (value, &code) in values.iter_mut().zip(bytemuck::cast_slice::<u32, u8>(&words[1..])) {
            *value = decode_code::<L>(u32::from(code)) * scale;
        }
    }
}

/// Returns the code of the 8-bit float that is nearest to `number`, whose absolute value is at most
/// [`Fp8Layout::LARGEST`], or greater by a rounding error of `f32`.
#[inline(always)]
fn encode_number<L: Fp8Layout>(number: f32) -> u32 {
    let dropped = F32_MANTISSA_BITS - L::MANTISSA_BITS;
    let bits = number.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // The carry of the addition rounds to nearest, ties to even.
    let is_odd = magnitude >> dropped & 1;
    let rounded = magnitude + ((1 << (dropped - 1)) - 1) + is_odd;
    let normal = (rounded >> dropped).wrapping_sub((F32_BIAS - L::BIAS) << L::MANTISSA_BITS);
    // The unit in the last place of this float is the smallest 8-bit float. So the addition rounds to a multiple of the
    // smallest 8-bit float, and the last bits of the sum are the code.
    let rounder = (F32_BIAS + 1 - L::BIAS + dropped) << F32_MANTISSA_BITS;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(rounder)).to_bits().wrapping_sub(rounder);
    let is_subnormal = magnitude < (F32_BIAS + 1 - L::BIAS) << F32_MANTISSA_BITS;
    (bits >> 24 & SIGN) | if is_subnormal { subnormal } else { normal }
}

/// Returns the number with a code from 0 to 255.
#[inline(always)]
fn decode_code<L: Fp8Layout>(code: u32) -> f32 {
    let magnitude = code & !SIGN;
    let dropped = F32_MANTISSA_BITS - L::MANTISSA_BITS;
    let normal = (magnitude << dropped) + ((F32_BIAS - L::BIAS) << F32_MANTISSA_BITS);
    // The smallest 8-bit float.
    let unit = f32::from_bits((F32_BIAS + 1 - L::BIAS - L::MANTISSA_BITS) << F32_MANTISSA_BITS);
    let subnormal = (magnitude as i32 as f32 * unit).to_bits();
    let finite = if magnitude < 1 << L::MANTISSA_BITS { subnormal } else { normal };
    let bits = if magnitude > L::LARGEST_CODE { f32::NAN.to_bits() } else { finite };
    f32::from_bits((code & SIGN) << 24 | bits)
}

#[cfg(test)]
mod tests {
    use super::super::blocks::BlockCodec;
    use super::super::test_support::{
        KEYS, check_against_reference, check_finite_chunks, check_hostile_words, check_not_finite_elements,
        encode, lengths, round_trip,
    };
    use super::super::vectorised::CodecLoops;
    use super::*;

    fn fp8<L: Fp8Layout>() -> BlockCodec<Fp8<L>, FP8_BLOCK> {
        BlockCodec(Fp8::new())
    }

    /// Returns the number with a code, by the definition of the format. `None` for infinity and NaN.
    fn definition<L: Fp8Layout>(code: u32) -> Option<f32> {
        let (mantissa, exponent) = (code & ((1 << L::MANTISSA_BITS) - 1), (code & 0x7f) >> L::MANTISSA_BITS);
        let units = if exponent == 0 { mantissa } else { mantissa + (1 << L::MANTISSA_BITS) };
        let exponent = exponent.max(1) as i32 - L::BIAS as i32 - L::MANTISSA_BITS as i32;
        let magnitude = units as f32 * 2f32.powi(exponent);
        (code & 0x7f <= L::LARGEST_CODE).then_some(if code & SIGN == 0 { magnitude } else { -magnitude })
    }

    /// Returns the code of the nearest number, found by a search of all codes. Of two codes, the even one.
    fn nearest_code<L: Fp8Layout>(number: f32) -> u32 {
        let number_of = |code| definition::<L>(code).expect("the code is finite");
        let magnitude = number.abs();
        let codes: Vec<u32> = (0..=L::LARGEST_CODE).collect();
        let above = codes.partition_point(|&code| number_of(code) < magnitude) as u32;
        let (below, above) = (above.saturating_sub(1), above.min(L::LARGEST_CODE));
        let (to_below, to_above) = (magnitude - number_of(below), number_of(above) - magnitude);
        let is_below = to_below < to_above || to_below == to_above && below % 2 == 0;
        (if is_below { below } else { above }) | (number.to_bits() >> 24 & SIGN)
    }

    fn check_layout<L: Fp8Layout>() {
        assert_eq!(definition::<L>(L::LARGEST_CODE), Some(L::LARGEST));
        for code in 0..256 {
            let decoded = decode_code::<L>(code);
            match definition::<L>(code) {
                None => assert!(decoded.is_nan(), "{code:x}"),
                Some(number) => {
                    assert_eq!(decoded.to_bits(), number.to_bits(), "{code:x}");
                    // The number, and the numbers in the middle of this and the next, and their neighbours.
                    let next = definition::<L>(code + 1).unwrap_or(number);
                    for number in [number, f32::midpoint(number, next)] {
                        for number in [number.next_down(), number, number.next_up()] {
                            let number = number.clamp(-L::LARGEST, L::LARGEST);
                            assert_eq!(encode_number::<L>(number), nearest_code::<L>(number), "{number}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_code_is_that_of_the_format() {
        check_layout::<E4M3>();
        check_layout::<E5M2>();
    }

    fn check_reference<L: Fp8Layout>() {
        let encode_block = |values: &[f32]| {
            let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            let scale = (largest / L::LARGEST).max(f32::MIN_POSITIVE);
            let codes: Vec<u32> =
                values.iter().map(|value| nearest_code::<L>(value * (1.0 / scale))).collect();
            let word = |codes: &[u32]| codes.iter().rev().fold(0, |word, code| word << 8 | code);
            let mut words = vec![scale.to_bits()];
            words.extend(codes.chunks(4).map(word));
            words
        };
        let decode_block = |(words, values): (&[u32], &mut [f32])| {
            for (index, value) in values.iter_mut().enumerate() {
                let number = definition::<L>(words[1 + index / 4] >> (8 * (index % 4)) & 0xff);
                *value = number.expect("the code is finite") * f32::from_bits(words[0]);
            }
        };
        check_against_reference(
            fp8::<L>(),
            lengths(FP8_BLOCK),
            |values| values.chunks(FP8_BLOCK).flat_map(encode_block).collect(),
            |words, count| {
                let mut values = vec![0.0; count];
                words.chunks(65).zip(values.chunks_mut(FP8_BLOCK)).for_each(decode_block);
                values
            },
        );
    }

    #[test]
    fn fp8_gives_the_same_bits_as_the_reference() {
        check_reference::<E4M3>();
        check_reference::<E5M2>();
    }

    /// Checks that the error of each element is at most `relative` times the element, or `absolute` times the largest
    /// element.
    fn check_errors<L: Fp8Layout>(relative: f64, absolute: f64) {
        check_finite_chunks(fp8::<L>(), |values, decoded| {
            for (values, decoded) in values.chunks(FP8_BLOCK).zip(decoded.chunks(FP8_BLOCK)) {
                let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                let absolute = absolute * 1.0001 * f64::from(largest);
                for (&value, &decoded) in values.iter().zip(decoded) {
                    let error = (f64::from(value) - f64::from(decoded)).abs();
                    let bound =
                        (relative * 1.0001 * f64::from(value.abs())).max(absolute).max(2f64.powi(-127));
                    assert!(error <= bound, "{value} decodes to {decoded}, beyond {bound}");
                }
            }
        });
    }

    #[test]
    fn errors_are_within_their_bounds() {
        check_errors::<E4M3>(2f64.powi(-4), 2f64.powf(-18.8));
        check_errors::<E5M2>(2f64.powi(-3), 2f64.powf(-32.8));
    }

    fn check_special_values<L: Fp8Layout>() {
        check_not_finite_elements(fp8::<L>(), FP8_BLOCK);
        check_hostile_words(fp8::<L>());
        let zeros = round_trip(fp8::<L>(), &[0.0, -0.0], KEYS);
        assert!(zeros == [0.0, 0.0] && zeros[1].is_sign_negative());
        for extreme in [f32::MAX, f32::MIN] {
            let decoded = round_trip(fp8::<L>(), &[extreme, 0.0], KEYS);
            assert!(decoded[0].is_finite() && (decoded[0] / extreme - 1.0).abs() < 1e-6, "{decoded:?}");
        }
        let million = 1 << 20;
        assert_eq!(fp8::<L>().encoded_words(million) * 4, million + million / 64);
        assert_eq!(fp8::<L>().encoded_words(261), 65 + 3);
        assert!(encode(fp8::<L>(), &[], KEYS).is_empty());
    }

    #[test]
    fn special_values_and_any_words_decode_as_documented() {
        check_special_values::<E4M3>();
        check_special_values::<E5M2>();
    }
}
