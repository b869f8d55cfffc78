//! Proofs of the schedules of the binomial trees.

use super::{Proof, all_contributions, own_contribution, proof_limits, tested_roots};
use crate::schedule::tree::{broadcast_tree, reduce_tree};
use crate::types::WorldSize;

#[test]
fn reduce_tree_gives_the_root_every_contribution_once() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof { receives_may_wait: true, ..Proof::new() }.run(
            |world, rank, count| reduce_tree(world, rank, root(world), count),
            own_contribution,
            |world, rank, count, state| {
                let completes = rank == root(world) && world != WorldSize::ONE;
                assert_eq!(state.completions, vec![u32::from(completes); count]);
                if rank == root(world) {
                    assert_eq!(state.buffer, all_contributions(world, count));
                }
            },
        );
    }
}

#[test]
fn broadcast_tree_gives_every_rank_the_roots_buffer() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof::new().run(
            |world, rank, count| broadcast_tree(world, rank, root(world), count),
            own_contribution,
            |world, _, count, state| assert_eq!(state.buffer, own_contribution(world, root(world), count)),
        );
    }
}

#[test]
fn no_rank_is_more_than_ceil_log2_n_hops_from_the_root() {
    for ranks in 1..=proof_limits().world_size_max {
        let world = WorldSize::new(ranks).unwrap();
        let rounds = ranks.next_power_of_two().trailing_zeros();
        for root in tested_roots(world) {
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
