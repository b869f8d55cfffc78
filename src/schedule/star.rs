//! Schedules in which the root exchanges messages directly with every other rank. The comments of `schedule/mod.rs`
//! define n, S, B and s.

use super::partition::Partition;
use super::{Action, InboundElements, OutboundElements, Schedule, Step};
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
    let step = |peer| {
        let range = partition.range(peer);
        Step {
            send: None,
            receive: Some(InboundElements { peer, range, action: Action::Copy, awaited_step: None }),
        }
    };
    if rank == root {
        return ranks_except_root(world, root).map(step).collect::<Vec<Step>>().into();
    }
    let send = OutboundElements { peer: root, range: 0..partition.range(rank).len(), awaited_step: None };
    vec![Step { send: Some(send), receive: None }].into()
}

/// Scatters from `root`: this is [`gather`] with the direction of every message reversed. The root sends S bytes
/// minus its own part. The buffer of every rank except the root has space only for that rank's part.
///
/// # Panics
///
/// If the partition does not have `world` parts.
pub fn scatter(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let step = |peer| {
        let range = partition.range(peer);
        Step { send: Some(OutboundElements { peer, range, awaited_step: None }), receive: None }
    };
    if rank == root {
        return ranks_except_root(world, root).map(step).collect::<Vec<Step>>().into();
    }
    let range = 0..partition.range(rank).len();
    let receive = InboundElements { peer: root, range, action: Action::Copy, awaited_step: None };
    vec![Step { send: None, receive: Some(receive) }].into()
}

/// Returns every rank but the root, starting with the root's successor.
fn ranks_except_root(world: WorldSize, root: Rank) -> impl Iterator<Item = Rank> {
    (1..world.get()).map(move |distance| world.rank_after(root, distance))
}
