//! What is done with bytes at a desk: copied into slots, reduced, and taken from there, or from where they lie.

use std::ops::Range;

use super::{ShmExecutor, ShmOperation};
use crate::group::memory::BufferAccess;
use crate::group::profile::ProfilePart;
use crate::schedule::Action;
use crate::schedule::rounds::{OrderedReduce, SlotWrite};

/// Bytes that are copied or reduced at a time: what several ranks contribute to them stays in a processor's first cache.
pub(super) const PIECE_BYTES: usize = 16 << 10;

impl ShmExecutor {
    /// Copies what the round asks for into this rank's slot, and posts it.
    pub(super) fn put(&mut self, round: u64, shm_operation: &ShmOperation, memory: &BufferAccess<'_>) {
        let mut started = self.meter.start();
        let end = self.scratch.slot_writes.iter().map(|put| put.at + put.range.len()).max();
        let bytes = end.unwrap_or_default() * shm_operation.element_bytes;
        let slot = if bytes == 0 { &mut [] } else { self.rounds.write(round, bytes) };
        for SlotWrite { range, at } in &self.scratch.slot_writes {
            let start = at * shm_operation.element_bytes;
            let bytes = memory.bytes(shm_operation.bytes(range));
            slot[start..start + bytes.len()].copy_from_slice(bytes);
        }
        self.rounds.post(round, &shm_operation.asked.header);
        self.meter.end(ProfilePart::Send, &mut started);
    }

    /// Reduces what the round asks for, all of which has been posted, piece by piece. Of a rank that has lent its buffer the
    /// contribution lies there.
    pub(super) fn ordered_reduce(
        &mut self,
        round: u64,
        shm_operation: &ShmOperation,
        ordered_reduce: &OrderedReduce,
        memory: &mut BufferAccess<'_>,
    ) {
        let (all, at) =
            (shm_operation.bytes(&ordered_reduce.range), ordered_reduce.at * shm_operation.element_bytes);
        let mut started = self.meter.start();
        for piece in pieces(&all) {
            let start = piece.start - all.start;
            let place = at + start..at + start + piece.len();
            let own = memory.bytes_mut(&piece);
            let rounds = &self.rounds;
            let of = |from: usize| match rounds.exposed(from, round, &piece) {
                None => Some(rounds.posted(from, round)?.bytes(place.clone())),
                lent => lent,
            };
            shm_operation.reduce((rounds.rank(), rounds.size().ranks), own, &mut self.lower, of);
            self.meter.end(ProfilePart::Reduce, &mut started);
            if ordered_reduce.is_posted_next {
                self.rounds.write(round + 1, all.len())[start..start + own.len()].copy_from_slice(own);
                self.meter.end(ProfilePart::Send, &mut started);
            }
        }
    }

    /// Reduces elements of all ranks' buffers where they lie, piece by piece, and writes each into all of them while it is in
    /// the first cache.
    pub(super) fn exchange(
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
            shm_operation
                .reduce((rank, ranks), own, &mut self.lower, |from| rounds.exposed(from, round, &piece));
            self.meter.end(ProfilePart::Reduce, &mut started);
            for to in (0..ranks).filter(|&to| to != rank) {
                self.rounds.write_exposed(to, round, piece.start, own);
            }
            self.meter.end(ProfilePart::Send, &mut started);
        }
    }

    /// Takes from the slots what the round asks for, all of which has been posted.
    pub(super) fn take(&self, round: u64, shm_operation: &ShmOperation, memory: &mut BufferAccess<'_>) {
        let mut takes = &self.scratch.slot_reads[..];
        let mut started = self.meter.start();
        while let Some(first) = takes.first() {
            // What is reduced into the same elements is taken piece by piece.
            let same = takes.iter().take_while(|take| take.range == first.range).count();
            let (run, rest) = takes.split_at(same);
            takes = rest;
            let all = shm_operation.bytes(&first.range);
            for start in all.clone().step_by(PIECE_BYTES) {
                let own = memory.bytes_mut(&(start..all.end.min(start + PIECE_BYTES)));
                for take in run {
                    let Some(posted) = self.rounds.posted(take.from.index(), round) else { return };
                    let at = take.at * shm_operation.element_bytes + start - all.start;
                    shm_operation.apply(take.action, own, posted.bytes(at..at + own.len()));
                    self.meter.end(ProfilePart::of(take.action), &mut started);
                }
            }
        }
    }
}

impl ShmOperation {
    /// Reduces all ranks' contributions to a piece in rank order, of which the rank's own stands in `own`, where the result
    /// goes. `lower` has room for a piece.
    fn reduce<'a>(
        &self,
        (rank, ranks): (usize, usize),
        own: &mut [u8],
        lower: &mut [u64],
        of: impl Fn(usize) -> Option<&'a [u8]>,
    ) {
        let action = |from| if from + 1 == ranks { Action::ReduceLast } else { Action::Reduce };
        if rank > 0
            && let Some(first) = of(0)
        {
            let lower = &mut bytemuck::cast_slice_mut(lower)[..own.len()];
            if rank > 1 {
                lower.copy_from_slice(first);
            }
            for arrived in (1..rank).filter_map(&of) {
                self.apply(Action::Reduce, lower, arrived);
            }
            self.apply_before(action(rank), own, if rank > 1 { lower } else { first });
        }
        for from in rank + 1..ranks {
            let Some(arrived) = of(from) else { return };
            self.apply(action(from), own, arrived);
        }
    }

    /// What lower ranks contributed is `lower`, this rank's contribution stands in `own`.
    fn apply_before(&self, action: Action, own: &mut [u8], lower: &[u8]) {
        let Some(kernels) = &self.kernels else { return };
        let kernel = if action == Action::ReduceLast { &kernels.reduce_last } else { &kernels.reduce };
        kernel.apply(own, lower, self.divisor);
    }

    /// What lower ranks contributed stands in `own`.
    fn apply(&self, action: Action, own: &mut [u8], arrived: &[u8]) {
        match (action, &self.kernels) {
            (Action::Reduce, Some(kernels)) => {
                kernels.reduce.apply_as_right_operand(own, arrived, self.divisor);
            }
            (Action::ReduceLast, Some(kernels)) => {
                kernels.reduce_last.apply_as_right_operand(own, arrived, self.divisor);
            }
            _ => own.copy_from_slice(arrived),
        }
    }
}

/// A range, piece by piece.
fn pieces(all: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = all.end;
    all.clone().step_by(PIECE_BYTES).map(move |start| start..end.min(start + PIECE_BYTES))
}
