//! Collectives whose result is not where the input was, with even and uneven parts.

use std::panic::Location;

use super::call::{Call, Site};
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
        self.all_gather_uneven_async(input, &vec![input.len(); self.world.as_usize()])?.wait()
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
        self.all_gather_uneven_async(input, counts)?.wait()
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
        let site = Location::caller();
        let partition = self.partition(counts, input.len())?;
        let mut output = vec![T::zeroed(); partition.total()];
        output[partition.range(self.rank)].copy_from_slice(input);
        self.start(self.all_gather_call::<T>(&partition, layout(counts), site), output, |output| output)
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
        self.reduce_scatter_uneven_async(input, counts, op)?.wait()
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
        let site = Location::caller();
        let own = counts.get(self.rank.index()).copied().unwrap_or_default();
        let partition = self.partition(counts, own)?;
        if partition.total() != input.len() {
            return Err(Error::InvalidCounts("their sum is not the input's length"));
        }
        let call = self.reduce_scatter_call::<T>(&partition, layout(counts), op, site)?;
        let own = partition.range(self.rank);
        self.start(call, input.to_vec(), move |mut all| {
            all.truncate(own.end);
            all.split_off(own.start)
        })
    }

    /// Every rank's `input`, which has the same length everywhere, in rank order; empty but on the root.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidRoot`].
    #[track_caller]
    pub fn gather<T: Element>(&mut self, input: &[T], root: Rank) -> Result<Vec<T>, Error> {
        self.gather_async(input, root)?.wait()
    }

    /// [`Group::gather`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::gather`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn gather_async<T: Element>(&mut self, input: &[T], root: Rank) -> Result<Handle<Vec<T>>, Error> {
        let site = Location::caller();
        let counts = vec![input.len(); self.world.as_usize()];
        self.start_gather(input, &counts, 0, root, site)
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
        self.gather_uneven_async(input, counts, root)?.wait()
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
        self.start_gather(input, counts, layout(counts), root, Location::caller())
    }

    fn start_gather<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        layout: u32,
        root: Rank,
        site: Site,
    ) -> Result<Handle<Vec<T>>, Error> {
        self.check_root(root)?;
        let partition = self.partition(counts, input.len())?;
        let schedule = schedule::gather(self.world, self.rank, root, &partition);
        let count = partition.total();
        let algorithm = self.algorithm_of::<T>(Operation::Gather, count);
        let call =
            Call::new(Operation::Gather, algorithm, count, schedule, site).rooted(root).laid_out(layout);
        if self.rank != root {
            return self.start(call, input.to_vec(), |_| Vec::new());
        }
        let mut all = vec![T::zeroed(); partition.total()];
        all[partition.range(root)].copy_from_slice(input);
        self.start(call, all, |all| all)
    }

    /// Rank r gets the r-th of n even parts of the root's `input`, whose length `count` all ranks name; what other ranks
    /// pass as input is not looked at.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], [`Error::InvalidRoot`], and [`Error::InvalidCounts`] if the root's input has another length.
    #[track_caller]
    pub fn scatter<T: Element>(&mut self, input: &[T], count: usize, root: Rank) -> Result<Vec<T>, Error> {
        self.scatter_async(input, count, root)?.wait()
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
        let site = Location::caller();
        self.start_scatter(input, &Partition::even(count, self.world), 0, root, site)
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
        self.scatter_uneven_async(input, counts, root)?.wait()
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
        let site = Location::caller();
        let own = counts.get(self.rank.index()).copied().unwrap_or_default();
        let partition = self.partition(counts, own)?;
        self.start_scatter(input, &partition, layout(counts), root, site)
    }

    fn start_scatter<T: Element>(
        &mut self,
        input: &[T],
        partition: &Partition,
        layout: u32,
        root: Rank,
        site: Site,
    ) -> Result<Handle<Vec<T>>, Error> {
        self.check_root(root)?;
        let own = partition.range(self.rank);
        let schedule = schedule::scatter(self.world, self.rank, root, partition);
        let count = partition.total();
        let algorithm = self.algorithm_of::<T>(Operation::Scatter, count);
        let call =
            Call::new(Operation::Scatter, algorithm, count, schedule, site).rooted(root).laid_out(layout);
        if self.rank != root {
            return self.start(call, vec![T::zeroed(); own.len()], |part| part);
        }
        if input.len() != partition.total() {
            return Err(Error::InvalidCounts("their sum is not the length of the root's input"));
        }
        self.start(call, input.to_vec(), move |all| all[own].to_vec())
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
        self.all_to_all_async(input)?.wait()
    }

    /// [`Group::all_to_all`], going on by itself.
    ///
    /// # Errors
    ///
    /// As [`Group::all_to_all`]; a failure on the way is the handle's.
    #[track_caller]
    pub fn all_to_all_async<T: Element>(&mut self, input: &[T]) -> Result<Handle<Vec<T>>, Error> {
        let site = Location::caller();
        let n = self.world.as_usize();
        if !input.len().is_multiple_of(n) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(input.len(), self.world);
        self.start_all_to_all(input, (&partition, &partition), input.len(), site)
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
        self.all_to_all_uneven_async(input, send_counts, receive_counts)?.wait()
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
        let own = |counts: &[usize]| counts.get(self.rank.index()).copied().unwrap_or_default();
        let send = self.partition(send_counts, own(send_counts))?;
        let receive = self.partition(receive_counts, own(send_counts))?;
        if send.total() != input.len() {
            return Err(Error::InvalidCounts("their sum is not the input's length"));
        }
        // The ranks' totals differ, so they are no part of what has to agree.
        self.start_all_to_all(input, (&send, &receive), 0, site)
    }

    fn start_all_to_all<T: Element>(
        &mut self,
        input: &[T],
        (send, receive): (&Partition, &Partition),
        count: usize,
        site: Site,
    ) -> Result<Handle<Vec<T>>, Error> {
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
        self.start(call, buffer, move |mut buffer| buffer.split_off(start))
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
        self.exscan_async(input, op)?.wait()
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
        let site = Location::caller();
        let call = self.exscan_call::<T>(input.len(), op, site)?;
        let (count, is_first) = (input.len(), self.rank == Rank::ZERO);
        let mut buffer = input.to_vec();
        buffer.resize(2 * count, T::zeroed());
        self.start(call, buffer, move |mut buffer| (!is_first).then(|| buffer.split_off(count)))
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
