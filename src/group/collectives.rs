//! The blocking collectives that work in place.

use std::ops::Range;

use super::call::{Call, Reduction};
use super::selection::GroupMedium;
use super::{Buffer, Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Algorithm, Element, Operation, Rank, ReduceOp, Site};

impl Group {
    /// Returns the algorithm of `operation` on a buffer of `bytes` bytes. A reduction with a function of the
    /// caller may use another algorithm.
    pub fn algorithm(&self, operation: Operation, bytes: usize) -> Algorithm {
        let medium = match (&self.shm_executor, &self.hierarchical_data) {
            (Some(_), _) => GroupMedium::SharedMemory,
            (None, Some(_)) => GroupMedium::Hosts,
            (None, None) => GroupMedium::Links,
        };
        self.selection().choose(operation, self.world, bytes as u64, medium)
    }

    /// Returns the algorithm of `operation` on a buffer of `count` elements.
    pub(super) fn algorithm_of<T: Element>(&self, operation: Operation, count: usize) -> Algorithm {
        self.algorithm(operation, count.saturating_mul(size_of::<T>()))
    }

    /// Replaces every rank's buffer by the reduction of all ranks' buffers. All ranks get the same bits.
    ///
    /// The call uses the algorithm with the lowest cost for the length ([`Group::algorithm`], `docs/algorithms.md`). With n
    /// ranks and a buffer of S bytes, each rank sends between (n-1) S bytes in one step and 2(n-1)/n S bytes in 2(n-1)
    /// steps. `f16` and `bf16` are added in `f32` and rounded after each of the n-1 additions. [`ReduceOp::PreMulSum`] adds
    /// buffers that the caller has already multiplied. [`Group::all_reduce_scaled`] multiplies and adds.
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

    /// Runs an all-reduce with a built-in reduction on `elements` in place.
    pub(super) fn all_reduce_elements<T: Element>(
        &self,
        elements: &mut [T],
        op: ReduceOp,
        site: Site,
    ) -> Result<(), Error> {
        if let Some(gathered) = self.gathered_all_reduce::<T>(elements, op, site)? {
            return self.run_prepared(gathered.into_prepared(elements)).map(|_| ());
        }
        let call = self.all_reduce_call::<T>(elements.len(), op, site)?;
        self.run(call, elements)
    }

    /// Returns the call of an all-reduce with a built-in reduction.
    pub(super) fn all_reduce_call<T: Element>(
        &self,
        count: usize,
        op: ReduceOp,
        site: Site,
    ) -> Result<Call, Error> {
        let reduction = Reduction::built_in::<T>(op)?;
        Ok(self.new_call::<T>(CollectiveSpec::AllReduce { count }, site).with_reduction(reduction))
    }

    /// Replaces the root's buffer by the reduction of all ranks' buffers. The other buffers then hold partial results.
    ///
    /// Short buffers use a binomial tree: ceil(log2 n) steps. Long buffers use a pipelined chain of n-1 hops, in which each
    /// rank except the root sends S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidRoot`].
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

    /// Returns the call of a reduce with a built-in reduction. Returns an error if `root` is not a rank of the group.
    pub(super) fn reduce_call<T: Element>(
        &self,
        count: usize,
        op: ReduceOp,
        root: Rank,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        let reduction = Reduction::built_in::<T>(op)?;
        Ok(self.new_call::<T>(CollectiveSpec::Reduce { count, root }, site).with_reduction(reduction))
    }

    /// Replaces this rank's chunk ([`Group::chunk`]) of the buffer by its reduction and returns the chunk's range.
    /// The rest of the buffer holds partial results.
    ///
    /// With a short buffer, each rank sends the chunks directly to their owners, in one step. A long buffer uses the ring:
    /// n-1 steps. In both cases each rank sends (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
    ) -> Result<Range<usize>, Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        let reduction = Reduction::built_in::<B::Element>(op)?;
        self.run(self.reduce_scatter_call::<B::Element>(&partition, 0, reduction, site), elements)?;
        Ok(partition.range(self.rank))
    }

    /// Returns the call of a reduce-scatter. `layout` is the digest of uneven parts, or 0 for even parts.
    pub(super) fn reduce_scatter_call<T: Element>(
        &self,
        partition: &Partition,
        layout: u32,
        reduction: Reduction,
        site: Site,
    ) -> Call {
        let spec = CollectiveSpec::ReduceScatter(partition.clone());
        self.new_call::<T>(spec, site).with_reduction(reduction).with_layout(layout)
    }

    /// Copies each rank's chunk ([`Group::chunk`]) of its buffer to the buffers of all ranks.
    ///
    /// With a short buffer, each rank sends its chunk directly to all other ranks, in one step. A long buffer uses the ring:
    /// n-1 steps. In both cases each rank sends (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_gather<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        self.run(self.all_gather_call::<B::Element>(&partition, 0, site), elements)
    }

    /// Returns the call of an all-gather. `layout` is the digest of uneven parts, or 0 for even parts.
    pub(super) fn all_gather_call<T: Element>(&self, partition: &Partition, layout: u32, site: Site) -> Call {
        self.new_call::<T>(CollectiveSpec::AllGather(partition.clone()), site).with_layout(layout)
    }

    /// Copies the root's buffer to the buffers of all ranks.
    ///
    /// Short buffers use a binomial tree: ceil(log2 n) steps. Long buffers use a pipelined chain of n-1 hops, in which each
    /// rank except the last sends S bytes. The broadcast takes the time of S bytes plus n-2 segments on one link.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn broadcast<B: Buffer + ?Sized>(&mut self, buffer: &mut B, root: Rank) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        self.run(self.broadcast_call::<B::Element>(elements.len(), root, site)?, elements)
    }

    /// Returns the call of a broadcast. Returns an error if `root` is not a rank of the group.
    pub(super) fn broadcast_call<T: Element>(
        &self,
        count: usize,
        root: Rank,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        Ok(self.new_call::<T>(CollectiveSpec::Broadcast { count, root }, site))
    }

    /// Replaces each rank's buffer by the reduction of the buffers of rank 0 up to and including this rank.
    ///
    /// A pipelined chain in rank order: n-1 hops, in which each rank except the last sends S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]. [`ReduceOp::Average`] is not defined.
    #[track_caller]
    pub fn scan<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let reduction = Reduction::for_scan::<B::Element>(op)?;
        self.run(self.scan_call::<B::Element>(elements.len(), reduction, site), elements)
    }

    /// Returns the call of a scan.
    pub(super) fn scan_call<T: Element>(&self, count: usize, reduction: Reduction, site: Site) -> Call {
        self.new_call::<T>(CollectiveSpec::Scan { count }, site).with_reduction(reduction)
    }

    /// Returns the call of an exscan.
    pub(super) fn exscan_call<T: Element>(&self, count: usize, reduction: Reduction, site: Site) -> Call {
        self.new_call::<T>(CollectiveSpec::Exscan { count }, site).with_reduction(reduction)
    }

    /// Returns when every rank has called this method. The barrier takes ceil(log2 n) rounds of empty messages.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.run::<u8>(self.barrier_call(Site::here()), &mut [])
    }

    /// Returns the call of a barrier.
    pub(super) fn barrier_call(&self, site: Site) -> Call {
        self.new_call::<u8>(CollectiveSpec::Barrier, site)
    }

    /// Returns an error if `root` is not a rank of the group.
    pub(super) fn check_root(&self, root: Rank) -> Result<(), Error> {
        if self.world.contains(root) { Ok(()) } else { Err(Error::InvalidRoot { root, world: self.world }) }
    }
}
