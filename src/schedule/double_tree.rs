//! Two binary trees over all ranks, each of which carries half of the buffer, block by block.
//!
//! The inner ranks of one tree are leaves of the other. A tree by itself leaves its leaves idle half of the time; of two,
//! each rank sends and receives as much as its link can carry, and the number of hops is still the height of a tree.
//! Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35
//! (2009); NCCL has such trees since 2.4.
//!
//! Trees here are for any number of ranks, of which at most one is a leaf of both. From four ranks on, no two are
//! neighbours in both trees, so nothing of one tree ever waits behind something of the other on a link. (Trees that are
//! copies of each other, mirrored or moved by one, share an edge wherever two leaves of theirs meet.)
//!
//! Two children's contributions to an element are added in a fixed order: that of the second child waits for that of the
//! first, segment by segment. So the same data give the same bits, and a receive waits for another one, but for no more
//! than that: a first child's receive, and a parent's, wait for nothing. A second child sends what may be stored, and the
//! rest as the rank says that it is ready, block by block.

use std::ops::Range;

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// The most blocks of a half, so that a schedule stays small however long the buffer is.
const BLOCKS_MAX: u64 = 512;
/// The shortest block: below it a message's own cost is most of what it costs.
const BLOCK_BYTES_MIN: u64 = 4 << 10;

/// Bytes of a block, for a buffer of so many.
///
/// The time that a longer block adds at each hop grows with it, the number of messages falls with it. Both together are
/// least for a block that grows with the root of the buffer: 32 KiB for 1 MiB, 16 blocks for each tree.
pub fn block_bytes(bytes: u64) -> u64 {
    (32 * bytes.isqrt()).max(BLOCK_BYTES_MIN).max((bytes / 2).div_ceil(BLOCKS_MAX))
}

/// All-reduce: each half is reduced up its tree and broadcast down the same. Twice floor(log2 n) hops; at most 2S bytes
/// sent by each rank.
///
/// An element is reduced on its way to the top of its tree and copied from there, so all ranks end with the same bits.
///
/// # Panics
///
/// If `block`, the elements that are sent at a time, is 0.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    let links = Tree::BOTH.map(|tree| TreeLinks::new(tree, world, rank));
    // With three ranks or fewer two are neighbours in both trees: what goes up there goes first, for it waits for less.
    let ups = [0, 1].map(|tree| links[tree].push_up(&mut schedule, half(count, tree), block));
    for (tree, ups) in ups.into_iter().enumerate() {
        links[tree].push_down(&mut schedule, half(count, tree), block, &ups);
    }
    schedule
}

/// Reduce to `root`: the tops of two trees over the other ranks send it a half each. floor(log2(n-1)) hops and one; S bytes
/// sent by each rank but the root.
///
/// The other ranks are left with partial results.
///
/// # Panics
///
/// As [`all_reduce`].
pub fn reduce(world: WorldSize, rank: Rank, root: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for (index, tree) in Tree::BOTH.into_iter().enumerate() {
        let links = TreeLinks::below(root, tree, world, rank);
        links.push_up(&mut schedule, half(count, index), block);
    }
    schedule
}

/// Broadcast from `root`: [`reduce`] with every message turned around. At most S bytes sent by each rank.
///
/// # Panics
///
/// As [`all_reduce`].
pub fn broadcast(world: WorldSize, rank: Rank, root: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    for (index, tree) in Tree::BOTH.into_iter().enumerate() {
        let links = TreeLinks::below(root, tree, world, rank);
        links.push_down(&mut schedule, half(count, index), block, &[]);
    }
    schedule
}

/// The elements that a tree carries.
fn half(count: usize, tree: usize) -> Range<usize> {
    let middle = count.div_ceil(2);
    if tree == 0 { 0..middle } else { middle..count }
}

/// The blocks of a half; an empty one is an empty block, whose messages find out that a peer's is not empty.
fn blocks(half: Range<usize>, block: usize) -> impl Iterator<Item = Range<usize>> {
    let end = half.end;
    (half.start..end.max(half.start + 1)).step_by(block).map(move |start| start..end.min(start + block))
}

/// A rank's neighbours in one tree.
struct TreeLinks {
    parent: Option<Rank>,
    /// At most two, in the order in which they are added.
    children: Vec<Rank>,
}

impl TreeLinks {
    /// In a tree of all ranks.
    fn new(tree: Tree, world: WorldSize, rank: Rank) -> Self {
        let (parent, children) = tree.neighbours(world.as_usize(), rank.index());
        let rank = |place: usize| Rank::new(place as u32);
        Self { parent: parent.map(rank), children: children.into_iter().map(rank).collect() }
    }

    /// In a tree of all ranks but `root`, from its successor on, whose top is the root's one child.
    fn below(root: Rank, tree: Tree, world: WorldSize, rank: Rank) -> Self {
        let others = world.as_usize() - 1;
        let at = |place: usize| world.after(root, 1 + place as u32);
        if rank == root {
            let top = tree.top(others);
            return Self { parent: None, children: top.map(at).into_iter().collect() };
        }
        let place = world.before(rank, root.get() + 1).index();
        let (parent, children) = tree.neighbours(others, place);
        let parent = parent.map_or(root, at);
        Self { parent: Some(parent), children: children.into_iter().map(at).collect() }
    }

    /// Every block comes from the children and goes to the parent. Returns the step that ends each block here, if
    /// anything comes.
    fn push_up(&self, schedule: &mut Schedule, half: Range<usize>, block: usize) -> Vec<Option<After>> {
        let mut ends = Vec::new();
        for range in blocks(half, block) {
            let mut after = None;
            for (index, &peer) in self.children.iter().enumerate() {
                let is_last = self.parent.is_none() && index + 1 == self.children.len();
                let action = if is_last { Action::ReduceLast } else { Action::Reduce };
                let receive = Inbound { peer, range: range.clone(), action, after };
                after = Some(After(schedule.steps.len()));
                schedule.steps.push(Step { send: None, receive: Some(receive) });
            }
            if let Some(peer) = self.parent {
                let send = Some(Outbound { peer, range, after });
                schedule.steps.push(Step { send, receive: None });
            }
            ends.push(after);
        }
        ends
    }

    /// Every block comes from the parent and goes to the children, the one with more ranks below it first. Without a
    /// parent it is there once the step of the same place in `ups` is done, or from the beginning.
    fn push_down(&self, schedule: &mut Schedule, half: Range<usize>, block: usize, ups: &[Option<After>]) {
        for (index, range) in blocks(half, block).enumerate() {
            let mut after = ups.get(index).copied().flatten();
            if let Some(peer) = self.parent {
                after = Some(After(schedule.steps.len()));
                let receive = Inbound { peer, range: range.clone(), action: Action::Copy, after: None };
                schedule.steps.push(Step { send: None, receive: Some(receive) });
            }
            for &peer in self.children.iter().rev() {
                let send = Some(Outbound { peer, range: range.clone(), after });
                schedule.steps.push(Step { send, receive: None });
            }
        }
    }
}

/// One of the two trees.
///
/// With n places a tree has n/2 inner nodes and a leaf for all other places. The inner ones are a balanced search tree, and
/// leaf i hangs in the gap before inner node i, below whichever of that one's neighbours has room. So inner nodes have two
/// children, but the last one, which has one if n is even, and no way to the top is longer than floor(log2 n).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// Leaves and inner nodes take turns, from place 0 on: each leaf is beside its parent.
    First,
    /// The inner nodes are the first tree's leaves, and its inner nodes are leaves, each one gap before its place in order.
    Second,
}

/// A place's part in a tree.
#[derive(Clone, Copy)]
enum Node {
    Inner(usize),
    Leaf(usize),
}

impl Tree {
    const BOTH: [Self; 2] = [Self::First, Self::Second];

    /// The place of the top, if there is any place.
    fn top(self, places: usize) -> Option<usize> {
        Some(self.place(places, top_of(places, &(0..places / 2))?))
    }

    /// The places of the parent and of the children, the smaller subtree first.
    fn neighbours(self, places: usize, place: usize) -> (Option<usize>, Vec<usize>) {
        let node = self.node(places, place);
        let mut inner = 0..places / 2;
        let mut parent = None;
        while !inner.is_empty() {
            let middle = middle(&inner);
            let (before, after) = (inner.start..middle, middle + 1..inner.end);
            let is_before = match node {
                Node::Inner(index) if index == middle => {
                    let children = [before, after].into_iter().filter_map(|inner| top_of(places, &inner));
                    return (parent, children.map(|node| self.place(places, node)).collect());
                }
                Node::Inner(index) => index < middle,
                Node::Leaf(index) => index <= middle,
            };
            inner = if is_before { before } else { after };
            parent = Some(self.place(places, Node::Inner(middle)));
        }
        (parent, Vec::new())
    }

    fn node(self, places: usize, place: usize) -> Node {
        let (inner, half) = (places / 2, place / 2);
        match self {
            Self::First if !place.is_multiple_of(2) => Node::Inner(half),
            Self::First => Node::Leaf(half),
            Self::Second if place.is_multiple_of(2) && half < inner => Node::Inner(half),
            Self::Second => {
                let leaves = places - inner;
                Node::Leaf((half + leaves - 1) % leaves)
            }
        }
    }

    fn place(self, places: usize, node: Node) -> usize {
        match (self, node) {
            (Self::First, Node::Inner(index)) => 2 * index + 1,
            (Self::First, Node::Leaf(index)) | (Self::Second, Node::Inner(index)) => 2 * index,
            // The last of an odd number of places has no inner node before it.
            (Self::Second, Node::Leaf(index)) => {
                let half = (index + 1) % (places - places / 2);
                (2 * half + 1).min(places - 1)
            }
        }
    }
}

/// The top of the inner nodes of a range and the leaves between them, if there is any.
fn top_of(places: usize, inner: &Range<usize>) -> Option<Node> {
    if !inner.is_empty() {
        return Some(Node::Inner(middle(inner)));
    }
    let leaves = places - places / 2;
    (inner.start < leaves).then_some(Node::Leaf(inner.start))
}

/// The inner node above all others of a range that is not empty. Of an even number it is the lower one in the middle.
fn middle(inner: &Range<usize>) -> usize {
    inner.start + (inner.len() - 1) / 2
}
