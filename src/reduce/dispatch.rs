//! The loops of the kernels. A [`Kernel`] contains a loop and the vector unit on which the loop runs.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::arithmetic::{
    BinaryReduction, BitAnd, BitOr, BitXor, DivideByDivisor, FinalStep, IndexedValue, Integer, LogicalAnd,
    LogicalOr, LogicalXor, Max, MaxLoc, Min, MinLoc, Number, Product, StoreUnchanged, Sum, reduce_slice,
};
use super::half_floats::reduce_half_slice;
use super::kernel::{Kernel, Kernels};
use crate::simd::{VectorLoop, VectorWidth};
use crate::types::{F32Loc, F64Loc, I32Loc, I64Loc, ReduceOp};

/// The loop of a kernel: reduces `input` into `accumulator`. Both slices hold the bytes of elements of one type.
trait ReductionLoop {
    /// A loop that computes averages divides each result by `average_divisor`. All other loops ignore `average_divisor`.
    fn reduce_bytes(accumulator: &mut [u8], input: &[u8], average_divisor: u32);
}

/// An element type. A reduction converts each element to the type `Computed`: `f32` for the half-precision types, and
/// the element type itself for all others.
pub(super) trait StoredElement: bytemuck::Pod {
    type Computed: Copy;

    fn reduce_slice<R: BinaryReduction<Self::Computed>, F: FinalStep<Self::Computed>>(
        accumulator: &mut [Self],
        input: &[Self],
        average_divisor: u32,
    );
}

/// Implements [`StoredElement`] for types. `$computed` is `itself` or `f32`: the type in which the reduction computes. The
/// function `$each` reduces a slice.
macro_rules! stored {
    ($computed:ident = $each:ident: $($ty:ident),+) => { $(
        impl StoredElement for $ty {
            type Computed = stored!(@ $computed $ty);

            #[inline(always)]
            fn reduce_slice<R: BinaryReduction<Self::Computed>, F: FinalStep<Self::Computed>>(
                accumulator: &mut [Self],
                input: &[Self],
                average_divisor: u32,
            ) {
                $each::<Self, R, F>(accumulator, input, average_divisor);
            }
        }
    )+ };
    (@ itself $ty:ident) => { $ty };
    (@ f32 $ty:ident) => { f32 };
}

stored!(itself = reduce_slice: f32, f64, i8, u8, i16, u16, i32, u32, i64, u64, F32Loc, F64Loc, I32Loc, I64Loc);
stored!(f32 = reduce_half_slice: f16, bf16);

/// The loop that combines elements of type `S` with the reduction `R` and then applies `F` to each result.
struct ElementLoop<S, R, F>(PhantomData<(S, R, F)>);

impl<S: StoredElement, R: BinaryReduction<S::Computed>, F: FinalStep<S::Computed>> ReductionLoop
    for ElementLoop<S, R, F>
{
    #[inline(always)]
    fn reduce_bytes(accumulator: &mut [u8], input: &[u8], average_divisor: u32) {
        assert_eq!(accumulator.len(), input.len(), "both slices of a kernel must have the same length");
        let accumulator: &mut [S] = bytemuck::cast_slice_mut(accumulator);
        S::reduce_slice::<R, F>(accumulator, bytemuck::cast_slice(input), average_divisor);
    }
}

/// A call of a loop, with its arguments.
struct ReductionCall<'a, L> {
    accumulator: &'a mut [u8],
    input: &'a [u8],
    average_divisor: u32,
    reduction: PhantomData<L>,
}

impl<L: ReductionLoop> VectorLoop for ReductionCall<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        L::reduce_bytes(self.accumulator, self.input, self.average_divisor);
    }
}

/// Returns the kernel whose loop is compiled for `width`.
fn kernel_for_width<L: ReductionLoop>(width: VectorWidth) -> Kernel {
    Kernel::built_in(width, |width, accumulator, input, average_divisor| {
        width.run(ReductionCall::<L> { accumulator, input, average_divisor, reduction: PhantomData });
    })
}

/// Returns the kernels of a reduction that does not divide the result by the number of ranks.
fn kernels_without_division<S: StoredElement, R: BinaryReduction<S::Computed>>(
    width: VectorWidth,
) -> Kernels {
    let kernel = kernel_for_width::<ElementLoop<S, R, StoreUnchanged>>(width);
    Kernels { reduce: kernel.clone(), reduce_last: kernel }
}

/// Returns the kernels that reduce elements of the numeric type `S` with `op`. Returns `None` if `op` is not defined for
/// this type.
pub(super) fn number_kernels<S: StoredElement<Computed: Number>>(
    width: VectorWidth,
    op: ReduceOp,
) -> Option<Kernels> {
    Some(match op {
        // For `PreMulSum`, the caller has already multiplied each contribution by a factor, so the kernel only
        // computes the sum.
        ReduceOp::Sum | ReduceOp::PreMulSum => kernels_without_division::<S, Sum>(width),
        ReduceOp::Product => kernels_without_division::<S, Product>(width),
        ReduceOp::Min => kernels_without_division::<S, Min>(width),
        ReduceOp::Max => kernels_without_division::<S, Max>(width),
        ReduceOp::LogicalAnd => kernels_without_division::<S, LogicalAnd>(width),
        ReduceOp::LogicalOr => kernels_without_division::<S, LogicalOr>(width),
        ReduceOp::LogicalXor => kernels_without_division::<S, LogicalXor>(width),
        ReduceOp::Average => Kernels {
            reduce: kernel_for_width::<ElementLoop<S, Sum, StoreUnchanged>>(width),
            reduce_last: kernel_for_width::<ElementLoop<S, Sum, DivideByDivisor>>(width),
        },
        ReduceOp::BitAnd
        | ReduceOp::BitOr
        | ReduceOp::BitXor
        | ReduceOp::MinLoc
        | ReduceOp::MaxLoc
        | ReduceOp::Custom => return None,
    })
}

/// Returns the kernels that reduce elements of the integer type `S` with `op`. Returns `None` if `op` is not defined for
/// integers.
pub(super) fn integer_kernels<S: StoredElement<Computed: Integer>>(
    width: VectorWidth,
    op: ReduceOp,
) -> Option<Kernels> {
    match op {
        ReduceOp::BitAnd => Some(kernels_without_division::<S, BitAnd>(width)),
        ReduceOp::BitOr => Some(kernels_without_division::<S, BitOr>(width)),
        ReduceOp::BitXor => Some(kernels_without_division::<S, BitXor>(width)),
        _ => number_kernels::<S>(width, op),
    }
}

/// Returns the kernels that reduce elements of the type `S` with `op`. The elements are pairs of a value and a location,
/// for example of the type `F32Loc`. Returns `None` if `op` is not defined for such pairs.
pub(super) fn indexed_value_kernels<S: StoredElement<Computed: IndexedValue>>(
    width: VectorWidth,
    op: ReduceOp,
) -> Option<Kernels> {
    match op {
        ReduceOp::MinLoc => Some(kernels_without_division::<S, MinLoc>(width)),
        ReduceOp::MaxLoc => Some(kernels_without_division::<S, MaxLoc>(width)),
        _ => None,
    }
}
