//! Collectives whose result is not where the input was, with even and uneven parts.

use std::panic::Location;

use super::call::{Call, Prepared, Site};
use super::{Error, Group, Handle};
use crate::schedule;
use crate::schedule::partition::Partition;
use crate::types::{Element, Operation, Rank, ReduceOp};

impl Group {
    /// Every rank's `input`, which has the same length everywhere, one after another in rank order.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    #[track_caller]
    pub fn all_gather_from<T: Element>(&mut self, input: &[T]) -> Result<Vec<T>, Error> {
        let counts = vec![input.len(); self.world.as_usize()];
        self.run_prepared(self.prepare_all_gather(input, &counts, Location::caller())?)
    }

    /// Every rank's `input`, `counts[r]` elements long on rank r, one after another in rank order.
    ///
    /// Ring: n-1 steps, S bytes less the own part sent by each rank.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_gather_uneven<T: Element>(&mut self, input: &[T], counts: &[usize]) -> Result<Vec<T>, Error> {
        self.run_prepared(self.prepare_all_gather(input, counts, Location::caller())?)
    }

    /// [`Group::all_gather_uneven`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::all_gather_uneven`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_gather_uneven_async<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
    ) -> Result<Handle<Vec<T>>, Error> {
        self.start(self.prepare_all_gather(input, counts, Location::caller())?)
    }

    fn prepare_all_gather<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let partition = self.partition(counts, input.len())?;
        let mut elements = vec![T::zeroed(); partition.total()];
        elements[partition.range(self.rank)].copy_from_slice(input);
        let call = self.all_gather_call::<T>(&partition, layout(counts), site);
        Ok(Prepared::new(call, elements, |all| all))
    }

    /// Like [`Group::all_gather_uneven`] where nobody knows the others' lengths: they are gathered first.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    #[track_caller]
    pub fn all_gather_any<T: Element>(&mut self, input: &[T]) -> Result<Vec<Vec<T>>, Error> {
        let counts = self.all_gather_from(&[input.len() as u64])?;
        let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
        let all = self.all_gather_uneven(input, &counts)?;
        let partition = Partition::from_counts(&counts).ok_or(Error::InvalidCounts("they overflow"))?;
        Ok(self.world.ranks().map(|rank| all[partition.range(rank)].to_vec()).collect())
    }

    /// The reduction of all ranks' inputs, of which rank r gets `counts[r]` elements after those of the ranks before it.
    ///
    /// Ring: n-1 steps, S bytes less the own part sent by each rank.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn reduce_scatter_uneven<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<T>, Error> {
        self.run_prepared(self.prepare_reduce_scatter(input, counts, op, Location::caller())?)
    }

    /// [`Group::reduce_scatter_uneven`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::reduce_scatter_uneven`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn reduce_scatter_uneven_async<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Handle<Vec<T>>, Error> {
        self.start(self.prepare_reduce_scatter(input, counts, op, Location::caller())?)
    }

    fn prepare_reduce_scatter<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let own = counts.get(self.rank.index()).copied().unwrap_or_default();
        let partition = self.partition(counts, own)?;
        if partition.total() != input.len() {
            return Err(Error::InvalidCounts("their sum is not the input's length"));
        }
        let call = self.reduce_scatter_call::<T>(&partition, layout(counts), op, site)?;
        let own = partition.range(self.rank);
        let finish = move |mut all: Vec<T>| {
            all.truncate(own.end);
            all.split_off(own.start)
        };
        Ok(Prepared::new(call, input.to_vec(), finish))
    }

    /// Every rank's `input`, which has the same length everywhere, in rank order; empty but on the root.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn gather<T: Element>(&mut self, input: &[T], root: Rank) -> Result<Vec<T>, Error> {
        let counts = vec![input.len(); self.world.as_usize()];
        self.run_prepared(self.prepare_gather(input, &counts, 0, root, Location::caller())?)
    }

    /// [`Group::gather`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::gather`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn gather_async<T: Element>(&mut self, input: &[T], root: Rank) -> Result<Handle<Vec<T>>, Error> {
        let counts = vec![input.len(); self.world.as_usize()];
        self.start(self.prepare_gather(input, &counts, 0, root, Location::caller())?)
    }

    /// Every rank's `input`, `counts[r]` elements long on rank r, in rank order; empty but on the root.
    ///
    /// Each rank sends its part to the root.
    ///
    /// # Errors
    ///
    /// As [`Group::gather`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn gather_uneven<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Vec<T>, Error> {
        let site = Location::caller();
        self.run_prepared(self.prepare_gather(input, counts, layout(counts), root, site)?)
    }

    /// [`Group::gather_uneven`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::gather_uneven`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn gather_uneven_async<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Handle<Vec<T>>, Error> {
        let site = Location::caller();
        self.start(self.prepare_gather(input, counts, layout(counts), root, site)?)
    }

    fn prepare_gather<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        layout: u32,
        root: Rank,
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        self.check_root(root)?;
        let partition = self.partition(counts, input.len())?;
        let schedule = schedule::gather(self.world, self.rank, root, &partition);
        let count = partition.total();
        let algorithm = self.algorithm_of::<T>(Operation::Gather, count);
        let call =
            Call::new(Operation::Gather, algorithm, count, schedule, site).rooted(root).laid_out(layout);
        let is_root = self.rank == root;
        let mut elements = input.to_vec();
        if is_root {
            elements = vec![T::zeroed(); partition.total()];
            elements[partition.range(root)].copy_from_slice(input);
        }
        let finish = move |all| if is_root { all } else { Vec::new() };
        Ok(Prepared::new(call, elements, finish))
    }

    /// Rank r gets the r-th of n even parts of the root's `input`, whose length `count` all ranks name; what other ranks
    /// pass as input is not looked at.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], [`Error::InvalidRoot`], and [`Error::InvalidCounts`] if the root's input has another length.
    #[track_caller]
    pub fn scatter<T: Element>(&mut self, input: &[T], count: usize, root: Rank) -> Result<Vec<T>, Error> {
        let partition = Partition::even(count, self.world);
        self.run_prepared(self.prepare_scatter(input, &partition, 0, root, Location::caller())?)
    }

    /// [`Group::scatter`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::scatter`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn scatter_async<T: Element>(
        &mut self,
        input: &[T],
        count: usize,
        root: Rank,
    ) -> Result<Handle<Vec<T>>, Error> {
        let partition = Partition::even(count, self.world);
        self.start(self.prepare_scatter(input, &partition, 0, root, Location::caller())?)
    }

    /// Rank r gets `counts[r]` elements of the root's `input`, after those of the ranks before it.
    ///
    /// The root sends each rank its part.
    ///
    /// # Errors
    ///
    /// As [`Group::scatter`].
    #[track_caller]
    pub fn scatter_uneven<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Vec<T>, Error> {
        let partition = self.partition_of(counts)?;
        let site = Location::caller();
        self.run_prepared(self.prepare_scatter(input, &partition, layout(counts), root, site)?)
    }

    /// [`Group::scatter_uneven`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::scatter`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn scatter_uneven_async<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Handle<Vec<T>>, Error> {
        let partition = self.partition_of(counts)?;
        let site = Location::caller();
        self.start(self.prepare_scatter(input, &partition, layout(counts), root, site)?)
    }

    fn prepare_scatter<T: Element>(
        &self,
        input: &[T],
        partition: &Partition,
        layout: u32,
        root: Rank,
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        self.check_root(root)?;
        let own = partition.range(self.rank);
        let schedule = schedule::scatter(self.world, self.rank, root, partition);
        let count = partition.total();
        let algorithm = self.algorithm_of::<T>(Operation::Scatter, count);
        let call =
            Call::new(Operation::Scatter, algorithm, count, schedule, site).rooted(root).laid_out(layout);
        let is_root = self.rank == root;
        if is_root && input.len() != partition.total() {
            return Err(Error::InvalidCounts("their sum is not the length of the root's input"));
        }
        let elements = if is_root { input.to_vec() } else { vec![T::zeroed(); own.len()] };
        let finish = move |all: Vec<T>| if is_root { all[own].to_vec() } else { all };
        Ok(Prepared::new(call, elements, finish))
    }

    /// The r-th of n equal parts of `input` goes to rank r; what the ranks have for this one comes back in rank order.
    ///
    /// Pairwise exchange: n-1 steps, (n-1)/n S bytes sent by each rank.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`] if n does not divide the length.
    #[track_caller]
    pub fn all_to_all<T: Element>(&mut self, input: &[T]) -> Result<Vec<T>, Error> {
        self.run_prepared(self.prepare_all_to_all_even(input, Location::caller())?)
    }

    /// [`Group::all_to_all`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_to_all_async<T: Element>(&mut self, input: &[T]) -> Result<Handle<Vec<T>>, Error> {
        self.start(self.prepare_all_to_all_even(input, Location::caller())?)
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
        Ok(self.prepare_all_to_all(input, (&partition, &partition), input.len(), site))
    }

    /// `send_counts[r]` elements of `input` go to rank r, after those of the ranks before it; `receive_counts[r]` come from
    /// rank r. What one rank sends to another is what that one receives from it, or both fail.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidCounts`].
    #[track_caller]
    pub fn all_to_all_uneven<T: Element>(
        &mut self,
        input: &[T],
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Vec<T>, Error> {
        let site = Location::caller();
        self.run_prepared(self.prepare_all_to_all_uneven(input, send_counts, receive_counts, site)?)
    }

    /// [`Group::all_to_all_uneven`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all_uneven`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_to_all_uneven_async<T: Element>(
        &mut self,
        input: &[T],
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<Handle<Vec<T>>, Error> {
        let site = Location::caller();
        self.start(self.prepare_all_to_all_uneven(input, send_counts, receive_counts, site)?)
    }

    fn prepare_all_to_all_uneven<T: Element>(
        &self,
        input: &[T],
        send_counts: &[usize],
        receive_counts: &[usize],
        site: Site,
    ) -> Result<Prepared<'static, T, Vec<T>>, Error> {
        let own = |counts: &[usize]| counts.get(self.rank.index()).copied().unwrap_or_default();
        let send = self.partition(send_counts, own(send_counts))?;
        let receive = self.partition(receive_counts, own(send_counts))?;
        if send.total() != input.len() {
            return Err(Error::InvalidCounts("their sum is not the input's length"));
        }
        // The ranks' totals differ, so they are no part of what has to agree.
        Ok(self.prepare_all_to_all(input, (&send, &receive), 0, site))
    }

    fn prepare_all_to_all<T: Element>(
        &self,
        input: &[T],
        (send, receive): (&Partition, &Partition),
        count: usize,
        site: Site,
    ) -> Prepared<'static, T, Vec<T>> {
        let schedule = schedule::all_to_all(self.world, self.rank, send, receive);
        let mut buffer = Vec::with_capacity(send.total() + receive.total());
        buffer.extend_from_slice(input);
        buffer.resize(send.total() + receive.total(), T::zeroed());
        let own = receive.range(self.rank);
        buffer[send.total() + own.start..send.total() + own.end]
            .copy_from_slice(&input[send.range(self.rank)]);
        let start = send.total();
        let algorithm = self.algorithm_of::<T>(Operation::AllToAll, count);
        let call = Call::new(Operation::AllToAll, algorithm, count, schedule, site);
        Prepared::new(call, buffer, move |mut buffer: Vec<T>| buffer.split_off(start))
    }

    /// The reduction of the inputs of all ranks before this one; `None` on the first.
    ///
    /// A chain in rank order, pipelined: n-1 hops, 2S bytes sent by each rank but the last.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`]; an average is not defined.
    #[track_caller]
    pub fn exscan<T: Element>(&mut self, input: &[T], op: ReduceOp) -> Result<Option<Vec<T>>, Error> {
        self.run_prepared(self.prepare_exscan(input, op, Location::caller())?)
    }

    /// [`Group::exscan`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::exscan`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn exscan_async<T: Element>(
        &mut self,
        input: &[T],
        op: ReduceOp,
    ) -> Result<Handle<Option<Vec<T>>>, Error> {
        self.start(self.prepare_exscan(input, op, Location::caller())?)
    }

    fn prepare_exscan<T: Element>(
        &self,
        input: &[T],
        op: ReduceOp,
        site: Site,
    ) -> Result<Prepared<'static, T, Option<Vec<T>>>, Error> {
        let call = self.exscan_call::<T>(input.len(), op, site)?;
        let (count, is_first) = (input.len(), self.rank == Rank::ZERO);
        let mut elements = input.to_vec();
        elements.resize(2 * count, T::zeroed());
        let finish = move |mut all: Vec<T>| (!is_first).then(|| all.split_off(count));
        Ok(Prepared::new(call, elements, finish))
    }

    /// The parts of these lengths.
    fn partition_of(&self, counts: &[usize]) -> Result<Partition, Error> {
        self.partition(counts, counts.get(self.rank.index()).copied().unwrap_or_default())
    }

    /// The parts of these lengths, of which this rank's is `own`.
    fn partition(&self, counts: &[usize], own: usize) -> Result<Partition, Error> {
        if counts.len() != self.world.as_usize() {
            return Err(Error::InvalidCounts("there is not one for each rank"));
        }
        if counts[self.rank.index()] != own {
            return Err(Error::InvalidCounts("this rank's is not the length of its part"));
        }
        Partition::from_counts(counts).ok_or(Error::InvalidCounts("their sum overflows"))
    }
}

/// A digest of uneven parts, by which ranks find out that they do not agree about them. Never 0.
fn layout(counts: &[usize]) -> u32 {
    let digest =
        counts.iter().fold(0, |crc, &count| crc32c::crc32c_append(crc, &(count as u64).to_le_bytes()));
    digest.max(1)
}
