//! Reads the rows of a table from a file.

use std::io::{self, Chain, Cursor, Read};
use std::path::{Path, PathBuf};

use csv::ByteRecord;

use super::dialect::{Separator, detect_separator, mark_length};
use crate::train::data::DataError;
use crate::train::data::file::{open, stream_error};

/// The size in bytes of the beginning of a file from which the separator and the kinds of the columns are chosen. More is read if
/// this part does not hold the first two rows.
const START_BYTES: u64 = 1 << 18;
/// The maximum size in bytes of a row. A quotation mark that is never closed makes the rest of the file one row.
const ROW_BYTES_MAX: u64 = 1 << 26;
/// The size in bytes of the buffer from which rows are parsed.
const BUFFER_BYTES: usize = 1 << 18;

/// The rows of a file.
pub(crate) struct Records {
    path: PathBuf,
    reader: csv::Reader<RowLimit>,
    /// The current row.
    row: ByteRecord,
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
        let mut rest = open(path)?;
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
        let input = RowLimit { input: Cursor::new(start).chain(rest), bytes_since_row: 0 };
        let reader = configure(separator).buffer_capacity(BUFFER_BYTES).from_reader(input);
        Ok(Self { path: path.to_owned(), reader, row: ByteRecord::new(), separator, sample })
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
        self.reader.get_mut().bytes_since_row = 0;
        self.reader.read_byte_record(&mut self.row).map_err(|error| self.convert(error))
    }

    /// Returns the current row.
    pub(crate) fn row(&self) -> &ByteRecord {
        &self.row
    }

    /// Returns the number of the line in which the current row begins, counted from 1.
    pub(crate) fn line(&self) -> u64 {
        self.row.position().map_or(0, csv::Position::line)
    }

    /// Returns an error if the current row does not have `wanted` cells.
    pub(crate) fn check_length(&self, wanted: usize) -> Result<(), DataError> {
        let found = self.row.len();
        if found == wanted {
            return Ok(());
        }
        let several_lines = self.row.iter().any(|cell| cell.contains(&b'\n') || cell.contains(&b'\r'));
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

/// A reader of the content of a file. Reading returns an error if a row has more than [`ROW_BYTES_MAX`] bytes.
struct RowLimit {
    input: Chain<Cursor<Vec<u8>>, Box<dyn Read>>,
    /// The number of bytes that were read since the last call of [`Records::advance`].
    bytes_since_row: u64,
}

impl Read for RowLimit {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.bytes_since_row > ROW_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let count = self.input.read(buffer)?;
        self.bytes_since_row += count as u64;
        Ok(count)
    }
}
