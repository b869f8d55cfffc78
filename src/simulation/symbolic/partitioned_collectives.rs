//! Proofs of the schedules whose functions take a [`Partition`], with partitions into equal, unequal and empty parts.

use super::{Proof, SymbolicValue, every_part, own_contribution, own_part, tested_partition, tested_roots};
use crate::schedule::direct_exchange::{all_to_all, gather, scatter};
use crate::schedule::partition::Partition;
use crate::schedule::ring::{all_gather, reduce_scatter};
use crate::types::{Rank, WorldSize};

#[test]
fn reduce_scatter_gives_every_rank_its_part() {
    for case in 0..2 {
        let build = |world, rank, count| reduce_scatter(world, rank, &tested_partition(count, world, case));
        Proof::new().run(build, own_contribution, |world, rank, count, state| {
            let part = tested_partition(count, world, case).range(rank);
            for (element, &completions) in state.completions.iter().enumerate() {
                let owner = part.contains(&element) && world != WorldSize::ONE;
                assert_eq!(completions, u32::from(owner), "each result is completed once, by its owner");
            }
            for element in part {
                assert_eq!(state.buffer[element], SymbolicValue::from_first_ranks(world.get(), element));
            }
        });
    }
}

#[test]
fn all_gather_gives_every_rank_every_part() {
    for case in 0..2 {
        Proof::new().run(
            |world, rank, count| all_gather(world, rank, &tested_partition(count, world, case)),
            |world, rank, count| own_part(&tested_partition(count, world, case), rank),
            |world, _, count, state| {
                assert_eq!(state.buffer, every_part(&tested_partition(count, world, case), world));
            },
        );
    }
}

#[test]
fn gather_gives_the_root_every_part() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof::new().run(
            |world, rank, count| gather(world, rank, root(world), &tested_partition(count, world, case)),
            |world, rank, count| {
                let whole_buffer = own_part(&tested_partition(count, world, case), rank);
                if rank == root(world) {
                    whole_buffer
                } else {
                    whole_buffer[tested_partition(count, world, case).range(rank)].to_vec()
                }
            },
            |world, rank, count, state| {
                if rank == root(world) {
                    assert_eq!(state.buffer, every_part(&tested_partition(count, world, case), world));
                }
            },
        );
    }
}

#[test]
fn scatter_gives_each_rank_its_part_of_the_roots_buffer() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof::new().run(
            |world, rank, count| scatter(world, rank, root(world), &tested_partition(count, world, case)),
            |world, rank, count| {
                let length = tested_partition(count, world, case).range(rank).len();
                if rank == root(world) {
                    own_contribution(world, rank, count)
                } else {
                    vec![SymbolicValue::UNSPECIFIED; length]
                }
            },
            |world, rank, count, state| {
                let whole_buffer = own_contribution(world, root(world), count);
                let part = whole_buffer[tested_partition(count, world, case).range(rank)].to_vec();
                assert_eq!(state.buffer, if rank == root(world) { whole_buffer } else { part });
            },
        );
    }
}

/// Returns the number of elements that `from` sends to `to`. If `is_even` is false, this number is 0 to 3, and
/// differs between pairs of ranks.
fn exchanged_count(world: WorldSize, count: usize, is_even: bool, from: Rank, to: Rank) -> usize {
    if is_even {
        return Partition::even(count, world).range(to).len();
    }
    (from.index() * 3 + to.index() * 5 + count) % 4
}

/// Returns the `length` elements that `from` sends to `to`. Each element has a different symbolic value.
fn exchanged_elements(from: Rank, to: Rank, length: usize) -> impl Iterator<Item = SymbolicValue> {
    (0..length).map(move |index| SymbolicValue::contribution(from, to.index() << 32 | index))
}

#[test]
fn all_to_all_gives_each_rank_the_parts_for_it() {
    for is_even in [true, false] {
        let length = |world, count, from, to| exchanged_count(world, count, is_even, from, to);
        let sent = |world: WorldSize, rank, count| {
            let counts: Vec<usize> = world.ranks().map(|peer| length(world, count, rank, peer)).collect();
            Partition::from_counts(&counts).unwrap()
        };
        let received = |world: WorldSize, rank, count| {
            let counts: Vec<usize> = world.ranks().map(|peer| length(world, count, peer, rank)).collect();
            Partition::from_counts(&counts).unwrap()
        };
        let outgoing = |world: WorldSize, rank, count| {
            let for_peer = move |peer| exchanged_elements(rank, peer, length(world, count, rank, peer));
            world.ranks().flat_map(for_peer).collect::<Vec<SymbolicValue>>()
        };
        Proof::new().run(
            |world, rank, count| {
                all_to_all(world, rank, &sent(world, rank, count), &received(world, rank, count))
            },
            |world, rank, count| {
                let mut buffer = outgoing(world, rank, count);
                buffer
                    .resize(buffer.len() + received(world, rank, count).total(), SymbolicValue::UNSPECIFIED);
                buffer
            },
            |world, rank, count, state| {
                let mut expected = outgoing(world, rank, count);
                for peer in world.ranks() {
                    let length = length(world, count, peer, rank);
                    let values = exchanged_elements(peer, rank, length);
                    expected.extend(
                        values.map(|value| if peer == rank { SymbolicValue::UNSPECIFIED } else { value }),
                    );
                }
                assert_eq!(state.buffer, expected);
            },
        );
    }
}
