//! Gradients are reduced in buckets while the backward pass still computes.
//!
//! The method is that of Li et al., "`PyTorch` Distributed: experiences on accelerating data parallel training", VLDB 13 (2020):
//! the backward pass goes from the last parameter to the first, and a bucket is sent as soon as all its gradients are known.
//!
//! Bucket boundaries depend on the number of parameters and on the bucket size alone, so they are the same on all ranks. They
//! do not depend on the pieces in which the backward pass reports gradients: a rank without samples reports whole layers.
//!
//! Buckets are memory of the group, which ranks of one host reduce in place. The first step allocates them.

use std::collections::VecDeque;
use std::ops::Range;

use half::{bf16, f16};

use crate::codec::{Compression, Narrow};
use crate::group::{Error, Group, Handle, SharedBuffer};
use crate::types::{Element, ReduceOp};

/// The default size of a bucket in bytes: see `docs/results/training-and-python.md`.
pub const BUCKET_BYTES: usize = 1 << 20;

/// The buckets of one step.
pub(crate) struct Buckets {
    elements: usize,
    compression: Compression,
    /// Gradients that are final and not yet in a bucket. The backward pass extends the range downwards.
    ready: Range<usize>,
    in_flight: VecDeque<(Range<usize>, PendingBucket)>,
    /// Buffers of earlier steps; one of the three lists is used.
    free_f32: FreeBuffers<f32>,
    free_f16: FreeBuffers<f16>,
    free_bf16: FreeBuffers<bf16>,
}

/// A bucket whose all-reduce has begun.
enum PendingBucket {
    F32(Handle<SharedBuffer<f32>>),
    F16(Handle<SharedBuffer<f16>>),
    Bf16(Handle<SharedBuffer<bf16>>),
}

/// Buffers that can be used again, in the order of their buckets: each step uses a buffer for the same gradients.
struct FreeBuffers<T: Element>(VecDeque<SharedBuffer<T>>);

impl<T: Element> FreeBuffers<T> {
    /// A buffer of `count` elements, which is the same number on all ranks.
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
    /// Buckets of `bytes` bytes of gradients each; the last one may be shorter.
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

    /// Elements of a bucket.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// Adds final gradients, which end where the ones that were added before begin, and sends each bucket that is full.
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
            self.send(group, bucket, gradients)?;
        }
        Ok(())
    }

    /// Sends the gradients that are left; they do not fill a bucket.
    pub(crate) fn flush(&mut self, group: &mut Group, gradients: &[f32]) -> Result<(), Error> {
        let rest = std::mem::replace(&mut self.ready, 0..0);
        if rest.is_empty() { Ok(()) } else { self.send(group, rest, gradients) }
    }

    /// Waits for all buckets. `on_reduced` is called with the range and the sums of each, in the order in which they were
    /// sent, while later ones are still being reduced. Afterwards the content of `gradients` is unspecified.
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

    fn send(&mut self, group: &mut Group, range: Range<usize>, gradients: &[f32]) -> Result<(), Error> {
        let source = &gradients[range.clone()];
        let (count, op) = (source.len(), ReduceOp::Sum);
        let bucket = match self.compression {
            Compression::None => {
                let mut buffer = self.free_f32.take(group, count)?;
                buffer.copy_from_slice(source);
                PendingBucket::F32(group.all_reduce_async(buffer, op)?)
            }
            Compression::Fp16 => {
                let buffer = narrow(source, self.free_f16.take(group, count)?);
                PendingBucket::F16(group.all_reduce_async(buffer, op)?)
            }
            Compression::Bf16 => {
                let buffer = narrow(source, self.free_bf16.take(group, count)?);
                PendingBucket::Bf16(group.all_reduce_async(buffer, op)?)
            }
        };
        self.in_flight.push_back((range, bucket));
        Ok(())
    }
}

fn narrow<H: Narrow>(source: &[f32], mut buffer: SharedBuffer<H>) -> SharedBuffer<H> {
    H::encode(source, &mut buffer);
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank without samples reports a layer in one piece, the others in slices. When boundaries followed the pieces, the ranks
    /// started all-reduces of different lengths and the job ended.
    #[test]
    fn boundaries_do_not_depend_on_the_pieces_that_are_reported() {
        let gradients: Vec<f32> = (0..1000).map(|value| value as f32).collect();
        let mut boundaries = Vec::new();
        for piece in [1, 7, 64, 100, 1000] {
            let mut group = Group::solo();
            let mut buckets = Buckets::new(64 * size_of::<f32>(), Compression::None);
            let mut end = gradients.len();
            while end > 0 {
                let start = end.saturating_sub(piece);
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
