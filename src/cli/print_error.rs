//! The message that a program prints before it fails.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Writes `PROGRAM: MESSAGE` as one line to standard error. Writes the whole line with one system call, so that lines
/// of several ranks do not mix on a terminal. If standard error is closed, does nothing.
pub(super) fn print_error(program: &str, message: impl Display) {
    let _ = io::stderr().write_all(format!("{program}: {message}\n").as_bytes());
}
