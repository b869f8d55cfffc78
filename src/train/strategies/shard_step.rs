//! The step of an optimizer whose state is divided over the ranks. Each rank updates the parameters for which it holds state,
//! and then all ranks gather all parameters.

use std::ops::Range;

use super::Replica;
use crate::group::Error;
use crate::train::batches::range_of_rank;
use crate::train::optimizer::Optimizer;
use crate::train::partition::ModelPartition;
use crate::train::runtime::{Runtime, Values};

/// The step of this rank, in which it updates the parameters in its chunk of each bucket.
pub(crate) struct ShardStep {
    /// How the ranks divide the parameters.
    partition: ModelPartition,
    /// The new parameters of this rank's chunks, in the order in which they occur in the model. The state of the
    /// optimizer has the same order.
    own_parameters: Vec<f32>,
    /// In this step, the elements of `own_parameters` from this index to the end have been updated.
    updated_from: usize,
}

impl ShardStep {
    /// Creates the step of a rank. `partition` divides each bucket of parameters over the ranks.
    pub(crate) fn new(partition: ModelPartition) -> Self {
        let own_parameters = vec![0.0; partition.own_parameter_count()];
        Self { partition, own_parameters, updated_from: 0 }
    }

    /// Returns this rank's chunk of each bucket, and the index of the chunk's first element in the vectors of the optimizer.
    /// The chunks go from the last bucket to the first. The backward pass computes gradients in this order.
    pub(super) fn chunks(&self) -> Vec<(Range<usize>, usize)> {
        let mut end = 0;
        let with_start = |chunk: &Range<usize>| {
            let start = end;
            end += chunk.len();
            (chunk.clone(), start)
        };
        let mut chunks: Vec<_> = self.partition.own_ranges().iter().map(with_start).collect();
        chunks.reverse();
        chunks
    }

    /// Begins a step. Then call [`update`](Self::update) for each of [`chunks`](Self::chunks) in this order, and at last
    /// [`finish`](Self::finish).
    pub(super) fn begin(&mut self, optimizer: &mut Optimizer) {
        optimizer.begin_step();
        self.updated_from = self.own_parameters.len();
    }

    /// Computes the new parameters of `chunk`. `gradients` has the sums over all ranks for `chunk`, and may change.
    pub(super) fn update(
        &mut self,
        chunk: Range<usize>,
        parameters: &[f32],
        gradients: &mut [f32],
        optimizer: &mut Optimizer,
    ) {
        let own = self.updated_from - chunk.len()..self.updated_from;
        self.updated_from = own.start;
        self.own_parameters[own.clone()].copy_from_slice(&parameters[chunk]);
        optimizer.update_range(own, &mut self.own_parameters, gradients);
    }

    /// Finishes the step, and replaces the parameters by the new parameters of all ranks. The gradients are
    /// unspecified after the call, because their memory receives the parameters. All ranks must call this function.
    pub(super) fn finish(
        &mut self,
        runtime: &mut dyn Runtime,
        Replica { parameters, gradients, optimizer }: &mut Replica<'_>,
    ) -> Result<(), Error> {
        let mut sums = optimizer.sums_for_end_of_step(&self.own_parameters);
        if !sums.is_empty() {
            runtime.combine(Values::Totals(&mut sums))?;
        }
        optimizer.finish_step_with_sums(&mut self.own_parameters, &sums);
        // Each rank's part is as long as its chunk of an all-gather: see `ModelPartition::shard_optimizer`.
        let (rank, size) = runtime.rank_and_size();
        let own_chunk = range_of_rank(gradients.len(), rank, size);
        gradients[own_chunk].copy_from_slice(&self.own_parameters);
        runtime.combine(Values::Chunks(gradients))?;
        self.partition.copy_parts_into_whole(gradients, parameters);
        Ok(())
    }
}
