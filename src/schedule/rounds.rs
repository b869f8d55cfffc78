//! Collectives of ranks that share memory, as rounds on a board. In each round every rank posts data in its slot, and
//! then takes data from the slots of the ranks that have posted.
//!
//! Contributions are reduced in rank order, lower ranks being the left operands. So a result depends on the
//! contributions alone, and not on the index of an element, the size of the slots, or the algorithm. A function of
//! the caller need not commute.
//!
//! If all ranks can access every rank's buffer, an all-reduce takes two rounds for any length. In the first each rank
//! posts the address of its buffer. When all have, each rank reduces its own chunk of all buffers in place and writes
//! the result into all of them. In the second each rank posts that it is done. No rank leaves before all are done.

use std::ops::Range;

use super::partition::{Partition, chunk};
use super::{Action, CollectiveSpec};
use crate::types::{Rank, WorldSize};

/// Elements that a rank posts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Put {
    /// Their range in its buffer.
    pub range: Range<usize>,
    /// The index in the slot where they begin.
    pub at: usize,
}

/// Elements that a rank takes from a slot, perhaps its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Take {
    /// The slot's rank.
    pub from: Rank,
    /// The index in the slot where they begin.
    pub at: usize,
    /// Their range in the buffer.
    pub range: Range<usize>,
    /// How they are used. The element in the buffer is the left operand.
    pub action: Action,
}

/// Elements of a rank's buffer that it reduces: its own contribution is there, the others' are in their slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OrderedReduce {
    /// Their range in its buffer, which gets the result.
    pub range: Range<usize>,
    /// The index in the others' slots where they begin.
    pub at: usize,
    /// Whether the rank also posts the result in the next round, at the beginning of its slot. It is copied there
    /// while it is still in the processor's L1 cache.
    pub is_posted_next: bool,
}

/// Elements of all ranks' buffers that this rank reduces in place, writing the result into all of them. No other rank
/// reads or writes these.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exchange {
    /// Their range in each buffer.
    pub range: Range<usize>,
}

/// The part of one rank in a round.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// The elements that it posts. A post without elements is a signal.
    pub puts: Vec<Put>,
    /// The elements that it reduces, of all ranks in rank order.
    pub ordered_reduce: Option<OrderedReduce>,
    /// The exchange that replaces all else if every rank has posted the address of its whole buffer
    /// ([`RoundPlan::go_in_place`]). Such a rank posts nothing else; the others read its buffer instead of its slot.
    pub exchange: Option<Exchange>,
    /// The elements that it takes, in this order. An empty range waits until the rank has posted.
    pub takes: Vec<Take>,
}

/// The part of one rank in one operation. All ranks have the same number of rounds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoundPlan {
    world: WorldSize,
    rank: Rank,
    /// The number of elements of a slot.
    slot: usize,
    spec: CollectiveSpec,
    /// Every rank reduces everything, in one round.
    is_one_shot: bool,
    /// All ranks' buffers are reduced in place.
    is_in_place: bool,
}

impl RoundPlan {
    /// The rounds of `rank`, in slots of this many elements: at least one for each rank. In an all-reduce of at most
    /// `one_shot` elements every rank reduces everything.
    ///
    /// # Panics
    ///
    /// If not all ranks know the lengths of all parts, which determine the number of rounds.
    pub fn new(world: WorldSize, rank: Rank, slot: usize, one_shot: usize, spec: CollectiveSpec) -> Self {
        assert!(spec.is_known(), "all ranks have as many rounds");
        let slot = slot.max(world.as_usize());
        let is_one_shot = matches!(spec, CollectiveSpec::AllReduce { count } if count <= slot.min(one_shot));
        Self { world, rank, slot, spec, is_one_shot, is_in_place: false }
    }

    /// Continues without slots: by the round with [`Round::exchange`] all ranks have posted their buffers' addresses,
    /// so all decide the same.
    pub fn go_in_place(&mut self) {
        self.is_in_place = true;
    }

    /// The number of rounds, at least one.
    pub fn rounds(&self) -> usize {
        let longest =
            |partition: &Partition| self.world.ranks().map(|rank| partition.range(rank).len()).max();
        let rounds = match &self.spec {
            CollectiveSpec::Barrier => 1,
            CollectiveSpec::AllReduce { .. } if self.is_one_shot => 1,
            CollectiveSpec::AllReduce { .. } if self.is_in_place => 2,
            CollectiveSpec::AllReduce { count } | CollectiveSpec::Reduce { count, .. } => {
                return 2 * count.div_ceil(self.slot).max(1);
            }
            CollectiveSpec::ReduceScatter(partition) | CollectiveSpec::Scatter { partition, .. } => {
                longest(partition).unwrap_or_default().div_ceil(self.share())
            }
            CollectiveSpec::AllGather(partition) | CollectiveSpec::Gather { partition, .. } => {
                longest(partition).unwrap_or_default().div_ceil(self.slot)
            }
            CollectiveSpec::AllToAll { send, .. } => longest(send).unwrap_or_default().div_ceil(self.share()),
            CollectiveSpec::Broadcast { count, .. }
            | CollectiveSpec::Scan { count }
            | CollectiveSpec::Exscan { count } => count.div_ceil(self.slot),
        };
        rounds.max(1)
    }

    /// The number of elements of a slot for each rank, if a rank posts elements for each.
    fn share(&self) -> usize {
        self.slot / self.world.as_usize()
    }

    /// Replaces the content of `round` by this rank's part in the round with this number, counted from 0.
    pub fn fill(&self, number: usize, round: &mut Round) {
        round.puts.clear();
        round.ordered_reduce = None;
        round.exchange = None;
        round.takes.clear();
        let share = self.share();
        let of_slot = |range: Range<usize>| piece(&range, number, self.slot);
        let of_share = |range: Range<usize>| piece(&range, number, share);
        match &self.spec {
            CollectiveSpec::Barrier => self.take_from_others(round, |_| (0, 0..0)),
            CollectiveSpec::AllReduce { count } if self.is_one_shot => {
                round.put(0..*count, 0);
                self.reduce(round, 0, &(0..*count), self.world.get());
            }
            CollectiveSpec::AllReduce { count } => self.all_reduce(round, number, *count),
            CollectiveSpec::Reduce { count, root } => self.two_shot(round, number, *count, Some(*root)),
            CollectiveSpec::ReduceScatter(partition) => {
                for rank in self.others() {
                    round.put(of_share(partition.range(rank)), rank.index() * share);
                }
                let range = of_share(partition.range(self.rank));
                round.ordered_reduce =
                    Some(OrderedReduce { range, at: self.rank.index() * share, is_posted_next: false });
            }
            CollectiveSpec::AllGather(partition) => {
                round.put(of_slot(partition.range(self.rank)), 0);
                self.take_from_others(round, |rank| (0, of_slot(partition.range(rank))));
            }
            CollectiveSpec::Broadcast { count, root } if self.rank == *root => {
                round.put(of_slot(0..*count), 0);
            }
            CollectiveSpec::Broadcast { count, root } => {
                round.take(*root, 0, of_slot(0..*count), Action::Copy);
            }
            CollectiveSpec::Gather { partition, root } if self.rank == *root => {
                self.take_from_others(round, |rank| (0, of_slot(partition.range(rank))));
            }
            CollectiveSpec::Gather { partition, .. } => {
                round.put(of_slot(0..partition.range(self.rank).len()), 0);
            }
            CollectiveSpec::Scatter { partition, root } if self.rank == *root => {
                for rank in self.others() {
                    round.put(of_share(partition.range(rank)), rank.index() * share);
                }
            }
            CollectiveSpec::Scatter { partition, root } => {
                let own = of_share(0..partition.range(self.rank).len());
                round.take(*root, self.rank.index() * share, own, Action::Copy);
            }
            CollectiveSpec::AllToAll { send, receive, .. } => {
                for rank in self.others() {
                    round.put(of_share(send.range(rank)), rank.index() * share);
                }
                self.take_from_others(round, |rank| {
                    let part = of_share(receive.range(rank));
                    (self.rank.index() * share, send.total() + part.start..send.total() + part.end)
                });
            }
            CollectiveSpec::Scan { count } => {
                let own = of_slot(0..*count);
                round.put(own.clone(), 0);
                self.reduce(round, 0, &own, self.rank.get() + 1);
            }
            CollectiveSpec::Exscan { count } => {
                let own = of_slot(0..*count);
                round.put(own.clone(), 0);
                self.reduce(round, 0, &(count + own.start..count + own.end), self.rank.get());
            }
        }
    }

    /// By slots or in place; the first round decides.
    fn all_reduce(&self, round: &mut Round, number: usize, count: usize) {
        if self.is_in_place && number > 0 {
            return self.take_from_others(round, |_| (0, 0..0));
        }
        self.two_shot(round, number, count, None);
        if number == 0 {
            round.exchange = Some(Exchange { range: chunk(count, self.world, self.rank) });
        }
    }

    /// Every rank posts a block, reduces its own chunk of all blocks, and posts that next, for the root alone or for
    /// all.
    fn two_shot(&self, round: &mut Round, number: usize, count: usize, root: Option<Rank>) {
        let block = piece(&(0..count), number / 2, self.slot);
        let partition = Partition::even(block.len(), self.world);
        let chunk = |rank| {
            let chunk = partition.range(rank);
            block.start + chunk.start..block.start + chunk.end
        };
        let own = chunk(self.rank);
        if number.is_multiple_of(2) {
            // No other rank needs its own chunk.
            round.put(block.start..own.start, 0);
            round.put(own.end..block.end, own.end - block.start);
            round.ordered_reduce =
                Some(OrderedReduce { at: own.start - block.start, range: own, is_posted_next: true });
            return;
        }
        if root.is_none_or(|root| root == self.rank) {
            self.take_from_others(round, |rank| (0, chunk(rank)));
        }
    }

    /// Takes the contributions of the first ranks, up to this number, in rank order.
    fn reduce(&self, round: &mut Round, at: usize, range: &Range<usize>, ranks: u32) {
        for rank in self.world.ranks().take(ranks as usize) {
            let action = match rank.get() {
                0 => Action::Copy,
                rank if rank + 1 == self.world.get() => Action::ReduceLast,
                _ => Action::Reduce,
            };
            round.take(rank, at, range.clone(), action);
        }
    }

    /// Takes elements from the beginning of each other rank's slot, starting with the rank after this one.
    fn take_from_others(&self, round: &mut Round, what: impl Fn(Rank) -> (usize, Range<usize>)) {
        for rank in self.others() {
            let (at, range) = what(rank);
            round.take(rank, at, range, Action::Copy);
        }
    }

    fn others(&self) -> impl Iterator<Item = Rank> {
        (1..self.world.get()).map(|distance| self.world.after(self.rank, distance))
    }
}

impl Round {
    fn put(&mut self, range: Range<usize>, at: usize) {
        self.puts.push(Put { range, at });
    }

    fn take(&mut self, from: Rank, at: usize, range: Range<usize>, action: Action) {
        self.takes.push(Take { from, at, range, action });
    }
}

/// The piece with this number, if a range is cut into pieces of this many elements: empty after the last one.
fn piece(range: &Range<usize>, number: usize, elements: usize) -> Range<usize> {
    let start = range.end.min(range.start + number * elements);
    start..range.end.min(start + elements)
}
