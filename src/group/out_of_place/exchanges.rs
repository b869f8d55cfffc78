//! What every rank has for every other.

use super::{TOO_MANY, copied, output as place, zeroed};
use crate::group::call::Prepared;
use crate::group::{Buffer, Error, Group, Handle, Input};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Site};

impl Group {
    /// The r-th of n equal parts of `input` goes to rank r; what the ranks have for this one comes back in rank order.
    ///
    /// Pairwise exchange: n-1 steps, (n-1)/n S bytes sent by each rank.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`] if n does not divide the length.
    #[track_caller]
    pub fn all_to_all<I: Input + ?Sized>(&mut self, input: &I) -> Result<Vec<I::Element>, Error> {
        let input = input.elements()?;
        self.run_prepared(self.prepare_all_to_all_even(input, Site::here())?)
    }

    /// [`Group::all_to_all`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_to_all_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let input = input.elements()?;
        self.start(self.prepare_all_to_all_even(input, Site::here())?)
    }

    /// [`Group::all_to_all`] into `output`, which is as long as the input.
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
        self.all_to_all_in_place(copied(input, output)?)
    }

    /// [`Group::all_to_all`] that puts the result where the input was.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`].
    #[track_caller]
    pub fn all_to_all_in_place<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        let elements = buffer.elements_mut()?;
        let result = self.run_prepared(self.prepare_all_to_all_even(elements, Site::here())?)?;
        elements.copy_from_slice(&result);
        Ok(())
    }

    /// `send_counts[r]` elements of `input` go to rank r, after those of the ranks before it; `receive_counts[r]` come from
    /// rank r. What one rank sends to another is what that one receives from it, or both fail.
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
        self.run_prepared(self.prepare_all_to_all_uneven(input, send_counts, receive_counts, site)?)
    }

    /// [`Group::all_to_all_uneven`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all_uneven`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_to_all_uneven_async<I: Input + ?Sized>(
        &mut self,
        input: &I,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Handle<Vec<I::Element>>, Error> {
        let (input, site) = (input.elements()?, Site::here());
        self.start(self.prepare_all_to_all_uneven(input, send_counts, receive_counts, site)?)
    }

    /// [`Group::all_to_all_uneven`] into `output`, which is as long as the receive counts come to.
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
        output.copy_from_slice(&self.all_to_all_uneven(input, send_counts, receive_counts)?);
        Ok(())
    }

    fn prepare_all_to_all_even<T: Element>(
        &self,
        input: &[T],
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        if !input.len().is_multiple_of(self.world.as_usize()) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(input.len(), self.world);
        self.prepare_all_to_all(input, (&partition, &partition), true, site)
    }

    fn prepare_all_to_all_uneven<T: Element>(
        &self,
        input: &[T],
        send_counts: &[usize],
        receive_counts: &[usize],
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let own = |counts: &[usize]| counts.get(self.rank.index()).copied().unwrap_or_default();
        let send = self.partition::<T>(send_counts, own(send_counts))?;
        let receive = self.partition::<T>(receive_counts, own(send_counts))?;
        if send.total() != input.len() {
            return Err(Error::InvalidCounts("their sum is not the input's length"));
        }
        // The ranks' totals differ, so they are no part of what has to agree.
        self.prepare_all_to_all(input, (&send, &receive), false, site)
    }

    fn prepare_all_to_all<T: Element>(
        &self,
        input: &[T],
        (send, receive): (&Partition, &Partition),
        is_even: bool,
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let mut buffer = zeroed(send.total().checked_add(receive.total()).ok_or(TOO_MANY)?)?;
        let (sent, received) = buffer.split_at_mut(send.total());
        sent.copy_from_slice(input);
        received[receive.range(self.rank)].copy_from_slice(&input[send.range(self.rank)]);
        let start = send.total();
        let work = CollectiveSpec::AllToAll { send: send.clone(), receive: receive.clone(), is_even };
        let call = self.call::<T>(work, site);
        Ok(Prepared::new(call, buffer, move |mut buffer: Vec<T>| buffer.split_off(start)))
    }
}
