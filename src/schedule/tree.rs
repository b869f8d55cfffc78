//! Binomial trees, for short messages. Let d = rank - root (modulo n). The parent of d is d without its lowest set bit. The
//! children of d are d + p for each power of two p below the lowest set bit of d, if d + p is less than n. For example, 12 has
//! the parent 8 and the children 13 and 14.

use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Reduces to `root`. The buffers of all ranks except the root then contain partial results. The contributions of the children
/// are reduced in a fixed order, the smallest subtree first. Each receive waits for the receive of the previous step.
pub fn reduce_tree(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let position = TreePosition::new(world, rank, root);
    let mut schedule = Schedule::default();
    for child in position.children() {
        let awaited_step = schedule.last_step();
        schedule.steps.push(Step::receive(child, 0..count, Action::Reduce, awaited_step));
    }
    if let Some(parent) = position.parent() {
        let awaited_step = schedule.last_step();
        schedule.steps.push(Step::send(parent, 0..count, awaited_step));
    } else if let Some(last) = schedule.steps.last_mut() {
        last.action = Action::ReduceLast;
    }
    schedule
}

/// Broadcasts from `root`. A rank sends first to the child with the largest subtree, because that has the longest path.
pub fn broadcast_tree(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let position = TreePosition::new(world, rank, root);
    let mut schedule = Schedule::default();
    if let Some(parent) = position.parent() {
        schedule.steps.push(Step::receive(parent, 0..count, Action::Copy, None));
    }
    let awaited_step = schedule.last_step();
    let children = position.children().into_iter().rev();
    schedule.steps.extend(children.map(|child| Step::send(child, 0..count, awaited_step)));
    schedule
}

struct TreePosition {
    world: WorldSize,
    root: Rank,
    /// The number d of the module documentation: rank - root, modulo n.
    distance: u32,
}

impl TreePosition {
    fn new(world: WorldSize, rank: Rank, root: Rank) -> Self {
        Self { world, root, distance: world.rank_before(rank, root.get()).get() }
    }

    fn parent(&self) -> Option<Rank> {
        let rest = self.distance & self.distance.wrapping_sub(1);
        (self.distance != 0).then(|| self.world.rank_after(self.root, rest))
    }

    /// Returns the children, first the child with the smallest subtree.
    fn children(&self) -> Vec<Rank> {
        let mut children = Vec::new();
        let mut bit = 1;
        while self.distance & bit == 0 && self.distance + bit < self.world.get() {
            children.push(self.world.rank_after(self.root, self.distance + bit));
            bit <<= 1;
        }
        children
    }
}
