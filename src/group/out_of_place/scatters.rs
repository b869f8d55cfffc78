//! Broadcasts and scatters: the root sends its whole input to every rank, or one part to each rank.

use std::borrow::Cow;
use std::ops::Range;

use super::{layout_digest, output_elements, zeroed};
use crate::group::call::{Call, PreparedCollective};
use crate::group::{Buffer, Error, Group, Handle, Input};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, Site};

impl Group {
    /// Sends the root's `input` to all ranks. All ranks pass the length of the root's input as `count`. The other ranks'
    /// `input` is ignored.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast`], and [`Error::InvalidCounts`] if the root's input has another length.
    #[track_caller]
    pub fn broadcast_from<I: Input + ?Sized>(
        &mut self,
        input: &I,
        count: usize,
        root: Rank,
    ) -> Result<Vec<I::Element>, Error> {
        let mut buffer = self.broadcast_buffer(input, count, root)?;
        self.broadcast(&mut buffer, root)?;
        Ok(buffer)
    }

    /// Asynchronous [`Group::broadcast_from`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::broadcast_from`]. The handle returns later failures.
    #[track_caller]
    pub fn broadcast_from_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        count: usize,
        root: Rank,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let buffer = self.broadcast_buffer(input, count, root)?;
        self.broadcast_async(buffer, root)
    }

    /// Returns the buffer for a broadcast: a copy of the input on the root, and zeros on the other ranks.
    fn broadcast_buffer<I: Input + ?Sized>(
        &self,
        input: &I,
        count: usize,
        root: Rank,
    ) -> Result<Vec<I::Element>, Error> {
        if self.rank != root {
            return zeroed(count);
        }
        let input = input.elements()?;
        if input.len() == count { Ok(input.to_vec()) } else { Err(WRONG_ROOT_LENGTH) }
    }

    /// Divides the root's `input` into one part for each rank, as [`Group::chunk`] does, and sends part r to rank r. All ranks
    /// pass the length of the root's input as `count`. The other ranks' `input` is ignored.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], [`Error::InvalidRoot`], and [`Error::InvalidCounts`] if the root's
    /// input has another length.
    #[track_caller]
    pub fn scatter<I: Input + ?Sized>(
        &mut self,
        input: &I,
        count: usize,
        root: Rank,
    ) -> Result<Vec<I::Element>, Error> {
        let parts = (&Partition::even(count, self.world), 0);
        let input = Cow::Borrowed(self.root_input(input, root)?);
        self.run_prepared(self.prepare_scatter(input, parts, root, Site::here())?)
    }

    /// Asynchronous [`Group::scatter`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scatter`]. The handle returns later failures.
    #[track_caller]
    pub fn scatter_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        count: usize,
        root: Rank,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let parts = (&Partition::even(count, self.world), 0);
        let input = Cow::Owned(self.root_input(input, root)?.to_vec());
        self.start_prepared(self.prepare_scatter(input, parts, root, Site::here())?)
    }

    /// [`Group::scatter`] into `output`, which must have the length of this rank's part.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scatter`].
    #[track_caller]
    pub fn scatter_into<I, B>(
        &mut self,
        input: &I,
        output: &mut B,
        count: usize,
        root: Rank,
    ) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let parts = (&Partition::even(count, self.world), 0);
        let input = self.root_input(input, root)?;
        self.scatter_elements(input, output, parts, root, Site::here())
    }

    /// Sends `counts[r]` elements of the root's `input` to rank r. The parts are in rank order in the input.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scatter`].
    #[track_caller]
    pub fn scatter_uneven<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
        root: Rank,
    ) -> Result<Vec<I::Element>, Error> {
        let partition = self.partition_from_counts::<I::Element>(counts)?;
        let parts = (&partition, layout_digest(counts.iter().copied()));
        let input = Cow::Borrowed(self.root_input(input, root)?);
        self.run_prepared(self.prepare_scatter(input, parts, root, Site::here())?)
    }

    /// Asynchronous [`Group::scatter_uneven`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scatter_uneven`]. The handle returns later failures.
    #[track_caller]
    pub fn scatter_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
        root: Rank,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let partition = self.partition_from_counts::<I::Element>(counts)?;
        let parts = (&partition, layout_digest(counts.iter().copied()));
        let input = Cow::Owned(self.root_input(input, root)?.to_vec());
        self.start_prepared(self.prepare_scatter(input, parts, root, Site::here())?)
    }

    /// [`Group::scatter_uneven`] into `output`, which must have the length of this rank's part.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scatter_uneven`].
    #[track_caller]
    pub fn scatter_uneven_into<I, B>(
        &mut self,
        input: &I,
        output: &mut B,
        counts: &[usize],
        root: Rank,
    ) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let partition = self.partition_from_counts::<I::Element>(counts)?;
        let parts = (&partition, layout_digest(counts.iter().copied()));
        let input = self.root_input(input, root)?;
        self.scatter_elements(input, output, parts, root, Site::here())
    }

    /// Copies each rank's chunk ([`Group::chunk`]) of the root's buffer to the rank's buffer and returns the chunk's
    /// range. The rest of the buffer is not changed. All buffers have the same length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::scatter`].
    #[track_caller]
    pub fn scatter_in_place<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        root: Rank,
    ) -> Result<Range<usize>, Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        let call = self.scatter_call::<B::Element>((&partition, 0), root, site)?;
        let own_range = partition.range(self.rank);
        if self.rank == root {
            self.run_sending(call, elements)?;
        } else {
            self.run(call, &mut elements[own_range.clone()])?;
        }
        Ok(own_range)
    }

    /// Returns the input on the root, and an empty slice on the other ranks.
    fn root_input<'a, I: Input + ?Sized>(&self, input: &'a I, root: Rank) -> Result<&'a [I::Element], Error> {
        if self.rank == root { input.elements() } else { Ok(&[]) }
    }

    /// Scatters into each rank's `output`. `parts` is the partition of the root's input, and the digest of the lengths.
    fn scatter_elements<T: Element, B: Buffer<Element = T> + ?Sized>(
        &self,
        input: &[T],
        output: &mut B,
        parts: (&Partition, u32),
        root: Rank,
        site: Site,
    ) -> Result<(), Error> {
        let call = self.scatter_call::<T>(parts, root, site)?;
        let own_range = parts.0.range(self.rank);
        let output = output_elements(output, own_range.len())?;
        if self.rank != root {
            return self.run(call, output);
        }
        if input.len() != parts.0.total() {
            return Err(WRONG_ROOT_LENGTH);
        }
        self.run_sending(call, input)?;
        output.copy_from_slice(&input[own_range]);
        Ok(())
    }

    /// Returns the call of a scatter. `layout` is the digest of uneven parts, or 0 for even parts.
    fn scatter_call<T: Element>(
        &self,
        (partition, layout): (&Partition, u32),
        root: Rank,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        let spec = CollectiveSpec::Scatter { partition: partition.clone(), root };
        Ok(self.new_call::<T>(spec, site).with_layout(layout))
    }

    /// Prepares a scatter. `parts` is the partition of the root's input, and the digest of the lengths.
    fn prepare_scatter<'a, T: Element>(
        &self,
        input: Cow<'a, [T]>,
        parts: (&Partition, u32),
        root: Rank,
        site: Site,
    ) -> Result<PreparedCollective<'a, T, Vec<T>>, Error> {
        let call = self.scatter_call::<T>(parts, root, site)?;
        let own_range = parts.0.range(self.rank);
        if self.rank != root {
            return Ok(PreparedCollective::new(call, zeroed(own_range.len())?, |part| part));
        }
        if input.len() != parts.0.total() {
            return Err(WRONG_ROOT_LENGTH);
        }
        let part = input[own_range].to_vec();
        Ok(PreparedCollective::new_sending(call, input, part))
    }
}

/// The error if the root's input does not have the number of elements that the call gives.
const WRONG_ROOT_LENGTH: Error =
    Error::InvalidCounts("the count, or the sum of the counts, is not the length of the root's input");
