//! Gradients on their way while the backward pass still computes.
//!
//! Li et al., "`PyTorch` Distributed: experiences on accelerating data parallel training", VLDB 13 (2020): gradients are
//! reduced in buckets, in the order in which the backward pass finishes them.
//!
//! Buckets are the group's own memory, which peers on the same host reduce where it lies. They are allocated when they are
//! first sent off, in the first step: which gradients make a bucket depends on the network alone, so all ranks do that at the
//! same points, as they call the all-reduces.

use std::collections::VecDeque;
use std::ops::Range;

use half::{bf16, f16};

use crate::codec::{Compression, Narrow};
use crate::group::{Error, Group, Handle, SharedBuffer};
use crate::types::{Element, ReduceOp};

/// Bytes of a bucket where nobody says otherwise: see "Overlap" in `docs/benchmarking.md`.
pub const BUCKET_BYTES: usize = 1 << 20;

/// The buckets of one step.
pub(crate) struct Buckets {
    elements: usize,
    compression: Compression,
    /// What is ready and not on its way. The backward pass goes from the end of the gradients to their beginning.
    ready: Range<usize>,
    flights: VecDeque<(Range<usize>, Flight)>,
    /// Memory of earlier steps. Of the three kinds one is used.
    whole: Spare<f32>,
    fp16: Spare<f16>,
    bf16: Spare<bf16>,
}

/// A bucket on its way.
enum Flight {
    Whole(Handle<SharedBuffer<f32>>),
    Fp16(Handle<SharedBuffer<f16>>),
    Bf16(Handle<SharedBuffer<bf16>>),
}

/// Buckets that have landed, in the order in which they were sent off: in the next step each comes to the same gradients.
struct Spare<T: Element>(VecDeque<SharedBuffer<T>>);

impl<T: Element> Spare<T> {
    /// A bucket of so many elements, which is the same on all ranks.
    fn take(&mut self, group: &mut Group, count: usize) -> Result<SharedBuffer<T>, Error> {
        match self.0.pop_front() {
            Some(bucket) if bucket.len() == count => Ok(bucket),
            _ => group.alloc(count),
        }
    }
}

impl<T: Element> Default for Spare<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl Buckets {
    /// Buckets of at least `bytes` bytes of gradients each, but for the last.
    pub(crate) fn new(bytes: usize, compression: Compression) -> Self {
        let elements = (bytes / size_of::<f32>()).max(1);
        Self {
            elements,
            compression,
            ready: 0..0,
            flights: VecDeque::new(),
            whole: Spare::default(),
            fp16: Spare::default(),
            bf16: Spare::default(),
        }
    }

    /// Elements of a bucket.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// These gradients, which lie before all that were ready before, are final.
    pub(crate) fn add(
        &mut self,
        group: &mut Group,
        range: Range<usize>,
        gradients: &[f32],
    ) -> Result<(), Error> {
        self.ready = if self.ready.is_empty() { range } else { range.start..self.ready.end };
        if self.ready.len() < self.elements {
            return Ok(());
        }
        self.launch(group, gradients)
    }

    /// Sends off what is left.
    pub(crate) fn flush(&mut self, group: &mut Group, gradients: &[f32]) -> Result<(), Error> {
        if self.ready.is_empty() { Ok(()) } else { self.launch(group, gradients) }
    }

    /// Waits for all buckets; `on_landed` is given the range and the sums of each, and can make use of them while others are
    /// still on their way. What is left in the sums and in the gradients is of no meaning.
    pub(crate) fn land(
        &mut self,
        gradients: &mut [f32],
        mut on_landed: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        while let Some((range, flight)) = self.flights.pop_front() {
            let target = &mut gradients[range.clone()];
            match flight {
                Flight::Whole(handle) => {
                    let mut sums = handle.wait()?;
                    on_landed(range, &mut sums);
                    self.whole.0.push_back(sums);
                }
                Flight::Fp16(handle) => {
                    let sums = handle.wait()?;
                    f16::decode(&sums, target);
                    on_landed(range, target);
                    self.fp16.0.push_back(sums);
                }
                Flight::Bf16(handle) => {
                    let sums = handle.wait()?;
                    bf16::decode(&sums, target);
                    on_landed(range, target);
                    self.bf16.0.push_back(sums);
                }
            }
        }
        Ok(())
    }

    fn launch(&mut self, group: &mut Group, gradients: &[f32]) -> Result<(), Error> {
        let range = std::mem::replace(&mut self.ready, 0..0);
        let source = &gradients[range.clone()];
        let (count, op) = (source.len(), ReduceOp::Sum);
        let flight = match self.compression {
            Compression::None => {
                let mut bucket = self.whole.take(group, count)?;
                bucket.copy_from_slice(source);
                Flight::Whole(group.all_reduce_async(bucket, op)?)
            }
            Compression::Fp16 => {
                let bucket = narrow(source, self.fp16.take(group, count)?);
                Flight::Fp16(group.all_reduce_async(bucket, op)?)
            }
            Compression::Bf16 => {
                let bucket = narrow(source, self.bf16.take(group, count)?);
                Flight::Bf16(group.all_reduce_async(bucket, op)?)
            }
        };
        self.flights.push_back((range, flight));
        Ok(())
    }
}

fn narrow<H: Narrow>(source: &[f32], mut bucket: SharedBuffer<H>) -> SharedBuffer<H> {
    H::encode(source, &mut bucket);
    bucket
}
