//! Codecs that send one bit for each element: its sign.

use super::blocks::{BlockFormat, BlockRandom, GROUP, sum_of};
use crate::simd::highest_bits;

/// The number of elements that share a scale in [`OneBit`].
pub(super) const SIGNS_BLOCK: usize = 2048;

/// The sign of each element, and the mean absolute value of each block of 2,048 elements. An element decodes to the
/// mean of its block, with the sign of the element.
///
/// - Cost: 1 bit for each element, and 4 bytes for each block: 0.127 bytes for each element. In the last block, the number of
///   elements is rounded up to a multiple of 32.
/// - Error: biased, so that training needs error feedback. For a block `v` of `d` elements, the squared Euclidean norm
///   of the error is `‖v‖² - ‖v‖₁² / d`, less than `‖v‖²` unless `v` is zero.
/// - A zero has the sign of its sign bit. All zeros decode to zeros. Subnormals are like other numbers.
/// - If a block contains a NaN or an infinity, the whole block decodes to NaN.
/// - Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
///   of Speech DNNs", 2014; Karimireddy et al., "Error Feedback Fixes `SignSGD` and other Gradient Compression
///   Schemes", 2019.
///
/// The words of a block are the mean and one word for each 32 elements, whose bit `i` is 1 if element `i` is negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct OneBit;

impl BlockFormat<SIGNS_BLOCK> for OneBit {
    #[inline(always)]
    fn block_words(&self, count: usize) -> usize {
        usize::from(count > 0) + count.div_ceil(GROUP)
    }

    #[inline(always)]
    fn encode_block(&self, values: &[f32; SIGNS_BLOCK], count: usize, _: BlockRandom, words: &mut [u32]) {
        let mean = (sum_of(values, f64::abs) / count as f64) as f32;
        words[0] = if mean.is_finite() { mean } else { f32::NAN }.to_bits();
        pack_signs(values, &mut words[1..]);
    }

    #[inline(always)]
    fn decode_block(&self, words: &[u32], values: &mut [f32; SIGNS_BLOCK]) {
        unpack_signs(words[0], &words[1..], values);
    }
}

/// signSGD: the sign of each element. An element decodes to 1 or -1. The sign of the sum of all ranks' contributions is
/// the result of a majority vote. If the vote is a tie, the result is 1 or -1 at random.
///
/// - Cost: 1 bit for each element, 0.125 bytes. The number of elements is rounded up to a multiple of 32.
/// - Error: not bounded, because the result has another unit than the elements.
/// - A zero decodes to 1 or -1 at random, so that parameters without a gradient, and those on which an even number of ranks
///   disagrees, do not move in one direction. Subnormals are like other numbers.
/// - A NaN and an infinity decode to 1 or -1, like all elements, by their sign bits. So the caller must check whether
///   the elements are finite before it encodes them.
/// - Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", 2018.
///
/// Each word has the signs of 32 elements. Its bit `i` is 1 if element `i` is negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct SignSgd;

impl BlockFormat<SIGNS_BLOCK> for SignSgd {
    #[inline(always)]
    fn block_words(&self, count: usize) -> usize {
        count.div_ceil(GROUP)
    }

    #[inline(always)]
    fn encode_block(
        &self,
        values: &[f32; SIGNS_BLOCK],
        count: usize,
        random: BlockRandom,
        words: &mut [u32],
    ) {
        pack_signs(values, words);
        for (group, (values, word)) in values.as_chunks::<GROUP>().0.iter().zip(words).enumerate() {
            let mut bytes = [0; GROUP];
            bytes.iter_mut().zip(values).for_each(|(byte, &value)| *byte = u8::from(value == 0.0) << 7);
            let mut zeros = highest_bits(bytes);
            // The bits after the last element stay 0.
            let used = count.saturating_sub(group * GROUP).min(GROUP);
            zeros &= ((1u64 << used) - 1) as u32;
            *word = *word & !zeros | random.bits(group as u32) & zeros;
        }
    }

    #[inline(always)]
    fn decode_block(&self, words: &[u32], values: &mut [f32; SIGNS_BLOCK]) {
        unpack_signs(1f32.to_bits(), words, values);
    }

    fn rounds_own_values(&self) -> bool {
        true
    }

    fn is_random(&self) -> bool {
        true
    }
}

/// Stores the sign bit of each value.
#[inline(always)]
fn pack_signs(values: &[f32; SIGNS_BLOCK], words: &mut [u32]) {
    for (values, word) in values.as_chunks::<GROUP>().0.iter().zip(words) {
        let mut bytes = [0; GROUP];
        bytes.iter_mut().zip(values).for_each(|(byte, value)| *byte = (value.to_bits() >> 24) as u8);
        *word = highest_bits(bytes);
    }
}

/// Sets each value to the float with the bits `magnitude` and the sign that [`pack_signs`] has stored.
#[inline(always)]
fn unpack_signs(magnitude: u32, words: &[u32], values: &mut [f32; SIGNS_BLOCK]) {
    for (values, word) in values.as_chunks_mut::<GROUP>().0.iter_mut().zip(words) {
        for (i, value) in values.iter_mut().enumerate() {
            *value = f32::from_bits(magnitude ^ (word >> i & 1) << 31);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{BlockCodec, mix};
    use super::super::interface::RandomKeys;
    use super::super::test_support::{
        KEYS, bits, check_against_reference, check_finite_chunks, check_hostile_words,
        check_not_finite_elements, encode, lengths, reference_code, reference_planes, round_trip,
    };
    use super::super::vectorised::CodecLoops;
    use super::*;

    const ONE_BIT: BlockCodec<OneBit, SIGNS_BLOCK> = BlockCodec(OneBit);
    const SIGN_SGD: BlockCodec<SignSgd, SIGNS_BLOCK> = BlockCodec(SignSgd);

    fn signs(values: &[f32]) -> Vec<u32> {
        let signs: Vec<u32> = values.iter().map(|value| u32::from(value.is_sign_negative())).collect();
        reference_planes(&signs, 1)
    }

    fn with_sign(magnitude: f32, words: &[u32], index: usize) -> f32 {
        if reference_code(words, 1, index) == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn signs_are_the_same_bits_as_the_reference() {
        let encode_block = |values: &[f32]| {
            // The absolute values are added in 16 sums, as in `sum_of`.
            let mut sums = [0.0; 16];
            for (index, &value) in values.iter().enumerate() {
                sums[index % 16] += f64::from(value.abs());
            }
            let mean = (sums.iter().sum::<f64>() / values.len() as f64) as f32;
            [vec![mean.to_bits()], signs(values)].concat()
        };
        check_against_reference(
            ONE_BIT,
            lengths(SIGNS_BLOCK),
            |values| values.chunks(SIGNS_BLOCK).flat_map(encode_block).collect(),
            |words, count| {
                let blocks: Vec<&[u32]> = words.chunks(65).collect();
                let mean = |block: usize| f32::from_bits(blocks[block][0]);
                let value = |i: usize| {
                    with_sign(mean(i / SIGNS_BLOCK), &blocks[i / SIGNS_BLOCK][1..], i % SIGNS_BLOCK)
                };
                (0..count).map(value).collect()
            },
        );
        let votes = |values: &[f32]| {
            let blocks = values.chunks(SIGNS_BLOCK).enumerate();
            let codes = blocks.flat_map(|(block, values)| {
                let random = BlockRandom::new(mix(KEYS.own), block);
                let drawn = move |index: usize| random.bits((index / GROUP) as u32) >> (index % GROUP) & 1;
                let vote = move |(index, &value): (usize, &f32)| {
                    if value == 0.0 { drawn(index) } else { u32::from(value.is_sign_negative()) }
                };
                values.iter().enumerate().map(vote)
            });
            reference_planes(&codes.collect::<Vec<_>>(), 1)
        };
        check_against_reference(SIGN_SGD, lengths(SIGNS_BLOCK), votes, |words, count| {
            (0..count).map(|index| with_sign(1.0, words, index)).collect()
        });
    }

    /// The squared norm of the error is `‖v‖² - ‖v‖₁² / d`.
    #[test]
    fn the_error_of_one_bit_is_as_documented() {
        check_finite_chunks(ONE_BIT, |values, decoded| {
            let values = values.iter().map(|&value| f64::from(value));
            let d = values.len() as f64;
            let squares: f64 = values.clone().map(|value| value * value).sum();
            let expected = squares - values.clone().map(f64::abs).sum::<f64>().powi(2) / d;
            let error: f64 =
                values.zip(decoded).map(|(value, decoded)| (value - f64::from(*decoded)).powi(2)).sum();
            // The mean is rounded to `f32`, and to a multiple of 2^-149 if it is subnormal.
            let rounding = squares * 1e-6 + d * 2f64.powi(-290);
            assert!(d == 0.0 || (error - expected).abs() <= rounding, "{error} is not {expected}");
        });
    }

    #[test]
    fn special_values_and_any_words_decode_as_documented() {
        check_not_finite_elements(ONE_BIT, SIGNS_BLOCK);
        check_hostile_words(ONE_BIT);
        check_hostile_words(SIGN_SGD);
        assert_eq!(bits(&round_trip(ONE_BIT, &[0.0, -0.0], KEYS)), bits(&[0.0, -0.0]));
        assert_eq!(
            round_trip(ONE_BIT, &[f32::MAX, f32::MIN, f32::MAX], KEYS),
            [f32::MAX, f32::MIN, f32::MAX]
        );
        assert_eq!(round_trip(ONE_BIT, &[1.0, -2.0, 6.0], KEYS), [3.0, -3.0, 3.0]);
        let values = [1e-45, -1e-45, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
        let signs = if f32::NAN.is_sign_negative() { [-1.0, 1.0] } else { [1.0, -1.0] };
        let expected = [1.0, -1.0, 1.0, -1.0, signs[0], signs[1]];
        assert_eq!(round_trip(SIGN_SGD, &values, KEYS), expected);
    }

    /// Regression test: zeros counted as 1, so parameters without a gradient moved in one direction, and so did those on which
    /// half of the ranks disagreed.
    #[test]
    fn zeros_vote_for_both_signs_equally_often() {
        let draws = 100;
        for zero in [0.0, -0.0] {
            let sums = (0..draws).map(|own| {
                let decoded = round_trip(SIGN_SGD, &[zero; 1000], RandomKeys { shared: 0, own });
                assert!(decoded.iter().all(|value| value.abs() == 1.0));
                f64::from(decoded.iter().sum::<f32>())
            });
            // Five standard deviations of the sum of independent signs.
            let limit = 5.0 * (draws as f64 * 1000.0).sqrt();
            let sum = sums.sum::<f64>();
            assert!(sum.abs() <= limit, "{sum}");
        }
    }

    #[test]
    fn the_cost_is_as_documented() {
        let million = 1 << 20;
        assert_eq!(ONE_BIT.encoded_words(million) * 4, million / 8 + million / 512);
        assert_eq!(SIGN_SGD.encoded_words(million) * 4, million / 8);
        assert_eq!(ONE_BIT.encoded_words(2049), 65 + 2);
        assert_eq!(SIGN_SGD.encoded_words(33), 2);
        assert!(encode(ONE_BIT, &[], KEYS).is_empty());
        assert!(SIGN_SGD.rounds_own_values() && !ONE_BIT.rounds_own_values());
    }
}
