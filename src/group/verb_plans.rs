//! For each verb, the call that it makes, and where the rank's input and result are in the memory of the call.

use super::parts::TOTAL_TOO_LARGE;
use super::plan::{InPlace, InPlacePlan, MemoryAccess, OutOfPlace, Plan, Plans, PlansInPlace};
use super::reducers::Reducer;
use super::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, ExchangedCounts, Exscan, Gather, Reduce, ReduceScatter, Scan,
    Scatter,
};
use super::{Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Element, Rank, Site};

/// The error if the root's input does not have the number of elements that the call gives.
const WRONG_ROOT_LENGTH: Error =
    Error::InvalidCounts("the count, or the sum of the counts, is not the length of the root's input");

/// Implements the traits of verbs that reduce and that use the same memory in place and out of place.
macro_rules! reducing_verbs {
    ($($verb:ident: |$this:ident, $group:ident, $count:ident, $site:ident| $plan:expr;)+) => { $(
        impl<T: Element, R: Reducer<T>> InPlace<T> for $verb<R> {}
        impl<T: Element, R: Reducer<T>> OutOfPlace<T> for $verb<R> {}

        impl<T: Element, R: Reducer<T>> Plans<T> for $verb<R> {
            fn plan(&self, $group: &Group, $count: usize, $site: Site) -> Result<Plan, Error> {
                let $this = self;
                $plan
            }

            fn prepare(&self, input: &mut [T]) {
                self.reducer.prepare(input);
            }
        }

        impl<T: Element, R: Reducer<T>> PlansInPlace<T> for $verb<R> {
            fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error> {
                let plan = Plans::<T>::plan(self, group, count, site)?;
                // The memory of an exscan also has space for the result.
                let start = (plan.count == count).then_some(0);
                Ok(InPlacePlan { plan, start })
            }

            fn prepare_in_place(&self, input: &mut [T]) {
                self.reducer.prepare(input);
            }
        }
    )+ };
}

reducing_verbs! {
    AllReduce: |this, group, count, site| {
        let call = group.new_call::<T>(CollectiveSpec::AllReduce { count }, site);
        Ok(Plan::replacing(this.reducer.reduce(call)?, count))
    };
    Reduce: |this, group, count, site| {
        group.check_root(this.root)?;
        let call = group.new_call::<T>(CollectiveSpec::Reduce { count, root: this.root }, site);
        let plan = Plan::replacing(this.reducer.reduce(call)?, count);
        Ok(if group.rank == this.root { plan } else { plan.without_result() })
    };
    ReduceScatter: |this, group, count, site| {
        let (partition, layout) = group.divide::<T>(this.counts.as_deref(), count)?;
        let own = partition.range(group.rank);
        let call = group.new_call::<T>(CollectiveSpec::ReduceScatter(partition), site).with_layout(layout);
        Ok(Plan::replacing(this.reducer.reduce(call)?, count).with_places(0..count, own))
    };
    Scan: |this, group, count, site| {
        let call = group.new_call::<T>(CollectiveSpec::Scan { count }, site);
        Ok(Plan::replacing(this.reducer.reduce(call)?, count))
    };
    Exscan: |this, group, count, site| {
        let call = group.new_call::<T>(CollectiveSpec::Exscan { count }, site);
        let memory_count = count.checked_mul(2).ok_or(TOTAL_TOO_LARGE)?;
        // Rank 0 has no result, but its output must have the right length as on the other ranks.
        let plan = Plan::replacing(this.reducer.reduce(call)?, memory_count)
            .with_places(0..count, count..memory_count);
        let result = if group.rank == Rank::ZERO { count..count } else { plan.result };
        Ok(Plan { result, ..plan })
    };
}

impl<T: Element> InPlace<T> for AllGather {}
impl<T: Element> OutOfPlace<T> for AllGather {}

impl AllGather {
    fn plan_of<T: Element>(group: &Group, (partition, layout): (Partition, u32), site: Site) -> Plan {
        let (own, total) = (partition.range(group.rank), partition.total());
        let call = group.new_call::<T>(CollectiveSpec::AllGather(partition), site).with_layout(layout);
        Plan::replacing(call, total).with_places(own, 0..total)
    }
}

impl<T: Element> Plans<T> for AllGather {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        let parts = group.contributed_parts::<T>(self.counts.as_deref(), count)?;
        Ok(Self::plan_of::<T>(group, parts, site))
    }
}

impl<T: Element> PlansInPlace<T> for AllGather {
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error> {
        let parts = group.divide::<T>(self.counts.as_deref(), count)?;
        Ok(Self::plan_of::<T>(group, parts, site).at(0))
    }
}

impl<T: Element> InPlace<T> for Gather {}
impl<T: Element> OutOfPlace<T> for Gather {}

impl Gather {
    fn plan_of<T: Element>(
        &self,
        group: &Group,
        (partition, layout): (Partition, u32),
        site: Site,
    ) -> Result<Plan, Error> {
        group.check_root(self.root)?;
        let (own, total) = (partition.range(group.rank), partition.total());
        let spec = CollectiveSpec::Gather { partition, root: self.root };
        let call = group.new_call::<T>(spec, site).with_layout(layout);
        Ok(if group.rank == self.root {
            Plan::replacing(call, total).with_places(own, 0..total)
        } else {
            Plan::sending(call, own.len(), 0..0).without_result()
        })
    }
}

impl<T: Element> Plans<T> for Gather {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        let parts = group.contributed_parts::<T>(self.counts.as_deref(), count)?;
        self.plan_of::<T>(group, parts, site)
    }
}

impl<T: Element> PlansInPlace<T> for Gather {
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error> {
        let parts = group.divide::<T>(self.counts.as_deref(), count)?;
        let own_start = parts.0.range(group.rank).start;
        let plan = self.plan_of::<T>(group, parts, site)?;
        Ok(plan.at(if group.rank == self.root { 0 } else { own_start }))
    }
}

impl<T: Element> InPlace<T> for Broadcast {}
impl<T: Element> OutOfPlace<T> for Broadcast<usize> {}

impl<N> Broadcast<N> {
    fn plan_of<T: Element>(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        group.check_root(self.root)?;
        let call = group.new_call::<T>(CollectiveSpec::Broadcast { count, root: self.root }, site);
        let input = if group.rank == self.root { 0..count } else { 0..0 };
        Ok(Plan::replacing(call, count).with_places(input, 0..count))
    }
}

impl<T: Element> Plans<T> for Broadcast<usize> {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        let plan = self.plan_of::<T>(group, self.count, site)?;
        if group.rank == self.root && count != self.count { Err(WRONG_ROOT_LENGTH) } else { Ok(plan) }
    }

    fn uses_input(&self, group: &Group) -> bool {
        group.rank == self.root
    }
}

impl<T: Element> PlansInPlace<T> for Broadcast {
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error> {
        Ok(self.plan_of::<T>(group, count, site)?.at(0))
    }
}

impl<T: Element> InPlace<T> for Scatter {}
impl<T: Element> OutOfPlace<T> for Scatter<usize> {}
impl<T: Element> OutOfPlace<T> for Scatter<Vec<usize>> {}

impl<N> Scatter<N> {
    fn plan_of<T: Element>(
        &self,
        group: &Group,
        (partition, layout): (Partition, u32),
        site: Site,
    ) -> Result<Plan, Error> {
        group.check_root(self.root)?;
        let (own, total) = (partition.range(group.rank), partition.total());
        let spec = CollectiveSpec::Scatter { partition, root: self.root };
        let call = group.new_call::<T>(spec, site).with_layout(layout);
        Ok(if group.rank == self.root {
            Plan::sending(call, total, own)
        } else {
            Plan::replacing(call, own.len()).with_places(0..0, 0..own.len())
        })
    }

    /// Returns the plan for a separate input of `count` elements.
    fn plan_from<T: Element>(
        &self,
        group: &Group,
        count: usize,
        parts: (Partition, u32),
        site: Site,
    ) -> Result<Plan, Error> {
        let total = parts.0.total();
        let plan = self.plan_of::<T>(group, parts, site)?;
        if group.rank == self.root && count != total { Err(WRONG_ROOT_LENGTH) } else { Ok(plan) }
    }
}

impl<T: Element> Plans<T> for Scatter<usize> {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        self.plan_from::<T>(group, count, group.divide::<T>(None, self.parts)?, site)
    }

    fn uses_input(&self, group: &Group) -> bool {
        group.rank == self.root
    }
}

impl<T: Element> Plans<T> for Scatter<Vec<usize>> {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        self.plan_from::<T>(group, count, group.partition_from_counts::<T>(&self.parts)?, site)
    }

    fn uses_input(&self, group: &Group) -> bool {
        group.rank == self.root
    }
}

impl<T: Element> PlansInPlace<T> for Scatter {
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error> {
        let parts = group.divide::<T>(None, count)?;
        let own_start = parts.0.range(group.rank).start;
        let plan = self.plan_of::<T>(group, parts, site)?;
        Ok(plan.at(if group.rank == self.root { 0 } else { own_start }))
    }
}

impl<T: Element> InPlace<T> for AllToAll {}
impl<T: Element> OutOfPlace<T> for AllToAll {}
impl<T: Element> OutOfPlace<T> for AllToAll<ExchangedCounts> {}

impl<N> AllToAll<N> {
    /// Returns the plan of an exchange of these parts. The ranks compare the total length only if all parts have the same
    /// length.
    fn plan_of<T: Element>(
        group: &Group,
        (send, receive): (Partition, Partition),
        is_even: bool,
        site: Site,
    ) -> Result<Plan, Error> {
        let (sent, received) = (send.total(), receive.total());
        let total = sent.checked_add(received).ok_or(TOTAL_TOO_LARGE)?;
        let own_part = (send.range(group.rank), receive.range(group.rank));
        let call = group.new_call::<T>(CollectiveSpec::AllToAll { send, receive, is_even }, site);
        let plan = Plan::replacing(call, total).with_places(0..sent, sent..total);
        Ok(Plan { access: MemoryAccess::InputThenOutput(own_part.0, own_part.1), ..plan })
    }
}

impl<T: Element> Plans<T> for AllToAll {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        if !count.is_multiple_of(group.world.as_usize()) {
            return Err(Error::InvalidCounts("the group's size does not divide the input's length"));
        }
        let partition = Partition::even(count, group.world);
        Self::plan_of::<T>(group, (partition.clone(), partition), true, site)
    }
}

impl<T: Element> PlansInPlace<T> for AllToAll {
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error> {
        let plan = Plans::<T>::plan(self, group, count, site)?;
        Ok(InPlacePlan { plan, start: None })
    }
}

impl<T: Element> Plans<T> for AllToAll<ExchangedCounts> {
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error> {
        let ExchangedCounts { sent, received } = &self.counts;
        let own_count = sent.get(group.rank.index()).copied().unwrap_or_default();
        let send = group.checked_partition::<T>(sent, own_count)?;
        let receive = group.checked_partition::<T>(received, own_count)?;
        if send.total() != count {
            return Err(Error::InvalidCounts("the sum of the counts is not the length of the input"));
        }
        Self::plan_of::<T>(group, (send, receive), false, site)
    }
}
