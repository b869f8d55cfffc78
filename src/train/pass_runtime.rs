//! The runtime during the forward and backward pass of a step.

use std::cell::RefCell;
use std::fmt;

use super::model::{LossSums, SumOverRanks};
use super::runtime::{Runtime, Values};
use crate::group::Error;

/// Lets layers and buckets use one [`Runtime`] in turn during a forward and backward pass. Keeps the first
/// error of a call.
pub(crate) struct PassRuntime<'a> {
    /// The runtime, and the first error of a call.
    runtime: RefCell<(&'a mut dyn Runtime, Result<(), Error>)>,
}

impl<'a> PassRuntime<'a> {
    pub(crate) fn new(runtime: &'a mut dyn Runtime) -> Self {
        Self { runtime: RefCell::new((runtime, Ok(()))) }
    }

    /// Calls `call` if all earlier calls succeeded.
    pub(crate) fn call_unless_failed(&self, call: impl FnOnce(&mut dyn Runtime) -> Result<(), Error>) {
        let (runtime, result) = &mut *self.runtime.borrow_mut();
        if result.is_ok() {
            *result = call(*runtime);
        }
    }

    /// Ends the pass. Returns the first error of a call, or `sums` (the sums of the losses) if no call failed.
    pub(crate) fn into_result(self, sums: LossSums) -> Result<LossSums, Error> {
        // If the loss is not finite, ignore a failed call: the caller ends the job with an error about the loss.
        if sums.loss.is_finite() {
            self.runtime.into_inner().1?;
        }
        Ok(sums)
    }
}

impl SumOverRanks for PassRuntime<'_> {
    fn sum_over_ranks(&self, values: &mut [f64]) {
        self.call_unless_failed(|runtime| runtime.combine(Values::Totals(values)));
    }
}

impl fmt::Debug for PassRuntime<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PassRuntime").finish_non_exhaustive()
    }
}
