//! All-reduce and broadcast on the ring. The ring schedules with a partition as argument are in `partitioned`.

use super::super::partition::chunk;
use super::super::{all_reduce, broadcast};
use super::{Proof, all_contributions, extent, own_contribution, roots};
use crate::types::{Rank, WorldSize};

#[test]
fn all_reduce_gives_every_rank_every_contribution_once() {
    // One block in worlds of all sizes, then several blocks in small worlds, because the proof's time grows with both.
    for (worlds, block) in
        [(1..=extent().world_size_max, usize::MAX >> 1), (1..=extent().world_size_max.min(12), 7)]
    {
        let build = |world, rank, count| all_reduce(world, rank, count, block);
        Proof { worlds, ..Proof::new() }.run(build, own_contribution, |world, rank, count, state| {
            assert_eq!(
                state.buffer,
                all_contributions(world, count),
                "rank {rank} of {world}, {count} elements"
            );
            for (element, &finished) in state.finished.iter().enumerate() {
                let start = element / block * block;
                let chunk = chunk(count.min(start + block) - start, world, rank);
                let owner = chunk.contains(&(element - start)) && world != WorldSize::ONE;
                assert_eq!(finished, u32::from(owner), "an element is finished once, by its owner");
            }
        });
    }
}

#[test]
fn broadcast_gives_every_rank_the_roots_buffer() {
    for which in 0..4 {
        let root = |world: WorldSize| roots(world)[which % roots(world).len()];
        Proof::new().run(
            |world, rank: Rank, count| broadcast(world, rank, root(world), count),
            own_contribution,
            |world, _, count, state| assert_eq!(state.buffer, own_contribution(world, root(world), count)),
        );
    }
}
