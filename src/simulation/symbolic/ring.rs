//! Proofs of the all-reduce and the broadcast on the ring. `partitioned_collectives.rs` has the proofs of the reduce-scatter and
//! the all-gather on the ring.

use super::{Proof, all_contributions, own_contribution, proof_limits, tested_roots};
use crate::schedule::partition::chunk;
use crate::schedule::ring::{all_reduce, broadcast};
use crate::types::{Rank, WorldSize};

#[test]
fn all_reduce_gives_every_rank_every_contribution_once() {
    // Schedules of several blocks are proved only for small worlds, because the time of a proof grows with the number
    // of ranks and with the number of blocks.
    for (worlds, block) in
        [(1..=proof_limits().world_size_max, usize::MAX >> 1), (1..=proof_limits().world_size_max.min(12), 7)]
    {
        let build = |world, rank, count| all_reduce(world, rank, count, block);
        Proof { worlds, ..Proof::new() }.run(build, own_contribution, |world, rank, count, state| {
            assert_eq!(
                state.buffer,
                all_contributions(world, count),
                "rank {rank} of {world}, {count} elements"
            );
            for (element, &completions) in state.completions.iter().enumerate() {
                let start = element / block * block;
                let chunk = chunk(count.min(start + block) - start, world, rank);
                let owner = chunk.contains(&(element - start)) && world != WorldSize::ONE;
                assert_eq!(completions, u32::from(owner), "each result is completed once, by its owner");
            }
        });
    }
}

#[test]
fn broadcast_gives_every_rank_the_roots_buffer() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof::new().run(
            |world, rank: Rank, count| broadcast(world, rank, root(world), count),
            own_contribution,
            |world, _, count, state| assert_eq!(state.buffer, own_contribution(world, root(world), count)),
        );
    }
}
