//! Reduces gradients in buckets while the backward pass is still running.
//!
//! The backward pass goes from the last parameter to the first, and the all-reduce of a bucket starts as soon as all gradients
//! of the bucket are final. Li et al. describe this method in "`PyTorch` Distributed: experiences on accelerating data parallel
//! training", VLDB 13 (2020).
//!
//! Bucket boundaries depend only on the number of parameters and on the bucket size, so all ranks use the same
//! boundaries. The boundaries do not depend on the ranges in which the backward pass reports gradients. These ranges may
//! differ between ranks: a rank without samples reports whole layers.
//!
//! The first step allocates a buffer for each bucket with [`Group::alloc`]. Ranks on the same host reduce these
//! buffers in place.

use std::collections::VecDeque;
use std::ops::Range;

use half::{bf16, f16};

use crate::codec::{Compression, Narrow};
use crate::group::{Error, Group, Handle, SharedBuffer};
use crate::types::{Element, ReduceOp};

/// The default size of a bucket in bytes: see `docs/results/training-and-python.md`.
pub const BUCKET_BYTES: usize = 1 << 20;

/// Divides the gradients of each step into buckets and reduces them.
pub(crate) struct Buckets {
    /// The number of elements in a full bucket.
    elements: usize,
    compression: Compression,
    /// The range of gradients that are final but not yet in a bucket. The backward pass extends this range towards index 0.
    ready: Range<usize>,
    /// The buckets that are being reduced, each with its range of gradients, in the order in which they were started.
    in_flight: VecDeque<(Range<usize>, PendingBucket)>,
    /// The reusable buffers of earlier steps. Only the list of the type that `compression` selects holds buffers.
    free_f32: FreeBuffers<f32>,
    free_f16: FreeBuffers<f16>,
    free_bf16: FreeBuffers<bf16>,
}

/// A bucket whose all-reduce has started.
enum PendingBucket {
    F32(Handle<SharedBuffer<f32>>),
    F16(Handle<SharedBuffer<f16>>),
    Bf16(Handle<SharedBuffer<bf16>>),
}

/// Buffers that can be reused, in the order of their buckets. So a buffer holds the same range of gradients in every step.
struct FreeBuffers<T: Element>(VecDeque<SharedBuffer<T>>);

impl<T: Element> FreeBuffers<T> {
    /// Returns a buffer of `count` elements: the next free buffer, or a new one. `count` must be the same on all ranks.
    fn take(&mut self, group: &mut Group, count: usize) -> Result<SharedBuffer<T>, Error> {
        match self.0.pop_front() {
            Some(buffer) if buffer.len() == count => Ok(buffer),
            _ => group.alloc(count),
        }
    }
}

impl<T: Element> Default for FreeBuffers<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl Buckets {
    /// Creates buckets of `bytes` bytes of `f32` gradients each. The last bucket of a step may be shorter.
    pub(crate) fn new(bytes: usize, compression: Compression) -> Self {
        let elements = (bytes / size_of::<f32>()).max(1);
        Self {
            elements,
            compression,
            ready: 0..0,
            in_flight: VecDeque::new(),
            free_f32: FreeBuffers::default(),
            free_f16: FreeBuffers::default(),
            free_bf16: FreeBuffers::default(),
        }
    }

    /// Returns the number of elements in a full bucket.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// Adds a range of final gradients. The range must end where the range of the previous call begins. Starts the
    /// all-reduce of each bucket that is now full.
    pub(crate) fn add(
        &mut self,
        group: &mut Group,
        range: Range<usize>,
        gradients: &[f32],
    ) -> Result<(), Error> {
        self.ready = if self.ready.is_empty() { range } else { range.start..self.ready.end };
        while self.ready.len() >= self.elements {
            let bucket = self.ready.end - self.elements..self.ready.end;
            self.ready.end = bucket.start;
            self.start_all_reduce(group, bucket, gradients)?;
        }
        Ok(())
    }

    /// Starts the all-reduce of the remaining gradients, which do not fill a bucket.
    pub(crate) fn flush(&mut self, group: &mut Group, gradients: &[f32]) -> Result<(), Error> {
        let rest = std::mem::replace(&mut self.ready, 0..0);
        if rest.is_empty() { Ok(()) } else { self.start_all_reduce(group, rest, gradients) }
    }

    /// Waits for the buckets, in the order in which they were started. Calls `on_reduced` with the range and the sums of each
    /// bucket while later buckets are still being reduced. Afterwards, the content of `gradients` is unspecified.
    pub(crate) fn drain(
        &mut self,
        gradients: &mut [f32],
        mut on_reduced: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        while let Some((range, bucket)) = self.in_flight.pop_front() {
            let target = &mut gradients[range.clone()];
            match bucket {
                PendingBucket::F32(handle) => {
                    let mut sums = handle.wait()?;
                    on_reduced(range, &mut sums);
                    self.free_f32.0.push_back(sums);
                }
                PendingBucket::F16(handle) => {
                    let sums = handle.wait()?;
                    f16::decode(&sums, target);
                    on_reduced(range, target);
                    self.free_f16.0.push_back(sums);
                }
                PendingBucket::Bf16(handle) => {
                    let sums = handle.wait()?;
                    bf16::decode(&sums, target);
                    on_reduced(range, target);
                    self.free_bf16.0.push_back(sums);
                }
            }
        }
        Ok(())
    }

    /// Copies the gradients of `range` into a buffer and starts the all-reduce of this buffer.
    fn start_all_reduce(
        &mut self,
        group: &mut Group,
        range: Range<usize>,
        gradients: &[f32],
    ) -> Result<(), Error> {
        let source = &gradients[range.clone()];
        let (count, op) = (source.len(), ReduceOp::Sum);
        let bucket = match self.compression {
            Compression::None => {
                let mut buffer = self.free_f32.take(group, count)?;
                buffer.copy_from_slice(source);
                PendingBucket::F32(group.all_reduce_async(buffer, op)?)
            }
            Compression::Fp16 => {
                let buffer = encode(source, self.free_f16.take(group, count)?);
                PendingBucket::F16(group.all_reduce_async(buffer, op)?)
            }
            Compression::Bf16 => {
                let buffer = encode(source, self.free_bf16.take(group, count)?);
                PendingBucket::Bf16(group.all_reduce_async(buffer, op)?)
            }
        };
        self.in_flight.push_back((range, bucket));
        Ok(())
    }
}

/// Writes the elements of `source` to `buffer` in half precision and returns `buffer`.
fn encode<H: Narrow>(source: &[f32], mut buffer: SharedBuffer<H>) -> SharedBuffer<H> {
    H::encode(source, &mut buffer);
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: a rank without samples reports a layer as one range, but other ranks report this layer as several ranges.
    /// When bucket boundaries depended on these ranges, the ranks started all-reduces of different lengths and the job failed.
    #[test]
    fn bucket_boundaries_do_not_depend_on_the_reported_ranges() {
        let gradients: Vec<f32> = (0..1000).map(|value| value as f32).collect();
        let mut boundaries = Vec::new();
        for range_elements in [1, 7, 64, 100, 1000] {
            let mut group = Group::solo();
            let mut buckets = Buckets::new(64 * size_of::<f32>(), Compression::None);
            let mut end = gradients.len();
            while end > 0 {
                let start = end.saturating_sub(range_elements);
                buckets.add(&mut group, start..end, &gradients).unwrap();
                end = start;
            }
            buckets.flush(&mut group, &gradients).unwrap();
            let mut found = Vec::new();
            buckets
                .drain(&mut gradients.clone(), |range, sums| {
                    assert_eq!(*sums, gradients[range.clone()]);
                    found.push(range);
                })
                .unwrap();
            boundaries.push(found);
        }
        assert_eq!(boundaries[0].last(), Some(&(0..40)));
        assert!(boundaries.iter().all(|found| *found == boundaries[0]), "{boundaries:?}");
    }
}
