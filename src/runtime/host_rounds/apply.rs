//! Copies and reductions in shared memory: writing to slots, reading from slots, and reducing in place.

use std::ops::Range;

use super::operation::ShmOperation;
use super::{HostRounds, PIECE_BYTES};
use crate::reduce::reduce_in_rank_order;
use crate::runtime::buffer::BufferAccess;
use crate::runtime::measurements::ProfilePart;
use crate::schedule::program::{Fold, RoundWork, SlotWrite, Take};
use crate::shm::{Payload, RoundsMemory, copy_to_buffer};

impl<M: RoundsMemory> HostRounds<M> {
    /// Copies the elements that the current round names into this rank's slot, and posts the round.
    pub(super) fn post_elements(
        &mut self,
        round: u64,
        shm_operation: &ShmOperation,
        memory: &BufferAccess<'_>,
    ) {
        let mut started = self.meter.start();
        let (current, block) = shm_operation.execution.round();
        let payload = shm_operation.payload();
        for SlotWrite { elements, part } in &current.writes {
            let source = memory.bytes(shm_operation.bytes(&elements.block(block)));
            self.rounds.write_payload(round, payload, (*part, 0, source));
        }
        self.rounds.post(round, &shm_operation.header);
        self.meter.end(ProfilePart::Send, &mut started);
    }

    /// Does the work of the current round. All sources have posted the round.
    pub(super) fn apply(&mut self, round: u64, shm_operation: &ShmOperation, memory: &mut BufferAccess<'_>) {
        let (current, block) = shm_operation.execution.round();
        let takes = match &current.work {
            RoundWork::Take(takes) => takes,
            RoundWork::Fold(fold) => return self.fold(round, shm_operation, (fold, block), memory),
            RoundWork::FoldInPlace(range) => return self.fold_in_place(round, shm_operation, range, memory),
        };
        let (mut started, bytes_of_all_ranks) = (self.meter.start(), memory.len() * self.rounds.size().ranks);
        for Take { from, elements } in takes {
            let all_bytes = shm_operation.bytes(&elements.block(block));
            let Some(posted) = self.rounds.read_post(from.index(), round, shm_operation.part_bytes()) else {
                return;
            };
            for piece in pieces(&all_bytes) {
                let start = piece.start - all_bytes.start;
                let Some(bytes) = posted.bytes(start..start + piece.len()) else { return };
                let target = memory.bytes_mut(&piece);
                self.rounds.before_own_write(target);
                copy_to_buffer(target, &bytes, bytes_of_all_ranks);
            }
            self.meter.end(ProfilePart::Receive, &mut started);
        }
    }

    /// Reduces the contributions of the first ranks in rank order, piece by piece. The contribution of a rank that posted the
    /// address of its buffer is read from this buffer, and every other contribution from the slot of its rank.
    fn fold(
        &mut self,
        round: u64,
        shm_operation: &ShmOperation,
        (fold, block): (&Fold, usize),
        memory: &mut BufferAccess<'_>,
    ) {
        let all_bytes = shm_operation.bytes(&fold.elements.block(block));
        let part_bytes = shm_operation.part_bytes();
        let may_expose = shm_operation.execution.may_expose();
        let reads_next = shm_operation.execution.next_round().is_some_and(|next| next.sources.count() > 0);
        let payload = Payload { bytes: all_bytes.len(), part_bytes: 0, is_exchanged: reads_next };
        let mut started = self.meter.start();
        for piece in pieces(&all_bytes) {
            let start = piece.start - all_bytes.start;
            let slot_range = start..start + piece.len();
            let own = memory.bytes_mut(&piece);
            let rounds = &self.rounds;
            rounds.before_own_write(own);
            let exposed_bytes = |from| rounds.exposed_bytes(from, round, &piece);
            let contribution_of = |from: usize| match may_expose.then(|| exposed_bytes(from)).flatten() {
                None => rounds.read_post(from, round, part_bytes)?.bytes(slot_range.clone()),
                Some(exposed) => Some(exposed.into()),
            };
            let world = ((rounds.rank(), rounds.size().ranks), fold.ranks as usize);
            let kernels = shm_operation.kernels.as_ref();
            reduce_in_rank_order(kernels, world, own, &mut self.lower_ranks_piece, contribution_of);
            self.meter.end(ProfilePart::Reduce, &mut started);
            if fold.is_posted_next {
                self.rounds.write_payload(round + 1, payload, (0, start, own));
                self.meter.end(ProfilePart::Send, &mut started);
            }
        }
    }

    /// Reduces elements of all ranks' buffers in place, and writes each piece to all buffers while it is in the cache.
    fn fold_in_place(
        &mut self,
        round: u64,
        shm_operation: &ShmOperation,
        range: &Range<usize>,
        memory: &mut BufferAccess<'_>,
    ) {
        let (rank, ranks) = (self.rounds.rank(), self.rounds.size().ranks);
        let mut started = self.meter.start();
        for piece in pieces(&shm_operation.bytes(range)) {
            let own = memory.bytes_mut(&piece);
            let rounds = &self.rounds;
            rounds.before_own_write(own);
            let kernels = shm_operation.kernels.as_ref();
            let world = ((rank, ranks), ranks);
            reduce_in_rank_order(kernels, world, own, &mut self.lower_ranks_piece, |from| {
                rounds.exposed_bytes(from, round, &piece)
            });
            self.meter.end(ProfilePart::Reduce, &mut started);
            for to in (0..ranks).filter(|&to| to != rank) {
                self.rounds.write_exposed(to, round, piece.start, own);
            }
            self.meter.end(ProfilePart::Send, &mut started);
        }
    }
}

/// Divides a range of bytes into pieces of [`PIECE_BYTES`] bytes. The last piece may be shorter.
fn pieces(bytes: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = bytes.end;
    bytes.clone().step_by(PIECE_BYTES).map(move |start| start..end.min(start + PIECE_BYTES))
}
