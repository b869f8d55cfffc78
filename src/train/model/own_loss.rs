//! A loss that a program implements itself.

use std::fmt;
use std::sync::Arc;

use super::TargetScale;
use crate::train::data::Targets;

/// A loss of your own, for models that predict numbers or classes. Pass it to
/// [`OwnModel::with_loss`](super::OwnModel::with_loss).
///
/// ```
/// use ringtrain::train::model::{SampleLoss, SampleTarget};
///
/// /// The absolute error, whose optimal prediction is the median.
/// struct AbsoluteError;
///
/// impl SampleLoss for AbsoluteError {
///     fn differentiate(&self, outputs: &[f32], target: SampleTarget, derivatives: &mut [f32]) -> f64 {
///         let SampleTarget::Number(target) = target else { panic!("the loss is for numbers") };
///         let error = f64::from(outputs[0]) - target;
///         derivatives[0] = error.signum() as f32;
///         error.abs()
///     }
/// }
/// ```
pub trait SampleLoss: Send + Sync + 'static {
    /// Returns the number of outputs of a model that predicts a number. The first output is the prediction. A model that
    /// predicts classes has an output for each class, and the largest output is the prediction.
    fn outputs_for_number(&self) -> usize {
        1
    }

    /// Returns the loss of a sample, and writes the derivatives of the loss with respect to the outputs to `derivatives`. The
    /// trainer minimizes the mean of the losses. A loss of NaN or infinity ends the run.
    fn differentiate(&self, outputs: &[f32], target: SampleTarget, derivatives: &mut [f32]) -> f64;
}

/// The target of a sample.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum SampleTarget {
    /// A number. With [`Config::standardize`](crate::train::Config::standardize), it is scaled so that the targets of the
    /// training set have the mean 0 and the deviation 1.
    Number(f64),
    /// The index of a class.
    Class(usize),
}

/// The own loss of a model.
#[derive(Clone)]
pub struct OwnLoss {
    pub(crate) function: Arc<dyn SampleLoss>,
    /// The scale of the target. `None` if the model predicts classes.
    pub(crate) scale: Option<TargetScale>,
}

impl OwnLoss {
    /// Returns the loss of the sample `row`, and writes its derivatives to `derivatives`.
    pub(super) fn differentiate(
        &self,
        outputs: &[f32],
        (targets, row): (&Targets, usize),
        derivatives: &mut [f32],
    ) -> f64 {
        let target = match (targets, self.scale) {
            (Targets::Numbers(values), Some(TargetScale { mean, deviation })) => {
                SampleTarget::Number((values[row] - mean) / deviation)
            }
            (Targets::Classes(classes), None) => SampleTarget::Class(classes[row] as usize),
            _ => unreachable!("the loss was chosen to match the targets"),
        };
        self.function.differentiate(outputs, target, derivatives)
    }
}

impl PartialEq for OwnLoss {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.function, &other.function) && self.scale == other.scale
    }
}

impl fmt::Debug for OwnLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnLoss").field("scale", &self.scale).finish_non_exhaustive()
    }
}
