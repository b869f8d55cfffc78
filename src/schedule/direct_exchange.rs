//! Schedules in which each rank sends data directly to the rank that needs the data. The comments of `schedule/mod.rs`
//! define n, S, B and s.
//!
//! In a direct reduce-scatter or all-gather, a rank sends its n-1 messages at once, so these messages take the time
//! of one step. In the ring algorithm, a rank sends its n-1 messages one after another, in n-1 steps. A direct
//! reduce-scatter followed by a direct all-gather is a two-shot all-reduce.
//!
//! Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! International Journal of High Performance Computing Applications 19 (2005), where the schedules without a root are
//! called pairwise exchange.

use super::partition::Partition;
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates a reduce-scatter: each rank sends its contribution to each part to the owner of the part, and reduces n-1
/// contributions into its own part. Each rank sends S bytes minus its own part, in n-1 messages.
///
/// A rank always reduces the contributions in the same order, so that the same data give the same bits. Rank r reduces
/// the contributions of ranks r-1, r-2 and so on (modulo n) into its own contribution. To keep the order, each receive
/// waits for the receive of the previous step, and the rank stores contributions that arrive early.
pub fn reduce_scatter(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
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
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    add_all_gather(Schedule::default(), world, rank, partition)
}

/// Creates a two-shot all-reduce: a reduce-scatter, then an all-gather. Each rank sends 2(n-1)/n S bytes in 2(n-1)
/// messages.
///
/// Each rank owns one chunk of the buffer. The owner reduces the chunk, and all ranks except the owner copy the result,
/// so the result has the same bits on all ranks.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let partition = Partition::even(count, world);
    add_all_gather(reduce_scatter(world, rank, &partition), world, rank, &partition)
}

/// Exchanges one part between each pair of ranks (all-to-all) in n-1 steps. If all parts have the same length, each
/// rank sends (n-1)/n S bytes. Here S is the number of bytes that the partition `send` divides.
///
/// The first `send.total()` elements of the buffer are the data to send: `send` says which part is for which rank. The
/// rest of the buffer is for the received data: `receive` says which part is from which rank. For ranks a and b, part b
/// in the `send` of rank a must be as long as part a in the `receive` of rank b. No step copies the part of a rank for
/// itself; the caller copies this part.
///
/// In step k rank r sends to rank r + k and receives from rank r - k (modulo n), so no two ranks send to the same
/// rank. No step waits for another step.
pub fn all_to_all(world: WorldSize, rank: Rank, send: &Partition, receive: &Partition) -> Schedule {
    let receive_start = send.total();
    let step = |distance| {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let part = receive.range(from);
        let range = receive_start + part.start..receive_start + part.end;
        Step::send(to, send.range(to), None).and(Step::receive(from, range, Action::Copy, None))
    };
    (1..world.get()).map(step).collect::<Vec<Step>>().into()
}

/// Gathers to `root` in one round. Each rank except the root sends its own part. The root receives S bytes minus its
/// own part. If all parts have the same length, the gather takes (n-1)/n S/B seconds. No schedule of a gather takes
/// less time.
///
/// The root's buffer has space for all parts, and already contains the root's own part. The buffer of every rank except
/// the root contains only that rank's part.
pub fn gather(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    let steps: Vec<Step> = if rank == root {
        let peers = (1..world.get()).map(|distance| world.rank_after(root, distance));
        peers.map(|peer| Step::receive(peer, partition.range(peer), Action::Copy, None)).collect()
    } else {
        vec![Step::send(root, 0..partition.range(rank).len(), None)]
    };
    steps.into()
}

/// Scatters from `root`: this is [`gather`] with the direction of every message reversed. The root sends S bytes
/// minus its own part. The buffer of every rank except the root has space only for that rank's part.
pub fn scatter(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    let mut schedule = gather(world, rank, root, partition);
    for Step { send, receive, .. } in &mut schedule.steps {
        std::mem::swap(send, receive);
    }
    schedule
}

/// Adds the steps of an all-gather. If the schedule already has the steps of a reduce-scatter, the sends of the
/// all-gather wait for the last receive of the reduce-scatter.
fn add_all_gather(mut schedule: Schedule, world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    let awaited_step = schedule.last_step();
    for distance in 1..world.get() {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let receive = Step::receive(from, partition.range(from), Action::Copy, None);
        schedule.steps.push(Step::send(to, partition.range(rank), awaited_step).and(receive));
    }
    schedule
}
