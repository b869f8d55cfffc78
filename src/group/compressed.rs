//! All-reduces of `f32` that send half-precision elements.

use super::call::{Call, Reduction};
use super::{Error, Group, Handle, OwnedBuffer};
use crate::codec::CompressedElement;
use crate::schedule::CollectiveSpec;
use crate::types::Element;

/// The number of elements that a compressed all-reduce converts at a time. The converted elements take 2 MiB of memory and 2 MiB
/// on the wire.
const COMPRESSED_BLOCK_ELEMENTS: usize = 1 << 20;

impl Group {
    /// Runs an all-reduce of `elements`, which are `f32`, and sends elements of type `H`, one block after the other.
    pub(super) fn run_half_precision<H: CompressedElement>(
        &mut self,
        call: &Call,
        elements: &mut [f32],
    ) -> Result<(), Error> {
        let mut narrow = vec![H::ZERO; elements.len().min(COMPRESSED_BLOCK_ELEMENTS)];
        // An empty buffer still takes part, so that the ranks can detect different lengths.
        for start in (0..elements.len().max(1)).step_by(COMPRESSED_BLOCK_ELEMENTS) {
            let end = elements.len().min(start + COMPRESSED_BLOCK_ELEMENTS);
            let block = &mut elements[start..end];
            let narrow = &mut narrow[..block.len()];
            H::encode(block, narrow);
            self.run(self.half_precision_call::<H>(call, narrow.len())?, narrow)?;
            H::decode(narrow, block);
        }
        Ok(())
    }

    /// Begins an all-reduce of `buffer`, which has elements of `f32`, and sends elements of type `H`. All blocks are active at
    /// the same time.
    pub(super) fn start_half_precision<H: CompressedElement, B: OwnedBuffer>(
        &mut self,
        call: &Call,
        mut buffer: B,
    ) -> Result<Handle<B>, Error> {
        let elements: &[f32] = bytemuck::cast_slice::<B::Element, f32>(buffer.as_ref());
        let mut blocks = Vec::new();
        for start in (0..elements.len().max(1)).step_by(COMPRESSED_BLOCK_ELEMENTS) {
            let end = elements.len().min(start + COMPRESSED_BLOCK_ELEMENTS);
            let mut narrow = vec![H::ZERO; end - start];
            H::encode(&elements[start..end], &mut narrow);
            let block_call = self.half_precision_call::<H>(call, narrow.len())?;
            blocks.push(self.start_in_place(block_call, narrow)?);
        }
        Ok(Handle::joined(blocks, move |blocks: Vec<Vec<H>>| {
            let elements: &mut [f32] = bytemuck::cast_slice_mut::<B::Element, f32>(buffer.as_mut());
            for (elements, block) in elements.chunks_mut(COMPRESSED_BLOCK_ELEMENTS).zip(&blocks) {
                H::decode(block, elements);
            }
            Ok(buffer)
        }))
    }

    /// Returns the call of one block of a compressed all-reduce.
    fn half_precision_call<H: Element>(&self, call: &Call, count: usize) -> Result<Call, Error> {
        let block_call = self.new_call::<H>(CollectiveSpec::AllReduce { count }, call.site);
        match &call.reduction {
            Some(reduction) => Ok(block_call.with_reduction(Reduction::built_in::<H>(reduction.op)?)),
            None => Ok(block_call),
        }
    }
}
