//! Elementwise reduction kernels: free functions on slices, the widest vector unit chosen once at run time.
//!
//! Half-precision types are widened to `f32`, combined and rounded once (to nearest, ties to even). Integers wrap around.

#![expect(
    clippy::inline_always,
    reason = "a loop is compiled for a vector unit only if all of it is inlined there"
)]

mod arithmetic;
mod dispatch;
mod half_floats;

use half::{bf16, f16};

use self::arithmetic::{Max, Min, Product, Sum};
use self::dispatch::{Lanes, narrow, wide};
use crate::types::{DType, ReduceOp};

/// Reduces `input` into `accumulator`: two slices of the same length in bytes, both holding whole, aligned elements of the
/// type the kernel was chosen for. `divisor` divides the result where the kernel is an average's last one.
///
/// # Panics
///
/// If the slices' lengths differ, or they are not aligned for the element type.
pub type Kernel = fn(accumulator: &mut [u8], input: &[u8], divisor: u32);

/// The two kernels that a reduction of one element type needs.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// For every contribution but the last.
    pub reduce: Kernel,
    /// For the last contribution: an average divides here.
    pub reduce_last: Kernel,
}

/// The kernels of `op` on elements of `dtype`.
pub fn kernels(dtype: DType, op: ReduceOp) -> Kernels {
    let lanes = Lanes::detect();
    match dtype {
        DType::F16 => narrow::<f16>(lanes, op),
        DType::Bf16 => narrow::<bf16>(lanes, op),
        DType::F32 => wide::<f32>(lanes, op),
        DType::F64 => wide::<f64>(lanes, op),
        DType::I8 => wide::<i8>(lanes, op),
        DType::U8 => wide::<u8>(lanes, op),
        DType::I32 => wide::<i32>(lanes, op),
        DType::U32 => wide::<u32>(lanes, op),
        DType::I64 => wide::<i64>(lanes, op),
        DType::U64 => wide::<u64>(lanes, op),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Element;

    fn reduce<T: Element>(op: ReduceOp, mut a: Vec<T>, b: &[T], last: Option<u32>) -> Vec<T> {
        let kernels = kernels(T::DTYPE, op);
        let kernel = if last.is_some() { kernels.reduce_last } else { kernels.reduce };
        kernel(bytemuck::cast_slice_mut(&mut a), bytemuck::cast_slice(b), last.unwrap_or(1));
        a
    }

    #[test]
    fn every_operation_on_integers_and_floats() {
        use ReduceOp::{Average, Max, Min, Product, Sum};
        assert_eq!(reduce(Sum, vec![1i32, i32::MAX], &[2, 1], None), [3, i32::MIN]);
        assert_eq!(reduce(Product, vec![200u8, 3], &[2, 5], None), [144, 15]);
        assert_eq!(reduce(Min, vec![-3i64, 4], &[2, -9], None), [-3, -9]);
        assert_eq!(reduce(Max, vec![-3i8, 4], &[2, -9], None), [2, 4]);
        assert_eq!(reduce(Average, vec![-3i32, 4], &[-4, 4], Some(2)), [-3, 4]);
        assert_eq!(reduce(Average, vec![u64::MAX, 9], &[0, 2], Some(2)), [u64::MAX / 2, 5]);
        assert_eq!(reduce(Average, vec![1.0f32, 4.0], &[2.0, 4.0], Some(4)), [0.75, 2.0]);
        assert_eq!(reduce(Average, vec![1.0f32, 4.0], &[2.0, 4.0], None), [3.0, 8.0]);
        assert_eq!(reduce(Sum, vec![1.5f64, 4.0], &[2.0, -4.0], Some(9)), [3.5, 0.0]);
    }

    #[test]
    fn a_nan_on_either_side_stays() {
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum] {
            let out = reduce(op, vec![f32::NAN, 1.0, 1.0], &[1.0, f32::NAN, 2.0], None);
            assert!(out[0].is_nan() && out[1].is_nan() && !out[2].is_nan(), "{op}: {out:?}");
            let one = f16::ONE;
            let out = reduce(op, vec![f16::NAN, one, one], &[one, f16::NAN, one], None);
            assert!(out[0].is_nan() && out[1].is_nan() && !out[2].is_nan(), "{op}: {out:?}");
            let out = reduce(op, vec![bf16::NAN, bf16::ONE], &[bf16::ONE, bf16::NAN], None);
            assert!(out[0].is_nan() && out[1].is_nan(), "{op}: {out:?}");
        }
    }

    /// All 65,536 bit patterns of each half type, against one addition in f32 rounded by the `half` crate.
    #[test]
    fn half_types_are_summed_in_f32_and_rounded_once() {
        for other in [0x0001u16, 0x3c00, 0x3f80, 0x7bff, 0x8400, 0xfc00, 0x0000] {
            let a: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
            let b = vec![f16::from_bits(other); a.len()];
            for (i, sum) in reduce(ReduceOp::Sum, a.clone(), &b, None).into_iter().enumerate() {
                let expected = f16::from_f32(a[i].to_f32() + b[i].to_f32());
                assert!(sum.to_bits() == expected.to_bits() || (sum.is_nan() && expected.is_nan()), "{i}");
            }
            let a: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
            let b = vec![bf16::from_bits(other); a.len()];
            for (i, sum) in reduce(ReduceOp::Sum, a.clone(), &b, None).into_iter().enumerate() {
                let expected = bf16::from_f32(a[i].to_f32() + b[i].to_f32());
                assert!(sum.to_bits() == expected.to_bits() || (sum.is_nan() && expected.is_nan()), "{i}");
            }
        }
    }

    /// The vector units must agree with the portable code bit for bit, tails included.
    #[test]
    fn every_vector_width_gives_the_same_bits() {
        for length in [0usize, 1, 7, 63, 64, 1000, 4099] {
            let a: Vec<f32> = (0..length).map(|i| (i as f32 - 300.0) * 1.37).collect();
            let b: Vec<f32> = (0..length).map(|i| (i as f32).sin() * 1e3).collect();
            for &op in ReduceOp::ALL {
                let run = |lanes| {
                    let mut out = a.clone();
                    (wide::<f32>(lanes, op).reduce_last)(
                        bytemuck::cast_slice_mut(&mut out),
                        bytemuck::cast_slice(&b),
                        3,
                    );
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                assert_eq!(run(Lanes::detect()), run(Lanes::Portable), "{op}, {length} elements");
            }
        }
    }
}
