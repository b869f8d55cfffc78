//! Schedules on trees. `docs/short-messages.md` describes the binomial tree.

use std::ops::Range;

use super::partition::blocks;
use super::{Action, Schedule, Step, StepDependency};
use crate::types::{Rank, WorldSize};

/// Reduces to `root`. The buffers of all ranks except the root then contain partial results.
pub fn reduce_tree(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    binomial_tree(world, rank, root).push_reduce_to_parent(&mut schedule, 0..count, count.max(1));
    schedule
}

/// Broadcasts from `root`.
pub fn broadcast_tree(world: WorldSize, rank: Rank, root: Rank, count: usize) -> Schedule {
    let mut schedule = Schedule::default();
    binomial_tree(world, rank, root).push_broadcast_to_children(&mut schedule, 0..count, count.max(1), &[]);
    schedule
}

/// Let d = rank - root (modulo n). The parent of d is d without its lowest set bit. The children of d are d + p for each power of
/// two p below the lowest set bit of d, if d + p is less than n. For example, 12 has the parent 8 and the children 13 and 14.
fn binomial_tree(world: WorldSize, rank: Rank, root: Rank) -> TreeNeighbours {
    let distance = world.rank_before(rank, root.get()).get();
    let parent = (distance != 0).then(|| world.rank_after(root, distance & (distance - 1)));
    let bits = (0..u32::BITS).map(|power| 1 << power);
    let bits = bits.take_while(|bit| distance & bit == 0 && distance + bit < world.get());
    TreeNeighbours { parent, children: bits.map(|bit| world.rank_after(root, distance + bit)).collect() }
}

/// The neighbours of one rank in a tree.
pub(super) struct TreeNeighbours {
    /// `None` for the top of the tree.
    pub(super) parent: Option<Rank>,
    /// The children, first the child with the smallest subtree. In this order their contributions are reduced.
    pub(super) children: Vec<Rank>,
}

impl TreeNeighbours {
    /// For each block, adds the steps that reduce the blocks of the children into this rank's block and send the result to the
    /// parent. Each receive waits for that from the child before. Returns for each block the last step that reduces it; `None` if
    /// the rank has no children.
    pub(super) fn push_reduce_to_parent(
        &self,
        schedule: &mut Schedule,
        elements: Range<usize>,
        block: usize,
    ) -> Vec<Option<StepDependency>> {
        let mut last_steps = Vec::new();
        for range in blocks(elements, block) {
            let mut awaited_step = None;
            for (index, &peer) in self.children.iter().enumerate() {
                let is_last = self.parent.is_none() && index + 1 == self.children.len();
                let action = if is_last { Action::ReduceLast } else { Action::Reduce };
                schedule.steps.push(Step::receive(peer, range.clone(), action, awaited_step));
                awaited_step = schedule.last_step();
            }
            if let Some(peer) = self.parent {
                schedule.steps.push(Step::send(peer, range, awaited_step));
            }
            last_steps.push(awaited_step);
        }
        last_steps
    }

    /// For each block, adds the steps that receive the block from the parent and send it to the children, first to the child
    /// with the largest subtree, because that has the longest path. `reduced` is the result of `push_reduce_to_parent`: a rank
    /// without a parent sends after it.
    pub(super) fn push_broadcast_to_children(
        &self,
        schedule: &mut Schedule,
        elements: Range<usize>,
        block: usize,
        reduced: &[Option<StepDependency>],
    ) {
        for (index, range) in blocks(elements, block).enumerate() {
            let mut awaited_step = reduced.get(index).copied().flatten();
            if let Some(peer) = self.parent {
                schedule.steps.push(Step::receive(peer, range.clone(), Action::Copy, None));
                awaited_step = schedule.last_step();
            }
            for &peer in self.children.iter().rev() {
                schedule.steps.push(Step::send(peer, range.clone(), awaited_step));
            }
        }
    }
}
