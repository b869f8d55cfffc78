//! Schedules in which each rank sends data directly to the rank that needs the data. A rank sends its n-1 messages at once, so
//! these messages take the time of one step.

use super::partition::{Partition, shifted};
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates a reduce-scatter. Rank r reduces the contributions of ranks r-1, r-2 and so on (modulo n) into its own. To keep this
/// order, each receive waits for that of the previous step.
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

/// Creates an all-gather: each rank sends its own part to each of the n-1 other ranks.
pub fn all_gather(world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    add_all_gather(Schedule::default(), world, rank, partition)
}

/// Creates a two-shot all-reduce: a reduce-scatter, then an all-gather from the owners of chunks, so all bits are equal.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let partition = Partition::even(count, world);
    add_all_gather(reduce_scatter(world, rank, &partition), world, rank, &partition)
}

/// Exchanges one part between each pair of ranks. The buffer is that of
/// [`CollectiveSpec::AllToAll`](super::CollectiveSpec::AllToAll). For ranks a and b, part b in the `send` of rank a must be as
/// long as part a in the `receive` of rank b.
pub fn all_to_all(world: WorldSize, rank: Rank, send: &Partition, receive: &Partition) -> Schedule {
    let step = |distance| {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let range = shifted(&receive.range(from), send.total());
        Step::send(to, send.range(to), None).and(Step::receive(from, range, Action::Copy, None))
    };
    (1..world.get()).map(step).collect::<Vec<Step>>().into()
}

/// Gathers to `root`. The buffers are those of [`CollectiveSpec::Gather`](super::CollectiveSpec::Gather).
pub fn gather(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    let steps: Vec<Step> = if rank == root {
        let peers = (1..world.get()).map(|distance| world.rank_after(root, distance));
        peers.map(|peer| Step::receive(peer, partition.range(peer), Action::Copy, None)).collect()
    } else {
        vec![Step::send(root, 0..partition.range(rank).len(), None)]
    };
    steps.into()
}

/// Scatters from `root`: this is [`gather`] with the direction of every message reversed.
pub fn scatter(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    let mut schedule = gather(world, rank, root, partition);
    for Step { send, receive, .. } in &mut schedule.steps {
        std::mem::swap(send, receive);
    }
    schedule
}

/// Adds an all-gather. After a reduce-scatter, its sends wait for the last receive.
fn add_all_gather(mut schedule: Schedule, world: WorldSize, rank: Rank, partition: &Partition) -> Schedule {
    let awaited_step = schedule.last_step();
    for distance in 1..world.get() {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let receive = Step::receive(from, partition.range(from), Action::Copy, None);
        schedule.steps.push(Step::send(to, partition.range(rank), awaited_step).and(receive));
    }
    schedule
}
