//! Codecs that send a fraction of the elements: the largest ones, or randomly chosen ones. All other elements decode to zero.
//!
//! A chunk is divided into blocks of at most 65,536 elements, and the same fraction of each block is sent, rounded up.

use super::blocks::{BlockRandom, GROUP, largest_magnitude, mix};
use super::interface::{DecodeError, RandomKeys};
use super::vectorised::CodecLoops;
use crate::types::Fraction;

/// The largest number of elements of a block. The index of an element in a block has 16 bits.
pub(super) const SPARSE_BLOCK: usize = 1 << 16;

/// Top-k: the elements with the largest absolute values. Of elements with the same absolute value, those with lower
/// indices are sent.
///
/// - Cost: 6 bytes for each element that is sent, rounded up to whole words in each block.
/// - Error: elements that are sent are exact. Biased, so that training needs error feedback. For `k` of `d` elements of
///   a block `v`, the squared Euclidean norm of the error is at most `(1 - k/d) ‖v‖²`.
/// - NaN counts as larger than infinity, and infinity as larger than all numbers. So at least one of them is sent, if
///   there is any.
/// - Zeros are like other numbers: they are sent with their signs if `k` is larger than the number of other elements.
///   Subnormals are exact.
/// - Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; Lin et al., "Deep Gradient
///   Compression", 2018.
///
/// The words of a block are the indices of the elements in ascending order, two in each word, and the elements in the
/// same order.
#[derive(Clone, Copy, Debug)]
pub(super) struct TopKCodec(pub(super) Fraction);

impl TopKCodec {
    /// Returns the number of words of a block of `count` elements.
    #[inline(always)]
    fn block_words(self, count: usize) -> usize {
        let kept = self.0.of(count);
        kept.div_ceil(2) + kept
    }
}

impl CodecLoops for TopKCodec {
    #[inline(always)]
    fn encoded_words(&self, count: usize) -> usize {
        count / SPARSE_BLOCK * self.block_words(SPARSE_BLOCK) + self.block_words(count % SPARSE_BLOCK)
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], _: RandomKeys, mut words: &mut [u32]) {
        for values in values.chunks(SPARSE_BLOCK) {
            let kept = self.0.of(values.len());
            let (indices, rest) = words.split_at_mut(kept.div_ceil(2));
            let (elements, rest) = rest.split_at_mut(kept);
            keep_largest(values, indices, elements);
            words = rest;
        }
    }

    #[inline(always)]
    fn decode(&self, mut words: &[u32], _: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        for values in values.chunks_mut(SPARSE_BLOCK) {
            let kept = self.0.of(values.len());
            let (indices, rest) = words.split_at(kept.div_ceil(2));
            let (elements, rest) = rest.split_at(kept);
            values.fill(0.0);
            let mut lowest = 0;
            for (&index, &bits) in bytemuck::cast_slice::<u32, u16>(indices).iter().zip(elements) {
                let index = usize::from(index);
                if index < lowest {
                    return Err(DecodeError("the indices of elements are not in ascending order"));
                }
                *values.get_mut(index).ok_or(DecodeError("the index of an element is too large"))? =
                    f32::from_bits(bits);
                lowest = index + 1;
            }
            words = rest;
        }
        Ok(())
    }

    fn tile_elements(&self) -> Option<usize> {
        Some(SPARSE_BLOCK)
    }
}

/// Random-k: one element of each of `k` intervals, into which a block is divided. [`RandomKeys::shared`] determines the
/// elements, so they are the same on all ranks, and a sum has as many elements as each contribution.
///
/// - Cost: 4 bytes for each element that is sent.
/// - Error: elements that are sent are exact, and not scaled. Biased, so that training needs error feedback. For `k` of
///   `d` elements of a block `v`, the expected squared Euclidean norm of the error is `(1 - k/d) ‖v‖²`, up to the
///   rounding of the intervals' lengths.
/// - If a block contains a NaN or an infinity, all elements that are sent are NaN, because that element may not be sent.
/// - Zeros keep their signs, and subnormals are exact.
/// - Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018, with one element of each interval.
///
/// The words of a block are the elements in the order of their indices.
#[derive(Clone, Copy, Debug)]
pub(super) struct RandomKCodec(pub(super) Fraction);

impl CodecLoops for RandomKCodec {
    #[inline(always)]
    fn encoded_words(&self, count: usize) -> usize {
        count / SPARSE_BLOCK * self.0.of(SPARSE_BLOCK) + self.0.of(count % SPARSE_BLOCK)
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], keys: RandomKeys, mut words: &mut [u32]) {
        let seed = mix(keys.shared);
        for (block, values) in values.chunks(SPARSE_BLOCK).enumerate() {
            let (elements, rest) = words.split_at_mut(self.0.of(values.len()));
            if largest_magnitude(values).is_some() {
                let positions = Positions::new(values.len(), elements.len(), BlockRandom::new(seed, block));
                for (j, element) in elements.iter_mut().enumerate() {
                    *element = values[positions.get(j)].to_bits();
                }
            } else {
                elements.fill(f32::NAN.to_bits());
            }
            words = rest;
        }
    }

    #[inline(always)]
    fn decode(&self, mut words: &[u32], keys: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        let seed = mix(keys.shared);
        for (block, values) in values.chunks_mut(SPARSE_BLOCK).enumerate() {
            let (elements, rest) = words.split_at(self.0.of(values.len()));
            values.fill(0.0);
            let positions = Positions::new(values.len(), elements.len(), BlockRandom::new(seed, block));
            for (j, &element) in elements.iter().enumerate() {
                values[positions.get(j)] = f32::from_bits(element);
            }
            words = rest;
        }
        Ok(())
    }
}

/// The positions of the elements that random-k sends of a block.
struct Positions {
    /// The length of an interval, times 2^32, rounded up. So [`start`](Self::start) is exact: interval `j` of `k`
    /// starts at the whole part of `j * count / k`, and the rounding adds less than `k / 2^32`, which is less than 1 /
    /// `k`.
    step: u64,
    random: BlockRandom,
}

impl Positions {
    /// `count` is the number of elements of the block, and `kept` is the number of positions. `count` is at most
    /// [`SPARSE_BLOCK`], and at least `kept`.
    #[inline(always)]
    fn new(count: usize, kept: usize, random: BlockRandom) -> Self {
        Self { step: ((count as u64) << 32).div_ceil(kept.max(1) as u64), random }
    }

    /// Returns the first element of interval `j`.
    #[inline(always)]
    fn start(&self, j: usize) -> u64 {
        (j as u64 * self.step) >> 32
    }

    /// Returns a random element of interval `j`.
    #[inline(always)]
    fn get(&self, j: usize) -> usize {
        let (start, end) = (self.start(j), self.start(j + 1));
        (start + ((u64::from(self.random.bits(j as u32)) * (end - start)) >> 32)) as usize
    }
}

/// Writes the indices and the bits of the elements with the largest absolute values, as many as `elements` has room for.
#[inline(always)]
fn keep_largest(values: &[f32], indices: &mut [u32], elements: &mut [u32]) {
    let (threshold, mut kept_at_threshold) = select_threshold(values, elements.len());
    // The second half of the last word may belong to no element.
    if let Some(last) = indices.last_mut() {
        *last = 0;
    }
    let mut places = bytemuck::cast_slice_mut::<u32, u16>(indices).iter_mut().zip(elements);
    for_each_match(
        values,
        |magnitude| magnitude >= threshold,
        |index, bits| {
            if bits & MAGNITUDE == threshold {
                if kept_at_threshold == 0 {
                    return;
                }
                kept_at_threshold -= 1;
            }
            if let Some((place, element)) = places.next() {
                (*place, *element) = (index as u16, bits);
            }
        },
    );
}

/// All bits of an `f32` except its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The digits of a magnitude, from the highest: the number of lower bits, and the number of bits of the digit.
const DIGITS: [(u32, u32); 3] = [(20, 11), (10, 10), (0, 10)];
/// The number of values of the digit with the most bits.
const BINS: usize = 1 << 11;
/// The number of histograms that are counted at the same time. If successive elements have the same digit, the
/// processor does not wait for the counter of the first.
const HISTOGRAMS: usize = 4;

/// Returns a magnitude (the bits of an absolute value), and the number of elements with this magnitude that belong to
/// the `kept` elements with the largest magnitudes. All elements with larger magnitudes belong to them. The number may
/// be greater than the number of elements with this magnitude.
///
/// The method is a radix select: it finds the magnitude digit by digit, from a histogram of the digits.
#[inline(always)]
fn select_threshold(values: &[f32], kept: usize) -> (u32, usize) {
    let (mut prefix, mut remaining) = (0, kept);
    for (shift, bits) in DIGITS {
        let histogram = if prefix == 0 && shift == DIGITS[0].0 {
            count_first_digits(values)
        } else {
            count_digits(values, shift, bits, prefix)
        };
        let mut digit = (1 << bits) - 1;
        while digit > 0 && histogram[digit] < remaining as u32 {
            remaining -= histogram[digit] as usize;
            digit -= 1;
        }
        prefix = prefix << bits | digit as u32;
        if histogram[digit] as usize == remaining {
            return (prefix << shift, remaining);
        }
    }
    (prefix, remaining)
}

/// Returns how many elements have each value of the highest digit of the magnitude.
#[inline(always)]
fn count_first_digits(values: &[f32]) -> [u32; BINS] {
    // A block has at most 2^16 elements, so that each of the four histograms counts at most 2^14.
    let mut counts = [[0u16; BINS]; HISTOGRAMS];
    let digit = |value: f32| ((value.to_bits() & MAGNITUDE) >> DIGITS[0].0) as usize;
    let (groups, rest) = values.as_chunks::<HISTOGRAMS>();
    for group in groups {
        for (counts, &value) in counts.iter_mut().zip(group) {
            counts[digit(value)] += 1;
        }
    }
    for &value in rest {
        counts[0][digit(value)] += 1;
    }
    std::array::from_fn(|bin| counts.iter().map(|counts| u32::from(counts[bin])).sum())
}

/// Returns how many elements have each value of a digit, of those whose higher digits are `prefix`.
#[inline(always)]
fn count_digits(values: &[f32], shift: u32, bits: u32, prefix: u32) -> [u32; BINS] {
    let mut counts = [0; BINS];
    for_each_match(
        values,
        |magnitude| magnitude >> (shift + bits) == prefix,
        |_, value| {
            counts[(value >> shift) as usize & ((1 << bits) - 1)] += 1;
        },
    );
    counts
}

/// Calls `visit` with the index and the bits of each element whose magnitude matches, in ascending order.
#[inline(always)]
fn for_each_match(values: &[f32], matches: impl Fn(u32) -> bool, mut visit: impl FnMut(usize, u32)) {
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut visit_group = |first: usize, group: &[f32], mut mask: u32| {
        while mask != 0 {
            let i = mask.trailing_zeros() as usize;
            visit(first + i, group[i].to_bits());
            mask &= mask - 1;
        }
    };
    for (index, group) in groups.iter().enumerate() {
        let mut mask = 0;
        for (i, value) in group.iter().enumerate() {
            mask |= u32::from(matches(value.to_bits() & MAGNITUDE)) << i;
        }
        visit_group(index * GROUP, group, mask);
    }
    let mask =
        rest.iter().rev().fold(0, |mask, value| mask << 1 | u32::from(matches(value.to_bits() & MAGNITUDE)));
    visit_group(values.len() - rest.len(), rest, mask);
}

#[cfg(test)]
mod tests {
    use super::super::test_support::{
        KEYS, bits, check_against_reference, check_finite_chunks, check_hostile_words, decode, encode,
        lengths, round_trip, sample,
    };
    use super::*;

    fn fractions() -> Vec<Fraction> {
        [0.000_001, 0.01, 0.3, 1.0].into_iter().filter_map(Fraction::new).collect()
    }

    /// Short chunks, and for one fraction a chunk of one block and one element.
    fn lengths_for(fraction: Fraction) -> Vec<usize> {
        let mut lengths = lengths(1001);
        lengths.retain(|&length| length < SPARSE_BLOCK || fraction.value() == 0.01);
        lengths
    }

    /// Top-k by sorting.
    fn reference_top_k(values: &[f32], kept: usize) -> Vec<u32> {
        let mut indices: Vec<usize> = (0..values.len()).collect();
        indices.sort_by_key(|&index| (std::cmp::Reverse(values[index].to_bits() & MAGNITUDE), index));
        indices.truncate(kept);
        indices.sort_unstable();
        let pair = |pair: &[usize]| (pair[0] | pair.get(1).unwrap_or(&0) << 16) as u32;
        let mut words: Vec<u32> = indices.chunks(2).map(pair).collect();
        words.extend(indices.iter().map(|&index| values[index].to_bits()));
        words
    }

    #[test]
    fn top_k_gives_the_same_bits_as_the_reference() {
        for fraction in fractions() {
            check_against_reference(
                TopKCodec(fraction),
                lengths_for(fraction),
                |values| {
                    let blocks = values.chunks(SPARSE_BLOCK);
                    blocks.flat_map(|values| reference_top_k(values, fraction.of(values.len()))).collect()
                },
                |mut words, count| {
                    let mut values = vec![0.0; count];
                    for values in values.chunks_mut(SPARSE_BLOCK) {
                        let kept = fraction.of(values.len());
                        for i in 0..kept {
                            let index = words[i / 2] >> (16 * (i % 2)) & 0xffff;
                            values[index as usize] = f32::from_bits(words[kept.div_ceil(2) + i]);
                        }
                        words = &words[kept.div_ceil(2) + kept..];
                    }
                    values
                },
            );
        }
    }

    /// Equal digits of the magnitudes, down to equal magnitudes, need all passes of the selection.
    #[test]
    fn of_equal_magnitudes_the_first_are_kept() {
        let third = Fraction::new(0.333_333).expect("a fraction");
        let patterns: [fn(u32) -> u32; 4] = [
            |_| 0x3f80_0000,
            |i| 0x3f80_0000 | (i % 3) | i << 31,
            |i| 0x3f80_0000 | (i * 7919 % 5) << 9,
            |i| if i % 2 == 0 { 0x7fc0_0000 } else { 0x7f80_0000 | (i % 4) },
        ];
        for (pattern, of) in patterns.into_iter().enumerate() {
            let values: Vec<f32> = (0..1000).map(|i| f32::from_bits(of(i))).collect();
            for count in [1, 2, 3, 31, 32, 33, 999] {
                let values = &values[..count];
                let expected = reference_top_k(values, third.of(count));
                assert!(
                    encode(TopKCodec(third), values, KEYS) == expected,
                    "pattern {pattern}, {count} elements"
                );
            }
        }
    }

    #[test]
    fn indices_that_are_too_large_or_not_ascending_do_not_decode() {
        let half = TopKCodec(Fraction::new(0.5).expect("a fraction"));
        let one = 1f32.to_bits();
        let decode_indices = |a: u32, b: u32| decode(half, &[a | b << 16, one, one], 4, KEYS);
        assert_eq!(decode_indices(1, 3), Ok(vec![0.0, 1.0, 0.0, 1.0]));
        for (a, b, reason) in
            [(1, 1, "ascending"), (2, 0, "ascending"), (1, 4, "too large"), (0xffff, 0, "too large")]
        {
            let error = decode_indices(a, b).expect_err("the indices are wrong");
            assert!(error.0.contains(reason), "{a} {b}: {error}");
        }
        for fraction in fractions() {
            check_hostile_words(TopKCodec(fraction));
            check_hostile_words(RandomKCodec(fraction));
        }
    }

    #[test]
    fn the_error_of_top_k_is_within_its_bound() {
        for fraction in fractions() {
            check_finite_chunks(TopKCodec(fraction), |values, decoded| {
                let square = |value: f32| f64::from(value) * f64::from(value);
                let all: f64 = values.iter().map(|&value| square(value)).sum();
                let lost = values.iter().zip(decoded).filter(|(value, decoded)| value != decoded);
                let lost: f64 = lost.map(|(&value, _)| square(value)).sum();
                let left = values.len() - fraction.of(values.len());
                assert!(
                    lost <= all * left as f64 / values.len().max(1) as f64 * 1.000_001,
                    "{lost} of {all}"
                );
                let kept = values
                    .iter()
                    .zip(decoded)
                    .filter(|(value, decoded)| bits(&[**value]) == bits(&[**decoded]));
                assert!(kept.count() >= fraction.of(values.len()));
            });
        }
    }

    #[test]
    fn special_values_are_among_the_largest() {
        let fraction = Fraction::new(0.02).expect("a fraction");
        let mut values = sample(100, 4);
        (values[40], values[70], values[90]) = (f32::MAX, f32::NEG_INFINITY, -f32::NAN);
        let decoded = round_trip(TopKCodec(fraction), &values, KEYS);
        assert_eq!((decoded[70], bits(&decoded[90..91])), (f32::NEG_INFINITY, bits(&values[90..91])));
        assert_eq!(decoded.iter().filter(|value| **value != 0.0).count(), 2);
        let subnormal = [0.0, 1e-45, -0.0, 0.0];
        assert_eq!(round_trip(TopKCodec(fraction), &subnormal, KEYS), subnormal);
        assert_eq!(bits(&round_trip(TopKCodec(fraction), &[-0.0, 0.0], KEYS)), bits(&[-0.0, 0.0]));
    }

    #[test]
    fn random_k_gives_the_same_bits_as_the_reference() {
        let positions = |count: usize, kept: usize, block: usize| {
            let random = BlockRandom::new(mix(KEYS.shared), block);
            (0..kept).map(move |j| {
                let (start, end) = (j * count / kept, (j + 1) * count / kept);
                start + ((random.bits(j as u32) as usize * (end - start)) >> 32)
            })
        };
        for fraction in fractions() {
            check_against_reference(
                RandomKCodec(fraction),
                lengths_for(fraction),
                |values| {
                    let blocks = values.chunks(SPARSE_BLOCK).enumerate();
                    let encode = |(block, values): (usize, &[f32])| {
                        let positions = positions(values.len(), fraction.of(values.len()), block);
                        positions.map(|at| values[at].to_bits()).collect::<Vec<_>>()
                    };
                    blocks.flat_map(encode).collect()
                },
                |mut words, count| {
                    let mut values = vec![0.0; count];
                    for (block, values) in values.chunks_mut(SPARSE_BLOCK).enumerate() {
                        let kept = fraction.of(values.len());
                        for (at, word) in positions(values.len(), kept, block).zip(words) {
                            values[at] = f32::from_bits(*word);
                        }
                        words = &words[kept..];
                    }
                    values
                },
            );
        }
    }

    #[test]
    fn random_k_chooses_each_element_equally_often() {
        let codec = RandomKCodec(Fraction::new(0.25).expect("a fraction"));
        let draws = if cfg!(miri) { 10 } else { 4000 };
        let mut counts = [0f64; 16];
        for shared in 0..draws {
            let decoded = round_trip(codec, &[1.0; 16], RandomKeys { shared, own: shared % 3 });
            for (stride, count) in decoded.chunks(4).zip(counts.chunks_mut(4)) {
                assert_eq!(stride.iter().sum::<f32>(), 1.0);
                count.iter_mut().zip(stride).for_each(|(count, &value)| *count += f64::from(value));
            }
        }
        // Five standard deviations of the number of successes, each of which has the probability 1/4.
        let limit = 5.0 * (draws as f64 * 0.25 * 0.75).sqrt();
        assert!(counts.iter().all(|count| (count - draws as f64 / 4.0).abs() <= limit), "{counts:?}");
    }

    #[test]
    fn random_k_decodes_to_nan_if_an_element_is_not_finite() {
        let codec = RandomKCodec(Fraction::new(0.1).expect("a fraction"));
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 5, 99] {
                let mut values = sample(100, 2);
                values[at] = special;
                let decoded = round_trip(codec, &values, KEYS);
                assert_eq!(decoded.iter().filter(|value| value.is_nan()).count(), 10);
            }
        }
        assert_eq!(bits(&round_trip(codec, &[-0.0], KEYS)), bits(&[-0.0]));
        assert_eq!(round_trip(codec, &[f32::MAX], KEYS), [f32::MAX]);
    }

    #[test]
    fn the_cost_is_as_documented() {
        let percent = Fraction::new(0.01).expect("a fraction");
        assert_eq!(TopKCodec(percent).encoded_words(1000) * 4, 6 * 10);
        assert_eq!(TopKCodec(percent).encoded_words(900) * 4, 6 * 9 + 2);
        assert_eq!(TopKCodec(percent).encoded_words(SPARSE_BLOCK + 1000), 656 * 3 / 2 + 15);
        assert_eq!(RandomKCodec(percent).encoded_words(SPARSE_BLOCK + 1000), 656 + 10);
        assert!(encode(TopKCodec(percent), &[], KEYS).is_empty());
        assert!(encode(RandomKCodec(percent), &[], KEYS).is_empty());
    }
}
