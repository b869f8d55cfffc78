//! Schedules in which each rank sends to the next one on the ring and receives from the one before.
//!
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009): with n
//! ranks and S bytes, 2(n-1) steps and 2(n-1)/n S bytes sent by each rank, which no all-reduce can undercut.

use std::ops::Range;

use super::partition::chunk;
use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduce-scatter: n-1 steps, (n-1)/n S bytes. `rank` ends with the reduction of its own chunk.
///
/// In step s a rank sends the chunk that is s+1 places before its own and reduces the one before that; so each chunk
/// travels once around the ring, from its owner's successor to its owner, gathering a contribution at each rank.
pub fn reduce_scatter(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    push_reduce_scatter(&mut schedule, world, rank, &(0..count));
    schedule
}

/// All-gather: n-1 steps, (n-1)/n S bytes. Each rank's own chunk ends on every rank.
pub fn all_gather(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    push_all_gather(&mut schedule, world, rank, &(0..count));
    schedule
}

/// All-reduce: reduce-scatter, then all-gather, block by block. 2(n-1) steps for each block, 2(n-1)/n S bytes in all.
///
/// A chunk is reduced on the way to its one owner and copied from there, so all ranks end with the same bits. A buffer of
/// more than `block` elements is reduced in blocks of that many, one after the other on each link: what the first half
/// of a block's steps touches, the second half finds in cache.
///
/// # Panics
///
/// If `block` is 0.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    // An empty buffer is one empty block: its messages are what finds out that a peer's is not empty.
    for start in (0..count.max(1)).step_by(block) {
        let part = start..count.min(start + block);
        push_reduce_scatter(&mut schedule, world, rank, &part);
        push_all_gather(&mut schedule, world, rank, &part);
    }
    schedule
}

/// Broadcast along the ring from `root`: n-1 hops, each rank but the last sends S bytes, pipelined by segments, so that
/// the time is S/B plus n-2 segments.
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    if world == WorldSize::ONE {
        return Schedule::default();
    }
    let (next, previous) = (world.after(rank, 1), world.before(rank, 1));
    let receive = (rank != root).then_some(Inbound {
        peer: previous,
        range: 0..count,
        action: Action::Copy,
        after: None,
    });
    let send = (next != root).then(|| Outbound {
        peer: next,
        range: 0..count,
        after: receive.is_some().then_some(After(0)),
    });
    Schedule { steps: vec![Step { send, receive }] }
}

fn push_reduce_scatter(schedule: &mut Schedule, world: WorldSize, rank: Rank, part: &Range<usize>) {
    let hops = world.get() - 1;
    for hop in 0..hops {
        let action = if hop + 1 == hops { Action::ReduceLast } else { Action::Reduce };
        // The first hop sends this rank's own contribution, which depends on nothing.
        let after = (hop > 0).then(|| After(schedule.steps.len() - 1));
        schedule.steps.push(hop_of(world, rank, part, hop + 1, action, after));
    }
}

/// What the first hop sends is what arrived in the step before, if there is one: the end of a reduce-scatter.
fn push_all_gather(schedule: &mut Schedule, world: WorldSize, rank: Rank, part: &Range<usize>) {
    for hop in 0..world.get() - 1 {
        let after = schedule.steps.len().checked_sub(1).map(After);
        schedule.steps.push(hop_of(world, rank, part, hop, Action::Copy, after));
    }
}

/// One hop around the ring: the chunk of `part` that is `distance` places before this rank's own leaves, the one before
/// that arrives.
fn hop_of(
    world: WorldSize,
    rank: Rank,
    part: &Range<usize>,
    distance: u32,
    action: Action,
    after: Option<After>,
) -> Step {
    let chunk_before = |distance| {
        let chunk = chunk(part.len(), world, world.before(rank, distance));
        part.start + chunk.start..part.start + chunk.end
    };
    Step {
        send: Some(Outbound { peer: world.after(rank, 1), range: chunk_before(distance), after }),
        receive: Some(Inbound {
            peer: world.before(rank, 1),
            range: chunk_before(distance + 1),
            action,
            after: None,
        }),
    }
}
