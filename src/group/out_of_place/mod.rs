//! Collectives whose result is not where the input was, with even and uneven parts.
//!
//! `.._from` leaves its input alone and makes the result; so do those whose result has another shape than the input and that
//! need no such word (gather, scatter, all-to-all, exscan). `.._into` puts the result into a buffer of the caller's.

mod exchanges;
mod gathers;
mod reductions;
mod scatters;

use super::memory;
use super::{Buffer, Error, Group, Input};
use crate::schedule::partition::Partition;
use crate::types::Element;

impl Group {
    /// The parts of these lengths.
    fn partition_of<T: Element>(&self, counts: &[usize]) -> Result<Partition, Error> {
        self.partition::<T>(counts, counts.get(self.rank.index()).copied().unwrap_or_default())
    }

    /// The parts of these lengths, of which this rank's is `own`.
    fn partition<T: Element>(&self, counts: &[usize], own: usize) -> Result<Partition, Error> {
        if counts.len() != self.world.as_usize() {
            return Err(Error::InvalidCounts("there is not one for each rank"));
        }
        if counts[self.rank.index()] != own {
            return Err(Error::InvalidCounts("this rank's is not the length of its part"));
        }
        let partition = Partition::from_counts(counts).ok_or(TOO_MANY)?;
        check_total::<T>(partition.total()).map(|()| partition)
    }
}

const TOO_MANY: Error = Error::InvalidCounts("they come to more than memory can hold");

/// No buffer is longer than an address can tell.
fn check_total<T: Element>(count: usize) -> Result<(), Error> {
    if count > isize::MAX as usize / size_of::<T>() { Err(TOO_MANY) } else { Ok(()) }
}

/// So many zeros. The number may come from other ranks.
pub(super) fn zeroed<T: Element>(count: usize) -> Result<Vec<T>, Error> {
    check_total::<T>(count)?;
    let refused = || Error::System { what: "memory", detail: format!("for {count} x {}", T::DTYPE) };
    memory::zeroed(count).ok_or_else(refused)
}

/// A result's place, which has to have its length.
fn output<B: Buffer + ?Sized>(buffer: &mut B, count: usize) -> Result<&mut [B::Element], Error> {
    let elements = buffer.elements_mut()?;
    if elements.len() == count {
        Ok(elements)
    } else {
        Err(Error::InvalidCounts("the output's length is not the result's"))
    }
}

/// A copy of the input in a place of the same length, to be worked on there.
fn copied<'a, I, B>(input: &I, buffer: &'a mut B) -> Result<&'a mut [B::Element], Error>
where
    I: Input + ?Sized,
    B: Buffer<Element = I::Element> + ?Sized,
{
    let input = input.elements()?;
    let output = output(buffer, input.len())?;
    output.copy_from_slice(input);
    Ok(output)
}

/// A digest of uneven parts, by which ranks find out that they do not agree about them. Never 0.
pub(super) fn layout(counts: impl IntoIterator<Item = usize>) -> u32 {
    let bytes: Vec<u8> = counts.into_iter().flat_map(|count| (count as u64).to_le_bytes()).collect();
    crate::wire::crc32c(&bytes).max(1)
}
