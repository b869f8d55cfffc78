//! Seeded streams of random numbers. A stream gives the same numbers on every host, for every world size, and in
//! every later version of ringtrain.
//!
//! The generator is xoshiro256++ (Blackman and Vigna 2021), seeded with the SHA-256 of the stream's purpose, seed and
//! index. This module implements the shuffle and the conversion to floats itself, because a new release of the crate
//! `rand` may return other numbers.

use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use sha2::{Digest, Sha256};

/// A stream of random numbers.
pub(crate) type RandomStream = Xoshiro256PlusPlus;

/// Returns the stream for `purpose`. Streams that differ in any argument are independent.
pub(crate) fn random_stream(purpose: &str, seed: u64, index: u64) -> RandomStream {
    let digest = Sha256::new()
        .chain_update(b"ringtrain\0")
        .chain_update(purpose.as_bytes())
        .chain_update([0])
        .chain_update(seed.to_le_bytes())
        .chain_update(index.to_le_bytes())
        .finalize();
    RandomStream::from_seed(digest.into())
}

/// Returns a uniform random number from -`bound` up to, but not including, `bound`.
pub(crate) fn symmetric_uniform(stream: &mut RandomStream, bound: f32) -> f32 {
    // An f32 has 24 bits of precision, so the conversion does not round.
    let unit = (stream.next_u32() >> 8) as f32 / 16_777_216.0;
    (2.0 * unit - 1.0) * bound
}

/// A short stream of random numbers that costs little to start. The generator is `SplitMix64` (Steele, Lea and Flood,
/// "Fast splittable pseudorandom number generators", OOPSLA 2014).
pub(crate) struct SplitMix(u64);

impl SplitMix {
    /// Starts stream number `index` of the streams with this `key`.
    pub(crate) fn new(key: u64, index: u64) -> Self {
        // Two hashes spread the starts, so that the streams of adjacent keys and indices do not overlap.
        Self(Self(key ^ Self(index).next_word()).next_word())
    }

    /// Returns the next number.
    pub(crate) fn next_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Returns a uniform random permutation of 0..`len`.
pub(crate) fn permutation(stream: &mut RandomStream, len: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..len).collect();
    shuffle(stream, &mut order);
    order
}

/// Shuffles `items` (Fisher-Yates shuffle).
pub(crate) fn shuffle(stream: &mut RandomStream, items: &mut [u32]) {
    for last in (1..items.len()).rev() {
        // The bias is less than 2^-32, so this function uses every random number and rejects none.
        let chosen = (u128::from(stream.next_u64()) * (last as u128 + 1)) >> 64;
        items.swap(last, chosen as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_contain_each_index_once_and_depend_on_each_argument() {
        let make = |purpose, seed, index| permutation(&mut random_stream(purpose, seed, index), 1000);
        let first = make("a", 1, 2);
        assert_eq!(first, make("a", 1, 2));
        for other in [make("b", 1, 2), make("a", 2, 2), make("a", 1, 3)] {
            assert_ne!(first, other);
        }
        let mut sorted = first;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        assert!(permutation(&mut random_stream("a", 0, 0), 0).is_empty());
    }

    /// If these numbers changed, seeded and resumed runs would give different results.
    #[test]
    fn random_streams_give_the_recorded_numbers() {
        assert_eq!(permutation(&mut random_stream("test", 42, 7), 8), EXPECTED_PERMUTATION);
    }

    const EXPECTED_PERMUTATION: [u32; 8] = [7, 5, 1, 0, 4, 6, 3, 2];
}
