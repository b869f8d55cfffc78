//! Proof of the schedule of the barrier.

use super::{MoveOrder, Proof, SimulatedWorld, proof_limits};
use crate::schedule::{Schedule, barrier};
use crate::types::WorldSize;

/// All ranks but the rank `late` enter the barrier and make all moves that they can. No rank may leave the barrier.
#[test]
fn no_rank_leaves_a_barrier_before_all_ranks_have_entered() {
    for ranks in 2..=proof_limits().world_size_max {
        let world = WorldSize::new(ranks).unwrap();
        let schedules: Vec<Schedule> = world.ranks().map(|rank| barrier(world, rank)).collect();
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
