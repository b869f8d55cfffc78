//! Proofs of the schedules in `direct.rs`, `butterfly.rs` and `doubling.rs`.

use std::ops::RangeInclusive;

use super::super::partition::{Partition, chunk};
use super::super::{Schedule, butterfly, direct, doubling};
use super::{Proof, Value, all_contributions, every_part, own_contribution, own_part, tested_partition};
use crate::types::{Rank, WorldSize};

/// Returns the world sizes for the proofs of algorithms in which every rank sends to every other rank. The sizes are
/// small, because the number of messages grows with the square of the number of ranks.
fn small_world_sizes() -> RangeInclusive<u32> {
    1..=(*Proof::new().worlds.end()).min(24)
}

#[test]
fn direct_all_reduce_gives_every_rank_every_contribution_once() {
    let proof = Proof { receives_may_wait: true, worlds: small_world_sizes(), ..Proof::new() };
    proof.run(direct::all_reduce, own_contribution, |world, rank, count, state| {
        assert_eq!(state.buffer, all_contributions(world, count), "rank {rank} of {world}, {count} elements");
        let own = chunk(count, world, rank);
        for (element, &finished) in state.finished.iter().enumerate() {
            let owner = own.contains(&element) && world != WorldSize::ONE;
            assert_eq!(finished, u32::from(owner), "each result is completed once, by its owner");
        }
    });
}

#[test]
fn direct_reduce_scatter_gives_every_rank_its_part() {
    for which in 0..2 {
        let build =
            |world, rank, count| direct::reduce_scatter(world, rank, &tested_partition(count, world, which));
        let proof = Proof { receives_may_wait: true, worlds: small_world_sizes(), ..Proof::new() };
        proof.run(build, own_contribution, |world, rank, count, state| {
            for element in tested_partition(count, world, which).range(rank) {
                assert_eq!(state.buffer[element], Value::from_first_ranks(world.get(), element));
            }
        });
    }
}

#[test]
fn direct_all_gather_gives_every_rank_every_part() {
    for which in 0..2 {
        Proof { worlds: small_world_sizes(), ..Proof::new() }.run(
            |world, rank, count| direct::all_gather(world, rank, &tested_partition(count, world, which)),
            |world, rank, count| own_part(&tested_partition(count, world, which), rank),
            |world, _, count, state| {
                assert_eq!(state.buffer, every_part(&tested_partition(count, world, which), world));
            },
        );
    }
}

#[test]
fn recursive_doubling_gives_every_rank_every_part() {
    // The part of rank r holds the elements r * count to (r + 1) * count - 1 of the result.
    let slot = |rank: Rank, count: usize| {
        (0..count).map(move |e| Value::contribution(rank, rank.index() * count + e))
    };
    let proof = Proof { receives_may_wait: true, ..Proof::new() };
    proof.run(
        doubling::all_gather,
        |world, rank, count| {
            let mut buffer: Vec<Value> = slot(rank, count).collect();
            buffer.resize(world.as_usize() * count, Value::BLANK);
            buffer
        },
        |world, rank, count, state| {
            let in_order = (0..world.get()).flat_map(|distance| slot(world.after(rank, distance), count));
            assert_eq!(state.buffer, in_order.collect::<Vec<Value>>());
        },
    );
}

#[test]
fn direct_all_gather_gives_every_rank_every_whole_buffer() {
    let slots = |world: WorldSize, count| Partition::from_counts(&vec![count; world.as_usize()]).unwrap();
    Proof { worlds: small_world_sizes(), ..Proof::new() }.run(
        |world, rank, count| direct::all_gather(world, rank, &slots(world, count)),
        |world, rank, count| own_part(&slots(world, count), rank),
        |world, _, count, state| assert_eq!(state.buffer, every_part(&slots(world, count), world)),
    );
}

#[test]
fn butterfly_all_reduce_gives_every_rank_every_contribution_once() {
    let build = |world: WorldSize, rank, count| {
        // There is a butterfly only for worlds whose size is a power of two.
        if world.get().is_power_of_two() {
            butterfly::all_reduce(world, rank, count)
        } else {
            Schedule::default()
        }
    };
    let proof = Proof { receives_may_wait: true, ..Proof::new() };
    proof.run(build, own_contribution, |world, _, count, state| {
        if world.get().is_power_of_two() {
            assert_eq!(state.buffer, all_contributions(world, count));
            let finished = u32::from(world != WorldSize::ONE);
            assert!(state.finished.iter().all(|&times| times == finished), "every result is completed once");
        }
    });
}
