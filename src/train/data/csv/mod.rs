//! Reads tables of cells that are separated by a character, with or without a header.

mod cells;
mod columns;
mod dialect;
mod options;
mod records;
mod row_blocks;

use std::path::{Path, PathBuf};

use csv::ByteRecord;
use sha2::{Digest, Sha256};

use self::cells::looks_like_data;
pub(crate) use self::cells::{is_missing, parse_number, spellings_of_missing_values};
use self::columns::ColumnValues;
pub use self::dialect::Separator;
pub(crate) use self::options::find_column;
pub use self::options::{HeaderRow, TableOptions};
pub(crate) use self::records::Records;
pub(crate) use self::row_blocks::BlocksOfRank;
use super::numbers::{NumberRange, merge_ranges};
use super::raw_table::RawTable;
use super::row_map::RowMap;
use super::texts::{TEXT_BYTES_MAX, TextBytesLeft};
use super::{DataError, ELEMENTS_MAX, MissingPolicy, TableLayout};
use crate::group::Group;
use crate::train::TrainError;
use crate::train::rank_checks::short_digest;
use crate::types::ReduceOp;

/// The maximum number of rows of data from which the kinds of the columns are chosen.
const KIND_DETECTION_ROWS: usize = 1000;
/// A message about missing values names at most this number of columns.
const MISSING_COLUMNS_SHOWN_MAX: usize = 8;

/// Reads the rows of a table that belong to `share`, from one or more files with the same columns. The first
/// `train_files` files hold the training set, and the other files hold the test set. `target` is the name or the
/// number of the column to predict. Leaves out rows without a target.
///
/// The first rows decide whether a column holds numbers or text ([`TableOptions::categorical`] overrides this). A
/// text in a column of numbers is an error, so that damaged cells are found.
///
/// # Errors
///
/// If the fault is in one line or column, the message names this line or column. Possible errors:
///
/// - The file cannot be read, is empty, or is not UTF-8 text.
/// - The target or a column that an option names does not exist.
/// - Rows have different lengths, or a cell of a column of numbers is not a finite number.
/// - A value is missing, and [`TableOptions::missing`] is [`MissingPolicy::Error`].
/// - The first row should be a header, but looks like data.
/// - The files have different columns.
pub(crate) fn read_rows_of_rank(
    (paths, train_files): (&[PathBuf], usize),
    target: &str,
    options: &TableOptions,
    share: BlocksOfRank,
) -> Result<RowsOfRank, DataError> {
    let Some((first, more)) = paths.split_first() else {
        return Err(DataError::Unsuitable("the table has no files".into()));
    };
    let mut records = Records::open_for_rank(first, options.separator, KIND_DETECTION_ROWS + 1, (share, 0))?;
    if !records.advance()? {
        return Err(records.error("is empty"));
    }
    let mut table = RowsOfRank::new((first, more.len()), &records, target, (options, share))?;
    let has_header = options.header != HeaderRow::Absent;
    table.read_file(&mut records, has_header)?;
    for (index, path) in more.iter().enumerate() {
        if index + 1 == train_files {
            table.first_test_block = Some(table.blocks);
        }
        let mut records = Records::open_for_rank(path, options.separator, 0, (share, table.blocks))?;
        if !records.advance()? {
            return Err(records.error("is empty"));
        }
        if has_header {
            check_header(&records, table.columns.iter().map(|column| column.name.as_str()), first)?;
        }
        table.read_file(&mut records, has_header)?;
    }
    Ok(table)
}

/// The rows of a table that one rank has read.
pub(crate) struct RowsOfRank {
    /// The first file.
    path: PathBuf,
    /// The number of further files.
    more_files: usize,
    share: BlocksOfRank,
    /// The number of blocks of all files, including the blocks of other ranks.
    blocks: usize,
    /// The number of the first block of the test set. `None` if the files hold only the training set.
    first_test_block: Option<usize>,
    /// For each block of this rank: the number of the block, and the number of its rows. Rows that were left out do
    /// not count.
    block_rows: Vec<(usize, u64)>,
    /// A hash of all files, including the rows of other ranks.
    content: Sha256,
    columns: Vec<ColumnValues>,
    /// The index of the target column.
    target: usize,
    missing: MissingPolicy,
    text_budget: TextBytesLeft,
    /// The number of rows, including those that were left out.
    rows: usize,
    /// The number of rows without a target.
    rows_without_target: usize,
    /// The number of rows that were left out because a feature is missing.
    rows_incomplete: usize,
}

impl RowsOfRank {
    /// Creates a table without rows, and chooses the role of each column. The current row of `records` is the first row
    /// of the file.
    fn new(
        (path, more_files): (&Path, usize),
        records: &Records,
        target: &str,
        (options, share): (&TableOptions, BlocksOfRank),
    ) -> Result<Self, DataError> {
        let names = read_header(records, options.header)?;
        let data_rows = &records.first_rows()
            [usize::from(options.header != HeaderRow::Absent).min(records.first_rows().len())..];
        let roles = options.column_roles(&names, target, data_rows).map_err(|problem| {
            let separator = records.separator();
            let hint = format!("; the separator is {separator} (to choose another one, pass --separator)");
            records.error(if names.len() < 2 { problem + &hint } else { problem })
        })?;
        let is_target =
            |column_role: &columns::ColumnRole| matches!(column_role, columns::ColumnRole::Target(_));
        Ok(Self {
            path: path.to_owned(),
            more_files,
            share,
            blocks: 0,
            first_test_block: None,
            block_rows: Vec::new(),
            content: Sha256::new(),
            target: roles.iter().position(is_target).unwrap_or_default(),
            columns: names
                .into_iter()
                .zip(roles)
                .map(|(name, column_role)| ColumnValues::new(name, column_role))
                .collect(),
            missing: options.missing,
            text_budget: TextBytesLeft(TEXT_BYTES_MAX),
            rows: 0,
            rows_without_target: 0,
            rows_incomplete: 0,
        })
    }

    /// Reads the rows of a file. The current row of `records` is the first row of the file. If `has_header` is true,
    /// the first row holds the names of the columns.
    fn read_file(&mut self, records: &mut Records, has_header: bool) -> Result<(), DataError> {
        // All ranks read the first row of the file, but only one rank holds it.
        if !has_header && self.share.contains(records.block()) {
            self.read_row(records)?;
        }
        while records.advance()? {
            self.read_row(records)?;
        }
        self.blocks = records.first_block_of_next_file();
        let file = records.fingerprint();
        self.content
            .update([file.bytes, file.checksum, self.blocks as u64].map(u64::to_le_bytes).as_flattened());
        Ok(())
    }

    /// Reads the current row of `records`.
    fn read_row(&mut self, records: &Records) -> Result<(), DataError> {
        records.check_cell_count(self.columns.len())?;
        let row = records.row();
        self.rows += 1;
        if is_missing(row[self.target].trim_ascii()) {
            self.rows_without_target += 1;
            return Ok(());
        }
        if self.missing == MissingPolicy::Drop && self.count_missing(row) > 0 {
            self.rows_incomplete += 1;
            return Ok(());
        }
        for (cell, column) in row.iter().zip(&mut self.columns) {
            if let Err(problem) = column.push(cell.trim_ascii(), self.missing, &mut self.text_budget) {
                return Err(records.error(format!(
                    "line {}, column `{}`: {problem}",
                    records.line(),
                    column.name
                )));
            }
        }
        match self.block_rows.last_mut() {
            Some((block, rows)) if *block == records.block() => *rows += 1,
            _ => self.block_rows.push((records.block(), 1)),
        }
        self.check_value_count()
    }

    /// Returns an error if the table has too many values.
    fn check_value_count(&self) -> Result<(), DataError> {
        if (self.rows as u64).saturating_mul(self.columns.len() as u64) > ELEMENTS_MAX {
            return Err(DataError::malformed(&self.path, format!("holds more than {ELEMENTS_MAX} values")));
        }
        Ok(())
    }

    /// Counts the missing features of a row, and adds them to the counts of the columns.
    fn count_missing(&mut self, row: &ByteRecord) -> usize {
        let mut count = 0;
        for (cell, column) in row.iter().zip(&mut self.columns) {
            if column.is_feature() && is_missing(cell.trim_ascii()) {
                column.missing += 1;
                count += 1;
            }
        }
        count
    }

    /// Returns a hash of the files: ranks with the same hash have read the same files.
    pub(crate) fn content_digest(&self) -> u64 {
        let first_test_block = self.first_test_block.unwrap_or(self.blocks) as u64;
        short_digest(&self.content.clone().chain_update(first_test_block.to_le_bytes()).finalize())
    }

    /// Returns the table with the rows of this rank, and with counts of rows and missing values over all ranks. All
    /// ranks must have read the same files, and must call this function.
    ///
    /// # Errors
    ///
    /// If a collective fails, or if the table has too many values or no rows.
    pub(crate) fn merge(mut self, group: &mut Group) -> Result<RawTable, TrainError> {
        self.sum_counts_over_ranks(group)?;
        self.check_value_count()?;
        if self.rows == 0 {
            let problem = match self.more_files {
                0 => "has no rows below its header; pass --no-header if its first row holds data".to_owned(),
                count => format!("this file and {count} more files have no rows below their headers"),
            };
            return Err(DataError::malformed(&self.path, problem).into());
        }
        let notes = self.describe_missing();
        let dropped_rows = self.rows_without_target.saturating_add(self.rows_incomplete);
        let kept_rows = self.rows.saturating_sub(dropped_rows);
        if kept_rows == 0 {
            return Err(DataError::Unsuitable(format!("no row remains: {}", notes.join("; "))).into());
        }
        let mut block_rows = vec![0; self.blocks];
        for &(block, rows) in &self.block_rows {
            block_rows[block] = rows;
        }
        group.all_reduce(&mut block_rows, ReduceOp::Sum)?;
        self.check_block_rows(&block_rows, kept_rows)?;
        let mut ranges: Vec<NumberRange> = self.columns.iter().map(ColumnValues::range).collect();
        merge_ranges(group, &mut ranges)?;
        let target_name = self.columns[self.target].name.clone();
        let target = self.columns[self.target].take_target().expect("`target` is the index of the target");
        let features = (0..self.columns.len()).filter(|&index| self.columns[index].is_feature()).collect();
        let layout = TableLayout { columns: self.columns.len(), target: self.target, features };
        let columns = self.columns.into_iter().zip(ranges);
        let columns = columns.filter_map(|(column, range)| column.into_feature_column(range)).collect();
        let first_test_row =
            self.first_test_block.map(|block| block_rows[..block].iter().sum::<u64>() as usize);
        let rows = RowMap::new(self.share, &block_rows);
        Ok(RawTable { rows, first_test_row, columns, target_name, target, layout, notes })
    }

    /// Checks the numbers of rows that other ranks have sent, because later code uses these numbers as indices.
    /// `block_rows` has the number of rows of each block. `kept_rows` is the number of rows of all blocks.
    fn check_block_rows(&self, block_rows: &[u64], kept_rows: usize) -> Result<(), DataError> {
        let total = block_rows.iter().try_fold(0, |total: u64, &rows| total.checked_add(rows));
        if total == Some(kept_rows as u64)
            && self.block_rows.iter().all(|&(block, rows)| block_rows[block] == rows)
        {
            return Ok(());
        }
        Err(DataError::malformed(
            &self.path,
            "the ranks disagree about the number of rows: the memory of a host or the network corrupted a value; start the job \
             again without --no-checksum",
        ))
    }

    /// Replaces the counts of this rank by their sums over all ranks.
    fn sum_counts_over_ranks(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let own = [&mut self.rows, &mut self.rows_without_target, &mut self.rows_incomplete];
        let mut counts: Vec<&mut usize> =
            own.into_iter().chain(self.columns.iter_mut().map(|column| &mut column.missing)).collect();
        let mut sums: Vec<u64> = counts.iter().map(|count| **count as u64).collect();
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        counts.iter_mut().zip(sums).for_each(|(count, sum)| **count = sum as usize);
        Ok(())
    }

    /// Returns messages about missing values.
    fn describe_missing(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let (rows, target) = (self.rows, &self.columns[self.target].name);
        if self.rows_without_target > 0 {
            notes.push(format!(
                "dropped {} of {rows} rows, because their target `{target}` is missing",
                self.rows_without_target
            ));
        }
        let incomplete: Vec<&ColumnValues> =
            self.columns.iter().filter(|column| column.missing > 0).collect();
        if incomplete.is_empty() {
            return notes;
        }
        let counts: Vec<String> = incomplete
            .iter()
            .take(MISSING_COLUMNS_SHOWN_MAX)
            .map(|column| format!("`{}` {}", column.name, column.missing))
            .collect();
        let more = if incomplete.len() > counts.len() { ", ..." } else { "" };
        let counts = format!("{}{more}", counts.join(", "));
        let policy = self.missing;
        notes.push(match policy {
            MissingPolicy::Drop => {
                let dropped = self.rows_incomplete;
                format!("dropped {dropped} of {rows} rows, because values are missing (--missing drop): {counts}")
            }
            _ => format!(
                "replaced missing numbers by the mean of their column, and missing texts by a category of their own \
                 (--missing {policy}): {counts}"
            ),
        });
        notes
    }
}

/// Returns the names of the columns. The current row of `records` is the first row.
pub(crate) fn read_header(records: &Records, header: HeaderRow) -> Result<Vec<String>, DataError> {
    let first = records.row();
    if header == HeaderRow::Absent {
        return Ok((0..first.len()).map(|index| index.to_string()).collect());
    }
    if header == HeaderRow::Expected
        && looks_like_data(first, records.first_rows().get(1..).unwrap_or_default())
    {
        return Err(records.error(
            "the first row looks like data and not like a header: it holds numbers, or texts that occur again in the next rows; \
             pass --no-header if the file has no header, or --header if the first row holds the names of the columns",
        ));
    }
    header_names(records)
}

/// Checks that the current row of `records` holds the names `wanted`, which are the names of the columns in
/// `first_file`.
pub(crate) fn check_header<'a>(
    records: &Records,
    wanted: impl ExactSizeIterator<Item = &'a str>,
    first_file: &Path,
) -> Result<(), DataError> {
    let names = header_names(records)?;
    let first_file = first_file.display();
    let hint = "the files of a table must have the same columns in the same order";
    if names.len() != wanted.len() {
        let (found, wanted) = (names.len(), wanted.len());
        return Err(records.error(format!("has {found} columns, but {first_file} has {wanted}; {hint}")));
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
fn header_names(records: &Records) -> Result<Vec<String>, DataError> {
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
