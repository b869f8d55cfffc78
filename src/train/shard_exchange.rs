//! Adds the gradients of the logical shards over all ranks, in the order of the summation tree.
//!
//! Each rank owns one chunk of the gradient. Each rank holds the gradients of some nodes of the tree
//! ([`LogicalShards::nodes_of_rank`]), and sends each owner the owner's chunk of these gradients. The owner adds the
//! received chunks in the order of the tree. Then all ranks gather the sums of all chunks. This last step is left out
//! if each rank updates only the parameters of its own chunk.
//!
//! If the number of ranks n is a power of two and divides the number of shards, each rank holds one node. Each rank
//! then sends 2(n-1)/n S bytes for a gradient of S bytes, as in a ring all-reduce. The collectives only copy data, so
//! the sums do not depend on the algorithms of the collectives or on the transport.

use std::ops::Range;

use super::logical_shards::LogicalShards;
use super::runtime::SumTarget;
use super::summation_tree::{SiblingStack, add_elements};
use crate::group::verbs::AllToAll;
use crate::group::{Error, Group};
use crate::types::Rank;

/// The gradients of the nodes that a rank holds, and the memory for the exchange.
pub(crate) struct ShardSums<'a> {
    pub(crate) shards: LogicalShards,
    /// The gradient of the rank's first node. [`add_over_ranks`] replaces this gradient, or only the rank's own chunk
    /// of it, by the sum over all ranks: see `target`.
    pub(crate) first_node: &'a mut [f32],
    /// The first vectors are the gradients of the rank's other nodes. Later vectors are not used.
    pub(crate) other_nodes: &'a [Vec<f32>],
    /// Memory for this rank's chunk of the gradients of all nodes. [`add_over_ranks`] resizes this vector.
    pub(crate) received: &'a mut Vec<f32>,
    pub(crate) target: SumTarget,
}

/// Replaces `first_node`, or only this rank's chunk of `first_node`, by the sum of the gradients of all shards.
pub(crate) fn add_over_ranks(group: &mut Group, sums: ShardSums<'_>) -> Result<(), Error> {
    let ShardSums { shards, first_node, other_nodes, received, target } = sums;
    let (rank, size) = (group.rank(), group.size());
    if size.as_usize() == 1 {
        return Ok(());
    }
    let nodes_of = |rank: Rank| shards.nodes_of_rank(rank, size);
    let nodes: Vec<Vec<Range<usize>>> = size.ranks().map(nodes_of).collect();
    let chunk_lens: Vec<usize> = size.ranks().map(|rank| group.chunk(first_node.len(), rank).len()).collect();
    let own_chunk = group.chunk(first_node.len(), rank);
    let node_count: usize = nodes.iter().map(Vec::len).sum();
    received.resize(node_count * own_chunk.len(), 0.0);
    let mut rest: &mut [f32] = received;
    // `parts[round][rank]` is this rank's chunk of node number `round` of `rank`. Empty if `rank` has fewer nodes.
    let mut parts: Vec<Vec<&mut [f32]>> = Vec::new();
    for round in 0..nodes.iter().map(Vec::len).max().unwrap_or_default() {
        let receive_counts: Vec<usize> =
            nodes.iter().map(|nodes| if round < nodes.len() { own_chunk.len() } else { 0 }).collect();
        let own = match round {
            _ if round >= nodes[rank.index()].len() => &[],
            0 => &*first_node,
            _ => other_nodes[round - 1].as_slice(),
        };
        let zero_counts = vec![0; chunk_lens.len()];
        let send_counts = if own.is_empty() { &zero_counts } else { &chunk_lens };
        let (output, later) = std::mem::take(&mut rest).split_at_mut(receive_counts.iter().sum());
        rest = later;
        group.call(AllToAll::new().counts(send_counts, &receive_counts)).run_into(own, output)?;
        let mut output = output;
        let mut round_parts = Vec::new();
        for count in receive_counts {
            let (part, later) = output.split_at_mut(count);
            round_parts.push(part);
            output = later;
        }
        parts.push(round_parts);
    }
    let mut stack = SiblingStack::new(shards.count());
    let mut pending: Vec<&mut [f32]> = Vec::new();
    for (rank, nodes) in nodes.into_iter().enumerate() {
        for (round, node) in nodes.into_iter().enumerate() {
            pending.push(std::mem::take(&mut parts[round][rank]));
            stack.push(node, |index| {
                let right = pending.remove(index + 1);
                add_elements(pending[index], right);
            });
        }
    }
    if let [sum] = pending.as_slice() {
        first_node[own_chunk].copy_from_slice(sum);
    }
    match target {
        SumTarget::Everything => group.all_gather(first_node),
        SumTarget::OwnChunk => Ok(()),
    }
}
