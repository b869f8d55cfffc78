//! All-reduce of short buffers: every rank gets all others' buffers and reduces them alone, in rank order.
//!
//! It takes the fewest steps, and the result depends on nothing but the contributions: not on where an element stands, nor
//! on which of the two algorithms brought them.

use super::call::{Call, Prepared, Reduction};
use super::out_of_place::zeroed;
use super::profile::{Meter, ProfilePart};
use super::{Error, Group};
use crate::reduce::Kernels;
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Algorithm, Element, Operation, Rank, ReduceOp, Site, WorldSize};

/// The gathering of all ranks' buffers, and how they are reduced into one.
pub(super) struct Gathered<T> {
    call: Call,
    all: Vec<T>,
    slots: GatheredSlots,
    kernels: Kernels,
    meter: Meter,
}

impl Group {
    /// An all-reduce by gathering; `None` if another way costs less.
    pub(super) fn gathered<T: Element>(
        &self,
        own: &[T],
        op: ReduceOp,
        site: Site,
    ) -> Result<Option<Gathered<T>>, Error> {
        let algorithm = self.algorithm_of::<T>(Operation::AllReduce, own.len());
        let first = match algorithm {
            // In shared memory nobody needs a copy of its own.
            _ if self.world == WorldSize::ONE || self.shm_executor.is_some() => return Ok(None),
            Algorithm::OneShot => Rank::ZERO,
            Algorithm::Doubling => self.rank,
            _ => return Ok(None),
        };
        let slots = GatheredSlots { world: self.world, first, count: own.len() };
        let counts = vec![own.len(); self.world.as_usize()];
        let overflows = Error::InvalidCounts("they come to more than memory can hold");
        let partition = Partition::from_counts(&counts).ok_or(overflows)?;
        let reduction = Reduction::known::<T>(op)?;
        let kernels = reduction.kernels.clone();
        let mut all = zeroed(partition.total())?;
        all[slots.of(self.rank)].copy_from_slice(own);
        let call =
            self.call::<T>(CollectiveSpec::AllReduce { count: own.len() }, site).with_reduction(reduction);
        Ok(Some(Gathered { call, all, slots, kernels, meter: self.meter() }))
    }
}

impl<T: Element> Gathered<T> {
    /// The same as a collective that ends with the reduction in `result`, which it gives back.
    pub(super) fn into_prepared<'a, B: AsMut<[T]> + Send + 'a>(self, mut result: B) -> Prepared<'a, T, B> {
        let Self { call, all, slots, kernels, meter } = self;
        Prepared::new(call, all, move |all| {
            meter.time(ProfilePart::Reduce, || slots.reduce(&kernels, &all, result.as_mut()));
            result
        })
    }
}

/// Where each rank's buffer lies: one after another, beginning with one of them.
struct GatheredSlots {
    world: WorldSize,
    first: Rank,
    count: usize,
}

impl GatheredSlots {
    fn of(&self, rank: Rank) -> std::ops::Range<usize> {
        let n = self.world.as_usize();
        let slot = (rank.index() + n - self.first.index()) % n;
        slot * self.count..(slot + 1) * self.count
    }

    fn reduce<T: Element>(&self, kernels: &Kernels, all: &[T], result: &mut [T]) {
        result.copy_from_slice(&all[self.of(Rank::ZERO)]);
        let last = self.world.before(Rank::ZERO, 1);
        for rank in self.world.ranks().skip(1) {
            let kernel = if rank == last { &kernels.reduce_last } else { &kernels.reduce };
            let arrived = bytemuck::cast_slice(&all[self.of(rank)]);
            kernel.apply(bytemuck::cast_slice_mut(result), arrived, self.world.get());
        }
    }
}
