//! One loop, compiled for several vector units. Which one runs is decided once, when a kernel is chosen.

use half::{bf16, f16};

use super::arithmetic::{
    BitAnd, BitOr, BitXor, Divide, Finish, Integer, Keep, Located, LogicalAnd, LogicalOr, LogicalXor, Max,
    MaxLoc, Min, MinLoc, Number, Product, Reduction, Sum, each,
};
use super::half_floats::each_half;
use super::kernel::{Kernel, Kernels};
use crate::types::{F32Loc, F64Loc, I32Loc, I64Loc, ReduceOp};

/// The vector units that kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum VectorWidth {
    /// The instructions that every processor of this architecture has.
    Portable,
    /// 256 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512 bits.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl VectorWidth {
    /// The widest vector unit of this processor.
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

/// The stored element type, and the type for computations.
pub(super) trait StoredElement: bytemuck::Pod {
    type Computed: Copy;

    fn each<R: Reduction<Self::Computed>, F: Finish<Self::Computed>>(
        accumulator: &mut [Self],
        input: &[Self],
        divisor: u32,
    );
}

macro_rules! stored {
    ($computed:ident = $each:ident: $($ty:ident),+) => { $(
        impl StoredElement for $ty {
            type Computed = stored!(@ $computed $ty);

            #[inline(always)]
            fn each<R: Reduction<Self::Computed>, F: Finish<Self::Computed>>(
                accumulator: &mut [Self],
                input: &[Self],
                divisor: u32,
            ) {
                $each::<Self, R, F>(accumulator, input, divisor);
            }
        }
    )+ };
    (@ itself $ty:ident) => { $ty };
    (@ f32 $ty:ident) => { f32 };
}

stored!(itself = each: f32, f64, i8, u8, i16, u16, i32, u32, i64, u64, F32Loc, F64Loc, I32Loc, I64Loc);
stored!(f32 = each_half: f16, bf16);

struct Over<S, R, F>(std::marker::PhantomData<(S, R, F)>);

impl<S: StoredElement, R: Reduction<S::Computed>, F: Finish<S::Computed>> Loop for Over<S, R, F> {
    #[inline(always)]
    fn run(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        assert_eq!(accumulator.len(), input.len(), "a kernel's slices have the same length");
        let accumulator: &mut [S] = bytemuck::cast_slice_mut(accumulator);
        S::each::<R, F>(accumulator, bytemuck::cast_slice(input), divisor);
    }
}

/// The loop compiled for `width`.
fn compiled<L: Loop>(width: VectorWidth) -> Kernel {
    Kernel::plain(match width {
        VectorWidth::Portable => L::run,
        #[cfg(target_arch = "x86_64")]
        VectorWidth::Avx2 => x86::avx2::<L>,
        #[cfg(target_arch = "x86_64")]
        VectorWidth::Avx512 => x86::avx512::<L>,
    })
}

/// The kernels of a reduction that treats the last contribution like the others.
fn same<S: StoredElement, R: Reduction<S::Computed>>(width: VectorWidth) -> Kernels {
    let kernel = compiled::<Over<S, R, Keep>>(width);
    Kernels { reduce: kernel.clone(), reduce_last: kernel }
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
        // SAFETY: `VectorWidth::Avx2` is made only by `VectorWidth::detect`, after it found AVX2 on this processor.
        unsafe { with_avx2::<L>(accumulator, input, divisor) }
    }

    pub(super) fn avx512<L: Loop>(accumulator: &mut [u8], input: &[u8], divisor: u32) {
        // SAFETY: `VectorWidth::Avx512` is made only by `VectorWidth::detect`, after it found these features on this processor.
        unsafe { with_avx512::<L>(accumulator, input, divisor) }
    }
}

/// The kernels of a numeric type.
pub(super) fn numbers<S: StoredElement<Computed: Number>>(
    width: VectorWidth,
    op: ReduceOp,
) -> Option<Kernels> {
    Some(match op {
        // Every rank has multiplied its contribution before.
        ReduceOp::Sum | ReduceOp::PreMulSum => same::<S, Sum>(width),
        ReduceOp::Product => same::<S, Product>(width),
        ReduceOp::Min => same::<S, Min>(width),
        ReduceOp::Max => same::<S, Max>(width),
        ReduceOp::LogicalAnd => same::<S, LogicalAnd>(width),
        ReduceOp::LogicalOr => same::<S, LogicalOr>(width),
        ReduceOp::LogicalXor => same::<S, LogicalXor>(width),
        ReduceOp::Average => Kernels {
            reduce: compiled::<Over<S, Sum, Keep>>(width),
            reduce_last: compiled::<Over<S, Sum, Divide>>(width),
        },
        ReduceOp::BitAnd
        | ReduceOp::BitOr
        | ReduceOp::BitXor
        | ReduceOp::MinLoc
        | ReduceOp::MaxLoc
        | ReduceOp::Custom => return None,
    })
}

/// The kernels of an integer type, with the bitwise ones.
pub(super) fn integers<S: StoredElement<Computed: Integer>>(
    width: VectorWidth,
    op: ReduceOp,
) -> Option<Kernels> {
    match op {
        ReduceOp::BitAnd => Some(same::<S, BitAnd>(width)),
        ReduceOp::BitOr => Some(same::<S, BitOr>(width)),
        ReduceOp::BitXor => Some(same::<S, BitXor>(width)),
        _ => numbers::<S>(width, op),
    }
}

/// The kernels of a type with locations.
pub(super) fn located<S: StoredElement<Computed: Located>>(
    width: VectorWidth,
    op: ReduceOp,
) -> Option<Kernels> {
    match op {
        ReduceOp::MinLoc => Some(same::<S, MinLoc>(width)),
        ReduceOp::MaxLoc => Some(same::<S, MaxLoc>(width)),
        _ => None,
    }
}
