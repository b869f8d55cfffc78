//! Gradient compression: encodings of `f32` elements for links. Each codec has a file of its own, which names its source, its
//! cost and its error.
//!
//! The encoding of a chunk has a length that depends only on the number of elements, so the receiver knows it before the chunk
//! arrives. Lengths are counted in words of 32 bits.

mod half_floats;

use std::fmt;

pub use half_floats::CompressedElement;

pub use crate::types::Compression;

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

/// Returns the codec of a compression. Returns `None` if the ranks send unchanged elements, or if the compression is no encoding
/// of chunks ([`Compression::PowerSgd`] and [`Compression::Auto`]).
pub fn codec(compression: Compression) -> Option<Box<dyn Codec>> {
    Some(match compression {
        Compression::Fp16 => Box::new(half_floats::HalfFloats::<half::f16>::new()),
        Compression::Bf16 => Box::new(half_floats::HalfFloats::<half::bf16>::new()),
        _ => return None,
    })
}
