//! Short calls that a program repeats. Such a call takes a few hundred instructions, so everything that does not change from
//! call to call is computed once.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{HostRounds, ShmCall, header_of};
use crate::reduce::{Kernels, reduce_in_rank_order};
use crate::runtime::buffer::BufferAccess;
use crate::schedule::CollectiveSpec;
use crate::schedule::program::{Program, RoundWork};
use crate::shm::{HEADER_WORDS, Header, LEAD_MAX, RoundsMemory, SHORT_PAYLOAD_BYTES_MAX, ShortPost};
use crate::types::{Algorithm, Contract, Rank, RankSet, Site};

/// A thread that looks for a post pauses once after this number of looks.
const LOOKS_PER_PAUSE: u32 = 8;

/// A collective of one round whose payloads are short. The offsets and ranges are in bytes.
pub(crate) struct ShortCall {
    contract: Contract,
    /// The header of the posts, without the number of the call.
    header: Header,
    kernels: Option<Kernels>,
    payload_bytes: usize,
    /// The parts of the buffer that the rank posts, and where they begin in the payload.
    writes: Box<[(usize, Range<usize>)]>,
    /// The ranks whose posts the call reads.
    sources: RankSet,
    /// For each rank: up to which byte the call needs its payload.
    taken_bytes: Box<[usize]>,
    work: ShortWork,
}

/// What a rank does with the posts.
enum ShortWork {
    /// It copies these parts of the payloads of other ranks: the rank, the place in its payload, and the place in the buffer.
    Take(Box<[(usize, usize, Range<usize>)]>),
    /// It reduces the payloads of this number of ranks, from this place in the payloads on, into this part of the buffer.
    Fold(usize, usize, Range<usize>),
}

/// The result of [`HostRounds::run_short`].
pub(crate) enum ShortResult {
    /// The call is complete.
    Complete,
    /// This rank has posted nothing. The call has to begin as any other operation.
    NotBegun,
    /// This rank has posted. The call has to go on as an operation that [has posted](HostRounds::add_operation).
    Posted,
}

impl ShortCall {
    /// Returns the call, or `None` if the program has several rounds or long payloads.
    fn new(program: &Program, ranks: usize, contract: Contract, kernels: Option<Kernels>) -> Option<Self> {
        let [phase] = &*program.phases else { return None };
        let [round] = &*phase.rounds else { return None };
        let bytes = contract.dtype.size_bytes();
        let to_bytes = |range: Range<usize>| range.start * bytes..range.end * bytes;
        let work = match &round.work {
            RoundWork::Take(takes) => ShortWork::Take(
                takes
                    .iter()
                    .map(|take| {
                        (take.from.index(), take.slot_offset * bytes, to_bytes(take.elements.block(0)))
                    })
                    .collect(),
            ),
            RoundWork::Fold(fold) if !fold.is_posted_next => ShortWork::Fold(
                fold.ranks as usize,
                fold.slot_offset * bytes,
                to_bytes(fold.elements.block(0)),
            ),
            RoundWork::Fold(_) | RoundWork::FoldInPlace(_) => return None,
        };
        let taken_bytes = |from| round.taken_len(Rank::new(from), 0) * bytes;
        let taken_bytes: Box<[usize]> = (0..ranks as u32).map(taken_bytes).collect();
        let payload_bytes = round.written_len(0) * bytes;
        let is_short = phase.times == 1
            && program.if_all_expose.is_none()
            && taken_bytes.iter().chain([&payload_bytes]).all(|&bytes| bytes <= SHORT_PAYLOAD_BYTES_MAX);
        is_short.then(|| Self {
            contract,
            header: header_of(&contract, 0),
            kernels,
            payload_bytes,
            writes: round
                .writes
                .iter()
                .map(|write| (write.slot_offset * bytes, to_bytes(write.elements.block(0))))
                .collect(),
            sources: round.sources,
            taken_bytes,
            work,
        })
    }
}

impl<M: RoundsMemory> HostRounds<M> {
    /// Returns a call that [`HostRounds::run_short`] can run, or `None` if the call has several rounds or long payloads.
    pub(crate) fn short_call(
        &mut self,
        spec: &CollectiveSpec,
        contract: Contract,
        kernels: Option<Kernels>,
    ) -> Option<ShortCall> {
        let is_one_shot = contract.algorithm == Algorithm::OneShot;
        let program = self.program(spec, (contract.dtype.size_bytes(), is_one_shot));
        ShortCall::new(&program, self.rounds.size().ranks, contract, kernels)
    }

    /// Executes a call if the other ranks post soon: this rank looks at each post, and at most `spins` times again. Anything
    /// unusual, for example a post that does not fit the call, is left to [`HostRounds::poll`]. `memory` is the whole buffer.
    /// Calls `wake` for each sleeping rank that has to learn of the post.
    pub(crate) fn run_short(
        &mut self,
        call: &ShortCall,
        site: Site,
        memory: &mut BufferAccess<'_>,
        (spins, mut wake): (u32, impl FnMut(Rank)),
    ) -> ShortResult {
        let round = self.last_round + 1;
        if self.is_busy()
            || self.has_dropped_buffers.load(Ordering::Relaxed)
            || !self.rounds.may_write(round, call.payload_bytes)
            || self.check_rounds(LEAD_MAX - 1, self.next_rank).is_err()
        {
            return ShortResult::NotBegun;
        }
        let own_call = ShmCall { sequence: self.next_position, contract: call.contract, site };
        let mut header = call.header;
        header[HEADER_WORDS - 1] = own_call.sequence;
        let parts = call.writes.iter().map(|(start, bytes)| (*start, memory.bytes(bytes.clone())));
        self.rounds.post_short(round, &header, (call.payload_bytes, parts));
        self.rounds.wake_sleepers(|rank| wake(self.members[rank]));
        if !self.await_short_posts(round, call, (&own_call, &header), spins) {
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

    /// Looks for the posts of the sources. Returns whether all of them have posted the same call with a short payload that is
    /// long enough.
    #[inline]
    fn await_short_posts(
        &self,
        round: u64,
        call: &ShortCall,
        (own_call, header): (&ShmCall, &Header),
        mut spins: u32,
    ) -> bool {
        let prefetch = |from| self.rounds.prefetch_payload(from, round, call.taken_bytes[from]);
        call.sources.indices().for_each(prefetch);
        for from in call.sources.indices() {
            let posted = loop {
                match self.rounds.read_short_post(from, round) {
                    ShortPost::Posted(posted) => break posted,
                    ShortPost::Absent if spins > 0 => spins -= 1,
                    ShortPost::Absent | ShortPost::NotShort => return false,
                }
                pause_between_looks(spins);
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
            ShortWork::Fold(_, _, range) if range.is_empty() => {}
            ShortWork::Fold(ranks, start, range) => {
                let own = memory.bytes_mut(range);
                rounds.before_own_write(own);
                let (world, length) = ((rounds.rank(), rounds.size().ranks), own.len());
                let (kernels, lower) = (call.kernels.as_ref(), &mut self.lower_ranks_piece);
                reduce_in_rank_order(kernels, (world, *ranks), own, lower, |from| {
                    payload(from, *start, length)
                });
            }
        }
    }
}

/// Lets the processor pause after some looks for a peer's post. `look` is the number of the look. A pause helps another thread
/// that shares this processor core, but takes longer than several looks.
#[inline]
pub(crate) fn pause_between_looks(look: u32) {
    if look.is_multiple_of(LOOKS_PER_PAUSE) {
        std::hint::spin_loop();
    }
}
