//! The message that a program prints before it fails.

use std::fmt::Display;

use log::Level;

use super::journal::{format_message, is_stderr_journal};
use super::log_format::{log_error_as_json, write_text};

/// Writes `PROGRAM: MESSAGE` as one line to standard error, or logs the message if the log is in JSON.
pub(super) fn print_error(program: &str, message: impl Display) {
    let message = message.to_string();
    // The level of the line already says that it is an error.
    if log_error_as_json(program, message.strip_prefix("error: ").unwrap_or(&message)) {
        return;
    }
    let text = format!("{program}: {message}\n");
    write_text(&if is_stderr_journal() { format_message(Level::Error, &text) } else { text });
}
