//! Schedules in which each rank sends to the next rank on the ring and receives from the previous rank (`docs/schedules.md`).

use std::ops::Range;

use super::partition::{Partition, blocks};
use super::{Action, Schedule, Step, StepDependency};
use crate::types::{Rank, WorldSize};

/// Creates a reduce-scatter: each rank gets its part of the reduction. In step k, counted from 0, rank r sends part r - k - 1 and
/// receives part r - k - 2 (modulo n), into which it reduces its own contribution.
pub fn reduce_scatter(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    RingPosition { world, rank, partition, start: 0 }.add_reduce_scatter(Schedule::default())
}

/// Creates an all-gather: every rank gets the parts of all ranks.
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    RingPosition { world, rank, partition, start: 0 }.add_all_gather(Schedule::default())
}

/// Creates an all-reduce that divides the buffer into blocks of at most `block` elements. For each block, a rank runs a
/// reduce-scatter and then an all-gather, while the data of the block are still in the processor's cache. All ranks copy the
/// result of a chunk from its owner, so it has the same bits on all ranks.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for range in blocks(0..count, block) {
        let partition = Partition::even(range.len(), world);
        let position = RingPosition { world, rank, partition: &partition, start: range.start };
        schedule = position.add_all_gather(position.add_reduce_scatter(schedule));
    }
    schedule
}

/// Broadcasts along the ring from `root`.
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let previous = (rank != root).then(|| world.rank_before(rank, 1));
    let next = Some(world.rank_after(rank, 1)).filter(|&next| next != root);
    Schedule::default().with_chain_step(previous, next, 0..count, Action::Copy)
}

/// One rank's position on the ring, with the partition of one block of the buffer. The block begins at index `start`.
struct RingPosition<'a> {
    world: WorldSize,
    rank: Rank,
    partition: &'a Partition,
    start: usize,
}

impl RingPosition<'_> {
    fn add_reduce_scatter(&self, mut schedule: Schedule) -> Schedule {
        let hops = self.world.get() - 1;
        for hop in 0..hops {
            let action = if hop + 1 == hops { Action::ReduceLast } else { Action::Reduce };
            // The first hop sends this rank's own contribution and depends on no receive.
            let awaited_step = schedule.last_step().filter(|_| hop > 0);
            schedule.steps.push(self.ring_step(hop + 1, action, awaited_step));
        }
        schedule
    }

    /// Adds an all-gather of the block. After a reduce-scatter, its first step sends the result of the last step.
    fn add_all_gather(&self, mut schedule: Schedule) -> Schedule {
        for hop in 0..self.world.get() - 1 {
            let awaited_step = schedule.last_step();
            schedule.steps.push(self.ring_step(hop, Action::Copy, awaited_step));
        }
        schedule
    }

    /// Returns the step that sends part r - `distance` and receives part r - `distance` - 1 (modulo n) of this rank r.
    fn ring_step(&self, distance: u32, action: Action, awaited_step: Option<StepDependency>) -> Step {
        let (to, from) = (self.world.rank_after(self.rank, 1), self.world.rank_before(self.rank, 1));
        let receive = Step::receive(from, self.part_before(distance + 1), action, None);
        Step::send(to, self.part_before(distance), awaited_step).and(receive)
    }

    fn part_before(&self, distance: u32) -> Range<usize> {
        let part = self.partition.range(self.world.rank_before(self.rank, distance));
        self.start + part.start..self.start + part.end
    }
}
