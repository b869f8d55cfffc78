//! What a program says before it fails.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Writes `PROGRAM: WHAT` as one line to standard error, in one piece, so that ranks that share a terminal do not tear each
/// other's lines. A closed standard error is no failure.
pub(super) fn print_error(program: &str, what: impl Display) {
    let _ = io::stderr().write_all(format!("{program}: {what}\n").as_bytes());
}
