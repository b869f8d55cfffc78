//! The measurements of a compressor with `Compression::Auto`: small collectives that run beside its calls.

use super::compressor::{CallTimer, SharedChoice};
use super::handle::Handle;
use super::verbs::AllReduce;
use super::{Error, Group, at};
use crate::codec::Compression;
use crate::codec::error_feedback::mix;
use crate::types::{ReduceOp, Site};

/// The largest number of elements with which the ranks measure the error of a codec.
const SAMPLE_ELEMENTS: usize = 16_384;

impl Group {
    /// Chooses the codec of a call on `elements`, and begins its measurements. Returns the codec, and a timer if time matters.
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
            let largest = at(site, || self.all_reduce_async(times, ReduceOp::Max))?.downgrade();
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
            let mut start_sum = |codec| {
                let verb = AllReduce::new(ReduceOp::Sum).compressed(codec);
                at(site, || self.call(verb)).start(sample.to_vec()).map(Handle::downgrade)
            };
            let (exact, decoded) = (start_sum(Compression::None)?, start_sum(step.compression)?);
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
}

/// Returns the norm of the error of `decoded`, divided by the norm of `exact`: 0 if both are 0, and NaN if `exact` is not finite.
fn relative_error(exact: &[f32], decoded: &[f32]) -> f32 {
    let square = |value: f64| value * value;
    let norm: f64 = exact.iter().map(|&value| square(value.into())).sum();
    let pairs = exact.iter().zip(decoded);
    let error: f64 = pairs.map(|(&exact, &decoded)| square(f64::from(exact) - f64::from(decoded))).sum();
    if error == 0.0 && norm == 0.0 { 0.0 } else { (error / norm).sqrt() as f32 }
}
