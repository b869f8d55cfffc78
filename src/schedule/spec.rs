//! What a collective does, apart from the way in which it is done.

use super::partition::Partition;
use super::{
    Schedule, all_gather, all_ordered_reduce, all_reduce, all_to_all, barrier, broadcast, broadcast_tree,
    butterfly, direct,
};
use super::{
    double_tree, doubling, exscan, gather, ordered_reduce, reduce, reduce_scatter, reduce_tree, scan, scatter,
};
use crate::types::{Algorithm, Operation, Rank, WorldSize};

/// What a collective does, with elements of the whole operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveSpec {
    /// Everybody waits for everybody.
    Barrier,
    /// Everybody ends with the reduction of all buffers.
    AllReduce {
        /// Elements of each buffer.
        count: usize,
    },
    /// The root ends with the reduction of all buffers; nobody else's means anything then.
    Reduce {
        /// Elements of each buffer.
        count: usize,
        /// Who gets the result.
        root: Rank,
    },
    /// Everybody ends with the reduction of its own part.
    ReduceScatter(Partition),
    /// Everybody's own part goes to everybody.
    AllGather(Partition),
    /// The root's buffer goes to everybody.
    Broadcast {
        /// Elements of each buffer.
        count: usize,
        /// Whose it is.
        root: Rank,
    },
    /// Everybody's part goes to the root, whose buffer is the whole; any other rank's is its part.
    Gather {
        /// The parts.
        partition: Partition,
        /// Who gets them.
        root: Rank,
    },
    /// [`CollectiveSpec::Gather`] the other way.
    Scatter {
        /// The parts.
        partition: Partition,
        /// Who has them.
        root: Rank,
    },
    /// A part from each rank to each; the buffer is what is sent, and behind it what is received. The own part is left to the
    /// caller.
    AllToAll {
        /// This rank's parts for the others.
        send: Partition,
        /// The others' parts for this rank.
        receive: Partition,
        /// Every rank's parts for every rank are of one length, and all ranks know.
        is_even: bool,
    },
    /// Everybody ends with the reduction of the buffers of all ranks up to itself.
    Scan {
        /// Elements of each buffer.
        count: usize,
    },
    /// The same without the rank's own, behind the buffer's first `count` elements.
    Exscan {
        /// Elements of each contribution.
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

    /// The rank that has a part of its own in it.
    pub fn root(&self) -> Rank {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => *root,
            _ => Rank::ZERO,
        }
    }

    /// Elements of the whole operation, which all ranks have to agree on. What is exchanged differs from rank to rank where
    /// the parts are uneven; it is 0 then.
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

    /// The same with a part of the buffer, which has so many elements.
    ///
    /// # Panics
    ///
    /// If it is not done to every element alike.
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

    /// The way over links. `block` is how many elements an all-reduce on the ring takes at a time, or a double tree in one
    /// message; `in_rank_order` says that the reduction does not commute. Where everybody gets everybody's buffer to reduce
    /// it alone, this one's has a slot for each rank ([`Algorithm::OneShot`] in rank order, [`Algorithm::Doubling`] from
    /// this rank on).
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
