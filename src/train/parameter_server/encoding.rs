//! Encodes the gradients that workers push, and the parameters in the replies.

use crate::codec::{Codec, Compression, DecodeError, RandomKeys, codec, finite_or_zero};

/// The codecs of a run. A worker and its servers have the same.
#[derive(Debug)]
pub(crate) struct MessageCodecs {
    push: Box<dyn Codec>,
    /// Parameters have no error feedback, so their codec has no coarser steps than `bf16`.
    pull: Box<dyn Codec>,
    keeps_errors: bool,
}

impl MessageCodecs {
    /// Returns the codecs of a compression. Returns `None` if messages are not encoded.
    pub(crate) fn new(compression: Compression) -> Option<Self> {
        let pull = if compression == Compression::Fp16 { compression } else { Compression::Bf16 };
        Some(Self {
            push: codec(compression)?,
            pull: codec(pull)?,
            keeps_errors: compression.needs_error_feedback(),
        })
    }

    /// Returns the number of words of a push of `count` gradients.
    pub(super) fn push_words(&self, count: usize) -> usize {
        self.push.encoded_words(count)
    }

    /// Decodes the gradients of a push. Returns an error if the words are invalid.
    pub(super) fn decode_push(&self, words: &[u32], gradients: &mut [f32]) -> Result<(), DecodeError> {
        self.push.decode(words, RandomKeys::default(), gradients)
    }

    /// Encodes the parameters of a reply.
    pub(super) fn encode_pull(&self, parameters: &[f32]) -> Vec<u32> {
        let mut words = vec![0; self.pull.encoded_words(parameters.len())];
        self.pull.encode(parameters, RandomKeys::default(), &mut words);
        words
    }

    /// Decodes the parameters of a reply. Returns an error if the words are invalid.
    pub(super) fn decode_pull(&self, words: &[u32], parameters: &mut [f32]) -> Result<(), DecodeError> {
        self.pull.decode(words, RandomKeys::default(), parameters)
    }
}

/// Encodes the pushes of a worker to one server, with error feedback.
#[derive(Debug)]
pub(super) struct PushEncoder {
    pub(super) codecs: MessageCodecs,
    /// What the worker has not sent.
    residual: Vec<f32>,
    /// Memory for a gradient.
    values: Vec<f32>,
    /// The number of pushes and the rank, from which codecs draw random numbers.
    pushes: u64,
    rank: u64,
}

impl PushEncoder {
    /// Creates the encoder of rank `rank`, for `count` gradients.
    pub(super) fn new(codecs: MessageCodecs, count: usize, rank: u32) -> Self {
        let (residual, values) = (vec![0.0; count], vec![0.0; count]);
        Self { codecs, residual, values, pushes: 0, rank: rank.into() }
    }

    /// Writes the encoding of `gradient` to `words`, which has [`MessageCodecs::push_words`] words.
    pub(super) fn encode(&mut self, gradient: &[f32], words: &mut [u32]) {
        let Self { codecs, residual, values, pushes, rank } = self;
        *pushes += 1;
        let keys = RandomKeys { shared: 0, own: (*rank << 40) ^ *pushes };
        for ((value, gradient), residual) in values.iter_mut().zip(gradient).zip(&*residual) {
            *value = gradient + residual;
        }
        codecs.push.encode(values, keys, words);
        if codecs.keeps_errors && codecs.decode_push(words, residual).is_ok() {
            for (residual, value) in residual.iter_mut().zip(&*values) {
                *residual = finite_or_zero(value - *residual);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_the_decoded_pushes_lacks_only_the_residual() {
        for name in ["fp16", "bf16", "int8", "fp8-e4m3", "int8-stochastic"] {
            let codecs = || MessageCodecs::new(name.parse().unwrap()).unwrap();
            let mut encoder = PushEncoder::new(codecs(), 3, 1);
            let (mut sum, mut decoded) = ([0.0; 3], [0.0; 3]);
            let mut words = vec![0; codecs().push_words(3)];
            for _ in 0..50 {
                encoder.encode(&[1.0, 0.013, -0.3], &mut words);
                codecs().decode_push(&words, &mut decoded).unwrap();
                sum.iter_mut().zip(decoded).for_each(|(sum, value)| *sum += value);
            }
            for ((sum, residual), value) in sum.iter().zip(&encoder.residual).zip([1.0, 0.013, -0.3]) {
                let total = sum + residual;
                // Without error feedback, the errors of 50 pushes add up, or their random part cancels.
                let bound = if encoder.codecs.keeps_errors { 1e-4 } else { 0.2 };
                assert!((total - 50.0 * value).abs() < bound, "{name}: {total}");
            }
            let mut pulled = [0.0; 3];
            codecs().decode_pull(&codecs().encode_pull(&[1.5, -2.0, 0.0]), &mut pulled).unwrap();
            assert_eq!(pulled, [1.5, -2.0, 0.0]);
            assert!(codecs().decode_pull(&[0; 9], &mut pulled).is_err());
        }
        assert!(MessageCodecs::new(Compression::None).is_none());
    }
}
