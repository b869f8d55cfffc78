//! The reductions on single elements. They are inlined into loops that the compiler vectorises.

/// Arithmetic that a reduction needs of an element type.
pub(super) trait Number: bytemuck::Pod {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn divide(self, divisor: u32) -> Self;
}

macro_rules! floats {
    ($($ty:ty),+) => { $(
        impl Number for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self * other }
            // A NaN on either side stays: with a NaN in `other` the comparison is false.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn larger(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn divide(self, divisor: u32) -> Self { self / divisor as $ty }
        }
    )+ };
}

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
            // Divided in a type that holds every world size: 300 ranks do not fit a u8.
            #[inline(always)]
            fn divide(self, divisor: u32) -> Self { (<$wider>::from(self) / <$wider>::from(divisor)) as $ty }
        }
    )+ };
}

floats!(f32, f64);
integers!(i8 => i64, u8 => u64, i32 => i64, u32 => u64, i64 => i64, u64 => u64);

/// A reduction of two numbers.
pub(super) trait Reduction {
    fn apply<N: Number>(a: N, b: N) -> N;
}

pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;

impl Reduction for Sum {
    #[inline(always)]
    fn apply<N: Number>(a: N, b: N) -> N {
        a.add(b)
    }
}

impl Reduction for Product {
    #[inline(always)]
    fn apply<N: Number>(a: N, b: N) -> N {
        a.multiply(b)
    }
}

impl Reduction for Min {
    #[inline(always)]
    fn apply<N: Number>(a: N, b: N) -> N {
        a.smaller(b)
    }
}

impl Reduction for Max {
    #[inline(always)]
    fn apply<N: Number>(a: N, b: N) -> N {
        a.larger(b)
    }
}

/// What is done to a result before it is stored.
pub(super) trait Finish {
    fn apply<N: Number>(value: N, divisor: u32) -> N;
}

pub(super) struct Keep;
pub(super) struct Divide;

impl Finish for Keep {
    #[inline(always)]
    fn apply<N: Number>(value: N, _: u32) -> N {
        value
    }
}

impl Finish for Divide {
    #[inline(always)]
    fn apply<N: Number>(value: N, divisor: u32) -> N {
        value.divide(divisor)
    }
}

/// The loop over numbers: `accumulator[i] = finish(reduce(accumulator[i], input[i]))`.
#[inline(always)]
pub(super) fn each<N: Number, R: Reduction, F: Finish>(accumulator: &mut [N], input: &[N], divisor: u32) {
    for (a, &b) in accumulator.iter_mut().zip(input) {
        *a = F::apply(R::apply(*a, b), divisor);
    }
}
