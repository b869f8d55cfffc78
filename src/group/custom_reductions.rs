//! Reductions with a function of the user. The function must be associative; for a reduce-scatter it must also be commutative.

use std::ops::Range;

use super::call::{Call, PreparedCollective, Reduction};
use super::{Buffer, Error, Group, Handle, Input};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, Site};

impl Group {
    /// [`Group::all_reduce`] with a function of the caller. The function must be associative but need not commute: it is
    /// called in rank order, as `function(lower ranks, higher ranks)`.
    ///
    /// A pipelined chain through all ranks and back: 2(n-1) hops, in which each rank sends up to 2S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_reduce_with<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        function: impl Fn(&B::Element, &B::Element) -> B::Element + Send + Sync + 'static,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        self.run(self.all_reduce_with_call(elements.len(), function, site), elements)
    }

    /// Asynchronous [`Group::all_reduce_with`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce_with`]. The handle returns later failures.
    #[track_caller]
    pub fn all_reduce_with_async<T: Element>(
        &mut self,
        buffer: Vec<T>,
        function: impl Fn(&T, &T) -> T + Send + Sync + 'static,
    ) -> Result<Handle<Vec<T>>, Error> {
        let call = self.all_reduce_with_call(buffer.len(), function, Site::here());
        self.start_prepared(PreparedCollective::new(call, buffer, |buffer| buffer))
    }

    /// Returns the call of an all-reduce with a function of the caller.
    fn all_reduce_with_call<T: Element>(
        &self,
        count: usize,
        function: impl Fn(&T, &T) -> T + Send + Sync + 'static,
        site: Site,
    ) -> Call {
        self.new_call::<T>(CollectiveSpec::AllReduce { count }, site)
            .with_reduction(Reduction::custom(function))
            .in_rank_order()
    }

    /// [`Group::reduce`] with a function of the caller. The function must be associative but need not commute: it is
    /// called in rank order, as `function(lower ranks, higher ranks)`.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce`].
    #[track_caller]
    pub fn reduce_with<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        root: Rank,
        function: impl Fn(&B::Element, &B::Element) -> B::Element + Send + Sync + 'static,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        self.run(self.reduce_with_call(elements.len(), root, function, site)?, elements)
    }

    /// Asynchronous [`Group::reduce_with`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_with`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_with_async<T: Element>(
        &mut self,
        buffer: Vec<T>,
        root: Rank,
        function: impl Fn(&T, &T) -> T + Send + Sync + 'static,
    ) -> Result<Handle<Vec<T>>, Error> {
        let call = self.reduce_with_call(buffer.len(), root, function, Site::here())?;
        self.start_prepared(PreparedCollective::new(call, buffer, |buffer| buffer))
    }

    /// Returns the call of a reduce with a function of the caller.
    fn reduce_with_call<T: Element>(
        &self,
        count: usize,
        root: Rank,
        function: impl Fn(&T, &T) -> T + Send + Sync + 'static,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        let call = self.new_call::<T>(CollectiveSpec::Reduce { count, root }, site);
        Ok(call.with_reduction(Reduction::custom(function)).in_rank_order())
    }

    /// [`Group::reduce_scatter`] with a function of the caller, which must be associative and commutative, because each
    /// chunk is reduced in a different order of the ranks. For a function that does not commute, use
    /// [`Group::all_reduce_with`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter`].
    #[track_caller]
    pub fn reduce_scatter_with<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        function: impl Fn(&B::Element, &B::Element) -> B::Element + Send + Sync + 'static,
    ) -> Result<Range<usize>, Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        let reduction = Reduction::custom(function);
        self.run(self.reduce_scatter_call::<B::Element>(&partition, 0, reduction, site), elements)?;
        Ok(partition.range(self.rank))
    }

    /// Asynchronous [`Group::reduce_scatter_with`]; the handle returns this rank's chunk.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter_with`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_scatter_with_async<T: Element>(
        &mut self,
        buffer: Vec<T>,
        function: impl Fn(&T, &T) -> T + Send + Sync + 'static,
    ) -> Result<Handle<Vec<T>>, Error> {
        let partition = Partition::even(buffer.len(), self.world);
        let reduction = Reduction::custom(function);
        let call = self.reduce_scatter_call::<T>(&partition, 0, reduction, Site::here());
        self.start_prepared(self.prepare_part(call, buffer, &partition))
    }

    /// [`Group::scan`] with a function of the caller. The function must be associative but need not commute: it is
    /// called in rank order, as `function(lower ranks, higher ranks)`.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scan`].
    #[track_caller]
    pub fn scan_with<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        function: impl Fn(&B::Element, &B::Element) -> B::Element + Send + Sync + 'static,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let call = self.scan_call::<B::Element>(elements.len(), Reduction::custom(function), site);
        self.run(call, elements)
    }

    /// Asynchronous [`Group::scan_with`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scan_with`]. The handle returns later failures.
    #[track_caller]
    pub fn scan_with_async<T: Element>(
        &mut self,
        buffer: Vec<T>,
        function: impl Fn(&T, &T) -> T + Send + Sync + 'static,
    ) -> Result<Handle<Vec<T>>, Error> {
        let call = self.scan_call::<T>(buffer.len(), Reduction::custom(function), Site::here());
        self.start_prepared(PreparedCollective::new(call, buffer, |buffer| buffer))
    }

    /// [`Group::exscan`] with a function of the caller. The function must be associative but need not commute: it is
    /// called in rank order, as `function(lower ranks, higher ranks)`.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::exscan`].
    #[track_caller]
    pub fn exscan_with<I: Input + ?Sized>(
        &mut self,
        input: &I,
        function: impl Fn(&I::Element, &I::Element) -> I::Element + Send + Sync + 'static,
    ) -> Result<Option<Vec<I::Element>>, Error> {
        let (site, input) = (Site::here(), input.elements()?);
        let call = self.exscan_call::<I::Element>(input.len(), Reduction::custom(function), site);
        self.run_prepared(self.prepare_exscan_call(call, input))
    }

    /// Asynchronous [`Group::exscan_with`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::exscan_with`]. The handle returns later failures.
    #[track_caller]
    pub fn exscan_with_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        function: impl Fn(&I::Element, &I::Element) -> I::Element + Send + Sync + 'static,
    ) -> Result<Handle<Option<Vec<I::Element>>>, Error> {
        let (site, input) = (Site::here(), input.elements()?);
        let call = self.exscan_call::<I::Element>(input.len(), Reduction::custom(function), site);
        self.start_prepared(self.prepare_exscan_call(call, input))
    }
}
