//! Proofs of the schedules in which each rank sends data directly to every other rank.

use std::ops::RangeInclusive;

use super::{
    Proof, SymbolicValue, all_contributions, every_part, own_contribution, own_part, tested_partition,
};
use crate::schedule::direct_exchange;
use crate::schedule::partition::{Partition, chunk};
use crate::types::WorldSize;

/// Returns the world sizes for the proofs of algorithms in which every rank sends to every other rank. The sizes are
/// small, because the number of messages grows with the square of the number of ranks.
fn small_world_sizes() -> RangeInclusive<u32> {
    1..=(*Proof::new().worlds.end()).min(24)
}

#[test]
fn direct_all_reduce_gives_every_rank_every_contribution_once() {
    let proof = Proof { receives_may_wait: true, worlds: small_world_sizes(), ..Proof::new() };
    proof.run(direct_exchange::all_reduce, own_contribution, |world, rank, count, state| {
        assert_eq!(state.buffer, all_contributions(world, count), "rank {rank} of {world}, {count} elements");
        let own = chunk(count, world, rank);
        for (element, &completions) in state.completions.iter().enumerate() {
            let owner = own.contains(&element) && world != WorldSize::ONE;
            assert_eq!(completions, u32::from(owner), "each result is completed once, by its owner");
        }
    });
}

#[test]
fn direct_reduce_scatter_gives_every_rank_its_part() {
    for case in 0..2 {
        let build = |world, rank, count| {
            direct_exchange::reduce_scatter(world, rank, &tested_partition(count, world, case))
        };
        let proof = Proof { receives_may_wait: true, worlds: small_world_sizes(), ..Proof::new() };
        proof.run(build, own_contribution, |world, rank, count, state| {
            for element in tested_partition(count, world, case).range(rank) {
                assert_eq!(state.buffer[element], SymbolicValue::from_first_ranks(world.get(), element));
            }
        });
    }
}

#[test]
fn direct_all_gather_gives_every_rank_every_part() {
    for case in 0..2 {
        Proof { worlds: small_world_sizes(), ..Proof::new() }.run(
            |world, rank, count| {
                direct_exchange::all_gather(world, rank, &tested_partition(count, world, case))
            },
            |world, rank, count| own_part(&tested_partition(count, world, case), rank),
            |world, _, count, state| {
                assert_eq!(state.buffer, every_part(&tested_partition(count, world, case), world));
            },
        );
    }
}

#[test]
fn direct_all_gather_gives_every_rank_every_whole_buffer() {
    let slots = |world: WorldSize, count| Partition::from_counts(&vec![count; world.as_usize()]).unwrap();
    Proof { worlds: small_world_sizes(), ..Proof::new() }.run(
        |world, rank, count| direct_exchange::all_gather(world, rank, &slots(world, count)),
        |world, rank, count| own_part(&slots(world, count), rank),
        |world, _, count, state| assert_eq!(state.buffer, every_part(&slots(world, count), world)),
    );
}
