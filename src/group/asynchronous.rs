//! Asynchronous collectives. A collective owns its buffer while the collective runs, and its handle returns the buffer.

use super::call::{PreparedCollective, Reduction};
use super::{Error, Group, Handle, OwnedBuffer};
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, ReduceOp, Site};

impl Group {
    /// Asynchronous [`Group::all_reduce`]; the handle returns the buffer, which is a vector or a buffer
    /// of [`Group::alloc`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]. The handle returns later failures.
    #[track_caller]
    pub fn all_reduce_async<B: OwnedBuffer>(&mut self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        let site = Site::here();
        if let Some(gathered) = self.gathered_all_reduce::<B::Element>(buffer.as_ref(), op, site)? {
            return self.start_prepared(gathered.into_prepared(buffer));
        }
        let call = self.all_reduce_call::<B::Element>(buffer.as_ref().len(), op, site)?;
        self.start_in_place(call, buffer)
    }

    /// Asynchronous [`Group::reduce`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_async<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Handle<B>, Error> {
        let call = self.reduce_call::<B::Element>(buffer.as_ref().len(), op, root, Site::here())?;
        self.start_in_place(call, buffer)
    }

    /// Asynchronous [`Group::reduce_scatter`]; the handle returns this rank's chunk.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_scatter_async<T: Element>(
        &mut self,
        buffer: Vec<T>,
        op: ReduceOp,
    ) -> Result<Handle<Vec<T>>, Error> {
        let partition = Partition::even(buffer.len(), self.world);
        let reduction = Reduction::built_in::<T>(op)?;
        let call = self.reduce_scatter_call::<T>(&partition, 0, reduction, Site::here());
        self.start_prepared(self.prepare_part(call, buffer, &partition))
    }

    /// Asynchronous [`Group::all_gather`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_gather`]. The handle returns later failures.
    #[track_caller]
    pub fn all_gather_async<B: OwnedBuffer>(&mut self, buffer: B) -> Result<Handle<B>, Error> {
        let partition = Partition::even(buffer.as_ref().len(), self.world);
        let call = self.all_gather_call::<B::Element>(&partition, 0, Site::here());
        self.start_in_place(call, buffer)
    }

    /// Asynchronous [`Group::broadcast`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast`]. The handle returns later failures.
    #[track_caller]
    pub fn broadcast_async<B: OwnedBuffer>(&mut self, buffer: B, root: Rank) -> Result<Handle<B>, Error> {
        let call = self.broadcast_call::<B::Element>(buffer.as_ref().len(), root, Site::here())?;
        self.start_in_place(call, buffer)
    }

    /// Asynchronous [`Group::scan`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scan`]. The handle returns later failures.
    #[track_caller]
    pub fn scan_async<B: OwnedBuffer>(&mut self, buffer: B, op: ReduceOp) -> Result<Handle<B>, Error> {
        let reduction = Reduction::for_scan::<B::Element>(op)?;
        let call = self.scan_call::<B::Element>(buffer.as_ref().len(), reduction, Site::here());
        self.start_in_place(call, buffer)
    }

    /// Asynchronous [`Group::barrier`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::barrier`]. The handle returns later failures.
    #[track_caller]
    pub fn barrier_async(&mut self) -> Result<Handle<()>, Error> {
        let call = self.barrier_call(Site::here());
        self.start_prepared(PreparedCollective::new(call, Vec::<u8>::new(), |_| ()))
    }
}
