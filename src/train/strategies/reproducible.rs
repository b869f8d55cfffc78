//! Synchronous data parallelism whose parameters have the same bits for every number of ranks (`--reproducible`).
//!
//! Each batch is divided into [logical shards](LogicalShards). Each rank computes the gradients of its shards. If a
//! rank has both children of a node of the summation tree, this rank adds the two gradients. Then the ranks exchange
//! and add the remaining nodes ([`ShardSums`]). Losses are added in the order of the same tree. The optimizer works as
//! with `allreduce`.

use std::num::NonZeroU32;
use std::ops::Range;

use super::{ParameterAgreement, Replica, ShardStep, StepTotals, Strategy};
use crate::group::Error;
use crate::train::TrainError;
use crate::train::clipping;
use crate::train::gradient_work::GradientWork;
use crate::train::logical_shards::LogicalShards;
use crate::train::model::LossSums;
use crate::train::runtime::{Runtime, SumTarget, Values};
use crate::train::shard_exchange::ShardSums;
use crate::train::summation_tree::{SiblingStack, add_elements, sum_numbers_in_tree_order};

/// The strategy `allreduce` with `--reproducible`.
pub(crate) struct Reproducible {
    shards: LogicalShards,
    micro_batches: NonZeroU32,
    /// The sum of the losses of each shard. 0 for the shards of other ranks.
    losses: Vec<f64>,
    /// The gradients of the nodes that this rank computes, except for the first node. The gradient of the first node is in
    /// [`Replica::gradients`].
    other_nodes: Vec<Vec<f32>>,
    /// Memory for the exchange of nodes.
    received: Vec<f32>,
    /// Updates the parameters of this rank's chunks. `None` if the ranks do not divide the optimizer's state.
    shard_step: Option<ShardStep>,
}

impl Reproducible {
    pub(crate) fn new(
        shards: LogicalShards,
        micro_batches: NonZeroU32,
        shard_step: Option<ShardStep>,
    ) -> Self {
        let losses = vec![0.0; shards.count()];
        Self { shards, micro_batches, losses, other_nodes: Vec::new(), received: Vec::new(), shard_step }
    }
}

impl Strategy for Reproducible {
    fn parameter_agreement(&self) -> ParameterAgreement {
        ParameterAgreement::EveryStep
    }

    fn compute_local_gradient(
        &mut self,
        runtime: &mut dyn Runtime,
        mut work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let Self { shards, losses, other_nodes, .. } = self;
        let len = work.batch_len;
        let weight = 1.0 / len as f32;
        let (rank, size) = runtime.rank_and_size();
        let first_sample = shards.samples(shards.shards_of_rank(rank, size), len).start;
        let mut total = LossSums::default();
        let mut stack = SiblingStack::new(shards.count());
        for node in shards.passes((rank, size), self.micro_batches) {
            let index = stack.len();
            if index > other_nodes.len() {
                other_nodes.push(vec![0.0; work.gradients.len()]);
            }
            let samples = shards.samples(node.clone(), len);
            let groups = shards.row_groups(node.clone(), len);
            let mut sums = vec![LossSums::default(); groups.len()];
            let target = index.checked_sub(1).map(|index| other_nodes[index].as_mut_slice());
            let range: Range<usize> = samples.start - first_sample..samples.end - first_sample;
            work.differentiate_row_groups(weight, range, target, (&groups, &mut sums))?;
            for (loss, sums) in losses[node.clone()].iter_mut().zip(&sums) {
                *loss = sums.loss;
                total.add(*sums);
            }
            stack.push(node, |left| {
                let (before, right) = other_nodes.split_at_mut(left);
                let left = before.last_mut().map_or(&mut *work.gradients, Vec::as_mut_slice);
                add_elements(left, &right[0]);
            });
        }
        Ok(total)
    }

    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        // Each shard has an element of its own in the sum. One rank adds the loss of the shard to this element, and
        // all other ranks add 0. So the sums have the same bits for every order of additions.
        let mut totals = self.losses.clone();
        totals.extend(own_totals.to_array());
        let pending = runtime.start_sum_of_totals(totals)?;
        let Self { shards, other_nodes, received, shard_step, .. } = self;
        let Replica { parameters, gradients, optimizer } = replica;
        // The norm of the gradients depends on the order of additions, so each rank computes it from all gradients.
        let needs_all = shard_step.is_none() || optimizer.clip_norm.is_some();
        runtime.combine(Values::ShardSums(ShardSums {
            shards: *shards,
            first_node: gradients,
            other_nodes,
            received,
            target: if needs_all { SumTarget::Everything } else { SumTarget::OwnChunk },
        }))?;
        if let Some(step) = shard_step {
            if let Some(norm_max) = optimizer.clip_norm {
                clipping::clip_to_norm(gradients, norm_max);
            }
            step.begin(optimizer);
            for (chunk, _) in step.chunks() {
                step.update(chunk.clone(), parameters, &mut gradients[chunk], optimizer);
            }
            step.finish(runtime, replica)?;
        } else {
            optimizer.step(parameters, gradients);
        }
        let totals = pending.wait()?;
        let (losses, rest) = totals.split_at(shards.count());
        let loss = sum_numbers_in_tree_order(losses);
        Ok(Some(StepTotals { loss, ..StepTotals::from_totals(rest) }))
    }
}
