//! The dissemination barrier.
//!
//! Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", International Journal of Parallel
//! Programming 17 (1988).

use super::{Action, AfterStep, InboundElements, OutboundElements, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Synchronises n ranks in ceil(log2 n) rounds. In round k, counted from 0, rank r sends an empty message to rank r +
/// 2^k and waits for the message of rank r - 2^k (modulo n). After the last round, messages of all ranks have reached
/// each rank, directly or through other ranks, which shows that all ranks have entered the barrier. Each round
/// depends on the previous round: a rank sends its message only after it has received the previous round's message.
pub fn barrier(world: WorldSize, rank: Rank) -> Schedule {
    let mut steps = Vec::new();
    let mut distance = 1;
    while distance < world.get() {
        let after = steps.len().checked_sub(1).map(AfterStep);
        steps.push(Step {
            send: Some(OutboundElements { peer: world.after(rank, distance), range: 0..0, after }),
            receive: Some(InboundElements {
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
