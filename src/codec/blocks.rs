//! What encodings with a scale for each block of elements share: the division of a chunk into blocks, the largest
//! absolute value of a block, and the storage of codes in words.

use super::interface::{DecodeError, RandomKeys};
use super::vectorised::{CodecLoops, TILE};
use crate::simd::highest_bits;

/// The number of elements whose codes [`pack_planes`] stores together.
pub(super) const GROUP: usize = 32;

/// The bits of positive infinity. Larger magnitudes are NaNs.
const INFINITY: u32 = f32::INFINITY.to_bits();

/// An encoding of blocks of `N` elements. All methods are `#[inline(always)]`, like those of [`CodecLoops`].
pub(super) trait BlockFormat<const N: usize>: Send + Sync + std::fmt::Debug {
    /// Returns the number of words of a block of which only the first `count` elements are used.
    fn block_words(&self, count: usize) -> usize;

    /// Encodes a block. The elements after the first `count` are zeros.
    fn encode_block(&self, values: &[f32; N], count: usize, random: BlockRandom, words: &mut [u32]);

    /// Decodes a block.
    fn decode_block(&self, words: &[u32], values: &mut [f32; N]);

    /// Returns whether the encoding of a block depends on random numbers.
    fn is_random(&self) -> bool {
        false
    }

    /// See [`Codec::rounds_own_values`](super::interface::Codec::rounds_own_values).
    fn rounds_own_values(&self) -> bool {
        false
    }
}

/// The codec that encodes each block of `N` elements with a format. The words of a block follow those of the block before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockCodec<F, const N: usize>(pub(super) F);

impl<F: BlockFormat<N>, const N: usize> CodecLoops for BlockCodec<F, N> {
    #[inline(always)]
    fn encoded_words(&self, count: usize) -> usize {
        count / N * self.0.block_words(N) + self.0.block_words(count % N)
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], keys: RandomKeys, words: &mut [u32]) {
        let (blocks, rest) = values.as_chunks::<N>();
        let (block_words, rest_words) = words.split_at_mut(blocks.len() * self.0.block_words(N));
        let seed = mix(keys.own);
        let pairs = blocks.iter().zip(block_words.chunks_exact_mut(self.0.block_words(N)));
        for (index, (values, words)) in pairs.enumerate() {
            self.0.encode_block(values, N, BlockRandom::new(seed, index), words);
        }
        if !rest.is_empty() {
            let (mut padded, mut padded_words) = ([0.0; N], [0; N]);
            padded[..rest.len()].copy_from_slice(rest);
            let padded_words = &mut padded_words[..self.0.block_words(N)];
            self.0.encode_block(&padded, rest.len(), BlockRandom::new(seed, blocks.len()), padded_words);
            rest_words.copy_from_slice(&padded_words[..rest_words.len()]);
        }
    }

    #[inline(always)]
    fn decode(&self, words: &[u32], _: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        let (blocks, rest) = values.as_chunks_mut::<N>();
        let (block_words, rest_words) = words.split_at(blocks.len() * self.0.block_words(N));
        for (values, words) in blocks.iter_mut().zip(block_words.chunks_exact(self.0.block_words(N))) {
            self.0.decode_block(words, values);
        }
        if !rest.is_empty() {
            let (mut padded, mut padded_words) = ([0.0; N], [0; N]);
            padded_words[..rest_words.len()].copy_from_slice(rest_words);
            self.0.decode_block(&padded_words[..self.0.block_words(N)], &mut padded);
            rest.copy_from_slice(&padded[..rest.len()]);
        }
        Ok(())
    }

    fn rounds_own_values(&self) -> bool {
        self.0.rounds_own_values()
    }

    fn tile_elements(&self) -> Option<usize> {
        const { assert!(TILE.is_multiple_of(N), "a tile consists of whole blocks") };
        (!self.0.is_random()).then_some(TILE)
    }
}

/// Returns the largest absolute value. Returns `None` if there is a NaN or an infinity.
#[inline(always)]
pub(super) fn largest_magnitude(values: &[f32]) -> Option<f32> {
    // As integers, the bits of absolute values are in the order of the values, with infinity and NaNs last.
    let largest = values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff));
    (largest < INFINITY).then_some(f32::from_bits(largest))
}

/// Returns the sum of `term` of each value. The additions are in the same order for every vector unit. The sum is in
/// `f64`, so that neither the squares nor the sums overflow or underflow.
#[inline(always)]
pub(super) fn sum_of(values: &[f32], term: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; 16];
    for values in values.as_chunks::<16>().0 {
        for (lane, &value) in lanes.iter_mut().zip(values) {
            *lane += term(f64::from(value));
        }
    }
    lanes.iter().sum()
}

/// Returns the scale with which `largest` is encoded as `code`. The inverse of a smaller scale than the result's least
/// value would overflow, and so would the product of `code` and a larger scale than the result's greatest value.
#[inline(always)]
pub(super) fn scale_of(largest: f32, code: f32) -> f32 {
    (largest / code).max(f32::MIN_POSITIVE).min((f32::MAX / code).next_down())
}

/// Writes a block that decodes to NaN, because its scale, the first word, is NaN.
#[inline(always)]
pub(super) fn write_not_finite(words: &mut [u32]) {
    words.fill(0);
    words[0] = f32::NAN.to_bits();
}

/// Stores the lowest 8 bits of each code, four codes in each word.
#[inline(always)]
pub(super) fn pack_bytes(codes: &[u32], words: &mut [u32]) {
    for (byte, &code) in bytemuck::cast_slice_mut::<u32, u8>(words).iter_mut().zip(codes) {
        *byte = code as u8;
    }
}

/// Stores the lowest `bits` bits of each code: for each group of 32 codes, `bits` words. Bit `i` of word `j` is bit `j`
/// of code `i`. All codes are stored, which must be a multiple of 32. `bits` is at most 8.
#[inline(always)]
pub(super) fn pack_planes(codes: &[u32], bits: usize, words: &mut [u32]) {
    for (codes, planes) in codes.as_chunks::<GROUP>().0.iter().zip(words.chunks_exact_mut(bits)) {
        // `map` of arrays may not be inlined, and would then not run on the vector unit.
        let (mut bytes, mut shifted) = ([0; GROUP], [0; GROUP]);
        bytes.iter_mut().zip(codes).for_each(|(byte, &code)| *byte = code as u8);
        for (bit, plane) in planes.iter_mut().enumerate() {
            shifted.iter_mut().zip(&bytes).for_each(|(shifted, byte)| *shifted = byte << (7 - bit));
            *plane = highest_bits(shifted);
        }
    }
}

/// Returns the codes that [`pack_planes`] has stored.
#[inline(always)]
pub(super) fn unpack_planes<const N: usize>(bits: usize, words: &[u32]) -> [u32; N] {
    let mut all = [0; N];
    for (codes, planes) in all.as_chunks_mut::<GROUP>().0.iter_mut().zip(words.chunks_exact(bits)) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = planes.iter().rev().fold(0, |code, plane| code << 1 | plane >> i & 1);
        }
    }
    all
}

/// The difference of the arguments of [`mix_u32`] for two successive elements of a block.
const ELEMENT_STEP: u32 = 0x9e37_79b9;

/// The random numbers of a block. Each is a function of a key, the index of the block, and the index of the element in
/// the block.
#[derive(Clone, Copy)]
pub(super) struct BlockRandom(u32);

impl BlockRandom {
    /// `seed` is the [`mix`] of a key.
    #[inline(always)]
    pub(super) fn new(seed: u64, block: usize) -> Self {
        Self((mix(seed.wrapping_add(block as u64)) >> 32) as u32)
    }

    /// Returns the random numbers of the elements after the first `count` elements.
    #[inline(always)]
    pub(super) fn after(self, count: usize) -> Self {
        Self(self.0.wrapping_add((count as u32).wrapping_mul(ELEMENT_STEP)))
    }

    /// Returns the random number of an element. All numbers are equally likely.
    #[inline(always)]
    pub(super) fn bits(self, element: u32) -> u32 {
        mix_u32(self.0.wrapping_add(element.wrapping_mul(ELEMENT_STEP)))
    }

    /// Returns the random number of an element as a float. All numbers between -0.5 and 0.5, in steps of 2^-23, are
    /// equally likely.
    #[inline(always)]
    pub(super) fn centred(self, element: u32) -> f32 {
        ((self.bits(element) >> 9) as i32 as f32 + 0.5) * (1.0 / (1 << 23) as f32) - 0.5
    }
}

/// Returns a number whose bits all depend on all bits of `key`: the finalizer of `SplitMix64` (Steele, Lea and Flood, 2014).
#[inline(always)]
pub(super) fn mix(key: u64) -> u64 {
    let z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// The same for 32 bits: the function `lowbias32` by Chris Wellons, with the constants of `TheIronBorn`.
#[inline(always)]
fn mix_u32(key: u32) -> u32 {
    let z = (key ^ key >> 16).wrapping_mul(0x21f0_aaad);
    let z = (z ^ z >> 15).wrapping_mul(0xd35a_2d97);
    z ^ z >> 15
}
