//! Writes the output of the ranks to ringrun's own standard output and standard error.

use std::io::{self, ErrorKind, Write};
use std::thread;
use std::time::{Duration, SystemTime};

use humantime::format_rfc3339_millis;
use rustix::io::Errno;

use super::lines::LineEnd;
use super::message::{LaunchMessage, MessageFormat};
use super::plan::OutputFormat;
use super::status_line::{StatusLine, status_text, terminal_columns};
use super::streams::OutputStream;
use crate::types::Rank;

/// The pause before the next attempt to write to a full non-blocking output.
const FULL_OUTPUT_PAUSE: Duration = Duration::from_millis(5);

/// Writes to ringrun's own standard output and standard error.
pub(super) struct TerminalWriter {
    output_format: OutputFormat,
    message_format: MessageFormat,
    /// `Err` with the `errno` of the first failed write to standard output. After a failed write, ringrun writes
    /// nothing more to standard output.
    pub(super) stdout_result: Result<(), i32>,
    /// `Err` with the `errno` of the first failed write to standard error. After a failed write, ringrun writes nothing
    /// more to standard error.
    stderr_result: Result<(), i32>,
    /// `None` if standard error is not a terminal.
    status: Option<StatusLine>,
}

impl TerminalWriter {
    /// Makes a writer that writes lines of ranks and messages of ringrun in these formats.
    pub(super) fn new((output_format, message_format): (OutputFormat, MessageFormat)) -> Self {
        let status = terminal_columns().map(|_| StatusLine::default());
        Self { output_format, message_format, stdout_result: Ok(()), stderr_result: Ok(()), status }
    }

    /// Returns whether [`set_status`](Self::set_status) has an effect.
    pub(super) fn shows_status(&self) -> bool {
        self.status.is_some()
    }

    /// Appends a line of a rank to `text` in the output format.
    pub(super) fn format_line(
        &self,
        text: &mut Vec<u8>,
        rank: Rank,
        stream: OutputStream,
        line: &[u8],
        end: LineEnd,
    ) {
        text.extend_from_slice(line_prefix(self.output_format, rank, stream).as_bytes());
        text.extend_from_slice(line);
        // `Raw` output is unchanged, byte for byte. Other output always ends with a newline, even after an
        // unfinished line.
        if end == LineEnd::Newline || self.output_format != OutputFormat::Raw {
            text.push(b'\n');
        }
    }

    /// Shows the newest text of the unfinished line of a rank's standard error in the status line.
    pub(super) fn set_status(&mut self, rank: Rank, unfinished_line: &[u8]) {
        let Some(status) = &mut self.status else { return };
        // The user may have changed the width of the terminal.
        let columns = terminal_columns().unwrap_or_default();
        let prefix = line_prefix(self.output_format, rank, OutputStream::Stderr);
        let bytes = status.replace(&status_text(unfinished_line, &prefix, columns));
        if !bytes.is_empty() && self.stderr_result.is_ok() {
            self.stderr_result = write_all(&mut io::stderr().lock(), &bytes);
        }
    }

    /// Writes a message of ringrun to standard error, above the status line.
    pub(super) fn write_message(&mut self, message: &LaunchMessage) {
        self.write_lines(OutputStream::Stderr, (self.message_format)(message).as_bytes());
    }

    /// Writes whole lines above the status line.
    pub(super) fn write_lines(&mut self, stream: OutputStream, text: &[u8]) {
        let status = self.status.as_ref().filter(|_| !text.is_empty()).map(StatusLine::erase_and_rewrite);
        let (erase, rewrite) = status.unwrap_or_default();
        if !erase.is_empty() && self.stderr_result.is_ok() {
            self.stderr_result = write_all(&mut io::stderr().lock(), erase);
        }
        match stream {
            OutputStream::Stdout if self.stdout_result.is_ok() => {
                self.stdout_result = write_all(&mut io::stdout().lock(), text);
            }
            OutputStream::Stderr if self.stderr_result.is_ok() => {
                self.stderr_result = write_all(&mut io::stderr().lock(), text);
            }
            _ => {}
        }
        if !rewrite.is_empty() && self.stderr_result.is_ok() {
            self.stderr_result = write_all(&mut io::stderr().lock(), rewrite);
        }
    }
}

/// Returns the number of characters of rank 0's progress bar on a terminal with `columns` columns.
pub(super) fn progress_bar_columns(columns: u16, output_format: OutputFormat) -> u16 {
    let prefix = line_prefix(output_format, Rank::ZERO, OutputStream::Stderr);
    columns.saturating_sub(prefix.len() as u16 + 1).max(1)
}

/// Returns the text that ringrun prints before each line of a rank.
fn line_prefix(output_format: OutputFormat, rank: Rank, stream: OutputStream) -> String {
    match output_format {
        OutputFormat::Tagged => format!("[{rank}]<{}>:", stream.name()),
        OutputFormat::Timestamped => {
            format!("{} [{rank}]<{}>:", format_rfc3339_millis(SystemTime::now()), stream.name())
        }
        OutputFormat::Raw => String::new(),
    }
}

/// Writes all of `text`. The error is an `errno`. If another program has made the terminal or pipe non-blocking, this
/// function waits while the terminal or pipe is full.
fn write_all(out: &mut impl Write, mut text: &[u8]) -> Result<(), i32> {
    loop {
        let result = if text.is_empty() { out.flush().map(|()| 0) } else { out.write(text) };
        match result {
            Ok(0) if text.is_empty() => return Ok(()),
            Ok(0) => return Err(Errno::IO.raw_os_error()),
            Ok(count) => text = &text[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(FULL_OUTPUT_PAUSE),
            Err(error) => return Err(error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_formatted_with_and_without_tags() {
        for (format, end, expected) in [
            (OutputFormat::Tagged, LineEnd::Newline, "[3]<stderr>:hello\n"),
            (OutputFormat::Tagged, LineEnd::Unfinished, "[3]<stderr>:hello\n"),
            (OutputFormat::Raw, LineEnd::Newline, "hello\n"),
            (OutputFormat::Raw, LineEnd::Unfinished, "hello"),
        ] {
            let mut text = Vec::new();
            let writer = TerminalWriter::new((format, LaunchMessage::to_text));
            writer.format_line(&mut text, Rank::new(3), OutputStream::Stderr, b"hello", end);
            assert_eq!(text, expected.as_bytes());
        }
        let mut text = Vec::new();
        let writer = TerminalWriter::new((OutputFormat::Timestamped, LaunchMessage::to_text));
        let before = SystemTime::now();
        writer.format_line(&mut text, Rank::new(3), OutputStream::Stdout, b"hello", LineEnd::Newline);
        let text = String::from_utf8(text).unwrap();
        let (time, line) = text.split_once(' ').unwrap();
        // The text has whole milliseconds.
        let passed = humantime::parse_rfc3339(time).unwrap() + Duration::from_millis(1);
        assert!(passed.duration_since(before).unwrap() < Duration::from_mins(1), "{text}");
        assert_eq!(line, "[3]<stdout>:hello\n");
    }

    #[test]
    fn a_progress_bar_fits_into_the_terminal_together_with_the_tag() {
        assert_eq!(progress_bar_columns(80, OutputFormat::Tagged), 80 - "[0]<stderr>:".len() as u16 - 1);
        assert_eq!(
            (progress_bar_columns(80, OutputFormat::Raw), progress_bar_columns(3, OutputFormat::Tagged)),
            (79, 1)
        );
    }
}
