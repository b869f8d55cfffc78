//! Tests of every reduction for every type and vector width, against scalar reference implementations.

use half::{bf16, f16};

use super::*;
use crate::types::Element;

/// The numbers of elements in the tests. Under Miri, the tests use few elements: Miri needs half a millisecond for
/// each element, and finds invalid reads and writes with few elements too.
struct TestLengths {
    /// The usual number of elements. A vector has fewer elements, and this number is not a multiple of the elements of a
    /// vector, so the last elements do not fill a vector. Without Miri, the same is true for a block of half-precision
    /// numbers in place of a vector.
    default: usize,
    /// The length of the longest buffer in comparisons between vector widths.
    longest: usize,
    /// The number of elements in the tests of `reduce_single_contribution`, which processes them in several blocks.
    single_contribution: usize,
    /// The tests of half-precision types use every `pattern_stride`-th of the 65,536 bit patterns. The patterns fill
    /// more than one block, with and without Miri.
    pattern_stride: usize,
}

/// Whether two NaNs that are results of the same operation may have different bits. A processor gives a NaN the bits of
/// one operand. Rust does not specify the bits of a NaN, and Miri chooses them at random.
const NAN_BITS_MAY_DIFFER: bool = cfg!(miri);

const TEST_LENGTHS: TestLengths = if cfg!(miri) {
    // Even the shortest of these lengths is longer than the vectors that Miri supports.
    TestLengths { default: 35, longest: 67, single_contribution: 67, pattern_stride: 97 }
} else {
    TestLengths { default: 1100, longest: 4099, single_contribution: 5000, pattern_stride: 1 }
};

/// Sample values of a type, and a scalar implementation of the reductions of two values.
trait ReferenceReduction: Element {
    fn samples() -> Vec<Self>;
    /// Returns the expected result. If `divisor` is `Some`, an average is divided by the divisor.
    fn expected(op: ReduceOp, a: Self, b: Self, divisor: Option<u32>) -> Self;
    /// Returns whether this result is correct. Any NaN is a correct result if a NaN is expected.
    fn agrees(self, expected: Self) -> bool;
    fn is_nan(self) -> bool;
}

fn logical_result(op: ReduceOp, a: bool, b: bool) -> bool {
    match op {
        ReduceOp::LogicalAnd => a && b,
        ReduceOp::LogicalOr => a || b,
        _ => a != b,
    }
}

/// Implements [`ReferenceReduction`] for floating-point types. `$computed` is the type in which the reference computes.
macro_rules! floats {
    ($($ty:ty as $computed:ty: $to:expr, $from:expr;)+) => { $(
        impl ReferenceReduction for $ty {
            fn samples() -> Vec<Self> {
                let mut samples = vec![
                    <$ty>::NAN, <$ty>::INFINITY, <$ty>::NEG_INFINITY, <$ty>::MAX, <$ty>::MIN,
                    <$ty>::MIN_POSITIVE, <$ty>::from_bits(1),
                ];
                // Quiet and signalling NaNs with payloads and with both signs.
                let specials = [<$ty>::NAN.to_bits() | 1, <$ty>::INFINITY.to_bits() | 1, <$ty>::NEG_INFINITY.to_bits() | 3];
                samples.extend(specials.map(<$ty>::from_bits));
                let from: fn($computed) -> $ty = $from;
                samples.extend([0.0, -0.0, 1.0, -1.0, 0.3, 2.0, -7.25, 1000.1].map(from));
                samples
            }

            fn expected(op: ReduceOp, a: Self, b: Self, divisor: Option<u32>) -> Self {
                let to: fn($ty) -> $computed = $to;
                let from: fn($computed) -> $ty = $from;
                let (a, b) = (to(a), to(b));
                let has_nan = a.is_nan() || b.is_nan();
                from(match op {
                    ReduceOp::Average => (a + b) / divisor.unwrap_or(1) as $computed,
                    ReduceOp::Sum | ReduceOp::PreMulSum => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Min | ReduceOp::Max if has_nan => <$computed>::NAN,
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    op => u8::from(logical_result(op, a != 0.0, b != 0.0)).into(),
                })
            }

            fn agrees(self, expected: Self) -> bool {
                self == expected || (self.is_nan() && expected.is_nan())
            }

            fn is_nan(self) -> bool { <$ty>::is_nan(self) }
        }
    )+ };
}

floats! {
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
    f32 as f32: |value| value, |value| value;
    f64 as f64: |value| value, |value| value;
}

/// Implements [`ReferenceReduction`] for integer types.
macro_rules! integers {
    ($($ty:ty),+) => { $(
        impl ReferenceReduction for $ty {
            fn samples() -> Vec<Self> {
                let patterned = (0x5a3c_69f0_1234_5678_u64 >> 3) as $ty;
                vec![0, 1, 2, 3, 100, <$ty>::MAX, <$ty>::MIN, <$ty>::MAX - 1, <$ty>::MIN + 1, patterned, !patterned]
            }

            fn expected(op: ReduceOp, a: Self, b: Self, divisor: Option<u32>) -> Self {
                // The final conversions cut off the upper bits, so the results wrap around.
                let (x, y) = (i128::from(a), i128::from(b));
                match op {
                    ReduceOp::Average => (i128::from((x + y) as $ty) / i128::from(divisor.unwrap_or(1))) as $ty,
                    ReduceOp::Sum | ReduceOp::PreMulSum => (x + y) as $ty,
                    ReduceOp::Product => x.wrapping_mul(y) as $ty,
                    ReduceOp::Min => if x < y { a } else { b },
                    ReduceOp::Max => if x > y { a } else { b },
                    ReduceOp::BitAnd => (x & y) as $ty,
                    ReduceOp::BitOr => (x | y) as $ty,
                    ReduceOp::BitXor => (x ^ y) as $ty,
                    op => logical_result(op, a != 0, b != 0).into(),
                }
            }

            fn agrees(self, expected: Self) -> bool { self == expected }

            fn is_nan(self) -> bool { false }
        }
    )+ };
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// Implements [`ReferenceReduction`] for types with a location. The samples pair each of `$values` with several indices.
macro_rules! located {
    ($($ty:ident: $values:expr;)+) => { $(
        impl ReferenceReduction for $ty {
            fn samples() -> Vec<Self> {
                $values.into_iter().flat_map(|value| [7, 0, 9].map(|index| Self::new(value, index))).collect()
            }

            fn expected(op: ReduceOp, a: Self, b: Self, _: Option<u32>) -> Self {
                // The result is the one that MPI defines, except that a NaN wins over all numbers.
                let is_b = match (a.is_nan(), b.is_nan()) {
                    (false, false) if a.value != b.value => (b.value < a.value) == (op == ReduceOp::MinLoc),
                    (false, true) => true,
                    (true, false) => false,
                    _ => b.index < a.index,
                };
                if is_b { b } else { a }
            }

            fn agrees(self, expected: Self) -> bool {
                self == expected || (self.is_nan() && expected.is_nan() && self.index == expected.index)
            }

            fn is_nan(self) -> bool { self.value.partial_cmp(&self.value).is_none() }
        }
    )+ };
}

located! {
    F32Loc: [1.5, -2.0, 0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    F64Loc: [1.5, -2.0, 0.0, -0.0, f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    I32Loc: [0, 1, -1, i32::MIN, i32::MAX];
    I64Loc: [0, 1, -1, i64::MIN, i64::MAX - 1, i64::MAX];
}

fn run_kernel<T: Element>(kernel: &Kernel, mut a: Vec<T>, b: &[T]) -> Vec<T> {
    kernel.apply(bytemuck::cast_slice_mut(&mut a), bytemuck::cast_slice(b));
    a
}

/// Reduces `b` into `a` and returns the result. If `divisor` is `Some`, uses the kernel for the last contribution,
/// which divides an average by the divisor.
fn reduce<T: Element>(op: ReduceOp, a: Vec<T>, b: &[T], divisor: Option<u32>) -> Vec<T> {
    let kernels = kernels(T::DTYPE, op).expect("the reduction is defined");
    let kernel = select_kernel(&kernels, divisor);
    run_kernel(&kernel, a, b)
}

/// Returns two buffers that contain every pair of samples, repeated up to the length.
fn sample_pairs<T: ReferenceReduction>(length: usize) -> (Vec<T>, Vec<T>) {
    let samples = T::samples();
    let count = samples.len();
    (0..length).map(|i| (samples[i % count], samples[i / count % count])).unzip()
}

/// Calls a generic function with every element type.
macro_rules! for_every_type {
    ($f:ident) => {
        $f::<f16>();
        $f::<bf16>();
        $f::<f32>();
        $f::<f64>();
        $f::<i8>();
        $f::<u8>();
        $f::<i16>();
        $f::<u16>();
        $f::<i32>();
        $f::<u32>();
        $f::<i64>();
        $f::<u64>();
        $f::<F32Loc>();
        $f::<F64Loc>();
        $f::<I32Loc>();
        $f::<I64Loc>();
    };
}

/// Returns the kernel for the last contribution, which divides an average by `divisor`. If `divisor` is `None`, returns the
/// kernel for all other contributions.
fn select_kernel(kernels: &Kernels, divisor: Option<u32>) -> Kernel {
    match divisor {
        Some(divisor) => kernels.clone().of_contributions(divisor).reduce_last,
        None => kernels.reduce.clone(),
    }
}

fn check_against_reference<T: ReferenceReduction>() {
    let (a, b) = sample_pairs::<T>(TEST_LENGTHS.default);
    for &op in ReduceOp::ALL {
        let Some(kernels) = kernels(T::DTYPE, op) else { continue };
        for last_divisor in [None, Some(3), Some(300)] {
            let kernel = select_kernel(&kernels, last_divisor);
            for (i, found) in run_kernel(&kernel, a.clone(), &b).into_iter().enumerate() {
                let expected = T::expected(op, a[i], b[i], last_divisor);
                let context = || format!("{op} of {:?} and {:?}: {found:?}, not {expected:?}", a[i], b[i]);
                assert!(found.agrees(expected), "{} {}", T::DTYPE, context());
            }
        }
    }
}

#[test]
fn every_reduction_of_every_type_agrees_with_the_reference() {
    for_every_type!(check_against_reference);
}

fn check_bits_at_every_width<T: ReferenceReduction>() {
    for length in [0usize, 1, 7, 63, 64, TEST_LENGTHS.default, TEST_LENGTHS.longest] {
        let (a, b) = sample_pairs::<T>(length);
        for &op in ReduceOp::ALL {
            let results = |width| {
                let kernels = kernels_for(width, T::DTYPE, op)?;
                Some([None, Some(3)].map(|divisor| {
                    let kernel = select_kernel(&kernels, divisor);
                    run_kernel(&kernel, a.clone(), &b)
                }))
            };
            let Some(portable) = results(VectorWidth::all_supported()[0]) else { continue };
            for width in VectorWidth::all_supported() {
                for (wide, portable) in
                    results(width).expect("the portable kernel exists too").iter().zip(&portable)
                {
                    for (i, (wide, portable)) in wide.iter().zip(portable).enumerate() {
                        let any_nan = NAN_BITS_MAY_DIFFER && T::DTYPE.is_number();
                        let are_same = bytemuck::bytes_of(wide) == bytemuck::bytes_of(portable);
                        let are_nans = any_nan && wide.is_nan() && portable.is_nan();
                        assert!(are_same || are_nans, "{} {op} {width:?} [{i}] of {length}", T::DTYPE);
                    }
                }
            }
        }
    }
}

/// All vector widths must agree with the portable code bit for bit, also in the elements that do not fill a vector.
#[test]
fn every_vector_width_gives_the_same_bits() {
    for_every_type!(check_bits_at_every_width);
}

fn check_bits_with_exchanged_operands<T: ReferenceReduction>() {
    let (a, b) = sample_pairs::<T>(TEST_LENGTHS.default);
    for &op in ReduceOp::ALL {
        for width in VectorWidth::all_supported() {
            let Some(kernels) = kernels_for(width, T::DTYPE, op) else { continue };
            for divisor in [None, Some(3)] {
                let kernel = select_kernel(&kernels, divisor);
                let one = run_kernel(&kernel, a.clone(), &b);
                let two = run_kernel(&kernel, b.clone(), &a);
                for (i, (one, two)) in one.iter().zip(&two).enumerate() {
                    let are_same = bytemuck::bytes_of(one) == bytemuck::bytes_of(two);
                    assert!(are_same, "{} {op} {width:?} of {:?} and {:?}", T::DTYPE, a[i], b[i]);
                }
            }
        }
    }
}

/// Regression test: before the fix, the ranks of a butterfly got zeros of different signs and different NaNs, because
/// the order of the two operands differs from rank to rank.
#[test]
#[cfg_attr(miri, ignore = "Miri gives the quotient of a NaN random bits")]
fn exchanging_the_operands_gives_the_same_bits() {
    for_every_type!(check_bits_with_exchanged_operands);
}

/// A ring reduces the contributions of the ranks in an order that differs from chunk to chunk. The result must not
/// depend on this order.
#[test]
fn min_and_max_do_not_depend_on_the_order_of_three_contributions() {
    let values = f32::samples();
    for op in [ReduceOp::Min, ReduceOp::Max] {
        let reduce_two = |a: f32, b: f32| reduce(op, vec![a], &[b], None)[0];
        for (&a, &b) in values.iter().flat_map(|a| values.iter().map(move |b| (a, b))) {
            for &c in &values {
                let (left, right) = (reduce_two(reduce_two(a, b), c), reduce_two(a, reduce_two(b, c)));
                assert_eq!(left.to_bits(), right.to_bits(), "{op} of {a}, {b}, {c}");
            }
        }
    }
}

fn check_existence_of_kernels<T: Element>() {
    for &op in ReduceOp::ALL {
        let is_built_in = op.applies_to(T::DTYPE) && op != ReduceOp::Custom;
        assert_eq!(kernels(T::DTYPE, op).is_some(), is_built_in, "{op} on {}", T::DTYPE);
    }
}

#[test]
fn kernels_exist_exactly_for_the_defined_reductions() {
    for_every_type!(check_existence_of_kernels);
}

#[test]
fn reductions_of_sample_values_give_the_expected_numbers() {
    use ReduceOp::{
        Average, BitAnd, BitOr, BitXor, LogicalAnd, LogicalOr, LogicalXor, Max, Min, Product, Sum,
    };
    assert_eq!(reduce(Sum, vec![1i32, i32::MAX], &[2, 1], None), [3, i32::MIN]);
    assert_eq!(reduce(ReduceOp::PreMulSum, vec![1i32, i32::MAX], &[2, 1], None), [3, i32::MIN]);
    assert_eq!(reduce(Sum, vec![1i16, i16::MAX], &[2, 1], None), [3, i16::MIN]);
    assert_eq!(reduce(Product, vec![200u8, 3], &[2, 5], None), [144, 15]);
    assert_eq!(reduce(Min, vec![-3i64, 4], &[2, -9], None), [-3, -9]);
    assert_eq!(reduce(Max, vec![-3i8, 4], &[2, -9], None), [2, 4]);
    assert_eq!(reduce(Average, vec![-3i32, 4], &[-4, 4], Some(2)), [-3, 4]);
    assert_eq!(reduce(Average, vec![i16::MIN, -9], &[1, 2], Some(65_536)), [0, 0]);
    assert_eq!(reduce(Average, vec![u16::MAX, 9], &[0, 2], Some(2)), [u16::MAX / 2, 5]);
    assert_eq!(reduce(Average, vec![u64::MAX, 9], &[0, 2], Some(2)), [u64::MAX / 2, 5]);
    assert_eq!(reduce(Average, vec![1.0f32, 4.0], &[2.0, 4.0], Some(4)), [0.75, 2.0]);
    assert_eq!(reduce(Average, vec![1.0f32, 4.0], &[2.0, 4.0], None), [3.0, 8.0]);
    assert_eq!(reduce(Sum, vec![1.5f64, 4.0], &[2.0, -4.0], Some(9)), [3.5, 0.0]);
    assert_eq!(reduce(BitAnd, vec![0b1100u8, 255], &[0b1010, 255], None), [0b1000, 255]);
    assert_eq!(reduce(BitOr, vec![0b1100i8, i8::MIN], &[0b1010, 1], None), [0b1110, -127]);
    assert_eq!(reduce(BitXor, vec![0b1100u64, 7], &[0b1010, 7], None), [0b0110, 0]);
    assert_eq!(reduce(LogicalAnd, vec![5.0f32, f32::NAN, -0.0], &[-2.0, 1.0, 1.0], None), [1.0, 1.0, 0.0]);
    assert_eq!(reduce(LogicalOr, vec![5u8, 0, 0], &[0, 9, 0], None), [1, 1, 0]);
    assert_eq!(reduce(LogicalXor, vec![5i64, 0, 0], &[3, 9, 0], None), [0, 1, 0]);
    // The smallest subnormal number is not zero, so it is true, in half precision too.
    assert_eq!(reduce(LogicalOr, vec![f16::from_bits(1)], &[f16::ZERO], None), [f16::ONE]);
    assert_eq!(reduce(LogicalOr, vec![bf16::from_bits(1)], &[bf16::NEG_ZERO], None), [bf16::ONE]);
}

#[test]
fn minloc_and_maxloc_return_the_lowest_index_of_equal_values() {
    let at = F64Loc::new;
    for op in [ReduceOp::MinLoc, ReduceOp::MaxLoc] {
        assert_eq!(reduce(op, vec![at(2.0, 9)], &[at(2.0, 4)], None), [at(2.0, 4)], "{op}");
        assert_eq!(reduce(op, vec![at(2.0, 4)], &[at(2.0, 9)], None), [at(2.0, 4)], "{op}");
        // The two zeros are equal, so the lower index wins.
        assert_eq!(reduce(op, vec![at(0.0, 1)], &[at(-0.0, 0)], None)[0].index, 0, "{op}");
        assert_eq!(reduce(op, vec![at(-0.0, 1)], &[at(0.0, 0)], None)[0].index, 0, "{op}");
        for (a, b, index) in [(f64::NAN, 1.0, 9), (1.0, f64::NAN, 4), (f64::NAN, -f64::NAN, 4)] {
            let winner = reduce(op, vec![at(a, 9)], &[at(b, 4)], None)[0];
            assert!(winner.value.is_nan() && winner.index == index, "{op} of {a} and {b}: {winner:?}");
        }
    }
    let (low, high) = (I32Loc::new(i32::MIN, 3), I32Loc::new(i32::MAX, 1));
    assert_eq!(reduce(ReduceOp::MinLoc, vec![high], &[low], None), [low]);
    assert_eq!(reduce(ReduceOp::MaxLoc, vec![low], &[high], None), [high]);
    let (low, high) = (I64Loc::new(i64::MAX - 1, 3), I64Loc::new(i64::MAX, u64::MAX));
    assert_eq!(reduce(ReduceOp::MinLoc, vec![high], &[low], None), [low]);
    assert_eq!(reduce(ReduceOp::MaxLoc, vec![low], &[high], None), [high]);
}

#[test]
fn a_nan_in_either_operand_gives_a_nan() {
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

/// Adds a few numbers to all 65,536 bit patterns of each half-precision type. The expected sums are computed in
/// `f32`, and the `half` crate rounds them.
#[test]
fn half_types_are_summed_in_f32_and_rounded_once() {
    for other in [0x0001u16, 0x3c00, 0x3f80, 0x7bff, 0x8400, 0xfc00, 0x0000] {
        let a: Vec<f16> = (0..=u16::MAX).step_by(TEST_LENGTHS.pattern_stride).map(f16::from_bits).collect();
        let b = vec![f16::from_bits(other); a.len()];
        for (i, sum) in reduce(ReduceOp::Sum, a.clone(), &b, None).into_iter().enumerate() {
            let expected = f16::from_f32(a[i].to_f32() + b[i].to_f32());
            assert!(sum.to_bits() == expected.to_bits() || (sum.is_nan() && expected.is_nan()), "{i}");
        }
        let a: Vec<bf16> = (0..=u16::MAX).step_by(TEST_LENGTHS.pattern_stride).map(bf16::from_bits).collect();
        let b = vec![bf16::from_bits(other); a.len()];
        for (i, sum) in reduce(ReduceOp::Sum, a.clone(), &b, None).into_iter().enumerate() {
            let expected = bf16::from_f32(a[i].to_f32() + b[i].to_f32());
            assert!(sum.to_bits() == expected.to_bits() || (sum.is_nan() && expected.is_nan()), "{i}");
        }
    }
}

/// If rank 2 receives the reduction of ranks 0 and 1, it must compute the reduction of ranks 0, 1 and 2 in this
/// order.
#[test]
fn a_custom_function_gets_the_arriving_element_as_its_left_operand() {
    let kernels = Kernels::custom(|arrived: &u64, own: &u64| arrived * 10 + own);
    for kernel in [&kernels.reduce, &kernels.reduce_last] {
        assert_eq!(run_kernel(kernel, vec![2u64, 5], &[1, 30]), [12, 305], "{kernel:?}");
    }
    // The composition of functions x -> slope x + offset is associative but not commutative.
    let compose = Kernels::custom(|first: &F32Loc, then: &F32Loc| {
        F32Loc::new(first.value * then.value, first.index * then.value as u32 + then.index)
    });
    let (double, add_one) = (F32Loc::new(2.0, 0), F32Loc::new(1.0, 1));
    assert_eq!(run_kernel(&compose.reduce, vec![add_one], &[double]), [F32Loc::new(2.0, 1)]);
    assert_eq!(run_kernel(&compose.reduce, vec![double], &[add_one]), [F32Loc::new(2.0, 2)]);
    assert!(run_kernel::<F32Loc>(&compose.clone().reduce_last, Vec::new(), &[]).is_empty());
}

#[test]
#[should_panic(expected = "the same length")]
fn a_custom_kernel_panics_if_the_lengths_of_its_slices_differ() {
    let kernels = Kernels::custom(|a: &u8, b: &u8| a | b);
    kernels.reduce.apply(&mut [0; 3], &[0; 2]);
}

/// Returns a contribution before and after `reduce_single_contribution`.
fn apply_to_single_contribution<T: ReferenceReduction>(op: ReduceOp) -> (Vec<T>, Vec<T>) {
    let (before, _) = sample_pairs::<T>(TEST_LENGTHS.single_contribution);
    let mut after = before.clone();
    reduce_single_contribution(T::DTYPE, op, bytemuck::cast_slice_mut(&mut after));
    (before, after)
}

fn check_single_contribution<T: ReferenceReduction>() {
    for &op in ReduceOp::ALL {
        let (before, after) = apply_to_single_contribution::<T>(op);
        for (before, after) in before.into_iter().zip(after) {
            if op.is_logical() && op.applies_to(T::DTYPE) {
                let zero = T::zeroed();
                assert!(
                    after.agrees(T::expected(ReduceOp::LogicalOr, before, zero, None)),
                    "{before:?} {op}"
                );
            } else {
                assert_eq!(bytemuck::bytes_of(&after), bytemuck::bytes_of(&before), "{op}");
            }
        }
    }
}

#[test]
fn a_logical_reduction_on_a_single_rank_gives_truth_values() {
    for_every_type!(check_single_contribution);
}
