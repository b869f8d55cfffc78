//! Functions that reduce two single elements. These functions are inlined into loops that the compiler vectorises.
//!
//! Every reduction gives the same bits if its two operands are swapped. In a butterfly (recursive doubling), two
//! ranks reduce the same two contributions with swapped operands, and must get the same bits.

use crate::types::{F32Loc, F64Loc, I32Loc, I64Loc};

/// The arithmetic operations that reductions need for a numeric type.
pub(super) trait Number: bytemuck::Pod {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// Returns the smaller of the two numbers, or a NaN if one of them is a NaN.
    fn smaller(self, other: Self) -> Self;
    /// Returns the larger of the two numbers, or a NaN if one of them is a NaN.
    fn larger(self, other: Self) -> Self;
    fn divide(self, divisor: u32) -> Self;
    /// Returns whether the number is not zero.
    fn is_true(self) -> bool;
    /// Returns 1 for true and 0 for false.
    fn from_bool(truth: bool) -> Self;
}

/// The operations that reductions need for an integer type: the operations of a number, and bitwise operations.
pub(super) trait Integer: Number {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// The operations that reductions need for a value with an index, such as [`F32Loc`](crate::types::F32Loc).
pub(super) trait IndexedValue: bytemuck::Pod {
    fn is_nan(self) -> bool;
    fn is_less(self, other: Self) -> bool;
    /// Returns whether this value is chosen if both values are equal, or if both are NaNs. The value with the lower
    /// index is chosen or, if the indices are equal, the value with the lower bit pattern.
    fn wins_tie(self, other: Self) -> bool;

    /// Returns `self` or `other`: the value that a minimum or a maximum keeps. `is_better(a, b)` returns whether to keep
    /// the number `a` instead of the number `b`. A NaN wins over every number.
    #[inline(always)]
    fn winner(self, other: Self, is_better: impl Fn(Self, Self) -> bool) -> Self {
        let other_wins = if self.is_nan() || other.is_nan() {
            other.is_nan() && (!self.is_nan() || other.wins_tie(self))
        } else {
            is_better(other, self) || (!is_better(self, other) && other.wins_tie(self))
        };
        if other_wins { other } else { self }
    }
}

/// Returns `$result`, or the NaN with the bits `$nan` if `$result` is a NaN. Without this macro, the bits of a NaN
/// would depend on the order of the operands, which differs from rank to rank.
macro_rules! with_canonical_nan {
    ($result:expr, $ty:ty, $nan:expr) => {{
        let result: $ty = $result;
        <$ty>::from_bits(if result.is_nan() { $nan } else { result.to_bits() })
    }};
}

/// Implements [`Number`] for floating-point types. `$nan` are the bits of the NaN that results contain.
macro_rules! floats {
    ($($ty:ty = $nan:expr),+) => { $(
        impl Number for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self { with_canonical_nan!(self + other, $ty, $nan) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { with_canonical_nan!(self * other, $ty, $nan) }
            // `one` and `two` differ only if an operand is a NaN, or if the operands are -0 and +0. Of these zeros,
            // -0 counts as smaller: `one | two` is -0, and `one & two` is +0.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                let one = if self < other { self } else { other }.to_bits();
                let two = if other < self { other } else { self }.to_bits();
                let has_nan = self.is_nan() | other.is_nan();
                <$ty>::from_bits(if has_nan { $nan } else { one | two })
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                let one = if self > other { self } else { other }.to_bits();
                let two = if other > self { other } else { self }.to_bits();
                let has_nan = self.is_nan() | other.is_nan();
                <$ty>::from_bits(if has_nan { $nan } else { one & two })
            }
            #[inline(always)]
            fn divide(self, divisor: u32) -> Self { self / divisor as $ty }
            #[inline(always)]
            fn is_true(self) -> bool { self != 0.0 }
            #[inline(always)]
            fn from_bool(truth: bool) -> Self { if truth { 1.0 } else { 0.0 } }
        }
    )+ };
}

/// Implements [`Number`] and [`Integer`] for integer types. `$wider` is the type in which an average is divided.
macro_rules! integers {
    ($($ty:ty => $wider:ty),+) => { $(
        impl Number for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn larger(self, other: Self) -> Self { self.max(other) }
            // Divides in a wider type, because the number of ranks may be too large for the element type.
            #[inline(always)]
            fn divide(self, divisor: u32) -> Self { (<$wider>::from(self) / <$wider>::from(divisor)) as $ty }
            #[inline(always)]
            fn is_true(self) -> bool { self != 0 }
            #[inline(always)]
            fn from_bool(truth: bool) -> Self { Self::from(truth) }
        }

        impl Integer for $ty {
            #[inline(always)]
            fn and(self, other: Self) -> Self { self & other }
            #[inline(always)]
            fn or(self, other: Self) -> Self { self | other }
            #[inline(always)]
            fn xor(self, other: Self) -> Self { self ^ other }
        }
    )+ };
}

/// Implements [`IndexedValue`] for pairs of a value and an index. The function `$bits` returns the bits of a value.
macro_rules! located {
    ($($ty:ty, $is_nan:expr, $bits:expr);+ $(;)?) => { $(
        impl IndexedValue for $ty {
            #[inline(always)]
            fn is_nan(self) -> bool { $is_nan(self.value) }
            #[inline(always)]
            fn is_less(self, other: Self) -> bool { self.value < other.value }
            #[inline(always)]
            fn wins_tie(self, other: Self) -> bool {
                self.index < other.index
                    || (self.index == other.index && $bits(self.value) < $bits(other.value))
            }
        }
    )+ };
}

floats!(f32 = 0x7fc0_0000, f64 = 0x7ff8_0000_0000_0000);
integers!(i8 => i64, u8 => u64, i16 => i64, u16 => u64, i32 => i64, u32 => u64, i64 => i64, u64 => u64);
located! {
    F32Loc, f32::is_nan, f32::to_bits;
    F64Loc, f64::is_nan, f64::to_bits;
    I32Loc, |_| false, |value| value;
    I64Loc, |_| false, |value| value;
}

/// A reduction of two elements.
pub(super) trait BinaryReduction<N> {
    fn combine(a: N, b: N) -> N;
}

/// Defines reductions for all element types that implement the trait `$kind`.
macro_rules! reductions {
    ($kind:ident: $( $name:ident => |$a:ident, $b:ident| $result:expr; )+) => { $(
        pub(super) struct $name;

        impl<N: $kind> BinaryReduction<N> for $name {
            #[inline(always)]
            fn combine($a: N, $b: N) -> N { $result }
        }
    )+ };
}

reductions! { Number:
    Sum => |a, b| a.add(b);
    Product => |a, b| a.multiply(b);
    Min => |a, b| a.smaller(b);
    Max => |a, b| a.larger(b);
    LogicalAnd => |a, b| N::from_bool(a.is_true() & b.is_true());
    LogicalOr => |a, b| N::from_bool(a.is_true() | b.is_true());
    LogicalXor => |a, b| N::from_bool(a.is_true() ^ b.is_true());
}

reductions! { Integer:
    BitAnd => |a, b| a.and(b);
    BitOr => |a, b| a.or(b);
    BitXor => |a, b| a.xor(b);
}

reductions! { IndexedValue:
    MinLoc => |a, b| a.winner(b, N::is_less);
    MaxLoc => |a, b| a.winner(b, |this, that| that.is_less(this));
}

/// The step that a kernel applies to each result before it stores the result. The kernel for the last contribution to an
/// average uses [`DivideByDivisor`], and all other kernels use [`StoreUnchanged`].
pub(super) trait FinalStep<N> {
    fn apply(value: N, average_divisor: u32) -> N;
}

/// Stores the result unchanged.
pub(super) struct StoreUnchanged;
/// Divides the result by `average_divisor`.
pub(super) struct DivideByDivisor;

impl<N> FinalStep<N> for StoreUnchanged {
    #[inline(always)]
    fn apply(value: N, _: u32) -> N {
        value
    }
}

impl<N: Number> FinalStep<N> for DivideByDivisor {
    #[inline(always)]
    fn apply(value: N, average_divisor: u32) -> N {
        value.divide(average_divisor)
    }
}

/// Computes `accumulator[i] = F::apply(R::combine(accumulator[i], input[i]), average_divisor)` for all elements.
#[inline(always)]
pub(super) fn reduce_slice<N: Copy, R: BinaryReduction<N>, F: FinalStep<N>>(
    accumulator: &mut [N],
    input: &[N],
    average_divisor: u32,
) {
    for (a, &b) in accumulator.iter_mut().zip(input) {
        *a = F::apply(R::combine(*a, b), average_divisor);
    }
}
