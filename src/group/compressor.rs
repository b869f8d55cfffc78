//! Compression with memory: what a rank could not send in one call, it adds to the next call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codec::Compression;

/// A compression, and the memory that it needs for one buffer that is reduced again and again, such as a bucket of gradients.
///
/// Codecs that round a lot need *error feedback*: a rank adds the error of a call to its input of the next call, so nothing is
/// lost but only delayed (Karimireddy et al., "Error feedback fixes signSGD and other gradient compression schemes", ICML 2019).
/// The memory has one `f32` for each element. Every rank keeps its own errors; their sum over the ranks is what the results so
/// far lack. Save [`state`](Self::state) in checkpoints.
///
/// A clone refers to the same memory. Use a compressor for one buffer only, and in one call at a time. Without error feedback, a
/// [`Compression`] can be passed directly.
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
    /// `None` for a compression without memory.
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
}

impl Compressor {
    /// Creates a compressor with an empty memory.
    pub fn new(compression: Compression) -> Self {
        Self { compression, memory: Some(Arc::default()) }
    }

    /// Sets the seed of the random numbers of stochastic rounding and random-k. All ranks must pass the same seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        if let Some(mut memory) = self.lock() {
            memory.seed = seed;
        }
        self
    }

    /// Returns the compression.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns a copy of the memory, for a checkpoint. Call it while no call uses the compressor.
    pub fn state(&self) -> CompressorState {
        self.lock().map(|memory| memory.state.clone()).unwrap_or_default()
    }

    /// Replaces the memory by one of [`state`](Self::state). The next call must have a buffer of the length of the residual.
    pub fn set_state(&self, state: CompressorState) {
        if let Some(mut memory) = self.lock() {
            memory.state = state;
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Memory>> {
        self.memory.as_ref().map(|memory| memory.lock().unwrap_or_else(PoisonError::into_inner))
    }
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
