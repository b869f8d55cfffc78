//! The trait of all codecs.

use std::fmt;

/// The keys from which a codec draws its random numbers. Codecs that draw none ignore them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RandomKeys {
    /// The same on all ranks for a chunk of a call.
    pub shared: u64,
    /// Different on each rank.
    pub own: u64,
}

/// Encodes and decodes chunks of `f32` elements. Encoding and decoding give the same bits on every processor.
pub trait Codec: Send + Sync + fmt::Debug {
    /// Returns the number of words of an encoded chunk of `count` elements.
    fn encoded_words(&self, count: usize) -> usize;

    /// Encodes `values` into `words`, which has [`encoded_words`](Self::encoded_words) words. Writes all words.
    ///
    /// # Panics
    ///
    /// If `words` has another length.
    fn encode(&self, values: &[f32], keys: RandomKeys, words: &mut [u32]);

    /// Returns the number of elements of a *tile*, if a chunk can be encoded and decoded in tiles: the encoding of the chunk
    /// consists of the encodings of its tiles, one after another, which do not depend on the keys. Tiles fit into the processor's
    /// caches. Returns `None` if only whole chunks can be encoded.
    fn tile_elements(&self) -> Option<usize> {
        None
    }

    /// Decodes `words` into `values`, and sets all values. The words may come from another rank, so they may be arbitrary.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if no values have this encoding, or `words` has another length than
    /// [`encoded_words`](Self::encoded_words).
    fn decode(&self, words: &[u32], keys: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError>;

    /// Returns whether the owner of a chunk encodes and decodes its own contribution before it adds it, as it does with the
    /// contributions of the other ranks. In a majority vote, all votes have the same weight.
    fn rounds_own_values(&self) -> bool {
        false
    }
}

/// Why words do not decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DecodeError(pub &'static str);
