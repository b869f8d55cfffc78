//! The dissemination barrier.
//!
//! The algorithm is from Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", International
//! Journal of Parallel Programming 17 (1988).

use super::{Action, InboundElements, OutboundElements, Schedule, Step, StepDependency};
use crate::types::{Rank, WorldSize};

/// Synchronises n ranks in ceil(log2 n) rounds. In round k, counted from 0, rank r sends an empty message to rank r +
/// 2^k and waits for the message of rank r - 2^k (modulo n). A rank sends a message only after it has received the
/// message of the previous round. After the last round, each rank has therefore heard from all ranks, directly or
/// through other ranks, and knows that all ranks have entered the barrier.
pub fn barrier(world: WorldSize, rank: Rank) -> Schedule {
    let mut steps = Vec::new();
    let mut distance = 1;
    while distance < world.get() {
        let awaited_step = steps.len().checked_sub(1).map(StepDependency);
        steps.push(Step {
            send: Some(OutboundElements {
                peer: world.rank_after(rank, distance),
                range: 0..0,
                awaited_step,
            }),
            receive: Some(InboundElements {
                peer: world.rank_before(rank, distance),
                range: 0..0,
                action: Action::Copy,
                awaited_step,
            }),
        });
        distance *= 2;
    }
    steps.into()
}
