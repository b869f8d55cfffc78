//! Schedules in which the buffer passes along a chain of ranks (`docs/schedules.md`). Each rank reduces its own elements into the
//! buffer or copies it, and forwards each segment at once.

use super::{Action, Schedule, Step, StepDependency, StepTransfer};
use crate::types::{Rank, WorldSize};

/// Reduces to `root` along the ring, from the root's successor to the root. The other buffers then contain partial results.
pub fn reduce(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let next = (rank != root).then(|| world.rank_after(rank, 1));
    let previous = (rank != world.rank_after(root, 1)).then(|| world.rank_before(rank, 1));
    let action = if rank == root { Action::ReduceLast } else { Action::Reduce };
    Schedule::default().with_chain_step(previous, next, 0..count, action)
}

/// Computes an inclusive prefix: rank r gets the reduction of the contributions of ranks 0 to r, in rank order.
pub fn scan(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = previous_and_next_in_chain(world, rank);
    Schedule::default().with_chain_step(previous, next, 0..count, Action::Reduce)
}

/// Computes an exclusive prefix: rank r gets the reduction of the contributions of ranks 0 to r-1, in rank order.
///
/// The first half of the buffer contains the rank's contribution and, after the operation, the inclusive prefix. The second half
/// is for the result, which is unspecified on rank 0. Each rank sends its inclusive prefix to the next rank twice, because a rank
/// can apply a message to only one range of the buffer.
pub fn exscan(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = previous_and_next_in_chain(world, rank);
    if previous.is_none() && next.is_none() {
        return Schedule::default();
    }
    let (prefix, result) = (0..count, count..2 * count);
    let awaited_step = previous.is_some().then_some(StepDependency(0));
    let step = |range, action| Step {
        send: next.map(|peer| StepTransfer { peer, range: prefix.clone(), awaited_step }),
        receive: previous.map(|peer| StepTransfer { peer, range, awaited_step: None }),
        action,
    };
    vec![step(prefix.clone(), Action::Reduce), step(result, Action::Copy)].into()
}

/// Reduces to `root` in rank order, for a function that is associative but does not commute. The buffer of each rank r except the
/// root then contains the reduction of the contributions of ranks 0 to r.
pub fn ordered_reduce(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let (schedule, last) = (scan(world, rank, count), last_rank(world));
    if root == last {
        return schedule;
    }
    // The result overwrites the root's own data. The root has already sent these data, because the result depends on them.
    let previous = (rank == root).then_some(last);
    let next = (rank == last).then_some(root);
    schedule.with_chain_step(previous, next, 0..count, Action::Copy)
}

/// Reduces all buffers in rank order and gives every rank the result, for a function that is associative but does not commute.
/// All ranks copy the result of the last rank, so it has the same bits on all ranks.
pub fn ordered_all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = previous_and_next_in_chain(world, rank);
    scan(world, rank, count).with_chain_step(next, previous, 0..count, Action::Copy)
}

/// Returns the previous and the next rank in the chain from rank 0 to the last rank.
fn previous_and_next_in_chain(world: WorldSize, rank: Rank) -> (Option<Rank>, Option<Rank>) {
    let previous = (rank != Rank::ZERO).then(|| world.rank_before(rank, 1));
    let next = (rank != last_rank(world)).then(|| world.rank_after(rank, 1));
    (previous, next)
}

fn last_rank(world: WorldSize) -> Rank {
    world.rank_before(Rank::ZERO, 1)
}
