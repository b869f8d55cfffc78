//! Mathematical functions that return the same bits on every host. Ranks make the same decisions without
//! communication, so their numbers must be equal. The standard library's functions, such as `ln`, may round
//! differently on different hosts.

/// The largest exponent in the series of [`ln`]. For a mantissa from 1/√2 to √2, each omitted term is below 2^-60.
const SERIES_EXPONENT_MAX: u32 = 23;

/// Returns the natural logarithm of `value`, with an error of a few units in the last place. Uses only additions,
/// multiplications and divisions. Returns NaN if `value` is not a normal number above 0.
pub(crate) fn ln(value: f64) -> f64 {
    if !value.is_normal() || value < 0.0 {
        return f64::NAN;
    }
    // value = mantissa * 2^exponent, and ln((1 + s) / (1 - s)) = 2 (s + s³/3 + s⁵/5 + ...).
    let mut exponent = (value.to_bits() >> 52) as i32 - 1023;
    let mut mantissa = f64::from_bits(value.to_bits() & ((1 << 52) - 1) | 1.0_f64.to_bits());
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let mut sum = 0.0;
    for power in (1..=SERIES_EXPONENT_MAX).rev().step_by(2) {
        sum = sum * s * s + 1.0 / f64::from(power);
    }
    f64::from(exponent) * std::f64::consts::LN_2 + 2.0 * s * sum
}

/// The coefficients 1 / k! of the power series of e^x. The sum of the omitted terms is below 2^-57 if |x| is at most
/// (ln 2)/2, as in [`exp`].
const EXP_COEFFICIENTS: [f64; 14] = {
    let mut coefficients = [1.0; 14];
    let (mut power, mut factorial) = (1, 1.0);
    while power < coefficients.len() {
        factorial *= power as f64;
        coefficients[power] = 1.0 / factorial;
        power += 1;
    }
    coefficients
};

/// Returns e to the power of `value`, with an error of a few units in the last place. Uses only additions and
/// multiplications.
pub(crate) fn exp(value: f64) -> f64 {
    /// ln 2 is `LN_2_HIGH` + `LN_2_LOW`. `LN_2_HIGH` has 32 significant bits, so its product with an exponent is exact.
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// Adding and subtracting this number rounds a small number to an integer.
    const ROUNDING_ADDEND: f64 = 6_755_399_441_055_744.0;
    if value.is_nan() {
        return value;
    }
    // Outside of this range, the result is 0 or infinite.
    let value = value.clamp(-800.0, 800.0);
    let exponent = (value * std::f64::consts::LOG2_E + ROUNDING_ADDEND) - ROUNDING_ADDEND;
    let rest = (value - exponent * LN_2_HIGH) - exponent * LN_2_LOW;
    let sum = EXP_COEFFICIENTS.iter().rev().fold(0.0, |sum, coefficient| sum * rest + coefficient);
    // 2^exponent can overflow or underflow even if sum * 2^exponent does not. So the code multiplies by two smaller powers.
    let half = (exponent / 2.0) as i64;
    let power_of_two = |exponent: i64| f64::from_bits(((1023 + exponent) as u64) << 52);
    sum * power_of_two(half) * power_of_two(exponent as i64 - half)
}

/// Rounds `value` to twelve significant digits, and then down to three: 0.29999 becomes 0.299, and 0.2999999999999
/// becomes 0.3.
pub(crate) fn round_down_to_three_digits(value: f64) -> f64 {
    let text = format!("{value:.11e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let short = digits.get(..4).unwrap_or(digits);
    format!("{short}e{exponent}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: before the fix, hosts with different mathematical libraries could choose different learning rates,
    /// and could end the training after different epochs.
    #[test]
    fn the_functions_return_fixed_bits() {
        for (value, bits) in [
            (0.1, 0xc002_6bb1_bbb5_5515_u64),
            (0.5, 0xbfe6_2e42_fefa_39ef),
            (1.0, 0),
            (3.0, 0x3ff1_93ea_7aad_030a),
            (1e300, 0x4085_9634_47f8_7fb5),
        ] {
            let found = ln(value);
            assert!(found.to_bits() == bits, "{value}: {:#018x}", found.to_bits());
        }
        for step in 1..=20_000_u32 {
            for value in [f64::from(step) / 10_000.0, f64::from(step) * 1e30, 1e-30 / f64::from(step)] {
                let (found, expected) = (ln(value), value.ln());
                assert!((found - expected).abs() <= 8e-16 * expected.abs().max(1e-3), "{value}: {found}");
            }
        }
        for step in -7450..=7090 {
            let value = f64::from(step) / 10.0 + 0.01;
            let (found, expected) = (exp(value), value.exp());
            assert!((found - expected).abs() <= 8e-16 * expected + 1e-323, "{value}: {found} {expected}");
        }
        assert_eq!(
            [-0.0, f64::NEG_INFINITY, -750.0, 710.0, f64::INFINITY].map(exp),
            [1.0, 0.0, 0.0, f64::INFINITY, f64::INFINITY]
        );
        assert!(exp(f64::NAN).is_nan());
        for (value, bits) in [(1.0, 0x4005_bf0a_8b14_576a_u64), (-0.5, 0x3fe3_68b2_fc6f_960a)] {
            let found = exp(value);
            assert!(found.to_bits() == bits, "{value}: {:#018x}", found.to_bits());
        }
        assert!([0.0, -1.0, f64::INFINITY, f64::NAN].into_iter().all(|value| ln(value).is_nan()));
        for (value, expected) in [
            (0.123_99, 0.123),
            (4.567, 4.56),
            (9.999, 9.99),
            (1e-5, 1e-5),
            (0.3 - 1e-16, 0.3),
            (1_234_567.0, 1_230_000.0),
            (1e-30, 1e-30),
        ] {
            assert_eq!(round_down_to_three_digits(value), expected);
        }
    }
}
