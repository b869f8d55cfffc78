//! Two binary trees over all ranks. Each tree transfers one half of the buffer, block by block. The inner ranks of one tree
//! are leaves of the other tree, so each rank sends and receives at the full bandwidth of its link. `docs/double-tree.md`
//! describes the trees.
//!
//! A rank reduces the contributions of its two children in a fixed order: for each segment, the receive from the second child
//! waits for the receive from the first child. No other receive waits.

use std::ops::Range;

use super::partition::blocks;
use super::{Action, Schedule, Step, StepDependency};
use crate::types::{Rank, WorldSize};

/// The largest number of blocks in one half of the buffer. The limit keeps the schedules of long buffers small.
const BLOCKS_MAX: u64 = 512;
/// The size of the smallest block. In smaller blocks the fixed cost of a message dominates.
const BLOCK_BYTES_MIN: u64 = 4 << 10;

/// Returns the size of a block in bytes, for a buffer of `bytes` bytes. The total time of hops and messages is shortest if the
/// size of a block grows with the square root of the size of the buffer.
pub fn block_bytes(bytes: u64) -> u64 {
    (32 * bytes.isqrt()).max(BLOCK_BYTES_MIN).max((bytes / 2).div_ceil(BLOCKS_MAX))
}

/// Creates an all-reduce: each half is reduced up its tree and broadcast down the same tree. All ranks copy the result of a half
/// from the top of its tree, so it has the same bits on all ranks.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    let neighbours = Tree::BOTH_TREES.map(|tree| TreeNeighbours::new(tree, world, rank));
    // With two or three ranks, two ranks are neighbours in both trees, and send the messages of both trees on one link in
    // the order of the steps. Messages up a tree wait for fewer receives than messages down a tree, so the steps of the
    // reduction come first.
    let reduced = [0, 1]
        .map(|tree| neighbours[tree].push_reduce_to_parent(&mut schedule, half_of_tree(count, tree), block));
    for (tree, reduced) in reduced.into_iter().enumerate() {
        let half = half_of_tree(count, tree);
        neighbours[tree].push_broadcast_to_children(&mut schedule, half, block, &reduced);
    }
    schedule
}

/// Reduces to `root`. Both trees contain all ranks except `root`, and the top rank of each tree sends its half to `root`. The
/// buffers of all ranks except `root` then contain partial results.
pub fn reduce(world: WorldSize, rank: Rank, root: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for (index, tree) in Tree::BOTH_TREES.into_iter().enumerate() {
        let neighbours = TreeNeighbours::with_root_on_top(root, tree, world, rank);
        neighbours.push_reduce_to_parent(&mut schedule, half_of_tree(count, index), block);
    }
    schedule
}

/// Broadcasts from `root`: this is [`reduce`] with the direction of every message reversed.
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for (index, tree) in Tree::BOTH_TREES.into_iter().enumerate() {
        let neighbours = TreeNeighbours::with_root_on_top(root, tree, world, rank);
        neighbours.push_broadcast_to_children(&mut schedule, half_of_tree(count, index), block, &[]);
    }
    schedule
}

/// Returns the elements that a tree transfers: the first half of the buffer if `tree` is 0, the second half if `tree` is 1.
fn half_of_tree(count: usize, tree: usize) -> Range<usize> {
    let middle = count.div_ceil(2);
    if tree == 0 { 0..middle } else { middle..count }
}

struct TreeNeighbours {
    /// `None` for the top of the tree.
    parent: Option<Rank>,
    /// The children, at most two, in the order in which their contributions are reduced.
    children: Vec<Rank>,
}

impl TreeNeighbours {
    /// Returns the neighbours of `rank` in a tree of all ranks.
    fn new(tree: Tree, world: WorldSize, rank: Rank) -> Self {
        let (parent, children) = tree.parent_and_children(world.as_usize(), rank.index());
        let rank = |place: usize| Rank::new(place as u32);
        Self { parent: parent.map(rank), children: children.into_iter().map(rank).collect() }
    }

    /// Returns the neighbours of `rank` in a tree with `root` at the top. The only child of `root` is the top of a tree of all
    /// other ranks, in which the successor of `root` has place 0.
    fn with_root_on_top(root: Rank, tree: Tree, world: WorldSize, rank: Rank) -> Self {
        let places = world.as_usize() - 1;
        let rank_at = |place: usize| world.rank_after(root, 1 + place as u32);
        if rank == root {
            let top = top_of_subtree(places, &(0..places / 2));
            let child = top.map(|node| rank_at(tree.place_of_node(places, node)));
            return Self { parent: None, children: child.into_iter().collect() };
        }
        let place = world.rank_before(rank, root.get() + 1).index();
        let (parent, children) = tree.parent_and_children(places, place);
        let parent = parent.map_or(root, rank_at);
        Self { parent: Some(parent), children: children.into_iter().map(rank_at).collect() }
    }

    /// For each block, adds the steps that reduce the blocks of the children into this rank's block and send the result to the
    /// parent. Returns for each block the last step that reduces it; `None` if the rank has no children.
    fn push_reduce_to_parent(
        &self,
        schedule: &mut Schedule,
        half: Range<usize>,
        block: usize,
    ) -> Vec<Option<StepDependency>> {
        let mut last_steps = Vec::new();
        for range in blocks(half, block) {
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
    /// with the larger subtree. `reduced` is the result of `push_reduce_to_parent`: a rank without a parent sends after it.
    fn push_broadcast_to_children(
        &self,
        schedule: &mut Schedule,
        half: Range<usize>,
        block: usize,
        reduced: &[Option<StepDependency>],
    ) {
        for (index, range) in blocks(half, block).enumerate() {
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

/// One of the two trees. A place is the position of a rank in the tree, from 0 to n-1. Leaf i is in the gap before inner node i.
/// One of the inner nodes beside this gap has no inner node as its child on the side of the gap: this is the parent of the leaf.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// The tree in which leaves and inner nodes alternate, starting with a leaf at place 0.
    First,
    /// The tree whose inner nodes are leaves of the first tree. Inner node 0 of the first tree is its last leaf, inner node 1 is
    /// leaf
    /// 0, inner node 2 is leaf 1, and so on.
    Second,
}

impl Tree {
    const BOTH_TREES: [Self; 2] = [Self::First, Self::Second];

    /// Returns the places of the parent and of the children of the node at `place`, in a tree with `places` places. The
    /// first child is the child with the smaller subtree.
    fn parent_and_children(self, places: usize, place: usize) -> (Option<usize>, Vec<usize>) {
        let node = self.node_at_place(places, place);
        let mut inner = 0..places / 2;
        let mut parent = None;
        while !inner.is_empty() {
            let middle = middle_node(&inner);
            let (before, after) = (inner.start..middle / 2, middle / 2 + 1..inner.end);
            if node == middle {
                let children = [before, after].into_iter().filter_map(|inner| top_of_subtree(places, &inner));
                return (parent, children.map(|node| self.place_of_node(places, node)).collect());
            }
            inner = if node < middle { before } else { after };
            parent = Some(self.place_of_node(places, middle));
        }
        (parent, Vec::new())
    }

    /// Returns the node at a place: the place that this node has in the first tree. Leaf i is node 2i, and inner node i is node
    /// 2i + 1.
    fn node_at_place(self, places: usize, place: usize) -> usize {
        let leaves = places - places / 2;
        match self {
            Self::First => place,
            Self::Second if place.is_multiple_of(2) && place / 2 < places / 2 => place + 1,
            Self::Second => (place / 2 + leaves - 1) % leaves * 2,
        }
    }

    fn place_of_node(self, places: usize, node: usize) -> usize {
        let leaves = places - places / 2;
        match self {
            Self::First => node,
            Self::Second if !node.is_multiple_of(2) => node - 1,
            // If the number of places is odd, the last place is a leaf in both trees.
            Self::Second => ((node / 2 + 1) % leaves * 2 + 1).min(places - 1),
        }
    }
}

/// Returns the top node of the subtree of a range of inner nodes. For an empty range, returns the leaf in the gap at which the
/// range begins, or `None` if this gap has no leaf.
fn top_of_subtree(places: usize, inner: &Range<usize>) -> Option<usize> {
    let node = if inner.is_empty() { 2 * inner.start } else { middle_node(inner) };
    (node < places).then_some(node)
}

/// Returns the lower middle node of a nonempty range of inner nodes: the top of the subtree of these nodes.
fn middle_node(inner: &Range<usize>) -> usize {
    2 * (inner.start + (inner.len() - 1) / 2) + 1
}
