//! For each verb, the call that it makes, and where the rank's input and result are in the memory of the call.

use super::kept_plan::{MemoryAccess, VerbKey};
use super::parts::TOTAL_TOO_LARGE;
use super::plan::{InPlace, OutOfPlace, Plan};
use super::reducers::Reducer;
use super::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, ExchangedCounts, Exscan, Gather, Reduce, ReduceScatter, Scan,
    Scatter,
};
use super::{Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Operation, Rank, Site};

/// The error if the root's input does not have the number of elements that the call gives.
const WRONG_ROOT_LENGTH: Error =
    Error::InvalidCounts("the count, or the sum of the counts, is not the length of the root's input");

/// Implements the traits of verbs that reduce and that use the same memory in place and out of place.
macro_rules! reducing_verbs {
    ($($verb:ident: $key:expr, |$this:ident, $group:ident, $count:ident, $site:ident| $plan:expr;)+) => { $(
        impl<T: Element, R: Reducer<T>> OutOfPlace<T> for $verb<R> {
            #[inline]
            fn key(&self) -> Option<VerbKey> {
                let key: fn(&Self) -> Option<VerbKey> = $key;
                Some(key(self)?.reducing(self.reducer.built_in()?))
            }

            fn plan(&self, $group: &Group, $count: usize, $site: Site) -> Result<Plan, Error> {
                let $this = self;
                $plan
            }

            fn prepare(&self, input: &mut [T]) {
                self.reducer.prepare(input);
            }
        }

        impl<T: Element, R: Reducer<T>> InPlace<T> for $verb<R> {
            #[inline]
            fn key_in_place(&self) -> Option<VerbKey> {
                OutOfPlace::<T>::key(self)
            }

            fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
                let plan = OutOfPlace::<T>::plan(self, group, count, site)?;
                // The memory of an exscan also has space for the result.
                let start = (plan.places.count == count).then_some(0);
                Ok(plan.with_start(start))
            }

            fn prepare_in_place(&self, input: &mut [T]) {
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
    Reduce: |this| Some(VerbKey::new(Operation::Reduce).with_root(this.root)), |this, group, count, site| {
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
        // Rank 0 has no result, but its output must have the right length as on the other ranks.
        let plan = Plan::replacing(call, memory_count)
            .with_places(0..count, count..memory_count);
        Ok(if group.rank == Rank::ZERO { plan.with_result(count..count) } else { plan })
    };
}

/// Implements the traits of verbs that gather one part of each rank.
macro_rules! gathering_verbs {
    ($($verb:ident: |$this:ident| $root:expr;)+) => { $(
        impl $verb {
            #[inline]
            fn plan_key(&self) -> Option<VerbKey> {
                let $this = self;
                let key = VerbKey::new(Operation::$verb).with_root($root.unwrap_or(Rank::ZERO));
                self.counts.is_none().then_some(key)
            }
        }

        impl<T: Element> OutOfPlace<T> for $verb {
            #[inline]
            fn key(&self) -> Option<VerbKey> {
                self.plan_key()
            }

            fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
                let ($this, counts) = (self, self.counts.as_deref());
                gather::<T>(group, $root, (group.contributed_parts::<T>(counts, count)?, counts), site)
            }
        }

        impl<T: Element> InPlace<T> for $verb {
            #[inline]
            fn key_in_place(&self) -> Option<VerbKey> {
                self.plan_key()
            }

            fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
                let ($this, counts) = (self, self.counts.as_deref());
                gather::<T>(group, $root, (group.divide::<T>(counts, count)?, counts), site)
            }
        }
    )+ };
}

gathering_verbs! {
    AllGather: |_this| None;
    Gather: |this| Some(this.root);
}

/// Returns the plan of a gather to all ranks, or to `root`.
fn gather<T: Element>(
    group: &Group,
    root: Option<Rank>,
    (partition, counts): (Partition, Option<&[usize]>),
    site: Site,
) -> Result<Plan, Error> {
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

impl<T: Element> InPlace<T> for Broadcast {
    #[inline]
    fn key_in_place(&self) -> Option<VerbKey> {
        Some(VerbKey::new(Operation::Broadcast).with_root(self.root))
    }

    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        broadcast::<T>(group, self.root, count, site)
    }
}

impl<T: Element> InPlace<T> for Scatter {
    #[inline]
    fn key_in_place(&self) -> Option<VerbKey> {
        Some(VerbKey::new(Operation::Scatter).with_root(self.root))
    }

    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        scatter::<T>(group, self.root, (group.divide::<T>(None, count)?, None), site)
    }
}

/// Implements the trait of verbs in which only the root has an input.
macro_rules! verbs_with_root_input {
    ($($verb:ty: $key:expr, |$this:ident, $group:ident, $site:ident| $plan:expr;)+) => { $(
        impl<T: Element> OutOfPlace<T> for $verb {
            #[inline]
            fn key(&self) -> Option<VerbKey> {
                let key: fn(&Self) -> Option<VerbKey> = $key;
                key(self).map(|key| key.with_root(self.root))
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
    Broadcast<usize>: |this| Some(VerbKey::new(Operation::Broadcast).with_count(this.count)), |this, group, site| {
        broadcast::<T>(group, this.root, this.count, site)
    };
    Scatter<usize>: |this| Some(VerbKey::new(Operation::Scatter).with_count(this.parts)), |this, group, site| {
        scatter::<T>(group, this.root, (group.divide::<T>(None, this.parts)?, None), site)
    };
    Scatter<Vec<usize>>: |_| None, |this, group, site| {
        scatter::<T>(group, this.root, (group.partition::<T>(&this.parts)?, Some(&this.parts)), site)
    };
}

/// The verb of [`Group::barrier`], which has no buffer.
pub(super) struct Barrier;

impl InPlace<u8> for Barrier {
    #[inline]
    fn key_in_place(&self) -> Option<VerbKey> {
        Some(VerbKey::new(Operation::Barrier))
    }

    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
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

impl<T: Element> OutOfPlace<T> for AllToAll {
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

impl<T: Element> InPlace<T> for AllToAll {
    #[inline]
    fn key_in_place(&self) -> Option<VerbKey> {
        OutOfPlace::<T>::key(self)
    }

    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        OutOfPlace::<T>::plan(self, group, count, site)
    }
}

impl<T: Element> OutOfPlace<T> for AllToAll<ExchangedCounts> {
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        None
    }

    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        let ExchangedCounts { sent, received } = &self.counts;
        let send = group.divide::<T>(Some(sent), count)?;
        let receive = group.contributed_parts::<T>(Some(received), send.range(group.rank).len())?;
        all_to_all::<T>(group, (send, receive), false, site)
    }
}
