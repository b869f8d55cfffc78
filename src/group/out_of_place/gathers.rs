//! Gathers: the inputs of all ranks, concatenated in one buffer on all ranks or on the root.

use std::borrow::Cow;

use super::{layout_digest, output_elements, zeroed};
use crate::group::call::{Call, PreparedCollective};
use crate::group::{Buffer, Error, Group, Handle, Input};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, Site};

impl Group {
    /// Returns the concatenation of all ranks' inputs in rank order. All inputs must have the same length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_gather_from<I: Input + ?Sized>(&mut self, input: &I) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        let counts = self.equal_counts(input.len());
        self.run_prepared(self.prepare_all_gather(input, &counts, Site::here())?)
    }

    /// Asynchronous [`Group::all_gather_from`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_gather_from`]. The handle returns later failures.
    #[track_caller]
    pub fn all_gather_from_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        let counts = self.equal_counts(input.len());
        self.start_prepared(self.prepare_all_gather(input, &counts, Site::here())?)
    }

    /// [`Group::all_gather_from`] into `output`. The length of `output` must be the length of the input times the number of
    /// ranks.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_gather_into<I, B>(&mut self, input: &I, output: &mut B) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let counts = self.equal_counts(input.elements()?.len());
        self.all_gather_uneven_into(input, output, &counts)
    }

    /// Returns the concatenation of all ranks' inputs in rank order. The input of rank r has `counts[r]` elements.
    ///
    /// Ring: n-1 steps, in which each rank sends the bytes of the result except for the part of one other rank.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_gather_uneven<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
    ) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        self.run_prepared(self.prepare_all_gather(input, counts, Site::here())?)
    }

    /// Asynchronous [`Group::all_gather_uneven`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_gather_uneven`]. The handle returns later failures.
    #[track_caller]
    pub fn all_gather_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        self.start_prepared(self.prepare_all_gather(input, counts, Site::here())?)
    }

    /// [`Group::all_gather_uneven`] into `output`, whose length must be the sum of all counts.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_gather_uneven`].
    #[track_caller]
    pub fn all_gather_uneven_into<I, B>(
        &mut self,
        input: &I,
        output: &mut B,
        counts: &[usize],
    ) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let input = input.elements()?;
        let partition = self.checked_partition::<I::Element>(counts, input.len())?;
        let output = output_elements(output, partition.total())?;
        output[partition.range(self.rank)].copy_from_slice(input);
        let layout = layout_digest(counts.iter().copied());
        self.run(self.all_gather_call::<I::Element>(&partition, layout, Site::here()), output)
    }

    /// Prepares an all-gather of uneven inputs.
    fn prepare_all_gather<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        site: Site,
    ) -> Result<PreparedCollective<'static, T, Vec<T>>, Error> {
        self.prepare_all_gather_with_digest(input, counts, layout_digest(counts.iter().copied()), site)
    }

    /// Prepares an all-gather of uneven inputs. `layout` is a digest, which must be the same on all ranks.
    pub(in crate::group) fn prepare_all_gather_with_digest<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        layout: u32,
        site: Site,
    ) -> Result<PreparedCollective<'static, T, Vec<T>>, Error> {
        let partition = self.checked_partition::<T>(counts, input.len())?;
        let mut elements = zeroed(partition.total())?;
        elements[partition.range(self.rank)].copy_from_slice(input);
        let call = self.all_gather_call::<T>(&partition, layout, site);
        Ok(PreparedCollective::new(call, elements, |all| all))
    }

    /// Returns a list with the same count for every rank.
    pub(in crate::group) fn equal_counts(&self, count: usize) -> Vec<usize> {
        vec![count; self.world.as_usize()]
    }

    /// [`Group::all_gather_uneven`] for ranks that do not know the lengths of the other ranks' inputs. This method first
    /// gathers the lengths.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`]; [`Error::InvalidCounts`] on all ranks if the sum of the lengths is
    /// more than memory can hold, [`Error::System`] on a rank that has too little memory.
    #[track_caller]
    pub fn all_gather_any<I: Input + ?Sized>(&mut self, input: &I) -> Result<Vec<Vec<I::Element>>, Error> {
        let own_count = input.elements()?.len() as u64;
        let counts = self.all_gather_from(&[own_count])?;
        let counts: Vec<usize> =
            counts.into_iter().map(|count| usize::try_from(count).unwrap_or(usize::MAX)).collect();
        let mut all = self.all_gather_uneven(input, &counts)?;
        // Split off the last part first, because `split_off` then moves no other part.
        let mut parts: Vec<Vec<I::Element>> = Vec::with_capacity(counts.len());
        for count in counts.into_iter().rev() {
            parts.push(all.split_off(all.len() - count));
        }
        parts.reverse();
        Ok(parts)
    }

    /// Returns the concatenation of all ranks' inputs in rank order on the root, and an empty vector on the other ranks. All
    /// inputs must have the same length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn gather<I: Input + ?Sized>(&mut self, input: &I, root: Rank) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        let counts = (&self.equal_counts(input.len())[..], 0);
        self.run_prepared(self.prepare_gather(Cow::Borrowed(input), counts, root, Site::here())?)
    }

    /// Asynchronous [`Group::gather`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::gather`]. The handle returns later failures.
    #[track_caller]
    pub fn gather_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        root: Rank,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        let counts = (&self.equal_counts(input.len())[..], 0);
        let input = Cow::Owned(input.to_vec());
        self.start_prepared(self.prepare_gather(input, counts, root, Site::here())?)
    }

    /// [`Group::gather`] into the root's `output`, which must have the length of the result. The other ranks' `output` is
    /// ignored.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::gather`], and [`Error::InvalidCounts`] if the root's output has another length.
    #[track_caller]
    pub fn gather_into<I, B>(&mut self, input: &I, output: &mut B, root: Rank) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let input = input.elements()?;
        let counts = (&self.equal_counts(input.len())[..], 0);
        self.gather_elements(input, output, counts, root, Site::here())
    }

    /// Returns the concatenation of all ranks' inputs in rank order on the root, and an empty vector on the other ranks. The
    /// input of rank r has `counts[r]` elements.
    ///
    /// Each rank sends its part to the root.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::gather`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn gather_uneven<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
        root: Rank,
    ) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        let counts = (counts, layout_digest(counts.iter().copied()));
        self.run_prepared(self.prepare_gather(Cow::Borrowed(input), counts, root, Site::here())?)
    }

    /// Asynchronous [`Group::gather_uneven`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::gather_uneven`]. The handle returns later failures.
    #[track_caller]
    pub fn gather_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        counts: &[usize],
        root: Rank,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        let counts = (counts, layout_digest(counts.iter().copied()));
        let input = Cow::Owned(input.to_vec());
        self.start_prepared(self.prepare_gather(input, counts, root, Site::here())?)
    }

    /// [`Group::gather_uneven`] into the root's `output`, which must have the length of the result. The other ranks'
    /// `output` is ignored.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::gather_uneven`], and [`Error::InvalidCounts`] if the root's output has another length.
    #[track_caller]
    pub fn gather_uneven_into<I, B>(
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
        let input = input.elements()?;
        let counts = (counts, layout_digest(counts.iter().copied()));
        self.gather_elements(input, output, counts, root, Site::here())
    }

    /// Copies each rank's chunk ([`Group::chunk`]) of its buffer to the root's buffer. The root's buffer already holds the
    /// root's chunk. All buffers have the same length.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::gather`].
    #[track_caller]
    pub fn gather_in_place<B: Buffer + ?Sized>(&mut self, buffer: &mut B, root: Rank) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        let partition = Partition::even(elements.len(), self.world);
        let call = self.gather_call::<B::Element>(&partition, 0, root, site)?;
        if self.rank == root {
            self.run(call, elements)
        } else {
            self.run_sending(call, &elements[partition.range(self.rank)])
        }
    }

    /// Gathers into the root's `output`. `layout` is the digest of the counts.
    fn gather_elements<T: Element, B: Buffer<Element = T> + ?Sized>(
        &self,
        input: &[T],
        output: &mut B,
        (counts, layout): (&[usize], u32),
        root: Rank,
        site: Site,
    ) -> Result<(), Error> {
        let partition = self.checked_partition::<T>(counts, input.len())?;
        let call = self.gather_call::<T>(&partition, layout, root, site)?;
        if self.rank != root {
            return self.run_sending(call, input);
        }
        let output = output_elements(output, partition.total())?;
        output[partition.range(root)].copy_from_slice(input);
        self.run(call, output)
    }

    /// Returns the call of a gather. `layout` is the digest of uneven parts, or 0 for even parts.
    fn gather_call<T: Element>(
        &self,
        partition: &Partition,
        layout: u32,
        root: Rank,
        site: Site,
    ) -> Result<Call, Error> {
        self.check_root(root)?;
        let spec = CollectiveSpec::Gather { partition: partition.clone(), root };
        Ok(self.new_call::<T>(spec, site).with_layout(layout))
    }

    /// Prepares a gather. `layout` is the digest of the counts.
    fn prepare_gather<'a, T: Element>(
        &self,
        input: Cow<'a, [T]>,
        (counts, layout): (&[usize], u32),
        root: Rank,
        site: Site,
    ) -> Result<PreparedCollective<'a, T, Vec<T>>, Error> {
        let partition = self.checked_partition::<T>(counts, input.len())?;
        let call = self.gather_call::<T>(&partition, layout, root, site)?;
        if self.rank != root {
            return Ok(PreparedCollective::new_sending(call, input, Vec::new()));
        }
        let mut elements = zeroed(partition.total())?;
        elements[partition.range(root)].copy_from_slice(&input);
        Ok(PreparedCollective::new(call, elements, |all| all))
    }
}
