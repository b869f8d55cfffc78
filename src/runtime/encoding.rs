//! The local work of a two-step exchange: encodes this rank's contributions, reduces those of all ranks to its own chunk, and
//! decodes the results of the other chunks.
//!
//! The owner of a chunk replaces its result by the decoded encoding, so all ranks get the same bits. With error feedback, a rank
//! keeps what its encodings lack: of its contributions, and of the result of its own chunk. A rank adds its own contribution to
//! its own chunk without encoding it.

use std::sync::Arc;

use super::error_feedback::{CompressorCall, mix};
use super::memory::Memory;
use crate::codec::{Codec, DecodeError, RandomKeys};
use crate::reduce::Kernels;
use crate::schedule::two_step::{ExchangedChunk, ExchangedSlice, TwoStepExchange};
use crate::types::Rank;

/// How a call encodes elements.
#[derive(Clone, Debug)]
pub(crate) struct Encoding {
    pub(crate) codec: Arc<dyn Codec>,
    pub(crate) call: Arc<CompressorCall>,
    pub(crate) kernels: Kernels,
    /// The number by which the reduction divides the sum of all contributions; 1 for a sum.
    pub(crate) divisor: u32,
    /// This rank in the job.
    pub(crate) rank: Rank,
}

/// The exchange of one block, with its memory.
pub(crate) struct EncodedBlock {
    encoding: Encoding,
    exchange: TwoStepExchange,
    /// The elements of the block.
    elements: Memory,
    /// The index of the block's first element in the buffer of the call.
    start: usize,
    /// Memory for decoded elements.
    scratch: Vec<f32>,
}

/// A chunk of another rank that does not decode.
#[derive(Debug)]
pub(crate) struct InvalidChunk {
    /// The rank of the job that sent the chunk.
    pub(crate) sender: Rank,
    pub(crate) error: DecodeError,
}

impl EncodedBlock {
    pub(crate) fn new(
        encoding: Encoding,
        exchange: TwoStepExchange,
        (elements, start): (Memory, usize),
    ) -> Self {
        Self { encoding, exchange, elements, start, scratch: Vec::new() }
    }

    /// Returns the exchange.
    pub(crate) fn exchange(&self) -> &TwoStepExchange {
        &self.exchange
    }

    /// Ends the exchange, and returns the memory of its elements.
    pub(crate) fn into_elements(self) -> Memory {
        self.elements
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

    /// Encodes this rank's contributions to the chunks of the other ranks. Returns the workspace.
    pub(crate) fn encode(&mut self) -> Vec<u32> {
        let Self { encoding, exchange, elements, start, scratch } = self;
        let mut workspace = vec![0; exchange.workspace_words];
        let values = values_of(elements);
        for ExchangedSlice { own, chunks } in &exchange.slices {
            for (index, chunk) in chunks.iter().enumerate() {
                let own_values = &mut values[chunk.elements.clone()];
                let keys = encoding.keys(*start + chunk.elements.start, 0);
                if index != *own {
                    let words = &mut workspace[chunk.words.clone()];
                    encoding.codec.encode(own_values, keys, words);
                    if encoding.call.keeps_errors() {
                        encoding.store_errors(
                            (own_values, words),
                            keys,
                            *start + chunk.elements.start,
                            scratch,
                        );
                    }
                } else if encoding.codec.rounds_own_values() {
                    encoding.round(own_values, keys, &mut workspace[chunk.words.clone()]);
                }
            }
        }
        workspace
    }

    /// Reduces the contributions of all ranks to this rank's own chunks, in the order of the participants after this rank's own
    /// contribution. Encodes the results for the second step, if there is one.
    ///
    /// # Errors
    ///
    /// [`InvalidChunk`] if a contribution does not decode.
    pub(crate) fn reduce(&mut self, workspace: &mut [u32]) -> Result<(), InvalidChunk> {
        let Self { encoding, exchange, elements, start, scratch } = self;
        let values = values_of(elements);
        for ExchangedSlice { own, chunks } in &exchange.slices {
            let own_chunk = &chunks[*own];
            let sum = &mut values[own_chunk.elements.clone()];
            let keys = encoding.keys(*start + own_chunk.elements.start, 0);
            let others = chunks.iter().enumerate().filter(|(index, _)| index != own);
            let last = (0..chunks.len()).rev().find(|index| index != own);
            for (index, ExchangedChunk { owner: sender, received, .. }) in others {
                scratch.resize(sum.len(), 0.0);
                let decoded = encoding.codec.decode(&workspace[received.clone()], keys, scratch);
                decoded.map_err(|error| InvalidChunk { sender: *sender, error })?;
                let Kernels { reduce, reduce_last } = &encoding.kernels;
                let kernel = if last == Some(index) { reduce_last } else { reduce };
                kernel.apply(bytemuck::cast_slice_mut(sum), bytemuck::cast_slice(scratch));
            }
            if exchange.second.is_some() && last.is_some() {
                let keys = encoding.keys(*start + own_chunk.elements.start, 1);
                encoding.encode_result(
                    sum,
                    &mut workspace[own_chunk.words.clone()],
                    keys,
                    (*start + own_chunk.elements.start, scratch),
                );
            }
        }
        Ok(())
    }

    /// Decodes the results of the chunks of the other ranks.
    ///
    /// # Errors
    ///
    /// [`InvalidChunk`] if a result does not decode.
    pub(crate) fn decode(&mut self, workspace: &[u32]) -> Result<(), InvalidChunk> {
        let Self { encoding, exchange, elements, start, .. } = self;
        let values = values_of(elements);
        for ExchangedSlice { own, chunks } in &exchange.slices {
            for (_, chunk) in chunks.iter().enumerate().filter(|(index, _)| index != own) {
                let keys = encoding.keys(*start + chunk.elements.start, 1);
                let words = &workspace[chunk.words.clone()];
                let decoded = encoding.codec.decode(words, keys, &mut values[chunk.elements.clone()]);
                decoded.map_err(|error| InvalidChunk { sender: chunk.owner, error })?;
            }
        }
        Ok(())
    }
}

impl Encoding {
    /// Returns the keys for the chunk that begins at this element of the buffer, in a step of the exchange.
    fn keys(&self, start: usize, step: u64) -> RandomKeys {
        let shared = mix(self.call.seed ^ mix(start as u64));
        RandomKeys { shared, own: mix(shared ^ (2 * u64::from(self.rank.get()) + step)) }
    }

    /// Replaces values by their decoded encoding.
    fn round(&self, values: &mut [f32], keys: RandomKeys, words: &mut [u32]) {
        self.codec.encode(values, keys, words);
        self.decode_own(words, keys, values);
    }

    /// Encodes the result of this rank's own chunk, which begins at the element `start`, and replaces it by what the other ranks
    /// decode.
    fn encode_result(
        &self,
        result: &mut [f32],
        words: &mut [u32],
        keys: RandomKeys,
        (start, scratch): (usize, &mut Vec<f32>),
    ) {
        if !self.call.keeps_errors() {
            return self.round(result, keys, words);
        }
        self.codec.encode(result, keys, words);
        scratch.resize(result.len(), 0.0);
        self.decode_own(words, keys, scratch);
        // This rank adds the error to its next contribution, which will be divided too.
        let divisor = self.divisor as f32;
        let errors = result.iter().zip(&scratch[..]).map(|(value, decoded)| (value - decoded) * divisor);
        self.call.store_errors(start, errors);
        result.copy_from_slice(scratch);
    }

    /// Stores what the encoding of values lacks.
    fn store_errors(
        &self,
        (values, words): (&[f32], &[u32]),
        keys: RandomKeys,
        start: usize,
        scratch: &mut Vec<f32>,
    ) {
        scratch.resize(values.len(), 0.0);
        self.decode_own(words, keys, scratch);
        let errors = values.iter().zip(&scratch[..]).map(|(value, decoded)| value - decoded);
        self.call.store_errors(start, errors);
    }

    /// Decodes words that this rank has encoded.
    fn decode_own(&self, words: &[u32], keys: RandomKeys, values: &mut [f32]) {
        self.codec.decode(words, keys, values).expect("a codec decodes its own encoding");
    }
}

/// Returns the elements of a block.
fn values_of(elements: &mut Memory) -> &mut [f32] {
    let length = elements.length();
    elements.bytes_mut(0..length).map(bytemuck::cast_slice_mut).unwrap_or_default()
}
