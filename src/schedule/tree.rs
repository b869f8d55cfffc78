//! Binomial trees, for messages so short that the number of rounds determines the cost.
//!
//! The tree is that of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! Int. J. High Performance Computing Applications 19 (2005). Ranks count from the root: the parent of rank r is r
//! without its lowest set bit, and its children are r + 1, r + 2, r + 4, .. below that bit.

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduce to `root`: ceil(log2 n) rounds; each rank but the root sends S bytes, the root receives up to ceil(log2 n) S.
///
/// Children are reduced in a fixed order, the smallest subtree first, so that the result does not depend on the order
/// of arrival. A receive waits for the one before, and the data of an early child stays in a socket's buffer, so this
/// is for short messages only. The other ranks end with partial results.
pub fn reduce_tree(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let place = TreePosition::new(world, rank, root);
    let mut steps: Vec<Step> = Vec::new();
    for child in place.children() {
        let after = steps.len().checked_sub(1).map(After);
        let receive = Inbound { peer: child, range: 0..count, action: Action::Reduce, after };
        steps.push(Step { send: None, receive: Some(receive) });
    }
    if let Some(parent) = place.parent() {
        let after = steps.len().checked_sub(1).map(After);
        let send = Some(Outbound { peer: parent, range: 0..count, after });
        steps.push(Step { send, receive: None });
    } else if let Some(last) = steps.last_mut().and_then(|step| step.receive.as_mut()) {
        last.action = Action::ReduceLast;
    }
    Schedule { steps }
}

/// Broadcast from `root`: ceil(log2 n) rounds; the root sends up to ceil(log2 n) S bytes, each leaf nothing.
///
/// The largest subtree is sent first, because it has the longest path.
pub fn broadcast_tree(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let place = TreePosition::new(world, rank, root);
    let mut steps: Vec<Step> = Vec::new();
    if let Some(peer) = place.parent() {
        let receive = Some(Inbound { peer, range: 0..count, action: Action::Copy, after: None });
        steps.push(Step { send: None, receive });
    }
    let after = steps.len().checked_sub(1).map(After);
    for peer in place.children().into_iter().rev() {
        steps.push(Step { send: Some(Outbound { peer, range: 0..count, after }), receive: None });
    }
    Schedule { steps }
}

/// One rank's position in the tree.
struct TreePosition {
    world: WorldSize,
    root: Rank,
    /// The number of places from the root to the rank.
    distance: u32,
}

impl TreePosition {
    fn new(world: WorldSize, rank: Rank, root: Rank) -> Self {
        Self { world, root, distance: world.before(rank, root.get()).get() }
    }

    fn parent(&self) -> Option<Rank> {
        let rest = self.distance & self.distance.wrapping_sub(1);
        (self.distance != 0).then(|| self.world.after(self.root, rest))
    }

    /// The children, the root of the smallest subtree first.
    fn children(&self) -> Vec<Rank> {
        let mut children = Vec::new();
        let mut bit = 1;
        while self.distance & bit == 0 && self.distance + bit < self.world.get() {
            children.push(self.world.after(self.root, self.distance + bit));
            bit <<= 1;
        }
        children
    }
}
