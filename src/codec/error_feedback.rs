//! The errors of compressed calls. What a rank could not send in one call, it adds to the input of the next call.
//!
//! EF21 is error feedback on the differences of consecutive inputs. A call with the input x and the residual r sends c and keeps
//! x + r - c. With EF21, the rank keeps x + r - c - x: minus what it has sent so far. So the next call encodes the difference
//! between its input and what was sent, and the ranks add the result of the last call to the decoded differences.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Compression;
use crate::types::counted;

/// What a [`Compressor`](crate::Compressor) remembers.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CompressorState {
    /// What the next call adds to each element: what this rank has not sent. With [`Compression::Ef21`], minus what this rank has
    /// sent. Empty before the first call, and without error feedback.
    pub residual: Vec<f32>,
    /// With [`Compression::Ef21`], the last result, which is the same on all ranks. Otherwise empty.
    pub result: Vec<f32>,
    /// The number of calls.
    pub calls: u64,
}

/// The memory of a compressor. A clone refers to the same memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct ErrorMemory(Arc<Mutex<SharedErrors>>);

#[derive(Debug, Default)]
pub(crate) struct SharedErrors {
    pub(crate) state: CompressorState,
    pub(crate) seed: u64,
    is_in_use: bool,
    /// With EF21, the input of the current call.
    input: Vec<f32>,
    /// Whether the last call has a [`ResultAddition`] that has not been applied.
    pub(crate) lacks_result: bool,
}

impl ErrorMemory {
    pub(crate) fn lock(&self) -> MutexGuard<'_, SharedErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call on `elements` with `compression`. Adds the errors of the last call to the elements. But with error feedback,
    /// if this rank `encodes_everything`, the encoding adds them to each chunk while the chunk is in the processor's caches.
    /// Returns the use of the memory by this call, and with EF21 what to do with the result. Returns what is wrong if the last
    /// call had a buffer of another length, has not ended, or was not waited for.
    pub(crate) fn begin_call(
        &self,
        compression: Compression,
        elements: &mut [f32],
        encodes_everything: bool,
    ) -> Result<(CompressorCall, Option<ResultAddition>), String> {
        let mut errors = self.lock();
        let SharedErrors { state, seed, is_in_use, input, lacks_result } = &mut *errors;
        let CompressorState { residual, result, calls } = state;
        if *is_in_use || *lacks_result {
            let text = if *is_in_use {
                "the compressor is in use by a call that has not ended; use one compressor for each buffer"
            } else {
                "the compressor lacks the result of its last call, which failed or was not waited for; wait for each call, and \
                 after a failure create a new compressor or set its state"
            };
            return Err(text.into());
        }
        for kept in [residual.len(), result.len()] {
            if kept != 0 && kept != elements.len() {
                return Err(format!(
                    "the compressor keeps the errors of a buffer of {}, but this buffer has {}; use one compressor for each \
                     buffer",
                    counted(kept, "element"),
                    elements.len()
                ));
            }
        }
        let keeps_result = compression.adds_last_result();
        if keeps_result {
            input.clear();
            input.extend_from_slice(elements);
            // Where there is no result, the residual is an error of calls without EF21, which counts once.
            let without_result = |index: &usize| result.get(*index).is_none_or(|result| *result == 0.0);
            let errors = residual.iter().enumerate().filter(|(index, _)| without_result(index));
            errors.for_each(|(index, error)| input[index] += error);
        }
        let keeps_errors = compression.needs_error_feedback();
        if !keeps_errors || !encodes_everything {
            for (element, error) in elements.iter_mut().zip(residual.iter_mut()) {
                *element += std::mem::take(error);
            }
        }
        if !keeps_errors {
            // Later calls without error feedback have no errors to add.
            residual.clear();
        }
        let memory = || self.clone();
        let addition =
            (keeps_result || !result.is_empty()).then(|| ResultAddition { memory: memory(), keeps_result });
        *calls += 1;
        (*is_in_use, *lacks_result) = (true, addition.is_some());
        let call = CompressorCall {
            memory: Some(memory()),
            seed: mix(*seed ^ mix(*calls)),
            residual_length: if keeps_errors { elements.len() } else { 0 },
        };
        Ok((call, addition))
    }
}

/// What a call with EF21 does with its result. Also the first call without EF21 after calls with it.
#[derive(Debug)]
pub(crate) struct ResultAddition {
    memory: ErrorMemory,
    keeps_result: bool,
}

impl ResultAddition {
    /// Adds the result of the last call to that of this call. If an element is then infinite or NaN, the memory becomes 0 on all
    /// ranks, because such an element would stay in all later results.
    pub(crate) fn apply(self, elements: &mut [f32]) {
        let mut errors = self.memory.lock();
        let SharedErrors { state: CompressorState { residual, result, .. }, input, .. } = &mut *errors;
        result.resize(elements.len(), 0.0);
        let mut is_finite = true;
        for (element, result) in elements.iter_mut().zip(result.iter_mut()) {
            *element += *result;
            *result = *element;
            is_finite &= element.is_finite();
        }
        if self.keeps_result {
            residual.resize(elements.len(), 0.0);
            residual.iter_mut().zip(&*input).for_each(|(residual, input)| *residual -= input);
        }
        if !is_finite {
            residual.fill(0.0);
            result.fill(0.0);
        }
        if !self.keeps_result {
            result.clear();
        }
        errors.lacks_result = false;
    }
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
    /// Returns a call that keeps no errors. `number` differs between the calls of the group, and is the same on all ranks.
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
