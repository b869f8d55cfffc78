//! Converts dates and times of tables to days since the beginning of 1970 in UTC.
//!
//! A date is written as `2024-03-01`, `2024/03/01` or `20240301`. A time may follow it, for example
//! `2024-03-01 17:30`, `2024-03-01T17:30:05.25Z` or `2024-03-01T17:30:05+01:00`. A time without an offset is UTC.
//! Formats in which the order of day and month is not certain are errors, for example `03/01/2024`.

const SECONDS_PER_DAY: f64 = 86_400.0;
/// The end of messages about cells that are not dates.
const DATE_FORMAT_HINT: &str = "write dates as 2024-03-01, or with a time as 2024-03-01 17:30:05";

/// Converts a date to days since the beginning of 1970 in UTC. A time after the date adds a fraction of a day.
///
/// # Errors
///
/// A sentence that says what is wrong with the cell.
pub(crate) fn parse_date(cell: &[u8]) -> Result<f64, String> {
    let Ok(cell) = std::str::from_utf8(cell) else {
        return Err("the text is not UTF-8; save the table as UTF-8".into());
    };
    let unknown = || format!("`{}` is not a date; {DATE_FORMAT_HINT}", shorten_cell(cell));
    let (date, rest) = split_date(cell).ok_or_else(unknown)?;
    let (year, month, day) = date;
    if !(1..=12).contains(&month) {
        return Err(format!("`{}` has the month {month}; {DATE_FORMAT_HINT}", shorten_cell(cell)));
    }
    if !(1..=days_in_month(year, month)).contains(&day) {
        return Err(format!("`{}` has the day {day}, which this month does not have", shorten_cell(cell)));
    }
    let days = f64::from(days_since_1970(year, month, day));
    match rest.strip_prefix(['T', 't', ' ']).map(str::trim_start) {
        None if rest.is_empty() => Ok(days),
        None => Err(unknown()),
        Some(time) => Ok(days + parse_time(time).ok_or_else(unknown)? / SECONDS_PER_DAY),
    }
}

/// Returns the year, the month and the day at the beginning of a cell, and the rest of the cell. Returns `None` if the
/// cell does not begin with a date.
fn split_date(cell: &str) -> Option<((i32, i32, i32), &str)> {
    let (year, rest) = split_number(cell, 4)?;
    let separator = rest.chars().next().filter(|&letter| letter == '-' || letter == '/');
    let skip = |rest| match separator {
        Some(separator) => str::strip_prefix(rest, separator),
        None => Some(rest),
    };
    let (month, rest) = split_number(skip(rest)?, 2)?;
    let (day, rest) = split_number(skip(rest)?, 2)?;
    Some(((year, month, day), rest))
}

/// Reads the first `count` characters as a number. Returns the number and the rest of the text. Returns `None` if
/// these characters are not all digits.
fn split_number(text: &str, count: usize) -> Option<(i32, &str)> {
    let (number, rest) = text.split_at_checked(count)?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| number.parse().ok().map(|number| (number, rest))).flatten()
}

/// Converts a time to seconds since the beginning of the day in UTC. The time is `HH:MM`, `HH:MM:SS` or
/// `HH:MM:SS.FRACTION`. An offset from UTC may follow it.
fn parse_time(text: &str) -> Option<f64> {
    let (hour, rest) = split_number(text, 2)?;
    let (minute, mut rest) = split_number(rest.strip_prefix(':')?, 2)?;
    let mut seconds = 0.0;
    if let Some(after) = rest.strip_prefix(':') {
        let (whole, after) = split_number(after, 2)?;
        let fraction = after.strip_prefix('.').or_else(|| after.strip_prefix(','));
        let length = fraction.map_or(0, |text| text.bytes().take_while(u8::is_ascii_digit).count());
        if fraction.is_some() && length == 0 {
            return None;
        }
        let fraction_digits = fraction.map_or("0", |text| &text[..length]);
        seconds = f64::from(whole) + format!("0.{fraction_digits}").parse::<f64>().ok()?;
        rest = fraction.map_or(after, |text| &text[length..]);
    }
    // Seconds go up to 60, because a leap second has the number 60.
    if hour > 23 || minute > 59 || seconds >= 61.0 {
        return None;
    }
    let offset = parse_offset(rest.trim_start())?;
    Some(f64::from(hour * 3600 + minute * 60) + seconds - offset)
}

/// Converts an offset from UTC to seconds. The text is empty, `Z`, `UTC`, `+HH`, `+HHMM` or `+HH:MM`.
fn parse_offset(text: &str) -> Option<f64> {
    if matches!(text, "" | "Z" | "z" | "UTC") {
        return Some(0.0);
    }
    let sign = match text.chars().next()? {
        '+' => 1.0,
        '-' => -1.0,
        _ => return None,
    };
    let (hours, rest) = split_number(&text[1..], 2)?;
    let minutes = match rest.strip_prefix(':').unwrap_or(rest) {
        "" if rest.is_empty() => 0,
        text => split_number(text, 2).filter(|(minutes, rest)| *minutes < 60 && rest.is_empty())?.0,
    };
    (hours < 24).then(|| sign * f64::from(hours * 3600 + minutes * 60))
}

fn is_leap_year(year: i32) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in_month(year: i32, month: i32) -> i32 {
    match month {
        2 => 28 + i32::from(is_leap_year(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Returns the days since 1 January 1970 in the Gregorian calendar. Source: Howard Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms", `days_from_civil`.
fn days_since_1970(year: i32, month: i32, day: i32) -> i32 {
    // This calculation lets a year begin in March, so that the leap day is the last day of a year.
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = 365 * year_of_era + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Shortens a cell to 40 characters for a message.
fn shorten_cell(cell: &str) -> String {
    let shown: String = cell.chars().take(40).collect();
    if shown.len() < cell.len() { shown + "..." } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An expected number is the output of a command such as `date -u -d '2024-02-29 12:00' +%s`, divided by 86400.
    #[test]
    fn dates_and_times_are_days_since_1970() {
        for (text, expected) in [
            ("1970-01-01", 0.0),
            ("1969-12-31", -1.0),
            ("2024-02-29", 19_782.0),
            ("2024/02/29", 19_782.0),
            ("20240229", 19_782.0),
            ("2024-02-29 12:00", 19_782.5),
            ("2024-02-29T12:00:00Z", 19_782.5),
            ("2024-02-29T12:00:00.000 UTC", 19_782.5),
            ("2024-02-29T18:30:00+06:30", 19_782.5),
            ("2024-02-29T06:00:00-0600", 19_782.5),
            ("2024-02-29T13+01", f64::NAN),
            ("1970-01-01 00:00:21.6", 0.000_25),
            ("0001-01-01", -719_162.0),
            ("9999-12-31", 2_932_896.0),
        ] {
            match parse_date(text.as_bytes()) {
                Ok(days) => assert!((days - expected).abs() < 1e-9, "{text}: {days}"),
                Err(error) => assert!(expected.is_nan(), "{error}"),
            }
        }
    }

    /// From 1900 to 2100, the number of each day is the number of the day before plus 1.
    #[test]
    fn days_are_consecutive() {
        let mut expected = days_since_1970(1899, 12, 31);
        for year in 1900..2101 {
            for month in 1..=12 {
                for day in 1..=days_in_month(year, month) {
                    expected += 1;
                    assert_eq!(days_since_1970(year, month, day), expected, "{year}-{month}-{day}");
                }
            }
        }
    }

    #[test]
    fn texts_that_are_not_dates_are_errors() {
        for (text, expected) in [
            ("03/01/2024", "`03/01/2024` is not a date; write dates as 2024-03-01"),
            ("2024-13-01", "has the month 13"),
            ("2023-02-29", "has the day 29, which this month does not have"),
            ("2024-00-10", "has the month 0"),
            ("2024-03/01", "is not a date"),
            ("2024-3-1", "is not a date"),
            ("2024-03-01x", "is not a date"),
            ("2024-03-01 25:00", "is not a date"),
            ("2024-03-01 12:00:61", "is not a date"),
            ("2024-03-01 12:00+", "is not a date"),
            ("2024-03-01 12:00:00.", "is not a date"),
            ("2024", "is not a date"),
            ("", "is not a date"),
            ("ääääääääää", "is not a date"),
        ] {
            let error = parse_date(text.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
