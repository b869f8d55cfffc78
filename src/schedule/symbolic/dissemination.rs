//! The barrier.

use super::super::{Schedule, barrier};
use super::{DeliveryOrder, Proof, SimulatedWorld, extent};
use crate::types::WorldSize;

/// A barrier must not let a rank out before all have entered: the last rank to enter holds up all.
#[test]
fn no_rank_leaves_a_barrier_before_all_have_entered() {
    for ranks in 2..=extent().worlds_max {
        let world = WorldSize::new(ranks).unwrap();
        let schedules: Vec<Schedule> = world.ranks().map(|rank| barrier(world, rank)).collect();
        Proof { receives_may_wait: true, ..Proof::new() }.check_schedules(&schedules);
        for late in [0, ranks / 2, ranks - 1] {
            let mut run = SimulatedWorld::new(schedules.clone(), vec![Vec::new(); ranks as usize], 1);
            while let Some(next) = (0..ranks as usize)
                .filter(|&rank| rank != late as usize)
                .find_map(|rank| run.moves(rank, 1).first().copied())
            {
                run.make(next);
            }
            for (rank, state) in run.ranks.iter().enumerate() {
                let left =
                    state.applied.iter().all(|step| step.done) && state.sent.iter().all(|step| step.done);
                assert!(!left, "rank {rank} of {ranks} left before rank {late} entered");
            }
            run.run(&mut DeliveryOrder::Eager);
        }
    }
}
