//! Where the ranks of a group that share memory do their collectives: a board, and one operation after the other on it.

use std::collections::VecDeque;
use std::ops::Range;

use super::call::Site;
use super::memory::Lender;
use super::profile::{Meter, Part};
use crate::reduce::Kernels;
use crate::schedule::Action;
use crate::schedule::board::{Fold, Plan, Put, Round};
use crate::transport::shm::{Board, HEADER_WORDS, Header};
use crate::types::{Contract, Rank};
use crate::wire::{self, CONTRACT_WORDS};

/// Bytes that are copied or reduced at a time: what several ranks contribute to them stays in a processor's first cache.
const PIECE_BYTES: usize = 16 << 10;

/// How many past operations are remembered: others are at most a few behind.
const HISTORY_MAX: usize = 8;

/// A rank's place at the board.
pub(super) struct Desk {
    board: Board,
    /// The last round of this rank that is over.
    round: u64,
    /// The number of the next operation that is taken on, and of the oldest that is not over.
    sequence: u64,
    current: u64,
    /// What is done in a round, kept so that its memory is.
    scratch: Round,
    /// A piece of what lower ranks contributed.
    lower: Vec<u64>,
    /// The last operations that were taken on.
    history: VecDeque<Asked>,
    /// The operation whose round was posted last, unless all others have been found to agree on it.
    unseen: Option<Asked>,
    meter: Meter,
}

/// What this rank asked for in an operation, and where.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) sequence: u64,
    pub(super) contract: Contract,
    pub(super) site: Site,
    header: Header,
}

/// An operation at the desk.
pub(super) struct Errand {
    plan: Plan,
    rounds: usize,
    asked: Asked,
    kernels: Option<Kernels>,
    divisor: u32,
    element_bytes: usize,
    /// The round it is in, from 0, and whether that has been posted.
    number: usize,
    is_posted: bool,
}

/// What a look at the board has come to.
pub(super) enum Look {
    /// The operation is over.
    Done,
    /// Others have to do something first.
    Waits,
    /// This rank asked for one thing, another for something else; `None` if nobody can tell what.
    Differs(Asked, Rank, Option<Contract>),
}

/// What an operation is.
pub(super) struct Order {
    pub(super) plan: Plan,
    pub(super) kernels: Option<Kernels>,
    pub(super) divisor: u32,
}

impl Desk {
    pub(super) fn new(board: Board, meter: Meter) -> Self {
        Self {
            board,
            round: 0,
            sequence: 0,
            current: 0,
            scratch: Round::default(),
            lower: vec![0; PIECE_BYTES / size_of::<u64>()],
            history: VecDeque::new(),
            unseen: None,
            meter,
        }
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.board.size().slot_bytes
    }

    /// The board, to fall asleep at and to wake up.
    pub(super) fn board(&self) -> &Board {
        &self.board
    }

    /// Takes on the next operation. They have to be done in the order in which they were taken on.
    pub(super) fn take_on(&mut self, (contract, site): (Contract, Site), order: Order) -> Errand {
        let Order { plan, kernels, divisor } = order;
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        let asked = Asked::new(self.sequence, contract, site);
        self.history.push_back(asked);
        self.sequence += 1;
        Errand {
            rounds: plan.rounds(),
            plan,
            asked,
            kernels,
            divisor,
            element_bytes: contract.dtype.size_bytes(),
            number: 0,
            is_posted: false,
        }
    }
}

impl Desk {
    /// Does what can be done for an operation, the oldest that is not over. `memory` is its whole buffer; `wake` is told of
    /// ranks that sleep and have to know of what was posted.
    ///
    /// # Panics
    ///
    /// If a function of the program's own does.
    pub(super) fn look(
        &mut self,
        errand: &mut Errand,
        memory: &mut Lender<'_>,
        mut wake: impl FnMut(Rank),
    ) -> Look {
        loop {
            let round = self.round + 1;
            if !errand.is_posted {
                if !self.board.may_write(round) {
                    return Look::Waits;
                }
                if let Some(differs) = self.look_back() {
                    return differs;
                }
                errand.plan.fill(errand.number, &mut self.scratch);
                let mut started = self.meter.start();
                let end = self.scratch.puts.iter().map(|put| put.at + put.range.len()).max();
                let bytes = end.unwrap_or_default() * errand.element_bytes;
                let slot = if bytes == 0 { &mut [] } else { self.board.write(round, bytes) };
                for Put { range, at } in &self.scratch.puts {
                    let start = at * errand.element_bytes;
                    let bytes = &memory.bytes()[errand.bytes(range)];
                    slot[start..start + bytes.len()].copy_from_slice(bytes);
                }
                self.board.post(round, &errand.asked.header);
                self.meter.end(Part::Send, &mut started);
                errand.is_posted = true;
                self.board.take_sleepers(|rank| wake(Rank::new(rank as u32)));
            }
            for from in self.sources() {
                let Some(posted) = self.board.posted(from, round) else { return Look::Waits };
                if let Some(differs) = errand.asked.differs(Rank::new(from as u32), &posted.header) {
                    return differs;
                }
            }
            let has_seen_all = self.sources().count() + 1 >= self.board.size().ranks;
            self.unseen = (!has_seen_all).then_some(errand.asked);
            if let Some(fold) = self.scratch.fold.take() {
                self.fold(round, errand, &fold, memory.bytes_mut());
            }
            self.take(round, errand, memory.bytes_mut());
            self.round = round;
            errand.number += 1;
            errand.is_posted = false;
            if errand.number == errand.rounds {
                self.current += 1;
                return Look::Done;
            }
        }
    }

    /// The other ranks from whose slots something is taken in this round, each once.
    fn sources(&self) -> impl Iterator<Item = usize> {
        let folding = if self.scratch.fold.is_some() { self.board.size().ranks } else { 0 };
        let all = (0..folding).chain(self.scratch.takes.iter().map(|take| take.from.index()));
        all.filter(|&rank| rank != self.board.rank())
    }

    /// Whether all meant the same in the round before. By now they have posted it; this rank may have looked only at those
    /// from which it took something.
    fn look_back(&mut self) -> Option<Look> {
        let posted = self.unseen.take()?;
        let ranks = (0..self.board.size().ranks).filter(|&rank| rank != self.board.rank());
        let headers = ranks.filter_map(|rank| Some((rank, self.board.posted(rank, self.round)?.header)));
        headers.into_iter().find_map(|(rank, header)| posted.differs(Rank::new(rank as u32), &header))
    }

    /// The last operations that were taken on.
    pub(super) fn history(&self) -> impl Iterator<Item = Asked> {
        self.history.iter().copied()
    }

    /// Whether operations that were taken on are not over.
    pub(super) fn is_busy(&self) -> bool {
        self.current != self.sequence
    }

    /// Whether an operation is the oldest that is not over.
    pub(super) fn is_next(&self, errand: &Errand) -> bool {
        self.current == errand.asked.sequence
    }

    /// Whether another look would find something to do.
    pub(super) fn has_news(&self, errand: &Errand) -> bool {
        let round = self.round + 1;
        if errand.is_posted {
            self.sources().all(|from| self.board.has_posted(from, round))
        } else {
            self.board.may_write(round)
        }
    }

    /// The round, and the ranks that have to have posted it, before another look would find something to do.
    pub(super) fn wanted(&self, errand: &Errand) -> (u64, Vec<usize>) {
        let round = self.round + 1;
        if errand.is_posted {
            (round, self.sources().collect())
        } else {
            let ranks = 0..self.board.size().ranks;
            (round - 1, ranks.filter(|&rank| rank != self.board.rank()).collect())
        }
    }

    /// The ranks that have to post before an operation, the oldest, can go on.
    pub(super) fn awaited(&self, errand: &Errand) -> impl Iterator<Item = Rank> {
        let (round, is_posted) = (self.round + 1, errand.is_posted);
        let ranks = (0..self.board.size().ranks).map(|rank| Rank::new(rank as u32));
        ranks.filter(move |rank| {
            if is_posted {
                let is_source = self.sources().any(|from| from == rank.index());
                is_source && !self.board.has_posted(rank.index(), round)
            } else {
                rank.index() != self.board.rank() && !self.board.has_posted(rank.index(), round - 1)
            }
        })
    }

    /// Reduces what the round asks for, all of which has been posted, piece by piece.
    fn fold(&mut self, round: u64, errand: &Errand, fold: &Fold, memory: &mut [u8]) {
        let (rank, ranks) = (self.board.rank(), self.board.size().ranks);
        let (all, at) = (errand.bytes(&fold.range), fold.at * errand.element_bytes);
        let mut started = self.meter.start();
        for start in all.clone().step_by(PIECE_BYTES) {
            let own = &mut memory[start..all.end.min(start + PIECE_BYTES)];
            let place = at + start - all.start..at + start - all.start + own.len();
            let of = |from: usize| Some(self.board.posted(from, round)?.bytes(place.clone()));
            let action = |from| if from + 1 == ranks { Action::ReduceLast } else { Action::Reduce };
            if rank > 0
                && let Some(first) = of(0)
            {
                let lower = &mut bytemuck::cast_slice_mut(&mut self.lower)[..own.len()];
                if rank > 1 {
                    lower.copy_from_slice(first);
                    self.meter.end(Part::Receive, &mut started);
                }
                for arrived in (1..rank).filter_map(of) {
                    errand.apply(Action::Reduce, lower, arrived);
                }
                errand.apply_before(action(rank), own, if rank > 1 { lower } else { first });
            }
            for from in rank + 1..ranks {
                let Some(arrived) = of(from) else { return };
                errand.apply(action(from), own, arrived);
            }
            self.meter.end(Part::Reduce, &mut started);
            if fold.is_posted_next {
                let start = start - all.start;
                self.board.write(round + 1, all.len())[start..start + own.len()].copy_from_slice(own);
                self.meter.end(Part::Send, &mut started);
            }
        }
    }

    /// Takes from the slots what the round asks for, all of which has been posted.
    fn take(&self, round: u64, errand: &Errand, memory: &mut [u8]) {
        let mut takes = &self.scratch.takes[..];
        let mut started = self.meter.start();
        while let Some(first) = takes.first() {
            // What is reduced into the same elements is taken piece by piece.
            let same = takes.iter().take_while(|take| take.range == first.range).count();
            let (run, rest) = takes.split_at(same);
            takes = rest;
            let all = errand.bytes(&first.range);
            for start in all.clone().step_by(PIECE_BYTES) {
                let own = &mut memory[start..all.end.min(start + PIECE_BYTES)];
                for take in run {
                    let Some(posted) = self.board.posted(take.from.index(), round) else { return };
                    let at = take.at * errand.element_bytes + start - all.start;
                    errand.apply(take.action, own, posted.bytes(at..at + own.len()));
                    self.meter.end(Part::of(take.action), &mut started);
                }
            }
        }
    }
}

impl Asked {
    fn new(sequence: u64, contract: Contract, site: Site) -> Self {
        let mut header: Header = [0; HEADER_WORDS];
        header[..CONTRACT_WORDS].copy_from_slice(&wire::contract_to_words(&contract));
        header[HEADER_WORDS - 1] = sequence;
        Self { sequence, contract, site, header }
    }

    /// Whether a rank that has posted this header asks for something else.
    fn differs(self, rank: Rank, header: &Header) -> Option<Look> {
        let is_same = *header == self.header;
        (!is_same).then(|| Look::Differs(self, rank, wire::contract_of_words(header)))
    }
}

impl Errand {
    /// Its number on the board.
    pub(super) fn sequence(&self) -> u64 {
        self.asked.sequence
    }

    /// What may be the program's own.
    pub(super) fn into_kernels(self) -> Option<Kernels> {
        self.kernels
    }

    /// What lower ranks contributed is `lower`, this rank's contribution stands in `own`.
    fn apply_before(&self, action: Action, own: &mut [u8], lower: &[u8]) {
        let Some(kernels) = &self.kernels else { return };
        let kernel = if action == Action::ReduceLast { &kernels.reduce_last } else { &kernels.reduce };
        kernel.apply(own, lower, self.divisor);
    }

    /// What lower ranks contributed stands in `own`.
    fn apply(&self, action: Action, own: &mut [u8], arrived: &[u8]) {
        match (action, &self.kernels) {
            (Action::Reduce, Some(kernels)) => kernels.reduce.apply_after(own, arrived, self.divisor),
            (Action::ReduceLast, Some(kernels)) => {
                kernels.reduce_last.apply_after(own, arrived, self.divisor);
            }
            _ => own.copy_from_slice(arrived),
        }
    }

    /// The bytes of elements.
    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.element_bytes..range.end * self.element_bytes
    }
}
