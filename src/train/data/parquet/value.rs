//! The values of Parquet columns that are not texts.

use crate::train::data::dates::parse_date;

/// The Julian day number of 1 January 1970.
const JULIAN_DAY_OF_1970: i64 = 2_440_588;
const SECONDS_PER_DAY: i64 = 86_400;
/// An f64 represents all integers up to this number exactly.
const EXACT_INTEGER_MAX: u128 = 1 << 53;
/// An f64 represents all powers of ten up to this exponent exactly.
const EXACT_POWER_MAX: u32 = 22;

/// A number, a truth value or a date.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum TypedValue {
    Boolean(bool),
    Integer(i128),
    Single(f32),
    Double(f64),
    /// The number `unscaled` / 10^`scale`.
    Decimal {
        unscaled: i128,
        scale: u32,
    },
    /// A date, as the number of days since 1970.
    Date(f64),
}

impl TypedValue {
    /// Returns the value as a number that is finite as an f32.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong with the value.
    pub(crate) fn number(self) -> Result<f64, String> {
        let number = match self {
            Self::Boolean(value) => f64::from(u8::from(value)),
            Self::Integer(value) => value as f64,
            Self::Single(value) => f64::from(value),
            Self::Double(value) => value,
            Self::Decimal { unscaled, scale } => decimal_to_number(unscaled, scale),
            Self::Date(_) => return Err("the value is a date, but a number is needed".into()),
        };
        if (number as f32).is_finite() {
            Ok(number)
        } else {
            Err(format!("`{number}` is not a finite number"))
        }
    }

    /// Returns the value as a number of days since 1970. The integer 20240301 is the date 2024-03-01, as
    /// in a table of text.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong with the value.
    pub(crate) fn date(self) -> Result<f64, String> {
        match self {
            Self::Date(days) => Ok(days),
            other => parse_date(other.text()?.as_bytes()),
        }
    }

    /// Returns the value as the text that pandas writes to a CSV file. Only the exponents of floating-point numbers differ:
    /// `1e16` instead of `1e+16`.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong with the value.
    pub(crate) fn text(self) -> Result<String, String> {
        Ok(match self {
            Self::Boolean(value) => if value { "True" } else { "False" }.into(),
            Self::Integer(value) => value.to_string(),
            Self::Single(value) => format!("{value:?}"),
            Self::Double(value) => format!("{value:?}"),
            Self::Decimal { unscaled, scale } => decimal_to_text(unscaled, scale),
            Self::Date(_) => return Err("the value is a date, but a text is needed".into()),
        })
    }
}

/// Returns a time as the number of days since 1970. `units` is the time in units since 1970. The result has the same bits as
/// the result of [`parse_date`] for the same time.
pub(super) fn days_of_timestamp(units: i64, units_per_second: i64) -> f64 {
    let seconds = units.div_euclid(units_per_second);
    let fraction = units.rem_euclid(units_per_second) as f64 / units_per_second as f64;
    let (days, second_of_day) = (seconds.div_euclid(SECONDS_PER_DAY), seconds.rem_euclid(SECONDS_PER_DAY));
    let second = second_of_day % 60;
    let time = (second_of_day - second) as f64 + (second as f64 + fraction);
    days as f64 + time / SECONDS_PER_DAY as f64
}

/// Returns a timestamp of 96 bits as the number of days since 1970. `low` and `high` are the lower and the upper
/// 32 bits of the number of nanoseconds since midnight, and `julian_day` is the Julian day number.
pub(super) fn days_of_int96([low, high, julian_day]: [u32; 3]) -> f64 {
    let nanoseconds = i64::from(low) | i64::from(high) << 32;
    (i64::from(julian_day) - JULIAN_DAY_OF_1970) as f64 + days_of_timestamp(nanoseconds, 1_000_000_000)
}

/// Returns the integer whose big-endian two's complement is `bytes`. Returns `None` if the integer does not fit in an
/// i128.
pub(super) fn integer_from_bytes(bytes: &[u8]) -> Option<i128> {
    let is_negative = bytes.first().is_some_and(|first| first & 0x80 != 0);
    let fill = if is_negative { 0xff } else { 0 };
    let (extra, last) = bytes.split_at(bytes.len().saturating_sub(size_of::<i128>()));
    let mut value = [fill; size_of::<i128>()];
    value[size_of::<i128>() - last.len()..].copy_from_slice(last);
    let value = i128::from_be_bytes(value);
    (extra.iter().all(|&byte| byte == fill) && (value < 0) == is_negative).then_some(value)
}

/// Returns the f64 that is closest to `unscaled` / 10^`scale`.
fn decimal_to_number(unscaled: i128, scale: u32) -> f64 {
    if unscaled.unsigned_abs() <= EXACT_INTEGER_MAX && scale <= EXACT_POWER_MAX {
        // Both numbers are exact, so only the division rounds.
        return unscaled as f64 / (0..scale).fold(1.0, |power, _| power * 10.0);
    }
    format!("{unscaled}e-{scale}").parse().expect("an integer with an exponent is a number")
}

/// Returns the decimal `unscaled` / 10^`scale` as text with `scale` digits after the point. For example, 150 with a scale of
/// 2 becomes `1.50`.
fn decimal_to_text(unscaled: i128, scale: u32) -> String {
    let scale = scale as usize;
    let sign = if unscaled < 0 { "-" } else { "" };
    let digits = format!("{:0>width$}", unscaled.unsigned_abs(), width = scale + 1);
    let (whole, fraction) = digits.split_at(digits.len() - scale);
    let point = if scale == 0 { "" } else { "." };
    format!("{sign}{whole}{point}{fraction}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers are the results of the parser for tables of text, so that both formats give the same model.
    #[test]
    fn times_become_the_same_numbers_of_days_as_their_texts() {
        for (text, seconds, nanoseconds) in [
            ("1970-01-01", 0, 0),
            ("2024-02-29T12:00:00Z", 1_709_208_000, 0),
            ("2013-01-01 05:17:59.123456789", 1_357_017_479, 123_456_789),
            ("1969-12-31 23:59:59.999999999", -1, 999_999_999),
            ("1900-03-01 00:00:01", -2_203_891_199, 0),
        ] {
            let days = parse_date(text.as_bytes()).unwrap();
            let found = days_of_timestamp(seconds * 1_000_000_000 + nanoseconds, 1_000_000_000);
            assert_eq!(found, days, "{text}");
            if nanoseconds == 0 {
                assert_eq!(days_of_timestamp(seconds * 1000, 1000), days, "{text}");
            }
            let of_day = (seconds.rem_euclid(SECONDS_PER_DAY) * 1_000_000_000 + nanoseconds) as u64;
            let julian_day = seconds.div_euclid(SECONDS_PER_DAY) + JULIAN_DAY_OF_1970;
            let int96 = [of_day as u32, (of_day >> 32) as u32, julian_day as u32];
            assert_eq!(days_of_int96(int96), days, "{text}");
        }
        for extreme in [i64::MIN, i64::MAX] {
            assert!(days_of_timestamp(extreme, 1000).is_finite());
        }
        assert!(days_of_int96([u32::MAX; 3]).is_finite());
        assert_eq!(TypedValue::Integer(19_700_102).date(), Ok(1.0));
        assert!(TypedValue::Boolean(true).date().unwrap_err().contains("`True` is not a date"));
    }

    #[test]
    fn decimals_become_the_closest_floating_point_numbers() {
        let big = 170_141_183_460_469_231_731_687_303_715_884_105_727;
        for (unscaled, scale, text) in [
            (0, 2, "0.00"),
            (-5, 3, "-0.005"),
            (150, 0, "150"),
            (1_234_567, 2, "12345.67"),
            (9_007_199_254_740_993, 5, "90071992547.40993"),
            (big, 38, "1.70141183460469231731687303715884105727"),
            (-big - 1, 0, "-170141183460469231731687303715884105728"),
        ] {
            let decimal = TypedValue::Decimal { unscaled, scale };
            assert_eq!(decimal.text().unwrap(), text);
            assert_eq!(decimal.number().unwrap(), text.parse::<f64>().unwrap());
            for zeros in [0, 1, 5] {
                let fill = if unscaled < 0 { 0xff } else { 0 };
                let bytes = [vec![fill; zeros], unscaled.to_be_bytes().to_vec()].concat();
                assert_eq!(integer_from_bytes(&bytes), Some(unscaled));
            }
        }
        assert_eq!(integer_from_bytes(&[]), Some(0));
        assert_eq!(integer_from_bytes(&[0xfe]), Some(-2));
        assert_eq!(integer_from_bytes(&[0, 0x80]), Some(128));
        let too_large = [vec![0], vec![0x80], vec![0; 15]].concat();
        assert_eq!(integer_from_bytes(&too_large), None);
        assert_eq!(integer_from_bytes(&[&[1], &[0; 16][..]].concat()), None);
    }

    #[test]
    fn values_become_the_numbers_and_texts_of_a_table_of_text() {
        for (value, number, text) in [
            (TypedValue::Boolean(true), 1.0, "True"),
            (TypedValue::Integer(u64::MAX.into()), 1.844_674_407_370_955_2e19, "18446744073709551615"),
            (TypedValue::Single(0.1), f64::from(0.1_f32), "0.1"),
            (TypedValue::Double(3.0), 3.0, "3.0"),
        ] {
            assert_eq!((value.number().unwrap(), value.text().unwrap().as_str()), (number, text));
        }
        for value in [f64::INFINITY, 1e300] {
            assert!(TypedValue::Double(value).number().unwrap_err().contains("is not a finite number"));
        }
        assert!(TypedValue::Date(1.0).number().is_err() && TypedValue::Date(1.0).text().is_err());
    }
}
