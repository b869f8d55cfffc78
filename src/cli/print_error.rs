//! The message that a program prints before it fails.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Writes `PROGRAM: WHAT` as one line to standard error. Writes the whole line with one system call, so that lines of
/// several ranks do not mix on a terminal. If standard error is closed, does nothing.
pub(super) fn print_error(program: &str, what: impl Display) {
    let _ = io::stderr().write_all(format!("{program}: {what}\n").as_bytes());
}
