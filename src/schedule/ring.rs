//! Schedules in which each rank sends to the next rank on the ring and receives from the previous rank (`docs/schedules.md`).

use super::partition::{Partition, blocks};
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates a reduce-scatter: each rank gets its part of the reduction.
pub fn reduce_scatter(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    let mut schedule = Schedule::default();
    for hop in 1..world.get() {
        let action = if hop + 1 == world.get() { Action::ReduceLast } else { Action::Reduce };
        push_ring_step(&mut schedule, (world, rank), partition, hop, action);
    }
    schedule
}

/// Creates an all-gather: every rank gets the parts of all ranks.
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    add_all_gather(Schedule::default(), world, rank, partition)
}

/// Creates an all-reduce that divides the buffer into blocks of at most `block` elements. For each block, a rank runs a
/// reduce-scatter and then an all-gather, while the data of the block are still in the processor's cache. All ranks copy the
/// result of a chunk from its owner, so it has the same bits on all ranks.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for range in blocks(0..count, block) {
        let partition = Partition::even(range.len(), world);
        let reduced = reduce_scatter(world, rank, &partition);
        schedule.append(add_all_gather(reduced, world, rank, &partition), range.start);
    }
    schedule
}

/// Broadcasts along the ring from `root`.
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let previous = (rank != root).then(|| world.rank_before(rank, 1));
    let next = Some(world.rank_after(rank, 1)).filter(|&next| next != root);
    Schedule::default().with_chain_step(previous, next, 0..count, Action::Copy)
}

/// Adds an all-gather. After a reduce-scatter, its first step sends the result of the last step.
fn add_all_gather(mut schedule: Schedule, world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    for hop in 0..world.get() - 1 {
        push_ring_step(&mut schedule, (world, rank), partition, hop, Action::Copy);
    }
    schedule
}

/// Adds the step that sends part r - `distance` and receives part r - `distance` - 1 (modulo n) of this rank r. The send waits
/// for the receive of the step before.
fn push_ring_step(
    schedule: &mut Schedule,
    (world, rank): (WorldSize, Rank),
    partition: &Partition,
    distance: u32,
    action: Action,
) {
    let part_before = |distance| partition.range(world.rank_before(rank, distance));
    let receive = Step::receive(world.rank_before(rank, 1), part_before(distance + 1), action, None);
    let send = Step::send(world.rank_after(rank, 1), part_before(distance), schedule.last_step());
    schedule.steps.push(send.and(receive));
}
