//! Operations in shared memory. An operation may have several rounds, and it waits until the other ranks have posted.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::task::Poll;

use super::{HostRounds, ShmCall, ShmFailure, header_of};
use crate::engine::OperationRequest;
use crate::reduce::{self, Kernels};
use crate::runtime::buffer::BufferAccess;
use crate::schedule::CollectiveSpec;
use crate::schedule::program::Execution;
use crate::shm::{Header, LEAD_MAX, Payload, PostedRound, RoundsMemory};
use crate::types::{Algorithm, Rank, RankSet};

pub(crate) struct ShmOperation {
    pub(super) execution: Execution,
    call: ShmCall,
    /// The number of operations that were added to the shared memory before.
    position: u64,
    /// The contract and the number as they are written to shared memory.
    pub(super) header: Header,
    pub(super) kernels: Option<Kernels>,
    pub(super) element_bytes: usize,
    /// Whether this rank has posted the address of its buffer, so that other ranks read and write the buffer in place.
    is_exposed: bool,
}

impl<M: RoundsMemory> HostRounds<M> {
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

    /// Executes an operation as far as possible without waiting for posts of other ranks. The operation must be the oldest that
    /// is not complete. `memory` is the whole buffer of the operation. Calls `wake` for each sleeping rank that has to learn of a
    /// post. An error is the reason why the job fails, with world ranks.
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
                if !self.rounds.may_write(round, self.lead_max(shm_operation)) {
                    return Ok(Poll::Pending);
                }
                // Every rank compares with its next rank first. So no rank can wait for all others if any contracts differ.
                self.check_rounds(LEAD_MAX - 1, self.next_rank)?;
                self.post(round, shm_operation, memory);
                shm_operation.execution.handle_posted();
                self.rounds.wake_sleepers(|rank| wake(self.members[rank]));
            }
            let (sources, part_bytes) =
                (shm_operation.execution.round().0.sources, shm_operation.part_bytes());
            sources.indices().for_each(|from| self.rounds.prefetch_payload(from, round, 0));
            for from in sources.indices() {
                let Some(posted) = self.rounds.read_post(from, round, part_bytes) else {
                    // This rank would look for such a post again and again, and would not sleep.
                    let is_wrong = self.rounds.posts().is_ahead(from, round);
                    let wrong = || self.invalid(from, "it posted the number of a wrong round").into();
                    return if is_wrong { Err(wrong()) } else { Ok(Poll::Pending) };
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

    fn invalid(&self, rank: usize, what: &'static str) -> ShmFailure {
        ShmFailure::Invalid(self.members[rank], what)
    }

    /// Posts the round: the address of the buffer if all ranks can access the buffer in this round, and elements otherwise.
    fn post(&mut self, round: u64, shm_operation: &mut ShmOperation, memory: &BufferAccess<'_>) {
        let exposable = memory.all_writable().filter(|_| shm_operation.execution.may_expose());
        let buffer_ref = exposable
            .and_then(|bytes| self.rounds.registry.find_buffer_ref(bytes, shm_operation.element_bytes));
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
            None => (round.saturating_sub(self.lead_max(shm_operation)), self.other_ranks),
        }
    }

    /// Returns how many rounds this rank may be ahead of the others when it posts the current round.
    fn lead_max(&self, shm_operation: &ShmOperation) -> u64 {
        shm_operation.payload().lead_max(self.rounds.size().ranks)
    }

    /// Returns the world ranks for whose posts an operation waits. The operation must be the oldest that is not complete.
    pub(crate) fn awaited_ranks(&self, shm_operation: &ShmOperation) -> Vec<Rank> {
        let (round, ranks) = self.awaited_round_and_ranks(shm_operation);
        let ranks = ranks.indices().filter(|&rank| !self.rounds.posts().has_posted(rank, round));
        ranks.map(|rank| self.members[rank]).collect()
    }

    /// After a failure: makes the other ranks stop accessing the operation's buffer, which returns to its owner.
    pub(crate) fn stop_exposing(&mut self, shm_operation: &ShmOperation, memory: &BufferAccess<'_>) {
        if let Some(bytes) = memory.all_writable().filter(|_| shm_operation.is_exposed) {
            self.rounds.registry.stop_exposing(bytes);
        }
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
        let (current, block) = self.execution.round();
        let needed_bytes = current.taken_len(Rank::new(from as u32), block) * self.element_bytes;
        match posted.is_exposed {
            true if self.execution.may_expose() => Ok(()),
            true => Err("it posted a buffer address in a round without in-place reduction"),
            false if needed_bytes <= posted.payload_bytes_max => Ok(()),
            false => Err("it posted a payload that does not end inside its memory"),
        }
    }

    /// Returns the payload of the current round, unless the round before has already written it.
    pub(super) fn payload(&self) -> Payload {
        let (current, block) = self.execution.round();
        Payload {
            bytes: current.written_len(block) * self.element_bytes,
            part_bytes: self.part_bytes(),
            is_exchanged: current.sources.count() > 0,
        }
    }

    /// Returns the length in bytes of a part of the payloads of the current round; 0 if they are not divided.
    pub(super) fn part_bytes(&self) -> usize {
        self.execution.round().0.part_len * self.element_bytes
    }

    pub(super) fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.element_bytes..range.end * self.element_bytes
    }
}
