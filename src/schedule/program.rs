//! Programs of ranks that share memory. A program lists the rounds of one rank in one operation. In each round, every rank
//! *posts* data: it copies the data into its slot of the shared memory and signals that they are there. Then it *takes* or
//! *folds* data from the slots of ranks that have posted: it copies the data into its own buffer, or reduces them in rank order.
//! If the data do not fit into a slot, each round handles one block of the data.
//!
//! A group makes a program once and runs it in many operations.

use std::ops::Range;
use std::sync::Arc;

use crate::types::{Rank, RankSet};

/// What one rank does in one operation. The programs of all ranks have the same number of rounds, which is at least one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    pub phases: Box<[Phase]>,
    /// The program that the ranks run instead if all ranks post the addresses of their buffers in the first round, and not
    /// elements; `None` if the ranks must not post addresses. Its first round has the same sources.
    pub if_all_expose: Option<Arc<Program>>,
}

/// Rounds that are repeated. Repetition k works on block k of each [`Blocks`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Phase {
    /// The rounds of one repetition, one after another.
    pub rounds: Box<[Round]>,
    pub times: usize,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Round {
    /// The elements that the rank posts. If there are none, it posts only a signal, or the [`Fold`] of the round before.
    pub writes: Box<[SlotWrite]>,
    /// If a slot is divided into a part for each other rank, which only this rank reads: the elements of a part. Otherwise: 0.
    pub part_len: usize,
    /// The other ranks that must have posted the round before this rank does its work.
    pub sources: RankSet,
    pub work: RoundWork,
}

/// What a rank does with the posts of a round.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RoundWork {
    /// The rank copies elements from slots into its buffer, in this order.
    Take(Box<[Take]>),
    /// The rank reduces elements.
    Fold(Fold),
    /// The rank reads these elements in the buffers of all ranks, reduces them in rank order, and writes the result into the
    /// buffers of all ranks. No other rank reads or writes these elements.
    FoldInPlace(Range<usize>),
}

/// Elements that a rank copies into its slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotWrite {
    /// The elements of the rank's buffer.
    pub elements: Blocks,
    /// The [index](crate::types::part_index) of the part of the slot; 0 if the slot is not divided.
    pub part: usize,
}

/// Elements that a rank copies from the beginning of another rank's slot, or of its part of this slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Take {
    pub from: Rank,
    /// The elements of the rank's buffer that are replaced.
    pub elements: Blocks,
}

/// Contributions that a rank reduces in rank order. The rank reads its own contribution from its buffer, and the contributions of
/// other ranks from the beginning of their slots, or of its part of these slots, or from their buffers if they posted addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fold {
    /// The number of contributions. They come from the first ranks.
    pub ranks: u32,
    /// The elements of the rank's buffer that the result replaces.
    pub elements: Blocks,
    /// Whether the rank also posts the result in the next round, at the beginning of its slot. The rank copies the result to
    /// the slot while the result is still in the processor's L1 cache.
    pub is_posted_next: bool,
}

/// A range of elements that is divided into blocks: one for each repetition of a phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blocks {
    start: usize,
    /// The end of the range. A block that would begin after the end is empty.
    end: usize,
    /// The distance between the beginnings of two blocks.
    stride: usize,
    /// The length of a block that the range does not cut off.
    length: usize,
}

/// The progress of one rank in a program. Its owner moves the elements: the driver in shared memory, or a proof.
pub struct Execution {
    program: Arc<Program>,
    /// The index of the current phase, its repetition, and the index of the current round in the phase.
    position: (usize, usize, usize),
    is_posted: bool,
}

impl Blocks {
    /// Divides a range into blocks of `length` elements.
    pub fn of(range: Range<usize>, length: usize) -> Self {
        Self { start: range.start, end: range.end, stride: length, length }
    }

    /// Returns blocks that are as long as `first`. Each block begins `stride` elements after the block before.
    pub fn repeated(first: Range<usize>, stride: usize) -> Self {
        Self { start: first.start, end: usize::MAX, stride, length: first.len() }
    }

    /// Returns the elements of block `number`, counted from 0.
    pub fn block(&self, number: usize) -> Range<usize> {
        let start = self.end.min(self.start + number * self.stride);
        start..self.end.min(start + self.length)
    }
}

impl Round {
    /// Returns the number of elements of the slot that the rank writes, up to the end of the last of [`Round::writes`].
    pub fn written_len(&self, block: usize) -> usize {
        let end = |write: &SlotWrite| write.part * self.part_len + write.elements.block(block).len();
        self.writes.iter().map(end).max().unwrap_or_default()
    }

    /// Returns the number of elements that the rank needs from the slot of `from`, or from its part of this slot.
    pub fn taken_len(&self, from: Rank, block: usize) -> usize {
        match &self.work {
            RoundWork::Take(takes) => takes.iter().find(|take| take.from == from).map(|take| take.elements),
            RoundWork::Fold(fold) => Some(fold.elements),
            RoundWork::FoldInPlace(_) => None,
        }
        .map_or(0, |elements| elements.block(block).len())
    }
}

impl Execution {
    pub fn new(program: Arc<Program>) -> Self {
        Self { program, position: (0, 0, 0), is_posted: false }
    }

    /// Returns the current round, and the number of its block.
    pub fn round(&self) -> (&Round, usize) {
        let (phase, repetition, round) = self.position;
        (&self.program.phases[phase].rounds[round], repetition)
    }

    /// Returns the round after the current one, if it is in the same repetition.
    pub fn next_round(&self) -> Option<&Round> {
        let (phase, _, round) = self.position;
        self.program.phases.get(phase)?.rounds.get(round + 1)
    }

    /// Returns whether a rank may post the address of its buffer in the current round, instead of elements.
    pub fn may_expose(&self) -> bool {
        self.program.if_all_expose.is_some() && self.position == (0, 0, 0)
    }

    /// Returns the ranks that must have posted the current round before this rank does the work of the round. Returns `None` if
    /// this rank has not posted the round itself: then it waits for the posts of all ranks in the round before.
    pub fn awaited(&self) -> Option<RankSet> {
        self.is_posted.then(|| self.round().0.sources)
    }

    pub fn handle_posted(&mut self) {
        self.is_posted = true;
    }

    /// Records that all ranks have posted the addresses of their buffers in this round. Call it before the round's work is done.
    pub fn handle_all_exposed(&mut self) {
        if let Some(in_place) = self.program.if_all_expose.clone().filter(|_| self.may_expose()) {
            self.program = in_place;
        }
    }

    /// Records that the work of the current round is done. Returns whether the operation is complete.
    pub fn handle_worked(&mut self) -> bool {
        let (phase, repetition, round) = self.position;
        let current = &self.program.phases[phase];
        self.is_posted = false;
        self.position = if round + 1 < current.rounds.len() {
            (phase, repetition, round + 1)
        } else if repetition + 1 < current.times {
            (phase, repetition + 1, 0)
        } else {
            (phase + 1, 0, 0)
        };
        self.position.0 == self.program.phases.len()
    }
}
