//! A cost model of the algorithms, and the choice of the cheapest algorithm for an operation.
//!
//! The model is that of Hockney ("The communication challenge for MPP", Parallel Computing 20, 1994): a message costs
//! a latency, and a time for each byte. If a rank sends several messages in one step, only the first message costs the
//! latency. Each further message costs only the overhead, as in the `LogP` model (Culler et al., 4th ACM Symposium on
//! Principles and Practice of Parallel Programming, 1993).

use super::double_tree;
use crate::types::{Algorithm, Operation, WorldSize};

/// The largest buffer, in bytes, that a broadcast or reduce sends along a tree. A larger buffer is sent along a chain, in which
/// each link transfers each byte only once, and no rank stores data that arrive early.
const TREE_BYTES_MAX: u64 = 64 << 10;
/// The most bytes of a rank's part of a buffer in the direct algorithm: a rank may have to store a part from each peer.
const DIRECT_PART_BYTES_MAX: u64 = 256 << 10;
/// The largest size in bytes of a workspace, in which a rank stores the buffers of all ranks.
const WORKSPACE_BYTES_MAX: u64 = 1 << 20;
/// The time in nanoseconds to allocate, fill and reduce one byte of a workspace.
const WORKSPACE_NS_PER_BYTE: f64 = 0.1;
/// The largest buffer, in bytes, for which the butterfly can run. A receiver may have to store a whole buffer.
const BUTTERFLY_BYTES_MAX: u64 = 256 << 10;
/// The size of the smallest world in which no two ranks are neighbours in both trees of a double tree.
const DOUBLE_TREE_WORLD_SIZE_MIN: u32 = 4;
/// The largest overhead of a message in a double tree, as a fraction of the latency (`docs/algorithms.md`).
const OVERHEAD_PER_LATENCY_MAX: f64 = 0.25;
/// The size of the largest world in which the automatic choice of an algorithm may open links between all ranks.
const ALL_LINKS_WORLD_SIZE_MAX: u32 = 32;

/// The cost of messages over a link, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkCost {
    /// The time from the start of a send until the peer has received the message, with the work of both processors.
    pub latency_ns: f64,
    /// The time for each further message that a rank sends and receives in the same step.
    pub overhead_ns: f64,
    /// The time for each byte.
    pub ns_per_byte: f64,
}

impl Default for LinkCost {
    /// Returns the cost of a network of 10 Gbit/s: a latency of 25 us, an overhead of 5 us, and 0.8 ns for each byte.
    fn default() -> Self {
        Self { latency_ns: 25_000.0, overhead_ns: 5_000.0, ns_per_byte: 0.8 }
    }
}

/// Returns the algorithms that the user can request: all except the dissemination barrier and the chain.
pub fn requestable_algorithms() -> impl Iterator<Item = Algorithm> {
    let is_requestable =
        |algorithm: &Algorithm| !matches!(algorithm, Algorithm::Dissemination | Algorithm::Chain);
    Algorithm::ALL.iter().copied().filter(is_requestable)
}

/// Returns the algorithms that an operation can use over links. The last one is for the longest buffers.
pub fn possible_algorithms(operation: Operation) -> &'static [Algorithm] {
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

/// Returns whether an operation has a hierarchical algorithm: shared memory within hosts, and links between hosts.
pub fn has_hierarchical_algorithm(operation: Operation) -> bool {
    matches!(operation, Operation::AllReduce | Operation::Reduce | Operation::Broadcast | Operation::Barrier)
}

/// Returns whether an algorithm can run in a world of this size on a buffer of `bytes` bytes.
pub fn can_run(algorithm: Algorithm, world: WorldSize, bytes: u64) -> bool {
    match algorithm {
        Algorithm::Butterfly => world.get().is_power_of_two() && bytes <= BUTTERFLY_BYTES_MAX,
        // The workspace must not be longer than memory can be.
        Algorithm::OneShot | Algorithm::Doubling => bytes.checked_mul(world.get().into()).is_some(),
        _ => true,
    }
}

/// Returns the cheapest algorithm between hosts for one slice of `bytes` bytes, with the cost of [`LinkCost::default`], because
/// the ranks measure mostly links within hosts. For an all-reduce, does not choose `OneShot` or `Doubling`, because these
/// algorithms need memory for the slices of all ranks.
pub fn cheapest_between_hosts(operation: Operation, hosts: WorldSize, bytes: u64) -> Algorithm {
    let network = LinkCost::default();
    match operation {
        // Two hosts exchange their data in one step.
        Operation::AllReduce if hosts.get() == 2 && bytes <= BUTTERFLY_BYTES_MAX => Algorithm::Butterfly,
        Operation::AllReduce => {
            let possible = [Algorithm::Butterfly, Algorithm::Direct, Algorithm::DoubleTree, Algorithm::Ring];
            network.cheapest_of(&possible, operation, hosts, bytes)
        }
        _ => network.cheapest(operation, hosts, bytes),
    }
}

impl LinkCost {
    pub fn cheapest(&self, operation: Operation, world: WorldSize, bytes: u64) -> Algorithm {
        self.cheapest_of(possible_algorithms(operation), operation, world, bytes)
    }

    fn cheapest_of(
        &self,
        possible: &[Algorithm],
        operation: Operation,
        world: WorldSize,
        bytes: u64,
    ) -> Algorithm {
        let time = |algorithm: Algorithm| self.estimated_ns(operation, algorithm, world, bytes);
        let cheapest = possible.iter().copied().min_by(|&a, &b| time(a).total_cmp(&time(b)));
        cheapest.unwrap_or(Algorithm::Ring)
    }

    /// Returns the estimated time of an operation in nanoseconds; infinity if the algorithm runs only on request, or not at all.
    fn estimated_ns(&self, operation: Operation, algorithm: Algorithm, world: WorldSize, bytes: u64) -> f64 {
        let n = f64::from(world.get());
        let rounds = f64::from(world.get().next_power_of_two().trailing_zeros());
        let direct_step_ns = self.latency_ns + (n - 2.0).max(0.0) * self.overhead_ns;
        let whole_buffer_ns = bytes as f64 * self.ns_per_byte;
        let parts_ns = (n - 1.0) / n * whole_buffer_ns;
        let workspace_bytes = bytes.saturating_mul(u64::from(world.get()));
        let gathering_ns = (n - 1.0) * whole_buffer_ns + workspace_bytes as f64 * WORKSPACE_NS_PER_BYTE;
        let is_small_world = world.get() <= ALL_LINKS_WORLD_SIZE_MAX;
        let are_parts_storable = bytes.div_ceil(u64::from(world.get())) <= DIRECT_PART_BYTES_MAX;
        let (may_be_chosen, time_ns) = match (operation, algorithm) {
            (_, Algorithm::OneShot) => {
                (is_small_world && workspace_bytes <= WORKSPACE_BYTES_MAX, direct_step_ns + gathering_ns)
            }
            (_, Algorithm::Doubling) => {
                (workspace_bytes <= WORKSPACE_BYTES_MAX, rounds * self.latency_ns + gathering_ns)
            }
            // With two ranks, one-shot is better than the butterfly: it sends the same messages, and reduces in rank order.
            (_, Algorithm::Butterfly) => (world.get() > 2, rounds * (self.latency_ns + whole_buffer_ns)),
            (Operation::AllReduce, Algorithm::Direct) => {
                (is_small_world && are_parts_storable, 2.0 * (direct_step_ns + parts_ns))
            }
            (Operation::AllReduce, Algorithm::DoubleTree) => {
                (world.get() >= DOUBLE_TREE_WORLD_SIZE_MIN, 2.0 * self.double_tree_ns(world, bytes))
            }
            // For a broadcast or reduce, a chain is better than a double tree: successive operations use all its links at once.
            (_, Algorithm::DoubleTree) => (false, f64::INFINITY),
            (Operation::AllReduce, _) => (true, 2.0 * ((n - 1.0) * self.latency_ns + parts_ns)),
            (Operation::ReduceScatter | Operation::AllGather, Algorithm::Direct) => {
                (is_small_world && are_parts_storable, direct_step_ns + parts_ns)
            }
            (Operation::ReduceScatter | Operation::AllGather, _) => {
                (true, (n - 1.0) * self.latency_ns + parts_ns)
            }
            (_, Algorithm::Tree) => (bytes <= TREE_BYTES_MAX, rounds * (self.latency_ns + whole_buffer_ns)),
            // The model has no estimate for a chain, or for a broadcast along the ring. Such an algorithm is chosen
            // if the buffer is too long for a tree (`TREE_BYTES_MAX`).
            (_, _) => (true, f64::MAX),
        };
        if may_be_chosen && can_run(algorithm, world, bytes) { time_ns } else { f64::INFINITY }
    }

    /// Returns the estimated time in nanoseconds of a double tree in one direction. Each hop has the latency of a block and that
    /// of the message with which the parent asks for the second child's block.
    fn double_tree_ns(&self, world: WorldSize, bytes: u64) -> f64 {
        let block_bytes = double_tree::block_bytes(bytes).min(bytes.div_ceil(2).max(1)) as f64;
        let hop_ns = 2.0 * self.latency_ns + 2.0 * block_bytes * self.ns_per_byte;
        let message_ns = self.overhead_ns.min(self.latency_ns * OVERHEAD_PER_LATENCY_MAX);
        f64::from(world.get().ilog2()) * hop_ns
            + bytes as f64 / block_bytes * message_ns
            + bytes as f64 * self.ns_per_byte
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_buffers_use_few_steps_and_long_buffers_send_few_bytes() {
        let link = LinkCost { latency_ns: 20_000.0, overhead_ns: 4_000.0, ns_per_byte: 1.0 };
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
    fn short_slices_between_hosts_use_few_steps_and_long_slices_use_the_ring() {
        let cases = [
            (2, 64, Algorithm::Butterfly),
            (2, 1 << 20, Algorithm::Ring),
            (3, 64, Algorithm::Direct),
            (4, 64, Algorithm::Butterfly),
            (4, 256 << 10, Algorithm::Direct),
            (4, 8 << 20, Algorithm::Ring),
        ];
        for (hosts, bytes, expected) in cases {
            let chosen = cheapest_between_hosts(Operation::AllReduce, WorldSize::new(hosts).unwrap(), bytes);
            assert_eq!(chosen, expected, "{hosts} hosts, {bytes} bytes");
        }
    }
}
