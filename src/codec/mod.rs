//! Gradient compression: encodings of `f32` elements for links. Each codec has a file of its own, which names its source, its
//! cost and its error.
//!
//! The encoding of a chunk has a length that depends only on the number of elements, so the receiver knows it before
//! the chunk arrives. Lengths are counted in words of 32 bits.

#![expect(
    clippy::inline_always,
    reason = "a loop is compiled for a vector unit only if all functions that it calls are inlined"
)]

pub(crate) mod auto_choice;
mod blocks;
pub(crate) mod error_feedback;
mod fp8;
mod half_floats;
mod integers;
mod interface;
mod signs;
mod sparse;
#[cfg(test)]
mod test_support;
mod vectorised;

use half::{bf16, f16};

use self::blocks::BlockCodec;
use self::fp8::{E4M3, E5M2, Fp8};
use self::half_floats::HalfFloats;
use self::integers::{Int4, Int8, Qsgd};
pub use self::interface::{Codec, DecodeError, RandomKeys};
use self::signs::{OneBit, SignSgd};
use self::sparse::{RandomKCodec, TopKCodec};
use self::vectorised::{CodecLoops, Vectorised};
pub use crate::types::Compression;
use crate::types::Fp8Format;

/// Returns the codec of a compression. Returns `None` if the ranks send unchanged elements, or if the compression is no
/// encoding of chunks ([`Compression::PowerSgd`] and [`Compression::Auto`]).
pub fn codec(compression: Compression) -> Option<Box<dyn Codec>> {
    Some(match compression {
        Compression::None | Compression::PowerSgd(_) | Compression::Auto(_) => return None,
        Compression::Fp16 => boxed(HalfFloats::<f16>::new()),
        Compression::Bf16 => boxed(HalfFloats::<bf16>::new()),
        Compression::Fp8(Fp8Format::E4M3) => boxed(BlockCodec(Fp8::<E4M3>::new())),
        Compression::Fp8(Fp8Format::E5M2) => boxed(BlockCodec(Fp8::<E5M2>::new())),
        Compression::Int8(rounding) => boxed(BlockCodec(Int8(rounding))),
        Compression::Int4(rounding) => boxed(BlockCodec(Int4(rounding))),
        Compression::Qsgd(bits) => boxed(BlockCodec(Qsgd { bits })),
        Compression::OneBit => boxed(BlockCodec(OneBit)),
        Compression::SignSgd => boxed(BlockCodec(SignSgd)),
        Compression::TopK(fraction) => boxed(TopKCodec(fraction)),
        Compression::RandomK(fraction) => boxed(RandomKCodec(fraction)),
        Compression::Ef21(biased) => return codec(biased.compression()),
    })
}

/// Returns the error of an encoding as error feedback stores it. An error that is not finite becomes 0, because it would make all
/// later results of its element infinite or NaN.
#[inline(always)]
pub(crate) fn finite_or_zero(error: f32) -> f32 {
    if error.is_finite() { error } else { 0.0 }
}

fn boxed<L: CodecLoops + 'static>(loops: L) -> Box<dyn Codec> {
    Box::new(Vectorised::new(loops))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_encoding_of_chunks_has_a_codec() {
        for name in ["none", "powersgd", "auto"] {
            assert!(codec(name.parse().expect("a name")).is_none(), "{name}");
        }
        let names = "fp16 bf16 fp8-e4m3 fp8-e5m2 int8 int8-stochastic int4 int4-stochastic qsgd:2 qsgd:8 onebit signsgd \
                     topk:0.5 randomk:0.5";
        for name in names.split_whitespace() {
            let codec = codec(name.parse().expect("a name")).expect("the compression encodes chunks");
            let (mut words, mut values) = (vec![0; codec.encoded_words(100)], vec![0.0; 100]);
            codec.encode(&[1.0; 100], RandomKeys::default(), &mut words);
            codec
                .decode(&words, RandomKeys::default(), &mut values)
                .expect("the codec decodes what it has encoded");
            assert!(values.iter().any(|&value| value > 0.0), "{name}: {values:?}");
            assert_eq!(codec.rounds_own_values(), name == "signsgd", "{name}");
        }
    }

    /// An exchange with error feedback encodes, and reduces, one tile after another.
    #[test]
    fn the_encoding_of_a_chunk_consists_of_the_encodings_of_its_tiles() {
        let value = |index: u32| index.wrapping_mul(0x9e37_79b9) as i32 as f32 * 1e-12;
        for name in "fp16 bf16 fp8-e4m3 fp8-e5m2 int8 int4 onebit topk:0.01".split_whitespace() {
            let codec = codec(name.parse().expect("a name")).expect("the compression encodes chunks");
            let tile = codec.tile_elements().expect("the codec encodes tiles");
            let values: Vec<f32> = (0..2 * tile as u32 + 77).map(value).collect();
            let mut whole = vec![0; codec.encoded_words(values.len())];
            codec.encode(&values, RandomKeys::default(), &mut whole);
            let keys = RandomKeys { shared: 1, own: 2 };
            let encode = |values: &[f32]| {
                let mut words = vec![0; codec.encoded_words(values.len())];
                codec.encode(values, keys, &mut words);
                words
            };
            assert_eq!(values.chunks(tile).flat_map(encode).collect::<Vec<u32>>(), whole, "{name}");
        }
        for name in ["int8-stochastic", "int4-stochastic", "qsgd:4", "signsgd", "randomk:0.5"] {
            let codec = codec(name.parse().expect("a name")).expect("the compression encodes chunks");
            assert_eq!(codec.tile_elements(), None, "{name}");
        }
    }
}
