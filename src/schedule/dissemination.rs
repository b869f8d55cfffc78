//! The dissemination barrier.
//!
//! The algorithm is from Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", International
//! Journal of Parallel Programming 17 (1988).

use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Synchronises n ranks in ceil(log2 n) rounds. In round k, counted from 0, rank r sends an empty message to rank r +
/// 2^k and waits for the message of rank r - 2^k (modulo n). A rank sends a message only after it has received the
/// message of the previous round. After the last round, each rank has therefore heard from all ranks, directly or
/// through other ranks, and knows that all ranks have entered the barrier.
pub fn barrier(world: WorldSize, rank: Rank) -> Schedule {
    let mut schedule = Schedule::default();
    let mut distance = 1;
    while distance < world.get() {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let awaited_step = schedule.last_step();
        let receive = Step::receive(from, 0..0, Action::Copy, awaited_step);
        schedule.steps.push(Step::send(to, 0..0, awaited_step).and(receive));
        distance *= 2;
    }
    schedule
}
