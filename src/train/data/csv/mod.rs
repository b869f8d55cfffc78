//! Reads tables of cells that are separated by a character, with or without a header.

mod cells;
mod dialect;
mod options;
mod records;
mod row_blocks;

use std::io::Read;
use std::path::{Path, PathBuf};

use csv::ByteRecord;

use self::cells::{column_kind, is_certainly_data, looks_like_data};
pub(crate) use self::cells::{is_missing, parse_number, spellings_of_missing_values};
pub use self::dialect::Separator;
pub use self::options::{HeaderRow, TableOptions};
pub(crate) use self::options::{find_column, is_column_number};
pub(crate) use self::records::Records;
use super::file::open_data_file;
use super::rows_of_rank::RowsOfRank;
use super::{BlocksOfRank, DataError};
use crate::types::counted;

/// The maximum number of rows of data from which the kinds of the columns are chosen.
const KIND_DETECTION_ROWS: usize = 1000;

/// The files of a table, in reading order.
pub(crate) struct TableFiles<'a> {
    /// The path of each file. The path of standard input appears only in messages.
    pub(crate) paths: &'a [PathBuf],
    /// The number of files that hold the training set. The files after these hold the test set.
    pub(crate) train_file_count: usize,
    /// If one of the files is standard input: its index in `paths`, and its content.
    pub(crate) standard_input: Option<(usize, &'a mut dyn Read)>,
}

impl TableFiles<'_> {
    /// Opens a file. Returns its path and its content.
    fn open(&mut self, index: usize) -> Result<(&Path, Box<dyn Read + '_>), DataError> {
        let path = self.paths[index].as_path();
        match &mut self.standard_input {
            Some((standard_input, content)) if *standard_input == index => Ok((path, Box::new(content))),
            _ => Ok((path, open_data_file(path)?)),
        }
    }
}

/// Reads the rows of a table that belong to `share`, from one or more files with the same columns. `target` is the name
/// or the number of the column to predict. Leaves out rows without a target. If there is a `stream_directory`, the values of
/// the features are stored in a file in this directory.
///
/// The first rows decide whether a column holds numbers or text ([`TableOptions::categorical`] overrides this). A
/// text in a column of numbers is an error, so that damaged cells are noticed.
///
/// # Errors
///
/// If the fault is in one line or column, the message names this line or column. Possible errors:
///
/// - A file cannot be read, is empty, or is not UTF-8 text.
/// - The target or a column that an option names does not exist.
/// - Rows have different numbers of cells, or a cell of a column of numbers is not a finite number.
/// - A value is missing, and [`TableOptions::missing`] is
///   [`MissingPolicy::Error`](super::MissingPolicy::Error).
/// - The first row looks like data, but may be a header.
/// - The files have different columns.
pub(crate) fn read_rows_of_rank(
    mut files: TableFiles<'_>,
    target: &str,
    options: &TableOptions,
    (share, stream_directory): (BlocksOfRank, Option<&Path>),
) -> Result<RowsOfRank, DataError> {
    let Some((first, more)) = files.paths.split_first() else {
        return Err(DataError::Unsuitable("the table has no files".into()));
    };
    let train_file_count = files.train_file_count;
    let mut records =
        Records::for_rank(files.open(0)?, options.separator, KIND_DETECTION_ROWS + 1, (share, 0))?;
    records.advance_to_first_row()?;
    let mut table = begin_table((first, more.len()), &records, target, (options, share, stream_directory))?;
    let has_header = table.has_header;
    read_file(&mut table, &mut records, has_header)?;
    drop(records);
    for index in 1..files.paths.len() {
        if index == train_file_count {
            table.begin_test_set();
        }
        let mut records =
            Records::for_rank(files.open(index)?, options.separator, 0, (share, table.block_count()))?;
        records.advance_to_first_row()?;
        if has_header {
            check_header(&records, table.column_names(), first)?;
        }
        read_file(&mut table, &mut records, has_header)?;
    }
    Ok(table)
}

/// Creates a table without rows, and chooses the role of each column. `files` holds the path of the first file and the
/// number of files after it. The current row of `records` is the first row of the first file.
fn begin_table(
    files: (&Path, usize),
    records: &Records<'_>,
    target: &str,
    (options, share, stream_directory): (&TableOptions, BlocksOfRank, Option<&Path>),
) -> Result<RowsOfRank, DataError> {
    let by_number = |first: &ByteRecord| options.name_columns_by_number(target, first);
    let has_header = detect_header(records, options.header, by_number)?;
    let names = read_header(records, has_header)?;
    let data_rows = &records.first_rows()[usize::from(has_header).min(records.first_rows().len())..];
    let roles = options.column_roles(&names, target, |index| column_kind(data_rows, index));
    let roles = roles.map_err(|problem| {
        let separator = records.separator();
        let hint = format!("; the separator is {separator} (to choose another one, pass --separator)");
        records.error(if names.len() < 2 { problem + &hint } else { problem })
    })?;
    let last = names.len() - 1;
    let mut table = RowsOfRank::new(files, (names, roles), options.missing, (share, stream_directory))?;
    table.has_header = has_header;
    if !has_header && options.header == HeaderRow::Expected {
        table.notes.push(format!(
            "the first row holds data, so the table has no header, and its columns have the numbers 0 to {last} (if the first row \
             holds the names of the columns, pass --header)"
        ));
    }
    Ok(table)
}

/// Reads the rows of a file. The current row of `records` is the first row of the file. If `has_header` is true, the
/// first row holds the names of the columns.
fn read_file(table: &mut RowsOfRank, records: &mut Records<'_>, has_header: bool) -> Result<(), DataError> {
    // All ranks read the first row of the file, but its block belongs to only one rank.
    if !has_header && table.share().contains(records.block()) {
        table.add_current_row(records, records.block())?;
    }
    while records.advance()? {
        table.add_current_row(records, records.block())?;
    }
    let fingerprint = records.fingerprint();
    let blocks = records.first_block_of_next_file();
    table.end_file(blocks, [fingerprint.bytes, fingerprint.checksum].map(u64::to_le_bytes).as_flattened());
    Ok(())
}

/// Returns whether the first row holds the names of the columns. `names_by_number` returns whether the user's options allow
/// that this row is data, because no option names a column by a text of the row. The current row of `records` must be
/// the first row of the file.
pub(crate) fn detect_header(
    records: &Records<'_>,
    header: HeaderRow,
    names_by_number: impl FnOnce(&ByteRecord) -> bool,
) -> Result<bool, DataError> {
    let (first, rows) = (records.row(), records.first_rows().get(1..).unwrap_or_default());
    match header {
        HeaderRow::Present => Ok(true),
        HeaderRow::Absent => Ok(false),
        HeaderRow::Expected if !looks_like_data(first, rows) => Ok(true),
        HeaderRow::Expected if is_certainly_data(first, rows) && names_by_number(first) => Ok(false),
        HeaderRow::Expected => Err(records.error(
            "the first row looks like data and not like a header: it holds numbers, or texts that occur again in the next rows; \
             pass --no-header if the file has no header, or --header if the first row holds the names of the columns",
        )),
    }
}

/// Returns the names of the columns: the cells of the first row, or 0, 1, 2 and so on if there is no header. The current
/// row of `records` must be the first row of the file.
pub(crate) fn read_header(records: &Records<'_>, has_header: bool) -> Result<Vec<String>, DataError> {
    if has_header {
        return header_names(records);
    }
    Ok((0..records.row().len()).map(|index| index.to_string()).collect())
}

/// Checks that the current row of `records` holds the names `wanted`, which are the names of the columns in
/// `first_file`.
pub(crate) fn check_header<'a>(
    records: &Records<'_>,
    wanted: impl ExactSizeIterator<Item = &'a str>,
    first_file: &Path,
) -> Result<(), DataError> {
    let names = header_names(records)?;
    let first_file = first_file.display();
    let hint = "the files of a table must have the same columns in the same order";
    if names.len() != wanted.len() {
        let (found, wanted) = (names.len(), wanted.len());
        return Err(
            records.error(format!("has {}, but {first_file} has {wanted}; {hint}", counted(found, "column")))
        );
    }
    match names.iter().zip(wanted).enumerate().find(|(_, (name, wanted))| name != wanted) {
        Some((index, (name, wanted))) => Err(records.error(format!(
            "line {}, column number {}: the name of the column is `{name}`, but in {first_file} it is `{wanted}`; {hint}",
            records.line(),
            index + 1
        ))),
        None => Ok(()),
    }
}

/// Returns the cells of the current row of `records` as names of columns.
fn header_names(records: &Records<'_>) -> Result<Vec<String>, DataError> {
    let name = |(index, cell): (usize, &[u8])| {
        let text = std::str::from_utf8(cell.trim_ascii()).map(str::to_owned);
        text.map_err(|_| {
            records.error(format!(
                "line {}, column number {}: the text is not UTF-8",
                records.line(),
                index + 1
            ))
        })
    };
    records.row().iter().enumerate().map(name).collect()
}

#[cfg(test)]
mod tests;
