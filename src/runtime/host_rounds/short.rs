//! Short calls that a program repeats. What does not change from call to call is computed only once.

use std::ops::Range;

use crate::reduce::Kernels;
use crate::schedule::program::{Program, RoundWork, SlotWrite, Take};
use crate::shm::{Header, Payload, SHORT_PAYLOAD_BYTES_MAX};
use crate::types::{Contract, Rank, RankSet, part_index};

/// A collective of one round whose payloads are short. The offsets and ranges are in bytes.
pub(crate) struct ShortCall {
    pub(super) contract: Contract,
    /// The header of the posts, without the number of the call.
    pub(super) header: Header,
    pub(super) kernels: Option<Kernels>,
    pub(super) payload_bytes: usize,
    /// How many rounds the rank may be ahead of the others when it posts.
    pub(super) lead_max: u64,
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
    /// It reduces the payloads of this number of ranks, or its parts of them, into this part of the buffer.
    Fold(usize, Range<usize>),
}

pub(crate) enum ShortResult {
    Complete,
    /// This rank has posted nothing. The call has to begin as any other operation.
    NotBegun,
    /// This rank has posted. The call has to go on as an operation that [has posted](super::HostRounds::add_operation).
    Posted,
}

impl ShortCall {
    /// Returns the call; `None` if the program has several rounds or long payloads. `header` is that of its posts, unnumbered.
    pub(super) fn new(
        program: &Program,
        (rank, ranks): (usize, usize),
        (contract, header): (Contract, Header),
        kernels: Option<Kernels>,
    ) -> Option<Self> {
        let bytes = contract.dtype.size_bytes();
        let [phase] = &*program.phases else { return None };
        let [round] = &*phase.rounds else { return None };
        let to_bytes = |range: Range<usize>| range.start * bytes..range.end * bytes;
        let part_bytes = round.part_len * bytes;
        let start_in = |from: usize| part_index(from, rank) * part_bytes;
        let taken = |take: &Take| {
            let from = take.from.index();
            (from, start_in(from), to_bytes(take.elements.block(0)))
        };
        let work = match &round.work {
            RoundWork::Take(takes) => ShortWork::Take(takes.iter().map(taken).collect()),
            RoundWork::Fold(fold) if !fold.is_posted_next => {
                ShortWork::Fold(fold.ranks as usize, to_bytes(fold.elements.block(0)))
            }
            RoundWork::Fold(_) | RoundWork::FoldInPlace(_) => return None,
        };
        let mut taken_bytes: Box<[usize]> = vec![0; ranks].into();
        for from in round.sources.indices() {
            let length = round.taken_len(Rank::new(from as u32), 0) * bytes;
            taken_bytes[from] = if length == 0 { 0 } else { start_in(from) + length };
        }
        let payload_bytes = round.written_len(0) * bytes;
        let is_short = phase.times == 1
            && program.if_all_expose.is_none()
            && taken_bytes.iter().chain([&payload_bytes]).all(|&bytes| bytes <= SHORT_PAYLOAD_BYTES_MAX);
        let write = |write: &SlotWrite| (write.part * part_bytes, to_bytes(write.elements.block(0)));
        is_short.then(|| Self {
            contract,
            header,
            kernels,
            payload_bytes,
            lead_max: Payload { bytes: payload_bytes, ..Payload::default() }.lead_max(ranks),
            writes: round.writes.iter().map(write).collect(),
            sources: round.sources,
            taken_bytes,
            work,
        })
    }
}
