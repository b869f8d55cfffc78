//! The collectives that work in place and block.

use std::ops::Range;

use super::call::{Call, Reduction};
use super::selection::GroupMedium;
use super::{Buffer, Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Algorithm, Element, Operation, Rank, ReduceOp, Site};

impl Group {
    /// The algorithm that `operation` takes for a buffer of this many bytes, with a built-in reduction if it reduces.
    pub fn algorithm(&self, operation: Operation, bytes: usize) -> Algorithm {
        let ground = match (&self.shm_executor, &self.hosts) {
            (Some(_), _) => GroupMedium::ShmRounds,
            (None, Some(_)) => GroupMedium::Hosts,
            (None, None) => GroupMedium::Links,
        };
        self.selection().choose(operation, self.world, bytes as u64, ground)
    }

    pub(super) fn algorithm_of<T: Element>(&self, operation: Operation, count: usize) -> Algorithm {
        self.algorithm(operation, count.saturating_mul(size_of::<T>()))
    }

    /// Replaces every rank's buffer by the reduction of all ranks' buffers. All ranks get the same bits.
    ///
    /// It takes the algorithm that costs least for the length ([`Group::algorithm`], `docs/algorithms.md`): from one
    /// step of (n-1) S bytes to 2(n-1) steps of 2(n-1)/n S bytes in all. `f16` and `bf16` are added in `f32` and
    /// rounded after each of the n-1 additions. [`ReduceOp::PreMulSum`] adds contributions that the caller has
    /// multiplied; this function multiplies nothing ([`Group::all_reduce_scaled`] does both).
    ///
    /// # Errors
    ///
    /// [`Error`] if the array is not contiguous, the reduction is not defined on its elements, the ranks do not agree, a
    /// peer is lost or the deadline passes.
    #[track_caller]
    pub fn all_reduce<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        self.all_reduce_elements(elements, op, site)
    }

    pub(super) fn all_reduce_elements<T: Element>(
        &self,
        elements: &mut [T],
        op: ReduceOp,
        site: Site,
    ) -> Result<(), Error> {
        if let Some(gathered) = self.gathered::<T>(elements, op, site)? {
            return self.run_prepared(gathered.into_prepared(elements)).map(|_| ());
        }
        let call = self.all_reduce_call::<T>(elements.len(), op, site)?;
        self.run(call, elements)
    }

    pub(super) fn all_reduce_call<T: Element>(
        &self,
        count: usize,
        op: ReduceOp,
        site: Site,
    ) -> Result<Call, Error> {
        let reduction = Reduction::known::<T>(op)?;
        Ok(self.call::<T>(CollectiveSpec::AllReduce { count }, site).with_reduction(reduction))
    }

    /// Replaces the root's buffer by the reduction of all ranks' buffers; the other buffers end with partial results.
    ///
    /// Short buffers take a binomial tree: ceil(log2 n) steps. Long ones take a pipelined chain: n-1 hops, S bytes
    /// sent by each rank but the root.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn reduce<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
        root: Rank,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        self.run(self.reduce_call::<B::Element>(elements.len(), op, root, site)?, elements)
    }

    pub(super) fn reduce_call<T: Element>(
        &self,
        count: usize,
        op: ReduceOp,
        root: Rank,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        let reduction = Reduction::known::<T>(op)?;
        Ok(self.call::<T>(CollectiveSpec::Reduce { count, root }, site).with_reduction(reduction))
    }

    /// Replaces this rank's chunk ([`Group::chunk`]) of the buffer by its reduction and returns the chunk's range.
    /// The rest of the buffer holds partial results.
    ///
    /// Short buffers go straight to the owners of the chunks, in one step; long ones take the ring: n-1 steps. (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
    ) -> Result<Range<usize>, Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        let reduction = Reduction::known::<B::Element>(op)?;
        self.run(self.reduce_scatter_call::<B::Element>(&partition, 0, reduction, site), elements)?;
        Ok(partition.range(self.rank))
    }

    pub(super) fn reduce_scatter_call<T: Element>(
        &self,
        partition: &Partition,
        layout: u32,
        reduction: Reduction,
        site: Site,
    ) -> Call {
        let work = CollectiveSpec::ReduceScatter(partition.clone());
        self.call::<T>(work, site).with_reduction(reduction).with_layout(layout)
    }

    /// Copies each rank's chunk ([`Group::chunk`]) of its buffer to the buffers of all ranks.
    ///
    /// Short buffers go straight to all ranks, in one step; long ones take the ring: n-1 steps. (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    #[track_caller]
    pub fn all_gather<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        self.run(self.all_gather_call::<B::Element>(&partition, 0, site), elements)
    }

    pub(super) fn all_gather_call<T: Element>(&self, partition: &Partition, layout: u32, site: Site) -> Call {
        self.call::<T>(CollectiveSpec::AllGather(partition.clone()), site).with_layout(layout)
    }

    /// Copies the root's buffer to the buffers of all ranks.
    ///
    /// Short buffers take a binomial tree: ceil(log2 n) steps. Long ones take the ring, pipelined: n-1 hops, S bytes
    /// sent by each rank but the last, S/B plus n-2 segments of time.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn broadcast<B: Buffer + ?Sized>(&mut self, buffer: &mut B, root: Rank) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        self.run(self.broadcast_call::<B::Element>(elements.len(), root, site)?, elements)
    }

    pub(super) fn broadcast_call<T: Element>(
        &self,
        count: usize,
        root: Rank,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        Ok(self.call::<T>(CollectiveSpec::Broadcast { count, root }, site))
    }

    /// Replaces each rank's buffer by the reduction of the buffers of rank 0 up to and including its own.
    ///
    /// A chain in rank order, pipelined: n-1 hops, S bytes sent by each rank but the last.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`]; an average is not defined.
    #[track_caller]
    pub fn scan<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let reduction = Reduction::for_scan::<B::Element>(op)?;
        self.run(self.scan_call::<B::Element>(elements.len(), reduction, site), elements)
    }

    pub(super) fn scan_call<T: Element>(&self, count: usize, reduction: Reduction, site: Site) -> Call {
        self.call::<T>(CollectiveSpec::Scan { count }, site).with_reduction(reduction)
    }

    pub(super) fn exscan_call<T: Element>(&self, count: usize, reduction: Reduction, site: Site) -> Call {
        self.call::<T>(CollectiveSpec::Exscan { count }, site).with_reduction(reduction)
    }

    /// Returns when every rank has called it: ceil(log2 n) rounds of an empty message.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    #[track_caller]
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.run::<u8>(self.barrier_call(Site::here()), &mut [])
    }

    pub(super) fn barrier_call(&self, site: Site) -> Call {
        self.call::<u8>(CollectiveSpec::Barrier, site)
    }

    pub(super) fn check_root(&self, root: Rank) -> Result<(), Error> {
        if self.world.contains(root) { Ok(()) } else { Err(Error::InvalidRoot { root, world: self.world }) }
    }
}
