//! Compression with memory, for one buffer that is reduced again and again.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codec::Compression;
use crate::codec::auto_choice::{AutoChoice, AutoReport};
use crate::codec::error_feedback::{CompressorState, ErrorMemory};
use crate::engine::Timestamp;
use crate::runtime::error::Error;

/// A compression, and the memory that it needs for one buffer that is reduced again and again, such as a bucket of gradients.
///
/// Codecs that round a lot need *error feedback*: a rank adds the error of a call to its input of the next call, so nothing is
/// lost but only delayed (Karimireddy et al., "Error feedback fixes signSGD and other gradient compression schemes", ICML 2019).
/// The memory has one `f32` for each element. Every rank keeps its own errors. Save [`state`](Self::state) in checkpoints.
///
/// With [`Compression::Ef21`], the memory has three `f32` for each element, and all ranks must wait for the result of each call.
/// After a call that failed, no further call accepts the compressor before [`set_state`](Self::set_state).
///
/// With [`Compression::Auto`], the compressor chooses a codec by measurement. Its [`report`](Self::report) says which one.
///
/// A clone refers to the same memory. Use a compressor for one buffer and in one call at a time. A [`Compression`] has no memory.
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
    pub(super) memory: Option<ErrorMemory>,
    /// For [`Compression::Auto`]: the measurements.
    pub(super) auto: Option<SharedChoice>,
}

/// The choice of a compressor's codec. A clone refers to the same choice.
#[derive(Clone)]
pub(super) struct SharedChoice(Arc<Mutex<ChoiceAndMeasurement>>);

pub(super) struct ChoiceAndMeasurement {
    pub(super) choice: AutoChoice,
    /// Waits for the measurement that began with the last call, and passes its result to the choice, before the next call.
    pub(super) measurement: Option<Measurement>,
}

pub(super) type Measurement = Box<dyn FnOnce(&mut AutoChoice) -> Result<(), Error> + Send>;

pub(super) struct CallTimer {
    pub(super) choice: SharedChoice,
    pub(super) began: Timestamp,
}

impl CallTimer {
    pub(super) fn stop(self, ended: Timestamp) {
        self.choice.lock().choice.record_time(ended.saturating_sub(self.began).as_secs_f32());
    }
}

impl SharedChoice {
    pub(super) fn lock(&self) -> MutexGuard<'_, ChoiceAndMeasurement> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SharedChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock().choice.fmt(f)
    }
}

impl Compressor {
    /// Creates a compressor with an empty memory.
    pub fn new(compression: Compression) -> Self {
        let auto = match compression {
            Compression::Auto(error_max) => Some(AutoChoice::new(error_max.value())),
            _ => None,
        };
        let auto = auto.map(|choice| {
            SharedChoice(Arc::new(Mutex::new(ChoiceAndMeasurement { choice, measurement: None })))
        });
        Self { compression, memory: Some(ErrorMemory::default()), auto }
    }

    /// Sets the seed of the random numbers of stochastic rounding and random-k. All ranks must pass the same seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        if let Some(memory) = &self.memory {
            memory.lock().seed = seed;
        }
        self
    }

    /// Returns the compression.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns what a compressor with [`Compression::Auto`] has measured and chosen. Returns `None` for other compressions.
    pub fn report(&self) -> Option<AutoReport> {
        self.auto.as_ref().map(|choice| choice.lock().choice.report())
    }

    /// Returns a copy of the memory, for a checkpoint. Call it while no call uses the compressor, after the last call was waited
    /// for. The measurements of [`Compression::Auto`] are not part of it, because a resumed job may have another network.
    pub fn state(&self) -> CompressorState {
        self.memory.as_ref().map(|memory| memory.lock().state.clone()).unwrap_or_default()
    }

    /// Replaces the memory by one of [`state`](Self::state) of the same rank. Call it while no call uses the compressor. If the
    /// residual is not empty, the next call must have a buffer of the same length.
    pub fn set_state(&self, state: CompressorState) {
        if let Some(memory) = &self.memory {
            let mut errors = memory.lock();
            (errors.state, errors.lacks_result) = (state, false);
        }
    }
}

impl From<Compression> for Compressor {
    fn from(compression: Compression) -> Self {
        Self { compression, memory: None, auto: None }
    }
}

impl From<&Self> for Compressor {
    fn from(compressor: &Self) -> Self {
        compressor.clone()
    }
}
