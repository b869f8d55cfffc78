//! Codecs that round elements to multiples of a scale, which each block of elements has: int8, int4 and QSGD.
//!
//! Codes are integers in two's complement, and an element is its code times the scale. For all three codecs:
//!
//! - All zeros decode to zeros.
//! - If a block contains a NaN or an infinity, the whole block decodes to NaN.
//! - Scales are at least 2^-126, the smallest normal `f32`. So the absolute error of a subnormal element is at most 2^-126.
//! - Stochastic rounding rounds up or down, so that the expected result is the element, up to the precision of `f32` (a
//!   relative error of 2^-23 of the largest absolute value of the block).

use super::blocks::{
    BlockFormat, BlockRandom, GROUP, largest_magnitude, pack_bytes, pack_planes, scale_of, sum_of,
    unpack_planes, write_not_finite,
};
use crate::types::Rounding;

/// The number of elements of a block of [`Int8`].
pub(super) const INT8_BLOCK: usize = 256;
/// The number of elements that share a scale in [`Int4`].
const INT4_SCALED: usize = 64;
/// The number of elements of a block of [`Int4`], which has two scales in one word.
pub(super) const INT4_BLOCK: usize = 2 * INT4_SCALED;
/// The number of elements of a block of [`Qsgd`].
pub(super) const QSGD_BLOCK: usize = 128;

/// The float 1.5 * 2^23. If a number between -2^22 and 2^22 is added, the sum is rounded to the nearest integer, ties
/// to even, and the lowest 22 bits of the sum are this integer.
const ROUNDER: f32 = 12_582_912.0;

/// 8-bit integers from -127 to 127. The scale is 1/127 of the largest absolute value of each block of 256 elements.
///
/// - Cost: 1 byte for each element, and 4 bytes for each block: 1.016 bytes for each element.
/// - Error: at most half the scale with [`Rounding::Nearest`], 1/254 of the largest absolute value of the block, and at
///   most the scale with [`Rounding::Stochastic`].
/// - Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016, which compares number formats;
///   the scales of blocks are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
///
/// The words of a block are the scale and the codes, one byte each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int8(pub(super) Rounding);

impl BlockFormat<INT8_BLOCK> for Int8 {
    #[inline(always)]
    fn block_words(&self, count: usize) -> usize {
        usize::from(count > 0) + count.div_ceil(4)
    }

    #[inline(always)]
    fn encode_block(&self, values: &[f32; INT8_BLOCK], _: usize, random: BlockRandom, words: &mut [u32]) {
        let Some(largest) = largest_magnitude(values) else { return write_not_finite(words) };
        let scale = scale_of(largest, 127.0);
        words[0] = scale.to_bits();
        pack_bytes(&quantize(values, scale, 127.0, self.0, random), &mut words[1..]);
    }

    #[inline(always)]
    fn decode_block(&self, words: &[u32], values: &mut [f32; INT8_BLOCK]) {
        let scale = f32::from_bits(words[0]);
        for (value, &code) in values.iter_mut().zip(bytemuck::cast_slice::<u32, i8>(&words[1..])) {
            *value = f32::from(code) * scale;
        }
    }

    fn is_random(&self) -> bool {
        self.0 == Rounding::Stochastic
    }
}

/// 4-bit integers from -7 to 7. The scale is 1/7 of the largest absolute value of each 64 elements, as `bf16`, rounded up.
///
/// - Cost: half a byte for each element, and 2 bytes for each 64 elements: 0.531 bytes for each element. In the last
///   block, the number of elements is rounded up to a multiple of 32.
/// - Error: at most half the scale with [`Rounding::Nearest`], 1/13.9 of the largest absolute value, and at most the
///   scale with [`Rounding::Stochastic`].
/// - Source: the same as of [`Int8`].
///
/// The words of a block of 128 elements are a word with both scales, the first in its lower half, and four words for each 32
/// elements ([`pack_planes`]).
#[derive(Clone, Copy, Debug)]
pub(super) struct Int4(pub(super) Rounding);

impl BlockFormat<INT4_BLOCK> for Int4 {
    #[inline(always)]
    fn block_words(&self, count: usize) -> usize {
        usize::from(count > 0) + 4 * count.div_ceil(GROUP)
    }

    #[inline(always)]
    fn encode_block(&self, values: &[f32; INT4_BLOCK], _: usize, random: BlockRandom, words: &mut [u32]) {
        let mut codes = [0; INT4_BLOCK];
        words[0] = 0;
        let halves = values.as_chunks::<INT4_SCALED>().0.iter().zip(codes.chunks_exact_mut(INT4_SCALED));
        for (index, (values, codes)) in halves.enumerate() {
            let Some(largest) = largest_magnitude(values) else {
                words[0] |= f32::NAN.to_bits() >> 16 << (16 * index);
                continue;
            };
            // The addition rounds the upper half of the bits, a `bf16`, up, but not so far that 7 times the scale overflows.
            let upper =
                ((scale_of(largest, 7.0).to_bits() + 0xffff) >> 16).min((f32::MAX / 7.0).to_bits() >> 16);
            words[0] |= upper << (16 * index);
            let random = random.after(index * INT4_SCALED);
            codes.copy_from_slice(&quantize(values, f32::from_bits(upper << 16), 7.0, self.0, random));
        }
        pack_planes(&codes, 4, &mut words[1..]);
    }

    #[inline(always)]
    fn decode_block(&self, words: &[u32], values: &mut [f32; INT4_BLOCK]) {
        let codes = unpack_planes::<INT4_BLOCK>(4, &words[1..]);
        let scales = [f32::from_bits(words[0] << 16), f32::from_bits(words[0] >> 16 << 16)];
        let halves = values.chunks_exact_mut(INT4_SCALED).zip(codes.chunks_exact(INT4_SCALED));
        for ((values, codes), scale) in halves.zip(scales) {
            multiply(codes, 4, scale, values);
        }
    }

    fn is_random(&self) -> bool {
        self.0 == Rounding::Stochastic
    }
}

/// QSGD: integers of 2 to 8 bits with stochastic rounding. The scale is the Euclidean norm of each block of 128
/// elements, divided by the largest code, 2^(bits - 1) - 1.
///
/// - Cost: `bits` / 8 bytes for each element, and 4 bytes for each block: for 4 bits 0.531 bytes for each element. In
///   the last block, the number of elements is rounded up to a multiple of 32.
/// - Error: at most the scale. The expected result is the element, and for a largest code `s` the variance of the result of a
///   block `v` is at most min(128/s², √128/s) ‖v‖².
/// - If the norm of a block is beyond the largest `f32`, the whole block decodes to NaN.
/// - Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017, with
///   codes of a fixed number of bits instead of Elias codes.
///
/// The words of a block are the scale, and `bits` words for each 32 elements ([`pack_planes`]).
#[derive(Clone, Copy, Debug)]
pub(super) struct Qsgd {
    /// The number of bits of each code, from 2 to 8.
    pub(super) bits: u8,
}

impl Qsgd {
    /// Returns the largest code.
    #[inline(always)]
    fn levels(self) -> f32 {
        ((1u32 << (self.bits - 1)) - 1) as f32
    }
}

impl BlockFormat<QSGD_BLOCK> for Qsgd {
    #[inline(always)]
    fn block_words(&self, count: usize) -> usize {
        usize::from(count > 0) + usize::from(self.bits) * count.div_ceil(GROUP)
    }

    #[inline(always)]
    fn encode_block(&self, values: &[f32; QSGD_BLOCK], _: usize, random: BlockRandom, words: &mut [u32]) {
        let norm = sum_of(values, |value| value * value).sqrt() as f32;
        if !norm.is_finite() {
            return write_not_finite(words);
        }
        let scale = scale_of(norm, self.levels());
        words[0] = scale.to_bits();
        let codes = quantize(values, scale, self.levels(), Rounding::Stochastic, random);
        pack_planes(&codes, usize::from(self.bits), &mut words[1..]);
    }

    #[inline(always)]
    fn decode_block(&self, words: &[u32], values: &mut [f32; QSGD_BLOCK]) {
        // With a constant number of bits, the compiler vectorises the loop over the elements.
        let planes = &words[1..];
        let codes = match self.bits {
            2 => unpack_planes::<QSGD_BLOCK>(2, planes),
            3 => unpack_planes(3, planes),
            4 => unpack_planes(4, planes),
            5 => unpack_planes(5, planes),
            6 => unpack_planes(6, planes),
            7 => unpack_planes(7, planes),
            _ => unpack_planes(8, planes),
        };
        multiply(&codes, u32::from(self.bits), f32::from_bits(words[0]), values);
    }

    fn is_random(&self) -> bool {
        true
    }
}

/// Returns the codes of finite values, from `-levels` to `levels`. The lowest 22 bits of each result are the code.
#[inline(always)]
fn quantize<const N: usize>(
    values: &[f32; N],
    scale: f32,
    levels: f32,
    rounding: Rounding,
    random: BlockRandom,
) -> [u32; N] {
    let inverse = 1.0 / scale;
    let mut codes = [0; N];
    match rounding {
        Rounding::Nearest => {
            for (code, &value) in codes.iter_mut().zip(values) {
                *code = round_within(value * inverse, levels);
            }
        }
        Rounding::Stochastic => {
            for (element, (code, &value)) in codes.iter_mut().zip(values).enumerate() {
                *code = round_within(value * inverse + random.centred(element as u32), levels);
            }
        }
    }
    codes
}

/// Rounds a number to the nearest integer from `-limit` to `limit`, ties to even. The lowest 22 bits of the result are
/// the integer.
#[inline(always)]
fn round_within(number: f32, limit: f32) -> u32 {
    let number = if number < limit { number } else { limit };
    let number = if number > -limit { number } else { -limit };
    (number + ROUNDER).to_bits()
}

/// Sets each value to the product of a code, whose lowest `bits` bits are an integer in two's complement, and the scale.
#[inline(always)]
fn multiply(codes: &[u32], bits: u32, scale: f32, values: &mut [f32]) {
    let unused = u32::BITS - bits;
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = ((code << unused) as i32 >> unused) as f32 * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{BlockCodec, mix};
    use super::super::test_support::{
        KEYS, check_against_reference, check_finite_chunks, check_hostile_words, check_not_finite_elements,
        check_unbiased, decode, encode, lengths, reference_code, reference_planes, round_trip, sample,
    };
    use super::super::vectorised::CodecLoops;
    use super::*;

    const ROUNDINGS: [Rounding; 2] = [Rounding::Nearest, Rounding::Stochastic];

    fn int8(rounding: Rounding) -> BlockCodec<Int8, INT8_BLOCK> {
        BlockCodec(Int8(rounding))
    }

    fn int4(rounding: Rounding) -> BlockCodec<Int4, INT4_BLOCK> {
        BlockCodec(Int4(rounding))
    }

    fn qsgd(bits: u8) -> BlockCodec<Qsgd, QSGD_BLOCK> {
        BlockCodec(Qsgd { bits })
    }

    fn largest(values: &[f32]) -> f32 {
        values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
    }

    /// The codes of the elements of block `block` from element `first`.
    fn reference_codes(
        values: &[f32],
        scale: f32,
        levels: f32,
        rounding: Rounding,
        block: usize,
        first: usize,
    ) -> Vec<u32> {
        let random = BlockRandom::new(mix(KEYS.own), block);
        let code = |(index, value): (usize, &f32)| {
            let scaled = value * (1.0 / scale);
            let moved = match rounding {
                Rounding::Nearest => scaled,
                Rounding::Stochastic => scaled + random.centred((first + index) as u32),
            };
            moved.clamp(-levels, levels).round_ties_even() as i32 as u32
        };
        values.iter().enumerate().map(code).collect()
    }

    fn sign_extend(code: u32, bits: usize) -> f32 {
        let code = code as i32 & ((1 << bits) - 1);
        (if code >= 1 << (bits - 1) { code - (1 << bits) } else { code }) as f32
    }

    #[test]
    fn int8_gives_the_same_bits_as_the_reference() {
        for rounding in ROUNDINGS {
            let encode_block = |(block, values): (usize, &[f32])| {
                let scale = (largest(values) / 127.0).max(f32::MIN_POSITIVE);
                let codes = reference_codes(values, scale, 127.0, rounding, block, 0);
                let word = |codes: &[u32]| codes.iter().rev().fold(0, |word, code| word << 8 | code & 0xff);
                let mut words = vec![scale.to_bits()];
                words.extend(codes.chunks(4).map(word));
                words
            };
            let decode_block = |(words, values): (&[u32], &mut [f32])| {
                for (index, value) in values.iter_mut().enumerate() {
                    let code = words[1 + index / 4] >> (8 * (index % 4));
                    *value = sign_extend(code, 8) * f32::from_bits(words[0]);
                }
            };
            check_against_reference(
                int8(rounding),
                lengths(INT8_BLOCK),
                |values| values.chunks(INT8_BLOCK).enumerate().flat_map(encode_block).collect(),
                |words, count| {
                    let mut values = vec![0.0; count];
                    words.chunks(65).zip(values.chunks_mut(INT8_BLOCK)).for_each(decode_block);
                    values
                },
            );
        }
    }

    #[test]
    fn int4_gives_the_same_bits_as_the_reference() {
        for rounding in ROUNDINGS {
            let encode_block = |(block, values): (usize, &[f32])| {
                let (mut scales, mut codes) = ([f32::MIN_POSITIVE; 2], Vec::new());
                for (index, values) in values.chunks(64).enumerate() {
                    let exact = (largest(values) / 7.0).max(f32::MIN_POSITIVE);
                    let rounded = f32::from_bits(exact.to_bits() & 0xffff_0000);
                    scales[index] =
                        if rounded < exact { f32::from_bits(rounded.to_bits() + 0x1_0000) } else { rounded };
                    codes.extend(reference_codes(values, scales[index], 7.0, rounding, block, 64 * index));
                }
                let mut words = vec![scales[1].to_bits() | scales[0].to_bits() >> 16];
                words.extend(reference_planes(&codes, 4));
                words
            };
            let decode_block = |(words, values): (&[u32], &mut [f32])| {
                for (index, value) in values.iter_mut().enumerate() {
                    let scale = f32::from_bits(words[0] >> (16 * (index / 64)) << 16);
                    *value = sign_extend(reference_code(&words[1..], 4, index), 4) * scale;
                }
            };
            check_against_reference(
                int4(rounding),
                lengths(INT4_BLOCK),
                |values| values.chunks(INT4_BLOCK).enumerate().flat_map(encode_block).collect(),
                |words, count| {
                    let mut values = vec![0.0; count];
                    words.chunks(17).zip(values.chunks_mut(INT4_BLOCK)).for_each(decode_block);
                    values
                },
            );
        }
    }

    #[test]
    fn qsgd_gives_the_same_bits_as_the_reference() {
        for bits in 2..=8 {
            let levels = ((1 << (bits - 1)) - 1) as f32;
            let encode_block = |(block, values): (usize, &[f32])| {
                // The squares are added in 16 sums, as in `sum_of`.
                let mut sums = [0.0; 16];
                for (index, &value) in values.iter().enumerate() {
                    sums[index % 16] += f64::from(value) * f64::from(value);
                }
                let norm = sums.iter().sum::<f64>().sqrt() as f32;
                let scale = (norm / levels).max(f32::MIN_POSITIVE);
                let codes = reference_codes(values, scale, levels, Rounding::Stochastic, block, 0);
                let mut words = vec![scale.to_bits()];
                words.extend(reference_planes(&codes, bits));
                words
            };
            let decode_block = |(words, values): (&[u32], &mut [f32])| {
                for (index, value) in values.iter_mut().enumerate() {
                    let code = reference_code(&words[1..], bits, index);
                    *value = sign_extend(code, bits) * f32::from_bits(words[0]);
                }
            };
            let lengths = lengths(QSGD_BLOCK).into_iter().filter(|&length| bits == 4 || length < 2000);
            check_against_reference(
                qsgd(bits as u8),
                lengths.collect(),
                |values| values.chunks(QSGD_BLOCK).enumerate().flat_map(encode_block).collect(),
                |words, count| {
                    let mut values = vec![0.0; count];
                    let blocks = words.chunks(1 + 4 * bits).zip(values.chunks_mut(QSGD_BLOCK));
                    blocks.for_each(decode_block);
                    values
                },
            );
        }
    }

    /// Checks that the error of each element is at most `bound` times the largest absolute value of its block.
    fn check_errors<L: CodecLoops + Copy>(loops: L, block: usize, bound: f64) {
        check_finite_chunks(loops, |values, decoded| {
            for (values, decoded) in values.chunks(block).zip(decoded.chunks(block)) {
                let bound = (bound * 1.0001 * f64::from(largest(values))).max(2f64.powi(-126));
                for (&value, &decoded) in values.iter().zip(decoded) {
                    let error = (f64::from(value) - f64::from(decoded)).abs();
                    assert!(error <= bound, "{loops:?}: {value} decodes to {decoded}, beyond {bound}");
                }
            }
        });
    }

    #[test]
    fn errors_are_within_their_bounds() {
        check_errors(int8(Rounding::Nearest), INT8_BLOCK, 1.0 / 254.0);
        check_errors(int8(Rounding::Stochastic), INT8_BLOCK, 1.0 / 127.0);
        check_errors(int4(Rounding::Nearest), INT4_SCALED, 1.0 / 13.89);
        check_errors(int4(Rounding::Stochastic), INT4_SCALED, 2.0 / 13.89);
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        let values = sample(128, 5);
        check_unbiased(int8(Rounding::Stochastic), &values, largest(&values) / 127.0);
        check_unbiased(int4(Rounding::Stochastic), &values, largest(&values) / 6.9);
        let norm = values.iter().map(|value| value * value).sum::<f32>().sqrt();
        for bits in [2, 4, 8] {
            check_unbiased(qsgd(bits), &values, norm / qsgd(bits).0.levels() * 1.0001);
        }
    }

    /// The variance bound of the paper: `E ‖Q(v) - v‖² <= min(d / s², √d / s) ‖v‖²`.
    #[test]
    fn the_variance_of_qsgd_is_within_its_bound() {
        let values = sample(QSGD_BLOCK, 6);
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v * v)).sum::<f64>();
        for bits in 2..=8 {
            let draws = 100;
            let error = (0..draws).map(|draw| {
                let keys = super::super::interface::RandomKeys { shared: 0, own: draw };
                let decoded = round_trip(qsgd(bits), &values, keys);
                square(&mut decoded.iter().zip(&values).map(|(decoded, value)| decoded - value))
            });
            let mean = error.sum::<f64>() / draws as f64;
            let (d, s) = (QSGD_BLOCK as f64, f64::from(qsgd(bits).0.levels()));
            let bound = (d / (s * s)).min(d.sqrt() / s) * square(&mut values.iter().copied());
            assert!(mean > 0.0 && mean <= bound, "{bits} bits: {mean} is beyond {bound}");
        }
    }

    fn check_extremes<L: CodecLoops + Copy>(loops: L) {
        assert_eq!(round_trip(loops, &[0.0, -0.0, 0.0], KEYS), [0.0; 3]);
        for extreme in [f32::MAX, f32::MIN] {
            let decoded = round_trip(loops, &[extreme, 0.0], KEYS);
            assert!(
                decoded[0].is_finite() && (decoded[0] / extreme - 1.0).abs() < 0.01,
                "{loops:?}: {decoded:?}"
            );
            assert_eq!(decoded[1], 0.0);
        }
        let subnormals = round_trip(loops, &[1e-40, -1e-45], KEYS);
        assert!(subnormals.iter().all(|decoded| decoded.abs() <= f32::MIN_POSITIVE), "{subnormals:?}");
    }

    #[test]
    fn special_values_decode_as_documented() {
        for rounding in ROUNDINGS {
            check_not_finite_elements(int8(rounding), INT8_BLOCK);
            check_not_finite_elements(int4(rounding), INT4_SCALED);
        }
        check_not_finite_elements(qsgd(4), QSGD_BLOCK);
        for rounding in ROUNDINGS {
            check_extremes(int8(rounding));
            check_extremes(int4(rounding));
        }
        (2..=8).for_each(|bits| check_extremes(qsgd(bits)));
        assert!(round_trip(qsgd(4), &[f32::MAX; 4], KEYS).iter().all(|decoded| decoded.is_nan()));
    }

    #[test]
    fn any_words_decode() {
        check_hostile_words(int8(Rounding::Nearest));
        check_hostile_words(int4(Rounding::Nearest));
        (2..=8).for_each(|bits| check_hostile_words(qsgd(bits)));
    }

    #[test]
    fn the_cost_is_as_documented() {
        let million = 1 << 20;
        assert_eq!(int8(Rounding::Nearest).encoded_words(million) * 4, million + million / 64);
        assert_eq!(int4(Rounding::Nearest).encoded_words(million) * 4, million / 2 + million / 32);
        assert_eq!(qsgd(4).encoded_words(million) * 4, million / 2 + million / 32);
        assert_eq!(int8(Rounding::Nearest).encoded_words(257), 65 + 2);
        assert_eq!(int4(Rounding::Nearest).encoded_words(129), 17 + 5);
        assert!(encode(int8(Rounding::Nearest), &[], KEYS).is_empty());
        assert_eq!(decode(qsgd(2), &[], 0, KEYS), Ok(vec![]));
    }
}
