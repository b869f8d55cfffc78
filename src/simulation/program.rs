//! Random programs of collectives and messages, in the group of all ranks and in smaller groups, and the expected
//! result of each operation.

use std::panic::Location;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::engine::{OperationRequest, SendMode};
use crate::reduce;
use crate::schedule::cost::{can_run, possible_algorithms};
use crate::schedule::partition::{Partition, chunk};
use crate::schedule::{CollectiveSpec, Schedule};
use crate::types::{
    Algorithm, COMPRESSED_LAYOUT, Compression, Contract, DType, HOSTS_GROUP_BIT, Operation, ReduceOp,
};
use crate::{Rank, WorldSize};

/// The number of elements in a block of the ring all-reduce. In a long buffer, the last block is shorter than
/// the other blocks.
const RING_BLOCK_ELEMENTS: usize = 50;
/// The smallest number of elements in a block of a double tree.
const TREE_BLOCK_ELEMENTS_MIN: usize = 20;
/// The largest number of blocks into which a double tree divides a buffer.
const TREE_BLOCKS_MAX: usize = 100;

/// One call of an operation. All ranks of the group make the same call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimCall {
    /// The index of the group in the list of groups.
    pub(crate) group: usize,
    pub(crate) operation: Operation,
    pub(crate) op: ReduceOp,
    pub(crate) count: usize,
    /// The root of a collective, or the sender of a message. The rank after the
    /// sender receives the message.
    pub(crate) root: Rank,
    pub(crate) algorithm: Algorithm,
    /// Whether the call is an all-reduce whose ranks encode the elements that they send. Its elements are `f32`.
    pub(crate) is_compressed: bool,
}

/// The ranks of a group, in the order of their ranks in the group.
pub(crate) type Members = Vec<Rank>;

pub(crate) const OPERATIONS: [Operation; 12] = [
    Operation::AllReduce,
    Operation::Reduce,
    Operation::ReduceScatter,
    Operation::AllGather,
    Operation::Broadcast,
    Operation::Gather,
    Operation::Scatter,
    Operation::AllToAll,
    Operation::Scan,
    Operation::Exscan,
    Operation::Barrier,
    Operation::Message,
];

impl SimCall {
    pub(crate) const BARRIER: Self = Self {
        group: 0,
        operation: Operation::Barrier,
        op: ReduceOp::Sum,
        count: 0,
        root: Rank::ZERO,
        algorithm: Algorithm::Dissemination,
        is_compressed: false,
    };

    pub(crate) fn random(random: &mut StdRng, groups: &[Members]) -> Self {
        let operation = OPERATIONS[random.random_range(0..OPERATIONS.len())];
        Self::random_call_of(operation, random, groups)
    }

    /// Returns a random call of this operation.
    pub(crate) fn random_call_of(operation: Operation, random: &mut StdRng, groups: &[Members]) -> Self {
        let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max];
        let mut op = ops[random.random_range(0..ops.len())];
        if matches!(operation, Operation::Scan | Operation::Exscan) && op == ReduceOp::Average {
            op = ReduceOp::Sum;
        }
        let group = random.random_range(0..groups.len());
        let world = WorldSize::new(groups[group].len() as u32).expect("a group has members");
        let possible: Vec<Algorithm> = possible_algorithms(operation)
            .iter()
            .copied()
            .filter(|&algorithm| can_run(algorithm, world, 0))
            .collect();
        Self {
            group,
            operation,
            op,
            count: if operation == Operation::Barrier { 0 } else { random.random_range(0..120) },
            root: Rank::new(random.random_range(0..groups[group].len() as u32)),
            algorithm: possible[random.random_range(0..possible.len())],
            is_compressed: false,
        }
    }

    /// Returns another call of a collective of `world` ranks: with another root, or of another operation.
    pub(crate) fn other_call(self, world: WorldSize) -> Self {
        if self.operation.has_root() && self.count.is_multiple_of(2) {
            return Self { root: world.rank_after(self.root, 1), ..self };
        }
        let (operation, algorithm) = (Operation::AllGather, Algorithm::Ring);
        Self { operation, algorithm, count: self.count + 1, is_compressed: false, ..self }
    }

    /// Returns the description of this call for the engine.
    pub(crate) fn to_begin(self, timeout: Duration) -> OperationRequest {
        let reduces = self.reduction().is_some();
        let is_barrier = self.operation == Operation::Barrier;
        let contract = Contract {
            operation: self.operation,
            dtype: if is_barrier { DType::U8 } else { self.dtype() },
            reduction: reduces.then_some(self.op),
            algorithm: self.algorithm,
            root: if self.operation.has_root() { self.root } else { Rank::ZERO },
            count: self.count as u64,
            layout: if self.is_compressed { COMPRESSED_LAYOUT | Compression::Fp16.to_code() } else { 0 },
        };
        let group_bit = if contract.has_blocks() { HOSTS_GROUP_BIT } else { 0 };
        OperationRequest {
            group: self.group as u32 | group_bit,
            contract,
            timeout,
            began: None,
            site: Location::caller().into(),
            mode: if self.count.is_multiple_of(2) { SendMode::Standard } else { SendMode::Synchronous },
        }
    }

    pub(crate) fn kernels(self, world: WorldSize) -> Option<reduce::Kernels> {
        let kernels = self.reduction().and_then(|op| reduce::kernels(self.dtype(), op));
        kernels.map(|kernels| kernels.of_contributions(world.get()))
    }

    fn dtype(self) -> DType {
        if self.is_compressed { DType::F32 } else { DType::F64 }
    }

    fn reduction(self) -> Option<ReduceOp> {
        let reduces = matches!(
            self.operation,
            Operation::AllReduce
                | Operation::Reduce
                | Operation::ReduceScatter
                | Operation::Scan
                | Operation::Exscan
        );
        reduces.then_some(self.op)
    }

    /// Returns the schedule of `rank`, which is a rank in the group of this call. The library chooses the schedule, as it
    /// does for a group.
    pub(crate) fn schedule(self, world: WorldSize, rank: Rank) -> Schedule {
        let block = match self.algorithm {
            Algorithm::DoubleTree => TREE_BLOCK_ELEMENTS_MIN.max(self.count / TREE_BLOCKS_MAX),
            _ => RING_BLOCK_ELEMENTS,
        };
        let spec = self.spec(world, rank);
        spec.map_or_else(Schedule::default, |spec| spec.schedule(self.algorithm, (world, rank), block, false))
    }

    /// Returns the description of a collective, and `None` for a message.
    pub(crate) fn spec(self, world: WorldSize, rank: Rank) -> Option<CollectiveSpec> {
        let Self { count, root, .. } = self;
        let partition = Partition::even(count, world);
        Some(match self.operation {
            Operation::AllReduce => CollectiveSpec::AllReduce { count },
            Operation::Reduce => CollectiveSpec::Reduce { count, root },
            Operation::ReduceScatter => CollectiveSpec::ReduceScatter(partition),
            Operation::AllGather => CollectiveSpec::AllGather(partition),
            Operation::Broadcast => CollectiveSpec::Broadcast { count, root },
            Operation::Gather => CollectiveSpec::Gather { partition, root },
            Operation::Scatter => CollectiveSpec::Scatter { partition, root },
            Operation::AllToAll => {
                let receive = self.received_parts(world, rank);
                CollectiveSpec::AllToAll { send: partition, receive, is_even: true }
            }
            Operation::Scan => CollectiveSpec::Scan { count },
            Operation::Exscan => CollectiveSpec::Exscan { count },
            Operation::Barrier => CollectiveSpec::Barrier,
            Operation::Message => return None,
        })
    }

    /// Returns the parts that this rank receives from all ranks in an all-to-all.
    fn received_parts(self, world: WorldSize, rank: Rank) -> Partition {
        let own = chunk(self.count, world, rank).len();
        Partition::from_counts(&vec![own; world.as_usize()]).expect("the sum is small")
    }

    /// Returns the contribution of `rank` to the element `index`.
    fn contribution(rank: Rank, index: usize) -> f64 {
        f64::from(rank.get() + 1) * 64.0 + (index % 7) as f64
    }

    /// Returns the initial buffer of the group's rank `rank`.
    pub(crate) fn initial_buffer(self, world: WorldSize, rank: Rank) -> Vec<f64> {
        let own = chunk(self.count, world, rank);
        let all =
            |count: usize| (0..count).map(|index| Self::contribution(rank, index)).collect::<Vec<f64>>();
        match self.operation {
            Operation::Gather if rank != self.root => all(self.count).drain(own).collect(),
            Operation::Scatter if rank != self.root => vec![0.0; own.len()],
            Operation::Exscan => [all(self.count), vec![0.0; self.count]].concat(),
            Operation::AllToAll => {
                let mut buffer = all(self.count);
                let received = self.received_parts(world, rank);
                buffer.resize(self.count + received.total(), 0.0);
                let own_start = self.count + received.range(rank).start;
                buffer.copy_within(own, own_start);
                buffer
            }
            _ => all(self.count),
        }
    }

    /// Returns whether `buffer` is the right result of this call on the group's rank `rank`.
    pub(crate) fn is_right_result(self, world: WorldSize, rank: Rank, buffer: &[f64]) -> bool {
        let Self { count, root, .. } = self;
        let own = chunk(count, world, rank);
        let owner = |index| {
            world
                .ranks()
                .find(|&owner| chunk(count, world, owner).contains(&index))
                .expect("every element has an owner")
        };
        let reduced =
            |ranks: std::ops::Range<u32>, index| self.expected_element(ranks.map(Rank::new), world, index);
        let all_ranks = 0..world.get();
        let each = |expected: &dyn Fn(usize) -> f64| (0..count).all(|index| buffer[index] == expected(index));
        match self.operation {
            Operation::AllReduce => each(&|index| reduced(all_ranks.clone(), index)),
            Operation::Reduce => rank != root || each(&|index| reduced(all_ranks.clone(), index)),
            Operation::ReduceScatter => {
                own.into_iter().all(|index| buffer[index] == reduced(0..world.get(), index))
            }
            Operation::AllGather => each(&|index| Self::contribution(owner(index), index)),
            Operation::Gather => rank != root || each(&|index| Self::contribution(owner(index), index)),
            Operation::Scatter => {
                let start = if rank == root { own.start } else { 0 };
                own.clone().all(|index| buffer[start + index - own.start] == Self::contribution(root, index))
            }
            Operation::Broadcast => each(&|index| Self::contribution(root, index)),
            Operation::AllToAll => world.ranks().all(|from| {
                let start = count + self.received_parts(world, rank).range(from).start;
                own.clone().all(|index| buffer[start + index - own.start] == Self::contribution(from, index))
            }),
            Operation::Scan => each(&|index| reduced(0..rank.get() + 1, index)),
            Operation::Exscan => {
                rank == Rank::ZERO
                    || (0..count).all(|index| buffer[count + index] == reduced(0..rank.get(), index))
            }
            Operation::Barrier => true,
            // The receiver gets the sender's elements. The sender's own buffer is unchanged.
            Operation::Message => {
                let from = if rank == root { rank } else { world.rank_before(rank, 1) };
                buffer.len() == count && each(&|index| Self::contribution(from, index))
            }
        }
    }

    /// Returns the reduction of the contributions of all `ranks` to the element `index`.
    fn expected_element(self, ranks: impl Iterator<Item = Rank>, world: WorldSize, index: usize) -> f64 {
        let values = ranks.map(|rank| Self::contribution(rank, index));
        match self.op {
            ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
            ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
            ReduceOp::Average => values.sum::<f64>() / f64::from(world.get()),
            _ => values.sum(),
        }
    }
}
