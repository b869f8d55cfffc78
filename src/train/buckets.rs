//! Gradients on their way while the backward pass still computes.
//!
//! Li et al., "`PyTorch` Distributed: experiences on accelerating data parallel training", VLDB 13 (2020): gradients are
//! reduced in buckets, in the order in which the backward pass finishes them.

use std::collections::VecDeque;
use std::ops::Range;

use half::{bf16, f16};

use crate::codec::{Compression, Narrow};
use crate::group::{Error, Group, Handle};
use crate::types::ReduceOp;

/// Bytes of a bucket where nobody says otherwise: see "Overlap" in `docs/benchmarking.md`.
pub const BUCKET_BYTES: usize = 1 << 20;

/// The buckets of one step.
pub(crate) struct Buckets {
    elements: usize,
    compression: Compression,
    /// What is ready and not on its way. The backward pass goes from the end of the gradients to their beginning.
    ready: Range<usize>,
    flights: VecDeque<(Range<usize>, Flight)>,
    /// Memory of earlier steps.
    spare: Vec<Vec<f32>>,
}

/// A bucket on its way.
enum Flight {
    Whole(Handle<Vec<f32>>),
    Fp16(Handle<Vec<f16>>),
    Bf16(Handle<Vec<bf16>>),
}

impl Buckets {
    /// Buckets of at least `bytes` bytes of gradients each, but for the last.
    pub(crate) fn new(bytes: usize, compression: Compression) -> Self {
        let elements = (bytes / size_of::<f32>()).max(1);
        Self { elements, compression, ready: 0..0, flights: VecDeque::new(), spare: Vec::new() }
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
                    self.spare.push(sums);
                }
                Flight::Fp16(handle) => {
                    f16::decode(&handle.wait()?, target);
                    on_landed(range, target);
                }
                Flight::Bf16(handle) => {
                    bf16::decode(&handle.wait()?, target);
                    on_landed(range, target);
                }
            }
        }
        Ok(())
    }

    fn launch(&mut self, group: &mut Group, gradients: &[f32]) -> Result<(), Error> {
        let range = std::mem::replace(&mut self.ready, 0..0);
        let source = &gradients[range.clone()];
        let flight = match self.compression {
            Compression::None => {
                let mut bucket = self.spare.pop().unwrap_or_default();
                bucket.clear();
                bucket.extend_from_slice(source);
                Flight::Whole(group.all_reduce_async(bucket, ReduceOp::Sum)?)
            }
            Compression::Fp16 => Flight::Fp16(group.all_reduce_async(narrow(source), ReduceOp::Sum)?),
            Compression::Bf16 => Flight::Bf16(group.all_reduce_async(narrow(source), ReduceOp::Sum)?),
        };
        self.flights.push_back((range, flight));
        Ok(())
    }
}

fn narrow<H: Narrow>(source: &[f32]) -> Vec<H> {
    let mut narrow = vec![H::ZERO; source.len()];
    H::encode(source, &mut narrow);
    narrow
}
