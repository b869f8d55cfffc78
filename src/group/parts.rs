//! The parts of a buffer, one for each rank: their lengths, and memory for them.

use super::{Error, Group};
use crate::runtime::memory;
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::types::{Contract, Element, Site};

/// The error if all parts together exceed the address space.
pub(super) const TOTAL_TOO_LARGE: Error =
    Error::InvalidCounts("the sum of the counts is more than memory can hold");

impl Group {
    pub(super) fn partition<T: Element>(&self, counts: &[usize]) -> Result<Partition, Error> {
        if counts.len() != self.world.as_usize() {
            return Err(Error::InvalidCounts("there must be one count for each rank"));
        }
        let partition = Partition::from_counts(counts).ok_or(TOTAL_TOO_LARGE)?;
        check_total::<T>(partition.total()).map(|()| partition)
    }

    pub(super) fn divide<T: Element>(
        &self,
        counts: Option<&[usize]>,
        total: usize,
    ) -> Result<Partition, Error> {
        let Some(counts) = counts else { return Ok(Partition::even(total, self.world)) };
        let partition = self.partition::<T>(counts)?;
        if partition.total() == total {
            Ok(partition)
        } else {
            Err(Error::InvalidCounts("the sum of the counts is not the length of the input"))
        }
    }

    /// Returns the partition into the parts that all ranks contribute. Without `counts`, all have the length of this rank's part.
    pub(super) fn contributed_parts<T: Element>(
        &self,
        counts: Option<&[usize]>,
        own_count: usize,
    ) -> Result<Partition, Error> {
        let Some(counts) = counts else {
            check_total::<T>(own_count.checked_mul(self.world.as_usize()).ok_or(TOTAL_TOO_LARGE)?)?;
            return Ok(Partition::of_equal_parts(own_count, self.world));
        };
        let partition = self.partition::<T>(counts)?;
        if partition.range(self.rank).len() == own_count {
            Ok(partition)
        } else {
            Err(Error::InvalidCounts("the count of this rank is not the length of its part"))
        }
    }

    /// Gathers `N` numbers from every rank, and returns them in rank order. `change` sets what the ranks agree on besides.
    pub(super) fn gather_numbers<T: Element, const N: usize>(
        &mut self,
        own_numbers: [T; N],
        site: Site,
        change: impl FnOnce(&mut Contract),
    ) -> Result<Vec<[T; N]>, Error> {
        let mut all = vec![own_numbers; self.world.as_usize()];
        let spec = CollectiveSpec::AllGather(Partition::of_equal_parts(N, self.world));
        let mut call = self.new_call::<T>(spec, site);
        change(&mut call.request.contract);
        self.run(&mut call, all.as_flattened_mut())?;
        Ok(all)
    }
}

fn check_total<T: Element>(count: usize) -> Result<(), Error> {
    if count > isize::MAX as usize / size_of::<T>() { Err(TOTAL_TOO_LARGE) } else { Ok(()) }
}

/// Returns `count` zeros, or an error if there is not enough memory. The count may come from other ranks.
pub(super) fn zeroed<T: Element>(count: usize) -> Result<Vec<T>, Error> {
    check_total::<T>(count)?;
    let refused = || Error::System { what: "memory", detail: format!("for {count} x {}", T::DTYPE) };
    memory::zeroed(count).ok_or_else(refused)
}
