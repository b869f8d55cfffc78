//! For each verb, the call that it makes, and where the rank's input and result are in the memory of the call.

use std::ops::Range;

use super::call::layout_digest;
use super::kept_plan::{MemoryAccess, Places, Plan};
use super::parts::TOTAL_TOO_LARGE;
use super::plan::{Verb, VerbArguments};
use super::reducers::Reducer;
use super::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, Exscan, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use super::{Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Operation, Rank, Site};

const WRONG_ROOT_LENGTH: Error =
    Error::InvalidCounts("the count, or the sum of the counts, is not the length of the root's input");

/// The verb of [`Group::barrier`], which has no buffer.
pub(super) struct Barrier;

macro_rules! verbs {
    ($(impl[$($generics:tt)*] $verb:ty, $in_place:tt: |$this:ident| $arguments:expr;)+) => { $(
        impl<T: Element, $($generics)*> Verb<T, $in_place> for $verb {
            #[inline]
            fn arguments(&self) -> VerbArguments<'_, T> {
                let $this = self;
                VerbArguments { is_in_place: $in_place, ..$arguments }
            }
        }
    )+ };
}

verbs! {
    impl[const IN_PLACE: bool] Barrier, IN_PLACE: |_this| VerbArguments::new(Operation::Barrier);
    impl[R: Reducer<T>, const IN_PLACE: bool] AllReduce<R>, IN_PLACE:
        |this| VerbArguments::reducing(Operation::AllReduce, &this.reducer);
    impl[R: Reducer<T>, const IN_PLACE: bool] Scan<R>, IN_PLACE:
        |this| VerbArguments::reducing(Operation::Scan, &this.reducer);
    impl[R: Reducer<T>, const IN_PLACE: bool] Exscan<R>, IN_PLACE:
        |this| VerbArguments::reducing(Operation::Exscan, &this.reducer);
    impl[R: Reducer<T>, const IN_PLACE: bool] Reduce<R>, IN_PLACE:
        |this| VerbArguments { root: this.root, ..VerbArguments::reducing(Operation::Reduce, &this.reducer) };
    impl[R: Reducer<T>, const IN_PLACE: bool] ReduceScatter<R>, IN_PLACE: |this| VerbArguments {
        counts: this.counts.as_deref(),
        ..VerbArguments::reducing(Operation::ReduceScatter, &this.reducer)
    };
    impl[const IN_PLACE: bool] AllGather, IN_PLACE:
        |this| VerbArguments { counts: this.counts.as_deref(), ..VerbArguments::new(Operation::AllGather) };
    impl[const IN_PLACE: bool] Gather, IN_PLACE: |this| VerbArguments {
        root: this.root,
        counts: this.counts.as_deref(),
        ..VerbArguments::new(Operation::Gather)
    };
    impl[const IN_PLACE: bool] AllToAll, IN_PLACE: |_this| VerbArguments::new(Operation::AllToAll);
    impl[] AllToAll<[Vec<usize>; 2]>, false:
        |this| VerbArguments { exchanged_counts: Some(&this.counts), ..VerbArguments::new(Operation::AllToAll) };
    impl[] Broadcast, true:
        |this| VerbArguments { root: this.root, ..VerbArguments::new(Operation::Broadcast) };
    impl[] Broadcast<usize>, false:
        |this| VerbArguments { root: this.root, count: this.count, ..VerbArguments::new(Operation::Broadcast) };
    impl[] Scatter, true: |this| VerbArguments { root: this.root, ..VerbArguments::new(Operation::Scatter) };
    impl[] Scatter<usize>, false:
        |this| VerbArguments { root: this.root, count: this.parts, ..VerbArguments::new(Operation::Scatter) };
    impl[] Scatter<Vec<usize>>, false: |this| VerbArguments {
        root: this.root,
        counts: Some(&this.parts),
        ..VerbArguments::new(Operation::Scatter)
    };
}

impl<T: Element> VerbArguments<'_, T> {
    /// Returns whether this rank's input is used. A broadcast and a scatter ignore the separate inputs of all ranks but the root.
    pub(super) fn has_input(&self, group: &Group) -> bool {
        self.is_in_place || !self.is_from_root() || group.rank == self.root
    }

    fn is_from_root(&self) -> bool {
        matches!(self.operation, Operation::Broadcast | Operation::Scatter)
    }

    pub(super) fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        group.check_root(self.root)?;
        let spec = self.spec(group, count)?;
        let places = places_of(&spec, group)?;
        let has_separate_input = !self.is_in_place && self.is_from_root();
        if has_separate_input && group.rank == self.root && count != places.count {
            return Err(WRONG_ROOT_LENGTH);
        }
        let mut call = group.new_call::<T>(spec, site);
        // The ranks compare the lengths of uneven parts.
        let digest = |counts: &[usize]| layout_digest(counts.iter().copied());
        call.request.contract.layout = self.counts.map_or(0, digest);
        if let Some(reducer) = self.reducer {
            reducer.set_reduction(&mut call)?;
        }
        Ok(Plan { call, places, key: None })
    }

    fn spec(&self, group: &Group, count: usize) -> Result<CollectiveSpec, Error> {
        let (root, counts) = (self.root, self.counts);
        let gathered = || {
            if self.is_in_place {
                group.divide::<T>(counts, count)
            } else {
                group.contributed_parts::<T>(counts, count)
            }
        };
        let named_count = if self.is_in_place { count } else { self.count };
        Ok(match self.operation {
            Operation::AllReduce => CollectiveSpec::AllReduce { count },
            Operation::Reduce => CollectiveSpec::Reduce { count, root },
            Operation::Scan => CollectiveSpec::Scan { count },
            Operation::Exscan => CollectiveSpec::Exscan { count },
            Operation::ReduceScatter => CollectiveSpec::ReduceScatter(group.divide::<T>(counts, count)?),
            Operation::AllGather => CollectiveSpec::AllGather(gathered()?),
            Operation::Gather => CollectiveSpec::Gather { partition: gathered()?, root },
            Operation::Broadcast => CollectiveSpec::Broadcast { count: named_count, root },
            Operation::Scatter => {
                let partition = match counts {
                    Some(counts) => group.partition::<T>(counts)?,
                    None => Partition::even(named_count, group.world),
                };
                CollectiveSpec::Scatter { partition, root }
            }
            Operation::AllToAll => self.exchange(group, count)?,
            Operation::Barrier | Operation::Message => CollectiveSpec::Barrier,
        })
    }

    /// Returns an all-to-all. The ranks compare the total length only if all parts have the same length.
    fn exchange(&self, group: &Group, count: usize) -> Result<CollectiveSpec, Error> {
        if let Some([sent, received]) = self.exchanged_counts {
            let send = group.divide::<T>(Some(sent), count)?;
            let receive = group.contributed_parts::<T>(Some(received), send.range(group.rank).len())?;
            return Ok(CollectiveSpec::AllToAll { send, receive, is_even: false });
        }
        if !count.is_multiple_of(group.world.as_usize()) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(count, group.world);
        Ok(CollectiveSpec::AllToAll { send: partition.clone(), receive: partition, is_even: true })
    }
}

fn places_of(spec: &CollectiveSpec, group: &Group) -> Result<Places, Error> {
    let rank = group.rank;
    Ok(match spec {
        CollectiveSpec::Barrier => Places::replacing(0),
        CollectiveSpec::AllReduce { count } | CollectiveSpec::Scan { count } => Places::replacing(*count),
        CollectiveSpec::Reduce { count, root } if rank == *root => Places::replacing(*count),
        CollectiveSpec::Reduce { count, .. } => Places::replacing(*count).without_result(),
        CollectiveSpec::ReduceScatter(parts) => {
            Places::new(0..parts.total(), parts.range(rank), parts.total())
        }
        CollectiveSpec::Exscan { count } => {
            let total = count.checked_mul(2).ok_or(TOTAL_TOO_LARGE)?;
            let places = Places { start: None, ..Places::new(0..*count, *count..total, total) };
            // Rank 0 has no result, but its output must have the right length as on the other ranks.
            if rank == Rank::ZERO { Places { result: *count..*count, ..places } } else { places }
        }
        CollectiveSpec::Gather { partition, root } if rank != *root => {
            let own = partition.range(rank);
            let places = Places::sending(own.len(), 0..0).without_result();
            Places { start: Some(own.start), ..places }
        }
        CollectiveSpec::AllGather(parts) | CollectiveSpec::Gather { partition: parts, .. } => {
            Places::new(parts.range(rank), 0..parts.total(), parts.total())
        }
        CollectiveSpec::Broadcast { count, root } => {
            let input = if rank == *root { 0..*count } else { 0..0 };
            Places::new(input, 0..*count, *count)
        }
        CollectiveSpec::Scatter { partition, root } if rank == *root => {
            Places::sending(partition.total(), partition.range(rank))
        }
        CollectiveSpec::Scatter { partition, .. } => {
            let own = partition.range(rank);
            Places { start: Some(own.start), ..Places::new(0..0, 0..own.len(), own.len()) }
        }
        CollectiveSpec::AllToAll { send, receive, .. } => {
            let (sent, received) = (send.total(), receive.total());
            let total = sent.checked_add(received).ok_or(TOTAL_TOO_LARGE)?;
            let access = MemoryAccess::InputThenOutput(send.range(rank), receive.range(rank));
            Places { access, start: None, ..Places::new(0..sent, sent..total, total) }
        }
    })
}

impl Places {
    /// Returns the places of a call that writes to its memory of `count` elements. In place, the memory begins with the buffer.
    fn new(input: Range<usize>, result: Range<usize>, count: usize) -> Self {
        let output_count = Some(result.len());
        Self { access: MemoryAccess::Written, count, input, result, output_count, start: Some(0) }
    }

    /// Returns the places of a call that replaces `count` elements of input by the result.
    fn replacing(count: usize) -> Self {
        Self::new(0..count, 0..count, count)
    }

    /// Returns the places of a call that only sends `count` elements. Of these elements, `result` is this rank's result.
    fn sending(count: usize, result: Range<usize>) -> Self {
        Self { access: MemoryAccess::Sent, ..Self::new(0..count, result, count) }
    }

    /// Makes the call ignore this rank's output. The rank has no result.
    fn without_result(self) -> Self {
        Self { result: 0..0, output_count: None, ..self }
    }
}
