//! The common part of `local-sgd`, `diloco` and `model-average`: each rank takes steps alone. An [`AveragingRule`]
//! decides when the ranks average their parameters, and computes the new parameters from the average.
//!
//! Each rank takes the steps of its own optimizer on its own part of every batch. A round is the time between two
//! averages. At the end of a round, the ranks sum the changes of their parameters in this round. Before the sum, each
//! rank multiplies its changes by its weight: its share of the samples of the round. A rank whose part of a batch is
//! empty takes no step, so its weight is smaller. The ranks send changes instead of parameters, because
//! compression causes smaller errors in the small changes than in the parameters.
//!
//! If the rule has a delay, each rank takes steps of the next round while the sum is in progress. It starts from an
//! estimate of the parameters after the average, which it computes from its own changes. After a fixed number of
//! steps, it waits for the sum, and adds the error of its estimate to its parameters. So each step is in the sum of
//! exactly one round, and no result depends on the time of a message. Whenever the ranks must have equal parameters,
//! they first finish the average in progress.

use super::request_exchange::RequestExchange;
use super::{ParameterAgreement, RankRequests, Replica, StepTotals, Strategy};
use crate::group::Error;
use crate::train::TrainError;
use crate::train::buckets::Buckets;
use crate::train::compression_plan::CompressionPlan;
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

    /// Returns the number of steps that the ranks take while an average is in progress. If 0, the ranks wait for the
    /// average. At the end of an epoch, the ranks always wait.
    fn delay(&self) -> u32 {
        0
    }

    /// Returns whether an average changes the parameters in a world of one rank.
    fn changes_single_rank(&self) -> bool {
        false
    }

    /// Returns the state vectors of the strategy. See [`Strategy::state`].
    fn state(&mut self) -> Vec<&mut Vec<f32>> {
        Vec::new()
    }

    /// Replaces `start`, the parameters after the previous average, by the parameters after this average. `change`
    /// holds the average change in this round.
    fn update(&mut self, start: &mut [f32], change: &[f32]) {
        start.iter_mut().zip(change).for_each(|(s, c)| *s += c);
    }

    /// Estimates the parameters after an average with a delay, and writes the estimate to `parameters`. `start` holds
    /// the parameters after the previous average. The rank assumes that all ranks have made the changes that it has
    /// made itself, from `start` to `parameters`.
    fn estimate(&self, _parameters: &mut [f32], _start: &[f32]) {}

    /// Adds the error of `estimate` to the parameters of this rank. `start` holds the parameters after the average.
    fn correct(&self, parameters: &mut [f32], estimate: &[f32], start: &[f32]) {
        add_differences(parameters, estimate, start);
    }
}

/// Adds `new - old` to `values`.
pub(crate) fn add_differences(values: &mut [f32], old: &[f32], new: &[f32]) {
    for ((value, old), new) in values.iter_mut().zip(old).zip(new) {
        *value += new - old;
    }
}

/// A strategy with which each rank takes steps alone.
pub(crate) struct LocalTraining<A> {
    averaging: A,
    /// The sums of the changes of the parameters.
    sums: Buckets,
    /// The parameters after the last average, the same on all ranks. Empty if this rank has taken no step since the
    /// ranks agreed on their parameters.
    start: Vec<f32>,
    /// The average in progress.
    pending: Option<PendingAverage>,
    /// The memory of the previous [`PendingAverage::estimate`].
    free_estimate: Vec<f32>,
    /// The number of this rank's samples in the current step.
    step_samples: usize,
    /// The numbers of samples in this round.
    round_samples: SampleCounts,
    /// The numbers of samples since the last average of the optimizer's state.
    samples_since_agreement: SampleCounts,
    requests: RequestExchange,
}

/// An average that is in progress while this rank takes steps.
struct PendingAverage {
    /// This rank's estimate of the parameters after the average.
    estimate: Vec<f32>,
    /// The average changes the parameters when the rank has taken this number of steps of the epoch.
    due_step: u64,
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
    /// Creates the strategy for the parameters of `plan`.
    pub(crate) fn new(averaging: A, plan: &CompressionPlan) -> Self {
        Self {
            averaging,
            sums: Buckets::single(plan),
            start: Vec::new(),
            pending: None,
            free_estimate: Vec::new(),
            step_samples: 0,
            round_samples: SampleCounts::default(),
            samples_since_agreement: SampleCounts::default(),
            requests: RequestExchange::new(),
        }
    }

    /// Begins a step in which this rank processes `own_samples` samples, and all ranks together `batch_len` samples.
    fn begin_step(&mut self, parameters: &[f32], own_samples: usize, batch_len: usize) {
        if self.start.is_empty() {
            self.start.extend_from_slice(parameters);
        }
        self.step_samples = own_samples;
        self.round_samples.add(own_samples, batch_len);
        self.samples_since_agreement.add(own_samples, batch_len);
    }

    /// Averages the parameters, and waits for the result.
    fn average(&mut self, runtime: &mut dyn Runtime, replica: &mut Replica<'_>) -> Result<(), Error> {
        self.finish_average(replica)?;
        if self.end_round(runtime, replica) {
            self.sums.sum(runtime, replica.gradients)?;
            self.averaging.update(&mut self.start, replica.gradients);
            replica.parameters.copy_from_slice(&self.start);
        }
        Ok(())
    }

    /// Starts to average the parameters. The average changes the parameters after `due_step` steps of the epoch.
    fn start_average(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        due_step: u64,
    ) -> Result<(), Error> {
        self.finish_average(replica)?;
        if self.end_round(runtime, replica) {
            self.sums.flush(runtime, replica.gradients)?;
            self.averaging.estimate(replica.parameters, &self.start);
            let mut estimate = std::mem::take(&mut self.free_estimate);
            estimate.clear();
            estimate.extend_from_slice(replica.parameters);
            self.pending = Some(PendingAverage { estimate, due_step });
        }
        Ok(())
    }

    /// Waits for the average in progress, if any, and changes the parameters.
    fn finish_average(&mut self, replica: &mut Replica<'_>) -> Result<(), Error> {
        let Some(PendingAverage { estimate, .. }) = self.pending.take() else { return Ok(()) };
        self.sums.wait_and_write_sums(replica.gradients)?;
        let (averaging, start) = (&mut self.averaging, &mut self.start);
        averaging.update(start, replica.gradients);
        if self.round_samples.all_ranks == 0 {
            replica.parameters.copy_from_slice(start);
        } else {
            averaging.correct(replica.parameters, &estimate, start);
        }
        self.free_estimate = estimate;
        Ok(())
    }

    /// Ends a round: writes the changes of this rank's parameters, multiplied by its weight, to the memory of the
    /// gradients, which are not needed until the next step. Returns whether there is something to average.
    fn end_round(&mut self, runtime: &dyn Runtime, replica: &mut Replica<'_>) -> bool {
        let counts = std::mem::take(&mut self.round_samples);
        let is_alone = runtime.rank_and_size().1 == WorldSize::ONE;
        if counts.all_ranks == 0 || is_alone && !self.averaging.changes_single_rank() {
            return false;
        }
        let weight = counts.weight();
        for ((change, p), s) in replica.gradients.iter_mut().zip(&*replica.parameters).zip(&self.start) {
            *change = weight * (p - s);
        }
        true
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
    ) -> Result<LossSums, TrainError> {
        self.begin_step(work.parameters, work.indices.len(), work.batch_len);
        let weight = 1.0 / work.indices.len().max(1) as f32;
        Ok(work.differentiate(weight, &OneRank, (usize::MAX, |_, _: &mut [f32]| {}))?)
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
        (steps, own): (u64, RankRequests),
    ) -> Result<RankRequests, Error> {
        if self.pending.as_ref().is_some_and(|average| average.due_step <= steps) {
            self.finish_average(replica)?;
        }
        if self.averaging.is_due_after_step(steps) {
            match self.averaging.delay() {
                0 => self.average(runtime, replica)?,
                delay => self.start_average(runtime, replica, steps + u64::from(delay))?,
            }
        }
        self.requests.after_step(runtime, own)
    }

    fn averages_after_step(&self, steps: u64) -> bool {
        self.averaging.is_due_after_step(steps)
    }

    fn has_equal_parameters(&self) -> bool {
        self.start.is_empty()
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

    fn compressed_sums(&mut self) -> Option<&mut Buckets> {
        Some(&mut self.sums)
    }

    fn agree_on_parameters(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
    ) -> Result<(), Error> {
        self.average(runtime, replica)?;
        self.start.clear();
        let counts = std::mem::take(&mut self.samples_since_agreement);
        if counts.all_ranks == 0 || runtime.rank_and_size().1 == WorldSize::ONE {
            return Ok(());
        }
        let weight = counts.weight();
        for vector in &mut replica.optimizer.state {
            for value in vector.iter_mut() {
                *value *= weight;
            }
            runtime.combine(Values::Vector(vector))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::group::{Compressor, Group};
    use crate::train::optimizer::{Optimizer, Rule};
    use crate::train::runtime::{
        PendingReceive, PendingSend, PendingSum, PendingTotals, SumBuffer, SumTarget,
    };
    use crate::train::strategies::{DiLoCo, LocalSgd};
    use crate::types::Rank;

    /// A single rank sends its parameters to no other rank, so it must not round them.
    #[test]
    fn an_average_does_not_change_the_parameters_of_a_single_rank() {
        let steps = 1.try_into().unwrap();
        let mut strategy = LocalTraining::new(LocalSgd { steps }, &CompressionPlan::exact(2));
        let (mut parameters, mut gradients) = ([1.000_001, 1e-30], [5.0, 5.0]);
        strategy.begin_step(&[1.0, 1.0], 3, 3);
        let mut optimizer = Optimizer::new(Rule::Sgd, 0.1, 0.0, 2);
        let mut replica =
            Replica { parameters: &mut parameters, gradients: &mut gradients, optimizer: &mut optimizer };
        strategy.after_step(&mut Group::solo(), &mut replica, (1, RankRequests::default())).unwrap();
        strategy.agree_on_parameters(&mut Group::solo(), &mut replica).unwrap();
        assert_eq!(parameters, [1.000_001, 1e-30]);
    }

    /// The number of ranks in [`each_average_changes_the_parameters_as_the_formulas_say`].
    const RANKS: u32 = 3;
    /// The number of steps of a round in the same test.
    const ROUND_STEPS: u64 = 4;

    /// The runtime of rank 0. Each sum gets `sum_of_others` from the other ranks, so no sum waits for another thread.
    struct ScriptedRanks {
        alone: Group,
        sum_of_others: f64,
        /// The number of sums that were in progress during later steps, and the number of all other sums.
        sums: (u32, u32),
    }

    impl Runtime for ScriptedRanks {
        fn rank_and_size(&self) -> (Rank, WorldSize) {
            (Rank::ZERO, WorldSize::new(RANKS).unwrap())
        }

        fn combine(&mut self, values: Values<'_>) -> Result<(), Error> {
            let Values::Vector(values) = values else { unreachable!("only parameters are averaged") };
            self.sums.1 += 1;
            values[0] += self.sum_of_others as f32;
            Ok(())
        }

        fn start_sum(
            &mut self,
            values: &[&[f32]],
            target_and_compressor: (SumTarget, &Compressor),
            reuse: Option<SumBuffer>,
        ) -> Result<PendingSum, Error> {
            self.sums.0 += 1;
            let sum = [values[0][0] + self.sum_of_others as f32];
            self.alone.start_sum(&[&sum], target_and_compressor, reuse)
        }

        fn start_sum_of_totals(&mut self, totals: Vec<f64>) -> Result<PendingTotals, Error> {
            self.alone.start_sum_of_totals(totals)
        }

        fn start_send(&mut self, _: Vec<f32>, _: Rank, _: u32) -> Result<PendingSend, Error> {
            unreachable!("these strategies send no messages")
        }

        fn start_receive(&mut self, _: Vec<f32>, _: Rank, _: u32) -> Result<PendingReceive, Error> {
            unreachable!("these strategies send no messages")
        }
    }

    /// Returns the number of samples of a rank in a step. In each step, all ranks together process 3 samples.
    fn samples(rank: u32, step: u64) -> usize {
        (u64::from(rank) + step) as usize % 3
    }

    /// Returns the change of the parameter of a rank in a step. A rank without samples takes no step.
    fn change(rank: u32, step: u64) -> f64 {
        let change = (u64::from(rank) * 31 + step * 17) % 13;
        if samples(rank, step) > 0 { change as f64 / 13.0 - 0.3 } else { 0.0 }
    }

    /// Returns the sum of the changes of a rank, and its share of the samples of all ranks.
    fn change_and_weight(rank: u32, steps: Range<u64>) -> (f64, f64) {
        let own: usize = steps.clone().map(|step| samples(rank, step)).sum();
        let all_ranks = 3 * (steps.end - steps.start);
        (steps.map(|step| change(rank, step)).sum(), own as f64 / all_ranks as f64)
    }

    /// Returns the sum of the weighted changes of `ranks`.
    fn weighted_changes(ranks: Range<u32>, steps: &Range<u64>) -> f64 {
        let products = ranks.map(|rank| change_and_weight(rank, steps.clone())).map(|(c, w)| c * w);
        products.sum()
    }

    /// Returns the parameter and the velocity after an outer step.
    fn outer_step(s: f64, v: f64, change: f64) -> (f64, f64) {
        let g = -change;
        let v = 0.9 * v + g;
        (s - 0.7 * (g + 0.9 * v), v)
    }

    /// Checks the parameter of rank 0 after each step of two epochs against the formulas of `docs/strategies.md`,
    /// computed in f64. The last round of an epoch is shorter than the other rounds.
    #[test]
    fn each_average_changes_the_parameters_as_the_formulas_say() {
        const EPOCH_STEPS: u64 = 14;
        for delay in 0..=ROUND_STEPS {
            let steps = (ROUND_STEPS as u32).try_into().unwrap();
            let rule = DiLoCo::new((steps, delay as u32), 1, Vec::new());
            let mut strategy = LocalTraining::new(rule, &CompressionPlan::exact(1));
            let mut ranks = ScriptedRanks { alone: Group::solo(), sum_of_others: 0.0, sums: (0, 0) };
            let mut optimizer = Optimizer::new(Rule::Sgd, 0.1, 0.0, 1);
            let (mut parameters, mut gradients) = ([1.0], [0.0]);
            let (mut s, mut v) = (1.0, 0.0);
            for first in [0, EPOCH_STEPS] {
                // The outer steps have applied the changes of all steps before `applied`.
                let mut applied = first;
                for step in first..first + EPOCH_STEPS {
                    let (done, next) = (step + 1 - first, step + 1);
                    strategy.begin_step(&parameters, samples(0, step), 3);
                    parameters[0] += change(0, step) as f32;
                    if done.is_multiple_of(ROUND_STEPS) {
                        ranks.sum_of_others = weighted_changes(1..RANKS, &(next - ROUND_STEPS..next));
                    }
                    let replica = &mut Replica {
                        parameters: &mut parameters,
                        gradients: &mut gradients,
                        optimizer: &mut optimizer,
                    };
                    strategy.after_step(&mut ranks, replica, (done, RankRequests::default())).unwrap();
                    if done > delay && (done - delay).is_multiple_of(ROUND_STEPS) {
                        applied = next - delay;
                        let change = weighted_changes(0..RANKS, &(applied - ROUND_STEPS..applied));
                        (s, v) = outer_step(s, v, change);
                    }
                    // Without a complete round after `applied`, no average is in progress.
                    let estimated = next - (next - applied) % ROUND_STEPS;
                    let own = |steps| change_and_weight(0, steps).0;
                    let is_pending = estimated > applied;
                    let start = if is_pending { outer_step(s, v, own(applied..estimated)).0 } else { s };
                    let (found, expected) = (f64::from(parameters[0]), start + own(estimated..next));
                    assert!((found - expected).abs() < 1e-5, "{delay} {step}: {found}, expected {expected}");
                }
                let end = first + EPOCH_STEPS;
                let last_round = end - EPOCH_STEPS % ROUND_STEPS..end;
                ranks.sum_of_others = weighted_changes(1..RANKS, &last_round);
                let replica = &mut Replica {
                    parameters: &mut parameters,
                    gradients: &mut gradients,
                    optimizer: &mut optimizer,
                };
                strategy.agree_on_parameters(&mut ranks, replica).unwrap();
                if applied < last_round.start {
                    (s, v) = outer_step(s, v, weighted_changes(0..RANKS, &(applied..last_round.start)));
                }
                (s, v) = outer_step(s, v, weighted_changes(0..RANKS, &last_round));
                assert!((f64::from(parameters[0]) - s).abs() < 1e-5, "{delay}: {parameters:?}, expected {s}");
            }
            // An epoch has three whole rounds, and ends with a sum for which the rank waits.
            assert_eq!(ranks.sums, if delay == 0 { (0, 8) } else { (6, 2) });
        }
    }
}
