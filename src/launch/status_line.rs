//! The status line at the bottom of ringrun's terminal. It shows the unfinished line of rank 0's standard error, for
//! example a progress bar.
//!
//! A program replaces its unfinished line by writing a carriage return and a new text. ringrun shows only the newest
//! text. To print a line of any rank, ringrun erases the status line, prints the line, and writes the status line
//! again.

use std::io;
use std::io::IsTerminal as _;

use rustix::termios::tcgetwinsize;

/// The environment variable that tells rank 0 the width of the status line in characters. ringrun sets the variable
/// only if its own standard error is a terminal.
pub const STATUS_COLUMNS_VARIABLE: &str = "RING_STATUS_COLUMNS";

/// The width in characters that ringrun assumes if the terminal does not report its width.
const COLUMNS_DEFAULT: u16 = 80;

/// The status line shows at most this number of bytes of the newest text.
const STATUS_BYTES_MAX: usize = 4096;

/// Moves the cursor to the start of its line, and erases this line.
const ERASE_LINE: &[u8] = b"\r\x1b[K";

/// The status line of a terminal.
#[derive(Default, Debug)]
pub(super) struct StatusLine {
    /// The text that the terminal shows in the status line.
    shown: Vec<u8>,
}

impl StatusLine {
    /// Replaces the status line by `text`. Returns the bytes to write to the terminal.
    pub(super) fn replace(&mut self, text: &str) -> Vec<u8> {
        if self.shown == text.as_bytes() {
            return Vec::new();
        }
        self.shown = text.as_bytes().to_vec();
        [ERASE_LINE, &self.shown].concat()
    }

    /// Returns the bytes that erase the status line, and the bytes that write the status line again. If the status
    /// line is empty, returns two empty slices.
    pub(super) fn erase_and_rewrite(&self) -> (&[u8], &[u8]) {
        if self.shown.is_empty() { (b"", b"") } else { (ERASE_LINE, &self.shown) }
    }
}

/// Returns the width in characters of the terminal that is ringrun's standard error. Returns `None` if standard error
/// is not a terminal.
pub(super) fn terminal_columns() -> Option<u16> {
    let stderr = io::stderr();
    let columns = || tcgetwinsize(&stderr).map_or(0, |size| size.ws_col);
    stderr.is_terminal().then(|| Some(columns()).filter(|&columns| columns > 0).unwrap_or(COLUMNS_DEFAULT))
}

/// Returns the text of the status line for an unfinished line: `prefix` and the newest text of the line, cut so that
/// both fit into `columns` characters. Returns an empty text if the line has no carriage return or its newest text is
/// invisible.
pub(super) fn status_text(unfinished: &[u8], prefix: &str, columns: u16) -> String {
    if !unfinished.contains(&b'\r') {
        return String::new();
    }
    let last = last_nonempty_text(unfinished);
    let text = visible_text(&last[..last.len().min(STATUS_BYTES_MAX)]);
    if text.is_empty() {
        return text;
    }
    // Leave the last column free, because a terminal may wrap a line that fills this column.
    let width = usize::from(columns).saturating_sub(1);
    prefix.chars().chain(text.chars()).take(width).collect()
}

/// Returns the newest text of a finished line: the last nonempty text between carriage returns. Returns `None` if the
/// line has carriage returns and its newest text is invisible.
pub(super) fn text_of_finished_line(line: &[u8]) -> Option<&[u8]> {
    if !line.contains(&b'\r') {
        return Some(line);
    }
    let last = last_nonempty_text(line);
    (last.len() > STATUS_BYTES_MAX || !visible_text(last).is_empty()).then_some(last)
}

/// Returns how many bytes at the beginning of an unfinished line were replaced by later text.
pub(super) fn count_replaced_bytes(unfinished: &[u8]) -> usize {
    let start = last_nonempty_text(unfinished).as_ptr().addr() - unfinished.as_ptr().addr();
    // Keep the carriage return before the newest text, as a mark that this text replaced another text.
    start.saturating_sub(1)
}

/// Returns the last nonempty text between carriage returns, or an empty text if there is none.
fn last_nonempty_text(line: &[u8]) -> &[u8] {
    let end = line.iter().rposition(|&byte| byte != b'\r').map_or(0, |index| index + 1);
    let start = line[..end].iter().rposition(|&byte| byte == b'\r').map_or(0, |index| index + 1);
    &line[start..end]
}

/// Returns the visible characters of a text: without control characters, control sequences and spaces at the end.
fn visible_text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut characters = text.chars().peekable();
    let mut visible = String::new();
    while let Some(character) = characters.next() {
        if character == '\x1b' && characters.next_if_eq(&'[').is_some() {
            // A control sequence ends with a character of this range (ECMA-48, 5.4).
            characters.by_ref().find(|character| ('@'..='~').contains(character));
        } else if !character.is_control() {
            visible.push(character);
        }
    }
    visible.truncate(visible.trim_end().len());
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_line_shows_the_newest_text() {
        for (unfinished, expected) in [
            ("", ""),
            ("a prompt: ", ""),
            ("\r 10%", "[0]: 10%"),
            ("\r 10%\r 20%|##  |", "[0]: 20%|##  |"),
            (" 10%\r 20%\r", "[0]: 20%"),
            ("\r\x1b[K\x1b[32m 30%\x1b[0m  ", "[0]: 30%"),
            ("\r\x1b[K", ""),
            ("\r\r\r", ""),
            ("\r██████████████████████████████", "[0]:███████████████"),
        ] {
            assert_eq!(status_text(unfinished.as_bytes(), "[0]:", 20), expected, "{unfinished:?}");
        }
        assert_eq!(status_text(b"\rabc\xff", "", 2), "a");
        assert_eq!(status_text(b"\rabc", "", 0), "");
    }

    #[test]
    fn replaced_text_is_removed_from_lines() {
        for (line, expected) in [
            ("plain", Some("plain")),
            ("", Some("")),
            ("windows\r", Some("windows")),
            ("\r 10%\r100%", Some("100%")),
            ("\r 10%\r\x1b[K", None),
            ("\r", None),
        ] {
            assert_eq!(text_of_finished_line(line.as_bytes()), expected.map(str::as_bytes), "{line:?}");
        }
    }

    /// If ringrun kept replaced text, a progress bar would fill the memory in a long run, and ringrun would print
    /// pieces of the bar as lines.
    #[test]
    fn the_memory_of_an_unfinished_line_stays_small() {
        let mut unfinished = b"begin".to_vec();
        for step in 0..1000 {
            unfinished.extend_from_slice(format!("\rstep {step}").as_bytes());
            unfinished.drain(..count_replaced_bytes(&unfinished));
            assert_eq!(status_text(&unfinished, "", 80), format!("step {step}"));
            assert!(unfinished.len() < 20, "{unfinished:?}");
        }
        assert_eq!(count_replaced_bytes(b"no carriage return"), 0);
        assert_eq!(count_replaced_bytes(b""), 0);
        assert_eq!(count_replaced_bytes(b"abc\r"), 0);
    }

    #[test]
    fn the_status_line_is_written_again_after_output() {
        let mut status = StatusLine::default();
        assert_eq!(status.erase_and_rewrite(), (&b""[..], &b""[..]));
        assert_eq!(status.replace("50%"), b"\r\x1b[K50%");
        assert_eq!(status.replace("50%"), b"");
        assert_eq!(status.erase_and_rewrite(), (&b"\r\x1b[K"[..], &b"50%"[..]));
        assert_eq!(status.replace(""), b"\r\x1b[K");
        assert_eq!(status.erase_and_rewrite(), (&b""[..], &b""[..]));
    }
}
