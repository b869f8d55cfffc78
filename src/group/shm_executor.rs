//! Where the ranks of a group that share memory do their collectives: a board, and one operation after the other on it.

mod bytes;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Weak;

use super::memory::BufferAccess;
use super::profile::Meter;
use crate::reduce::Kernels;
use crate::schedule::rounds::{Round, RoundPlan};
use crate::transport::shm::{BUFFERS_MAX, ExposedBuffer, HEADER_WORDS, Header, RemoteBuffer, ShmRounds};
use crate::types::{Contract, Rank, Site};
use crate::wire::{self, CONTRACT_WORDS};

/// How many past operations are remembered: others are at most a few behind.
const HISTORY_MAX: usize = 8;

/// A rank's place at the board.
pub(super) struct ShmExecutor {
    rounds: ShmRounds,
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
    history: VecDeque<ShmContract>,
    /// The operation whose round was posted last, unless all others have been found to agree on it.
    unseen: Option<ShmContract>,
    meter: Meter,
}

/// What this rank asked for in an operation, and where.
#[derive(Clone, Copy)]
pub(super) struct ShmContract {
    pub(super) sequence: u64,
    pub(super) contract: Contract,
    pub(super) site: Site,
    header: Header,
}

/// An operation at the desk.
pub(super) struct ShmOperation {
    plan: RoundPlan,
    rounds: usize,
    asked: ShmContract,
    kernels: Option<Kernels>,
    divisor: u32,
    element_bytes: usize,
    /// The round it is in, from 0, and whether that has been posted.
    number: usize,
    is_posted: bool,
    /// Whether the others have been told where its buffer lies, to read and write it there.
    is_exposed: bool,
}

/// What a look at the board has come to.
pub(super) enum ShmPoll {
    /// The operation is over.
    Done,
    /// Others have to do something first.
    Waits,
    /// This rank asked for one thing, another for something else; `None` if nobody can tell what.
    Differs(ShmContract, Rank, Option<Contract>),
    /// A rank has posted what cannot be, and this is wrong with it.
    Broken(Rank, &'static str),
}

/// What an operation is.
pub(super) struct ShmRequest {
    pub(super) plan: RoundPlan,
    pub(super) kernels: Option<Kernels>,
    pub(super) divisor: u32,
}

impl ShmExecutor {
    pub(super) fn new(rounds: ShmRounds, meter: Meter) -> Self {
        Self {
            rounds,
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
        self.rounds.size().slot_bytes
    }

    /// The board, to fall asleep at and to wake up.
    pub(super) fn rounds(&self) -> &ShmRounds {
        &self.rounds
    }

    /// Takes on the next operation. They have to be done in the order in which they were taken on.
    pub(super) fn add_operation(
        &mut self,
        (contract, site): (Contract, Site),
        shm_request: ShmRequest,
    ) -> ShmOperation {
        let ShmRequest { plan, kernels, divisor } = shm_request;
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        let asked = ShmContract::new(self.sequence, contract, site);
        self.history.push_back(asked);
        self.sequence += 1;
        ShmOperation {
            rounds: plan.round_count(),
            plan,
            asked,
            kernels,
            divisor,
            element_bytes: contract.dtype.size_bytes(),
            number: 0,
            is_posted: false,
            is_exposed: false,
        }
    }
}

/// Buffers that ranks have of the group.
impl ShmExecutor {
    /// Whether this rank has as many as it may.
    pub(super) fn is_full(&mut self) -> bool {
        self.prune();
        self.rounds.own_buffers() >= BUFFERS_MAX
    }

    /// Takes note of a buffer of each rank, the others' in rank order. `alive` has to die before the rank's own is unmapped.
    pub(super) fn register_buffer(
        &mut self,
        own: &mut ExposedBuffer,
        alive: Weak<()>,
        others: Vec<RemoteBuffer>,
    ) {
        self.rounds.register_buffer(own, alive, others);
    }

    /// Forgets buffers that are gone, and gives up their mappings unless an operation may still need them.
    pub(super) fn prune(&mut self) {
        let is_busy = self.is_busy();
        self.rounds.prune(is_busy);
    }

    /// An operation has failed on this rank, and its buffer goes back to whoever lent it: others must not be at it any more.
    pub(super) fn stop_exposing(&mut self, shm_operation: &ShmOperation, memory: &BufferAccess<'_>) {
        if let Some(bytes) = memory.all_writable().filter(|_| shm_operation.is_exposed) {
            self.rounds.stop_exposing(bytes);
        }
    }
}

impl ShmExecutor {
    /// Does what can be done for an operation, the oldest that is not over. `memory` is its whole buffer; `wake` is told of
    /// ranks that sleep and have to know of what was posted.
    ///
    /// # Panics
    ///
    /// If a function of the program's own does.
    pub(super) fn poll(
        &mut self,
        shm_operation: &mut ShmOperation,
        memory: &mut BufferAccess<'_>,
        mut wake: impl FnMut(Rank),
    ) -> ShmPoll {
        loop {
            let round = self.round + 1;
            if !shm_operation.is_posted {
                if !self.rounds.may_write(round) {
                    return ShmPoll::Waits;
                }
                if let Some(differs) = self.check_previous_round() {
                    return differs;
                }
                shm_operation.plan.fill_round(shm_operation.number, &mut self.scratch);
                self.post(round, shm_operation, memory);
                shm_operation.is_posted = true;
                self.rounds.take_sleepers(|rank| wake(Rank::new(rank as u32)));
            }
            for from in self.sources() {
                let Some(posted) = self.rounds.posted(from, round) else { return ShmPoll::Waits };
                let from = Rank::new(from as u32);
                if let Some(differs) = shm_operation.asked.differs(from, &posted.header) {
                    return differs;
                }
                if posted.is_exposed && self.scratch.in_place_reduce.is_none() {
                    return ShmPoll::Broken(from, "it lent its buffer where nobody can take it");
                }
            }
            let has_seen_all = self.sources().count() + 1 >= self.rounds.size().ranks;
            self.unseen = (!has_seen_all).then_some(shm_operation.asked);
            if let Err(broken) = self.work(round, shm_operation, memory) {
                return broken;
            }
            self.round = round;
            shm_operation.number += 1;
            shm_operation.is_posted = false;
            if shm_operation.number == shm_operation.rounds {
                self.current += 1;
                return ShmPoll::Done;
            }
        }
    }

    /// Posts the round: that its buffer lies where others can read and write it, if it does and that is of use, or elements.
    fn post(&mut self, round: u64, shm_operation: &mut ShmOperation, memory: &BufferAccess<'_>) {
        let exposable = memory.all_writable().filter(|_| self.scratch.in_place_reduce.is_some());
        let buffer_ref =
            exposable.and_then(|bytes| self.rounds.buffer_ref(bytes, shm_operation.element_bytes));
        shm_operation.is_exposed |= buffer_ref.is_some();
        match buffer_ref {
            Some(buffer_ref) => self.rounds.post_exposed(round, &shm_operation.asked.header, buffer_ref),
            None => self.put(round, shm_operation, memory),
        }
    }

    /// Does what the round asks for, all of which has been posted.
    fn work(
        &mut self,
        round: u64,
        shm_operation: &mut ShmOperation,
        memory: &mut BufferAccess<'_>,
    ) -> Result<(), ShmPoll> {
        if let Some(in_place_reduce) = self.scratch.in_place_reduce.take() {
            let exposed_parts = self.rounds.collect_exposed(round, memory.len(), shm_operation.element_bytes);
            let have_others_lent =
                exposed_parts.map_err(|(rank, what)| ShmPoll::Broken(Rank::new(rank as u32), what))?;
            if have_others_lent && shm_operation.is_exposed {
                shm_operation.plan.reduce_remaining_rounds_in_place();
                shm_operation.rounds = shm_operation.plan.round_count();
                self.scratch.ordered_reduce = None;
                self.exchange(round, shm_operation, &in_place_reduce.range, memory);
            }
        }
        if let Some(ordered_reduce) = self.scratch.ordered_reduce.take() {
            self.ordered_reduce(round, shm_operation, &ordered_reduce, memory);
        }
        self.take(round, shm_operation, memory);
        Ok(())
    }

    /// The other ranks from whose slots something is taken in this round, each once.
    fn sources(&self) -> impl Iterator<Item = usize> {
        let folding = if self.scratch.ordered_reduce.is_some() { self.rounds.size().ranks } else { 0 };
        let all = (0..folding).chain(self.scratch.slot_reads.iter().map(|take| take.from.index()));
        all.filter(|&rank| rank != self.rounds.rank())
    }

    /// Whether all meant the same in the round before. By now they have posted it; this rank may have looked only at those
    /// from which it took something.
    fn check_previous_round(&mut self) -> Option<ShmPoll> {
        let posted = self.unseen.take()?;
        let ranks = (0..self.rounds.size().ranks).filter(|&rank| rank != self.rounds.rank());
        let headers = ranks.filter_map(|rank| Some((rank, self.rounds.posted(rank, self.round)?.header)));
        headers.into_iter().find_map(|(rank, header)| posted.differs(Rank::new(rank as u32), &header))
    }

    /// The last operations that were taken on.
    pub(super) fn history(&self) -> impl Iterator<Item = ShmContract> {
        self.history.iter().copied()
    }

    /// Whether operations that were taken on are not over.
    pub(super) fn is_busy(&self) -> bool {
        self.current != self.sequence
    }

    /// Whether an operation is the oldest that is not over.
    pub(super) fn is_next(&self, shm_operation: &ShmOperation) -> bool {
        self.current == shm_operation.asked.sequence
    }

    /// Whether another look would find something to do.
    pub(super) fn is_ready(&self, shm_operation: &ShmOperation) -> bool {
        let round = self.round + 1;
        if shm_operation.is_posted {
            self.sources().all(|from| self.rounds.has_posted(from, round))
        } else {
            self.rounds.may_write(round)
        }
    }

    /// The round, and the ranks that have to have posted it, before another look would find something to do.
    pub(super) fn wanted(&self, shm_operation: &ShmOperation) -> (u64, Vec<usize>) {
        let round = self.round + 1;
        if shm_operation.is_posted {
            (round, self.sources().collect())
        } else {
            let ranks = 0..self.rounds.size().ranks;
            (round - 1, ranks.filter(|&rank| rank != self.rounds.rank()).collect())
        }
    }

    /// The ranks that have to post before an operation, the oldest, can go on.
    pub(super) fn awaited(&self, shm_operation: &ShmOperation) -> impl Iterator<Item = Rank> {
        let (round, is_posted) = (self.round + 1, shm_operation.is_posted);
        let ranks = (0..self.rounds.size().ranks).map(|rank| Rank::new(rank as u32));
        ranks.filter(move |rank| {
            if is_posted {
                let is_source = self.sources().any(|from| from == rank.index());
                is_source && !self.rounds.has_posted(rank.index(), round)
            } else {
                rank.index() != self.rounds.rank() && !self.rounds.has_posted(rank.index(), round - 1)
            }
        })
    }
}

impl ShmContract {
    fn new(sequence: u64, contract: Contract, site: Site) -> Self {
        let mut header: Header = [0; HEADER_WORDS];
        header[..CONTRACT_WORDS].copy_from_slice(&wire::contract_to_words(&contract));
        header[HEADER_WORDS - 1] = sequence;
        Self { sequence, contract, site, header }
    }

    /// Whether a rank that has posted this header asks for something else.
    fn differs(self, rank: Rank, header: &Header) -> Option<ShmPoll> {
        let is_same = *header == self.header;
        (!is_same).then(|| ShmPoll::Differs(self, rank, wire::contract_from_words(header)))
    }
}

impl ShmOperation {
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
