//! Schedules that send every chunk straight to its owner, and from there straight to all ranks.
//!
//! They have the smallest number of steps and n-1 messages in each, while the ring has n-1 steps of one message.
//! Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
//! Performance Computing Applications 19 (2005), describe them as pairwise exchange; two of them in sequence are a
//! two-shot all-reduce.

use super::partition::Partition;
use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduce-scatter: each rank sends every other rank its contribution to that rank's part and reduces n-1
/// contributions into its own part, S bytes minus its own part each way.
///
/// Contributions are added in the order of distance, the rank before this one first, and not in the order of arrival:
/// the same data give the same bits. So a receive waits for another one, and this is for parts that can be stored
/// meanwhile.
///
/// # Panics
///
/// If the partition is not one of `world` parts.
pub fn reduce_scatter(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let mut schedule = Schedule::default();
    for distance in 1..world.get() {
        let to = world.after(rank, distance);
        let is_last = distance + 1 == world.get();
        let receive = Inbound {
            peer: world.before(rank, distance),
            range: partition.range(rank),
            action: if is_last { Action::ReduceLast } else { Action::Reduce },
            after: schedule.steps.len().checked_sub(1).map(After),
        };
        let send = Outbound { peer: to, range: partition.range(to), after: None };
        schedule.steps.push(Step { send: Some(send), receive: Some(receive) });
    }
    schedule
}

/// All-gather: each rank sends its own part to every other one, n-1 times the own part. No step waits for another.
///
/// # Panics
///
/// If the partition is not one of `world` parts.
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let mut schedule = Schedule::default();
    push_all_gather(&mut schedule, world, rank, partition);
    schedule
}

/// All-reduce in two shots: reduce-scatter, then all-gather, 2(n-1)/n S bytes sent by each rank in 2(n-1) messages.
///
/// The owner of a chunk reduces it and the others copy it, so all ranks end with the same bits.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let partition = Partition::even(count, world);
    let mut schedule = reduce_scatter(world, rank, &partition);
    push_all_gather(&mut schedule, world, rank, &partition);
    schedule
}

/// The data to send is the result of the last receive so far, if there is one: the end of a reduce-scatter.
fn push_all_gather(schedule: &mut Schedule, world: WorldSize, rank: Rank, partition: &Partition) {
    let after = schedule.steps.len().checked_sub(1).map(After);
    for distance in 1..world.get() {
        let (to, from) = (world.after(rank, distance), world.before(rank, distance));
        let receive = Inbound { peer: from, range: partition.range(from), action: Action::Copy, after: None };
        let send = Outbound { peer: to, range: partition.range(rank), after };
        schedule.steps.push(Step { send: Some(send), receive: Some(receive) });
    }
}
