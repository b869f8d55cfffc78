//! Sums floating-point numbers exactly, so that the result depends neither on their order nor on the number of ranks.
//!
//! Each f64 is an integer times the smallest positive f64, which is 2^-1074. A sum is stored as such an integer,
//! which has 2,176 bits (Kulisch, "Computer Arithmetic and Validity", 2013).

use super::ELEMENTS_MAX;
use crate::group::{Error, Group};
use crate::types::ReduceOp;

/// The number of digits of the integer in an [`ExactSum`]. The lowest bit stands for 2^-1074, all f64 are below 2^1024,
/// and a sum of 2^31 numbers needs 31 more bits. The highest digit holds the sign.
const DIGIT_COUNT: usize = 68;
/// The number of bits of each digit of the integer in an [`ExactSum`].
const DIGIT_BITS: usize = 32;
/// The lowest bit of the integer in an [`ExactSum`] stands for 2 to the power of this number.
const LOWEST_EXPONENT: i32 = -1074;
/// The number of bits of the fraction of an f64.
const FRACTION_BITS: u32 = f64::MANTISSA_DIGITS - 1;

const _: () = assert!(DIGIT_COUNT * DIGIT_BITS > 1074 + 1024 + 31);
// Each number adds less than 2^32 to a digit, so the digits of the sum do not overflow.
const _: () = assert!(ELEMENTS_MAX <= 1 << (63 - DIGIT_BITS));

/// An exact sum of at most [`ELEMENTS_MAX`] finite numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ExactSum {
    /// The digits, lowest first. A digit may be negative or exceed 32 bits: only [`value`](Self::value) propagates
    /// carries.
    digits: [i64; DIGIT_COUNT],
}

impl ExactSum {
    /// The sum of no numbers.
    pub(crate) const ZERO: Self = Self { digits: [0; DIGIT_COUNT] };

    /// Adds a finite number.
    pub(crate) fn add(&mut self, value: f64) {
        if value == 0.0 {
            return;
        }
        let bits = value.to_bits();
        let fraction = bits & ((1 << FRACTION_BITS) - 1);
        let (significand, shift) = match (bits >> FRACTION_BITS & 0x7ff) as usize {
            0 => (fraction, 0),
            exponent => (fraction | 1 << FRACTION_BITS, exponent - 1),
        };
        let aligned = u128::from(significand) << (shift % DIGIT_BITS);
        let first = shift / DIGIT_BITS;
        for (index, digit) in self.digits[first..first + 3].iter_mut().enumerate() {
            let part = i64::from((aligned >> (DIGIT_BITS * index)) as u32);
            *digit += if value < 0.0 { -part } else { part };
        }
    }

    /// Returns the sum, rounded to the nearest f64.
    pub(crate) fn value(&self) -> f64 {
        match self.digits_with_carries(1) {
            Some(digits) => nearest_f64(&digits),
            None => -self.digits_with_carries(-1).map_or(0.0, |digits| nearest_f64(&digits)),
        }
    }

    /// Returns the digits of the sum times `sign`, which is 1 or -1, after all carries are propagated. Returns `None`
    /// if this product is negative.
    fn digits_with_carries(&self, sign: i128) -> Option<[u32; DIGIT_COUNT]> {
        let mut carry = 0_i128;
        let digits = self.digits.map(|digit| {
            let total = sign * i128::from(digit) + carry;
            carry = total >> DIGIT_BITS;
            total as u32
        });
        (carry >= 0).then_some(digits)
    }
}

/// Adds up each sum over all ranks. Afterwards every rank has the same sums. All ranks must pass the same number of
/// sums.
pub(crate) fn add_sums_of_ranks(group: &mut Group, sums: &mut [ExactSum]) -> Result<(), Error> {
    let mut digits: Vec<i64> = sums.iter().flat_map(|sum| sum.digits).collect();
    group.all_reduce(&mut digits, ReduceOp::Sum)?;
    for (sum, digits) in sums.iter_mut().zip(digits.as_chunks().0) {
        sum.digits = *digits;
    }
    Ok(())
}

/// Returns the f64 that is nearest to the integer with these digits, times 2^-1074.
fn nearest_f64(digits: &[u32; DIGIT_COUNT]) -> f64 {
    let Some(highest) = digits.iter().rposition(|&digit| digit != 0) else { return 0.0 };
    let lowest = highest.saturating_sub(2);
    let top = digits[lowest..=highest]
        .iter()
        .rev()
        .fold(0_u128, |top, &digit| top << DIGIT_BITS | u128::from(digit));
    // If `top` is exactly between two f64, the number is rounded up if a lower digit is not 0.
    let has_lower_digits = digits[..lowest].iter().any(|&digit| digit != 0);
    let rounded = (top | u128::from(has_lower_digits)) as f64;
    multiply_by_power_of_two(rounded, LOWEST_EXPONENT + (DIGIT_BITS * lowest) as i32)
}

/// Returns `value` * 2^`exponent`. `value` is an integer.
fn multiply_by_power_of_two(mut value: f64, mut exponent: i32) -> f64 {
    // 2^exponent may be too small or too large for an f64, so the function multiplies in steps.
    while exponent != 0 {
        let step = exponent.clamp(-1000, 1000);
        value *= f64::from_bits(((step + 1023) as u64) << FRACTION_BITS);
        exponent -= step;
    }
    value
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum_of(values: &[f64]) -> f64 {
        let mut sum = ExactSum::ZERO;
        for &value in values {
            sum.add(value);
        }
        sum.value()
    }

    #[test]
    fn a_sum_is_the_f64_nearest_to_the_exact_sum() {
        let tiny = f64::from_bits(1);
        for (values, expected) in [
            (&[][..], 0.0),
            (&[-0.0], 0.0),
            (&[0.1, 0.2, -0.3], 2.775_557_561_562_891_4e-17),
            (&[1e300, 1.0, -1e300], 1.0),
            (&[f64::MAX, f64::MAX, -f64::MAX], f64::MAX),
            (&[f64::MAX, f64::MAX], f64::INFINITY),
            (&[tiny, tiny, tiny], 3.0 * tiny),
            (&[-tiny, f64::MIN_POSITIVE], f64::MIN_POSITIVE - tiny),
            // A sum exactly between two f64 is rounded to the even one. A slightly larger sum is rounded up.
            (&[1.0, f64::EPSILON / 2.0], 1.0),
            (&[1.0, f64::EPSILON / 2.0, tiny], 1.0 + f64::EPSILON),
            (&[-1.0, -f64::EPSILON / 2.0, -tiny], -1.0 - f64::EPSILON),
        ] {
            assert_eq!(sum_of(values).to_bits(), f64::to_bits(expected + 0.0), "{values:?}");
        }
    }

    proptest! {
        #[test]
        fn the_sum_of_one_number_is_this_number(bits: u64) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            prop_assert_eq!(sum_of(&[value]), value);
            prop_assert_eq!(sum_of(&[value, 1.0, -value]), 1.0);
        }

        #[test]
        fn sums_of_integers_do_not_depend_on_their_order(values: Vec<i32>, shift in -1000_i32..900) {
            let scaled = |value: i64| multiply_by_power_of_two(value as f64, shift);
            let mut numbers: Vec<f64> = values.iter().map(|&value| scaled(value.into())).collect();
            let expected = scaled(values.iter().map(|&value| i64::from(value)).sum());
            prop_assert_eq!(sum_of(&numbers), expected);
            numbers.reverse();
            prop_assert_eq!(sum_of(&numbers), expected);
        }
    }
}
