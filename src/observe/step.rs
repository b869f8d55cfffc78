//! The step of the training run in this process, for the log.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of the step plus 1; 0 if no step has begun.
static STEP: AtomicU64 = AtomicU64::new(0);

/// Sets the step that begins: the number of steps that the run has completed.
pub(crate) fn set_step(completed: u64) {
    STEP.store(completed + 1, Ordering::Relaxed);
}

/// Returns the step that began last, counted from 1.
pub(crate) fn current_step() -> Option<u64> {
    Some(STEP.load(Ordering::Relaxed)).filter(|&step| step > 0)
}
