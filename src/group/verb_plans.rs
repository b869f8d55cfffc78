//! For each verb, the call that it makes, and where the rank's input and result are in the memory of the call.

use super::kept_plan::{MemoryAccess, VerbKey};
use super::parts::TOTAL_TOO_LARGE;
use super::plan::{Plan, Verb};
use super::reducers::Reducer;
use super::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, Exscan, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use super::{Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Operation, Rank, Site};

/// The error if the root's input does not have the number of elements that the call gives.
const WRONG_ROOT_LENGTH: Error =
    Error::InvalidCounts("the count, or the sum of the counts, is not the length of the root's input");

/// Implements the trait of verbs that reduce.
macro_rules! reducing_verbs {
    ($($verb:ident: $key:expr, |$this:ident, $group:ident, $count:ident, $site:ident| $plan:expr;)+) => { $(
        impl<T: Element, R: Reducer<T>, const IN_PLACE: bool> Verb<T, IN_PLACE> for $verb<R> {
            #[inline]
            fn key(&self) -> Option<VerbKey> {
                let key: fn(&Self) -> Option<VerbKey> = $key;
                Some(VerbKey { reduction: Some(self.reducer.built_in()?), ..key(self)? })
            }

            fn plan(&self, $group: &Group, $count: usize, $site: Site) -> Result<Plan, Error> {
                let $this = self;
                $plan
            }

            fn prepare(&self, input: &mut [T]) {
                self.reducer.prepare(input);
            }
        }
    )+ };
}

reducing_verbs! {
    AllReduce: |_| Some(VerbKey::new(Operation::AllReduce)), |this, group, count, site| {
        let mut call = group.new_call::<T>(CollectiveSpec::AllReduce { count }, site);
        this.reducer.set_reduction(&mut call)?;
        Ok(Plan::replacing(call, count))
    };
    Reduce: |this| Some(VerbKey { root: this.root, ..VerbKey::new(Operation::Reduce) }), |this, group, count, site| {
        group.check_root(this.root)?;
        let mut call = group.new_call::<T>(CollectiveSpec::Reduce { count, root: this.root }, site);
        this.reducer.set_reduction(&mut call)?;
        let plan = Plan::replacing(call, count);
        Ok(if group.rank == this.root { plan } else { plan.without_result() })
    };
    ReduceScatter: |this| this.counts.is_none().then(|| VerbKey::new(Operation::ReduceScatter)), |this, group, count, site| {
        let counts = this.counts.as_deref();
        let partition = group.divide::<T>(counts, count)?;
        let own = partition.range(group.rank);
        let mut call = group.new_call::<T>(CollectiveSpec::ReduceScatter(partition), site);
        call.set_counts(counts);
        this.reducer.set_reduction(&mut call)?;
        Ok(Plan::replacing(call, count).with_places(0..count, own))
    };
    // Rank 0 of a scan also applies the reduction to its own elements, which no plan contains.
    Scan: |_| None, |this, group, count, site| {
        let mut call = group.new_call::<T>(CollectiveSpec::Scan { count }, site);
        this.reducer.set_reduction(&mut call)?;
        Ok(Plan::replacing(call, count))
    };
    Exscan: |_| None, |this, group, count, site| {
        let mut call = group.new_call::<T>(CollectiveSpec::Exscan { count }, site);
        this.reducer.set_reduction(&mut call)?;
        let memory_count = count.checked_mul(2).ok_or(TOTAL_TOO_LARGE)?;
        let mut plan = Plan::replacing(call, memory_count)
            .with_places(0..count, count..memory_count)
            .with_start(None);
        if group.rank == Rank::ZERO {
            // Rank 0 has no result, but its output must have the right length as on the other ranks.
            plan.places.result = count..count;
        }
        Ok(plan)
    };
}

impl<T: Element, const IN_PLACE: bool> Verb<T, IN_PLACE> for AllGather {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        self.counts.is_none().then(|| VerbKey::new(Operation::AllGather))
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        gather::<T, IN_PLACE>(group, None, (self.counts.as_deref(), count), site)
    }
}

impl<T: Element, const IN_PLACE: bool> Verb<T, IN_PLACE> for Gather {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        self.counts.is_none().then(|| VerbKey { root: self.root, ..VerbKey::new(Operation::Gather) })
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        gather::<T, IN_PLACE>(group, Some(self.root), (self.counts.as_deref(), count), site)
    }
}

/// Returns the plan of a gather to all ranks, or to `root`. `count` is the length of the buffer, or of a separate input.
fn gather<T: Element, const IN_PLACE: bool>(
    group: &Group,
    root: Option<Rank>,
    (counts, count): (Option<&[usize]>, usize),
    site: Site,
) -> Result<Plan, Error> {
    let partition = if IN_PLACE {
        group.divide::<T>(counts, count)?
    } else {
        group.contributed_parts::<T>(counts, count)?
    };
    group.check_root(root.unwrap_or(Rank::ZERO))?;
    let (own, total) = (partition.range(group.rank), partition.total());
    let spec = match root {
        Some(root) => CollectiveSpec::Gather { partition, root },
        None => CollectiveSpec::AllGather(partition),
    };
    let mut call = group.new_call::<T>(spec, site);
    call.set_counts(counts);
    Ok(if root.is_none_or(|root| root == group.rank) {
        Plan::replacing(call, total).with_places(own, 0..total)
    } else {
        Plan::sending(call, own.len(), 0..0).without_result().with_start(Some(own.start))
    })
}

/// Returns the plan of a scatter from `root`.
fn scatter<T: Element>(
    group: &Group,
    root: Rank,
    (partition, counts): (Partition, Option<&[usize]>),
    site: Site,
) -> Result<Plan, Error> {
    group.check_root(root)?;
    let (own, total) = (partition.range(group.rank), partition.total());
    let mut call = group.new_call::<T>(CollectiveSpec::Scatter { partition, root }, site);
    call.set_counts(counts);
    Ok(if group.rank == root {
        Plan::sending(call, total, own)
    } else {
        Plan::replacing(call, own.len()).with_places(0..0, 0..own.len()).with_start(Some(own.start))
    })
}

/// Returns the plan of a broadcast of `count` elements from `root`.
fn broadcast<T: Element>(group: &Group, root: Rank, count: usize, site: Site) -> Result<Plan, Error> {
    group.check_root(root)?;
    let call = group.new_call::<T>(CollectiveSpec::Broadcast { count, root }, site);
    let input = if group.rank == root { 0..count } else { 0..0 };
    Ok(Plan::replacing(call, count).with_places(input, 0..count))
}

impl<T: Element> Verb<T, true> for Broadcast {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        Some(VerbKey { root: self.root, ..VerbKey::new(Operation::Broadcast) })
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        broadcast::<T>(group, self.root, count, site)
    }
}

impl<T: Element> Verb<T, true> for Scatter {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        Some(VerbKey { root: self.root, ..VerbKey::new(Operation::Scatter) })
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        scatter::<T>(group, self.root, (group.divide::<T>(None, count)?, None), site)
    }
}

/// Implements the trait of verbs in which only the root has an input.
macro_rules! verbs_with_root_input {
    ($($verb:ty: $key:expr, |$this:ident, $group:ident, $site:ident| $plan:expr;)+) => { $(
        impl<T: Element> Verb<T, false> for $verb {
            #[inline]
            fn key(&self) -> Option<VerbKey> {
                let key: fn(&Self) -> Option<VerbKey> = $key;
                Some(VerbKey { root: self.root, ..key(self)? })
            }

            fn plan(&self, $group: &Group, count: usize, $site: Site) -> Result<Plan, Error> {
                let $this = self;
                let plan = $plan?;
                if $group.rank == self.root && count != plan.places.count { Err(WRONG_ROOT_LENGTH) } else { Ok(plan) }
            }

            fn uses_input(&self, group: &Group) -> bool {
                group.rank == self.root
            }
        }
    )+ };
}

verbs_with_root_input! {
    Broadcast<usize>: |this| Some(VerbKey { count: this.count, ..VerbKey::new(Operation::Broadcast) }), |this, group, site| {
        broadcast::<T>(group, this.root, this.count, site)
    };
    Scatter<usize>: |this| Some(VerbKey { count: this.parts, ..VerbKey::new(Operation::Scatter) }), |this, group, site| {
        scatter::<T>(group, this.root, (group.divide::<T>(None, this.parts)?, None), site)
    };
    Scatter<Vec<usize>>: |_| None, |this, group, site| {
        scatter::<T>(group, this.root, (group.partition::<T>(&this.parts)?, Some(&this.parts)), site)
    };
}

/// The verb of [`Group::barrier`], which has no buffer.
pub(super) struct Barrier;

impl Verb<u8, true> for Barrier {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        Some(VerbKey::new(Operation::Barrier))
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        Ok(Plan::replacing(group.new_call::<u8>(CollectiveSpec::Barrier, site), count))
    }
}

/// Returns the plan of an exchange of these parts. The ranks compare the total length only if all parts have the same length.
fn all_to_all<T: Element>(
    group: &Group,
    (send, receive): (Partition, Partition),
    is_even: bool,
    site: Site,
) -> Result<Plan, Error> {
    let (sent, received) = (send.total(), receive.total());
    let total = sent.checked_add(received).ok_or(TOTAL_TOO_LARGE)?;
    let access = MemoryAccess::InputThenOutput(send.range(group.rank), receive.range(group.rank));
    let call = group.new_call::<T>(CollectiveSpec::AllToAll { send, receive, is_even }, site);
    let mut plan = Plan::replacing(call, total).with_places(0..sent, sent..total).with_start(None);
    plan.places.access = access;
    Ok(plan)
}

impl<T: Element, const IN_PLACE: bool> Verb<T, IN_PLACE> for AllToAll {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        Some(VerbKey::new(Operation::AllToAll))
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        if !count.is_multiple_of(group.world.as_usize()) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(count, group.world);
        all_to_all::<T>(group, (partition.clone(), partition), true, site)
    }
}

impl<T: Element> Verb<T, false> for AllToAll<[Vec<usize>; 2]> {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        let [sent, received] = &self.counts;
        let send = group.divide::<T>(Some(sent), count)?;
        let receive = group.contributed_parts::<T>(Some(received), send.range(group.rank).len())?;
        all_to_all::<T>(group, (send, receive), false, site)
    }
}
