//! Compression with memory: what a rank could not send in one call, it adds to the next call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::Error;
use crate::codec::Compression;

/// A compression, and the memory that it needs for one buffer that is reduced again and again, such as a bucket of gradients.
///
/// Codecs that round a lot need *error feedback*: a rank adds the error of a call to its input of the next call, so nothing is
/// lost but only delayed (Karimireddy et al., "Error feedback fixes signSGD and other gradient compression schemes", ICML 2019).
/// The memory has one `f32` for each element. Every rank keeps its own errors; their sum over the ranks is what the results so
/// far lack. Save [`state`](Self::state) in checkpoints.
///
/// A clone refers to the same memory. Use a compressor for one buffer only, and in one call at a time. A [`Compression`] that is
/// passed directly has no memory.
///
/// ```
/// use ringtrain::verbs::AllReduce;
/// use ringtrain::{Compressor, Group, ReduceOp};
///
/// let mut group = Group::from_environment()?;
/// let compressor = Compressor::new("topk:0.01".parse()?);
/// let mut gradients = vec![1.0f32; 1000];
/// for _step in 0..3 {
///     group.call(AllReduce::new(ReduceOp::Average).compressed(&compressor)).run(&mut gradients)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Compressor {
    compression: Compression,
    /// `None` for a [`Compression`] that is passed directly.
    memory: Option<Arc<Mutex<Memory>>>,
}

/// What a [`Compressor`] remembers.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CompressorState {
    /// The error of each element that has not been sent. Empty before the first call, and without error feedback.
    pub residual: Vec<f32>,
    /// The number of calls.
    pub calls: u64,
}

#[derive(Debug, Default)]
struct Memory {
    state: CompressorState,
    seed: u64,
    is_in_use: bool,
}

impl Compressor {
    /// Creates a compressor with an empty memory.
    pub fn new(compression: Compression) -> Self {
        Self { compression, memory: Some(Arc::default()) }
    }

    /// Sets the seed of the random numbers of stochastic rounding and random-k. All ranks must pass the same seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        if let Some(memory) = &self.memory {
            lock(memory).seed = seed;
        }
        self
    }

    /// Returns the compression.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns a copy of the memory, for a checkpoint. Call it while no call uses the compressor.
    pub fn state(&self) -> CompressorState {
        self.memory.as_ref().map(|memory| lock(memory).state.clone()).unwrap_or_default()
    }

    /// Replaces the memory by one of [`state`](Self::state). If its residual is not empty, the next call must have a buffer of
    /// the same length.
    pub fn set_state(&self, state: CompressorState) {
        if let Some(memory) = &self.memory {
            lock(memory).state = state;
        }
    }

    /// Begins a call on `elements`: adds the errors of the last call. Returns the use of the memory by this call. `number` is a
    /// number that differs between the calls of the group, and is the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Compression`] if the last call had a buffer of another length, or has not ended.
    pub(crate) fn begin_call(&self, elements: &mut [f32], number: u64) -> Result<CompressorCall, Error> {
        let Some(shared) = &self.memory else {
            return Ok(CompressorCall { memory: None, seed: mix(number), residual_length: 0 });
        };
        let mut memory = lock(shared);
        let Memory { state: CompressorState { residual, calls }, seed, is_in_use } = &mut *memory;
        if *is_in_use {
            let text =
                "the compressor is in use by a call that has not ended; use one compressor for each buffer";
            return Err(Error::Compression(text.into()));
        }
        if !residual.is_empty() && residual.len() != elements.len() {
            return Err(Error::Compression(format!(
                "the compressor keeps the errors of a buffer of {} elements, but this buffer has {}; use one compressor for each \
                 buffer",
                residual.len(),
                elements.len()
            )));
        }
        for (element, error) in elements.iter_mut().zip(residual.iter_mut()) {
            *element += std::mem::take(error);
        }
        *is_in_use = true;
        *calls += 1;
        Ok(CompressorCall {
            memory: Some(Arc::clone(shared)),
            seed: mix(*seed ^ mix(*calls)),
            residual_length: if self.compression.needs_error_feedback() { elements.len() } else { 0 },
        })
    }
}

/// The use of a compressor's memory by one call. Dropping it ends the use.
#[derive(Debug)]
pub(crate) struct CompressorCall {
    memory: Option<Arc<Mutex<Memory>>>,
    /// A number that differs between calls, and is the same on all ranks.
    pub(crate) seed: u64,
    /// The length of the residual; 0 without error feedback.
    residual_length: usize,
}

impl CompressorCall {
    /// Returns whether the call keeps errors.
    pub(crate) fn keeps_errors(&self) -> bool {
        self.residual_length > 0
    }

    /// Stores the errors of the elements from `start` on. An error that is not finite becomes 0, because it would make all later
    /// results of its element infinite or NaN.
    pub(crate) fn store_errors(&self, start: usize, errors: impl ExactSizeIterator<Item = f32>) {
        let Some(mut memory) = self.memory.as_ref().map(|memory| lock(memory)) else { return };
        let residual = &mut memory.state.residual;
        residual.resize(self.residual_length, 0.0);
        for (stored, error) in residual[start..start + errors.len()].iter_mut().zip(errors) {
            *stored = if error.is_finite() { error } else { 0.0 };
        }
    }
}

impl Drop for CompressorCall {
    fn drop(&mut self) {
        if let Some(memory) = &self.memory {
            lock(memory).is_in_use = false;
        }
    }
}

fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mixes the bits of a number, so that similar numbers give unrelated numbers (Steele et al., "Fast splittable pseudorandom
/// number generators", OOPSLA 2014: the finalizer of splitmix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

impl From<Compression> for Compressor {
    fn from(compression: Compression) -> Self {
        Self { compression, memory: None }
    }
}

impl From<&Self> for Compressor {
    fn from(compressor: &Self) -> Self {
        compressor.clone()
    }
}
