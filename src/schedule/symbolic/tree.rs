//! The binomial trees.

use super::super::{broadcast_tree, reduce_tree};
use super::{Proof, everyone, extent, own, roots};
use crate::types::WorldSize;

#[test]
fn reduce_tree_gives_the_root_every_contribution_once() {
    for which in 0..4 {
        let root = |world: WorldSize| roots(world)[which % roots(world).len()];
        Proof { receives_may_wait: true, ..Proof::new() }.run(
            |world, rank, count| reduce_tree(world, rank, root(world), count),
            own,
            |world, rank, count, state| {
                let finishes = rank == root(world) && world != WorldSize::ONE;
                assert_eq!(state.finished, vec![u32::from(finishes); count]);
                if rank == root(world) {
                    assert_eq!(state.buffer, everyone(world, count));
                }
            },
        );
    }
}

#[test]
fn broadcast_tree_gives_every_rank_the_roots_buffer() {
    for which in 0..4 {
        let root = |world: WorldSize| roots(world)[which % roots(world).len()];
        Proof::new().run(
            |world, rank, count| broadcast_tree(world, rank, root(world), count),
            own,
            |world, _, count, state| assert_eq!(state.buffer, own(world, root(world), count)),
        );
    }
}

/// The number of rounds is the purpose of a tree: no path from the root to a leaf is longer than ceil(log2 n).
#[test]
fn no_rank_is_further_from_the_root_than_the_rounds_allow() {
    for ranks in 1..=extent().worlds_max {
        let world = WorldSize::new(ranks).unwrap();
        let rounds = ranks.next_power_of_two().trailing_zeros();
        for root in roots(world) {
            for mut rank in world.ranks() {
                let mut hops = 0;
                while let Some(receive) =
                    broadcast_tree(world, rank, root, 1).steps.first().and_then(|step| step.receive.clone())
                {
                    rank = receive.peer;
                    hops += 1;
                }
                assert_eq!(rank, root);
                assert!(hops <= rounds);
                assert!(reduce_tree(world, rank, root, 1).steps.len() <= rounds as usize);
            }
        }
    }
}
