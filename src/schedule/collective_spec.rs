//! The description of a collective call, without the algorithm that runs the call.

use super::partition::Partition;
use super::{GatherWorkspace, Schedule, chain, direct_exchange, double_tree, doubling, ring, tree};
use crate::types::{Algorithm, Operation, Rank, WorldSize};

/// A collective as one rank calls it. `count` is the number of elements in each buffer, and rank r has part r of `partition`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveSpec {
    /// No rank leaves the barrier before all ranks have entered the barrier.
    Barrier,
    /// Every rank gets the reduction of all buffers.
    AllReduce { count: usize },
    /// The root gets the reduction of all buffers. The other ranks' buffers are then unspecified.
    Reduce { count: usize, root: Rank },
    /// Every rank gets its part of the reduction of all buffers.
    ReduceScatter(Partition),
    /// Every rank gets the parts of all ranks.
    AllGather(Partition),
    /// Every rank gets the contents of the root's buffer.
    Broadcast { count: usize, root: Rank },
    /// The root's buffer has space for all parts. The buffer of every other rank contains only that rank's part.
    Gather { partition: Partition, root: Rank },
    /// Every rank gets its part of the root's buffer. The buffers have the same lengths as in `Gather`.
    Scatter { partition: Partition, root: Rank },
    /// The buffer contains the elements to send and then those to receive: part r of `send` goes to rank r, and part r of
    /// `receive` comes from rank r. The caller copies the part that the rank sends to itself. If `is_even` is true, all parts
    /// have the same length.
    AllToAll { send: Partition, receive: Partition, is_even: bool },
    /// Rank r gets the reduction of the buffers of ranks 0 to r.
    Scan { count: usize },
    /// Rank r gets the reduction of the contributions of ranks 0 to r-1. The buffer contains the `count` elements of
    /// the rank's contribution and then the `count` elements of the result.
    Exscan { count: usize },
}

impl CollectiveSpec {
    pub fn operation(&self) -> Operation {
        match self {
            Self::Barrier => Operation::Barrier,
            Self::AllReduce { .. } => Operation::AllReduce,
            Self::Reduce { .. } => Operation::Reduce,
            Self::ReduceScatter(_) => Operation::ReduceScatter,
            Self::AllGather(_) => Operation::AllGather,
            Self::Broadcast { .. } => Operation::Broadcast,
            Self::Gather { .. } => Operation::Gather,
            Self::Scatter { .. } => Operation::Scatter,
            Self::AllToAll { .. } => Operation::AllToAll,
            Self::Scan { .. } => Operation::Scan,
            Self::Exscan { .. } => Operation::Exscan,
        }
    }

    /// Returns the root, or rank 0 if the collective has no root.
    pub fn root(&self) -> Rank {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => *root,
            _ => Rank::ZERO,
        }
    }

    /// Returns the number of elements of the operation, which must be the same on all ranks. Returns 0 for a barrier, and for an
    /// all-to-all with uneven parts, in which the number may differ between ranks.
    pub fn count(&self) -> usize {
        match self {
            Self::AllReduce { count }
            | Self::Reduce { count, .. }
            | Self::Broadcast { count, .. }
            | Self::Scan { count }
            | Self::Exscan { count } => *count,
            Self::ReduceScatter(partition)
            | Self::AllGather(partition)
            | Self::Gather { partition, .. }
            | Self::Scatter { partition, .. } => partition.total(),
            Self::AllToAll { send, is_even: true, .. } => send.total(),
            Self::Barrier | Self::AllToAll { .. } => 0,
        }
    }

    /// Returns the same operation with another root, for a block of the buffer with `count` elements. Panics if the operation
    /// divides its buffer into one part for each rank, or is a scan or exscan.
    #[must_use]
    pub fn of_block(&self, count: usize, root: Rank) -> Self {
        match *self {
            Self::Barrier => Self::Barrier,
            Self::AllReduce { .. } => Self::AllReduce { count },
            Self::Reduce { .. } => Self::Reduce { count, root },
            Self::Broadcast { .. } => Self::Broadcast { count, root },
            _ => unreachable!("{self:?} is not run in blocks"),
        }
    }

    pub fn has_known_part_lengths(&self) -> bool {
        !matches!(self, Self::AllToAll { is_even: false, .. })
    }

    /// Returns the schedule of `rank`: the steps in which this rank exchanges messages with its peers. A partition must have one
    /// part for each rank. `block` is the number of elements in a block of the ring all-reduce, or in a message of the double
    /// tree. `in_rank_order` must be true if the reduction does not commute.
    ///
    /// For an all-reduce with [`Algorithm::OneShot`] or [`Algorithm::Doubling`], the schedule gathers the buffers of all
    /// ranks in a [`GatherWorkspace`]. Panics if `block` is 0.
    pub fn schedule(
        &self,
        algorithm: Algorithm,
        (world, rank): (WorldSize, Rank),
        block: usize,
        in_rank_order: bool,
    ) -> Schedule {
        let (count, root) = (self.count(), self.root());
        let gather = |first, schedule| {
            let workspace = GatherWorkspace { world, rank, first, count };
            Schedule { workspace: Some(workspace), ..schedule }
        };
        match (self, algorithm) {
            (Self::Barrier, _) => doubling::barrier(world, rank),
            (Self::AllReduce { .. }, _) if in_rank_order => chain::ordered_all_reduce(world, rank, count),
            (Self::AllReduce { .. }, Algorithm::OneShot) => {
                let slots = Partition::of_equal_parts(count, world);
                gather(Rank::ZERO, direct_exchange::all_gather(world, rank, &slots))
            }
            (Self::AllReduce { .. }, Algorithm::Doubling) => {
                gather(rank, doubling::all_gather(world, rank, count))
            }
            (Self::AllReduce { .. }, Algorithm::Direct) => direct_exchange::all_reduce(world, rank, count),
            (Self::AllReduce { .. }, Algorithm::Butterfly) => doubling::all_reduce(world, rank, count),
            (Self::AllReduce { .. }, Algorithm::DoubleTree) => {
                double_tree::all_reduce(world, rank, count, block)
            }
            (Self::AllReduce { .. }, _) => ring::all_reduce(world, rank, count, block),
            (Self::Reduce { .. }, _) if in_rank_order => chain::ordered_reduce(world, rank, root, count),
            (Self::Reduce { .. }, Algorithm::Tree) => tree::reduce_tree(world, rank, root, count),
            (Self::Reduce { .. }, Algorithm::DoubleTree) => {
                double_tree::reduce(world, rank, root, count, block)
            }
            (Self::Reduce { .. }, _) => chain::reduce(world, rank, root, count),
            (Self::ReduceScatter(parts), Algorithm::Direct) => {
                direct_exchange::reduce_scatter(world, rank, parts)
            }
            (Self::ReduceScatter(parts), _) => ring::reduce_scatter(world, rank, parts),
            (Self::AllGather(parts), Algorithm::Direct) => direct_exchange::all_gather(world, rank, parts),
            (Self::AllGather(parts), _) => ring::all_gather(world, rank, parts),
            (Self::Broadcast { .. }, Algorithm::Tree) => tree::broadcast_tree(world, rank, root, count),
            (Self::Broadcast { .. }, Algorithm::DoubleTree) => {
                double_tree::broadcast(world, rank, root, count, block)
            }
            (Self::Broadcast { .. }, _) => ring::broadcast(world, rank, root, count),
            (Self::Gather { partition, .. }, _) => direct_exchange::gather(world, rank, root, partition),
            (Self::Scatter { partition, .. }, _) => direct_exchange::scatter(world, rank, root, partition),
            (Self::AllToAll { send, receive, .. }, _) => {
                direct_exchange::all_to_all(world, rank, send, receive)
            }
            (Self::Scan { .. }, _) => chain::scan(world, rank, count),
            (Self::Exscan { .. }, _) => chain::exscan(world, rank, count),
        }
    }
}
