//! Splits the output of a rank into lines, and keeps the last lines of each rank. This module uses no file descriptor
//! and no thread.

use std::collections::VecDeque;

use super::status_line::count_replaced_bytes;

/// The maximal length in bytes of a line that is printed in one piece. Longer lines are printed in pieces, so that a
/// rank that never ends its line cannot exhaust the memory.
pub(super) const LINE_BYTES_MAX: usize = 16 << 20;

/// The maximal total size, in bytes, of the unfinished lines of all ranks. If their total size is larger,
/// unfinished lines longer than [`ALWAYS_WHOLE_LINE_BYTES`] are printed in pieces.
pub(super) const UNFINISHED_LINES_BYTES_MAX: usize = 256 << 20;

/// A line of at most this number of bytes is always printed in one piece.
pub(super) const ALWAYS_WHOLE_LINE_BYTES: usize = 64 << 10;
const _: () =
    assert!(ALWAYS_WHOLE_LINE_BYTES <= LINE_BYTES_MAX && LINE_BYTES_MAX <= UNFINISHED_LINES_BYTES_MAX);

/// The report at the end of a job shows at most this number of last lines of each rank.
const LAST_LINES_MAX: usize = 20;

/// The report at the end of a job shows at most this number of bytes of each line.
const LAST_LINE_BYTES_MAX: usize = 512;

/// How a line, or a piece of a long line, ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LineEnd {
    /// With a newline, which is not part of the piece.
    Newline,
    /// Without a newline: the line is too long, or the stream has ended.
    Unfinished,
}

/// Cuts a stream of bytes into lines.
#[derive(Default, Debug)]
pub(super) struct LineSplitter {
    /// The beginning of a line whose end has not arrived.
    unfinished: Vec<u8>,
}

impl LineSplitter {
    /// Adds bytes, and calls `emit` with each completed line. Splits lines longer than [`LINE_BYTES_MAX`].
    pub(super) fn push(&mut self, bytes: &[u8], emit: impl FnMut(&[u8], LineEnd)) {
        self.push_limited(bytes, LINE_BYTES_MAX, emit);
    }

    /// Returns the length of the unfinished line in bytes.
    pub(super) fn unfinished_bytes(&self) -> usize {
        self.unfinished.len()
    }

    /// Drops the beginning of the unfinished line that later text has replaced (see [`count_replaced_bytes`]), and
    /// returns the rest.
    pub(super) fn remove_replaced_text(&mut self) -> &[u8] {
        self.unfinished.drain(..count_replaced_bytes(&self.unfinished));
        &self.unfinished
    }

    /// Does the same as `push`, but splits lines longer than `limit` bytes.
    pub(super) fn push_limited(&mut self, bytes: &[u8], limit: usize, mut emit: impl FnMut(&[u8], LineEnd)) {
        let mut rest = bytes;
        while let Some(newline) = rest.iter().position(|&byte| byte == b'\n') {
            self.extend_line(&rest[..newline], limit, &mut emit);
            emit(&self.unfinished, LineEnd::Newline);
            self.clear_line();
            rest = &rest[newline + 1..];
        }
        self.extend_line(rest, limit, &mut emit);
    }

    /// Ends the stream: calls `emit` with the unfinished line, if there is one.
    pub(super) fn emit_unfinished_line(&mut self, mut emit: impl FnMut(&[u8], LineEnd)) {
        if !self.unfinished.is_empty() {
            emit(&self.unfinished, LineEnd::Unfinished);
            self.unfinished.clear();
        }
    }

    /// Adds bytes to the unfinished line. If the line is then longer than `limit` bytes, calls `emit` with each full
    /// piece of `limit` bytes. A line of exactly `limit` bytes is not split.
    fn extend_line(&mut self, mut part: &[u8], limit: usize, emit: &mut impl FnMut(&[u8], LineEnd)) {
        while self.unfinished.len() + part.len() > limit {
            let (fitting, rest) = part.split_at(limit.saturating_sub(self.unfinished.len()).min(part.len()));
            self.unfinished.extend_from_slice(fitting);
            emit(&self.unfinished, LineEnd::Unfinished);
            self.clear_line();
            part = rest;
        }
        self.unfinished.extend_from_slice(part);
    }

    /// Removes the unfinished line, and frees memory that a long line needed.
    fn clear_line(&mut self) {
        self.unfinished.clear();
        self.unfinished.shrink_to(ALWAYS_WHOLE_LINE_BYTES);
    }
}

/// The last lines of one rank, from both its streams.
#[derive(Default, Debug)]
pub(super) struct LastLines {
    lines: VecDeque<Vec<u8>>,
}

impl LastLines {
    /// Adds a line, and removes the oldest line if there are too many lines.
    pub(super) fn push(&mut self, line: &[u8]) {
        if self.lines.len() == LAST_LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line[..line.len().min(LAST_LINE_BYTES_MAX)].to_vec());
    }

    /// Returns the lines as text that is safe to print: replaces invalid UTF-8 and control characters.
    pub(super) fn into_text(self) -> Vec<String> {
        let printable = |line: Vec<u8>| {
            let text = String::from_utf8_lossy(&line);
            text.trim_end()
                .chars()
                .map(|c| if c.is_control() && c != '\t' { char::REPLACEMENT_CHARACTER } else { c })
                .collect()
        };
        self.lines.into_iter().map(printable).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_lines(parts: &[&[u8]]) -> Vec<(Vec<u8>, LineEnd)> {
        let mut found = Vec::new();
        let mut splitter = LineSplitter::default();
        for part in parts {
            splitter.push(part, |line, end| found.push((line.to_vec(), end)));
        }
        splitter.emit_unfinished_line(|line, end| found.push((line.to_vec(), end)));
        found
    }

    #[test]
    fn lines_do_not_depend_on_how_the_bytes_arrive() {
        let text = b"one\n\ntwo\xff\0\r\nthree";
        let expected: Vec<(Vec<u8>, LineEnd)> = vec![
            (b"one".to_vec(), LineEnd::Newline),
            (b"".to_vec(), LineEnd::Newline),
            (b"two\xff\0\r".to_vec(), LineEnd::Newline),
            (b"three".to_vec(), LineEnd::Unfinished),
        ];
        for size in 1..=text.len() {
            let parts: Vec<&[u8]> = text.chunks(size).collect();
            assert_eq!(split_lines(&parts), expected, "in parts of {size}");
        }
    }

    #[test]
    fn an_unfinished_line_above_a_new_limit_is_emitted_before_new_bytes() {
        let mut splitter = LineSplitter::default();
        let mut found = Vec::new();
        splitter.push(b"abcdef", |_, _| panic!("an unfinished line was emitted"));
        splitter.push_limited(b"gh\n", 4, |line, end| found.push((line.to_vec(), end)));
        assert_eq!(found, [(b"abcdef".to_vec(), LineEnd::Unfinished), (b"gh".to_vec(), LineEnd::Newline)]);
        assert_eq!(splitter.unfinished_bytes(), 0);
    }

    #[test]
    fn long_lines_are_split() {
        for (length, pieces) in [
            (LINE_BYTES_MAX - 1, vec![LINE_BYTES_MAX - 1]),
            (LINE_BYTES_MAX, vec![LINE_BYTES_MAX]),
            (LINE_BYTES_MAX + 1, vec![LINE_BYTES_MAX, 1]),
            (3 * LINE_BYTES_MAX + 7, vec![LINE_BYTES_MAX, LINE_BYTES_MAX, LINE_BYTES_MAX, 7]),
        ] {
            let mut text = vec![b'x'; length];
            text.push(b'\n');
            for size in [100_000, length + 1] {
                let found = split_lines(&text.chunks(size).collect::<Vec<_>>());
                assert_eq!(
                    found.iter().map(|(line, _)| line.len()).collect::<Vec<_>>(),
                    pieces,
                    "{length}, {size}"
                );
                assert_eq!(found.last().unwrap().1, LineEnd::Newline);
            }
        }
    }

    #[test]
    fn the_last_lines_have_a_limited_number_and_length_and_are_printable() {
        let mut last_lines = LastLines::default();
        for number in 0..100 {
            last_lines.push(format!("line {number}").as_bytes());
        }
        last_lines.push(b"\x1b[2J\xff tab\t \r");
        last_lines.push(&[b'y'; 10 * LAST_LINE_BYTES_MAX]);
        let lines = last_lines.into_text();
        assert_eq!(lines.len(), LAST_LINES_MAX);
        assert_eq!(lines[0], "line 82");
        assert_eq!(lines[18], "\u{fffd}[2J\u{fffd} tab");
        assert_eq!(lines[19].len(), LAST_LINE_BYTES_MAX);
    }
}
