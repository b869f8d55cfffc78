//! Reads the rows of a table from a file of text.

use std::io::{self, Chain, Cursor, Read};
use std::path::{Path, PathBuf};

use csv::ByteRecord;

use super::dialect::{Separator, byte_order_mark_length, detect_separator};
use super::row_blocks::{FileFingerprint, ROW_BYTES_MAX, RowFilter};
use crate::train::data::file::{open_data_file, stream_error};
use crate::train::data::row_cursor::{Cell, RowCursor, RowPlace};
use crate::train::data::standard_input::is_standard_input;
use crate::train::data::{BlocksOfRank, DataError};

/// The separator and the kinds of the columns are chosen from this number of bytes at the beginning of a file. If these bytes
/// do not hold two complete rows, more bytes are used.
const FILE_START_BYTES: u64 = 1 << 18;
/// The size in bytes of the buffer from which rows are parsed.
const BUFFER_BYTES: usize = 1 << 18;

/// Reads the rows of a file of text one after the other. [`advance`](Self::advance) reads the next row, which becomes the current
/// row.
pub(crate) struct Records<'a> {
    path: PathBuf,
    reader: csv::Reader<RowFilter<LineEndConverter<'a>>>,
    /// The current row.
    row: ByteRecord,
    /// The number of the line in which the current row begins, counted from 1.
    line: u64,
    /// The number of the block of the current row; see the module `row_blocks`.
    block: usize,
    /// Whether the next call of `advance` keeps the current row.
    keeps_row: bool,
    /// The separator of the cells.
    separator: Separator,
    /// Copies of the first rows of the file.
    first_rows: Vec<ByteRecord>,
}

impl<'a> Records<'a> {
    /// Opens a file and skips its byte-order mark. If `separator` is `None`, chooses the separator from the first rows.
    /// [`first_rows`](Self::first_rows) will return at most `first_rows_max` rows.
    pub(crate) fn open(
        path: &Path,
        separator: Option<Separator>,
        first_rows_max: usize,
    ) -> Result<Self, DataError> {
        Self::from_reader(path, open_data_file(path)?, separator, first_rows_max)
    }

    /// Does what [`open`](Self::open) does, but reads the content of the file from `input`. Errors name the file `path`.
    pub(crate) fn from_reader(
        path: &Path,
        input: Box<dyn Read + 'a>,
        separator: Option<Separator>,
        first_rows_max: usize,
    ) -> Result<Self, DataError> {
        Self::for_rank((path, input), separator, first_rows_max, (BlocksOfRank::ALL, 0))
    }

    /// Does what [`from_reader`](Self::from_reader) does, but [`advance`](Self::advance) reads only the first row and the
    /// rows in the blocks of `share`. `first_block` is the number of the first block of this file.
    pub(crate) fn for_rank(
        (path, mut rest): (&Path, Box<dyn Read + 'a>),
        separator: Option<Separator>,
        first_rows_max: usize,
        (share, first_block): (BlocksOfRank, usize),
    ) -> Result<Self, DataError> {
        let mut start = Vec::new();
        let mut next_bytes = FILE_START_BYTES;
        let (separator, first_rows) = loop {
            let is_first_part = start.is_empty();
            let read = rest.by_ref().take(next_bytes).read_to_end(&mut start);
            let is_whole_file = (read.map_err(|error| stream_error(path, error))? as u64) < next_bytes;
            if is_first_part {
                start.drain(..byte_order_mark_length(path, &start)?);
            }
            let separator = separator.unwrap_or_else(|| detect_separator(path, &start, is_whole_file));
            let first_rows = read_first_rows(&start, separator, is_whole_file, first_rows_max);
            // At least two rows are needed to recognise a header and the kinds of the columns.
            if is_whole_file
                || first_rows.len() >= first_rows_max.min(2)
                || start.len() as u64 > 2 * ROW_BYTES_MAX
            {
                break (separator, first_rows);
            }
            next_bytes = start.len() as u64;
        };
        let input = LineEndConverter::new(Cursor::new(start).chain(rest));
        let input = RowFilter::new(input, separator.byte(), share, first_block);
        let reader = csv_reader_builder(separator).buffer_capacity(BUFFER_BYTES).from_reader(input);
        Ok(Self {
            path: path.to_owned(),
            reader,
            row: ByteRecord::new(),
            line: 0,
            block: first_block,
            keeps_row: false,
            separator,
            first_rows,
        })
    }

    /// Returns the separator of the cells.
    pub(crate) fn separator(&self) -> Separator {
        self.separator
    }

    /// Returns copies of the first rows of the file, which [`advance`](Self::advance) will also read.
    pub(crate) fn first_rows(&self) -> &[ByteRecord] {
        &self.first_rows
    }

    /// Reads the next row. Returns `false` at the end of the file. Skips empty lines.
    pub(crate) fn advance(&mut self) -> Result<bool, DataError> {
        if std::mem::take(&mut self.keeps_row) {
            return Ok(true);
        }
        self.reader.get_mut().has_ended = false;
        let found =
            self.reader.read_byte_record(&mut self.row).map_err(|error| self.convert_csv_error(error))?;
        if found {
            // The line of the row is computed from the end of the row, because `row.position()` is the position before
            // empty lines that the reader has skipped. The last row of a file may have no line break.
            let row_lines = self.row.as_slice().split(|&byte| byte == b'\n').count() as u64;
            let after_row = u64::from(!self.reader.get_ref().has_ended);
            let line = (self.reader.position().line() + 1).saturating_sub(row_lines + after_row);
            (self.line, self.block) = self.reader.get_mut().line_and_block_of_row(line);
        }
        Ok(found)
    }

    /// Reads the first row. Returns an error if the file has no rows.
    pub(crate) fn advance_to_first_row(&mut self) -> Result<(), DataError> {
        if self.advance()? {
            return Ok(());
        }
        let hint = if is_standard_input(&self.path) {
            "; pipe a table into it, as in `ringrun -n 4 ringtrain --data - --target y < a.csv`"
        } else {
            ""
        };
        Err(self.error(format!("is empty{hint}")))
    }

    /// Makes the next call of [`advance`](Self::advance) return the current row again.
    pub(crate) fn keep_row(&mut self) {
        self.keeps_row = true;
    }

    /// Returns the current row.
    pub(crate) fn row(&self) -> &ByteRecord {
        &self.row
    }

    /// Returns the number of the line in which the current row begins, counted from 1.
    pub(crate) fn line(&self) -> u64 {
        self.line
    }

    /// Returns the number of the block of the current row.
    pub(crate) fn block(&self) -> usize {
        self.block
    }

    /// Returns the number of the first block of the next file. The caller must have read all rows of this file.
    pub(crate) fn first_block_of_next_file(&self) -> usize {
        self.reader.get_ref().first_block_of_next_file()
    }

    /// Returns the length and the checksum of the file. The caller must have read all rows of this file.
    pub(crate) fn fingerprint(&self) -> FileFingerprint {
        self.reader.get_ref().fingerprint()
    }

    /// Returns an error if the current row does not have `wanted` cells.
    pub(crate) fn check_cell_count(&self, wanted: usize) -> Result<(), DataError> {
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

    /// Converts an error of the crate `csv` to an error that names the file and the line.
    fn convert_csv_error(&self, error: csv::Error) -> DataError {
        let line = error.position().map_or(self.line(), csv::Position::line);
        match error.into_kind() {
            csv::ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => self.error(format!(
                "the row that begins in line {} has more than {ROW_BYTES_MAX} bytes; a quotation mark may be missing",
                self.reader.get_ref().long_row_line()
            )),
            csv::ErrorKind::Io(error) => stream_error(&self.path, error),
            kind => self.error(format!("line {line}: {kind:?}")),
        }
    }
}

impl RowCursor for Records<'_> {
    fn advance(&mut self) -> Result<bool, DataError> {
        self.advance()
    }

    fn check_cell_count(&self, wanted: usize) -> Result<(), DataError> {
        self.check_cell_count(wanted)
    }

    fn cell(&self, column: usize) -> Cell<'_> {
        Cell::from_text(&self.row[column])
    }

    fn place(&self) -> RowPlace {
        RowPlace::Line(self.line)
    }

    fn error(&self, problem: String) -> DataError {
        self.error(problem)
    }
}

/// Returns a builder of CSV readers for rows of any number of cells, which `separator` separates.
fn csv_reader_builder(separator: Separator) -> csv::ReaderBuilder {
    let mut builder = csv::ReaderBuilder::new();
    builder.delimiter(separator.byte()).flexible(true).has_headers(false);
    builder
}

/// Returns up to `rows_max` rows at the beginning of a file. If `start` is not the whole file, leaves out the last row of
/// `start`, which may be incomplete.
fn read_first_rows(
    start: &[u8],
    separator: Separator,
    is_whole_file: bool,
    rows_max: usize,
) -> Vec<ByteRecord> {
    let mut rows: Vec<ByteRecord> = csv_reader_builder(separator)
        .from_reader(start)
        .into_byte_records()
        .take(rows_max + 1)
        .map_while(Result::ok)
        .collect();
    if rows.len() > rows_max || !is_whole_file {
        rows.pop();
    }
    rows
}

/// A reader that replaces the line ends CR LF and CR by LF.
struct LineEndConverter<'a> {
    /// The beginning of the file, which was already read to choose the separator, and the rest of the file.
    input: Chain<Cursor<Vec<u8>>, Box<dyn Read + 'a>>,
    /// Whether the last byte from `input` was a CR. An LF directly after a CR is skipped.
    after_cr: bool,
}

impl<'a> LineEndConverter<'a> {
    fn new(input: Chain<Cursor<Vec<u8>>, Box<dyn Read + 'a>>) -> Self {
        Self { input, after_cr: false }
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

impl Read for LineEndConverter<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.input.read(buffer)?;
            let len = self.unify_line_ends(&mut buffer[..count]);
            // If the only byte was a skipped LF, more bytes are read, because a result of 0 would mean the end of the
            // file.
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
    fn rows_have_the_line_numbers_that_editors_show() {
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

    /// A CR LF is one line end even if a read ends between the CR and the LF.
    #[test]
    fn line_ends_are_unified_across_reads() {
        let text = b"a\r\n\r\rb\n\nc\r\n";
        for part in 1..text.len() {
            let mut input = LineEndConverter::new(
                Cursor::new(text.to_vec()).chain(Box::new(io::empty()) as Box<dyn Read>),
            );
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
