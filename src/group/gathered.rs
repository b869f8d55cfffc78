//! All-reduce of short buffers by gathering: every rank gets the buffers of all other ranks, and reduces them itself in rank
//! order.
//!
//! This needs the fewest steps. The result depends only on the contributions. It does not depend on the index of an element, nor
//! on which of the two algorithms (one-shot or doubling) gathered the buffers.

use super::call::{Call, Prepared, Reduction};
use super::out_of_place::zeroed;
use super::profile::{Meter, ProfilePart};
use super::{Error, Group};
use crate::reduce::Kernels;
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Algorithm, Element, Operation, Rank, ReduceOp, Site, WorldSize};

/// An all-reduce that gathers the buffers of all ranks, and then reduces them.
pub(super) struct Gathered<T> {
    call: Call,
    /// The buffers of all ranks.
    all: Vec<T>,
    slots: GatheredSlots,
    kernels: Kernels,
    meter: Meter,
}

impl Group {
    /// Prepares an all-reduce by gathering. Returns `None` if another algorithm was selected.
    pub(super) fn gathered_all_reduce<T: Element>(
        &self,
        own: &[T],
        op: ReduceOp,
        site: Site,
    ) -> Result<Option<Gathered<T>>, Error> {
        let algorithm = self.algorithm_of::<T>(Operation::AllReduce, own.len());
        let first = match algorithm {
            // In shared memory, the ranks read each other's slots, and need no copies of all buffers.
            _ if self.world == WorldSize::ONE || self.shm_executor.is_some() => return Ok(None),
            Algorithm::OneShot => Rank::ZERO,
            Algorithm::Doubling => self.rank,
            _ => return Ok(None),
        };
        let slots = GatheredSlots { world: self.world, first, count: own.len() };
        let counts = vec![own.len(); self.world.as_usize()];
        let overflows = Error::InvalidCounts("the sum of the counts is more than memory can hold");
        let partition = Partition::from_counts(&counts).ok_or(overflows)?;
        let reduction = Reduction::known::<T>(op)?;
        let kernels = reduction.kernels.clone();
        let mut all = zeroed(partition.total())?;
        all[slots.range(self.rank)].copy_from_slice(own);
        let call =
            self.call::<T>(CollectiveSpec::AllReduce { count: own.len() }, site).with_reduction(reduction);
        Ok(Some(Gathered { call, all, slots, kernels, meter: self.meter() }))
    }
}

impl<T: Element> Gathered<T> {
    /// Returns the prepared collective. It reduces the buffers into `result`, and returns `result`.
    pub(super) fn into_prepared<'a, B: AsMut<[T]> + Send + 'a>(self, mut result: B) -> Prepared<'a, T, B> {
        let Self { call, all, slots, kernels, meter } = self;
        Prepared::new(call, all, move |all| {
            meter.time(ProfilePart::Reduce, || slots.reduce(&kernels, &all, result.as_mut()));
            result
        })
    }
}

/// The places of the ranks' buffers in `Gathered::all`: in rank order, beginning with rank `first`, and after the last rank
/// continuing with rank 0.
struct GatheredSlots {
    world: WorldSize,
    first: Rank,
    /// The number of elements of one rank's buffer.
    count: usize,
}

impl GatheredSlots {
    /// Returns the range of a rank's buffer.
    fn range(&self, rank: Rank) -> std::ops::Range<usize> {
        let n = self.world.as_usize();
        let slot = (rank.index() + n - self.first.index()) % n;
        slot * self.count..(slot + 1) * self.count
    }

    /// Reduces the buffers of all ranks in rank order into `result`.
    fn reduce<T: Element>(&self, kernels: &Kernels, all: &[T], result: &mut [T]) {
        result.copy_from_slice(&all[self.range(Rank::ZERO)]);
        let last = self.world.rank_before(Rank::ZERO, 1);
        for rank in self.world.ranks().skip(1) {
            let kernel = if rank == last { &kernels.reduce_last } else { &kernels.reduce };
            let arrived = bytemuck::cast_slice(&all[self.range(rank)]);
            kernel.apply(bytemuck::cast_slice_mut(result), arrived, self.world.get());
        }
    }
}
