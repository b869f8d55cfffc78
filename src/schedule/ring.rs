//! Schedules in which each rank sends to the next one on the ring and receives from the one before.
//!
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009): with n
//! ranks and S bytes, 2(n-1) steps and 2(n-1)/n S bytes sent by each rank, which is the lower bound of an all-reduce.

use std::ops::Range;

use super::partition::Partition;
use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduce-scatter: n-1 steps, S bytes minus the rank's own part, (n-1)/n S if the parts are even. `rank` ends with
/// its part of the reduction.
///
/// In step k a rank sends the part k+1 places before its own and reduces the one before that. So each part goes once
/// around the ring, from its owner's successor to its owner, and each rank adds its contribution. With uneven parts
/// every step takes as long as its longest part.
///
/// # Panics
///
/// If the partition is not one of `world` parts.
pub fn reduce_scatter(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let mut schedule = Schedule::default();
    RingPosition { world, rank, partition, start: 0 }.push_reduce_scatter(&mut schedule);
    schedule
}

/// All-gather: n-1 steps, S bytes minus the next rank's part, (n-1)/n S if the parts are even. Each rank's own part
/// ends on every rank.
///
/// # Panics
///
/// If the partition is not one of `world` parts.
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let mut schedule = Schedule::default();
    RingPosition { world, rank, partition, start: 0 }.push_all_gather(&mut schedule);
    schedule
}

/// All-reduce: reduce-scatter, then all-gather, block by block. 2(n-1) steps for each block, 2(n-1)/n S bytes in all.
///
/// A chunk is reduced along the ring up to its owner and copied from there, so all ranks end with the same bits. A
/// buffer of more than `block` elements is reduced in blocks of that many, one after another on each link: the second
/// half of a block's steps finds the data of the first half in cache.
///
/// # Panics
///
/// If `block` is 0.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    // An empty buffer is one empty block: its messages detect a peer's buffer that is not empty.
    for start in (0..count.max(1)).step_by(block) {
        let partition = Partition::even(block.min(count - start), world);
        let place = RingPosition { world, rank, partition: &partition, start };
        place.push_reduce_scatter(&mut schedule);
        place.push_all_gather(&mut schedule);
    }
    schedule
}

/// Broadcast along the ring from `root`: n-1 hops, each rank but the last sends S bytes, pipelined by segments, so that
/// the time is S/B plus n-2 segments.
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let previous = (rank != root).then(|| world.before(rank, 1));
    let next = Some(world.after(rank, 1)).filter(|&next| next != root);
    let mut schedule = Schedule::default();
    schedule.push_link(previous, next, 0..count, Action::Copy);
    schedule
}

/// One rank's position on the ring, for the part of a buffer that begins at `start`.
struct RingPosition<'a> {
    world: WorldSize,
    rank: Rank,
    partition: &'a Partition,
    start: usize,
}

impl RingPosition<'_> {
    fn push_reduce_scatter(&self, schedule: &mut Schedule) {
        let hops = self.world.get() - 1;
        for hop in 0..hops {
            let action = if hop + 1 == hops { Action::ReduceLast } else { Action::Reduce };
            // The first hop sends this rank's own contribution and depends on no receive.
            let after = (hop > 0).then(|| After(schedule.steps.len() - 1));
            schedule.steps.push(self.hop(hop + 1, action, after));
        }
    }

    /// The first hop sends the data of the step before, if there is one: the end of a reduce-scatter.
    fn push_all_gather(&self, schedule: &mut Schedule) {
        for hop in 0..self.world.get() - 1 {
            let after = schedule.steps.len().checked_sub(1).map(After);
            schedule.steps.push(self.hop(hop, Action::Copy, after));
        }
    }

    /// One hop around the ring: sends the part `distance` places before this rank's own and receives the one before
    /// that.
    fn hop(&self, distance: u32, action: Action, after: Option<After>) -> Step {
        let peer = self.world.before(self.rank, 1);
        let range = self.part_before(distance + 1);
        let to = self.world.after(self.rank, 1);
        Step {
            send: Some(Outbound { peer: to, range: self.part_before(distance), after }),
            receive: Some(Inbound { peer, range, action, after: None }),
        }
    }

    fn part_before(&self, distance: u32) -> Range<usize> {
        let part = self.partition.range(self.world.before(self.rank, distance));
        self.start + part.start..self.start + part.end
    }
}
