//! Collectives that go on by themselves, on buffers that they own and give back.

use super::call::{Prepared, Reduction};
use super::{Error, Group, Handle, OwnedBuffer};
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, ReduceOp, Site};

impl Group {
    /// [`Group::all_reduce`], going on by itself; gives the buffer back, a vector or one of [`Group::alloc`].
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_reduce_async<B: OwnedBuffer>(&mut self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        let site = Site::here();
        if let Some(gathered) = self.gathered::<B::Element>(buffer.as_ref(), op, site)? {
            return self.start(gathered.into_prepared(buffer));
        }
        let call = self.all_reduce_call::<B::Element>(buffer.as_ref().len(), op, site)?;
        self.start_on(call, buffer)
    }

    /// [`Group::reduce`], going on by itself; gives the buffer back.
    ///
    /// # Errors
    ///
    /// As [`Group::reduce`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn reduce_async<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Handle<B>, Error> {
        let call = self.reduce_call::<B::Element>(buffer.as_ref().len(), op, root, Site::here())?;
        self.start_on(call, buffer)
    }

    /// [`Group::reduce_scatter`], going on by itself; gives this rank's chunk.
    ///
    /// # Errors
    ///
    /// As [`Group::reduce_scatter`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn reduce_scatter_async<T: Element>(
        &mut self,
        buffer: Vec<T>,
        op: ReduceOp,
    ) -> Result<Handle<Vec<T>>, Error> {
        let partition = Partition::even(buffer.len(), self.world);
        let reduction = Reduction::known::<T>(op)?;
        let call = self.reduce_scatter_call::<T>(&partition, 0, reduction, Site::here());
        self.start(self.prepare_part(call, buffer, &partition))
    }

    /// [`Group::all_gather`], going on by itself; gives the buffer back.
    ///
    /// # Errors
    ///
    /// As [`Group::all_gather`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_gather_async<B: OwnedBuffer>(&mut self, buffer: B) -> Result<Handle<B>, Error> {
        let partition = Partition::even(buffer.as_ref().len(), self.world);
        let call = self.all_gather_call::<B::Element>(&partition, 0, Site::here());
        self.start_on(call, buffer)
    }

    /// [`Group::broadcast`], going on by itself; gives the buffer back.
    ///
    /// # Errors
    ///
    /// As [`Group::broadcast`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn broadcast_async<B: OwnedBuffer>(&mut self, buffer: B, root: Rank) -> Result<Handle<B>, Error> {
        let call = self.broadcast_call::<B::Element>(buffer.as_ref().len(), root, Site::here())?;
        self.start_on(call, buffer)
    }

    /// [`Group::scan`], going on by itself; gives the buffer back.
    ///
    /// # Errors
    ///
    /// As [`Group::scan`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn scan_async<B: OwnedBuffer>(&mut self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        let reduction = Reduction::of_prefixes::<B::Element>(op)?;
        let call = self.scan_call::<B::Element>(buffer.as_ref().len(), reduction, Site::here());
        self.start_on(call, buffer)
    }

    /// [`Group::barrier`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::barrier`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn barrier_async(&mut self) -> Result<Handle<()>, Error> {
        let call = self.barrier_call(Site::here());
        self.start(Prepared::new(call, Vec::<u8>::new(), |_| ()))
    }
}
