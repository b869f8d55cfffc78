//! Random programs of collectives and messages, on the whole world and on parts of it, and what each must leave behind.

use std::panic::Location;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use ringtrain::engine::{Begin, SendMode};
use ringtrain::reduce;
use ringtrain::schedule::cost::{is_able, possible};
use ringtrain::schedule::partition::{Partition, chunk};
use ringtrain::schedule::{self, Schedule, double_tree};
use ringtrain::types::{Algorithm, Contract, DType, Operation, ReduceOp};
use ringtrain::{Rank, WorldSize};

/// Elements that an all-reduce takes at a time: long buffers take several blocks, the last of them uneven.
const BLOCK: usize = 50;
/// Elements that a double tree sends at a time, and into how many blocks a long buffer is cut.
const TREE_BLOCK: usize = 20;
const TREE_BLOCKS: usize = 100;

/// One operation of the program, the same on every rank of its group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// Which of the program's groups.
    pub(crate) group: usize,
    pub(crate) operation: Operation,
    pub(crate) op: ReduceOp,
    pub(crate) count: usize,
    /// Of a message: the sender, the receiver being the rank after it.
    pub(crate) root: Rank,
    pub(crate) algorithm: Algorithm,
}

/// The ranks of a group, in order.
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

impl Call {
    pub(crate) const BARRIER: Self = Self {
        group: 0,
        operation: Operation::Barrier,
        op: ReduceOp::Sum,
        count: 0,
        root: Rank::ZERO,
        algorithm: Algorithm::Dissemination,
    };

    pub(crate) fn random(random: &mut StdRng, groups: &[Members]) -> Self {
        let operation = OPERATIONS[random.random_range(0..OPERATIONS.len())];
        Self::of(operation, random, groups)
    }

    /// A call of this operation.
    pub(crate) fn of(operation: Operation, random: &mut StdRng, groups: &[Members]) -> Self {
        let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max];
        let mut op = ops[random.random_range(0..ops.len())];
        if matches!(operation, Operation::Scan | Operation::Exscan) && op == ReduceOp::Average {
            op = ReduceOp::Sum;
        }
        let group = random.random_range(0..groups.len());
        let world = WorldSize::new(groups[group].len() as u32).expect("a group has members");
        let possible: Vec<Algorithm> =
            possible(operation).iter().copied().filter(|&algorithm| is_able(algorithm, world, 0)).collect();
        Self {
            group,
            operation,
            op,
            count: if operation == Operation::Barrier { 0 } else { random.random_range(0..120) },
            root: Rank::new(random.random_range(0..groups[group].len() as u32)),
            algorithm: possible[random.random_range(0..possible.len())],
        }
    }

    /// What a member of a group of `world` begins.
    pub(crate) fn begin(self, timeout: Duration) -> Begin {
        let reduces = self.reduction().is_some();
        let is_barrier = self.operation == Operation::Barrier;
        let contract = Contract {
            operation: self.operation,
            dtype: if is_barrier { DType::U8 } else { DType::F64 },
            reduction: reduces.then_some(self.op),
            algorithm: self.algorithm,
            root: if self.operation.has_root() { self.root } else { Rank::ZERO },
            count: self.count as u64,
            layout: 0,
        };
        Begin {
            group: self.group as u32,
            contract,
            timeout,
            spent: Duration::ZERO,
            site: Location::caller().into(),
            mode: if self.count.is_multiple_of(2) { SendMode::Standard } else { SendMode::Synchronous },
        }
    }

    pub(crate) fn kernels(self) -> Option<reduce::Kernels> {
        self.reduction().and_then(|op| reduce::kernels(DType::F64, op))
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

    /// Whether every rank gets a slot for each rank, and reduces them locally: the first rank in the slots.
    fn slots(self, rank: Rank) -> Option<Rank> {
        match (self.operation, self.algorithm) {
            (Operation::AllReduce, Algorithm::OneShot) => Some(Rank::ZERO),
            (Operation::AllReduce, Algorithm::Doubling) => Some(rank),
            _ => None,
        }
    }

    /// With ranks of the group.
    pub(crate) fn schedule(self, world: WorldSize, rank: Rank) -> Schedule {
        let Self { count, root, .. } = self;
        let even = Partition::even(count, world);
        let slots = Partition::from_counts(&vec![count; world.as_usize()]).expect("a short buffer");
        let is_direct = self.algorithm == Algorithm::Direct;
        let is_tree = self.algorithm == Algorithm::Tree;
        let is_double = self.algorithm == Algorithm::DoubleTree;
        let block = TREE_BLOCK.max(count / TREE_BLOCKS);
        match self.operation {
            Operation::AllReduce => match self.algorithm {
                Algorithm::OneShot => schedule::direct::all_gather(world, rank, &slots),
                Algorithm::Doubling => schedule::doubling::all_gather(world, rank, count),
                Algorithm::Butterfly => schedule::butterfly::all_reduce(world, rank, count),
                Algorithm::Direct => schedule::direct::all_reduce(world, rank, count),
                Algorithm::DoubleTree => double_tree::all_reduce(world, rank, count, block),
                _ => schedule::all_reduce(world, rank, count, BLOCK),
            },
            Operation::Reduce if is_tree => schedule::reduce_tree(world, rank, root, count),
            Operation::Reduce if is_double => double_tree::reduce(world, rank, root, count, block),
            Operation::Reduce => schedule::reduce(world, rank, root, count),
            Operation::ReduceScatter if is_direct => schedule::direct::reduce_scatter(world, rank, &even),
            Operation::ReduceScatter => schedule::reduce_scatter(world, rank, &even),
            Operation::AllGather if is_direct => schedule::direct::all_gather(world, rank, &even),
            Operation::AllGather => schedule::all_gather(world, rank, &even),
            Operation::Broadcast if is_tree => schedule::broadcast_tree(world, rank, root, count),
            Operation::Broadcast if is_double => double_tree::broadcast(world, rank, root, count, block),
            Operation::Broadcast => schedule::broadcast(world, rank, root, count),
            Operation::Gather => schedule::gather(world, rank, root, &even),
            Operation::Scatter => schedule::scatter(world, rank, root, &even),
            Operation::AllToAll => schedule::all_to_all(world, rank, &even, &self.arriving(world, rank)),
            Operation::Scan => schedule::scan(world, rank, count),
            Operation::Exscan => schedule::exscan(world, rank, count),
            Operation::Barrier => schedule::barrier(world, rank),
            Operation::Message => Schedule::default(),
        }
    }

    /// What comes from each rank in an all-to-all: its part for this one.
    fn arriving(self, world: WorldSize, rank: Rank) -> Partition {
        let own = chunk(self.count, world, rank).len();
        Partition::from_counts(&vec![own; world.as_usize()]).expect("a short buffer")
    }

    /// Where a rank's slot lies if the slots begin with that of `first`.
    fn slot(self, world: WorldSize, first: Rank, rank: Rank) -> std::ops::Range<usize> {
        let n = world.as_usize();
        let start = (rank.index() + n - first.index()) % n * self.count;
        start..start + self.count
    }

    fn value(rank: Rank, index: usize) -> f64 {
        f64::from(rank.get() + 1) * 64.0 + (index % 7) as f64
    }

    /// What `rank` of the group begins with.
    pub(crate) fn initial(self, world: WorldSize, rank: Rank) -> Vec<f64> {
        let own = chunk(self.count, world, rank);
        let all = |count: usize| (0..count).map(|index| Self::value(rank, index)).collect::<Vec<f64>>();
        if let Some(first) = self.slots(rank) {
            let mut slots = vec![0.0; world.as_usize() * self.count];
            let own = self.slot(world, first, rank);
            slots[own].copy_from_slice(&all(self.count));
            return slots;
        }
        match self.operation {
            Operation::Gather if rank != self.root => all(self.count).drain(own).collect(),
            Operation::Scatter if rank != self.root => vec![0.0; own.len()],
            Operation::Exscan => [all(self.count), vec![0.0; self.count]].concat(),
            Operation::AllToAll => {
                let mut buffer = all(self.count);
                let arriving = self.arriving(world, rank);
                buffer.resize(self.count + arriving.total(), 0.0);
                let place = self.count + arriving.range(rank).start;
                buffer.copy_within(own, place);
                buffer
            }
            _ => all(self.count),
        }
    }

    /// Whether `buffer` is what this call should leave on `rank` of the group.
    pub(crate) fn is_right(self, world: WorldSize, rank: Rank, buffer: &[f64]) -> bool {
        let Self { count, root, .. } = self;
        let own = chunk(count, world, rank);
        let owner = |index| {
            world.ranks().find(|&owner| chunk(count, world, owner).contains(&index)).expect("an owner")
        };
        let among = |ranks: std::ops::Range<u32>, index| self.reduced(ranks.map(Rank::new), world, index);
        if let Some(first) = self.slots(rank) {
            let is_its = |from: Rank| {
                let slot = &buffer[self.slot(world, first, from)];
                (0..count).all(|index| slot[index] == Self::value(from, index))
            };
            return world.ranks().all(is_its);
        }
        let everyone = 0..world.get();
        let each = |expected: &dyn Fn(usize) -> f64| (0..count).all(|index| buffer[index] == expected(index));
        match self.operation {
            Operation::AllReduce => each(&|index| among(everyone.clone(), index)),
            Operation::Reduce => rank != root || each(&|index| among(everyone.clone(), index)),
            Operation::ReduceScatter => {
                own.into_iter().all(|index| buffer[index] == among(0..world.get(), index))
            }
            Operation::AllGather => each(&|index| Self::value(owner(index), index)),
            Operation::Gather => rank != root || each(&|index| Self::value(owner(index), index)),
            Operation::Scatter => {
                let start = if rank == root { own.start } else { 0 };
                own.clone().all(|index| buffer[start + index - own.start] == Self::value(root, index))
            }
            Operation::Broadcast => each(&|index| Self::value(root, index)),
            Operation::AllToAll => world.ranks().all(|from| {
                let place = count + self.arriving(world, rank).range(from).start;
                own.clone().all(|index| buffer[place + index - own.start] == Self::value(from, index))
            }),
            Operation::Scan => each(&|index| among(0..rank.get() + 1, index)),
            Operation::Exscan => {
                rank == Rank::ZERO
                    || (0..count).all(|index| buffer[count + index] == among(0..rank.get(), index))
            }
            Operation::Barrier => true,
            // The receiver's; the sender gets back what it gave.
            Operation::Message => {
                let from = if rank == root { rank } else { world.before(rank, 1) };
                buffer.len() == count && each(&|index| Self::value(from, index))
            }
        }
    }

    fn reduced(self, ranks: impl Iterator<Item = Rank>, world: WorldSize, index: usize) -> f64 {
        let values = ranks.map(|rank| Self::value(rank, index));
        match self.op {
            ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
            ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
            ReduceOp::Average => values.sum::<f64>() / f64::from(world.get()),
            _ => values.sum(),
        }
    }
}
