//! The message that a program prints before it fails, and the formats of the messages of ringrun.

use std::fmt::Display;

use log::Level;

use super::journal::{format_message, is_stderr_journal};
use super::log_format::{LogFormat, log_error_as_json, message_as_json, write_text};
use crate::launch::{LaunchError, LaunchMessage, LaunchPlan, MessageFormat, MessageLevel};

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

/// Writes why ringrun could not start a job to standard error.
pub(super) fn print_launch_error(plan: &LaunchPlan, error: &LaunchError) {
    let text: String = error.messages().iter().map(plan.message_format).collect();
    write_text(&text);
}

/// Returns the function that formats the messages of ringrun.
pub(super) fn message_format(format: LogFormat) -> MessageFormat {
    match format {
        LogFormat::Text => format_as_text,
        LogFormat::Json => format_as_json,
    }
}

fn format_as_text(message: &LaunchMessage) -> String {
    let text = message.to_text();
    if is_stderr_journal() { format_message(level_of(message), &text) } else { text }
}

fn format_as_json(message: &LaunchMessage) -> String {
    // The host of `USER@HOST`.
    let host = message.host.as_deref().and_then(|name| name.rsplit('@').next());
    message_as_json(("ringrun", level_of(message)), (message.rank, host), &message.text)
}

fn level_of(message: &LaunchMessage) -> Level {
    match message.level {
        MessageLevel::Error => Level::Error,
        MessageLevel::Warning => Level::Warn,
        MessageLevel::Info => Level::Info,
    }
}
