//! The message that a program prints before it fails.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Writes `PROGRAM: WHAT` as one line to standard error. One system call writes the whole line, so that lines of ranks that
/// share a terminal do not mix. A closed standard error is ignored.
pub(super) fn print_error(program: &str, what: impl Display) {
    let _ = io::stderr().write_all(format!("{program}: {what}\n").as_bytes());
}
