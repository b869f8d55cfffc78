//! All-reduce of short buffers by gathering: every rank gets the buffers of all other ranks, and reduces all buffers itself in
//! rank order.
//!
//! This method needs the fewest steps. The result of an element depends only on the ranks' values of this element. It does not
//! depend on the index of the element, or on the algorithm (one-shot or doubling) that gathered the buffers.

use super::call::{Call, PreparedCollective, Reduction};
use super::out_of_place::zeroed;
use super::profile::{Meter, ProfilePart};
use super::{Error, Group};
use crate::reduce::Kernels;
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Algorithm, Element, Operation, Rank, ReduceOp, Site, WorldSize};

/// An all-reduce that gathers the buffers of all ranks, and then reduces them.
pub(super) struct GatheredAllReduce<T> {
    call: Call,
    /// The buffers of all ranks. Until the collective has run, only this rank's buffer is filled in.
    all_buffers: Vec<T>,
    slots: GatheredSlots,
    kernels: Kernels,
    meter: Meter,
}

impl Group {
    /// Prepares an all-reduce by gathering. Returns `None` if the group does not use this method for a buffer of this length.
    pub(super) fn gathered_all_reduce<T: Element>(
        &self,
        own_buffer: &[T],
        op: ReduceOp,
        site: Site,
    ) -> Result<Option<GatheredAllReduce<T>>, Error> {
        let algorithm = self.algorithm_of::<T>(Operation::AllReduce, own_buffer.len());
        let first_rank = match algorithm {
            // In shared memory, the ranks read each other's slots, and need no copies of all buffers.
            _ if self.world == WorldSize::ONE || self.shm_executor.is_some() => return Ok(None),
            Algorithm::OneShot => Rank::ZERO,
            Algorithm::Doubling => self.rank,
            _ => return Ok(None),
        };
        let slots = GatheredSlots { world: self.world, first_rank, count: own_buffer.len() };
        let counts = vec![own_buffer.len(); self.world.as_usize()];
        let overflows = Error::InvalidCounts("the sum of the counts is more than memory can hold");
        let partition = Partition::from_counts(&counts).ok_or(overflows)?;
        let reduction = Reduction::built_in::<T>(op)?;
        let kernels = reduction.kernels.clone();
        let mut all_buffers = zeroed(partition.total())?;
        all_buffers[slots.range(self.rank)].copy_from_slice(own_buffer);
        let call = self
            .new_call::<T>(CollectiveSpec::AllReduce { count: own_buffer.len() }, site)
            .with_reduction(reduction);
        Ok(Some(GatheredAllReduce { call, all_buffers, slots, kernels, meter: self.meter() }))
    }
}

impl<T: Element> GatheredAllReduce<T> {
    /// Returns the prepared collective. After the buffers have been gathered, it reduces them into `result` and returns `result`.
    pub(super) fn into_prepared<'a, B: AsMut<[T]> + Send + 'a>(
        self,
        mut result: B,
    ) -> PreparedCollective<'a, T, B> {
        let Self { call, all_buffers, slots, kernels, meter } = self;
        PreparedCollective::new(call, all_buffers, move |all_buffers| {
            meter.time(ProfilePart::Reduce, || slots.reduce(&kernels, &all_buffers, result.as_mut()));
            result
        })
    }
}

/// The slots of the ranks' buffers in `GatheredAllReduce::all_buffers`. The slots are in rank order and begin with `first_rank`.
/// Rank 0 follows the last rank.
struct GatheredSlots {
    world: WorldSize,
    first_rank: Rank,
    /// The number of elements of one rank's buffer.
    count: usize,
}

impl GatheredSlots {
    /// Returns the range of a rank's buffer.
    fn range(&self, rank: Rank) -> std::ops::Range<usize> {
        let n = self.world.as_usize();
        let slot = (rank.index() + n - self.first_rank.index()) % n;
        slot * self.count..(slot + 1) * self.count
    }

    /// Reduces the buffers of all ranks in rank order into `result`.
    fn reduce<T: Element>(&self, kernels: &Kernels, all_buffers: &[T], result: &mut [T]) {
        result.copy_from_slice(&all_buffers[self.range(Rank::ZERO)]);
        let last = self.world.rank_before(Rank::ZERO, 1);
        for rank in self.world.ranks().skip(1) {
            let kernel = if rank == last { &kernels.reduce_last } else { &kernels.reduce };
            let contribution = bytemuck::cast_slice(&all_buffers[self.range(rank)]);
            kernel.apply(bytemuck::cast_slice_mut(result), contribution, self.world.get());
        }
    }
}
