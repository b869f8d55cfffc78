//! Elementwise reduction kernels: functions on slices. The widest vector unit is chosen once at run time.
//!
//! Half-precision types are widened to `f32`, combined and rounded once (to nearest, ties to even). Integers wrap around.

#![expect(
    clippy::inline_always,
    reason = "a loop is compiled for a vector unit only if all of it is inlined there"
)]

mod arithmetic;
mod dispatch;
mod half_floats;
mod kernel;
#[cfg(test)]
mod tests;

use half::{bf16, f16};

use self::dispatch::{VectorWidth, integers, located, numbers};
pub use self::kernel::{Kernel, Kernels};
use crate::types::{DType, F32Loc, F64Loc, I32Loc, I64Loc, ReduceOp};

/// The number of zero words with which the contribution of a world of one is reduced at a time.
const ZEROS: usize = 512;

/// The kernels of `op` on elements of `dtype`; `None` if it is not defined ([`ReduceOp::applies_to`]), and for
/// [`ReduceOp::Custom`], whose kernels call the caller's function ([`Kernels::custom`]).
pub fn kernels(dtype: DType, op: ReduceOp) -> Option<Kernels> {
    kernels_for(VectorWidth::detect(), dtype, op)
}

fn kernels_for(width: VectorWidth, dtype: DType, op: ReduceOp) -> Option<Kernels> {
    match dtype {
        DType::F16 => numbers::<f16>(width, op),
        DType::Bf16 => numbers::<bf16>(width, op),
        DType::F32 => numbers::<f32>(width, op),
        DType::F64 => numbers::<f64>(width, op),
        DType::I8 => integers::<i8>(width, op),
        DType::U8 => integers::<u8>(width, op),
        DType::I16 => integers::<i16>(width, op),
        DType::U16 => integers::<u16>(width, op),
        DType::I32 => integers::<i32>(width, op),
        DType::U32 => integers::<u32>(width, op),
        DType::I64 => integers::<i64>(width, op),
        DType::U64 => integers::<u64>(width, op),
        DType::F32Loc => located::<F32Loc>(width, op),
        DType::F64Loc => located::<F64Loc>(width, op),
        DType::I32Loc => located::<I32Loc>(width, op),
        DType::I64Loc => located::<I64Loc>(width, op),
    }
}

/// Applies `op` to the contribution of a world of one: a logical reduction gives truth values, all others leave it
/// unchanged.
///
/// # Panics
///
/// If `memory` does not hold whole, aligned elements of `dtype`.
pub fn alone(dtype: DType, op: ReduceOp, memory: &mut [u8]) {
    if !op.is_logical() {
        return;
    }
    let Some(kernels) = kernels(dtype, ReduceOp::LogicalOr) else { return };
    let zeros = [0u64; ZEROS];
    let zeros: &[u8] = bytemuck::cast_slice(&zeros);
    for block in memory.chunks_mut(zeros.len()) {
        let length = block.len();
        kernels.reduce.apply(block, &zeros[..length], 1);
    }
}
