//! What every rank has for every other.

use super::{TOO_MANY, output as place, zeroed};
use crate::group::call::Prepared;
use crate::group::{Buffer, Error, Group, Handle, Input};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Site};

/// Makes the result of a buffer with the elements that were sent, and behind them, from the given index on, those that were
/// received.
type Finish<T> = fn(Vec<T>, usize) -> Vec<T>;

/// The elements that were received.
fn received<T>(mut buffer: Vec<T>, start: usize) -> Vec<T> {
    // Moves them within the buffer: new memory would cost a page fault for every 4 KiB.
    buffer.drain(..start);
    buffer
}

/// The whole buffer, of which the caller copies the elements that were received.
fn sent_and_received<T>(buffer: Vec<T>, _start: usize) -> Vec<T> {
    buffer
}

impl Group {
    /// Sends the r-th of n equal parts of `input` to rank r, and returns the parts that the ranks have for this one,
    /// in rank order.
    ///
    /// Pairwise exchange: n-1 steps, (n-1)/n S bytes sent by each rank.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`] if n does not divide the length.
    #[track_caller]
    pub fn all_to_all<I: Input + ?Sized>(&mut self, input: &I) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        self.run_prepared(self.prepare_all_to_all_even(input, received, Site::here())?)
    }

    /// Asynchronous [`Group::all_to_all`].
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`]; the handle returns later failures.
    #[track_caller]
    pub fn all_to_all_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        self.start(self.prepare_all_to_all_even(input, received, Site::here())?)
    }

    /// [`Group::all_to_all`] into `output`, which must be as long as the input.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`].
    #[track_caller]
    pub fn all_to_all_into<I, B>(&mut self, input: &I, output: &mut B) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
    {
        let (input, site) = (input.elements()?, Site::here());
        let output = place(output, input.len())?;
        let both = self.run_prepared(self.prepare_all_to_all_even(input, sent_and_received, site)?)?;
        output.copy_from_slice(&both[input.len()..]);
        Ok(())
    }

    /// [`Group::all_to_all`] that replaces the input by the result.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`].
    #[track_caller]
    pub fn all_to_all_in_place<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        let elements = buffer.elements_mut()?;
        let prepared = self.prepare_all_to_all_even(elements, sent_and_received, Site::here())?;
        let both = self.run_prepared(prepared)?;
        elements.copy_from_slice(&both[elements.len()..]);
        Ok(())
    }

    /// Sends `send_counts[r]` elements of `input` to rank r, in rank order, and receives `receive_counts[r]` elements
    /// from rank r. If a rank's send count differs from the receiver's receive count, both fail.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_to_all_uneven<I: Input + ?Sized>(
        &mut self,
        input: &I,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Vec<I::Element>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        self.run_prepared(self.prepare_all_to_all_uneven(
            input,
            (send_counts, receive_counts),
            received,
            site,
        )?)
    }

    /// Asynchronous [`Group::all_to_all_uneven`].
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all_uneven`]; the handle returns later failures.
    #[track_caller]
    pub fn all_to_all_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        self.start(self.prepare_all_to_all_uneven(input, (send_counts, receive_counts), received, site)?)
    }

    /// [`Group::all_to_all_uneven`] into `output`, whose length must be the sum of the receive counts.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all_uneven`].
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
        let total = self.partition_of::<I::Element>(receive_counts)?.total();
        let output = place(output, total)?;
        let (input, site) = (input.elements()?, Site::here());
        let counts = (send_counts, receive_counts);
        let prepared = self.prepare_all_to_all_uneven(input, counts, sent_and_received, site)?;
        let both = self.run_prepared(prepared)?;
        output.copy_from_slice(&both[input.len()..]);
        Ok(())
    }

    fn prepare_all_to_all_even<T: Element>(
        &self,
        input: &[T],
        finish: Finish<T>,
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        if !input.len().is_multiple_of(self.world.as_usize()) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(input.len(), self.world);
        self.prepare_all_to_all(input, (&partition, &partition), true, (finish, site))
    }

    fn prepare_all_to_all_uneven<T: Element>(
        &self,
        input: &[T],
        (send_counts, receive_counts): (&[usize], &[usize]),
        finish: Finish<T>,
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let own = |counts: &[usize]| counts.get(self.rank.index()).copied().unwrap_or_default();
        let send = self.partition::<T>(send_counts, own(send_counts))?;
        let receive = self.partition::<T>(receive_counts, own(send_counts))?;
        if send.total() != input.len() {
            return Err(Error::InvalidCounts("their sum is not the input's length"));
        }
        // The ranks' totals differ, so they are no part of what has to agree.
        self.prepare_all_to_all(input, (&send, &receive), false, (finish, site))
    }

    fn prepare_all_to_all<T: Element>(
        &self,
        input: &[T],
        (send, receive): (&Partition, &Partition),
        is_even: bool,
        (finish, site): (Finish<T>, Site),
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let mut buffer = zeroed(send.total().checked_add(receive.total()).ok_or(TOO_MANY)?)?;
        let (sent, received) = buffer.split_at_mut(send.total());
        sent.copy_from_slice(input);
        received[receive.range(self.rank)].copy_from_slice(&input[send.range(self.rank)]);
        let start = send.total();
        let work = CollectiveSpec::AllToAll { send: send.clone(), receive: receive.clone(), is_even };
        let call = self.call::<T>(work, site);
        Ok(Prepared::new(call, buffer, move |buffer: Vec<T>| finish(buffer, start)))
    }
}
