//! The form of messages on standard error if journald reads them.

use std::fmt::Write as _;
use std::io;

use log::{Level, Record};
use rustix::fs::fstat;

/// The variable that systemd sets to the device and the inode of the stream to journald, separated by a colon.
const STREAM_VARIABLE: &str = "JOURNAL_STREAM";

/// Returns whether standard error is a stream to journald. A process that a service starts also inherits the variable, but
/// its standard error may be another file.
pub(super) fn is_stderr_journal() -> bool {
    let Some(stream) = std::env::var_os(STREAM_VARIABLE) else { return false };
    fstat(io::stderr()).is_ok_and(|status| {
        let mut own = String::new();
        let _ = write!(own, "{}:{}", status.st_dev, status.st_ino);
        stream == own.as_str()
    })
}

/// Returns the priority that journald stores for a level: a number of syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

/// Returns a message in the form that journald expects: each line begins with its priority (sd-daemon(3)). The lines have no
/// time, because journald stores the time.
pub(super) fn format_message(level: Level, message: &str) -> String {
    let lines = message.lines().map(|line| format!("<{}>{line}\n", priority(level)));
    lines.collect()
}

/// Writes a message of the log in the form that journald expects.
pub(super) fn write_to_journal(out: &mut impl io::Write, record: &Record<'_>) -> io::Result<()> {
    let message = format!("{}: {}", record.target(), record.args());
    out.write_all(format_message(record.level(), &message).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_priority() {
        assert_eq!(format_message(Level::Warn, "a\nb"), "<4>a\n<4>b\n");
        assert_eq!(format_message(Level::Error, "a"), "<3>a\n");
        assert_eq!(format_message(Level::Debug, ""), "");
    }
}
