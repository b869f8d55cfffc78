//! Proof of the butterfly all-reduce.

use super::{Proof, all_contributions, own_contribution};
use crate::schedule::{Schedule, butterfly};
use crate::types::WorldSize;

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
            let completions = u32::from(world != WorldSize::ONE);
            assert!(
                state.completions.iter().all(|&times| times == completions),
                "every result is completed once"
            );
        }
    });
}
