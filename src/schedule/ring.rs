//! Schedules in which each rank sends to the next one on the ring and receives from the one before.
//!
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009): with n
//! ranks and S bytes, 2(n-1) steps and 2(n-1)/n S bytes sent by each rank, which no all-reduce can undercut.

use super::partition::chunk;
use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduce-scatter: n-1 steps, (n-1)/n S bytes. `rank` ends with the reduction of its own chunk.
///
/// In step s a rank sends the chunk that is s+1 places before its own and reduces the one before that; so each chunk
/// travels once around the ring, from its owner's successor to its owner, gathering a contribution at each rank.
pub fn reduce_scatter(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    push_reduce_scatter(&mut schedule, world, rank, count);
    schedule
}

/// All-gather: n-1 steps, (n-1)/n S bytes. Each rank's own chunk ends on every rank.
pub fn all_gather(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    push_all_gather(&mut schedule, world, rank, count);
    schedule
}

/// All-reduce: reduce-scatter, then all-gather. 2(n-1) steps, 2(n-1)/n S bytes.
///
/// A chunk is reduced on the way to its one owner and copied from there, so all ranks end with the same bits.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    push_reduce_scatter(&mut schedule, world, rank, count);
    push_all_gather(&mut schedule, world, rank, count);
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

fn push_reduce_scatter(schedule: &mut Schedule, world: WorldSize, rank: Rank, count: usize) {
    let hops = world.get() - 1;
    for hop in 0..hops {
        let action = if hop + 1 == hops { Action::ReduceLast } else { Action::Reduce };
        push_hop(schedule, world, rank, count, (hop + 1, action));
    }
}

fn push_all_gather(schedule: &mut Schedule, world: WorldSize, rank: Rank, count: usize) {
    for hop in 0..world.get() - 1 {
        push_hop(schedule, world, rank, count, (hop, Action::Copy));
    }
}

/// One hop around the ring: the chunk `distance` places before this rank's own leaves, the one before that arrives.
/// What leaves is what arrived in the step before, if any.
fn push_hop(
    schedule: &mut Schedule,
    world: WorldSize,
    rank: Rank,
    count: usize,
    (distance, action): (u32, Action),
) {
    let chunk_before = |distance| chunk(count, world, world.before(rank, distance));
    let after = schedule.steps.len().checked_sub(1).map(After);
    schedule.steps.push(Step {
        send: Some(Outbound { peer: world.after(rank, 1), range: chunk_before(distance), after }),
        receive: Some(Inbound {
            peer: world.before(rank, 1),
            range: chunk_before(distance + 1),
            action,
            after: None,
        }),
    });
}
