//! Where the ranks of a group that share memory do their collectives: a board, and one operation after the other on it.

mod bytes;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Weak;

use super::memory::Lender;
use super::profile::Meter;
use crate::reduce::Kernels;
use crate::schedule::board::{Plan, Round};
use crate::transport::shm::{BUFFERS_MAX, Board, HEADER_WORDS, Header, OwnWindow, Window};
use crate::types::{Contract, Rank, Site};
use crate::wire::{self, CONTRACT_WORDS};

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
    /// Whether the others have been told where its buffer lies, to read and write it there.
    is_lent: bool,
}

/// What a look at the board has come to.
pub(super) enum Look {
    /// The operation is over.
    Done,
    /// Others have to do something first.
    Waits,
    /// This rank asked for one thing, another for something else; `None` if nobody can tell what.
    Differs(Asked, Rank, Option<Contract>),
    /// A rank has posted what cannot be, and this is wrong with it.
    Broken(Rank, &'static str),
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
            lower: vec![0; bytes::PIECE_BYTES / size_of::<u64>()],
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
            is_lent: false,
        }
    }
}

/// Buffers that ranks have of the group.
impl Desk {
    /// Whether this rank has as many as it may.
    pub(super) fn is_full(&mut self) -> bool {
        self.prune();
        self.board.own_buffers() >= BUFFERS_MAX
    }

    /// Takes note of a buffer of each rank, the others' in rank order. `alive` has to die before the rank's own is unmapped.
    pub(super) fn shelve(&mut self, own: &OwnWindow, alive: Weak<()>, others: Vec<Window>) {
        self.board.shelve(own, alive, others);
    }

    /// Forgets buffers that are gone, and gives up their mappings unless an operation may still need them.
    pub(super) fn prune(&mut self) {
        let is_busy = self.is_busy();
        self.board.prune(is_busy);
    }

    /// An operation has failed on this rank, and its buffer goes back to whoever lent it: others must not be at it any more.
    pub(super) fn take_back(&self, errand: &Errand, memory: &[u8]) {
        if errand.is_lent {
            self.board.take_back(memory);
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
                self.post(round, errand, memory);
                errand.is_posted = true;
                self.board.take_sleepers(|rank| wake(Rank::new(rank as u32)));
            }
            for from in self.sources() {
                let Some(posted) = self.board.posted(from, round) else { return Look::Waits };
                let from = Rank::new(from as u32);
                if let Some(differs) = errand.asked.differs(from, &posted.header) {
                    return differs;
                }
                if posted.is_lent && self.scratch.exchange.is_none() {
                    return Look::Broken(from, "it lent its buffer where nobody can take it");
                }
            }
            let has_seen_all = self.sources().count() + 1 >= self.board.size().ranks;
            self.unseen = (!has_seen_all).then_some(errand.asked);
            if let Err(broken) = self.work(round, errand, memory.bytes_mut()) {
                return broken;
            }
            self.round = round;
            errand.number += 1;
            errand.is_posted = false;
            if errand.number == errand.rounds {
                self.current += 1;
                return Look::Done;
            }
        }
    }

    /// Posts the round: that its buffer lies where others can read and write it, if it does and that is of use, or elements.
    fn post(&mut self, round: u64, errand: &mut Errand, memory: &mut Lender<'_>) {
        let spot = match memory {
            Lender::Write(bytes) if self.scratch.exchange.is_some() => {
                self.board.spot_of(bytes, errand.element_bytes)
            }
            _ => None,
        };
        errand.is_lent |= spot.is_some();
        match spot {
            Some(spot) => self.board.post_lent(round, &errand.asked.header, spot),
            None => self.put(round, errand, memory.bytes()),
        }
    }

    /// Does what the round asks for, all of which has been posted.
    fn work(&mut self, round: u64, errand: &mut Errand, memory: &mut [u8]) -> Result<(), Look> {
        if let Some(exchange) = self.scratch.exchange.take() {
            let loans = self.board.take_loans(round, memory.len(), errand.element_bytes);
            let have_others_lent =
                loans.map_err(|(rank, what)| Look::Broken(Rank::new(rank as u32), what))?;
            if have_others_lent && errand.is_lent {
                errand.plan.go_in_place();
                errand.rounds = errand.plan.rounds();
                self.scratch.fold = None;
                self.exchange(round, errand, &exchange.range, memory);
            }
        }
        if let Some(fold) = self.scratch.fold.take() {
            self.fold(round, errand, &fold, memory);
        }
        self.take(round, errand, memory);
        Ok(())
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

    /// The bytes of elements.
    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.element_bytes..range.end * self.element_bytes
    }
}
