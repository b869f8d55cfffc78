//! All-reduce of short buffers by gathering: every rank gets the buffers of all other ranks, and reduces all buffers itself in
//! rank order.
//!
//! This method needs the fewest steps. The result of an element depends only on the ranks' values of this element. It does not
//! depend on the index of the element, or on the algorithm (one-shot or doubling) that gathered the buffers.

use super::call::Call;
use super::parts::{TOTAL_TOO_LARGE, zeroed};
use super::profile::{Meter, ProfilePart};
use super::{Error, Group};
use crate::reduce::Kernels;
use crate::types::{Algorithm, Element, Operation, Rank, WorldSize};

/// The buffers of all ranks in one memory, and how to reduce them. The buffers are in rank order and begin with that of
/// `first_rank`. The buffer of rank 0 follows that of the last rank.
pub(super) struct GatheredBuffers {
    world: WorldSize,
    first_rank: Rank,
    /// The number of elements of one rank's buffer.
    count: usize,
    kernels: Kernels,
    meter: Meter,
}

impl Group {
    /// Returns memory for the buffers of all ranks, which holds this rank's buffer. Returns `None` if the call is no all-reduce
    /// by gathering.
    pub(super) fn gathered_buffers<T: Element>(
        &self,
        call: &Call,
        own_buffer: &[T],
    ) -> Result<Option<(Vec<T>, GatheredBuffers)>, Error> {
        let first_rank = match call.algorithm {
            // In shared memory, the ranks read each other's slots, and need no copies of all buffers.
            _ if call.uses_shared_memory || self.world == WorldSize::ONE => return Ok(None),
            _ if call.spec.operation() != Operation::AllReduce => return Ok(None),
            Algorithm::OneShot => Rank::ZERO,
            Algorithm::Doubling => self.rank,
            _ => return Ok(None),
        };
        let Some(reduction) = &call.reduction else { return Ok(None) };
        let (world, count, kernels) = (self.world, own_buffer.len(), reduction.kernels.clone());
        let buffers = GatheredBuffers { world, first_rank, count, kernels, meter: self.meter() };
        let mut memory = zeroed(count.checked_mul(world.as_usize()).ok_or(TOTAL_TOO_LARGE)?)?;
        memory[buffers.range(self.rank)].copy_from_slice(own_buffer);
        Ok(Some((memory, buffers)))
    }
}

impl GatheredBuffers {
    /// Reduces the gathered buffers in rank order into `result`.
    pub(super) fn reduce<T: Element>(&self, memory: &[T], result: &mut [T]) {
        self.meter.time(ProfilePart::Reduce, || self.reduce_unmeasured(memory, result));
    }

    fn reduce_unmeasured<T: Element>(&self, memory: &[T], result: &mut [T]) {
        result.copy_from_slice(&memory[self.range(Rank::ZERO)]);
        let last = self.world.rank_before(Rank::ZERO, 1);
        for rank in self.world.ranks().skip(1) {
            let kernel = if rank == last { &self.kernels.reduce_last } else { &self.kernels.reduce };
            let contribution = bytemuck::cast_slice(&memory[self.range(rank)]);
            kernel.apply(bytemuck::cast_slice_mut(result), contribution, self.world.get());
        }
    }

    /// Returns the range of a rank's buffer.
    fn range(&self, rank: Rank) -> std::ops::Range<usize> {
        let n = self.world.as_usize();
        let slot = (rank.index() + n - self.first_rank.index()) % n;
        slot * self.count..(slot + 1) * self.count
    }
}
