//! Short calls that a program repeats. What does not change from call to call is computed only once.

use std::ops::Range;

use crate::reduce::Kernels;
use crate::schedule::program::{Program, RoundWork, SlotWrite, Take};
use crate::shm::{Header, SHORT_PAYLOAD_BYTES_MAX};
use crate::types::{Contract, Rank, RankSet};

/// A collective of one round whose payloads are short. The offsets and ranges are in bytes.
pub(crate) struct ShortCall {
    pub(super) contract: Contract,
    /// The header of the posts, without the number of the call.
    pub(super) header: Header,
    pub(super) kernels: Option<Kernels>,
    pub(super) payload_bytes: usize,
    /// The parts of the buffer that the rank posts, and where they begin in the payload.
    pub(super) writes: Box<[(usize, Range<usize>)]>,
    pub(super) sources: RankSet,
    /// For each rank: up to which byte the call needs its payload.
    pub(super) taken_bytes: Box<[usize]>,
    pub(super) work: ShortWork,
}

/// What a rank does with the posts.
pub(super) enum ShortWork {
    /// It copies these parts of the payloads of other ranks: the rank, the place in its payload, and the place in the buffer.
    Take(Box<[(usize, usize, Range<usize>)]>),
    /// It reduces the payloads of this number of ranks, from this place in the payloads on, into this part of the buffer.
    Fold(usize, usize, Range<usize>),
}

pub(crate) enum ShortResult {
    Complete,
    /// This rank has posted nothing. The call has to begin as any other operation.
    NotBegun,
    /// This rank has posted. The call has to go on as an operation that [has posted](super::HostRounds::add_operation).
    Posted,
}

impl ShortCall {
    /// Returns the call; `None` if the program has several rounds or long payloads. `header` is that of its posts, without a
    /// number.
    pub(super) fn new(
        program: &Program,
        ranks: usize,
        (contract, header): (Contract, Header),
        kernels: Option<Kernels>,
    ) -> Option<Self> {
        let bytes = contract.dtype.size_bytes();
        let [phase] = &*program.phases else { return None };
        let [round] = &*phase.rounds else { return None };
        let to_bytes = |range: Range<usize>| range.start * bytes..range.end * bytes;
        let taken =
            |take: &Take| (take.from.index(), take.slot_offset * bytes, to_bytes(take.elements.block(0)));
        let work = match &round.work {
            RoundWork::Take(takes) => ShortWork::Take(takes.iter().map(taken).collect()),
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
        let write = |write: &SlotWrite| (write.slot_offset * bytes, to_bytes(write.elements.block(0)));
        is_short.then(|| Self {
            contract,
            header,
            kernels,
            payload_bytes,
            writes: round.writes.iter().map(write).collect(),
            sources: round.sources,
            taken_bytes,
            work,
        })
    }
}
