//! The measurements of a compressor with [`Compression::Auto`](crate::Compression::Auto): small collectives that run beside its
//! calls. `auto_choice.rs` decides with their results.

use super::compressor::{CallTimer, Compressor, SharedChoice};
use super::handle::{Handle, WeakHandle};
use super::{Error, Group};
use crate::codec::Compression;
use crate::runtime::error_feedback::mix;
use crate::schedule::CollectiveSpec;
use crate::types::{ReduceOp, Site};

/// The largest number of elements with which the ranks measure the error of a codec.
const SAMPLE_ELEMENTS: usize = 16_384;

impl Group {
    /// Chooses the codec of a call on `elements`, and begins the measurements that belong to the call. Returns the codec, and the
    /// timer of the call if its time matters.
    pub(super) fn choose_codec(
        &mut self,
        choice: &SharedChoice,
        elements: &[f32],
        site: Site,
    ) -> Result<(Compression, Option<CallTimer>), Error> {
        let mut shared = choice.lock();
        // Within a host, no codec is worth the time of the processors, which the ranks need for their computation.
        let Some(job) = self.job.as_ref().filter(|_| self.local_size() != self.world).cloned() else {
            shared.choice.use_exact_elements();
            return Ok((Compression::None, None));
        };
        let before = shared.choice.report();
        if let Some(finish) = shared.measurement.take() {
            finish(&mut shared.choice)?;
        }
        let step = shared.choice.begin_call();
        let after = shared.choice.report();
        if !after.is_trial && (before.is_trial || before.compression != after.compression) {
            log::info!(
                "rank {}: compression auto uses {} for {} elements (relative error {:?}, {:?} s per call)",
                self.members[self.rank.index()],
                after.compression,
                elements.len(),
                after.relative_error,
                after.seconds
            );
        }
        if let Some(times) = step.times_to_compare {
            let spec = CollectiveSpec::AllReduce { count: times.len() };
            let mut call = self.new_call::<f32>(spec, site);
            call.set_built_in(ReduceOp::Max)?;
            let largest = self.start_in_place(call, times)?.downgrade();
            shared.measurement = Some(Box::new(move |choice| {
                if let Some(largest) = largest.upgrade() {
                    choice.handle_times(&largest.wait()?);
                }
                Ok(())
            }));
        }
        if step.is_checked {
            let count = elements.len().min(SAMPLE_ELEMENTS);
            // Each check measures another part of the buffer.
            let starts = (elements.len() - count + 1) as u64;
            let start = (mix(self.compressed_calls) % starts) as usize;
            let sample = &elements[start..start + count];
            let exact = self.start_sum_of_sample(sample, Compression::None, site)?;
            let decoded = self.start_sum_of_sample(sample, step.compression, site)?;
            shared.measurement = Some(Box::new(move |choice| {
                if let (Some(exact), Some(decoded)) = (exact.upgrade(), decoded.upgrade()) {
                    choice.handle_error(relative_error(&exact.wait()?, &decoded.wait()?));
                }
                Ok(())
            }));
        }
        drop(shared);
        let timer = CallTimer { choice: choice.clone(), began: job.driver.now() };
        Ok((step.compression, Some(timer)))
    }

    fn start_sum_of_sample(
        &mut self,
        sample: &[f32],
        compression: Compression,
        site: Site,
    ) -> Result<WeakHandle<Vec<f32>>, Error> {
        let mut call = self.new_call::<f32>(CollectiveSpec::AllReduce { count: sample.len() }, site);
        call.set_built_in(ReduceOp::Sum)?;
        call.set_compressor(&Compressor::from(compression))?;
        self.start_in_place(call, sample.to_vec()).map(Handle::downgrade)
    }
}

/// Returns the Euclidean norm of the error of `decoded`, divided by the norm of `exact`. Returns 0 if both norms are 0, and NaN
/// if the exact elements are not finite.
fn relative_error(exact: &[f32], decoded: &[f32]) -> f32 {
    let square = |value: f64| value * value;
    let norm: f64 = exact.iter().map(|&value| square(value.into())).sum();
    let pairs = exact.iter().zip(decoded);
    let error: f64 = pairs.map(|(&exact, &decoded)| square(f64::from(exact) - f64::from(decoded))).sum();
    if error == 0.0 && norm == 0.0 { 0.0 } else { (error / norm).sqrt() as f32 }
}
