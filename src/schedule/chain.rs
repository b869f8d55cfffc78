//! Schedules in which the buffer passes along a chain of ranks. Each rank of the chain either reduces its own
//! elements into the buffer or copies the buffer. The comments of `schedule/mod.rs` define n, S, B and s.
//!
//! A rank forwards each segment as soon as the rank has applied the segment. A chain of n-1 hops therefore takes
//! S/B + (n-2)s/B seconds, and not (n-1)S/B seconds. The method is the pipeline of Watts and van de Geijn, "A pipelined
//! broadcast for multidimensional meshes", Parallel Processing Letters 5 (1995). Here each hop can also reduce.

use super::{Action, Schedule, Step, StepDependency, StepTransfer};
use crate::types::{Rank, WorldSize};

/// Reduces to `root` along the ring in n-1 hops. Each rank except the root sends S bytes. The operation takes S/B +
/// (n-2)s/B seconds.
///
/// The chain begins at the root's successor and ends at the root. After the operation, the root's buffer contains the
/// result, and the buffers of all ranks except the root contain partial results.
pub fn reduce(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let next = (rank != root).then(|| world.rank_after(rank, 1));
    let previous = (rank != world.rank_after(root, 1)).then(|| world.rank_before(rank, 1));
    let action = if rank == root { Action::ReduceLast } else { Action::Reduce };
    Schedule::default().with_chain_step(previous, next, 0..count, action)
}

/// Computes an inclusive prefix: rank r gets the reduction of the contributions of ranks 0 to r, in rank order. There
/// are n-1 hops. Each rank except the last sends S bytes. The operation takes S/B + (n-2)s/B seconds.
///
/// The algorithm of Hillis and Steele ("Data parallel algorithms", Communications of the ACM 29, 1986) would need only
/// ceil(log2 n) rounds, but most ranks would send S bytes in each round.
pub fn scan(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = previous_and_next_in_chain(world, rank);
    Schedule::default().with_chain_step(previous, next, 0..count, Action::Reduce)
}

/// Computes an exclusive prefix: rank r gets the reduction of the contributions of ranks 0 to r-1, in rank order. There
/// are n-1 hops. Here S is the number of bytes in one rank's contribution. Each rank except the last sends 2S bytes. The
/// operation takes 2S/B + (n-2)s/B seconds.
///
/// The buffer has 2 * `count` elements. The first half contains the rank's contribution and, after the operation, the
/// inclusive prefix. The second half is for the result, which is unspecified on rank 0.
///
/// Rank r sends its inclusive prefix to rank r+1 twice. Rank r+1 reduces the first message into the first half of its
/// buffer, and copies the second message into the second half. Two messages are necessary, because a rank can apply a
/// message to only one range of the buffer. Rank r+1 can send as soon as it has applied the first message.
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

/// Reduces to `root` in rank order, for a function that is associative but does not commute. If the last rank is the
/// root, there are n-1 hops, and each rank except the last sends S bytes. If another rank is the root, there are n hops,
/// and each rank sends S bytes. The operation takes at most S/B + (n-1)s/B seconds.
///
/// After the operation, the root's buffer contains the result. The buffer of each rank r except the root contains the
/// reduction of the contributions of ranks 0 to r.
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

/// Reduces all buffers in rank order and gives every rank the result, for a function that is associative but does not
/// commute. There are 2(n-1) hops, from rank 0 to the last rank and back. The first and the last rank send S bytes, and
/// every rank between them sends 2S bytes. The operation takes S/B + (2n-3)s/B seconds, because a link carries data in
/// both directions at once.
///
/// The last rank computes the result, and all ranks except the last copy the result, so the result has the same bits on
/// all ranks.
pub fn ordered_all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = previous_and_next_in_chain(world, rank);
    scan(world, rank, count).with_chain_step(next, previous, 0..count, Action::Copy)
}

/// Returns the previous and the next rank in the chain from rank 0 to the last rank. Rank 0 has no previous rank, and
/// the last rank has no next rank.
fn previous_and_next_in_chain(world: WorldSize, rank: Rank) -> (Option<Rank>, Option<Rank>) {
    let previous = (rank != Rank::ZERO).then(|| world.rank_before(rank, 1));
    let next = (rank != last_rank(world)).then(|| world.rank_after(rank, 1));
    (previous, next)
}

fn last_rank(world: WorldSize) -> Rank {
    world.rank_before(Rank::ZERO, 1)
}
