//! Buffer contents whose reduction gives an exactly known result, for each element type.
//!
//! - Floats are chosen so that every sum is a whole number that the type represents exactly, and every product is
//!   plus or minus a power of two.
//! - Integers may have any value, because integer sums and products wrap around.
//! - An average is the exact sum divided once, as [`ReduceOp::Average`] promises. Integers are rounded towards zero.
//!   For a half-precision type, the sum is divided in `f32`, and the quotient is rounded once.
//! - In logical and bitwise operations, a single rank can decide the result. The inputs of these operations are
//!   chosen so that 0 and 1 both occur often in the result, for any number of ranks.
//!
//! These statements also hold if only the first ranks contribute, as in a scan.

use half::{bf16, f16};

use crate::types::{Element, F32Loc, F64Loc, I32Loc, I64Loc, ReduceOp, WorldSize};

/// The position of one element in one rank's contribution.
#[derive(Clone, Copy, Debug)]
pub struct ElementPosition {
    /// Pseudo-random bits for this position.
    pub(super) bits: u64,
    /// The sum of rank and index. If only some ranks may contribute to an element, this sum decides which ranks
    /// contribute.
    pub(super) rank_plus_index: usize,
    /// The number of ranks.
    pub(super) world: usize,
}

impl ElementPosition {
    /// Allows at most `contributors_max` ranks to contribute to this element. Returns the number of contributing ranks,
    /// and whether this rank is one of them.
    fn limit_contributors(self, contributors_max: usize) -> (usize, bool) {
        let stride = self.world.div_ceil(contributors_max);
        (self.world.div_ceil(stride), self.rank_plus_index.is_multiple_of(stride))
    }

    /// Returns an integer of `width` bits with one random bit set, or with no bit set. All ranks together set about
    /// half of the bits.
    fn random_bit_or_zero(self, width: u32) -> u64 {
        let stride = self.world.div_ceil(width as usize / 2) as u64;
        let sets_bit = (self.bits >> 8).is_multiple_of(stride);
        if sets_bit { 1 << (self.bits % u64::from(width)) } else { 0 }
    }

    /// Returns this element of a rank's contribution to a logical reduction: 0 for false, 1 to 127 for true.
    fn logical_contribution(self, op: ReduceOp) -> u8 {
        // For most elements, `decides_result` is true on at most one rank.
        let decides_result = (self.bits >> 8).is_multiple_of(2 * self.world as u64);
        let is_true = match op {
            ReduceOp::LogicalAnd => !decides_result,
            ReduceOp::LogicalOr => decides_result,
            _ => self.bits >> 63 == 0,
        };
        if is_true { 1 + (self.bits % 127) as u8 } else { 0 }
    }

    /// Returns a rank's contribution as a float. The float type represents whole numbers exactly up to
    /// `exact_integer_max`, and powers of two up to the exponent `exponent_max`.
    fn float_contribution(self, op: Option<ReduceOp>, exact_integer_max: usize, exponent_max: usize) -> f64 {
        let Self { bits, .. } = self;
        match op {
            None => (1 + bits % 127) as f64,
            Some(ReduceOp::Min | ReduceOp::Max) => (bits % 255) as f64 - 127.0,
            Some(ReduceOp::Sum | ReduceOp::PreMulSum | ReduceOp::Average) => {
                let (contributors, contributes) = self.limit_contributors(exact_integer_max);
                let value = 1 + bits % (exact_integer_max / contributors).min(128) as u64;
                if contributes { value as f64 } else { 0.0 }
            }
            Some(ReduceOp::Product) => {
                let (_, contributes) = self.limit_contributors(exponent_max);
                let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
                let magnitude = if bits & 2 == 0 { 2.0 } else { 0.5 };
                if contributes { sign * magnitude } else { sign }
            }
            Some(op) => f64::from(self.logical_contribution(op)),
        }
    }
}

/// An element type for which the exact result of a reduction can be computed.
pub trait BenchElement: Element {
    /// Returns the element that a rank contributes at `position`. If `op` is `None`, the contribution is not zero.
    fn contribution_at(op: Option<ReduceOp>, position: ElementPosition) -> Self;
    /// Returns the exact reduction of all contributions.
    fn reduce_exactly(op: ReduceOp, contributions: impl Iterator<Item = Self>, world: WorldSize) -> Self;
}

/// Reduces truth values with a logical operation.
fn reduce_logical(op: ReduceOp, mut values: impl Iterator<Item = bool>) -> bool {
    match op {
        ReduceOp::LogicalAnd => values.all(|value| value),
        ReduceOp::LogicalOr => values.any(|value| value),
        _ => values.filter(|&value| value).count() % 2 == 1,
    }
}

/// Reduces floats exactly. For an average, returns the undivided sum.
fn reduce_floats(op: ReduceOp, values: impl Iterator<Item = f64>) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum | ReduceOp::Average => values.sum(),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Product => values.product(),
        op => f64::from(u8::from(reduce_logical(op, values.map(|value| value != 0.0)))),
    }
}

macro_rules! floats {
    ($($ty:ty as $computed:ty: $exact_max:literal, $exponent_max:literal, $to:expr, $from:expr;)+) => { $(
        impl BenchElement for $ty {
            fn contribution_at(op: Option<ReduceOp>, position: ElementPosition) -> Self {
                let round: fn($computed) -> $ty = $from;
                round(position.float_contribution(op, $exact_max, $exponent_max) as $computed)
            }

            fn reduce_exactly(op: ReduceOp, contributions: impl Iterator<Item = Self>, world: WorldSize) -> Self {
                let widen: fn($ty) -> $computed = $to;
                let round: fn($computed) -> $ty = $from;
                let exact = reduce_floats(op, contributions.map(|value| f64::from(widen(value)))) as $computed;
                round(if op == ReduceOp::Average { exact / world.get() as $computed } else { exact })
            }
        }
    )+ };
}

floats! {
    f16 as f32: 2048, 14, f16::to_f32, f16::from_f32;
    bf16 as f32: 256, 126, bf16::to_f32, bf16::from_f32;
    f32 as f32: 16_777_216, 126, |value| value, |value| value;
    f64 as f64: 16_777_216, 126, |value| value, |value| value;
}

macro_rules! integers {
    ($($ty:ty => $wider:ty),+ $(,)?) => { $(
        impl BenchElement for $ty {
            fn contribution_at(op: Option<ReduceOp>, position: ElementPosition) -> Self {
                let value = position.bits as $ty;
                match op {
                    // Make the integer odd. A product of odd integers is odd, even if the product wraps around, so
                    // the product is never zero.
                    None | Some(ReduceOp::Product) => value | 1,
                    Some(ReduceOp::BitAnd) => !(position.random_bit_or_zero(<$ty>::BITS) as $ty),
                    Some(ReduceOp::BitOr) => position.random_bit_or_zero(<$ty>::BITS) as $ty,
                    Some(op) if op.is_logical() => position.logical_contribution(op) as $ty,
                    Some(_) => value,
                }
            }

            fn reduce_exactly(op: ReduceOp, contributions: impl Iterator<Item = Self>, world: WorldSize) -> Self {
                let sum = |a: $ty, b: $ty| a.wrapping_add(b);
                match op {
                    ReduceOp::BitAnd => contributions.fold(!0, |a, b| a & b),
                    ReduceOp::BitOr => contributions.fold(0, |a, b| a | b),
                    ReduceOp::BitXor => contributions.fold(0, |a, b| a ^ b),
                    ReduceOp::Average => {
                        (<$wider>::from(contributions.fold(0, sum)) / <$wider>::from(world.get())) as $ty
                    }
                    ReduceOp::Min => contributions.fold(<$ty>::MAX, <$ty>::min),
                    ReduceOp::Max => contributions.fold(<$ty>::MIN, <$ty>::max),
                    ReduceOp::Product => contributions.fold(1, |a, b| a.wrapping_mul(b)),
                    op if op.is_logical() => reduce_logical(op, contributions.map(|value| value != 0)).into(),
                    // Sum and PreMulSum.
                    _ => contributions.fold(0, sum),
                }
            }
        }
    )+ };
}

integers!(i8 => i64, u8 => u64, i16 => i64, u16 => u64, i32 => i64, u32 => u64, i64 => i64, u64 => u64);

macro_rules! located {
    ($($located:ty { $value:ty, $index:ty }),+ $(,)?) => { $(
        impl BenchElement for $located {
            fn contribution_at(op: Option<ReduceOp>, position: ElementPosition) -> Self {
                let index = (position.bits >> 16) as $index;
                match op {
                    None => Self::new((1 + position.bits % 127) as $value, index),
                    // Draw only the values -2 to 2, so that several ranks often share the minimum or the maximum, and
                    // the reduction must choose the lowest index.
                    Some(_) => Self::new((position.bits % 5) as $value - 2 as $value, index),
                }
            }

            fn reduce_exactly(op: ReduceOp, contributions: impl Iterator<Item = Self>, _: WorldSize) -> Self {
                let is_better = |a: Self, b: Self| {
                    if op == ReduceOp::MinLoc { a.value < b.value } else { a.value > b.value }
                };
                let winner = |best: Self, next: Self| {
                    let is_tied = next.value == best.value;
                    if is_better(next, best) || (is_tied && next.index < best.index) { next } else { best }
                };
                contributions.reduce(winner).unwrap_or_default()
            }
        }
    )+ };
}

located!(F32Loc { f32, u32 }, F64Loc { f64, u64 }, I32Loc { i32, u32 }, I64Loc { i64, u64 });
