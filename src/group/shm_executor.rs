//! Collectives in shared memory. The ranks of a host execute one operation after the other, in rounds. In each round, a rank
//! posts elements in its slot, and reads the elements in the slots of other ranks.

mod copy_and_reduce;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Weak;

use super::memory::BufferAccess;
use super::profile::Meter;
use crate::reduce::Kernels;
use crate::schedule::rounds::{Round, RoundPlan};
use crate::shm::{BUFFERS_MAX, ExposedBuffer, HEADER_WORDS, Header, RemoteBuffer, ShmRounds};
use crate::types::{Contract, Rank, Site};
use crate::wire::{self, CONTRACT_WORDS};

/// The contracts of this many last operations are stored. The other ranks are at most a few operations behind this rank.
const HISTORY_MAX: usize = 8;

/// Executes the collectives of one rank in shared memory.
pub(super) struct ShmExecutor {
    /// The shared memory.
    rounds: ShmRounds,
    /// The number of the last round that this rank has completed.
    last_round: u64,
    /// The number that the next operation gets.
    next_sequence: u64,
    /// The number of the oldest operation that is not complete.
    oldest_sequence: u64,
    /// The plan of the current round. Its memory is reused in every round.
    current_round: Round,
    /// Scratch memory for one piece of the reduction over all lower ranks.
    lower_ranks_piece: Vec<u64>,
    /// The contracts of the last operations.
    history: VecDeque<ShmContract>,
    /// The contract of the last posted round, if this rank has not compared it with the contracts of all other ranks.
    unchecked_contract: Option<ShmContract>,
    meter: Meter,
}

/// This rank's contract and call site of an operation.
#[derive(Clone, Copy)]
pub(super) struct ShmContract {
    pub(super) sequence: u64,
    pub(super) contract: Contract,
    pub(super) site: Site,
    /// The contract and the number as they are written to shared memory.
    header: Header,
}

/// An operation in shared memory.
pub(super) struct ShmOperation {
    plan: RoundPlan,
    /// The number of rounds of the operation.
    round_count: usize,
    contract: ShmContract,
    kernels: Option<Kernels>,
    /// The number by which an average divides the sum.
    divisor: u32,
    element_bytes: usize,
    /// The index of the current round, counted from 0.
    round_index: usize,
    /// Whether this rank has posted the current round.
    is_posted: bool,
    /// Whether this rank has posted the address of its buffer, so that other ranks read and write the buffer in place.
    is_exposed: bool,
}

/// The result of [`ShmExecutor::poll`].
pub(super) enum ShmPoll {
    /// The operation is complete.
    Done,
    /// The operation waits for posts of other ranks.
    Waits,
    /// Another rank called a different operation. The first contract is this rank's, and the second contract is the other rank's.
    /// The second contract is `None` if it cannot be decoded.
    Mismatch(ShmContract, Rank, Option<Contract>),
    /// This rank has posted invalid values. The text describes the values.
    Invalid(Rank, &'static str),
}

/// The arguments with which an executor begins an operation.
pub(super) struct ShmRequest {
    /// The rounds of the operation on this rank.
    pub(super) plan: RoundPlan,
    /// The reduction functions; `None` for an operation without a reduction.
    pub(super) kernels: Option<Kernels>,
    /// The number by which an average divides the sum: the number of ranks.
    pub(super) divisor: u32,
}

impl ShmExecutor {
    pub(super) fn new(rounds: ShmRounds, meter: Meter) -> Self {
        Self {
            rounds,
            last_round: 0,
            next_sequence: 0,
            oldest_sequence: 0,
            current_round: Round::default(),
            lower_ranks_piece: vec![0; copy_and_reduce::PIECE_BYTES / size_of::<u64>()],
            history: VecDeque::new(),
            unchecked_contract: None,
            meter,
        }
    }

    /// Returns the size of a slot in bytes.
    pub(super) fn slot_bytes(&self) -> usize {
        self.rounds.size().slot_bytes
    }

    /// Returns the shared memory, for example to set the sleep flag of this rank.
    pub(super) fn rounds(&self) -> &ShmRounds {
        &self.rounds
    }

    /// Adds an operation. Operations must be executed in the order in which they are added.
    pub(super) fn add_operation(
        &mut self,
        (contract, site): (Contract, Site),
        shm_request: ShmRequest,
    ) -> ShmOperation {
        let ShmRequest { plan, kernels, divisor } = shm_request;
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        let shm_contract = ShmContract::new(self.next_sequence, contract, site);
        self.history.push_back(shm_contract);
        self.next_sequence += 1;
        ShmOperation {
            round_count: plan.round_count(),
            plan,
            contract: shm_contract,
            kernels,
            divisor,
            element_bytes: contract.dtype.size_bytes(),
            round_index: 0,
            is_posted: false,
            is_exposed: false,
        }
    }
}

/// Shared buffers of the group ([`super::SharedBuffer`]).
impl ShmExecutor {
    /// Returns whether this rank has the maximum number of shared buffers.
    pub(super) fn has_max_buffers(&mut self) -> bool {
        self.remove_dropped_buffers();
        self.rounds.own_buffer_count() >= BUFFERS_MAX
    }

    /// Registers one shared buffer of each rank: `own` is this rank's buffer, and `others` are the other ranks' buffers in rank
    /// order. The owner of this rank's buffer must drop the value behind `alive` before it unmaps the buffer.
    pub(super) fn register_buffer(
        &mut self,
        own: &mut ExposedBuffer,
        alive: Weak<()>,
        others: Vec<RemoteBuffer>,
    ) {
        self.rounds.register_buffer(own, alive, others);
    }

    /// Removes buffers that were dropped. Unmaps them if no operation is active.
    pub(super) fn remove_dropped_buffers(&mut self) {
        let is_busy = self.is_busy();
        self.rounds.unmap_dropped_buffers(is_busy);
    }

    /// After an operation has failed: makes the other ranks stop accessing the operation's buffer, because the buffer returns to
    /// its owner.
    pub(super) fn stop_exposing(&mut self, shm_operation: &ShmOperation, memory: &BufferAccess<'_>) {
        if let Some(bytes) = memory.all_writable().filter(|_| shm_operation.is_exposed) {
            self.rounds.stop_exposing(bytes);
        }
    }
}

impl ShmExecutor {
    /// Executes an operation as far as possible without waiting. The operation must be the oldest that is not complete.
    /// `memory` is the whole buffer of the operation. Calls `wake` for each sleeping rank that has to learn of a post.
    ///
    /// # Panics
    ///
    /// If a reduction function of the user panics.
    pub(super) fn poll(
        &mut self,
        shm_operation: &mut ShmOperation,
        memory: &mut BufferAccess<'_>,
        mut wake: impl FnMut(Rank),
    ) -> ShmPoll {
        loop {
            let round = self.last_round + 1;
            if !shm_operation.is_posted {
                if !self.rounds.may_write(round) {
                    return ShmPoll::Waits;
                }
                if let Some(mismatch) = self.check_previous_round() {
                    return mismatch;
                }
                shm_operation.plan.fill_round(shm_operation.round_index, &mut self.current_round);
                self.post(round, shm_operation, memory);
                shm_operation.is_posted = true;
                self.rounds.wake_sleepers(|rank| wake(Rank::new(rank as u32)));
            }
            for from in self.ranks_to_read() {
                let Some(posted) = self.rounds.read_post(from, round) else { return ShmPoll::Waits };
                let from = Rank::new(from as u32);
                if let Some(mismatch) = shm_operation.contract.find_mismatch(from, &posted.header) {
                    return mismatch;
                }
                if posted.is_exposed && self.current_round.in_place_reduce.is_none() {
                    return ShmPoll::Invalid(
                        from,
                        "it posted a buffer address in a round without in-place reduction",
                    );
                }
            }
            let has_checked_all = self.ranks_to_read().count() + 1 >= self.rounds.size().ranks;
            self.unchecked_contract = (!has_checked_all).then_some(shm_operation.contract);
            if let Err(invalid) = self.reduce_and_read(round, shm_operation, memory) {
                return invalid;
            }
            self.last_round = round;
            shm_operation.round_index += 1;
            shm_operation.is_posted = false;
            if shm_operation.round_index == shm_operation.round_count {
                self.oldest_sequence += 1;
                return ShmPoll::Done;
            }
        }
    }

    /// Posts the round: the address of the buffer if the round allows an in-place reduction and all ranks can access the buffer,
    /// and elements otherwise.
    fn post(&mut self, round: u64, shm_operation: &mut ShmOperation, memory: &BufferAccess<'_>) {
        let exposable = memory.all_writable().filter(|_| self.current_round.in_place_reduce.is_some());
        let buffer_ref =
            exposable.and_then(|bytes| self.rounds.find_buffer_ref(bytes, shm_operation.element_bytes));
        shm_operation.is_exposed |= buffer_ref.is_some();
        match buffer_ref {
            Some(buffer_ref) => self.rounds.post_exposed(round, &shm_operation.contract.header, buffer_ref),
            None => self.post_elements(round, shm_operation, memory),
        }
    }

    /// Executes the reductions and the reads in the plan of the round. All ranks that this rank reads have posted the round.
    fn reduce_and_read(
        &mut self,
        round: u64,
        shm_operation: &mut ShmOperation,
        memory: &mut BufferAccess<'_>,
    ) -> Result<(), ShmPoll> {
        if let Some(in_place_reduce) = self.current_round.in_place_reduce.take() {
            let exposed_parts =
                self.rounds.read_exposed_locations(round, memory.len(), shm_operation.element_bytes);
            let have_others_exposed =
                exposed_parts.map_err(|(rank, what)| ShmPoll::Invalid(Rank::new(rank as u32), what))?;
            if have_others_exposed && shm_operation.is_exposed {
                shm_operation.plan.reduce_remaining_rounds_in_place();
                shm_operation.round_count = shm_operation.plan.round_count();
                self.current_round.ordered_reduce = None;
                self.reduce_in_place(round, shm_operation, &in_place_reduce.range, memory);
            }
        }
        if let Some(ordered_reduce) = self.current_round.ordered_reduce.take() {
            self.reduce_in_rank_order(round, shm_operation, &ordered_reduce, memory);
        }
        self.read_slots(round, shm_operation, memory);
        Ok(())
    }

    /// Returns the other ranks whose slots this rank reads in the current round.
    fn ranks_to_read(&self) -> impl Iterator<Item = usize> {
        let reduced_ranks =
            if self.current_round.ordered_reduce.is_some() { self.rounds.size().ranks } else { 0 };
        let all =
            (0..reduced_ranks).chain(self.current_round.slot_reads.iter().map(|read| read.from.index()));
        all.filter(|&rank| rank != self.rounds.rank())
    }

    /// Compares the contracts of all ranks in the previous round, and returns a mismatch. In that round, this rank may have
    /// compared only the contracts of the ranks whose slots it read. Now all ranks have posted that round.
    fn check_previous_round(&mut self) -> Option<ShmPoll> {
        let own = self.unchecked_contract.take()?;
        let ranks = (0..self.rounds.size().ranks).filter(|&rank| rank != self.rounds.rank());
        let headers =
            ranks.filter_map(|rank| Some((rank, self.rounds.read_post(rank, self.last_round)?.header)));
        headers.into_iter().find_map(|(rank, header)| own.find_mismatch(Rank::new(rank as u32), &header))
    }

    /// Returns the contracts of the last operations.
    pub(super) fn history(&self) -> impl Iterator<Item = ShmContract> {
        self.history.iter().copied()
    }

    /// Returns whether there is an operation that is not complete.
    pub(super) fn is_busy(&self) -> bool {
        self.oldest_sequence != self.next_sequence
    }

    /// Returns whether an operation is the oldest that is not complete.
    pub(super) fn is_oldest(&self, shm_operation: &ShmOperation) -> bool {
        self.oldest_sequence == shm_operation.contract.sequence
    }

    /// Returns whether [`ShmExecutor::poll`] would make progress.
    pub(super) fn is_ready(&self, shm_operation: &ShmOperation) -> bool {
        let round = self.last_round + 1;
        if shm_operation.is_posted {
            self.ranks_to_read().all(|from| self.rounds.has_posted(from, round))
        } else {
            self.rounds.may_write(round)
        }
    }

    /// Returns a round, and the ranks that have to post this round before [`ShmExecutor::poll`] makes progress.
    pub(super) fn awaited_round_and_ranks(&self, shm_operation: &ShmOperation) -> (u64, Vec<usize>) {
        let round = self.last_round + 1;
        if shm_operation.is_posted {
            (round, self.ranks_to_read().collect())
        } else {
            let ranks = 0..self.rounds.size().ranks;
            (round - 1, ranks.filter(|&rank| rank != self.rounds.rank()).collect())
        }
    }

    /// Returns the ranks for whose posts an operation waits. The operation must be the oldest that is not complete.
    pub(super) fn awaited_ranks(&self, shm_operation: &ShmOperation) -> impl Iterator<Item = Rank> {
        let (round, is_posted) = (self.last_round + 1, shm_operation.is_posted);
        let ranks = (0..self.rounds.size().ranks).map(|rank| Rank::new(rank as u32));
        ranks.filter(move |rank| {
            if is_posted {
                let is_source = self.ranks_to_read().any(|from| from == rank.index());
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

    /// Returns a mismatch if the header of `rank` differs from the header of this rank.
    fn find_mismatch(self, rank: Rank, header: &Header) -> Option<ShmPoll> {
        let is_same = *header == self.header;
        (!is_same).then(|| ShmPoll::Mismatch(self, rank, wire::contract_from_words(header)))
    }
}

impl ShmOperation {
    /// Returns the operation's number in this shared memory.
    pub(super) fn sequence(&self) -> u64 {
        self.contract.sequence
    }

    /// Returns the reduction functions.
    pub(super) fn into_kernels(self) -> Option<Kernels> {
        self.kernels
    }

    /// Returns the byte range of a range of elements.
    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.element_bytes..range.end * self.element_bytes
    }
}
