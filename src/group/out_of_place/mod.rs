//! Collectives that do not work in place, with even and uneven parts.
//!
//! A method with the suffix `_from` does not change its input, and returns the result. So do gather, scatter, all-to-all and
//! exscan, which have no suffix. A method with the suffix `_into` writes the result to a buffer of the caller.

mod exchanges;
mod gathers;
mod reductions;
mod scatters;

use super::memory;
use super::{Buffer, Error, Group, Input};
use crate::schedule::partition::Partition;
use crate::types::Element;

impl Group {
    /// Returns the partition into parts of these lengths.
    fn partition_from_counts<T: Element>(&self, counts: &[usize]) -> Result<Partition, Error> {
        self.checked_partition::<T>(counts, counts.get(self.rank.index()).copied().unwrap_or_default())
    }

    /// Returns the partition into parts of these lengths. Returns an error if this rank's count is not `own_count`.
    fn checked_partition<T: Element>(&self, counts: &[usize], own_count: usize) -> Result<Partition, Error> {
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

/// The error if all parts together exceed the address space.
const TOTAL_TOO_LARGE: Error = Error::InvalidCounts("the sum of the counts is more than memory can hold");

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
fn output_elements<B: Buffer + ?Sized>(buffer: &mut B, count: usize) -> Result<&mut [B::Element], Error> {
    let elements = buffer.elements_mut()?;
    if elements.len() == count {
        Ok(elements)
    } else {
        Err(Error::InvalidCounts("the output has another length than the result"))
    }
}

/// Copies the input to an output buffer of the same length, and returns the elements of this buffer.
fn copy_to_output<'a, I, B>(input: &I, buffer: &'a mut B) -> Result<&'a mut [B::Element], Error>
where
    I: Input + ?Sized,
    B: Buffer<Element = I::Element> + ?Sized,
{
    let input = input.elements()?;
    let output = output_elements(buffer, input.len())?;
    output.copy_from_slice(input);
    Ok(output)
}

/// Returns a digest of the lengths of uneven parts. The ranks compare their digests to detect that they pass different lengths.
/// The digest is never 0, which stands for even parts.
pub(super) fn layout_digest(counts: impl IntoIterator<Item = usize>) -> u32 {
    let bytes: Vec<u8> = counts.into_iter().flat_map(|count| (count as u64).to_le_bytes()).collect();
    crate::wire::crc32c(&bytes).max(1)
}
