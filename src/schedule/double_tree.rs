//! Two binary trees over all ranks (`docs/double-tree.md`). Each tree transfers one half of the buffer, block by block.

use std::ops::Range;

use super::Schedule;
use super::tree::TreeNeighbours;
use crate::types::{Rank, WorldSize};

/// The largest number of blocks in one half of the buffer. The limit keeps the schedules of long buffers small.
const BLOCKS_MAX: u64 = 512;
/// The size of the smallest block. In smaller blocks the fixed cost of a message dominates.
const BLOCK_BYTES_MIN: u64 = 4 << 10;

/// Returns the size of a block in bytes, for a buffer of `bytes` bytes.
pub fn block_bytes(bytes: u64) -> u64 {
    (32 * bytes.isqrt()).max(BLOCK_BYTES_MIN).max((bytes / 2).div_ceil(BLOCKS_MAX))
}

/// Creates an all-reduce: each half is reduced up its tree and broadcast down the same tree.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    let halves = halves(count);
    let neighbours = Tree::BOTH_TREES.map(|tree| tree.neighbours(world, rank));
    // With two or three ranks, two ranks are neighbours in both trees, and send the messages of both trees on one link in
    // the order of the steps. Messages up a tree wait for fewer receives than messages down a tree, so the steps of the
    // reduction come first.
    let reduced =
        [0, 1].map(|tree| neighbours[tree].push_reduce_to_parent(&mut schedule, halves[tree].clone(), block));
    for ((neighbours, half), reduced) in neighbours.iter().zip(halves).zip(reduced) {
        neighbours.push_broadcast_to_children(&mut schedule, half, block, &reduced);
    }
    schedule
}

/// Reduces to `root`. Both trees contain all ranks except `root`, and the top rank of each tree sends its half to `root`. The
/// buffers of all ranks except `root` then contain partial results.
pub fn reduce(world: WorldSize, rank: Rank, root: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for (tree, half) in Tree::BOTH_TREES.into_iter().zip(halves(count)) {
        tree.neighbours_below(root, world, rank).push_reduce_to_parent(&mut schedule, half, block);
    }
    schedule
}

/// Broadcasts from `root`: this is [`reduce`] with the direction of every message reversed.
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for (tree, half) in Tree::BOTH_TREES.into_iter().zip(halves(count)) {
        tree.neighbours_below(root, world, rank).push_broadcast_to_children(&mut schedule, half, block, &[]);
    }
    schedule
}

/// Returns the elements that each tree transfers.
fn halves(count: usize) -> [Range<usize>; 2] {
    let middle = count.div_ceil(2);
    [0..middle, middle..count]
}

/// One of the two trees. A place is the position of a rank in the tree, from 0 to n-1. Leaf i is in the gap before inner node i.
/// One of the inner nodes beside this gap has no inner node as its child on the side of the gap: this is the parent of the leaf.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// The tree in which leaves and inner nodes alternate, starting with a leaf at place 0.
    First,
    /// The tree whose inner nodes are leaves of the first tree. Inner node 0 of the first tree is its last leaf, inner node 1 is
    /// leaf 0, inner node 2 is leaf 1, and so on.
    Second,
}

impl Tree {
    const BOTH_TREES: [Self; 2] = [Self::First, Self::Second];

    /// Returns the neighbours of `rank` in a tree of all ranks.
    fn neighbours(self, world: WorldSize, rank: Rank) -> TreeNeighbours {
        let (parent, children) = self.parent_and_children(world.as_usize(), rank.index());
        let rank = |place: usize| Rank::new(place as u32);
        TreeNeighbours { parent: parent.map(rank), children: children.into_iter().map(rank).collect() }
    }

    /// Returns the neighbours of `rank` in a tree with `root` at the top. The only child of `root` is the top of a tree of all
    /// other ranks, in which the successor of `root` has place 0.
    fn neighbours_below(self, root: Rank, world: WorldSize, rank: Rank) -> TreeNeighbours {
        let places = world.as_usize() - 1;
        let rank_at = |place: usize| world.rank_after(root, 1 + place as u32);
        if rank == root {
            let top = top_of_subtree(places, &(0..places / 2));
            let child = top.map(|node| rank_at(self.place_of_node(places, node)));
            return TreeNeighbours { parent: None, children: child.into_iter().collect() };
        }
        let place = world.rank_before(rank, root.get() + 1).index();
        let (parent, children) = self.parent_and_children(places, place);
        let parent = parent.map_or(root, rank_at);
        TreeNeighbours { parent: Some(parent), children: children.into_iter().map(rank_at).collect() }
    }

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

    /// Returns the node at a place: the place that this node has in the first tree. Leaf i is node 2i, inner node i 2i + 1.
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
