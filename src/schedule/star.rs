//! Schedules in which the root exchanges a message with every other rank, directly.

use super::partition::Partition;
use super::{Action, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Gather to `root`: one round; each rank but the root sends its own part, the root receives S bytes minus its own
/// part, which is (n-1)/n S/B of time on the root's link if the parts are even. That is the least that the root can
/// receive.
///
/// The buffers differ. The root's is the whole buffer and already holds its own part; any other rank's is only its
/// own part.
///
/// # Panics
///
/// If the partition is not one of `world` parts.
pub fn gather(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let step = |peer| {
        let range = partition.range(peer);
        Step { send: None, receive: Some(Inbound { peer, range, action: Action::Copy, after: None }) }
    };
    if rank == root {
        return Schedule { steps: others(world, root).map(step).collect() };
    }
    let send = Outbound { peer: root, range: 0..partition.range(rank).len(), after: None };
    Schedule { steps: vec![Step { send: Some(send), receive: None }] }
}

/// Scatter from `root`: [`gather`] with every message reversed. The root sends S bytes minus its own part, each other
/// rank receives its own part, into a buffer that is this part alone.
///
/// # Panics
///
/// If the partition is not one of `world` parts.
pub fn scatter(world: WorldSize, rank: Rank, root: Rank, partition: &Partition) -> Schedule {
    partition.assert_fits(world);
    let step = |peer| {
        let range = partition.range(peer);
        Step { send: Some(Outbound { peer, range, after: None }), receive: None }
    };
    if rank == root {
        return Schedule { steps: others(world, root).map(step).collect() };
    }
    let range = 0..partition.range(rank).len();
    let receive = Inbound { peer: root, range, action: Action::Copy, after: None };
    Schedule { steps: vec![Step { send: None, receive: Some(receive) }] }
}

/// Every rank but the root, from its successor on.
fn others(world: WorldSize, root: Rank) -> impl Iterator<Item = Rank> {
    (1..world.get()).map(move |distance| world.after(root, distance))
}
