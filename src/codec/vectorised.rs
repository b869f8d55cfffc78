//! Runs the loops of a codec on the widest vector unit of the processor.

use super::interface::{Codec, DecodeError, RandomKeys};
use crate::simd::{VectorLoop, VectorWidth};

/// The number of elements of a tile of codecs with short blocks. The elements of a tile, their errors and their decoded values
/// fit into 48 KiB.
pub(super) const TILE: usize = 4096;

/// The loops of a codec. Each method has the contract of the method of [`Codec`] with the same name, but its caller has
/// checked the lengths of the slices.
///
/// The methods are compiled for several vector units, so they and all functions that they call must be `#[inline(always)]`.
pub(super) trait CodecLoops: Send + Sync + std::fmt::Debug {
    fn encoded_words(&self, count: usize) -> usize;

    fn encode(&self, values: &[f32], keys: RandomKeys, words: &mut [u32]);

    fn decode(&self, words: &[u32], keys: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError>;

    fn rounds_own_values(&self) -> bool {
        false
    }

    fn tile_elements(&self) -> Option<usize> {
        None
    }
}

/// A codec with the vector unit on which it runs.
#[derive(Debug)]
pub(super) struct Vectorised<L> {
    loops: L,
    width: VectorWidth,
}

impl<L> Vectorised<L> {
    /// Creates a codec that runs on the widest vector unit.
    pub(super) fn new(loops: L) -> Self {
        Self { loops, width: VectorWidth::detect() }
    }

    /// Creates a codec that runs on a given vector unit.
    #[cfg(test)]
    pub(super) fn with_width(loops: L, width: VectorWidth) -> Self {
        Self { loops, width }
    }
}

impl<L: CodecLoops> Codec for Vectorised<L> {
    fn encoded_words(&self, count: usize) -> usize {
        self.loops.encoded_words(count)
    }

    fn encode(&self, values: &[f32], keys: RandomKeys, words: &mut [u32]) {
        assert_eq!(
            words.len(),
            self.encoded_words(values.len()),
            "the words have the length of the encoding"
        );
        self.width.run(EncodeLoop { loops: &self.loops, values, keys, words });
    }

    fn decode(&self, words: &[u32], keys: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        if words.len() != self.encoded_words(values.len()) {
            return Err(DecodeError("the encoding has another length"));
        }
        self.width.run(DecodeLoop { loops: &self.loops, words, keys, values })
    }

    fn rounds_own_values(&self) -> bool {
        self.loops.rounds_own_values()
    }

    fn tile_elements(&self) -> Option<usize> {
        self.loops.tile_elements()
    }
}

struct EncodeLoop<'a, L> {
    loops: &'a L,
    values: &'a [f32],
    keys: RandomKeys,
    words: &'a mut [u32],
}

impl<L: CodecLoops> VectorLoop for EncodeLoop<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.loops.encode(self.values, self.keys, self.words);
    }
}

struct DecodeLoop<'a, L> {
    loops: &'a L,
    words: &'a [u32],
    keys: RandomKeys,
    values: &'a mut [f32],
}

impl<L: CodecLoops> VectorLoop for DecodeLoop<'_, L> {
    type Output = Result<(), DecodeError>;

    #[inline(always)]
    fn run(self) -> Self::Output {
        self.loops.decode(self.words, self.keys, self.values)
    }
}
