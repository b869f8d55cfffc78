//! Collectives in shared memory. The ranks of a host execute them one after the other, in rounds. In each round, a rank posts
//! elements in its slot, and reads the elements in the slots of other ranks. A [short call](ShortCall) has only one round, which
//! [`HostRounds::run_short`] executes. All other collectives are [operations](operation).

mod apply;
pub(crate) mod operation;
pub(crate) mod short;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use self::short::{ShortCall, ShortResult, ShortWork};
use super::buffer::BufferAccess;
use super::measurements::Meter;
use crate::reduce::{Kernels, reduce_in_rank_order};
use crate::schedule::CollectiveSpec;
use crate::schedule::plan::{SharedSlots, plan};
use crate::schedule::program::Program;
use crate::shm::{
    BUFFERS_MAX, ExposedBuffer, HEADER_WORDS, Header, LEAD_MAX, RemoteBuffer, RoundsMemory, Segment,
    ShmRounds, ShortPost, pause_between_looks,
};
use crate::types::{Algorithm, Contract, Rank, RankSet, Site, WorldSize};
use crate::wire::{self, CONTRACT_WORDS};

/// The most calls that the engine has not recorded. The other ranks are at most [`LEAD_MAX`] rounds behind this rank, and they
/// find a difference between two calls at most [`LEAD_MAX`] rounds later.
const UNRECORDED_MAX: usize = 2 * LEAD_MAX as usize;
/// The size of a piece in bytes. Copies and reductions work on one piece at a time. The contributions of several ranks to one
/// piece fit into the first-level cache of a processor.
const PIECE_BYTES: usize = 16 << 10;

pub(crate) struct HostRounds<M = Segment> {
    pub(crate) rounds: ShmRounds<M>,
    members: Arc<[Rank]>,
    next_rank: RankSet,
    other_ranks: RankSet,
    last_round: u64,
    /// The positions of the next operation that is added, and of the oldest one that is not complete.
    next_position: u64,
    oldest_position: u64,
    programs: LastUsed<(ProgramKey, Arc<Program>)>,
    /// Scratch memory for one piece of the reduction over all lower ranks.
    lower_ranks_piece: Vec<u64>,
    /// The last calls, by their position modulo [`UNRECORDED_MAX`], until the engine records them.
    last_calls: [Option<ShmCall>; UNRECORDED_MAX],
    /// The position of the first call that the engine has not recorded.
    unrecorded_position: u64,
    /// The calls of the last rounds with their headers, by the number of the round modulo [`LEAD_MAX`].
    round_calls: [Option<(ShmCall, Header)>; LEAD_MAX as usize],
    /// The number of the last rounds in which this rank has not compared its call with all other ranks.
    unchecked_rounds: u64,
    /// Whether the program has dropped a shared buffer. The next operation then removes the dropped buffers.
    has_dropped_buffers: Arc<AtomicBool>,
    /// Whether the group was dropped. The core then drops the rounds after their last operation.
    pub(crate) is_retired: bool,
    meter: Meter,
}

/// What determines a program, besides the shared memory: the collective, the bytes of an element, and whether it is one-shot.
type ProgramKey = (CollectiveSpec, usize, bool);

/// A call of an operation: its [number](HostRounds::add_operation), this rank's contract, and the line of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShmCall {
    pub(crate) sequence: u64,
    pub(crate) contract: Contract,
    pub(crate) site: Site,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ShmFailure {
    /// Another rank called a different operation, with this number and this contract, which is `None` if it cannot be decoded.
    Mismatch(ShmCall, Rank, (u64, Option<Contract>)),
    /// This rank has posted invalid values. The text describes the values.
    Invalid(Rank, &'static str),
    Panicked,
}

impl<M: RoundsMemory> HostRounds<M> {
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
            programs: LastUsed::new(),
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

    pub(crate) fn is_busy(&self) -> bool {
        self.oldest_position != self.next_position
    }

    /// Returns a program. It is made only once for operations that the caller repeats.
    fn program(
        &mut self,
        spec: &CollectiveSpec,
        (element_bytes, is_one_shot): (usize, bool),
    ) -> Arc<Program> {
        let is_same =
            |(key, _): &(ProgramKey, _)| key.0 == *spec && (key.1, key.2) == (element_bytes, is_one_shot);
        let (key, program) = self.programs.take(is_same).unwrap_or_else(|| {
            let size = self.rounds.size();
            let slots = SharedSlots {
                world: WorldSize::new(size.ranks as u32).expect("a shared memory has ranks"),
                rank: Rank::new(self.rounds.rank() as u32),
                slot_len: size.slot_bytes / element_bytes,
            };
            let key = (spec.clone(), element_bytes, is_one_shot);
            (key, Arc::new(plan(spec, slots, is_one_shot)))
        });
        self.programs.keep((key, Arc::clone(&program)));
        program
    }

    /// Returns a call that [`HostRounds::run_short`] can run, or `None` if the call has several rounds or long payloads.
    pub(crate) fn short_call(
        &mut self,
        spec: &CollectiveSpec,
        contract: Contract,
        kernels: Option<Kernels>,
    ) -> Option<ShortCall> {
        let is_one_shot = contract.algorithm == Algorithm::OneShot;
        let program = self.program(spec, (contract.dtype.size_bytes(), is_one_shot));
        let header = header_of(&contract, 0);
        let ranks = (self.rounds.rank(), self.rounds.size().ranks);
        ShortCall::new(&program, ranks, (contract, header), kernels)
    }

    /// Executes a call if the other ranks post soon, while `patience` lasts. Anything unusual, for example a post that does not
    /// fit the call, is left to [`HostRounds::poll`]. `memory` is the whole buffer. Calls `wake` for each sleeping rank that has
    /// to learn of the post. The caller must wake it soon, so then this rank does not wait.
    pub(crate) fn run_short(
        &mut self,
        call: &ShortCall,
        site: Site,
        memory: &mut BufferAccess<'_>,
        (mut patience, mut wake): (Patience, impl FnMut(Rank)),
    ) -> ShortResult {
        let round = self.last_round + 1;
        if self.is_busy()
            || self.has_dropped_buffers.load(Ordering::Relaxed)
            || !self.rounds.may_write(round, call.lead_max)
            || self.check_rounds(LEAD_MAX - 1, self.next_rank).is_err()
        {
            return ShortResult::NotBegun;
        }
        let own_call = ShmCall { sequence: self.next_position, contract: call.contract, site };
        let mut header = call.header;
        header[HEADER_WORDS - 1] = own_call.sequence;
        let parts = call.writes.iter().map(|(start, bytes)| (*start, memory.bytes(bytes.clone())));
        self.rounds.post_short(round, &header, (call.payload_bytes, call.lead_max, parts));
        self.rounds.wake_sleepers(|rank| {
            patience.looks = 0;
            wake(self.members[rank]);
        });
        if !self.await_short_posts(round, call, (&own_call, &header), patience) {
            return ShortResult::Posted;
        }
        if call.sources == self.other_ranks {
            self.rounds.handle_all_read(round);
            if self.check_rounds(0, self.other_ranks).is_err() {
                return ShortResult::Posted;
            }
        } else {
            self.keep_for_check(own_call, header);
        }
        self.apply_short(round, call, memory);
        self.last_round = round;
        self.keep_for_record(own_call);
        self.oldest_position += 1;
        ShortResult::Complete
    }

    /// Returns whether all sources have posted the same call, with a short payload that is long enough.
    #[inline]
    fn await_short_posts(
        &self,
        round: u64,
        call: &ShortCall,
        (own_call, header): (&ShmCall, &Header),
        mut patience: Patience,
    ) -> bool {
        let prefetch = |from| self.rounds.prefetch_payload(from, round, call.taken_bytes[from]);
        call.sources.indices().for_each(prefetch);
        for from in call.sources.indices() {
            let posted = loop {
                match self.rounds.read_short_post(from, round) {
                    ShortPost::Posted(posted) => break posted,
                    ShortPost::Absent if patience.waits_again() => {}
                    ShortPost::Absent | ShortPost::NotShort => return false,
                }
            };
            let has_payload = posted.payload_bytes_max >= call.taken_bytes[from];
            if !has_payload || own_call.check(header, self.members[from], &posted.header()).is_err() {
                return false;
            }
        }
        true
    }

    /// Reads the payloads of the sources, which have posted them.
    #[inline]
    fn apply_short(&mut self, round: u64, call: &ShortCall, memory: &mut BufferAccess<'_>) {
        let rounds = &self.rounds;
        let payload = |from: usize, start: usize, length: usize| match rounds.read_short_post(from, round) {
            ShortPost::Posted(posted) => posted.bytes(start..start + length),
            ShortPost::Absent | ShortPost::NotShort => None,
        };
        match &call.work {
            ShortWork::Take(takes) => {
                for (from, start, range) in takes {
                    let Some(bytes) = payload(*from, *start, range.len()) else { return };
                    let target = memory.bytes_mut(range);
                    rounds.before_own_write(target);
                    target.copy_from_slice(&bytes);
                }
            }
            ShortWork::Fold(_, range) if range.is_empty() => {}
            ShortWork::Fold(ranks, range) => {
                let own = memory.bytes_mut(range);
                rounds.before_own_write(own);
                let (world, length) = ((rounds.rank(), rounds.size().ranks), own.len());
                let (kernels, lower) = (call.kernels.as_ref(), &mut self.lower_ranks_piece);
                reduce_in_rank_order(kernels, (world, *ranks), own, lower, |from| {
                    payload(from, call.taken_bytes[from] - length, length)
                });
            }
        }
    }
}

/// The calls that the ranks have not compared, and those that the engine has not recorded.
impl<M: RoundsMemory> HostRounds<M> {
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
    pub(crate) fn has_max_buffers(&mut self) -> bool {
        self.remove_dropped_buffers();
        self.rounds.registry.own_buffer_count() >= BUFFERS_MAX
    }

    /// Registers one shared buffer of each rank: `own` and, in rank order, `others`. The owner of `own` must drop the value
    /// behind `alive` before it unmaps the buffer, and then set the returned flag.
    pub(crate) fn register_buffer(
        &mut self,
        own: &mut ExposedBuffer,
        alive: Weak<()>,
        others: Vec<RemoteBuffer>,
    ) -> Arc<AtomicBool> {
        self.rounds.registry.register(own, alive, others);
        Arc::clone(&self.has_dropped_buffers)
    }

    /// Removes buffers that were dropped. Unmaps them if no operation is active.
    fn remove_dropped_buffers(&mut self) {
        let is_busy = self.is_busy();
        self.has_dropped_buffers.store(is_busy, Ordering::Relaxed);
        self.rounds.registry.unmap_dropped_buffers(is_busy);
    }
}

/// How long a [short call](ShortCall) waits for the posts of other ranks.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// How often this rank looks again.
    pub(crate) looks: u32,
    /// Whether this rank lets other processes use the processor before it looks again.
    pub(crate) yields: bool,
}

impl Patience {
    /// Waits for a short time. Returns false if the patience is over.
    #[inline]
    fn waits_again(&mut self) -> bool {
        let Some(left) = self.looks.checked_sub(1) else { return false };
        self.looks = left;
        if self.yields {
            thread::yield_now();
        } else {
            pause_between_looks(left);
        }
        true
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

/// The most values of [`LastUsed`].
const LAST_USED_MAX: usize = 32;

/// Plans or programs that were used, the last one at the end.
pub(crate) struct LastUsed<T>(Vec<T>);

impl<T> LastUsed<T> {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Removes and returns the last value for which `is_wanted` returns true.
    #[inline]
    pub(crate) fn take(&mut self, is_wanted: impl Fn(&T) -> bool) -> Option<T> {
        let index = self.0.iter().rposition(is_wanted)?;
        Some(self.0.remove(index))
    }

    /// Adds a value. If there are too many, removes the oldest.
    #[inline]
    pub(crate) fn keep(&mut self, value: T) {
        if self.0.len() == LAST_USED_MAX {
            self.0.remove(0);
        }
        self.0.push(value);
    }
}
