//! All-to-all exchanges.

use super::{TOTAL_TOO_LARGE, output_elements, zeroed};
use crate::group::call::PreparedCollective;
use crate::group::{Buffer, Error, Group, Handle, Input};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, Site};

impl Group {
    /// Divides `input` into n equal parts and sends part r to rank r. Returns the parts that the ranks have sent to this
    /// rank, in rank order.
    ///
    /// Pairwise exchange: n-1 steps, in which each rank sends (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidCounts`] if n does not divide the length.
    #[track_caller]
    pub fn all_to_all<I: Input + ?Sized>(&mut self, input: &I) -> Result<Vec<I::Element>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        let mut output = zeroed(input.len())?;
        self.exchange(self.equal_exchange(input.len())?, input, &mut output, site)?;
        Ok(output)
    }

    /// Asynchronous [`Group::all_to_all`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_to_all`]. The handle returns later failures.
    #[track_caller]
    pub fn all_to_all_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        self.start_exchange(self.equal_exchange(input.len())?, input, site)
    }

    /// [`Group::all_to_all`] into `output`, which must be as long as the input.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_to_all`].
    #[track_caller]
    pub fn all_to_all_into<I, B>(&mut self, input: &I, output: &mut B) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let (input, site) = (input.elements()?, Site::here());
        let output = output_elements(output, input.len())?;
        self.exchange(self.equal_exchange(input.len())?, input, output, site)
    }

    /// [`Group::all_to_all`] that replaces the input by the result.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_to_all`].
    #[track_caller]
    pub fn all_to_all_in_place<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        let (elements, site) = (buffer.elements_mut()?, Site::here());
        let parts = self.equal_exchange(elements.len())?;
        let mut input = zeroed(elements.len())?;
        input.copy_from_slice(elements);
        self.exchange(parts, &input, elements, site)
    }

    /// Sends `send_counts[r]` elements of `input` to rank r, in rank order, and receives `receive_counts[r]` elements
    /// from rank r. If a rank's send count differs from the receive count of the receiver, the job fails.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_to_all_uneven<I: Input + ?Sized>(
        &mut self,
        input: &I,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Vec<I::Element>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        let parts = self.uneven_exchange::<I::Element>(input.len(), send_counts, receive_counts)?;
        let mut output = zeroed(parts.receive.total())?;
        self.exchange(parts, input, &mut output, site)?;
        Ok(output)
    }

    /// Asynchronous [`Group::all_to_all_uneven`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_to_all_uneven`]. The handle returns later failures.
    #[track_caller]
    pub fn all_to_all_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        let parts = self.uneven_exchange::<I::Element>(input.len(), send_counts, receive_counts)?;
        self.start_exchange(parts, input, site)
    }

    /// [`Group::all_to_all_uneven`] into `output`, whose length must be the sum of the receive counts.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_to_all_uneven`].
    #[track_caller]
    pub fn all_to_all_uneven_into<I, B>(
        &mut self,
        input: &I,
        output: &mut B,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let (input, site) = (input.elements()?, Site::here());
        let parts = self.uneven_exchange::<I::Element>(input.len(), send_counts, receive_counts)?;
        let output = output_elements(output, parts.receive.total())?;
        self.exchange(parts, input, output, site)
    }

    /// Returns the parts of an exchange of `count` elements in which all parts have the same length.
    fn equal_exchange(&self, count: usize) -> Result<ExchangedParts, Error> {
        if !count.is_multiple_of(self.world.as_usize()) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(count, self.world);
        Ok(ExchangedParts { send: partition.clone(), receive: partition, is_even: true })
    }

    /// Returns the parts of an exchange of `count` elements in which the parts have these lengths.
    fn uneven_exchange<T: Element>(
        &self,
        count: usize,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<ExchangedParts, Error> {
        let own_count = send_counts.get(self.rank.index()).copied().unwrap_or_default();
        let send = self.checked_partition::<T>(send_counts, own_count)?;
        let receive = self.checked_partition::<T>(receive_counts, own_count)?;
        if send.total() != count {
            return Err(Error::InvalidCounts("the sum of the counts is not the length of the input"));
        }
        Ok(ExchangedParts { send, receive, is_even: false })
    }

    /// Sends the parts directly from the input, and receives the parts directly into the output.
    fn exchange<T: Element>(
        &self,
        parts: ExchangedParts,
        input: &[T],
        output: &mut [T],
        site: Site,
    ) -> Result<(), Error> {
        parts.copy_own_part(self.rank, input, output);
        self.run_with_output(self.new_call::<T>(parts.into_spec(), site), input, output)
    }

    /// Starts an exchange on one owned buffer: the parts to send, followed by the parts to receive.
    fn start_exchange<T: Element>(
        &self,
        parts: ExchangedParts,
        input: &[T],
        site: Site,
    ) -> Result<Handle<Vec<T>>, Error> {
        let mut buffer = zeroed(input.len().checked_add(parts.receive.total()).ok_or(TOTAL_TOO_LARGE)?)?;
        let (to_send, to_receive) = buffer.split_at_mut(input.len());
        to_send.copy_from_slice(input);
        parts.copy_own_part(self.rank, input, to_receive);
        let (call, sent_count) = (self.new_call::<T>(parts.into_spec(), site), input.len());
        self.start_prepared(PreparedCollective::new(call, buffer, move |mut buffer: Vec<T>| {
            // Move the received elements within the buffer. New memory would cost a page fault for every 4 KiB.
            buffer.drain(..sent_count);
            buffer
        }))
    }
}

/// The parts that a rank sends to each rank, and the parts that it receives from each rank.
struct ExchangedParts {
    send: Partition,
    receive: Partition,
    /// Whether all parts have the same length. Only then do the ranks compare the total length.
    is_even: bool,
}

impl ExchangedParts {
    /// Copies the part that a rank sends to itself.
    fn copy_own_part<T: Element>(&self, rank: Rank, input: &[T], output: &mut [T]) {
        output[self.receive.range(rank)].copy_from_slice(&input[self.send.range(rank)]);
    }

    /// Returns the exchange as a collective.
    fn into_spec(self) -> CollectiveSpec {
        CollectiveSpec::AllToAll { send: self.send, receive: self.receive, is_even: self.is_even }
    }
}
