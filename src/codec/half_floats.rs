//! Compression to half-precision types. Each `f32` is rounded to the nearest half-precision value, with ties to even.

use std::marker::PhantomData;

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use super::{Codec, DecodeError, RandomKeys};
use crate::types::Element;

/// A half-precision type that encodes `f32` on the wire.
pub trait CompressedElement: Element {
    /// The number 0.
    const ZERO: Self;

    /// Rounds each element of `wide` to half precision and writes the result to `narrow`.
    ///
    /// # Panics
    ///
    /// If the two slices have different lengths.
    fn encode(wide: &[f32], narrow: &mut [Self]);

    /// Converts each element of `narrow` to `f32`, without rounding, and writes the result to `wide`.
    ///
    /// # Panics
    ///
    /// If the two slices have different lengths.
    fn decode(narrow: &[Self], wide: &mut [f32]);
}

impl CompressedElement for f16 {
    const ZERO: Self = Self::ZERO;

    fn encode(wide: &[f32], narrow: &mut [Self]) {
        narrow.convert_from_f32_slice(wide);
    }

    fn decode(narrow: &[Self], wide: &mut [f32]) {
        narrow.convert_to_f32_slice(wide);
    }
}

impl CompressedElement for bf16 {
    const ZERO: Self = Self::ZERO;

    fn encode(wide: &[f32], narrow: &mut [Self]) {
        narrow.convert_from_f32_slice(wide);
    }

    fn decode(narrow: &[Self], wide: &mut [f32]) {
        narrow.convert_to_f32_slice(wide);
    }
}

/// The codec of a half-precision type. Costs: 2 bytes for each element, rounded up to whole words. The relative error is at most
/// 2^-11 (`f16`, for values from 2^-14 to 65,504) or 2^-8 (`bf16`). NaN and infinities are kept.
#[derive(Debug)]
pub struct HalfFloats<H>(PhantomData<H>);

impl<H> HalfFloats<H> {
    /// Creates the codec.
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<H: CompressedElement> Codec for HalfFloats<H> {
    fn encoded_words(&self, count: usize) -> usize {
        count.div_ceil(2)
    }

    fn encode(&self, values: &[f32], _: RandomKeys, words: &mut [u32]) {
        assert_eq!(
            words.len(),
            self.encoded_words(values.len()),
            "the words have the length of the encoding"
        );
        // The second half of the last word may belong to no element.
        if let Some(last) = words.last_mut() {
            *last = 0;
        }
        H::encode(values, &mut bytemuck::cast_slice_mut::<u32, H>(words)[..values.len()]);
    }

    fn decode(&self, words: &[u32], _: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        if words.len() != self.encoded_words(values.len()) {
            return Err(DecodeError("the encoding has another length"));
        }
        H::decode(&bytemuck::cast_slice::<u32, H>(words)[..values.len()], values);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_keeps_representable_values_and_rounds_the_others() {
        let wide = [0.0, 1.5, -2.0, 65504.0, 1e-9, f32::INFINITY, 0.1];
        let mut narrow = [f16::ZERO; 7];
        f16::encode(&wide, &mut narrow);
        let mut back = [0.0; 7];
        f16::decode(&narrow, &mut back);
        assert_eq!(back[..4], wide[..4]);
        assert_eq!(back[4], 0.0);
        assert!(back[5].is_infinite() && (back[6] - 0.1).abs() < 1e-4);
        let mut narrow = [bf16::ZERO; 7];
        bf16::encode(&wide, &mut narrow);
        bf16::decode(&narrow, &mut back);
        assert!((back[3] - 65504.0).abs() <= 65504.0 / 256.0 && back[4] > 0.0);
    }
}
