//! Schedules in which the buffer passes along a line of ranks, each of which adds to it or copies it.
//!
//! A segment goes on as soon as it has been applied, so a chain of n-1 hops costs S/B plus n-2 segments and not n-1
//! times S/B: the pipeline of Watts and van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel
//! Processing Letters 5 (1995), with an addition at each hop.

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduce to `root` along the ring: n-1 hops, each rank but the root sends S bytes, S/B plus n-2 segments of time.
///
/// The chain begins at the root's successor and ends at the root, which alone has the result: the ranks between end
/// with partial results.
pub fn reduce(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let next = (rank != root).then(|| world.after(rank, 1));
    let previous = (rank != world.after(root, 1)).then(|| world.before(rank, 1));
    let action = if rank == root { Action::ReduceLast } else { Action::Reduce };
    let mut schedule = Schedule::default();
    schedule.push_link(previous, next, 0..count, action);
    schedule
}

/// Inclusive prefix: rank r ends with the reduction of ranks 0 to r, in their order. n-1 hops, each rank but the last
/// sends S bytes, S/B plus n-2 segments of time.
///
/// Hillis and Steele, "Data parallel algorithms", Comm. ACM 29 (1986), compute prefixes in ceil(log2 n) rounds, in
/// which most ranks send S bytes each time.
pub fn scan(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = line(world, rank);
    let mut schedule = Schedule::default();
    schedule.push_link(previous, next, 0..count, Action::Reduce);
    schedule
}

/// Exclusive prefix: rank r ends with the reduction of ranks 0 to r-1, in their order. n-1 hops, each rank but the last
/// sends 2S bytes, 2S/B plus n-2 segments of time; S is one rank's contribution.
///
/// The buffer is twice as long: `count` elements of work, which hold the rank's own contribution, and `count`
/// elements for the result, which is unspecified on rank 0. The work ends as the inclusive prefix.
///
/// Each rank sends its inclusive prefix twice: once to be reduced into the next rank's work, and once to be copied as
/// its result. The second message is needed because arriving data has one buffer and is read once. The message for
/// which the rest of the chain waits goes first.
pub fn exscan(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let (previous, next) = line(world, rank);
    if previous.is_none() && next.is_none() {
        return Schedule::default();
    }
    let (spec, result) = (0..count, count..2 * count);
    let after = previous.is_some().then_some(After(0));
    let step = |range, action| Step {
        send: next.map(|peer| Outbound { peer, range: spec.clone(), after }),
        receive: previous.map(|peer| Inbound { peer, range, action, after: None }),
    };
    Schedule { steps: vec![step(spec.clone(), Action::Reduce), step(result, Action::Copy)] }
}

/// Reduce to `root` in the order of the ranks, for a function that is associative but does not commute. n-1 hops, and
/// one more if the root is not the last rank; each inner rank of the chain sends S bytes, the last one too if it is
/// not the root. S/B plus at most n-1 segments of time.
///
/// The other ranks end with partial results.
pub fn ordered_reduce(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let (mut schedule, last) = (scan(world, rank, count), last(world));
    if root != last {
        // The result on its way back has passed this rank before, so the data that it overwrites has been sent.
        let previous = (rank == root).then_some(last);
        let next = (rank == last).then_some(root);
        schedule.push_link(previous, next, 0..count, Action::Copy);
    }
    schedule
}

/// All ranks end with the reduction of all buffers in the order of the ranks, for a function that is associative but
/// does not commute. 2(n-1) hops, from rank 0 to the last and back: 2S bytes sent by each rank but the first and the
/// last, which send S. S/B plus 2n-3 segments of time, because both directions of a link carry data at once.
///
/// The last rank computes the result and the others copy it, so all end with the same bits.
pub fn all_ordered_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let mut schedule = scan(world, rank, count);
    let (previous, next) = line(world, rank);
    schedule.push_link(next, previous, 0..count, Action::Copy);
    schedule
}

/// The rank before and the one after, if they exist.
fn line(world: WorldSize, rank: Rank) -> (Option<Rank>, Option<Rank>) {
    let previous = (rank != Rank::ZERO).then(|| world.before(rank, 1));
    let next = (rank != last(world)).then(|| world.after(rank, 1));
    (previous, next)
}

fn last(world: WorldSize) -> Rank {
    world.before(Rank::ZERO, 1)
}
