//! The common part of `local-sgd`, `diloco` and `model-average`: each rank takes steps alone. An [`AveragingRule`]
//! decides when the ranks average their parameters, and computes the new parameters from the average.
//!
//! Each rank takes the steps of its own optimizer on its own part of every batch. A round is the time between two
//! averages. At the end of a round, the ranks sum the changes of their parameters in this round. Before the sum, each
//! rank multiplies its changes by its weight: its share of the samples of the round. A rank whose part of a batch is
//! empty takes no step, so its weight is smaller. The ranks send changes instead of parameters, because
//! compression causes smaller errors in the small changes than in the parameters.

use super::stop_exchange::StopExchange;
use super::{ParameterAgreement, Replica, StepTotals, Strategy};
use crate::codec::Compression;
use crate::group::Error;
use crate::train::gradient_work::GradientWork;
use crate::train::model::{LossSums, OneRank};
use crate::train::runtime::{Runtime, Values};
use crate::types::WorldSize;

/// Says when the ranks average their parameters, and how the average changes the parameters.
pub(crate) trait AveragingRule {
    /// Returns whether the ranks average their parameters when they have taken `steps` steps of an epoch.
    fn is_due_after_step(&self, steps: u64) -> bool;

    /// Returns whether the ranks average their parameters when they have completed `epochs` epochs of the run.
    fn is_due_after_epoch(&self, epochs: u64) -> bool;

    /// Returns whether an average changes the parameters in a world of one rank.
    fn changes_single_rank(&self) -> bool {
        false
    }

    /// Returns the state vectors of the strategy. See [`Strategy::state`].
    fn state(&mut self) -> Vec<&mut Vec<f32>> {
        Vec::new()
    }

    /// Computes the parameters after an average. `start` holds the parameters at the start of the round, and `change`
    /// holds the average change in this round.
    fn update(&mut self, parameters: &mut [f32], start: &[f32], change: &[f32]) {
        for ((p, s), c) in parameters.iter_mut().zip(start).zip(change) {
            *p = s + c;
        }
    }
}

/// A strategy with which each rank takes steps alone.
pub(crate) struct LocalTraining<A> {
    averaging: A,
    /// The format in which ranks send the changes of their parameters.
    compression: Compression,
    /// The parameters at the start of the round.
    round_start: Vec<f32>,
    /// The number of this rank's samples in the current step.
    step_samples: usize,
    /// The numbers of samples since the last average of the parameters.
    round_samples: SampleCounts,
    /// The numbers of samples since the last average of the optimizer's state.
    samples_since_agreement: SampleCounts,
    stop: StopExchange,
}

/// The numbers of samples that this rank and all ranks have processed since an average.
#[derive(Clone, Copy, Default)]
struct SampleCounts {
    own: u64,
    all_ranks: u64,
}

impl SampleCounts {
    /// Adds the samples of a step: `own` on this rank, and `all_ranks` on all ranks together.
    fn add(&mut self, own: usize, all_ranks: usize) {
        self.own += own as u64;
        self.all_ranks += all_ranks as u64;
    }

    /// Returns the weight of this rank in an average. The weights of all ranks sum to 1.
    fn weight(self) -> f32 {
        (self.own as f64 / self.all_ranks as f64) as f32
    }
}

impl<A: AveragingRule> LocalTraining<A> {
    pub(crate) fn new(averaging: A, compression: Compression) -> Self {
        Self {
            averaging,
            compression,
            round_start: Vec::new(),
            step_samples: 0,
            round_samples: SampleCounts::default(),
            samples_since_agreement: SampleCounts::default(),
            stop: StopExchange::new(),
        }
    }

    /// Averages the parameters and starts a new round. Does nothing if no rank took a step in this round.
    fn average_parameters(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
    ) -> Result<(), Error> {
        let counts = std::mem::take(&mut self.round_samples);
        let is_alone = runtime.rank_and_size().1 == WorldSize::ONE;
        if counts.all_ranks == 0 || is_alone && !self.averaging.changes_single_rank() {
            return Ok(());
        }
        // The gradients are not needed until the next step, so their memory holds the changes.
        let weight = counts.weight();
        for ((change, p), s) in replica.gradients.iter_mut().zip(&*replica.parameters).zip(&self.round_start)
        {
            *change = weight * (p - s);
        }
        runtime.combine(Values::Vector(replica.gradients, self.compression))?;
        self.averaging.update(replica.parameters, &self.round_start, replica.gradients);
        Ok(())
    }
}

impl<A: AveragingRule> Strategy for LocalTraining<A> {
    fn parameter_agreement(&self) -> ParameterAgreement {
        ParameterAgreement::OnRequest
    }

    /// Divides the gradient by the number of this rank's samples, because this rank takes a step alone.
    fn compute_local_gradient(
        &mut self,
        _: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, Error> {
        if self.round_samples.all_ranks == 0 {
            self.round_start.clear();
            self.round_start.extend_from_slice(work.parameters);
        }
        self.step_samples = work.indices.len();
        self.round_samples.add(work.indices.len(), work.batch_len);
        self.samples_since_agreement.add(work.indices.len(), work.batch_len);
        let weight = 1.0 / work.indices.len().max(1) as f32;
        Ok(work.differentiate(weight, &OneRank, (usize::MAX, |_, _: &mut [f32]| {})))
    }

    fn take_step(
        &mut self,
        _: &mut dyn Runtime,
        Replica { parameters, gradients, optimizer }: &mut Replica<'_>,
        _: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        if self.step_samples > 0 {
            optimizer.step(parameters, gradients);
        } else {
            // All ranks count the same steps, so that Adam's bias correction stays the same on all ranks.
            optimizer.begin_step();
        }
        Ok(None)
    }

    fn after_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        steps: u64,
        is_stopping: bool,
    ) -> Result<bool, Error> {
        if self.averaging.is_due_after_step(steps) {
            self.average_parameters(runtime, replica)?;
        }
        self.stop.after_step(runtime, is_stopping)
    }

    fn after_epoch(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        epochs: u64,
    ) -> Result<(), Error> {
        if self.averaging.is_due_after_epoch(epochs) {
            self.agree_on_parameters(runtime, replica)
        } else {
            Ok(())
        }
    }

    fn state(&mut self) -> Vec<&mut Vec<f32>> {
        self.averaging.state()
    }

    fn agree_on_parameters(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
    ) -> Result<(), Error> {
        self.average_parameters(runtime, replica)?;
        let counts = std::mem::take(&mut self.samples_since_agreement);
        if counts.all_ranks == 0 || runtime.rank_and_size().1 == WorldSize::ONE {
            return Ok(());
        }
        let weight = counts.weight();
        for vector in &mut replica.optimizer.state {
            for value in vector.iter_mut() {
                *value *= weight;
            }
            runtime.combine(Values::Vector(vector, Compression::None))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Group;
    use crate::train::optimizer::{Optimizer, Rule};
    use crate::train::strategies::LocalSgd;

    /// A single rank sends its parameters to no other rank, so it must not round them to [`Compression::Bf16`].
    #[test]
    fn an_average_does_not_change_the_parameters_of_a_single_rank() {
        let steps = 1.try_into().unwrap();
        let mut strategy = LocalTraining::new(LocalSgd { steps }, Compression::Bf16);
        strategy.round_start = vec![1.0, 1.0];
        strategy.round_samples.add(3, 3);
        let mut optimizer = Optimizer::new(Rule::Sgd, 0.1, 0.0, 2);
        let (mut parameters, mut gradients) = ([1.000_001, 1e-30], [5.0, 5.0]);
        let mut replica =
            Replica { parameters: &mut parameters, gradients: &mut gradients, optimizer: &mut optimizer };
        strategy.after_step(&mut Group::solo(), &mut replica, 1, false).unwrap();
        strategy.agree_on_parameters(&mut Group::solo(), &mut replica).unwrap();
        assert_eq!(parameters, [1.000_001, 1e-30]);
    }
}
