//! All-reduces that first convert the elements: they multiply the elements by a factor, or compress them to half precision.

use std::ops::Mul;

use super::call::Reduction;
use super::{Buffer, Error, Group, Handle};
use crate::codec::{CompressedElement, Compression};
use crate::types::{Element, ReduceOp, Site};

/// The number of elements that a compressed all-reduce converts at a time. The converted elements take 2 MiB of memory and 2 MiB
/// on the wire.
const COMPRESSED_BLOCK_ELEMENTS: usize = 1 << 20;

impl Group {
    /// Replaces every rank's buffer by the sum of all ranks' buffers. Each rank's buffer is first multiplied by the `factor`
    /// of this rank (`ncclRedOpCreatePreMulSum` in NCCL).
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_reduce_scaled<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        factor: B::Element,
    ) -> Result<(), Error>
    where
        B::Element: Mul<Output = B::Element>,
    {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        multiply(elements, factor)?;
        self.all_reduce_elements(elements, ReduceOp::PreMulSum, site)
    }

    /// Asynchronous [`Group::all_reduce_scaled`]; the handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce_scaled`]. The handle returns later failures.
    #[track_caller]
    pub fn all_reduce_scaled_async<T: Element + Mul<Output = T>>(
        &mut self,
        mut buffer: Vec<T>,
        factor: T,
    ) -> Result<Handle<Vec<T>>, Error> {
        multiply(&mut buffer, factor)?;
        self.all_reduce_async(buffer, ReduceOp::PreMulSum)
    }

    /// All-reduce of `f32` that sends compressed elements, in blocks of 2^20 elements. All ranks get the same bits. The
    /// result is rounded to the precision of the compressed type, and so is each partial result on the way.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    #[track_caller]
    pub fn all_reduce_compressed<B: Buffer<Element = f32> + ?Sized>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
        compression: Compression,
    ) -> Result<(), Error> {
        let site = Site::here();
        let elements = buffer.elements_mut()?;
        match compression {
            Compression::None => self.all_reduce_elements(elements, op, site),
            Compression::Fp16 => self.all_reduce_half_precision::<half::f16>(elements, op, site),
            Compression::Bf16 => self.all_reduce_half_precision::<half::bf16>(elements, op, site),
        }
    }

    /// Asynchronous [`Group::all_reduce_compressed`]; the handle returns the buffer. All blocks are active at the same
    /// time, and their compressed elements take half as much memory as the buffer.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce_compressed`]. The handle returns later failures.
    #[track_caller]
    pub fn all_reduce_compressed_async(
        &mut self,
        buffer: Vec<f32>,
        op: ReduceOp,
        compression: Compression,
    ) -> Result<Handle<Vec<f32>>, Error> {
        match compression {
            Compression::None => self.all_reduce_async(buffer, op),
            Compression::Fp16 => self.all_reduce_half_precision_async::<half::f16>(buffer, op),
            Compression::Bf16 => self.all_reduce_half_precision_async::<half::bf16>(buffer, op),
        }
    }

    /// All-reduce of `elements` that sends elements of type `H`, one block after the other.
    fn all_reduce_half_precision<H: CompressedElement>(
        &mut self,
        elements: &mut [f32],
        op: ReduceOp,
        site: Site,
    ) -> Result<(), Error> {
        let mut narrow = vec![H::ZERO; elements.len().min(COMPRESSED_BLOCK_ELEMENTS)];
        // An empty buffer still takes part, so that the ranks can detect different lengths.
        for start in (0..elements.len().max(1)).step_by(COMPRESSED_BLOCK_ELEMENTS) {
            let end = elements.len().min(start + COMPRESSED_BLOCK_ELEMENTS);
            let block = &mut elements[start..end];
            let narrow = &mut narrow[..block.len()];
            H::encode(block, narrow);
            self.all_reduce_elements(narrow, op, site)?;
            H::decode(narrow, block);
        }
        Ok(())
    }

    /// Asynchronous all-reduce of `buffer` that sends elements of type `H`. All blocks are active at the same time.
    #[track_caller]
    fn all_reduce_half_precision_async<H: CompressedElement>(
        &mut self,
        mut buffer: Vec<f32>,
        op: ReduceOp,
    ) -> Result<Handle<Vec<f32>>, Error> {
        let mut blocks = Vec::new();
        for start in (0..buffer.len().max(1)).step_by(COMPRESSED_BLOCK_ELEMENTS) {
            let end = buffer.len().min(start + COMPRESSED_BLOCK_ELEMENTS);
            let mut narrow = vec![H::ZERO; end - start];
            H::encode(&buffer[start..end], &mut narrow);
            blocks.push(self.all_reduce_async(narrow, op)?);
        }
        Ok(Handle::joined(blocks, move |blocks: Vec<Vec<H>>| {
            for (elements, block) in buffer.chunks_mut(COMPRESSED_BLOCK_ELEMENTS).zip(&blocks) {
                H::decode(block, elements);
            }
            Ok(buffer)
        }))
    }
}

/// Multiplies the elements by `factor`. Returns an error if [`ReduceOp::PreMulSum`] is not defined on their type.
fn multiply<T: Element + Mul<Output = T>>(elements: &mut [T], factor: T) -> Result<(), Error> {
    Reduction::built_in::<T>(ReduceOp::PreMulSum)?;
    for element in elements {
        *element = *element * factor;
    }
    Ok(())
}
