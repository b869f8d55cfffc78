//! Computes the gradient of one rank's samples, in one pass or as a sum over micro-batches.

use std::num::NonZeroU32;
use std::ops::Range;
use std::time::{Duration, Instant};

use ndarray::s;

use super::batches::divide;
use super::data::{Samples, Standardizer};
use super::model::{
    GradientUpdate, LayerError, LossSums, Network, OneRank, StepSeed, SumOverRanks, TrainingBatch, Workspace,
};

/// The inputs and the memory that a rank needs to compute the gradient of its samples.
pub(crate) struct GradientWork<'a> {
    pub(crate) network: &'a Network,
    pub(crate) parameters: &'a [f32],
    /// The first moment of the optimizer, if it is Adam. Empty if the caller sums no first moments.
    pub(crate) first_moment: &'a [f32],
    /// The buffer to which the gradient is written.
    pub(crate) gradients: &'a mut [f32],
    /// A workspace with at least [`micro_batch_rows`] rows.
    pub(crate) workspace: &'a mut Workspace,
    /// All samples that this rank holds.
    pub(crate) samples: &'a Samples,
    pub(crate) standardizer: Option<&'a Standardizer>,
    /// The positions in `samples` of the samples whose gradient this rank computes.
    pub(crate) indices: &'a [u32],
    /// The size of the global batch: the number of samples of all ranks in this step.
    pub(crate) batch_len: usize,
    /// The number of micro-batches into which `indices` are divided.
    pub(crate) micro_batches: NonZeroU32,
    /// The seed and the number of the step.
    pub(crate) step: StepSeed,
    /// The total time for gathering features. [`differentiate`](Self::differentiate) adds its own time to this total.
    pub(crate) data_time: &'a mut Duration,
}

/// Returns the number of samples in the longest micro-batch if `len` samples are divided into `micro_batches`. At
/// least 1.
pub(crate) fn micro_batch_rows(len: usize, micro_batches: NonZeroU32) -> usize {
    len.div_ceil(micro_batches.get() as usize).max(1)
}

/// Divides samples into at most `micro_batches` parts of nearly equal length. No part is empty.
pub(crate) fn divide_into_micro_batches(
    indices: &[u32],
    micro_batches: NonZeroU32,
) -> impl Iterator<Item = &[u32]> {
    let count = indices.len().min(micro_batches.get() as usize);
    (0..count).map(move |part| &indices[divide(indices.len(), part, count)])
}

impl GradientWork<'_> {
    /// Returns the number of micro-batches of this step. If layers sum numbers over ranks, all ranks process the same number
    /// of micro-batches, even if some of them are empty. Otherwise, a rank has no empty micro-batch, except that a rank
    /// without samples has one.
    fn micro_batch_count(&self) -> usize {
        let longest = if self.network.uses_sums_over_ranks() { self.batch_len } else { self.indices.len() };
        longest.min(self.micro_batches.get() as usize).max(1)
    }

    /// Computes the gradient of `weight` times the sum of the losses, and adds the gradients of all micro-batches.
    /// `ranks` sums numbers over the ranks that process parts of the same batch. During the last micro-batch, calls
    /// `on_ready` for each range of gradients as soon as the range is final: see [`Network::differentiate`].
    pub(crate) fn differentiate(
        self,
        weight: f32,
        ranks: &dyn SumOverRanks,
        (range_elements, mut on_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> Result<LossSums, LayerError> {
        let count = self.micro_batch_count();
        let Self {
            network,
            parameters,
            gradients,
            workspace,
            samples,
            standardizer,
            indices,
            step,
            data_time,
            ..
        } = self;
        let mut total = LossSums::default();
        for number in 0..count {
            let indices = &indices[divide(indices.len(), number, count)];
            let sample_rows = indices.iter().map(|&index| index as usize);
            let input = workspace.input.slice_mut(s![..indices.len(), ..]);
            let gather_start = Instant::now();
            samples.features.write_rows(sample_rows, standardizer, input);
            *data_time += gather_start.elapsed();
            let update = if number == 0 { GradientUpdate::Replace } else { GradientUpdate::Add };
            let batch = TrainingBatch { targets: &samples.targets, indices, weight, step, update, ranks };
            let sums = if number + 1 == count {
                let reports = (range_elements, &mut on_ready);
                network.differentiate(parameters, gradients, workspace, batch, reports)?
            } else {
                let ignore_ranges = (usize::MAX, |_, _: &mut [f32]| {});
                network.differentiate(parameters, gradients, workspace, batch, ignore_ranges)?
            };
            total.loss += sums.loss;
            total.correct += sums.correct;
        }
        Ok(total)
    }
}

impl GradientWork<'_> {
    /// Computes the gradient of `weight` times the sum of the losses of the samples `self.indices[range]`: see
    /// [`Network::differentiate_row_groups`]. Writes the gradient to `target`, or to `self.gradients` if `target` is `None`.
    pub(crate) fn differentiate_row_groups(
        &mut self,
        weight: f32,
        range: Range<usize>,
        target: Option<&mut [f32]>,
        row_groups: (&[Range<usize>], &mut [LossSums]),
    ) -> Result<(), LayerError> {
        let indices = &self.indices[range];
        let input = self.workspace.input.slice_mut(s![..indices.len(), ..]);
        let gather_start = Instant::now();
        self.samples.features.write_rows(
            indices.iter().map(|&index| index as usize),
            self.standardizer,
            input,
        );
        *self.data_time += gather_start.elapsed();
        let (targets, update) = (&self.samples.targets, GradientUpdate::Replace);
        let batch = TrainingBatch { targets, indices, weight, step: self.step, update, ranks: &OneRank };
        let gradients = target.unwrap_or(self.gradients);
        self.network.differentiate_row_groups(self.parameters, gradients, self.workspace, batch, row_groups)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::train::data::{Features, Targets};
    use crate::train::model::Loss;
    use crate::train::random;

    /// Tests micro-batches of different lengths, and fewer samples than micro-batches. The gradient and the ranges
    /// must be the same as without micro-batches.
    #[test]
    fn the_gradients_of_micro_batches_add_up() {
        let mut stream = random::random_stream("test", 1, 2);
        let values = Array2::from_shape_simple_fn((10, 5), || random::symmetric_uniform(&mut stream, 1.0));
        let targets = Targets::Classes((0..10).map(|row| row % 3).collect());
        let samples = Samples { features: Features::Numbers(values), targets };
        let network = Network::new(&"mlp:6".parse().unwrap(), 5, 3, Loss::CrossEntropy).unwrap();
        let parameters = network.initialize(1);
        for len in [0, 1, 2, 7, 10] {
            let indices: Vec<u32> = (0..len).rev().collect();
            let gradient = |count: u32| {
                let micro_batches = NonZeroU32::new(count).unwrap();
                let mut gradients = vec![f32::NAN; parameters.len()];
                let mut ranges = Vec::new();
                let work = GradientWork {
                    network: &network,
                    parameters: &parameters,
                    first_moment: &[],
                    gradients: &mut gradients,
                    workspace: &mut network
                        .allocate_workspace(micro_batch_rows(indices.len(), micro_batches)),
                    samples: &samples,
                    standardizer: None,
                    indices: &indices,
                    batch_len: 10,
                    micro_batches,
                    step: StepSeed::default(),
                    data_time: &mut Duration::default(),
                };
                let on_range = |range, _: &mut [f32]| ranges.push(range);
                let sums = work.differentiate(0.1, &OneRank, (11, on_range)).unwrap();
                (gradients, sums, ranges)
            };
            let (expected, sums, ranges) = gradient(1);
            for count in [2, 3, 7, 100] {
                let found = gradient(count);
                for (found, expected) in found.0.iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-6, "{len} samples, {count} micro-batches");
                }
                assert!((found.1.loss - sums.loss).abs() < 1e-5 && found.1.correct == sums.correct);
                assert_eq!(found.2, ranges);
            }
        }
    }
}
