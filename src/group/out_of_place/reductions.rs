//! Reductions that do not change their input.

use super::{copy_to_output, layout_digest, output_elements};
use crate::group::call::{Call, PreparedCollective, Reduction};
use crate::group::{Buffer, Error, Group, Handle, Input};
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, ReduceOp, Site};

impl Group {
    /// [`Group::all_reduce`] that does not change its input.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_reduce_from<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Vec<I::Element>, Error> {
        let mut result = input.elements()?.to_vec();
        self.all_reduce(&mut result, op)?;
        Ok(result)
    }

    /// Asynchronous [`Group::all_reduce_from`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce_from`]. The handle returns later failures.
    #[track_caller]
    pub fn all_reduce_from_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let buffer = input.elements()?.to_vec();
        self.all_reduce_async(buffer, op)
    }

    /// [`Group::all_reduce`] from `input` into `output`, which must have the same length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_reduce_into<I, B>(&mut self, input: &I, output: &mut B, op: ReduceOp) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        self.all_reduce(copy_to_output(input, output)?, op)
    }

    /// [`Group::reduce`] that does not change its input. The result is empty on all ranks but the root.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce`].
    #[track_caller]
    pub fn reduce_from<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Vec<I::Element>, Error> {
        let mut result = input.elements()?.to_vec();
        self.reduce(&mut result, op, root)?;
        Ok(if self.rank == root { result } else { Vec::new() })
    }

    /// Asynchronous [`Group::reduce_from`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_from`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_from_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let buffer = input.elements()?.to_vec();
        let is_root = self.rank == root;
        let reduced = self.reduce_async(buffer, op, root)?;
        Ok(reduced.and_then(move |result| Ok(if is_root { result } else { Vec::new() })))
    }

    /// [`Group::reduce`] from `input` into the root's `output`, which must have the same length. The other ranks' `output`
    /// is ignored.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce`], and [`Error::InvalidCounts`] if the root's output has another length.
    #[track_caller]
    pub fn reduce_into<I, B>(
        &mut self,
        input: &I,
        output: &mut B,
        op: ReduceOp,
        root: Rank,
    ) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        if self.rank == root {
            return self.reduce(copy_to_output(input, output)?, op, root);
        }
        self.reduce(&mut input.elements()?.to_vec(), op, root)
    }

    /// Returns this rank's chunk ([`Group::chunk`]) of the reduction of all ranks' inputs. The inputs are not changed.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter`].
    #[track_caller]
    pub fn reduce_scatter_from<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        let partition = Partition::even(input.len(), self.world);
        self.run_prepared(self.prepare_reduce_scatter(input, &partition, 0, op, Site::here())?)
    }

    /// Asynchronous [`Group::reduce_scatter_from`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter_from`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_scatter_from_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        let partition = Partition::even(input.len(), self.world);
        self.start_prepared(self.prepare_reduce_scatter(input, &partition, 0, op, Site::here())?)
    }

    /// [`Group::reduce_scatter_from`] into `output`, which must have the length of this rank's chunk.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn reduce_scatter_into<I, B>(&mut self, input: &I, output: &mut B, op: ReduceOp) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let count = input.elements()?.len();
        let output = output_elements(output, self.chunk(count, self.rank).len())?;
        output.copy_from_slice(&self.reduce_scatter_from(input, op)?);
        Ok(())
    }

    /// Reduces all ranks' inputs and returns this rank's part. Rank r gets `counts[r]` elements; the parts are in
    /// rank order.
    ///
    /// Ring: n-1 steps, in which each rank sends the bytes of its input except for the bytes of its own part.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn reduce_scatter_uneven<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<I::Element>, Error> {
        let (input, partition) = self.uneven_parts(input, counts)?;
        let layout = layout_digest(counts.iter().copied());
        self.run_prepared(self.prepare_reduce_scatter(input, &partition, layout, op, Site::here())?)
    }

    /// Asynchronous [`Group::reduce_scatter_uneven`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter_uneven`]. The handle returns later failures.
    #[track_caller]
    pub fn reduce_scatter_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let (input, partition) = self.uneven_parts(input, counts)?;
        let layout = layout_digest(counts.iter().copied());
        self.start_prepared(self.prepare_reduce_scatter(input, &partition, layout, op, Site::here())?)
    }

    /// [`Group::reduce_scatter_uneven`] into `output`, which must have the length of this rank's part.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::reduce_scatter_uneven`].
    #[track_caller]
    pub fn reduce_scatter_uneven_into<I, B>(
        &mut self,
        input: &I,
        output: &mut B,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let own_count = counts.get(self.rank.index()).copied().unwrap_or_default();
        let output = output_elements(output, own_count)?;
        output.copy_from_slice(&self.reduce_scatter_uneven(input, counts, op)?);
        Ok(())
    }

    /// Returns the input's elements, and their partition into parts of these lengths.
    fn uneven_parts<'a, I: Input + ?Sized>(
        &self,
        input: &'a I,
        counts: &[usize],
    ) -> Result<(&'a [I::Element], Partition), Error> {
        let input = input.elements()?;
        let partition = self.partition_from_counts::<I::Element>(counts)?;
        if partition.total() != input.len() {
            return Err(Error::InvalidCounts("the sum of the counts is not the length of the input"));
        }
        Ok((input, partition))
    }

    /// Prepares a reduce-scatter of a copy of `input`. `layout` is the digest of the lengths of the parts.
    fn prepare_reduce_scatter<T: Element>(
        &self,
        input: &[T],
        partition: &Partition,
        layout: u32,
        op: ReduceOp,
        site: Site,
    ) -> Result<PreparedCollective<'static, T, Vec<T>>, Error> {
        let reduction = Reduction::built_in::<T>(op)?;
        let call = self.reduce_scatter_call::<T>(partition, layout, reduction, site);
        Ok(self.prepare_part(call, input.to_vec(), partition))
    }

    /// Prepares a collective whose result is this rank's part of the elements.
    pub(in crate::group) fn prepare_part<T: Element>(
        &self,
        call: Call,
        elements: Vec<T>,
        partition: &Partition,
    ) -> PreparedCollective<'static, T, Vec<T>> {
        let own_range = partition.range(self.rank);
        PreparedCollective::new(call, elements, move |mut all: Vec<T>| {
            all.truncate(own_range.end);
            all.drain(..own_range.start);
            all
        })
    }

    /// [`Group::scan`] that does not change its input.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scan`].
    #[track_caller]
    pub fn scan_from<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Vec<I::Element>, Error> {
        let mut result = input.elements()?.to_vec();
        self.scan(&mut result, op)?;
        Ok(result)
    }

    /// Asynchronous [`Group::scan_from`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scan_from`]. The handle returns later failures.
    #[track_caller]
    pub fn scan_from_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let buffer = input.elements()?.to_vec();
        self.scan_async(buffer, op)
    }

    /// [`Group::scan`] from `input` into `output`, which must have the same length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scan`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn scan_into<I, B>(&mut self, input: &I, output: &mut B, op: ReduceOp) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        self.scan(copy_to_output(input, output)?, op)
    }

    /// Returns the reduction of the inputs of all lower ranks; `None` on rank 0.
    ///
    /// A pipelined chain in rank order: n-1 hops, in which each rank except the last sends 2S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]. [`ReduceOp::Average`] is not defined.
    #[track_caller]
    pub fn exscan<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Option<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        self.run_prepared(self.prepare_exscan(input, op, Site::here())?)
    }

    /// Asynchronous [`Group::exscan`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::exscan`]. The handle returns later failures.
    #[track_caller]
    pub fn exscan_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        op: ReduceOp,
    ) -> Result<Handle<Option<Vec<I::Element>>>, Error> {
        let input = input.elements()?;
        self.start_prepared(self.prepare_exscan(input, op, Site::here())?)
    }

    /// [`Group::exscan`] into `output`, which must have the length of the input. Rank 0's output is not changed.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::exscan`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn exscan_into<I, B>(&mut self, input: &I, output: &mut B, op: ReduceOp) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let output = output_elements(output, input.elements()?.len())?;
        if let Some(result) = self.exscan(input, op)? {
            output.copy_from_slice(&result);
        }
        Ok(())
    }

    /// [`Group::exscan`] that replaces the input by the result. Rank 0's buffer is not changed.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::exscan`].
    #[track_caller]
    pub fn exscan_in_place<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        let elements = buffer.elements_mut()?;
        if let Some(result) = self.run_prepared(self.prepare_exscan(elements, op, Site::here())?)? {
            elements.copy_from_slice(&result);
        }
        Ok(())
    }

    /// Prepares an exscan of a copy of `input` with a built-in reduction.
    fn prepare_exscan<T: Element>(
        &self,
        input: &[T],
        op: ReduceOp,
        site: Site,
    ) -> Result<PreparedCollective<'static, T, Option<Vec<T>>>, Error> {
        let call = self.exscan_call::<T>(input.len(), Reduction::for_scan::<T>(op)?, site);
        Ok(self.prepare_exscan_call(call, input))
    }

    /// Prepares an exscan of a copy of `input`. The buffer of the collective is the input, followed by space for the result.
    pub(in crate::group) fn prepare_exscan_call<T: Element>(
        &self,
        call: Call,
        input: &[T],
    ) -> PreparedCollective<'static, T, Option<Vec<T>>> {
        let (count, is_first) = (input.len(), self.rank == Rank::ZERO);
        let mut elements = input.to_vec();
        elements.resize(2 * count, T::zeroed());
        PreparedCollective::new(call, elements, move |mut all: Vec<T>| {
            (!is_first).then(|| all.split_off(count))
        })
    }
}
