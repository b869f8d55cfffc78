//! Collectives of ranks that share memory, as a sequence of rounds. Every rank has a slot in the shared memory. In
//! each round, every rank *posts* data: the rank copies the data into its slot and signals that the data are there.
//! Then the rank *takes* data from the slots of ranks that have posted: it copies or reduces these data into its own
//! buffer. If the data do not fit into a slot, each round handles one block of the data.
//!
//! Contributions are reduced in rank order; the lower rank is the left operand. The result depends only on the
//! contributions, and not on the index of an element, the size of the slots, or the algorithm. A custom reduction
//! function need not commute.
//!
//! If all ranks can access the buffers of all ranks, an all-reduce of any length has two rounds. In the first round
//! each rank posts the address of its buffer. When all ranks have posted, each rank reduces its own chunk of all
//! buffers and writes the result into all buffers. In the second round each rank signals that it is done. A rank
//! leaves the operation when all ranks have signalled.

use std::ops::Range;

use super::partition::{Partition, chunk};
use super::{Action, CollectiveSpec};
use crate::types::{Rank, WorldSize};

/// Elements that a rank copies into its slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotWrite {
    /// The range of the elements in the rank's buffer.
    pub range: Range<usize>,
    /// The index of the first element in the slot.
    pub slot_offset: usize,
}

/// Elements that a rank takes from a slot, which may be the rank's own slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotRead {
    /// The rank that owns the slot.
    pub from: Rank,
    /// The index of the first element in the slot.
    pub slot_offset: usize,
    /// The range of this rank's own buffer into which the elements are copied or reduced.
    pub range: Range<usize>,
    /// What the rank does with the elements. In a reduction the element in the buffer is the left operand.
    pub action: Action,
}

/// Elements that a rank reduces in rank order. The rank reads its own contribution from its buffer, and the
/// contributions of all other ranks from their slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OrderedReduce {
    /// The elements of the rank's buffer that the result replaces.
    pub range: Range<usize>,
    /// The index of the first element in the slot of each other rank.
    pub slot_offset: usize,
    /// Whether the rank also posts the result in the next round, at the beginning of its slot. The rank copies the
    /// result to the slot while the result is still in the processor's L1 cache.
    pub is_posted_next: bool,
}

/// This rank's part of an all-reduce without slots. Only this rank reduces these elements: it reads the elements from
/// the buffers of all ranks, and writes the result into all buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InPlaceReduce {
    /// The range of the elements in each buffer.
    pub range: Range<usize>,
}

/// What one rank does in a round.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// The elements that the rank posts. If this list is empty, the rank posts only a signal.
    pub slot_writes: Vec<SlotWrite>,
    /// The elements that the rank reduces over all ranks, in rank order; `None` in a round without such a reduction.
    pub ordered_reduce: Option<OrderedReduce>,
    /// What the rank does instead of `ordered_reduce` if all ranks post the addresses of their buffers (see
    /// [`RoundPlan::reduce_remaining_rounds_in_place`]). `None` in rounds in which no rank can post an address. A
    /// rank that posts an address posts no elements: the other ranks read its buffer instead of its slot.
    pub in_place_reduce: Option<InPlaceReduce>,
    /// The elements that the rank takes, in this order. A [`SlotRead`] with an empty range only waits until the
    /// owner of the slot has posted.
    pub slot_reads: Vec<SlotRead>,
}

/// What one rank does in one operation. All ranks have the same number of rounds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoundPlan {
    world: WorldSize,
    rank: Rank,
    /// The number of elements in a slot.
    slot_len: usize,
    spec: CollectiveSpec,
    /// Whether the operation has a single round, in which every rank reduces all elements.
    is_one_shot: bool,
    /// Whether the ranks reduce their buffers in place, without slots.
    is_in_place: bool,
}

impl RoundPlan {
    /// Returns the plan of `rank`. A slot has `slot_len` elements, but at least as many elements as there are ranks.
    /// If an all-reduce has at most `one_shot_max` elements and fits into one slot, it has one round, in which every
    /// rank reduces all elements.
    ///
    /// # Panics
    ///
    /// If not all ranks know the lengths of all parts, which determine the number of rounds.
    pub fn new(
        world: WorldSize,
        rank: Rank,
        slot_len: usize,
        one_shot_max: usize,
        spec: CollectiveSpec,
    ) -> Self {
        assert!(spec.has_known_part_lengths(), "every rank must know the lengths of all parts");
        let slot_len = slot_len.max(world.as_usize());
        let is_one_shot =
            matches!(spec, CollectiveSpec::AllReduce { count } if count <= slot_len.min(one_shot_max));
        Self { world, rank, slot_len, spec, is_one_shot, is_in_place: false }
    }

    /// Makes the remaining rounds work in place, without slots. In the round with [`Round::in_place_reduce`], every
    /// rank must call this function when it sees that all ranks have posted the addresses of their buffers.
    pub fn reduce_remaining_rounds_in_place(&mut self) {
        self.is_in_place = true;
    }

    /// Returns the number of rounds, which is at least one.
    pub fn round_count(&self) -> usize {
        let longest =
            |partition: &Partition| self.world.ranks().map(|rank| partition.range(rank).len()).max();
        let rounds = match &self.spec {
            CollectiveSpec::Barrier => 1,
            CollectiveSpec::AllReduce { .. } if self.is_one_shot => 1,
            CollectiveSpec::AllReduce { .. } if self.is_in_place => 2,
            CollectiveSpec::AllReduce { count } | CollectiveSpec::Reduce { count, .. } => {
                return 2 * count.div_ceil(self.slot_len).max(1);
            }
            CollectiveSpec::ReduceScatter(partition) | CollectiveSpec::Scatter { partition, .. } => {
                longest(partition).unwrap_or_default().div_ceil(self.slot_len_per_rank())
            }
            CollectiveSpec::AllGather(partition) | CollectiveSpec::Gather { partition, .. } => {
                longest(partition).unwrap_or_default().div_ceil(self.slot_len)
            }
            CollectiveSpec::AllToAll { send, .. } => {
                longest(send).unwrap_or_default().div_ceil(self.slot_len_per_rank())
            }
            CollectiveSpec::Broadcast { count, .. }
            | CollectiveSpec::Scan { count }
            | CollectiveSpec::Exscan { count } => count.div_ceil(self.slot_len),
        };
        rounds.max(1)
    }

    /// Returns the number of elements for each rank in a slot that is divided among all ranks.
    fn slot_len_per_rank(&self) -> usize {
        self.slot_len / self.world.as_usize()
    }

    /// Replaces the contents of `round` by the actions of this rank in round `number`, counted from 0.
    pub fn fill_round(&self, number: usize, round: &mut Round) {
        round.slot_writes.clear();
        round.ordered_reduce = None;
        round.in_place_reduce = None;
        round.slot_reads.clear();
        let per_rank = self.slot_len_per_rank();
        let block_per_slot = |range: Range<usize>| block_of_range(&range, number, self.slot_len);
        let block_per_rank = |range: Range<usize>| block_of_range(&range, number, per_rank);
        match &self.spec {
            CollectiveSpec::Barrier => self.read_from_other_slots(round, |_| (0, 0..0)),
            CollectiveSpec::AllReduce { count } if self.is_one_shot => {
                round.write_to_slot(0..*count, 0);
                self.add_reducing_reads(round, 0, &(0..*count), self.world.get());
            }
            CollectiveSpec::AllReduce { count } => self.fill_all_reduce_round(round, number, *count),
            CollectiveSpec::Reduce { count, root } => {
                self.fill_two_shot_round(round, number, *count, Some(*root));
            }
            CollectiveSpec::ReduceScatter(partition) => {
                for rank in self.other_ranks() {
                    round.write_to_slot(block_per_rank(partition.range(rank)), rank.index() * per_rank);
                }
                let range = block_per_rank(partition.range(self.rank));
                let slot_offset = self.rank.index() * per_rank;
                round.ordered_reduce = Some(OrderedReduce { range, slot_offset, is_posted_next: false });
            }
            CollectiveSpec::AllGather(partition) => {
                round.write_to_slot(block_per_slot(partition.range(self.rank)), 0);
                self.read_from_other_slots(round, |rank| (0, block_per_slot(partition.range(rank))));
            }
            CollectiveSpec::Broadcast { count, root } if self.rank == *root => {
                round.write_to_slot(block_per_slot(0..*count), 0);
            }
            CollectiveSpec::Broadcast { count, root } => {
                round.read_from_slot(*root, 0, block_per_slot(0..*count), Action::Copy);
            }
            CollectiveSpec::Gather { partition, root } if self.rank == *root => {
                self.read_from_other_slots(round, |rank| (0, block_per_slot(partition.range(rank))));
            }
            CollectiveSpec::Gather { partition, .. } => {
                round.write_to_slot(block_per_slot(0..partition.range(self.rank).len()), 0);
            }
            CollectiveSpec::Scatter { partition, root } if self.rank == *root => {
                for rank in self.other_ranks() {
                    round.write_to_slot(block_per_rank(partition.range(rank)), rank.index() * per_rank);
                }
            }
            CollectiveSpec::Scatter { partition, root } => {
                let own = block_per_rank(0..partition.range(self.rank).len());
                round.read_from_slot(*root, self.rank.index() * per_rank, own, Action::Copy);
            }
            CollectiveSpec::AllToAll { send, receive, .. } => {
                for rank in self.other_ranks() {
                    round.write_to_slot(block_per_rank(send.range(rank)), rank.index() * per_rank);
                }
                self.read_from_other_slots(round, |rank| {
                    let part = block_per_rank(receive.range(rank));
                    (self.rank.index() * per_rank, send.total() + part.start..send.total() + part.end)
                });
            }
            CollectiveSpec::Scan { count } => {
                let own = block_per_slot(0..*count);
                round.write_to_slot(own.clone(), 0);
                self.add_reducing_reads(round, 0, &own, self.rank.get() + 1);
            }
            CollectiveSpec::Exscan { count } => {
                let own = block_per_slot(0..*count);
                round.write_to_slot(own.clone(), 0);
                self.add_reducing_reads(round, 0, &(count + own.start..count + own.end), self.rank.get());
            }
        }
    }

    /// Fills a round of an all-reduce with two or more rounds, over slots or in place. In the first round, the ranks
    /// do not know yet whether they will use slots or work in place.
    fn fill_all_reduce_round(&self, round: &mut Round, number: usize, count: usize) {
        if self.is_in_place && number > 0 {
            return self.read_from_other_slots(round, |_| (0, 0..0));
        }
        self.fill_two_shot_round(round, number, count, None);
        if number == 0 {
            round.in_place_reduce = Some(InPlaceReduce { range: chunk(count, self.world, self.rank) });
        }
    }

    /// Fills a round of a two-shot reduction. In even rounds every rank posts a block and reduces its own chunk of
    /// all ranks' blocks. In odd rounds every rank posts its reduced chunk, and `root` takes all chunks. If `root` is
    /// `None`, every rank takes all chunks.
    fn fill_two_shot_round(&self, round: &mut Round, number: usize, count: usize, root: Option<Rank>) {
        let block = block_of_range(&(0..count), number / 2, self.slot_len);
        let partition = Partition::even(block.len(), self.world);
        let chunk = |rank| {
            let chunk = partition.range(rank);
            block.start + chunk.start..block.start + chunk.end
        };
        let own = chunk(self.rank);
        if number.is_multiple_of(2) {
            // This rank does not post the elements of its own chunk, because only this rank reduces them.
            round.write_to_slot(block.start..own.start, 0);
            round.write_to_slot(own.end..block.end, own.end - block.start);
            round.ordered_reduce = Some(OrderedReduce {
                slot_offset: own.start - block.start,
                range: own,
                is_posted_next: true,
            });
            return;
        }
        if root.is_none_or(|root| root == self.rank) {
            self.read_from_other_slots(round, |rank| (0, chunk(rank)));
        }
    }

    /// Adds [`SlotRead`]s that reduce the contributions of the first `ranks` ranks in rank order.
    fn add_reducing_reads(&self, round: &mut Round, slot_offset: usize, range: &Range<usize>, ranks: u32) {
        for rank in self.world.ranks().take(ranks as usize) {
            let action = match rank.get() {
                0 => Action::Copy,
                rank if rank + 1 == self.world.get() => Action::ReduceLast,
                _ => Action::Reduce,
            };
            round.read_from_slot(rank, slot_offset, range.clone(), action);
        }
    }

    /// Adds a [`SlotRead`] from the slot of every rank except this rank, starting with the successor of this rank.
    /// `source_and_target` returns the index of the elements in a rank's slot, and their range in this rank's buffer.
    fn read_from_other_slots(
        &self,
        round: &mut Round,
        source_and_target: impl Fn(Rank) -> (usize, Range<usize>),
    ) {
        for rank in self.other_ranks() {
            let (slot_offset, range) = source_and_target(rank);
            round.read_from_slot(rank, slot_offset, range, Action::Copy);
        }
    }

    fn other_ranks(&self) -> impl Iterator<Item = Rank> {
        (1..self.world.get()).map(|distance| self.world.rank_after(self.rank, distance))
    }
}

impl Round {
    fn write_to_slot(&mut self, range: Range<usize>, slot_offset: usize) {
        self.slot_writes.push(SlotWrite { range, slot_offset });
    }

    fn read_from_slot(&mut self, from: Rank, slot_offset: usize, range: Range<usize>, action: Action) {
        self.slot_reads.push(SlotRead { from, slot_offset, range, action });
    }
}

/// Returns block `number` of a range that is divided into blocks of `block_len` elements. A block that would begin
/// after the end of the range is empty.
fn block_of_range(range: &Range<usize>, number: usize, block_len: usize) -> Range<usize> {
    let start = range.end.min(range.start + number * block_len);
    start..range.end.min(start + block_len)
}
