//! What a collective does, independent of the algorithm.

use super::partition::Partition;
use super::{
    Schedule, all_gather, all_ordered_reduce, all_reduce, all_to_all, barrier, broadcast, broadcast_tree,
    butterfly, direct,
};
use super::{
    double_tree, doubling, exscan, gather, ordered_reduce, reduce, reduce_scatter, reduce_tree, scan, scatter,
};
use crate::types::{Algorithm, Operation, Rank, WorldSize};

/// What a collective does, with the elements of the whole operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveSpec {
    /// No rank ends before all ranks have begun.
    Barrier,
    /// Every rank ends with the reduction of all buffers.
    AllReduce {
        /// The number of elements in each buffer.
        count: usize,
    },
    /// The root ends with the reduction of all buffers; the other ranks' buffers are then unspecified.
    Reduce {
        /// The number of elements in each buffer.
        count: usize,
        /// The rank that gets the result.
        root: Rank,
    },
    /// Every rank ends with its part of the reduction of all buffers.
    ReduceScatter(Partition),
    /// Every rank ends with all ranks' parts.
    AllGather(Partition),
    /// Every rank ends with the root's buffer.
    Broadcast {
        /// The number of elements in each buffer.
        count: usize,
        /// The rank whose buffer it is.
        root: Rank,
    },
    /// The root ends with all ranks' parts. The root's buffer is the whole; another rank's buffer is its part.
    Gather {
        /// The parts.
        partition: Partition,
        /// The rank that gets them.
        root: Rank,
    },
    /// The reverse of [`CollectiveSpec::Gather`].
    Scatter {
        /// The parts.
        partition: Partition,
        /// The rank that has them.
        root: Rank,
    },
    /// Each rank sends a part to each other rank. The buffer holds the elements to send, then those to receive. The
    /// caller copies the part from the rank to itself.
    AllToAll {
        /// This rank's parts for the others.
        send: Partition,
        /// The others' parts for this rank.
        receive: Partition,
        /// All parts have the same length, and all ranks know it.
        is_even: bool,
    },
    /// Every rank ends with the reduction of the buffers of ranks 0 to its own.
    Scan {
        /// The number of elements in each buffer.
        count: usize,
    },
    /// The same without the rank's own buffer. The result follows the first `count` elements of the buffer.
    Exscan {
        /// The number of elements in each contribution.
        count: usize,
    },
}

impl CollectiveSpec {
    /// The collective.
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

    /// The rank that has a special part in it, as root.
    pub fn root(&self) -> Rank {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => *root,
            _ => Rank::ZERO,
        }
    }

    /// The number of elements of the whole operation, on which all ranks must agree. It is 0 for an exchange with
    /// uneven parts, whose number of elements differs from rank to rank.
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

    /// The same operation on a part of the buffer that has this many elements.
    ///
    /// # Panics
    ///
    /// If the operation does not treat all elements alike.
    #[must_use]
    pub fn of_length(&self, count: usize) -> Self {
        match *self {
            Self::Barrier => Self::Barrier,
            Self::AllReduce { .. } => Self::AllReduce { count },
            Self::Reduce { root, .. } => Self::Reduce { count, root },
            Self::Broadcast { root, .. } => Self::Broadcast { count, root },
            _ => unreachable!("the parts of {self:?} are not alike"),
        }
    }

    /// Whether every rank knows the lengths of all parts.
    pub fn is_known(&self) -> bool {
        !matches!(self, Self::AllToAll { is_even: false, .. })
    }

    /// The schedule over links. `block` is the number of elements that an all-reduce on the ring takes at a time, or
    /// that a double tree sends in one message. `in_rank_order` says that the reduction does not commute. If every
    /// rank gets all buffers and reduces them itself, this rank's buffer has a slot for each rank
    /// ([`Algorithm::OneShot`] in rank order, [`Algorithm::Doubling`] from this rank on).
    ///
    /// # Panics
    ///
    /// As the schedules do.
    pub fn schedule(
        &self,
        algorithm: Algorithm,
        (world, rank): (WorldSize, Rank),
        block: usize,
        in_rank_order: bool,
    ) -> Schedule {
        let is_direct = algorithm == Algorithm::Direct;
        let is_tree = algorithm == Algorithm::Tree;
        let is_double = algorithm == Algorithm::DoubleTree;
        match self {
            Self::Barrier => barrier(world, rank),
            Self::AllReduce { count } if in_rank_order => all_ordered_reduce(world, rank, *count),
            Self::AllReduce { count } => match algorithm {
                Algorithm::OneShot => direct::all_gather(world, rank, &Partition::alike(*count, world)),
                Algorithm::Doubling => doubling::all_gather(world, rank, *count),
                Algorithm::Direct => direct::all_reduce(world, rank, *count),
                Algorithm::Butterfly => butterfly::all_reduce(world, rank, *count),
                Algorithm::DoubleTree => double_tree::all_reduce(world, rank, *count, block),
                _ => all_reduce(world, rank, *count, block),
            },
            Self::Reduce { count, root } if in_rank_order => ordered_reduce(world, rank, *root, *count),
            Self::Reduce { count, root } if is_tree => reduce_tree(world, rank, *root, *count),
            Self::Reduce { count, root } if is_double => {
                double_tree::reduce(world, rank, *root, *count, block)
            }
            Self::Reduce { count, root } => reduce(world, rank, *root, *count),
            Self::ReduceScatter(partition) if is_direct => direct::reduce_scatter(world, rank, partition),
            Self::ReduceScatter(partition) => reduce_scatter(world, rank, partition),
            Self::AllGather(partition) if is_direct => direct::all_gather(world, rank, partition),
            Self::AllGather(partition) => all_gather(world, rank, partition),
            Self::Broadcast { count, root } if is_tree => broadcast_tree(world, rank, *root, *count),
            Self::Broadcast { count, root } if is_double => {
                double_tree::broadcast(world, rank, *root, *count, block)
            }
            Self::Broadcast { count, root } => broadcast(world, rank, *root, *count),
            Self::Gather { partition, root } => gather(world, rank, *root, partition),
            Self::Scatter { partition, root } => scatter(world, rank, *root, partition),
            Self::AllToAll { send, receive, .. } => all_to_all(world, rank, send, receive),
            Self::Scan { count } => scan(world, rank, *count),
            Self::Exscan { count } => exscan(world, rank, *count),
        }
    }
}
