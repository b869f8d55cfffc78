//! Proofs of the schedules of ceil(log2 n) steps: the all-gather by doubling, the butterfly and the barrier.

use super::{
    MoveOrder, Proof, SimulatedWorld, SymbolicValue, all_contributions, own_contribution, proof_limits,
};
use crate::schedule::{Schedule, doubling};
use crate::types::{Rank, WorldSize};

#[test]
fn doubling_all_gather_gives_every_rank_every_part() {
    // The data of rank r are the elements r * count to (r + 1) * count - 1 of the operation.
    let data_of_rank = |rank: Rank, count: usize| {
        (0..count).map(move |e| SymbolicValue::contribution(rank, rank.index() * count + e))
    };
    let proof = Proof { receives_may_wait: true, ..Proof::new() };
    proof.run(
        doubling::all_gather,
        |world, rank, count| {
            let mut buffer: Vec<SymbolicValue> = data_of_rank(rank, count).collect();
            buffer.resize(world.as_usize() * count, SymbolicValue::UNSPECIFIED);
            buffer
        },
        |world, rank, count, state| {
            let in_order =
                (0..world.get()).flat_map(|distance| data_of_rank(world.rank_after(rank, distance), count));
            assert_eq!(state.buffer, in_order.collect::<Vec<SymbolicValue>>());
        },
    );
}

#[test]
fn butterfly_all_reduce_gives_every_rank_every_contribution_once() {
    let build = |world: WorldSize, rank, count| {
        // There is a butterfly only for worlds whose size is a power of two.
        if world.get().is_power_of_two() {
            doubling::all_reduce(world, rank, count)
        } else {
            Schedule::default()
        }
    };
    let proof = Proof { receives_may_wait: true, ..Proof::new() };
    proof.run(build, own_contribution, |world, _, count, state| {
        if world.get().is_power_of_two() {
            assert_eq!(state.buffer, all_contributions(world, count));
            let completions = u32::from(world != WorldSize::ONE);
            assert!(
                state.completions.iter().all(|&times| times == completions),
                "every result is completed once"
            );
        }
    });
}

/// All ranks but the rank `late` enter the barrier and make all moves that they can. No rank may leave the barrier.
#[test]
fn no_rank_leaves_a_barrier_before_all_ranks_have_entered() {
    for ranks in 2..=proof_limits().world_size_max {
        let world = WorldSize::new(ranks).unwrap();
        let schedules: Vec<Schedule> = world.ranks().map(|rank| doubling::barrier(world, rank)).collect();
        Proof { receives_may_wait: true, ..Proof::new() }.check_schedules(&schedules);
        for late in [0, ranks / 2, ranks - 1] {
            let mut run = SimulatedWorld::new(schedules.clone(), vec![Vec::new(); ranks as usize], 1);
            while let Some(next) = (0..ranks as usize)
                .filter(|&rank| rank != late as usize)
                .find_map(|rank| run.possible_moves(rank, 1).first().copied())
            {
                run.make_move(next);
            }
            for (rank, state) in run.ranks.iter().enumerate() {
                let left = state.receive_progress.iter().all(|step| step.is_done)
                    && state.send_progress.iter().all(|step| step.is_done);
                assert!(!left, "rank {rank} of {ranks} left before rank {late} entered");
            }
            run.run(&mut MoveOrder::Eager);
        }
    }
}
