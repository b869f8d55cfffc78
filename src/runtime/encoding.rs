//! The local work of a two-step exchange: encodes contributions, reduces them to the rank's own chunk, and decodes results.
//!
//! The owner of a chunk replaces its result by the decoded encoding, so all ranks get the same bits. With error feedback, a rank
//! keeps what its encodings of contributions and results lack. It adds its own contribution to its own chunk without encoding it.

use std::ops::Range;
use std::sync::Arc;

use super::memory::Memory;
use crate::codec::error_feedback::{CompressorCall, mix};
use crate::codec::{Codec, DecodeError, RandomKeys, finite_or_zero};
use crate::reduce::Kernels;
use crate::schedule::two_step::{ExchangedChunk, ExchangedSlice, TwoStepExchange};
use crate::types::Rank;

#[derive(Clone, Debug)]
pub(crate) struct Encoding {
    pub(crate) codec: Arc<dyn Codec>,
    pub(crate) call: Arc<CompressorCall>,
    pub(crate) kernels: Kernels,
    /// The number by which the reduction divides the sum of all contributions; 1 for a sum.
    pub(crate) divisor: u32,
    pub(crate) rank: Rank,
}

pub(crate) struct EncodedBlock {
    encoding: Encoding,
    pub(crate) exchange: TwoStepExchange,
    pub(crate) elements: Memory,
    /// The index of the block's first element in the buffer of the call.
    start: usize,
    scratch: Vec<f32>,
}

/// The rank of the job that sent a chunk which does not decode.
pub(crate) type InvalidChunk = (Rank, DecodeError);

impl EncodedBlock {
    /// Returns a block without elements.
    pub(crate) fn new(encoding: Encoding, exchange: TwoStepExchange, start: usize) -> Self {
        Self { encoding, exchange, elements: Memory::none(), start, scratch: Vec::new() }
    }

    /// Returns the number of elements whose encodings this rank sends in both steps, and the number of their words.
    pub(crate) fn sent_elements_and_words(&self) -> (u64, u64) {
        let (mut elements, mut words) = (0, 0);
        for ExchangedSlice { own, chunks } in &self.exchange.slices {
            let results = if self.exchange.second.is_some() { chunks.len() - 1 } else { 0 };
            for (index, chunk) in chunks.iter().enumerate() {
                let copies = if index == *own { results } else { 1 };
                elements += chunk.elements.len() * copies;
                words += chunk.words.len() * copies;
            }
        }
        (elements as u64, words as u64)
    }

    /// Encodes this rank's contributions to the chunks of the other ranks into `workspace`, which may have any contents.
    pub(crate) fn encode(&mut self, mut workspace: Vec<u32>) -> Vec<u32> {
        let Self { encoding, exchange, elements, start, scratch } = self;
        workspace.resize(exchange.workspace_words, 0);
        let values = values_of(elements);
        for ExchangedSlice { own, chunks } in &exchange.slices {
            for (index, chunk) in chunks.iter().enumerate() {
                let own_values = &mut values[chunk.elements.clone()];
                let words = &mut workspace[chunk.words.clone()];
                let place = encoding.place(*start, &chunk.elements, 0);
                if index != *own {
                    encoding.encode_contribution(own_values, words, place, scratch);
                } else if encoding.codec.rounds_own_values() {
                    encoding.round(own_values, words, place.1);
                }
            }
        }
        workspace
    }

    /// Reduces the contributions of all ranks to this rank's own chunks, in the order of the participants after this rank's own
    /// one. Encodes the results for the second step, if there is one. Returns [`InvalidChunk`] if a contribution does not decode.
    pub(crate) fn reduce(&mut self, workspace: &mut [u32]) -> Result<(), InvalidChunk> {
        let Self { encoding, exchange, elements, start, scratch } = self;
        let values = values_of(elements);
        for ExchangedSlice { own, chunks } in &exchange.slices {
            let own_chunk = &chunks[*own];
            let sum = &mut values[own_chunk.elements.clone()];
            let (place, keys) = encoding.place(*start, &own_chunk.elements, 0);
            let others: Vec<&ExchangedChunk> =
                chunks.iter().enumerate().filter(|(index, _)| index != own).map(|(_, chunk)| chunk).collect();
            encoding.call.with_errors(place, |errors| {
                encoding.reduce_chunk((sum, errors), (&*workspace, &others), keys, scratch)
            })?;
            if exchange.second.is_some() && !others.is_empty() {
                let place = encoding.place(*start, &own_chunk.elements, 1);
                encoding.encode_result(sum, &mut workspace[own_chunk.words.clone()], place, scratch);
            }
        }
        Ok(())
    }

    pub(crate) fn decode(&mut self, workspace: &[u32]) -> Result<(), InvalidChunk> {
        let Self { encoding, exchange, elements, start, .. } = self;
        let values = values_of(elements);
        for ExchangedSlice { own, chunks } in &exchange.slices {
            for (_, chunk) in chunks.iter().enumerate().filter(|(index, _)| index != own) {
                let (_, keys) = encoding.place(*start, &chunk.elements, 1);
                let words = &workspace[chunk.words.clone()];
                let decoded = encoding.codec.decode(words, keys, &mut values[chunk.elements.clone()]);
                decoded.map_err(|error| (chunk.owner, error))?;
            }
        }
        Ok(())
    }
}

impl Encoding {
    /// Returns where the chunk is in the buffer of the call, and the keys of its random numbers.
    fn place(&self, start: usize, chunk: &Range<usize>, step: u64) -> (Range<usize>, RandomKeys) {
        let elements = start + chunk.start..start + chunk.end;
        let shared = mix(self.call.seed ^ mix(elements.start as u64));
        let own = mix(shared ^ (2 * u64::from(self.rank.get()) + step));
        (elements, RandomKeys { shared, own })
    }

    /// Returns the tiles of a chunk of `count` elements: ranges of its elements, and of the words of its encoding.
    fn tiles(&self, count: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let tile = self.codec.tile_elements().unwrap_or(count).max(1);
        (0..count).step_by(tile).map(move |start| {
            // A codec that encodes whole chunks may have words in addition to those of the elements.
            let words_before = if start == 0 { 0 } else { self.codec.encoded_words(start) };
            let end = count.min(start + tile);
            (start..end, words_before..words_before + self.codec.encoded_words(end - start))
        })
    }

    fn round(&self, values: &mut [f32], words: &mut [u32], keys: RandomKeys) {
        self.codec.encode(values, keys, words);
        self.codec.decode(words, keys, values).expect("a codec decodes its own encoding");
    }

    /// Encodes a contribution. With error feedback, adds the errors to the values first, and stores what the encoding lacks.
    fn encode_contribution(
        &self,
        values: &[f32],
        words: &mut [u32],
        (elements, keys): (Range<usize>, RandomKeys),
        scratch: &mut Vec<f32>,
    ) {
        self.call.with_errors(elements, |errors| {
            let Some(errors) = errors else { return self.codec.encode(values, keys, words) };
            for (tile, tile_words) in self.tiles(values.len()) {
                let (values, errors, words) =
                    (&values[tile.clone()], &mut errors[tile], &mut words[tile_words]);
                errors.iter_mut().zip(values).for_each(|(error, value)| *error += value);
                self.round_into(errors, words, keys, scratch);
                for (error, decoded) in errors.iter_mut().zip(&*scratch) {
                    *error = finite_or_zero(*error - decoded);
                }
            }
        });
    }

    /// Adds the errors of this rank's own chunk to its values, and reduces the contributions of the other ranks to them.
    fn reduce_chunk(
        &self,
        (sum, mut errors): (&mut [f32], Option<&mut [f32]>),
        (workspace, others): (&[u32], &[&ExchangedChunk]),
        keys: RandomKeys,
        scratch: &mut Vec<f32>,
    ) -> Result<(), InvalidChunk> {
        let Kernels { reduce, reduce_last } = &self.kernels;
        for (tile, tile_words) in self.tiles(sum.len()) {
            let sum = &mut sum[tile.clone()];
            if let Some(errors) = &mut errors {
                for (value, error) in sum.iter_mut().zip(&mut errors[tile]) {
                    *value += std::mem::take(error);
                }
            }
            scratch.resize(sum.len(), 0.0);
            for (index, ExchangedChunk { owner: sender, received, .. }) in others.iter().enumerate() {
                let words = &workspace[received.clone()][tile_words.clone()];
                let decoded = self.codec.decode(words, keys, scratch);
                decoded.map_err(|error| (*sender, error))?;
                let kernel = if index + 1 == others.len() { reduce_last } else { reduce };
                kernel.apply(bytemuck::cast_slice_mut(sum), bytemuck::cast_slice(scratch));
            }
        }
        Ok(())
    }

    /// Encodes the result of this rank's own chunk, and replaces it by what the other ranks decode. Stores the error.
    fn encode_result(
        &self,
        result: &mut [f32],
        words: &mut [u32],
        (elements, keys): (Range<usize>, RandomKeys),
        scratch: &mut Vec<f32>,
    ) {
        self.call.with_errors(elements, |errors| {
            let Some(errors) = errors else { return self.round(result, words, keys) };
            // This rank adds the error to its next contribution, which will be divided too.
            let divisor = self.divisor as f32;
            for (tile, tile_words) in self.tiles(result.len()) {
                let (result, words) = (&mut result[tile.clone()], &mut words[tile_words]);
                self.round_into(result, words, keys, scratch);
                for ((error, value), decoded) in errors[tile].iter_mut().zip(&*result).zip(&*scratch) {
                    *error = finite_or_zero((value - decoded) * divisor);
                }
                result.copy_from_slice(scratch);
            }
        });
    }

    /// Encodes values, and decodes them into `decoded`.
    fn round_into(&self, values: &[f32], words: &mut [u32], keys: RandomKeys, decoded: &mut Vec<f32>) {
        self.codec.encode(values, keys, words);
        decoded.resize(values.len(), 0.0);
        self.codec.decode(words, keys, decoded).expect("a codec decodes its own encoding");
    }
}

fn values_of(elements: &mut Memory) -> &mut [f32] {
    let length = elements.length();
    elements.bytes_mut(0..length).map(bytemuck::cast_slice_mut).unwrap_or_default()
}
