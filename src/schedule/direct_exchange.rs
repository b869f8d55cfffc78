//! Schedules in which each rank sends data directly to the rank that needs the data. The comments of `schedule/mod.rs`
//! define n and S.
//!
//! In a direct reduce-scatter or all-gather, a rank sends its n-1 messages at once, so these messages take the time
//! of one step. In the ring algorithm, a rank sends its n-1 messages one after another, in n-1 steps. A direct
//! reduce-scatter followed by a direct all-gather is a two-shot all-reduce.
//!
//! Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! International Journal of High Performance Computing Applications 19 (2005), where these schedules are called
//! pairwise exchange.

use super::partition::Partition;
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates a reduce-scatter: each rank sends its contribution to each part to the owner of the part, and reduces n-1
/// contributions into its own part. Each rank sends S bytes minus its own part, in n-1 messages.
///
/// A rank always reduces the contributions in the same order, so that the same data give the same bits. Rank r reduces
/// the contributions of ranks r-1, r-2 and so on (modulo n) into its own contribution. To keep the order, each receive
/// waits for the receive of the previous step, and the rank stores contributions that arrive early.
///
/// # Panics
///
/// If the partition does not have `world` parts.
pub fn reduce_scatter(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let mut schedule = Schedule::default();
    for distance in 1..world.get() {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let is_last = distance + 1 == world.get();
        let action = if is_last { Action::ReduceLast } else { Action::Reduce };
        let receive = Step::receive(from, partition.range(rank), action, schedule.last_step());
        schedule.steps.push(Step::send(to, partition.range(to), None).and(receive));
    }
    schedule
}

/// Creates an all-gather: each rank sends its own part to each of the n-1 other ranks. No step waits for another
/// step.
///
/// # Panics
///
/// If the partition does not have `world` parts.
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let mut schedule = Schedule::default();
    push_all_gather(&mut schedule, world, rank, partition);
    schedule
}

/// Creates a two-shot all-reduce: a reduce-scatter, then an all-gather. Each rank sends 2(n-1)/n S bytes in 2(n-1)
/// messages.
///
/// Each rank owns one chunk of the buffer. The owner reduces the chunk, and all ranks except the owner copy the result,
/// so the result has the same bits on all ranks.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let partition = Partition::even(count, world);
    let mut schedule = reduce_scatter(world, rank, &partition);
    push_all_gather(&mut schedule, world, rank, &partition);
    schedule
}

/// Adds the steps of an all-gather. If the schedule already has the steps of a reduce-scatter, the sends of the
/// all-gather wait for the last receive of the reduce-scatter.
fn push_all_gather(schedule: &mut Schedule, world: WorldSize, rank: Rank, partition: &Partition) {
    let awaited_step = schedule.last_step();
    for distance in 1..world.get() {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let receive = Step::receive(from, partition.range(from), Action::Copy, None);
        schedule.steps.push(Step::send(to, partition.range(rank), awaited_step).and(receive));
    }
}
