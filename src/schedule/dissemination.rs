//! The dissemination barrier.
//!
//! Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17 (1988).

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Synchronises n ranks in ceil(log2 n) rounds. In round k, counted from 0, rank r sends an empty message to rank r +
/// 2^k and waits for the message of rank r - 2^k (modulo n). A message shows that its sender has entered the barrier,
/// and also every rank from which the sender has received a message, directly or through other ranks. Each round
/// depends on the previous round: a rank sends its message only after it has received the previous round's message.
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
