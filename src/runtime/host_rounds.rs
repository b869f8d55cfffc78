//! Collectives in shared memory. The ranks of a host execute one operation after the other, in rounds. In each round, a rank
//! posts elements in its slot, and reads the elements in the slots of other ranks.

mod apply;
pub(crate) mod short;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;

use super::buffer::BufferAccess;
use super::profile::Meter;
use crate::engine::OperationRequest;
use crate::reduce::{self, Kernels};
use crate::schedule::CollectiveSpec;
use crate::schedule::plan::{SharedSlots, plan};
use crate::schedule::program::{Execution, Program, RoundWork};
use crate::shm::{
    BUFFERS_MAX, ExposedBuffer, HEADER_WORDS, Header, LEAD_MAX, PostedRound, RemoteBuffer, RoundsMemory,
    Segment, ShmRounds,
};
use crate::types::{Algorithm, Contract, Rank, RankSet, Site, WorldSize};
use crate::wire::{self, CONTRACT_WORDS};

/// The most calls that the engine has not recorded. The other ranks are at most [`LEAD_MAX`] rounds behind this rank, and they
/// find a difference between two calls at most [`LEAD_MAX`] rounds later.
const UNRECORDED_MAX: usize = 2 * LEAD_MAX as usize;
/// The size of a piece in bytes. Copies and reductions work on one piece at a time. The contributions of several ranks to one
/// piece fit into the first-level cache of a processor.
const PIECE_BYTES: usize = 16 << 10;
/// The most programs that are stored.
const PROGRAMS_MAX: usize = 32;

/// One rank's part of the rounds in a shared memory.
pub(crate) struct HostRounds<M = Segment> {
    /// The shared memory.
    rounds: ShmRounds<M>,
    /// The world ranks that share the memory.
    members: Arc<[Rank]>,
    /// The numbers of the next rank and of all other ranks.
    next_rank: RankSet,
    other_ranks: RankSet,
    /// The number of the last round that this rank has completed.
    last_round: u64,
    /// The number of operations that were added.
    next_position: u64,
    /// The number of operations that are complete.
    oldest_position: u64,
    /// The programs of the last different operations, the last one at the end.
    programs: Vec<(ProgramKey, Arc<Program>)>,
    /// Scratch memory for one piece of the reduction over all lower ranks.
    lower_ranks_piece: Vec<u64>,
    /// The last calls, by their position modulo [`UNRECORDED_MAX`]. A short operation does not lock the engine, which records
    /// them later.
    last_calls: [Option<ShmCall>; UNRECORDED_MAX],
    /// The position of the first call that the engine has not recorded.
    unrecorded_position: u64,
    /// The calls of the last rounds with their headers, by the number of the round modulo [`LEAD_MAX`].
    round_calls: [Option<(ShmCall, Header)>; LEAD_MAX as usize],
    /// The number of the last rounds in which this rank has not compared its call with those of all other ranks: at most
    /// [`LEAD_MAX`].
    unchecked_rounds: u64,
    /// Whether the program has dropped a shared buffer. The next operation then removes the dropped buffers.
    has_dropped_buffers: Arc<AtomicBool>,
    /// Whether the group was dropped. The core then drops the rounds after their last operation.
    pub(crate) is_retired: bool,
    meter: Meter,
}

/// What determines a program, besides the shared memory.
struct ProgramKey {
    spec: CollectiveSpec,
    element_bytes: usize,
    is_one_shot: bool,
}

/// A call of an operation: its [number](HostRounds::add_operation), this rank's contract, and the line of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShmCall {
    pub(crate) sequence: u64,
    pub(crate) contract: Contract,
    pub(crate) site: Site,
}

/// An operation in shared memory.
pub(crate) struct ShmOperation {
    execution: Execution,
    call: ShmCall,
    /// The number of operations that were added to the shared memory before.
    position: u64,
    /// The contract and the number as they are written to shared memory.
    header: Header,
    kernels: Option<Kernels>,
    element_bytes: usize,
    /// Whether this rank has posted the address of its buffer, so that other ranks read and write the buffer in place.
    is_exposed: bool,
}

/// Why an operation in shared memory fails the job.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ShmFailure {
    /// Another rank called a different operation than this rank, with this number and this contract. The contract is `None` if it
    /// cannot be decoded.
    Mismatch(ShmCall, Rank, (u64, Option<Contract>)),
    /// This rank has posted invalid values. The text describes the values.
    Invalid(Rank, &'static str),
    /// A reduction function of the user panicked.
    Panicked,
}

impl<M: RoundsMemory> HostRounds<M> {
    /// Creates the part of a rank. `members` are the world ranks that share the memory.
    pub(crate) fn new(rounds: ShmRounds<M>, members: Arc<[Rank]>, meter: Meter) -> Self {
        let (rank, ranks) = (rounds.rank() as u32, rounds.size().ranks as u32);
        Self {
            next_rank: [((rank + 1) % ranks) as usize].into_iter().collect(),
            other_ranks: RankSet::first_without(ranks, rank as usize),
            rounds,
            members,
            last_round: 0,
            next_position: 0,
            oldest_position: 0,
            programs: Vec::new(),
            lower_ranks_piece: vec![0; PIECE_BYTES / size_of::<u64>()],
            last_calls: [None; UNRECORDED_MAX],
            unrecorded_position: 0,
            round_calls: [None; LEAD_MAX as usize],
            unchecked_rounds: 0,
            has_dropped_buffers: Arc::default(),
            is_retired: false,
            meter,
        }
    }

    /// Returns the shared memory, for example to set the sleep flag of this rank.
    pub(crate) fn rounds(&self) -> &ShmRounds<M> {
        &self.rounds
    }

    /// Adds an operation. Operations must be executed in the order in which they are added. The ranks of `spec` are numbered
    /// within the shared memory. The number of a block of a hierarchical collective is that of the block. All other operations
    /// have no number in their group (`None`), and are numbered within the shared memory. `has_posted` says whether this rank has
    /// already posted the first round of the operation ([`HostRounds::run_short`]).
    pub(crate) fn add_operation(
        &mut self,
        (&OperationRequest { contract, site, .. }, number): (&OperationRequest, Option<u64>),
        spec: &CollectiveSpec,
        (kernels, has_posted): (Option<Kernels>, bool),
    ) -> ShmOperation {
        if self.has_dropped_buffers.load(Ordering::Acquire) && !self.is_busy() {
            self.remove_dropped_buffers();
        }
        let position = self.next_position;
        let call = ShmCall { sequence: number.unwrap_or(position), contract, site };
        self.keep_for_record(call);
        let element_bytes = contract.dtype.size_bytes();
        let program = self.program(spec, (element_bytes, contract.algorithm == Algorithm::OneShot));
        let (mut execution, header) = (Execution::new(program), header_of(&contract, call.sequence));
        if has_posted {
            execution.handle_posted();
        }
        ShmOperation { execution, call, position, header, kernels, element_bytes, is_exposed: false }
    }

    /// Counts a new call, and keeps it until the engine records it.
    fn keep_for_record(&mut self, call: ShmCall) {
        self.last_calls[self.next_position as usize % UNRECORDED_MAX] = Some(call);
        self.next_position += 1;
    }

    /// Keeps the call of the current round until this rank has compared it with the calls of all other ranks.
    fn keep_for_check(&mut self, call: ShmCall, header: Header) {
        self.round_calls[(self.last_round + 1) as usize % LEAD_MAX as usize] = Some((call, header));
        self.unchecked_rounds += 1;
    }

    /// Returns a program. It is made only once for operations that the caller repeats.
    fn program(
        &mut self,
        spec: &CollectiveSpec,
        (element_bytes, is_one_shot): (usize, bool),
    ) -> Arc<Program> {
        let is_same = |(key, _): &(ProgramKey, Arc<Program>)| {
            key.spec == *spec && (key.element_bytes, key.is_one_shot) == (element_bytes, is_one_shot)
        };
        match self.programs.iter().rposition(is_same) {
            Some(last) if last + 1 == self.programs.len() => {}
            Some(index) => self.programs[index..].rotate_left(1),
            None => {
                let key = ProgramKey { spec: spec.clone(), element_bytes, is_one_shot };
                let program = Arc::new(self.make_program(&key));
                if self.programs.len() == PROGRAMS_MAX {
                    self.programs.remove(0);
                }
                self.programs.push((key, program));
            }
        }
        Arc::clone(&self.programs[self.programs.len() - 1].1)
    }

    fn make_program(&self, key: &ProgramKey) -> Program {
        let size = self.rounds.size();
        let slots = SharedSlots {
            world: WorldSize::new(size.ranks as u32).expect("a shared memory has ranks"),
            rank: Rank::new(self.rounds.rank() as u32),
            slot_len: size.slot_bytes / key.element_bytes,
        };
        plan(&key.spec, slots, key.is_one_shot)
    }

    /// Returns the last calls, without those that an earlier call of this method has returned. The engine has to record them.
    pub(crate) fn take_unrecorded(&mut self) -> impl Iterator<Item = ShmCall> {
        let first = self.unrecorded_position.max(self.next_position.saturating_sub(UNRECORDED_MAX as u64));
        self.unrecorded_position = self.next_position;
        let calls = &mut self.last_calls;
        (first..self.next_position).filter_map(|position| calls[position as usize % UNRECORDED_MAX].take())
    }
}

/// Shared buffers of the group ([`super::SharedBuffer`]).
impl<M: RoundsMemory> HostRounds<M> {
    /// Returns whether this rank has the maximum number of shared buffers.
    pub(crate) fn has_max_buffers(&mut self) -> bool {
        self.remove_dropped_buffers();
        self.rounds.registry().own_buffer_count() >= BUFFERS_MAX
    }

    /// Registers one shared buffer of each rank: `own` is this rank's buffer, and `others` are the other ranks' buffers in rank
    /// order. The owner of this rank's buffer must drop the value behind `alive` before it unmaps the buffer, and then set the
    /// returned flag.
    pub(crate) fn register_buffer(
        &mut self,
        own: &mut ExposedBuffer,
        alive: Weak<()>,
        others: Vec<RemoteBuffer>,
    ) -> Arc<AtomicBool> {
        self.rounds.registry_mut().register(own, alive, others);
        Arc::clone(&self.has_dropped_buffers)
    }

    /// Removes buffers that were dropped. Unmaps them if no operation is active.
    fn remove_dropped_buffers(&mut self) {
        let is_busy = self.is_busy();
        self.has_dropped_buffers.store(is_busy, Ordering::Relaxed);
        self.rounds.registry_mut().unmap_dropped_buffers(is_busy);
    }

    /// After an operation has failed: makes the other ranks stop accessing the operation's buffer, because the buffer returns to
    /// its owner.
    pub(crate) fn stop_exposing(&mut self, shm_operation: &ShmOperation, memory: &BufferAccess<'_>) {
        if let Some(bytes) = memory.all_writable().filter(|_| shm_operation.is_exposed) {
            self.rounds.registry_mut().stop_exposing(bytes);
        }
    }
}

impl<M: RoundsMemory> HostRounds<M> {
    /// Executes an operation as far as possible without waiting for posts of other ranks. The operation must be the oldest that
    /// is not complete. `memory` is the whole buffer of the operation. Calls `wake` for each sleeping rank that has to learn of a
    /// post.
    ///
    /// # Errors
    ///
    /// The reason why the job fails. Ranks are world ranks.
    pub(crate) fn poll(
        &mut self,
        shm_operation: &mut ShmOperation,
        memory: &mut BufferAccess<'_>,
        wake: impl FnMut(Rank),
    ) -> Result<Poll<()>, Box<ShmFailure>> {
        let polled = reduce::catch_panic(|| self.run_rounds(shm_operation, memory, wake));
        polled.unwrap_or_else(|| Err(Box::new(ShmFailure::Panicked)))
    }

    fn run_rounds(
        &mut self,
        shm_operation: &mut ShmOperation,
        memory: &mut BufferAccess<'_>,
        mut wake: impl FnMut(Rank),
    ) -> Result<Poll<()>, Box<ShmFailure>> {
        loop {
            let round = self.last_round + 1;
            if shm_operation.execution.awaited().is_none() {
                if !self.rounds.may_write(round, shm_operation.payload_bytes()) {
                    return Ok(Poll::Pending);
                }
                // Every rank compares with its next rank before it posts, so no rank can wait for all others in a later round if
                // the contracts of any two ranks differ.
                self.check_rounds(LEAD_MAX - 1, self.next_rank)?;
                self.post(round, shm_operation, memory);
                shm_operation.execution.handle_posted();
                self.rounds.wake_sleepers(|rank| wake(self.members[rank]));
            }
            let sources = shm_operation.execution.round().0.sources;
            sources.indices().for_each(|from| self.rounds.prefetch_payload(from, round, 0));
            for from in sources.indices() {
                let Some(posted) = self.rounds.read_post(from, round) else {
                    return self.waits_for(from, round);
                };
                shm_operation.call.check(&shm_operation.header, self.members[from], &posted.header())?;
                shm_operation.check_payload(from, &posted).map_err(|what| self.invalid(from, what))?;
            }
            if sources.count() + 1 >= self.rounds.size().ranks {
                self.rounds.handle_all_read(round);
                self.check_rounds(0, self.other_ranks)?;
            } else {
                self.keep_for_check(shm_operation.call, shm_operation.header);
            }
            if shm_operation.execution.may_expose() {
                self.read_exposed_locations(round, shm_operation, memory)?;
            }
            self.apply(round, shm_operation, memory);
            self.last_round = round;
            if shm_operation.execution.handle_worked() {
                self.oldest_position += 1;
                return Ok(Poll::Ready(()));
            }
        }
    }

    /// Returns the result of [`HostRounds::poll`] if the rank `from` has not posted `round`.
    fn waits_for(&self, from: usize, round: u64) -> Result<Poll<()>, Box<ShmFailure>> {
        // This rank would look for the post again and again, and would not sleep.
        if self.rounds.posts().is_ahead(from, round) {
            return Err(self.invalid(from, "it posted the number of a wrong round").into());
        }
        Ok(Poll::Pending)
    }

    /// Returns the failure because a rank posted invalid values.
    fn invalid(&self, rank: usize, what: &'static str) -> ShmFailure {
        ShmFailure::Invalid(self.members[rank], what)
    }

    /// Posts the round: the address of the buffer if the round allows that and all ranks can access the buffer, and elements
    /// otherwise.
    fn post(&mut self, round: u64, shm_operation: &mut ShmOperation, memory: &BufferAccess<'_>) {
        let exposable = memory.all_writable().filter(|_| shm_operation.execution.may_expose());
        let buffer_ref = exposable
            .and_then(|bytes| self.rounds.registry().find_buffer_ref(bytes, shm_operation.element_bytes));
        shm_operation.is_exposed |= buffer_ref.is_some();
        match buffer_ref {
            Some(buffer_ref) => self.rounds.post_exposed(round, &shm_operation.header, buffer_ref),
            None => self.post_elements(round, shm_operation, memory),
        }
    }

    /// Reads the buffer addresses that other ranks have posted. If all ranks have posted one, the ranks reduce in place.
    fn read_exposed_locations(
        &mut self,
        round: u64,
        shm_operation: &mut ShmOperation,
        memory: &BufferAccess<'_>,
    ) -> Result<(), Box<ShmFailure>> {
        let exposed = self.rounds.read_exposed_locations(round, memory.len(), shm_operation.element_bytes);
        let have_others_exposed = exposed.map_err(|(rank, what)| self.invalid(rank, what))?;
        if have_others_exposed && shm_operation.is_exposed {
            shm_operation.execution.handle_all_exposed();
        }
        Ok(())
    }

    /// Compares this rank's contracts with those of `ranks` in the oldest unchecked rounds, so that at most `left` rounds are
    /// unchecked. All ranks must have posted these rounds. In its rounds, this rank may have compared only the contracts of the
    /// ranks whose slots it read.
    fn check_rounds(&mut self, left: u64, ranks: RankSet) -> Result<(), Box<ShmFailure>> {
        while self.unchecked_rounds > left {
            let round = self.last_round + 1 - self.unchecked_rounds;
            if let Some((own_call, own_header)) = &self.round_calls[round as usize % LEAD_MAX as usize] {
                for rank in ranks.indices() {
                    if let Some(header) = self.rounds.posts().header(rank, round) {
                        own_call.check(own_header, self.members[rank], &header)?;
                    }
                }
            }
            self.unchecked_rounds -= 1;
        }
        Ok(())
    }

    /// Returns whether there is an operation that is not complete.
    pub(crate) fn is_busy(&self) -> bool {
        self.oldest_position != self.next_position
    }

    /// Returns whether an operation is the oldest that is not complete.
    pub(crate) fn is_oldest(&self, shm_operation: &ShmOperation) -> bool {
        self.oldest_position == shm_operation.position
    }

    /// Returns whether [`HostRounds::poll`] would make progress.
    pub(crate) fn is_ready(&self, shm_operation: &ShmOperation) -> bool {
        let (round, ranks) = self.awaited_round_and_ranks(shm_operation);
        ranks.indices().all(|rank| self.rounds.posts().has_posted(rank, round))
    }

    /// Returns a round, and the ranks that have to post this round before [`HostRounds::poll`] makes progress.
    pub(crate) fn awaited_round_and_ranks(&self, shm_operation: &ShmOperation) -> (u64, RankSet) {
        let round = self.last_round + 1;
        match shm_operation.execution.awaited() {
            Some(sources) => (round, sources),
            None => (ShmRounds::<M>::awaited_round(round, shm_operation.payload_bytes()), self.other_ranks),
        }
    }

    /// Returns the world ranks for whose posts an operation waits. The operation must be the oldest that is not complete.
    pub(crate) fn awaited_ranks(&self, shm_operation: &ShmOperation) -> Vec<Rank> {
        let (round, ranks) = self.awaited_round_and_ranks(shm_operation);
        let ranks = ranks.indices().filter(|&rank| !self.rounds.posts().has_posted(rank, round));
        ranks.map(|rank| self.members[rank]).collect()
    }
}

/// Returns the contract and the number of a call as they are written to shared memory.
fn header_of(contract: &Contract, sequence: u64) -> Header {
    let mut header: Header = [0; HEADER_WORDS];
    header[..CONTRACT_WORDS].copy_from_slice(&wire::contract_to_words(contract));
    header[HEADER_WORDS - 1] = sequence;
    header
}

impl ShmCall {
    /// Returns an error if the header of a rank differs from this rank's header.
    #[inline]
    fn check(&self, own_header: &Header, rank: Rank, header: &Header) -> Result<(), Box<ShmFailure>> {
        // Without a branch for each word, and without a call of `memcmp`.
        let differences = header.iter().zip(own_header).map(|(word, own_word)| word ^ own_word);
        if differences.fold(0, |all, difference| all | difference) == 0 {
            return Ok(());
        }
        let other = (header[HEADER_WORDS - 1], wire::contract_from_words(header));
        Err(Box::new(ShmFailure::Mismatch(*self, rank, other)))
    }
}

impl ShmOperation {
    /// Returns the [number](HostRounds::add_operation) of the operation.
    pub(crate) fn sequence(&self) -> u64 {
        self.call.sequence
    }

    /// Checks what the rank `from` has posted in the current round. Returns an error that describes an invalid post.
    fn check_payload<M: RoundsMemory>(
        &self,
        from: usize,
        posted: &PostedRound<'_, M>,
    ) -> Result<(), &'static str> {
        if posted.is_exposed {
            let is_valid = self.execution.may_expose();
            return is_valid
                .then_some(())
                .ok_or("it posted a buffer address in a round without in-place reduction");
        }
        let (current, block) = self.execution.round();
        let needed_bytes = current.taken_len(Rank::new(from as u32), block) * self.element_bytes;
        if needed_bytes > posted.payload_bytes_max {
            return Err("it posted a payload that does not end inside its memory");
        }
        Ok(())
    }

    /// Returns the length in bytes of the payload of the current round, unless the round before has already written it.
    fn payload_bytes(&self) -> usize {
        let (current, block) = self.execution.round();
        current.written_len(block) * self.element_bytes
    }

    /// Returns the byte range of a range of elements.
    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.element_bytes..range.end * self.element_bytes
    }
}
