//! Two binary trees over all ranks, each of which carries half of the buffer, block by block.
//!
//! The inner ranks of one tree are leaves of the other. In a single tree the leaves are idle half of the time; with
//! two, each rank sends and receives as much as its link can carry, and the number of hops is still the height of a
//! tree. Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
//! Computing 35 (2009); NCCL has such trees since 2.4.
//!
//! These trees work for any number of ranks, of which at most one is a leaf of both. From four ranks on, no two ranks
//! are neighbours in both trees, so messages of one tree never wait for messages of the other on a link. (Trees that
//! are copies of each other, mirrored or shifted by one, share an edge wherever two of their leaves meet.)
//!
//! The contributions of two children to an element are added in a fixed order: that of the second child waits for
//! that of the first, segment by segment. So the same data give the same bits. Only this receive waits for another
//! one, and that one waits for none: neither a first child's receive nor a parent's does. A second child sends as
//! much as may be stored, and the rest block by block when the receiver says that it is ready.

use std::ops::Range;

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// The largest number of blocks of a half, so that a schedule stays small for long buffers.
const BLOCKS_MAX: u64 = 512;
/// The shortest block: below it the fixed cost of a message dominates.
const BLOCK_BYTES_MIN: u64 = 4 << 10;

/// The bytes of a block, for a buffer of this many bytes.
///
/// A longer block adds more time at each hop and needs fewer messages. The sum is least for a block that grows with
/// the square root of the buffer: 32 KiB for 1 MiB, 16 blocks for each tree.
pub fn block_bytes(bytes: u64) -> u64 {
    (32 * bytes.isqrt()).max(BLOCK_BYTES_MIN).max((bytes / 2).div_ceil(BLOCKS_MAX))
}

/// All-reduce: each half is reduced up its tree and broadcast down the same tree. Twice floor(log2 n) hops; at most
/// 2S bytes sent by each rank.
///
/// An element is reduced up to the top of its tree and copied from there, so all ranks end with the same bits.
///
/// # Panics
///
/// If `block`, the number of elements that are sent at a time, is 0.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize, block: usize) -> Schedule {
    let mut schedule = Schedule::default();
    let links = Tree::BOTH.map(|tree| TreeLinks::new(tree, world, rank));
    // With three ranks or fewer two are neighbours in both trees: messages up the tree go first, because they wait
    // for less.
    let ups = [0, 1].map(|tree| links[tree].push_up(&mut schedule, half(count, tree), block));
    for (tree, ups) in ups.into_iter().enumerate() {
        links[tree].push_down(&mut schedule, half(count, tree), block, &ups);
    }
    schedule
}

/// Reduce to `root`: the tops of two trees over the other ranks send it a half each. floor(log2(n-1)) hops plus one;
/// S bytes sent by each rank but the root.
///
/// The other ranks end with partial results.
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

/// Broadcast from `root`: [`reduce`] with every message reversed. At most S bytes sent by each rank.
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

/// The blocks of a half. An empty half is one empty block, whose messages detect a peer's half that is not empty.
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

    /// In a tree of all ranks but `root`, from its successor on. The only child of `root` is the top of this tree.
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

    /// Receives every block from the children and sends it to the parent. Returns the last receiving step of each
    /// block, if there is one.
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

    /// Receives every block from the parent and sends it to the children, the one with more ranks below it first.
    /// Without a parent, a block is available after the step with the same index in `ups`, or from the beginning.
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
/// With n places a tree has n/2 inner nodes and a leaf for all other places. The inner nodes are a balanced search
/// tree, and leaf i is in the gap before inner node i, below the neighbour of the gap that has fewer than two
/// children. So inner nodes have two children, except the last one, which has one if n is even, and no path to the
/// top is longer than floor(log2 n).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// Leaves and inner nodes alternate, from place 0 on: each leaf is beside its parent.
    First,
    /// The inner nodes are the first tree's leaves. The inner nodes of the first tree are leaves, in order, each one
    /// gap earlier than its place.
    Second,
}

/// The type of a place's node in a tree.
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
            // With an odd number of places, the last one has no inner node before it.
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

/// The inner node above all others of a range that is not empty. In a range of even length it is the lower of the two
/// in the middle.
fn middle(inner: &Range<usize>) -> usize {
    inner.start + (inner.len() - 1) / 2
}
