//! The errors of compressed calls. What a rank could not send in one call, it adds to the input of the next call.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::Error;
use crate::codec::Compression;
use crate::types::counted;

/// What a [`Compressor`](crate::Compressor) remembers.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CompressorState {
    /// The error of each element that has not been sent. Empty before the first call, and without error feedback.
    pub residual: Vec<f32>,
    /// The number of calls.
    pub calls: u64,
}

/// The memory of a compressor. A clone refers to the same memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct ErrorMemory(Arc<Mutex<SharedErrors>>);

#[derive(Debug, Default)]
struct SharedErrors {
    state: CompressorState,
    seed: u64,
    is_in_use: bool,
}

impl ErrorMemory {
    fn lock(&self) -> MutexGuard<'_, SharedErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a copy of what the memory holds.
    pub(crate) fn state(&self) -> CompressorState {
        self.lock().state.clone()
    }

    /// Replaces what the memory holds.
    pub(crate) fn set_state(&self, state: CompressorState) {
        self.lock().state = state;
    }

    /// Sets the seed of the random numbers of the following calls.
    pub(crate) fn set_seed(&self, seed: u64) {
        self.lock().seed = seed;
    }

    /// Begins a call on `elements` with `compression`. Adds the errors of the last call to the elements, unless the encoding does
    /// it. Returns the use of the memory by this call.
    ///
    /// # Errors
    ///
    /// [`Error::Compression`] if the last call had a buffer of another length, or has not ended.
    pub(crate) fn begin_call(
        &self,
        compression: Compression,
        elements: &mut [f32],
        addition: ErrorAddition,
    ) -> Result<CompressorCall, Error> {
        let mut errors = self.lock();
        let SharedErrors { state: CompressorState { residual, calls }, seed, is_in_use } = &mut *errors;
        if *is_in_use {
            let text =
                "the compressor is in use by a call that has not ended; use one compressor for each buffer";
            return Err(Error::Compression(text.into()));
        }
        if !residual.is_empty() && residual.len() != elements.len() {
            return Err(Error::Compression(format!(
                "the compressor keeps the errors of a buffer of {}, but this buffer has {}; use one compressor for each \
                 buffer",
                counted(residual.len(), "element"),
                elements.len()
            )));
        }
        let keeps_errors = compression.needs_error_feedback();
        if !keeps_errors || addition == ErrorAddition::AtBegin {
            for (element, error) in elements.iter_mut().zip(residual.iter_mut()) {
                *element += std::mem::take(error);
            }
        }
        if !keeps_errors {
            // Later calls without error feedback have no errors to add.
            residual.clear();
        }
        *is_in_use = true;
        *calls += 1;
        Ok(CompressorCall {
            memory: Some(self.clone()),
            seed: mix(*seed ^ mix(*calls)),
            residual_length: if keeps_errors { elements.len() } else { 0 },
        })
    }
}

/// When a call adds the errors of the last call to its elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ErrorAddition {
    /// At its begin, because this rank may not encode all elements.
    AtBegin,
    /// When it encodes or reduces a chunk, while the chunk is in the processor's caches. Calls without error feedback add the
    /// errors at their begin.
    WhileEncoding,
}

/// The use of a compressor's memory by one call. Dropping it ends the use.
#[derive(Debug)]
pub(crate) struct CompressorCall {
    memory: Option<ErrorMemory>,
    /// A number that differs between calls, and is the same on all ranks.
    pub(crate) seed: u64,
    /// The length of the residual; 0 without error feedback.
    residual_length: usize,
}

impl CompressorCall {
    /// Returns a call that keeps no errors. `number` is a number that differs between the calls of the group, and is the same on
    /// all ranks.
    pub(crate) fn without_memory(number: u64) -> Self {
        Self { memory: None, seed: mix(number), residual_length: 0 }
    }

    /// Calls `update` with the errors of these elements of the buffer, which are those of the last call until `update` replaces
    /// them. Without error feedback, `update` gets `None`.
    pub(crate) fn with_errors<R>(
        &self,
        elements: Range<usize>,
        update: impl FnOnce(Option<&mut [f32]>) -> R,
    ) -> R {
        let Some(memory) = self.memory.as_ref().filter(|_| self.residual_length > 0) else {
            return update(None);
        };
        let mut memory = memory.lock();
        let residual = &mut memory.state.residual;
        residual.resize(self.residual_length, 0.0);
        update(Some(&mut residual[elements]))
    }
}

impl Drop for CompressorCall {
    fn drop(&mut self) {
        if let Some(memory) = &self.memory {
            memory.lock().is_in_use = false;
        }
    }
}

/// Mixes the bits of a number, so that similar numbers give unrelated numbers (Steele et al., "Fast splittable pseudorandom
/// number generators", OOPSLA 2014: the finalizer of splitmix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
