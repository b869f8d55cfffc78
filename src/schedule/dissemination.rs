//! The dissemination barrier.
//!
//! Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17 (1988).

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Barrier: ceil(log2 n) rounds of one empty message each. In round k a rank signals the rank 2^k places after it and
/// waits for the one 2^k places before it. A signal means "all ranks that I know of have entered", so each waits for
/// its round before.
pub fn barrier(world: WorldSize, rank: Rank) -> Schedule {
    let mut steps = Vec::new();
    let mut distance = 1;
    while distance < world.get() {
        let after = steps.len().checked_sub(1).map(After);
        steps.push(Step {
            send: Some(Outbound { peer: world.after(rank, distance), range: 0..0, after }),
            receive: Some(Inbound {
                peer: world.before(rank, distance),
                range: 0..0,
                action: Action::Copy,
                after,
            }),
        });
        distance *= 2;
    }
    Schedule { steps }
}
