//! One loop, compiled for several vector units; which one runs is decided once, when a kernel is chosen.

use super::arithmetic::{Divide, Finish, Keep, Number, Reduction, each};
use super::half_floats::{Half, each_half};
use super::{Kernel, Kernels, Max, Min, Product, Sum};
use crate::types::ReduceOp;

/// The vector units that kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lanes {
    /// What every processor of this architecture has.
    Portable,
    /// 256 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512 bits.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Lanes {
    /// The widest that this processor has.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

/// A loop over two slices of bytes that hold elements of one type.
trait Loop {
    fn run(accumulator: &mut [u8], input: &[u8], divisor: u32);
}

struct Wide<N, R, F>(std::marker::PhantomData<(N, R, F)>);
struct Narrow<H, R, F>(std::marker::PhantomData<(H, R, F)>);

impl<N: Number, R: Reduction, F: Finish> Loop for Wide<N, R, F> {
    #[inline(always)]
    fn run(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        assert_eq!(accumulator.len(), input.len(), "a kernel's slices have the same length");
        let accumulator: &mut [N] = bytemuck::cast_slice_mut(accumulator);
        each::<N, R, F>(accumulator, bytemuck::cast_slice(input), divisor);
    }
}

impl<H: Half, R: Reduction, F: Finish> Loop for Narrow<H, R, F> {
    #[inline(always)]
    fn run(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        assert_eq!(accumulator.len(), input.len(), "a kernel's slices have the same length");
        let accumulator: &mut [H] = bytemuck::cast_slice_mut(accumulator);
        each_half::<H, R, F>(accumulator, bytemuck::cast_slice(input), divisor);
    }
}

/// The loop compiled for `lanes`.
fn compiled<L: Loop>(lanes: Lanes) -> Kernel {
    match lanes {
        Lanes::Portable => L::run,
        #[cfg(target_arch = "x86_64")]
        Lanes::Avx2 => x86::avx2::<L>,
        #[cfg(target_arch = "x86_64")]
        Lanes::Avx512 => x86::avx512::<L>,
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Loop;

    #[target_feature(enable = "avx2")]
    fn with_avx2<L: Loop>(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        L::run(accumulator, input, divisor);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn with_avx512<L: Loop>(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        L::run(accumulator, input, divisor);
    }

    pub(super) fn avx2<L: Loop>(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        // SAFETY: `Lanes::Avx2` is made only by `Lanes::detect`, after it found AVX2 on this processor.
        unsafe { with_avx2::<L>(accumulator, input, divisor) }
    }

    pub(super) fn avx512<L: Loop>(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        // SAFETY: `Lanes::Avx512` is made only by `Lanes::detect`, after it found these features on this processor.
        unsafe { with_avx512::<L>(accumulator, input, divisor) }
    }
}

/// The kernels of a type that is computed with as it is.
pub(super) fn wide<N: Number>(lanes: Lanes, op: ReduceOp) -> Kernels {
    fn same<N: Number, R: Reduction>(lanes: Lanes) -> Kernels {
        let kernel = compiled::<Wide<N, R, Keep>>(lanes);
        Kernels { reduce: kernel, reduce_last: kernel }
    }
    match op {
        ReduceOp::Sum => same::<N, Sum>(lanes),
        ReduceOp::Product => same::<N, Product>(lanes),
        ReduceOp::Min => same::<N, Min>(lanes),
        ReduceOp::Max => same::<N, Max>(lanes),
        ReduceOp::Average => Kernels {
            reduce: compiled::<Wide<N, Sum, Keep>>(lanes),
            reduce_last: compiled::<Wide<N, Sum, Divide>>(lanes),
        },
    }
}

/// The kernels of a type that is computed with in `f32`.
pub(super) fn narrow<H: Half>(lanes: Lanes, op: ReduceOp) -> Kernels {
    fn same<H: Half, R: Reduction>(lanes: Lanes) -> Kernels {
        let kernel = compiled::<Narrow<H, R, Keep>>(lanes);
        Kernels { reduce: kernel, reduce_last: kernel }
    }
    match op {
        ReduceOp::Sum => same::<H, Sum>(lanes),
        ReduceOp::Product => same::<H, Product>(lanes),
        ReduceOp::Min => same::<H, Min>(lanes),
        ReduceOp::Max => same::<H, Max>(lanes),
        ReduceOp::Average => Kernels {
            reduce: compiled::<Narrow<H, Sum, Keep>>(lanes),
            reduce_last: compiled::<Narrow<H, Sum, Divide>>(lanes),
        },
    }
}
