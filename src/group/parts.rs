//! The parts of a buffer, one for each rank: their lengths, their digest, and memory for them.

use super::{Buffer, Error, Group};
use crate::runtime::memory;
use crate::schedule::partition::Partition;
use crate::types::Element;

/// The error if all parts together exceed the address space.
pub(super) const TOTAL_TOO_LARGE: Error =
    Error::InvalidCounts("the sum of the counts is more than memory can hold");

impl Group {
    /// Divides `total` elements into parts of these lengths, or into even parts. Returns the partition and the digest of the
    /// lengths, which is 0 for even parts.
    pub(super) fn divide<T: Element>(
        &self,
        counts: Option<&[usize]>,
        total: usize,
    ) -> Result<(Partition, u32), Error> {
        let Some(counts) = counts else { return Ok((Partition::even(total, self.world), 0)) };
        let (partition, layout) = self.partition_from_counts::<T>(counts)?;
        if partition.total() == total {
            Ok((partition, layout))
        } else {
            Err(Error::InvalidCounts("the sum of the counts is not the length of the input"))
        }
    }

    /// Returns the partition and the digest of the parts that all ranks contribute. Without `counts`, each part has
    /// `own_count` elements.
    pub(super) fn contributed_parts<T: Element>(
        &self,
        counts: Option<&[usize]>,
        own_count: usize,
    ) -> Result<(Partition, u32), Error> {
        if let Some(counts) = counts {
            let partition = self.checked_partition::<T>(counts, own_count)?;
            return Ok((partition, layout_digest(counts.iter().copied())));
        }
        let total = own_count.checked_mul(self.world.as_usize()).ok_or(TOTAL_TOO_LARGE)?;
        check_total::<T>(total)?;
        Ok((Partition::of_equal_parts(own_count, self.world), 0))
    }

    /// Returns the partition into parts of these lengths, and the digest of the lengths.
    pub(super) fn partition_from_counts<T: Element>(
        &self,
        counts: &[usize],
    ) -> Result<(Partition, u32), Error> {
        let own_count = counts.get(self.rank.index()).copied().unwrap_or_default();
        let partition = self.checked_partition::<T>(counts, own_count)?;
        Ok((partition, layout_digest(counts.iter().copied())))
    }

    /// Returns the partition into parts of these lengths. Returns an error if this rank's count is not `own_count`.
    pub(super) fn checked_partition<T: Element>(
        &self,
        counts: &[usize],
        own_count: usize,
    ) -> Result<Partition, Error> {
        if counts.len() != self.world.as_usize() {
            return Err(Error::InvalidCounts("there must be one count for each rank"));
        }
        if counts[self.rank.index()] != own_count {
            return Err(Error::InvalidCounts("the count of this rank is not the length of its part"));
        }
        let partition = Partition::from_counts(counts).ok_or(TOTAL_TOO_LARGE)?;
        check_total::<T>(partition.total()).map(|()| partition)
    }
}

/// Returns an error if `count` elements exceed the address space.
fn check_total<T: Element>(count: usize) -> Result<(), Error> {
    if count > isize::MAX as usize / size_of::<T>() { Err(TOTAL_TOO_LARGE) } else { Ok(()) }
}

/// Returns `count` zeros, or an error if there is not enough memory. The count may come from other ranks.
pub(super) fn zeroed<T: Element>(count: usize) -> Result<Vec<T>, Error> {
    check_total::<T>(count)?;
    let refused = || Error::System { what: "memory", detail: format!("for {count} x {}", T::DTYPE) };
    memory::zeroed(count).ok_or_else(refused)
}

/// Returns the elements of an output buffer. Returns an error if the buffer does not have `count` elements.
pub(super) fn output_elements<B: Buffer + ?Sized>(
    buffer: &mut B,
    count: usize,
) -> Result<&mut [B::Element], Error> {
    let elements = buffer.elements_mut()?;
    if elements.len() == count {
        Ok(elements)
    } else {
        Err(Error::InvalidCounts("the output has another length than the result"))
    }
}

/// Returns a digest of the lengths of uneven parts. The ranks compare their digests to detect that they pass different lengths.
/// The digest is never 0, which stands for even parts.
pub(super) fn layout_digest(counts: impl IntoIterator<Item = usize>) -> u32 {
    let bytes: Vec<u8> = counts.into_iter().flat_map(|count| (count as u64).to_le_bytes()).collect();
    crate::wire::crc32c(&bytes).max(1)
}
