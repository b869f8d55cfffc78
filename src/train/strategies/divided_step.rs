//! Code that the strategies `tensor`, `pipeline` and `hybrid` share: the inputs of their passes, and the step of the
//! optimizer, in which each rank updates the parameters that it holds.

use super::{Replica, StepTotals};
use crate::group::Error;
use crate::train::clipping;
use crate::train::data::{Samples, Standardizer};
use crate::train::model::Loss;
use crate::train::partition::PartPlace;
use crate::train::runtime::{Runtime, Values};
use crate::types::Rank;

/// The inputs of a forward or backward pass.
#[derive(Clone, Copy)]
pub(super) struct PassInputs<'a> {
    pub loss: &'a Loss,
    pub parameters: &'a [f32],
    pub samples: &'a Samples,
    pub standardizer: Option<&'a Standardizer>,
}

/// Clips the gradients, takes a step, and returns the totals of all ranks. Clipping uses the norm of the gradients of
/// the whole model. So the ranks sum the squared norms of all parts. If several ranks hold the same part, only one of
/// these ranks adds the norm of this part.
pub(super) fn clip_and_take_step(
    runtime: &mut dyn Runtime,
    Replica { parameters, gradients, optimizer }: &mut Replica<'_>,
    place: PartPlace,
    own_totals: StepTotals,
) -> Result<StepTotals, Error> {
    if let Some(norm_max) = optimizer.clip_norm {
        let adds_norm = place.replica == Rank::ZERO;
        let parts = optimizer.clipped_parts(0, gradients);
        let square = |part: &&mut [f32]| clipping::euclidean_norm(part).powi(2);
        let mut squares = [if adds_norm { parts.iter().map(square).sum() } else { 0.0 }];
        runtime.combine(Values::Totals(&mut squares))?;
        for part in parts {
            clipping::scale_to_norm(part, squares[0].sqrt(), norm_max);
        }
    }
    let pending = runtime.start_sum_of_totals(own_totals.to_array().to_vec())?;
    optimizer.begin_step();
    optimizer.update_range(0..parameters.len(), parameters, gradients);
    optimizer.finish_step(parameters);
    Ok(StepTotals::from_totals(&pending.wait()?))
}
