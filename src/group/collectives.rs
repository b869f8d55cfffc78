//! Short forms of frequent collectives. In shared memory, such a call runs at once if the group has kept its plan.

use std::ops::Range;

use super::call::Call;
use super::kept_plan::{Plan, PlanKey};
use super::verb_plans::Barrier;
use super::verbs::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter, Scan};
use super::{Buffer, Error, Group, Handle, OwnedBuffer};
use crate::runtime::buffer::BufferAccess;
use crate::runtime::driver::BegunShort;
use crate::types::{Element, Operation, Rank, ReduceOp, Site};

impl Group {
    /// Replaces every rank's buffer by the reduction of all ranks' buffers. All ranks get the same bits.
    ///
    /// Each collective uses the algorithm with the lowest cost for the length of its buffer ([`Group::algorithm`]);
    /// `docs/algorithms.md` lists the steps and bytes of each. `f16` and `bf16` are added in `f32` and rounded after each of the
    /// n-1 additions. [`ReduceOp::PreMulSum`] adds buffers that the caller has already multiplied.
    /// [`scaled_sum`](super::verbs::scaled_sum) multiplies and adds.
    ///
    /// # Errors
    ///
    /// [`Error`] if the array is not contiguous, the reduction is undefined for its elements, the ranks do not agree, a peer is
    /// lost or the deadline passes.
    #[track_caller]
    pub fn all_reduce<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        let verb = (Operation::AllReduce, Some(op), Rank::ZERO);
        match self.run_kept(verb, buffer.elements_mut()?, Site::here()) {
            Some(result) => result,
            None => self.call(AllReduce::new(op)).run(buffer).map(drop),
        }
    }

    /// Asynchronous [`Group::all_reduce`]; the handle returns the buffer, which is a vector or a buffer of [`Group::alloc`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]. The handle returns later failures.
    #[track_caller]
    pub fn all_reduce_async<B: OwnedBuffer>(&mut self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        self.call(AllReduce::new(op)).start(buffer)
    }

    /// Replaces the root's buffer by the reduction of all ranks' buffers. The other buffers then hold partial results.
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
        self.call(Reduce::to(root, op)).run(buffer).map(drop)
    }

    /// Replaces this rank's chunk ([`Group::chunk`]) of the buffer by its reduction and returns the chunk's range.
    /// The rest of the buffer holds partial results.
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
        self.call(ReduceScatter::new(op)).run(buffer)
    }

    /// Copies each rank's chunk ([`Group::chunk`]) of its buffer to the buffers of all ranks.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_gather<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        self.call(AllGather::new()).run(buffer).map(drop)
    }

    /// Copies the root's buffer to the buffers of all ranks.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn broadcast<B: Buffer + ?Sized>(&mut self, buffer: &mut B, root: Rank) -> Result<(), Error> {
        let verb = (Operation::Broadcast, None, root);
        match self.run_kept(verb, buffer.elements_mut()?, Site::here()) {
            Some(result) => result,
            None => self.call(Broadcast::from(root)).run(buffer).map(drop),
        }
    }

    /// Replaces each rank's buffer by the reduction of the buffers of rank 0 up to and including this rank.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]. [`ReduceOp::Average`] is not defined.
    #[track_caller]
    pub fn scan<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        self.call(Scan::new(op)).run(buffer).map(drop)
    }

    /// Returns when every rank has called this method.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.call(Barrier).run::<[u8]>(&mut []).map(drop)
    }

    /// Asynchronous [`Group::barrier`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::barrier`]. The handle returns later failures.
    #[track_caller]
    pub fn barrier_async(&mut self) -> Result<Handle<()>, Error> {
        Ok(self.call(Barrier).start(Vec::<u8>::new())?.and_then(|_| Ok(())))
    }

    /// Runs a collective that works on all `elements` in place. Returns `None` if the group has not kept its plan.
    #[inline]
    fn run_kept<T: Element>(
        &mut self,
        (operation, reduction, root): (Operation, Option<ReduceOp>, Rank),
        elements: &mut [T],
        site: Site,
    ) -> Option<Result<(), Error>> {
        let (dtype, count, is_in_place) = (T::DTYPE, elements.len(), true);
        let key = PlanKey { operation, reduction, root, named_count: 0, dtype, count, is_in_place };
        let mut kept = self.take_kept(key, site)?;
        let result = self.run_on_bytes(&mut kept.call, bytemuck::cast_slice_mut::<T, u8>(elements).into());
        self.kept_plans.keep(kept);
        Some(result)
    }

    /// Takes the plan of a call on this line, if the group has kept one.
    #[inline]
    pub(super) fn take_kept(&mut self, key: PlanKey, site: Site) -> Option<Box<Plan>> {
        let mut kept = self.kept_plans.take(|kept| kept.key == Some(key))?;
        (kept.call.request.timeout, kept.call.request.site) = (self.timeout, site);
        Some(kept)
    }

    pub(super) fn run_on_bytes(&mut self, call: &mut Call, mut bytes: BufferAccess<'_>) -> Result<(), Error> {
        let parts = (&call.short, &self.job, &mut self.host_rounds);
        let begun = if let (Some(short), Some(job), Some(host_rounds)) = parts {
            match job.driver.run_short(host_rounds, (short, &call.request), &mut bytes) {
                Ok(()) => return Ok(()),
                Err(begun) => begun,
            }
        } else {
            BegunShort::default()
        };
        self.run_operation(call, bytes, begun)
    }

    pub(super) fn check_root(&self, root: Rank) -> Result<(), Error> {
        if self.world.contains(root) { Ok(()) } else { Err(Error::InvalidRoot { root, world: self.world }) }
    }
}
