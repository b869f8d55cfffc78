//! Proofs of the schedules of the double tree, with one block and with several blocks in each half of the buffer.

use super::{Proof, all_contributions, own_contribution, proof_limits, tested_roots};
use crate::schedule::double_tree::{all_reduce, block_bytes, broadcast, reduce};
use crate::schedule::{Schedule, StepDependency};
use crate::types::{Rank, WorldSize};

/// Two lengths of a block, in elements. With the first length, each half of the buffer is one block. With the second
/// length, a half has several blocks, and its last block may be shorter.
const BLOCK_LENGTHS: [usize; 2] = [usize::MAX >> 1, 7];

fn tested_worlds() -> impl Iterator<Item = WorldSize> {
    (1..=proof_limits().world_size_max).map(|ranks| WorldSize::new(ranks).unwrap())
}

/// The children of a rank in one tree, and the parent of the rank.
type ChildrenAndParent = (Vec<Rank>, Option<Rank>);

/// Returns the neighbours of a rank in each of the two trees. `schedule` is the rank's schedule of a reduction of `count`
/// elements. Each tree reduces one half of the elements.
fn neighbours_in_both_trees(schedule: &Schedule, count: usize) -> [ChildrenAndParent; 2] {
    [0..count / 2, count / 2..count].map(|half| {
        let received = schedule.steps.iter().filter_map(|step| step.receive.as_ref());
        let children = received.filter(|receive| receive.range == half).map(|receive| receive.peer).collect();
        let sent = schedule.steps.iter().filter_map(|step| step.send.as_ref());
        (children, sent.filter(|send| send.range == half).map(|send| send.peer).next())
    })
}

/// Returns the neighbours of every rank in each of the two trees.
fn neighbours_of_all_ranks(world: WorldSize) -> Vec<[ChildrenAndParent; 2]> {
    // In a reduce to an additional rank, all ranks of `world` are in both trees, and the trees only send data up.
    let with_root = WorldSize::new(world.get() + 1).unwrap();
    let root = Rank::new(world.get());
    let schedule = |rank| reduce(with_root, rank, root, 2, 1);
    world.ranks().map(|rank| neighbours_in_both_trees(&schedule(rank), 2)).collect()
}

#[test]
fn all_reduce_gives_every_rank_every_contribution_once() {
    for block in BLOCK_LENGTHS {
        let build = |world, rank, count| all_reduce(world, rank, count, block);
        let proof = Proof { receives_may_wait: true, ..Proof::new() };
        let mut completions = Vec::new();
        proof.run(build, own_contribution, |world, rank, count, state| {
            assert_eq!(
                state.buffer,
                all_contributions(world, count),
                "rank {rank} of {world}, {count} elements"
            );
            if rank == Rank::ZERO {
                completions = vec![0; count];
            }
            for (sum, completions) in completions.iter_mut().zip(&state.completions) {
                *sum += completions;
            }
            let times = u32::from(world != WorldSize::ONE);
            let is_last = rank.get() + 1 == world.get();
            assert!(
                !is_last || completions == vec![times; count],
                "each result is completed once, on one rank"
            );
        });
    }
}

#[test]
fn reduce_gives_the_root_every_contribution_once() {
    for (case, block) in [(0, 7), (1, 7), (2, BLOCK_LENGTHS[0]), (3, 7)] {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof { receives_may_wait: true, ..Proof::new() }.run(
            |world, rank, count| reduce(world, rank, root(world), count, block),
            own_contribution,
            |world, rank, count, state| {
                let completes = rank == root(world) && world != WorldSize::ONE;
                assert_eq!(state.completions, vec![u32::from(completes); count]);
                assert!(rank != root(world) || state.buffer == all_contributions(world, count));
            },
        );
    }
}

#[test]
fn broadcast_gives_every_rank_the_roots_buffer() {
    for (case, block) in [(0, 7), (1, 7), (2, BLOCK_LENGTHS[0]), (3, 7)] {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof::new().run(
            |world, rank, count| broadcast(world, rank, root(world), count, block),
            own_contribution,
            |world, _, count, state| assert_eq!(state.buffer, own_contribution(world, root(world), count)),
        );
    }
}

/// A rank applies each block of its first child before the same block of its second child. No other receive waits.
#[test]
fn only_the_receive_from_a_second_child_waits_for_another_receive() {
    for world in tested_worlds() {
        for rank in world.ranks() {
            for schedule in [
                all_reduce(world, rank, 97, 7),
                reduce(world, rank, Rank::ZERO, 97, 7),
                broadcast(world, rank, Rank::ZERO, 97, 7),
            ] {
                for receive in schedule.steps.iter().filter_map(|step| step.receive.as_ref()) {
                    let Some(StepDependency(awaited)) = receive.awaited_step else { continue };
                    let awaited = schedule.steps[awaited].receive.as_ref().unwrap();
                    assert_eq!((&awaited.range, awaited.awaited_step), (&receive.range, None));
                    assert_ne!(awaited.peer, receive.peer);
                }
            }
        }
    }
}

/// If the number of ranks is odd, one rank has no children in either tree.
#[test]
fn a_rank_has_children_in_at_most_one_tree() {
    for world in tested_worlds() {
        let trees = neighbours_of_all_ranks(world);
        let is_inner = |tree: usize| trees.iter().map(move |links| !links[tree].0.is_empty());
        assert!(is_inner(0).zip(is_inner(1)).all(|(first, second)| !(first && second)), "{world} ranks");
        let leaves = is_inner(0).zip(is_inner(1)).filter(|&(first, second)| !first && !second).count();
        assert_eq!(leaves, world.as_usize() % 2, "{world} ranks");
        assert!(trees.iter().flatten().all(|(children, _)| children.len() <= 2));
    }
}

/// If two ranks were neighbours in both trees, both trees would use the same link, and the messages of one tree would
/// delay the messages of the other tree.
#[test]
fn with_four_or_more_ranks_no_two_ranks_are_neighbours_in_both_trees() {
    for world in tested_worlds().filter(|world| world.get() >= 4) {
        let trees = neighbours_of_all_ranks(world);
        for rank in world.ranks() {
            let around = |tree: usize| {
                let (children, parent) = &trees[rank.index()][tree];
                children.iter().chain(parent).copied().filter(|&peer| world.contains(peer))
            };
            assert!(around(0).all(|peer| around(1).all(|other| other != peer)), "rank {rank} of {world}");
        }
    }
}

#[test]
fn no_rank_is_more_than_log2_n_hops_below_the_top() {
    for world in tested_worlds() {
        let trees = neighbours_of_all_ranks(world);
        for rank in world.ranks() {
            for tree in [0, 1] {
                let (mut at, mut hops) = (rank, 0);
                while let Some(parent) = trees[at.index()][tree].1.filter(|&parent| world.contains(parent)) {
                    assert!(
                        trees[parent.index()][tree].0.contains(&at),
                        "rank {at} is no child of rank {parent}"
                    );
                    (at, hops) = (parent, hops + 1);
                }
                assert!(hops <= world.get().ilog2(), "rank {rank} of {world} is {hops} hops below the top");
            }
        }
    }
}

#[test]
fn no_rank_sends_or_receives_more_than_twice_the_size_of_the_buffer() {
    for world in tested_worlds() {
        for rank in world.ranks() {
            let schedule = all_reduce(world, rank, 96, 8);
            let sent: usize = schedule.peers().iter().map(|&peer| schedule.sent_elements(peer)).sum();
            let received: usize = schedule.peers().iter().map(|&peer| schedule.received_elements(peer)).sum();
            assert!(
                sent <= 2 * 96 && received <= 2 * 96,
                "rank {rank} of {world} sends {sent} and receives {received} elements"
            );
        }
    }
}

#[test]
fn blocks_grow_with_the_square_root_of_the_buffer() {
    let blocks = [0, 1 << 10, 1 << 20, 4 << 20, 64 << 20, 4 << 30].map(block_bytes);
    assert_eq!(blocks, [4 << 10, 4 << 10, 32 << 10, 64 << 10, 256 << 10, 4 << 20]);
}
