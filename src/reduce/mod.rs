//! Elementwise reduction kernels: functions that reduce one slice into another. [`kernels`] detects the widest vector unit
//! of the processor, and returns kernels that use this vector unit.
//!
//! Half-precision elements are converted to `f32` and reduced, and the result is rounded once (to nearest, ties to
//! even). Integers wrap around.

#![expect(
    clippy::inline_always,
    reason = "a loop is compiled for a vector unit only if all functions that it calls are inlined"
)]

mod arithmetic;
mod dispatch;
mod half_floats;
mod kernel;
mod rank_order;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use half::{bf16, f16};

use self::dispatch::{indexed_value_kernels, integer_kernels, number_kernels};
pub use self::kernel::{Kernel, Kernels};
pub use self::rank_order::reduce_in_rank_order;
use crate::simd::VectorWidth;
use crate::types::{DType, F32Loc, F64Loc, I32Loc, I64Loc, ReduceOp};

/// The number of 8-byte words in the block of zeros with which [`reduce_single_contribution`] reduces a contribution.
const ZERO_BLOCK_WORDS: usize = 512;

/// Returns the kernels of `op` on elements of `dtype`. Returns `None` if the reduction is not defined for this type
/// ([`ReduceOp::applies_to`]), and for [`ReduceOp::Custom`], whose kernels are made by [`Kernels::custom`].
pub fn kernels(dtype: DType, op: ReduceOp) -> Option<Kernels> {
    kernels_for(VectorWidth::detect(), dtype, op)
}

fn kernels_for(width: VectorWidth, dtype: DType, op: ReduceOp) -> Option<Kernels> {
    match dtype {
        DType::F16 => number_kernels::<f16>(width, op),
        DType::Bf16 => number_kernels::<bf16>(width, op),
        DType::F32 => number_kernels::<f32>(width, op),
        DType::F64 => number_kernels::<f64>(width, op),
        DType::I8 => integer_kernels::<i8>(width, op),
        DType::U8 => integer_kernels::<u8>(width, op),
        DType::I16 => integer_kernels::<i16>(width, op),
        DType::U16 => integer_kernels::<u16>(width, op),
        DType::I32 => integer_kernels::<i32>(width, op),
        DType::U32 => integer_kernels::<u32>(width, op),
        DType::I64 => integer_kernels::<i64>(width, op),
        DType::U64 => integer_kernels::<u64>(width, op),
        DType::F32Loc => indexed_value_kernels::<F32Loc>(width, op),
        DType::F64Loc => indexed_value_kernels::<F64Loc>(width, op),
        DType::I32Loc => indexed_value_kernels::<I32Loc>(width, op),
        DType::I64Loc => indexed_value_kernels::<I64Loc>(width, op),
    }
}

thread_local! {
    /// Whether this thread is in a reduction, which may call a function of the user.
    static REDUCING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is in a reduction, which may call a function of the user.
pub fn is_reducing() -> bool {
    REDUCING.get()
}

/// Runs a reduction. Returns `None` if it panics: a reduction function of the user may panic in any thread.
pub fn catch_panic<R>(reduce: impl FnOnce() -> R) -> Option<R> {
    REDUCING.set(true);
    let result = catch_unwind(AssertUnwindSafe(reduce));
    REDUCING.set(false);
    result.ok()
}

/// Applies `op` to the contribution of the only rank of a world. A logical reduction replaces every element by 1 or
/// 0; any other reduction leaves the elements unchanged.
///
/// # Panics
///
/// If `memory` does not contain complete, aligned elements of `dtype`.
pub fn reduce_single_contribution(dtype: DType, op: ReduceOp, memory: &mut [u8]) {
    if !op.is_logical() {
        return;
    }
    let Some(kernels) = kernels(dtype, ReduceOp::LogicalOr) else { return };
    let zeros = [0u64; ZERO_BLOCK_WORDS];
    let zeros: &[u8] = bytemuck::cast_slice(&zeros);
    for block in memory.chunks_mut(zeros.len()) {
        let length = block.len();
        kernels.reduce.apply(block, &zeros[..length]);
    }
}
