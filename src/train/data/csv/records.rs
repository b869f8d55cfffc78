//! Reads the rows of a table from a file.

use std::io::{self, Chain, Cursor, Read};
use std::path::{Path, PathBuf};

use csv::ByteRecord;

use super::dialect::{Separator, detect_separator, mark_length};
use crate::train::data::DataError;
use crate::train::data::file::{open, stream_error};

/// The size in bytes of the beginning of a file from which the separator and the kinds of the columns are chosen.
/// More is read if this part does not hold the first two rows.
const START_BYTES: u64 = 1 << 18;
/// The maximum size in bytes of a row. A quotation mark that is never closed makes the rest of the file one row.
const ROW_BYTES_MAX: u64 = 1 << 26;
/// The size in bytes of the buffer from which rows are parsed.
const BUFFER_BYTES: usize = 1 << 18;

/// The rows of a file.
pub(crate) struct Records {
    path: PathBuf,
    reader: csv::Reader<RowInput>,
    /// The current row.
    row: ByteRecord,
    /// The number of the line in which the current row begins, counted from 1.
    line: u64,
    /// The separator of the cells.
    separator: Separator,
    /// The complete rows at the beginning of the file.
    sample: Vec<ByteRecord>,
}

impl Records {
    /// Opens a file, skips its byte-order mark, and chooses the separator unless `separator` is given. `sample_rows` is the
    /// maximum number of rows of [`sample`](Self::sample).
    pub(crate) fn open(
        path: &Path,
        separator: Option<Separator>,
        sample_rows: usize,
    ) -> Result<Self, DataError> {
        Self::from_reader(path, open(path)?, separator, sample_rows)
    }

    /// Does what [`open`](Self::open) does, but reads from `rest`. `path` is the name in errors.
    pub(crate) fn from_reader(
        path: &Path,
        mut rest: Box<dyn Read>,
        separator: Option<Separator>,
        sample_rows: usize,
    ) -> Result<Self, DataError> {
        let mut start = Vec::new();
        let mut next_bytes = START_BYTES;
        let (separator, sample) = loop {
            let is_first_part = start.is_empty();
            let read = rest.by_ref().take(next_bytes).read_to_end(&mut start);
            let whole = (read.map_err(|error| stream_error(path, error))? as u64) < next_bytes;
            if is_first_part {
                start.drain(..mark_length(path, &start)?);
            }
            let separator = separator.unwrap_or_else(|| detect_separator(path, &start, whole));
            let sample = read_sample(&start, separator, whole, sample_rows);
            // A header and a row of data are needed to recognise the header and the kinds of the columns.
            if whole || sample.len() >= sample_rows.min(2) || start.len() as u64 > 2 * ROW_BYTES_MAX {
                break (separator, sample);
            }
            next_bytes = start.len() as u64;
        };
        let input = RowInput::new(Cursor::new(start).chain(rest));
        let reader = configure(separator).buffer_capacity(BUFFER_BYTES).from_reader(input);
        Ok(Self { path: path.to_owned(), reader, row: ByteRecord::new(), line: 0, separator, sample })
    }

    /// Returns the separator of the cells.
    pub(crate) fn separator(&self) -> Separator {
        self.separator
    }

    /// Returns the complete rows at the beginning of the file. [`advance`](Self::advance) also goes through these
    /// rows.
    pub(crate) fn sample(&self) -> &[ByteRecord] {
        &self.sample
    }

    /// Reads the next row. Returns `false` at the end of the file. Skips empty lines.
    pub(crate) fn advance(&mut self) -> Result<bool, DataError> {
        let input = self.reader.get_mut();
        (input.bytes_since_row, input.ended_since_row) = (0, false);
        let found = self.reader.read_byte_record(&mut self.row).map_err(|error| self.convert(error))?;
        if found {
            // `position` is behind the row. The position of the row itself is in front of empty lines before the row.
            // At the end of the file, the last row may lack its line break.
            let row_lines = self.row.as_slice().split(|&byte| byte == b'\n').count() as u64;
            let after_row = u64::from(!self.reader.get_ref().ended_since_row);
            self.line = (self.reader.position().line() + 1).saturating_sub(row_lines + after_row);
        }
        Ok(found)
    }

    /// Returns the current row.
    pub(crate) fn row(&self) -> &ByteRecord {
        &self.row
    }

    /// Returns the number of the line in which the current row begins, counted from 1.
    pub(crate) fn line(&self) -> u64 {
        self.line
    }

    /// Returns an error if the current row does not have `wanted` cells.
    pub(crate) fn check_length(&self, wanted: usize) -> Result<(), DataError> {
        let found = self.row.len();
        if found == wanted {
            return Ok(());
        }
        let several_lines = self.row.as_slice().contains(&b'\n');
        let hint = if several_lines {
            "; a cell of this row contains a line break, so a quotation mark may be missing".to_owned()
        } else {
            format!("; the separator is {} (to choose another one, pass --separator)", self.separator)
        };
        Err(self
            .error(format!("line {} has {found} cells, but the first row has {wanted}{hint}", self.line())))
    }

    /// Returns an error that names this file and the problem.
    pub(crate) fn error(&self, problem: impl Into<String>) -> DataError {
        DataError::malformed(&self.path, problem)
    }

    fn convert(&self, error: csv::Error) -> DataError {
        let line = error.position().map_or(self.line(), csv::Position::line);
        match error.into_kind() {
            csv::ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => self.error(format!(
                "a row after line {line} has more than {ROW_BYTES_MAX} bytes; a quotation mark may be missing"
            )),
            csv::ErrorKind::Io(error) => stream_error(&self.path, error),
            kind => self.error(format!("line {line}: {kind:?}")),
        }
    }
}

/// Returns the settings of the CSV reader.
fn configure(separator: Separator) -> csv::ReaderBuilder {
    let mut builder = csv::ReaderBuilder::new();
    builder.delimiter(separator.byte()).flexible(true).has_headers(false);
    builder
}

/// Returns up to `rows_max` rows at the beginning of a file. `whole` says whether `start` is the whole file. If not,
/// leaves out the last row of `start`, which may be incomplete.
fn read_sample(start: &[u8], separator: Separator, whole: bool, rows_max: usize) -> Vec<ByteRecord> {
    let mut rows: Vec<ByteRecord> = configure(separator)
        .from_reader(start)
        .into_byte_records()
        .take(rows_max + 1)
        .map_while(Result::ok)
        .collect();
    if rows.len() > rows_max || !whole {
        rows.pop();
    }
    rows
}

/// A reader of the content of a file with LF at the end of each line. In the file, lines may end in CR LF, CR or LF.
/// Reading returns an error if a row has more than [`ROW_BYTES_MAX`] bytes.
struct RowInput {
    input: Chain<Cursor<Vec<u8>>, Box<dyn Read>>,
    /// Whether the last byte of `input` was a CR. An LF that follows belongs to the same end of line.
    after_cr: bool,
    /// The number of bytes that were read since the last call of [`Records::advance`].
    bytes_since_row: u64,
    /// Whether the end of the file was reached since the last call of [`Records::advance`].
    ended_since_row: bool,
}

impl RowInput {
    fn new(input: Chain<Cursor<Vec<u8>>, Box<dyn Read>>) -> Self {
        Self { input, after_cr: false, bytes_since_row: 0, ended_since_row: false }
    }

    /// Replaces CR LF and CR by LF. Returns the new number of bytes.
    fn unify_line_ends(&mut self, bytes: &mut [u8]) -> usize {
        if !self.after_cr && !bytes.contains(&b'\r') {
            return bytes.len();
        }
        let mut len = 0;
        for index in 0..bytes.len() {
            let byte = bytes[index];
            if !(byte == b'\n' && self.after_cr) {
                bytes[len] = if byte == b'\r' { b'\n' } else { byte };
                len += 1;
            }
            self.after_cr = byte == b'\r';
        }
        len
    }
}

impl Read for RowInput {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.bytes_since_row > ROW_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        loop {
            let count = self.input.read(buffer)?;
            self.bytes_since_row += count as u64;
            self.ended_since_row |= count == 0 && !buffer.is_empty();
            let len = self.unify_line_ends(&mut buffer[..count]);
            // An LF after a CR was the only byte, so there is nothing to return yet.
            if len > 0 || count == 0 {
                return Ok(len);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: before the fix, only LF counted as the end of a line, and the empty lines before a row counted as a
    /// part of the row.
    #[test]
    fn rows_begin_in_the_line_that_editors_show() {
        let text = "\na,b\n1,2\n\n\n3,\"4\n5\n\"\n6,7\n\n8,\"9\n\n";
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.csv");
        for (line_end, end) in
            ["\n", "\r\n", "\r"].into_iter().flat_map(|line_end| [(line_end, ""), (line_end, "0")])
        {
            let mark = if end.is_empty() { "" } else { "\u{feff}" };
            std::fs::write(&path, format!("{mark}{text}{end}").replace('\n', line_end)).unwrap();
            let mut records = Records::open(&path, None, 0).unwrap();
            let mut rows = Vec::new();
            while records.advance().unwrap() {
                let cells: Vec<_> = records.row().iter().map(String::from_utf8_lossy).collect();
                rows.push((records.line(), cells.join(",")));
            }
            let last = format!("8,9\n\n{end}");
            let expected = [(2, "a,b"), (3, "1,2"), (6, "3,4\n5\n"), (9, "6,7"), (11, last.as_str())]
                .map(|(line, row)| (line, row.to_owned()));
            assert_eq!(rows, expected, "{line_end:?} {end:?}");
        }
        std::fs::write(&path, "a,b\r\n\r\n1,2").unwrap();
        let mut records = Records::open(&path, None, 0).unwrap();
        while records.advance().unwrap() {}
        assert_eq!(records.line(), 3);
    }

    /// A CR at the end of a part of the file and the LF in the next part are one line end.
    #[test]
    fn line_ends_are_unified_across_reads() {
        let text = b"a\r\n\r\rb\n\nc\r\n";
        for part in 1..text.len() {
            let mut input =
                RowInput::new(Cursor::new(text.to_vec()).chain(Box::new(io::empty()) as Box<dyn Read>));
            let mut found = Vec::new();
            let mut buffer = vec![0; part];
            loop {
                let count = input.read(&mut buffer).unwrap();
                if count == 0 {
                    break;
                }
                found.extend_from_slice(&buffer[..count]);
            }
            assert_eq!(found, b"a\n\n\nb\n\nc\n", "{part}");
        }
    }
}
