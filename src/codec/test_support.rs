//! Checks that the tests of all codecs share.

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::interface::{Codec as _, DecodeError, RandomKeys};
use super::vectorised::{CodecLoops, Vectorised};
use crate::simd::VectorWidth;

pub(super) const KEYS: RandomKeys = RandomKeys { shared: 0x5eed, own: 0x0e11 };

/// Returns lengths of chunks for a codec whose blocks have this number of elements.
pub(super) fn lengths(block: usize) -> Vec<usize> {
    let mut lengths = vec![0, 1, 2, 31, 32, 33, 1000, block - 1, block, block + 1];
    // Miri would need minutes for this length.
    lengths.extend((!cfg!(miri)).then_some(65_537));
    lengths
}

/// Returns elements with many exponents and both signs. Some are zeros, and one block of 64 elements is zero.
pub(super) fn sample(count: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut element = |index: usize| {
        let magnitude = 2f32.powi(random.random_range(-20..4)) * random.random_range(1.0f32..2.0);
        let factor = [1.0, -1.0, 1.0, -1.0, 0.0][random.random_range(0..5)];
        if (256..320).contains(&index) { 0.0 } else { magnitude * factor }
    };
    (0..count).map(&mut element).collect()
}

/// Encodes with the widest vector unit.
pub(super) fn encode<L: CodecLoops>(loops: L, values: &[f32], keys: RandomKeys) -> Vec<u32> {
    let mut words = vec![u32::MAX; loops.encoded_words(values.len())];
    Vectorised::new(loops).encode(values, keys, &mut words);
    words
}

/// Decodes `count` elements with the widest vector unit.
pub(super) fn decode<L: CodecLoops>(
    loops: L,
    words: &[u32],
    count: usize,
    keys: RandomKeys,
) -> Result<Vec<f32>, DecodeError> {
    let mut values = vec![f32::NAN; count];
    Vectorised::new(loops).decode(words, keys, &mut values)?;
    Ok(values)
}

/// Encodes and decodes.
pub(super) fn round_trip<L: CodecLoops + Copy>(loops: L, values: &[f32], keys: RandomKeys) -> Vec<f32> {
    decode(loops, &encode(loops, values, keys), values.len(), keys)
        .expect("the codec decodes what it has encoded")
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Checks that the codec encodes and decodes to the same bits as the reference, on each vector unit, for each length.
pub(super) fn check_against_reference<L: CodecLoops + Copy>(
    loops: L,
    lengths: Vec<usize>,
    encode: impl Fn(&[f32]) -> Vec<u32>,
    decode: impl Fn(&[u32], usize) -> Vec<f32>,
) {
    for length in lengths {
        let values = sample(length, 7);
        let expected_words = encode(&values);
        let expected_values = bits(&decode(&expected_words, length));
        for width in VectorWidth::all_supported() {
            let codec = Vectorised::with_width(loops, width);
            assert_eq!(codec.encoded_words(length), expected_words.len(), "{loops:?} of {length} elements");
            let mut words = vec![u32::MAX; expected_words.len()];
            codec.encode(&values, KEYS, &mut words);
            assert!(words == expected_words, "{loops:?}: the encoding of {length} elements by {width:?}");
            let mut decoded = vec![f32::NAN; length];
            codec.decode(&words, KEYS, &mut decoded).expect("the encoding decodes");
            assert!(bits(&decoded) == expected_values, "{loops:?}: {length} elements, decoded by {width:?}");
        }
    }
}

/// Checks that any words decode to the same values on all vector units, or to an error, and that words of another
/// length are an error.
pub(super) fn check_hostile_words<L: CodecLoops + Copy>(loops: L) {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 32 },
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let chunk = (0usize..2100).prop_flat_map(|count| {
        let words = loops.encoded_words(count);
        (Just(count), proptest::collection::vec(any::<u32>(), words))
    });
    let check = |(count, words): (usize, Vec<u32>)| {
        let results = VectorWidth::all_supported().into_iter().map(|width| {
            let mut values = vec![0.0; count];
            let result = Vectorised::with_width(loops, width).decode(&words, KEYS, &mut values);
            result.map(|()| {
                // The bits of a NaN differ between processors.
                values
                    .iter()
                    .map(|value| if value.is_nan() { None } else { Some(value.to_bits()) })
                    .collect::<Vec<_>>()
            })
        });
        let results: Vec<_> = results.collect();
        prop_assert!(results.iter().all(|result| *result == results[0]));
        let longer = [&words[..], &[0]].concat();
        prop_assert!(decode(loops, &longer, count, KEYS).is_err());
        if let Some((_, shorter)) = words.split_last() {
            prop_assert!(decode(loops, shorter, count, KEYS).is_err());
        }
        Ok(())
    };
    runner.run(&chunk, check).unwrap_or_else(|error| panic!("{loops:?}: {error}"));
}

/// Checks a property of the codec's results for finite elements of all magnitudes, in chunks of up to 520 elements.
/// `check` gets the elements and the decoded elements.
pub(super) fn check_finite_chunks<L: CodecLoops + Copy>(loops: L, check: impl Fn(&[f32], &[f32])) {
    let finite = proptest::num::f32::NORMAL | proptest::num::f32::SUBNORMAL | proptest::num::f32::ZERO;
    // Elements of similar magnitudes, and elements of any magnitude.
    let close =
        (-140i32..126, proptest::collection::vec(-2f32..2.0, 0..520)).prop_map(|(exponent, values)| {
            values.iter().map(|value| (f64::from(*value) * 2f64.powi(exponent)) as f32).collect::<Vec<_>>()
        });
    let chunk = prop_oneof![close, proptest::collection::vec(finite, 0..520)];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 32 },
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let run = |values: Vec<f32>| {
        check(&values, &round_trip(loops, &values, KEYS));
        Ok(())
    };
    runner.run(&chunk, run).unwrap_or_else(|error| panic!("{loops:?}: {error}"));
}

/// Checks that a NaN or an infinity anywhere in the chunk makes its block decode to NaN, and leaves the other blocks
/// unchanged.
pub(super) fn check_not_finite_elements<L: CodecLoops + Copy>(loops: L, block: usize) {
    let count = 2 * block + block / 2;
    for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, block - 1, block, 2 * block + 1, count - 1] {
            let mut values = sample(count, 3);
            let finite = round_trip(loops, &values, KEYS);
            values[at] = special;
            for (index, (decoded, finite)) in round_trip(loops, &values, KEYS).iter().zip(finite).enumerate()
            {
                let expected =
                    if index / block == at / block { decoded.is_nan() } else { *decoded == finite };
                assert!(expected, "{loops:?}: {special} at {at} decodes to {decoded} at {index}");
            }
        }
    }
}

/// Checks that the mean of many decoded elements, with different keys, approaches the elements. `scale` is the distance
/// of the two values to which each element decodes.
pub(super) fn check_unbiased<L: CodecLoops + Copy>(loops: L, values: &[f32], scale: f32) {
    let draws = if cfg!(miri) { 10 } else { 1000 };
    let mut sums = vec![0.0; values.len()];
    for draw in 0..draws {
        let keys = RandomKeys { shared: 0, own: draw };
        for (sum, (decoded, value)) in sums.iter_mut().zip(round_trip(loops, values, keys).iter().zip(values))
        {
            let error = f64::from(*decoded) - f64::from(*value);
            assert!(error.abs() <= f64::from(scale) * 1.0001, "{loops:?}: {value} decodes to {decoded}");
            *sum += error;
        }
    }
    // The standard deviation of one error is at most half the scale. The means of one element and of all elements are
    // within five standard deviations of 0.
    let draws = draws as f64;
    let limit = |count: f64| 5.0 * f64::from(scale) / 2.0 / count.sqrt();
    for (sum, value) in sums.iter().zip(values) {
        let mean = sum / draws;
        assert!(mean.abs() <= limit(draws), "{loops:?}: the mean error of {value} is {mean}");
    }
    let all = draws * values.len() as f64;
    let mean = sums.iter().sum::<f64>() / all;
    assert!(mean.abs() <= limit(all), "{loops:?}: the mean error of all elements is {mean}");
}

/// Packs codes of `bits` bits, as `pack_planes` does: bit `i` of word `j` of a group of 32 codes is bit `j` of code `i`.
pub(super) fn reference_planes(codes: &[u32], bits: usize) -> Vec<u32> {
    let mut words = vec![0; codes.len().div_ceil(32) * bits];
    for (index, code) in codes.iter().enumerate() {
        for bit in 0..bits {
            words[index / 32 * bits + bit] |= (code >> bit & 1) << (index % 32);
        }
    }
    words
}

/// Returns the code of element `index`, which [`reference_planes`] has packed.
pub(super) fn reference_code(words: &[u32], bits: usize, index: usize) -> u32 {
    (0..bits).map(|bit| (words[index / 32 * bits + bit] >> (index % 32) & 1) << bit).sum()
}
