//! Schedules in which the root exchanges messages directly with every other rank. The comments of `schedule/mod.rs`
//! define n, S, B and s.

use super::partition::Partition;
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Gathers to `root` in one round. Each rank except the root sends its own part. The root receives S bytes minus its
/// own part. If all parts have the same length, the gather takes (n-1)/n S/B seconds. No schedule of a gather takes
/// less time.
///
/// The root's buffer has space for all parts, and already contains the root's own part. The buffer of every rank except
/// the root contains only that rank's part.
///
/// # Panics
///
/// If the partition does not have `world` parts.
pub fn gather(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let steps: Vec<Step> = if rank == root {
        let step = |peer| Step::receive(peer, partition.range(peer), Action::Copy, None);
        ranks_except_root(world, root).map(step).collect()
    } else {
        vec![Step::send(root, 0..partition.range(rank).len(), None)]
    };
    steps.into()
}

/// Scatters from `root`: this is [`gather`] with the direction of every message reversed. The root sends S bytes
/// minus its own part. The buffer of every rank except the root has space only for that rank's part.
///
/// # Panics
///
/// If the partition does not have `world` parts.
pub fn scatter(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let steps: Vec<Step> = if rank == root {
        let step = |peer| Step::send(peer, partition.range(peer), None);
        ranks_except_root(world, root).map(step).collect()
    } else {
        vec![Step::receive(root, 0..partition.range(rank).len(), Action::Copy, None)]
    };
    steps.into()
}

/// Returns every rank but the root, starting with the root's successor.
fn ranks_except_root(world: WorldSize, root: Rank) -> impl Iterator<Item = Rank> {
    (1..world.get()).map(move |distance| world.rank_after(root, distance))
}
