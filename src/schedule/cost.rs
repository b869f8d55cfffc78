//! The cost of a schedule, and the choice of the cheapest of several.
//!
//! The model is Hockney's ("The communication challenge for MPP", Parallel Computing 20, 1994), a latency and a time for
//! each byte, with the overhead of `LogP` (Culler et al., 4th ACM Symposium on Principles and Practice of Parallel
//! Programming, 1993) for further messages of the same step.

use super::double_tree;
use crate::types::{Algorithm, Operation, WorldSize};

/// The algorithms that can be requested.
pub const CHOICES: [Algorithm; 8] = [
    Algorithm::OneShot,
    Algorithm::Butterfly,
    Algorithm::Direct,
    Algorithm::Doubling,
    Algorithm::DoubleTree,
    Algorithm::Hierarchy,
    Algorithm::Ring,
    Algorithm::Tree,
];

/// The longest buffer that goes to or from a root along a tree. A longer one takes a chain, which sends each byte
/// once over each link but has n-1 hops. A tree's inner ranks have to store data that arrives early.
const TREE_BYTES_MAX: u64 = 64 << 10;
/// The longest part that a rank may have to store for a peer before it can be reduced.
const DIRECT_PART_BYTES_MAX: u64 = 256 << 10;
/// The longest buffer that every rank reduces as a whole in shared memory, which saves a round.
const ONE_SHOT_BYTES_MAX: u64 = 16 << 10;
/// The longest workspace of an all-reduce in which every rank gets every other one's buffer.
const WORKSPACE_BYTES_MAX: u64 = 1 << 20;
/// The cost of a byte of that workspace, in nanoseconds: it is allocated, filled and reduced.
const WORKSPACE_BYTE: f64 = 0.1;
/// The longest buffer that partners exchange whole: it may have to be stored.
const BUTTERFLY_BYTES_MAX: u64 = 256 << 10;
/// The smallest world in which no two ranks are neighbours in both of a double tree's trees.
const DOUBLE_TREE_WORLD_MIN: u32 = 4;
/// The largest part of a latency that a message costs in a sequence of messages to few peers. The measured messages
/// go to all peers at once and also wait for each other.
const PIPELINED: f64 = 0.25;
/// The largest world in which the automatic choice of an algorithm may make every rank open a link to every other
/// one.
const DIRECT_WORLD_MAX: u32 = 32;

/// The cost of a link, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkCost {
    /// From the moment that a rank has the data to send until its peer has received it, with the work of both
    /// processors.
    pub latency: f64,
    /// Each further message that a rank sends and receives in the same step.
    pub overhead: f64,
    /// For each byte.
    pub byte: f64,
}

impl Default for LinkCost {
    /// A network of 10 Gbit/s: 25 us, 5 us and 0.8 ns.
    fn default() -> Self {
        Self { latency: 25_000.0, overhead: 5_000.0, byte: 0.8 }
    }
}

/// The algorithms of an operation, the one for the longest buffers last.
pub fn possible(operation: Operation) -> &'static [Algorithm] {
    match operation {
        Operation::AllReduce => &[
            Algorithm::OneShot,
            Algorithm::Doubling,
            Algorithm::Butterfly,
            Algorithm::Direct,
            Algorithm::DoubleTree,
            Algorithm::Ring,
        ],
        Operation::ReduceScatter | Operation::AllGather => &[Algorithm::Direct, Algorithm::Ring],
        Operation::Broadcast => &[Algorithm::Tree, Algorithm::DoubleTree, Algorithm::Ring],
        Operation::Reduce => &[Algorithm::Tree, Algorithm::DoubleTree, Algorithm::Chain],
        Operation::Scan | Operation::Exscan => &[Algorithm::Chain],
        Operation::Gather | Operation::Scatter | Operation::AllToAll | Operation::Message => {
            &[Algorithm::Direct]
        }
        Operation::Barrier => &[Algorithm::Dissemination],
    }
}

/// Whether an operation can run in shared memory within hosts and over links between them.
pub fn is_possible_by_hosts(operation: Operation) -> bool {
    matches!(operation, Operation::AllReduce | Operation::Reduce | Operation::Broadcast | Operation::Barrier)
}

/// Whether an algorithm can run in this world for this many bytes, requested or not.
pub fn is_able(algorithm: Algorithm, world: WorldSize, bytes: u64) -> bool {
    algorithm != Algorithm::Butterfly || (world.get().is_power_of_two() && bytes <= BUTTERFLY_BYTES_MAX)
}

/// The algorithms of an operation in shared memory.
pub fn possible_in_memory(operation: Operation) -> &'static [Algorithm] {
    match operation {
        Operation::AllReduce => &[Algorithm::OneShot, Algorithm::Direct],
        _ => &[Algorithm::Direct],
    }
}

/// The cheaper algorithm for an all-reduce of this many bytes in shared memory.
pub fn cheapest_in_memory(bytes: u64) -> Algorithm {
    if bytes <= ONE_SHOT_BYTES_MAX { Algorithm::OneShot } else { Algorithm::Direct }
}

/// The algorithm between hosts for one slice of this many bytes, by the cost of a usual network: the measured links
/// are mostly within hosts, and results should not depend on measurements. Algorithms that need a workspace for the
/// slices of all ranks are excluded.
pub fn between_hosts(operation: Operation, hosts: WorldSize, bytes: u64) -> Algorithm {
    let network = LinkCost::default();
    match operation {
        // Two hosts exchange their data in one step.
        Operation::AllReduce if hosts.get() == 2 && bytes <= BUTTERFLY_BYTES_MAX => Algorithm::Butterfly,
        Operation::AllReduce => {
            let possible = [Algorithm::Butterfly, Algorithm::Direct, Algorithm::DoubleTree, Algorithm::Ring];
            let time = |algorithm: &Algorithm| network.time(operation, *algorithm, hosts, bytes);
            let cheaper = |a: &Algorithm, b: &Algorithm| time(a).total_cmp(&time(b));
            possible.into_iter().min_by(cheaper).unwrap_or(Algorithm::Ring)
        }
        _ => network.cheapest(operation, hosts, bytes),
    }
}

impl LinkCost {
    /// The cheapest algorithm for `operation` on a buffer of this many bytes.
    pub fn cheapest(&self, operation: Operation, world: WorldSize, bytes: u64) -> Algorithm {
        let mut best = (f64::INFINITY, Algorithm::Ring);
        for &algorithm in possible(operation) {
            let time = self.time(operation, algorithm, world, bytes);
            if time < best.0 {
                best = (time, algorithm);
            }
        }
        best.1
    }

    /// The time of an operation; infinite if the algorithm must be requested explicitly.
    fn time(&self, operation: Operation, algorithm: Algorithm, world: WorldSize, bytes: u64) -> f64 {
        let n = f64::from(world.get());
        let rounds = f64::from(world.get().next_power_of_two().trailing_zeros());
        let direct_step = self.latency + (n - 2.0).max(0.0) * self.overhead;
        let whole = bytes as f64 * self.byte;
        let parts = (n - 1.0) / n * whole;
        let workspace = bytes.saturating_mul(u64::from(world.get()));
        let gathered = (n - 1.0) * whole + workspace as f64 * WORKSPACE_BYTE;
        let is_small_world = world.get() <= DIRECT_WORLD_MAX;
        let is_storable = bytes.div_ceil(u64::from(world.get())) <= DIRECT_PART_BYTES_MAX;
        let (is_sensible, time) = match (operation, algorithm) {
            (_, Algorithm::OneShot) => {
                (is_small_world && workspace <= WORKSPACE_BYTES_MAX, direct_step + gathered)
            }
            (_, Algorithm::Doubling) => (workspace <= WORKSPACE_BYTES_MAX, rounds * self.latency + gathered),
            // One-shot lets two ranks exchange whole buffers too, and reduces them in rank order.
            (_, Algorithm::Butterfly) => (world.get() > 2, rounds * (self.latency + whole)),
            (Operation::AllReduce, Algorithm::Direct) => {
                (is_small_world && is_storable, 2.0 * (direct_step + parts))
            }
            (Operation::AllReduce, Algorithm::DoubleTree) => {
                (world.get() >= DOUBLE_TREE_WORLD_MIN, 2.0 * self.double_tree(world, bytes))
            }
            // Successive operations on a chain keep all of its links busy at once.
            (_, Algorithm::DoubleTree) => (false, f64::INFINITY),
            (Operation::AllReduce, _) => (true, 2.0 * ((n - 1.0) * self.latency + parts)),
            (Operation::ReduceScatter | Operation::AllGather, Algorithm::Direct) => {
                (is_small_world && is_storable, direct_step + parts)
            }
            (Operation::ReduceScatter | Operation::AllGather, _) => (true, (n - 1.0) * self.latency + parts),
            (_, Algorithm::Tree) => (bytes <= TREE_BYTES_MAX, rounds * (self.latency + whole)),
            // The alternative has a hop for each rank; the limit above decides which is better.
            (_, _) => (true, f64::MAX),
        };
        if is_sensible && is_able(algorithm, world, bytes) { time } else { f64::INFINITY }
    }

    /// The time of a double tree in one direction, if as much goes in the other: all bytes over each rank's link; for
    /// every hop a message, the receiver's ready message, and a block from or to each child; and the cost of a rank's
    /// messages, two in each direction for a block of both halves.
    fn double_tree(&self, world: WorldSize, bytes: u64) -> f64 {
        let block = double_tree::block_bytes(bytes).min(bytes.div_ceil(2).max(1)) as f64;
        let hop = 2.0 * self.latency + 2.0 * block * self.byte;
        let message = self.overhead.min(self.latency * PIPELINED);
        f64::from(world.get().ilog2()) * hop + bytes as f64 / block * message + bytes as f64 * self.byte
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_messages_take_few_steps_and_long_ones_few_bytes() {
        let link = LinkCost { latency: 20_000.0, overhead: 4_000.0, byte: 1.0 };
        let cases = [
            (2, 64, Algorithm::OneShot),
            (2, 64 << 20, Algorithm::Ring),
            (4, 64, Algorithm::OneShot),
            (4, 100_000, Algorithm::Direct),
            (8, 10_000, Algorithm::Butterfly),
            (7, 10_000, Algorithm::Direct),
            (4, 64 << 20, Algorithm::Ring),
            (200, 64, Algorithm::Doubling),
            (32, 256 << 10, Algorithm::Direct),
            (64, 256 << 10, Algorithm::DoubleTree),
            (200, 1 << 20, Algorithm::DoubleTree),
            (200, 64 << 20, Algorithm::Ring),
        ];
        for (ranks, bytes, expected) in cases {
            let world = WorldSize::new(ranks).unwrap();
            let chosen = link.cheapest(Operation::AllReduce, world, bytes);
            assert_eq!(chosen, expected, "{ranks} ranks, {bytes} bytes");
        }
    }

    #[test]
    fn a_double_tree_is_no_way_from_or_to_a_root_unless_it_is_asked_for() {
        let world = WorldSize::new(64).unwrap();
        for operation in [Operation::Broadcast, Operation::Reduce] {
            for bytes in [1 << 10, 256 << 10, 64 << 20] {
                let chosen = LinkCost::default().cheapest(operation, world, bytes);
                assert_ne!(chosen, Algorithm::DoubleTree, "{operation} of {bytes} bytes");
            }
        }
    }

    #[test]
    fn slices_between_hosts_take_few_steps_or_few_bytes_and_no_workspace() {
        let cases = [
            (2, 64, Algorithm::Butterfly),
            (2, 1 << 20, Algorithm::Ring),
            (3, 64, Algorithm::Direct),
            (4, 64, Algorithm::Butterfly),
            (4, 256 << 10, Algorithm::Direct),
            (4, 8 << 20, Algorithm::Ring),
        ];
        for (hosts, bytes, expected) in cases {
            let chosen = between_hosts(Operation::AllReduce, WorldSize::new(hosts).unwrap(), bytes);
            assert_eq!(chosen, expected, "{hosts} hosts, {bytes} bytes");
        }
    }

    #[test]
    fn every_operation_has_a_way_for_every_size() {
        let world = WorldSize::new(7).unwrap();
        for &operation in Operation::ALL {
            for bytes in [0, 1, 64 << 10, (64 << 10) + 1, u64::MAX] {
                let chosen = LinkCost::default().cheapest(operation, world, bytes);
                assert!(possible(operation).contains(&chosen), "{operation:?} of {bytes} bytes: {chosen:?}");
            }
        }
    }
}
