//! A line of a log as text.

use std::fmt::Display;
use std::io::{self, Write};

use log::Record;

/// Writes a record as one line: the time, the level, the module and the message. The text of `style` begins the style of the
/// level, and its alternate form (`{:#}`) ends this style.
///
/// # Errors
///
/// If `out` fails.
pub fn write_log_line(
    out: &mut impl Write,
    record: &Record<'_>,
    time: impl Display,
    style: impl Display,
) -> io::Result<()> {
    let (level, target, message) = (record.level(), record.target(), record.args());
    writeln!(out, "[{time} {style}{level:<5}{style:#} {target}] {message}")
}

#[cfg(test)]
mod tests {
    use log::Level;

    use super::*;

    #[test]
    fn a_line_has_the_time_the_level_and_the_module() {
        let mut out = Vec::new();
        let mut record = Record::builder();
        record.level(Level::Warn).target("ringtrain::named");
        write_log_line(&mut out, &record.args(format_args!("late")).build(), "12:00", "").unwrap();
        assert_eq!(out, b"[12:00 WARN  ringtrain::named] late\n");
    }
}
