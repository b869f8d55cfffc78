//! Makes the programs of collectives in shared memory; `docs/shared-memory.md` lists their rounds.
//!
//! Contributions are reduced in rank order; the lower rank is the left operand. So a custom reduction function need not commute.

use std::ops::Range;
use std::sync::Arc;

use super::CollectiveSpec;
use super::partition::{Partition, chunk, shifted};
use super::program::{Blocks, Fold, Phase, Program, Round, RoundWork, SlotWrite, Take};
use crate::types::{Rank, RankSet, WorldSize, part_index};

/// The ranks that share memory, as one of them sees them.
#[derive(Clone, Copy, Debug)]
pub struct SharedSlots {
    pub world: WorldSize,
    pub rank: Rank,
    /// The number of elements in a slot.
    pub slot_len: usize,
}

/// Returns the program of this rank for a collective. If a slot has fewer elements than there are ranks, it counts as having
/// as many. If `is_one_shot` is true and an all-reduce fits into a slot, the all-reduce has one round, in which every rank
/// reduces all elements. Panics if not all ranks know the lengths of all parts, which determine the number of rounds.
pub fn plan(spec: &CollectiveSpec, slots: SharedSlots, is_one_shot: bool) -> Program {
    assert!(spec.has_known_part_lengths(), "every rank must know the lengths of all parts");
    let is_one_shot = is_one_shot && spec.count() <= slots.slot_len;
    let slots = SharedSlots { slot_len: slots.slot_len.max(slots.world.as_usize()), ..slots };
    match spec {
        CollectiveSpec::AllReduce { count } if !is_one_shot => {
            let in_place = reduce_in_place(*count, slots.world, slots.rank);
            Program { if_all_expose: Some(Arc::new(in_place)), ..two_shot(*count, None, slots) }
        }
        CollectiveSpec::Reduce { count, root } => two_shot(*count, Some(*root), slots),
        _ => {
            let phase = Phase { rounds: [slots.round(spec)].into(), times: slots.block_count(spec).max(1) };
            Program { phases: [phase].into(), if_all_expose: None }
        }
    }
}

/// The collectives in which each round does the same with one block.
impl SharedSlots {
    fn longest(self, parts: &Partition) -> usize {
        self.world.ranks().map(|rank| parts.range(rank).len()).max().unwrap_or_default()
    }

    /// Returns the number of elements for each rank in a slot that all ranks share. Short parts fit into a short payload.
    fn len_per_rank(self, parts: &Partition) -> usize {
        self.longest(parts).clamp(1, self.slot_len / self.world.as_usize())
    }

    /// Returns the other ranks, starting with the successor of this rank.
    fn others(self) -> impl Iterator<Item = Rank> {
        (1..self.world.get()).map(move |distance| self.world.rank_after(self.rank, distance))
    }

    /// Returns the number of blocks, so that each block fits into its place in a slot.
    fn block_count(self, spec: &CollectiveSpec) -> usize {
        match spec {
            CollectiveSpec::ReduceScatter(parts)
            | CollectiveSpec::Scatter { partition: parts, .. }
            | CollectiveSpec::AllToAll { send: parts, .. } => {
                self.longest(parts).div_ceil(self.len_per_rank(parts))
            }
            CollectiveSpec::AllGather(parts) | CollectiveSpec::Gather { partition: parts, .. } => {
                self.longest(parts).div_ceil(self.slot_len)
            }
            _ => spec.count().div_ceil(self.slot_len),
        }
    }

    /// Returns the elements that this rank posts, the ranks for which it waits, and what it does with their posts.
    fn round(self, spec: &CollectiveSpec) -> Round {
        let Self { world, rank, slot_len } = self;
        let whole_slots = |range| Blocks::of(range, slot_len);
        let post = |range| vec![SlotWrite { elements: whole_slots(range), part: 0 }];
        let part_len = match spec {
            CollectiveSpec::ReduceScatter(parts)
            | CollectiveSpec::Scatter { partition: parts, .. }
            | CollectiveSpec::AllToAll { send: parts, .. } => self.len_per_rank(parts),
            _ => 0,
        };
        let post_parts = |parts: &Partition| {
            let part_of = |to: Rank| self.write_part(to, Blocks::of(parts.range(to), part_len));
            self.others().map(part_of).collect()
        };
        let fold = |ranks: u32, elements| {
            let fold = Fold { ranks, elements, is_posted_next: false };
            (RankSet::first_without(ranks, rank.index()), RoundWork::Fold(fold))
        };
        let take_parts = |parts: &Partition| {
            take_all(self.others().map(|from| Take { from, elements: whole_slots(parts.range(from)) }))
        };
        let (writes, (sources, work)) = match spec {
            CollectiveSpec::Barrier => (vec![], signals(world, rank)),
            CollectiveSpec::AllReduce { count } => {
                (post(0..*count), fold(world.get(), whole_slots(0..*count)))
            }
            CollectiveSpec::Scan { count } => (post(0..*count), fold(rank.get() + 1, whole_slots(0..*count))),
            CollectiveSpec::Exscan { count } => {
                (post(0..*count), fold(rank.get(), whole_slots(*count..2 * count)))
            }
            CollectiveSpec::ReduceScatter(parts) => {
                (post_parts(parts), fold(world.get(), Blocks::of(parts.range(rank), part_len)))
            }
            CollectiveSpec::Broadcast { count, root } if *root == rank => (post(0..*count), take_all([])),
            CollectiveSpec::Broadcast { count, root } => {
                (vec![], take_all([Take { from: *root, elements: whole_slots(0..*count) }]))
            }
            CollectiveSpec::Scatter { partition, root } if *root == rank => {
                (post_parts(partition), take_all([]))
            }
            CollectiveSpec::Scatter { partition, root } => {
                let own = Blocks::of(0..partition.range(rank).len(), part_len);
                (vec![], take_all([Take { from: *root, elements: own }]))
            }
            CollectiveSpec::AllGather(parts) => (post(parts.range(rank)), take_parts(parts)),
            CollectiveSpec::Gather { partition, root } if *root == rank => (vec![], take_parts(partition)),
            CollectiveSpec::Gather { partition, .. } => (post(0..partition.range(rank).len()), take_all([])),
            CollectiveSpec::AllToAll { send, receive, .. } => {
                let takes = self.others().map(|from| {
                    let elements = shifted(&receive.range(from), send.total());
                    Take { from, elements: Blocks::of(elements, part_len) }
                });
                (post_parts(send), take_all(takes))
            }
            CollectiveSpec::Reduce { .. } => unreachable!("each block of a reduce has two rounds"),
        };
        Round { writes: writes.into(), part_len, sources, work }
    }

    fn write_part(self, to: Rank, elements: Blocks) -> SlotWrite {
        SlotWrite { elements, part: part_index(self.rank.index(), to.index()) }
    }
}

/// Returns a two-shot reduction: each rank reduces one chunk of each block. The last block may be shorter: it has its own phase.
fn two_shot(count: usize, root: Option<Rank>, slots: SharedSlots) -> Program {
    // Some chunks are one element longer than others. A very short slot has no space for all chunks but the own.
    let (slot_len, ranks) = (slots.slot_len, slots.world.as_usize());
    let has_space = slot_len.div_ceil(ranks) * (ranks - 1) <= slot_len;
    let slot_len = if has_space { slot_len } else { slot_len - slot_len % ranks };
    let slots = SharedSlots { slot_len, ..slots };
    let full_blocks = count.saturating_sub(1) / slots.slot_len;
    let first = two_shot_phase(0..slots.slot_len, full_blocks, root, slots);
    let last = two_shot_phase(full_blocks * slots.slot_len..count, 1, root, slots);
    let phases = [first, last].into_iter().filter(|phase| phase.times > 0).collect();
    Program { phases, if_all_expose: None }
}

/// Returns the two rounds that reduce each of `times` blocks. If `root` is `None`, every rank takes all reduced chunks.
fn two_shot_phase(block: Range<usize>, times: usize, root: Option<Rank>, slots: SharedSlots) -> Phase {
    let SharedSlots { world, rank, slot_len } = slots;
    let chunk_of = |rank| Blocks::repeated(shifted(&chunk(block.len(), world, rank), block.start), slot_len);
    // This rank does not post the elements of its own chunk, because only this rank reduces them.
    let writes = slots.others().map(|to| slots.write_part(to, chunk_of(to))).collect();
    let part_len = block.len().div_ceil(world.as_usize());
    let fold = Fold { ranks: world.get(), elements: chunk_of(rank), is_posted_next: root != Some(rank) };
    let sources = RankSet::first_without(world.get(), rank.index());
    let reduce = Round { writes, part_len, sources, work: RoundWork::Fold(fold) };
    let takes = slots.others().filter(|_| root.is_none_or(|root| root == rank));
    let (sources, work) = take_all(takes.map(|from| Take { from, elements: chunk_of(from) }));
    let share = Round { writes: [].into(), part_len: 0, sources, work };
    Phase { rounds: [reduce, share].into(), times }
}

/// Returns an all-reduce of buffers that all ranks can access.
fn reduce_in_place(count: usize, world: WorldSize, rank: Rank) -> Program {
    let (sources, done) = signals(world, rank);
    let round = |work| Round { writes: [].into(), part_len: 0, sources, work };
    let rounds = [round(RoundWork::FoldInPlace(chunk(count, world, rank))), round(done)];
    Program { phases: [Phase { rounds: rounds.into(), times: 1 }].into(), if_all_expose: None }
}

/// Returns the sources and the work of a round in which this rank waits for the signals of all other ranks.
fn signals(world: WorldSize, rank: Rank) -> (RankSet, RoundWork) {
    (RankSet::first_without(world.get(), rank.index()), RoundWork::Take([].into()))
}

/// Returns the sources and the work of a round in which a rank copies. The rank also waits for a source with an empty block.
fn take_all(takes: impl IntoIterator<Item = Take>) -> (RankSet, RoundWork) {
    let takes: Box<[Take]> = takes.into_iter().collect();
    (takes.iter().map(|take| take.from.index()).collect(), RoundWork::Take(takes))
}
