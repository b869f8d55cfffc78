//! Proofs of the schedules on a chain of ranks: `reduce`, the reductions in rank order, and the scans.

use super::{Proof, RankState, SymbolicValue, all_contributions, own_contribution, tested_roots};
use crate::schedule::chain::{exscan, ordered_all_reduce, ordered_reduce, reduce, scan};
use crate::schedule::{Action, Step};
use crate::types::{Rank, WorldSize};

#[test]
fn reduce_gives_the_root_every_contribution_once() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof::new().run(
            |world, rank, count| reduce(world, rank, root(world), count),
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

fn contributions_of_first_ranks(ranks: u32, count: usize) -> Vec<SymbolicValue> {
    (0..count).map(|element| SymbolicValue::from_first_ranks(ranks, element)).collect()
}

/// Checks that the rank has applied no `Action::ReduceLast`. This action is for averages, and scans and reductions in
/// rank order never compute averages.
fn assert_no_reduce_last(state: &RankState) {
    assert!(state.completions.iter().all(|&completions| completions == 0));
}

#[test]
fn scan_gives_each_rank_the_contributions_of_lower_ranks_and_its_own_in_order() {
    Proof { in_rank_order: true, ..Proof::new() }.run(scan, own_contribution, |_, rank, count, state| {
        assert_eq!(state.buffer, contributions_of_first_ranks(rank.get() + 1, count));
        assert_no_reduce_last(state);
    });
}

#[test]
fn exscan_gives_each_rank_the_contributions_of_lower_ranks_in_order() {
    let initial = |world, rank, count| {
        let mut buffer = own_contribution(world, rank, count);
        buffer.resize(2 * count, SymbolicValue::UNSPECIFIED);
        buffer
    };
    Proof { in_rank_order: true, ..Proof::new() }.run(exscan, initial, |_, rank, count, state| {
        assert_eq!(state.buffer[..count], contributions_of_first_ranks(rank.get() + 1, count));
        if rank != Rank::ZERO {
            assert_eq!(state.buffer[count..], contributions_of_first_ranks(rank.get(), count));
        }
        assert_no_reduce_last(state);
    });
}

#[test]
fn ordered_reduce_gives_the_root_every_contribution_in_order() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        Proof { in_rank_order: true, ..Proof::new() }.run(
            |world, rank, count| ordered_reduce(world, rank, root(world), count),
            own_contribution,
            |world, rank, count, state| {
                if rank == root(world) {
                    assert_eq!(state.buffer, all_contributions(world, count));
                }
                assert_no_reduce_last(state);
            },
        );
    }
}

#[test]
fn ordered_all_reduce_gives_every_rank_every_contribution_in_order() {
    Proof { in_rank_order: true, ..Proof::new() }.run(
        ordered_all_reduce,
        own_contribution,
        |world, _, count, state| {
            assert_eq!(state.buffer, all_contributions(world, count));
            assert_no_reduce_last(state);
        },
    );
}

/// Each contribution is reduced on one rank only. If two ranks computed the result separately, their results could
/// differ, because of rounding or a bug in the user's function.
#[test]
fn ordered_all_reduce_reduces_every_contribution_once() {
    let world = WorldSize::new(9).unwrap();
    for rank in world.ranks() {
        let steps = ordered_all_reduce(world, rank, 1).steps;
        let reduces = |step: &&Step| step.receive.is_some() && step.action != Action::Copy;
        let reduces = steps.iter().filter(reduces).count();
        assert_eq!(reduces, usize::from(rank != Rank::ZERO));
    }
}
