//! The rows of a table that one rank has read, before the ranks merge their counts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::column_values::{ColumnRole, ColumnValues};
use super::numbers::{NumberRange, merge_ranges};
use super::raw_table::{RawColumn, RawTable};
use super::row_cursor::{Cell, RowCursor};
use super::row_map::RowMap;
use super::stream_file::StreamFile;
use super::texts::{TEXT_BYTES_MAX, TextBytesLeft};
use super::{BlocksOfRank, DataError, ELEMENTS_MAX, MissingPolicy, TableLayout};
use crate::group::Group;
use crate::train::TrainError;
use crate::train::rank_checks::short_digest;
use crate::types::{ReduceOp, counted};

/// A message about missing values names at most this number of columns.
const MISSING_COLUMNS_SHOWN_MAX: usize = 8;

/// The rows of a table that one rank has read.
pub(crate) struct RowsOfRank {
    /// The path of the first file.
    first_path: PathBuf,
    /// The number of files after the first one.
    more_file_count: usize,
    /// This rank's share of the blocks.
    share: BlocksOfRank,
    /// The number of blocks of all files that were read, including the blocks of other ranks.
    block_count: usize,
    /// The number of the first block of the test set. `None` if the files hold only the training set.
    first_test_block: Option<usize>,
    /// For each block of this rank: the number of the block, and the number of its rows. Rows that were left out do
    /// not count.
    block_rows: Vec<(usize, u64)>,
    /// A hash of all files, including the rows of other ranks.
    content_hasher: Sha256,
    columns: Vec<ColumnValues>,
    /// The file that holds the values of the features. `None` if they are in memory.
    file: Option<Arc<StreamFile>>,
    /// The index of the target column.
    target_index: usize,
    missing_policy: MissingPolicy,
    /// The memory that is left for distinct texts.
    text_budget: TextBytesLeft,
    /// The number of rows, including rows that were left out. This count and the next two counts are for this rank, until
    /// [`sum_counts_over_ranks`](Self::sum_counts_over_ranks) adds the counts of the other ranks.
    row_count: usize,
    /// The number of rows without a target.
    rows_without_target: usize,
    /// The number of rows that were left out because a feature is missing.
    incomplete_rows: usize,
    /// Whether the files have the names of the columns.
    pub(crate) has_header: bool,
    /// Messages for the user about the columns.
    pub(crate) notes: Vec<String>,
}

impl RowsOfRank {
    /// Creates a table without rows. `first_path` is the path of the first file, and `more_file_count` is the number of files
    /// after the first one. The values of the features are stored in memory, or in a file in `stream_directory` if there is
    /// one.
    pub(crate) fn new(
        (first_path, more_file_count): (&Path, usize),
        (names, roles): (Vec<String>, Vec<ColumnRole>),
        missing_policy: MissingPolicy,
        (share, stream_directory): (BlocksOfRank, Option<&Path>),
    ) -> Result<Self, DataError> {
        let is_target = |column_role: &ColumnRole| matches!(column_role, ColumnRole::Target(_));
        let file = stream_directory.map(StreamFile::create).transpose()?.map(Arc::new);
        Ok(Self {
            first_path: first_path.to_owned(),
            more_file_count,
            share,
            block_count: 0,
            first_test_block: None,
            block_rows: Vec::new(),
            content_hasher: Sha256::new(),
            target_index: roles.iter().position(is_target).unwrap_or_default(),
            columns: names
                .into_iter()
                .zip(roles)
                .map(|(name, column_role)| ColumnValues::new(name, column_role, file.clone()))
                .collect(),
            file,
            missing_policy,
            text_budget: TextBytesLeft(TEXT_BYTES_MAX),
            row_count: 0,
            rows_without_target: 0,
            incomplete_rows: 0,
            has_header: true,
            notes: Vec::new(),
        })
    }

    /// Returns the names of the columns.
    pub(crate) fn column_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.columns.iter().map(|column| column.name.as_str())
    }

    /// Returns this rank's share of the blocks.
    pub(crate) fn share(&self) -> BlocksOfRank {
        self.share
    }

    /// Returns the number of blocks of the files that were read until now.
    pub(crate) fn block_count(&self) -> usize {
        self.block_count
    }

    /// Records that the next file is the first file of the test set.
    pub(crate) fn begin_test_set(&mut self) {
        self.first_test_block = Some(self.block_count);
    }

    /// Records that a file was read. `blocks` is the number of blocks of this file and all earlier files. Files with the same
    /// `fingerprint` count as the same file.
    pub(crate) fn end_file(&mut self, blocks: usize, fingerprint: &[u8]) {
        self.block_count = blocks;
        self.content_hasher.update(fingerprint);
        self.content_hasher.update((blocks as u64).to_le_bytes());
    }

    /// Adds the current row of `cursor`, which belongs to the block with the number `block`.
    pub(crate) fn add_current_row(&mut self, cursor: &impl RowCursor, block: usize) -> Result<(), DataError> {
        cursor.check_cell_count(self.columns.len())?;
        self.row_count += 1;
        if cursor.cell(self.target_index) == Cell::Missing {
            self.rows_without_target += 1;
            return Ok(());
        }
        if self.missing_policy == MissingPolicy::Drop && self.count_missing_features(cursor) > 0 {
            self.incomplete_rows += 1;
            return Ok(());
        }
        for (index, column) in self.columns.iter_mut().enumerate().filter(|(_, column)| column.is_used()) {
            if let Err(problem) = column.push(cursor.cell(index), self.missing_policy, &mut self.text_budget)
            {
                return Err(cursor.error(format!("{}, column `{}`: {problem}", cursor.place(), column.name)));
            }
        }
        match self.block_rows.last_mut() {
            Some((last, rows)) if *last == block => *rows += 1,
            _ => self.block_rows.push((block, 1)),
        }
        self.check_value_count()
    }

    /// Returns an error if the table has too many rows, or too many values for memory.
    fn check_value_count(&self) -> Result<(), DataError> {
        let (values_per_row, counted) = match self.file {
            Some(_) => (1, "rows"),
            None => (self.columns.len() as u64, "values; to train on larger tables, pass --stream"),
        };
        if (self.row_count as u64).saturating_mul(values_per_row) > ELEMENTS_MAX {
            return Err(DataError::malformed(
                &self.first_path,
                format!("holds more than {ELEMENTS_MAX} {counted}"),
            ));
        }
        Ok(())
    }

    /// Counts the missing features of the current row of `cursor`, and adds them to the counts of the columns.
    fn count_missing_features(&mut self, cursor: &impl RowCursor) -> usize {
        let mut count = 0;
        for (index, column) in self.columns.iter_mut().enumerate() {
            if column.is_feature() && cursor.cell(index) == Cell::Missing {
                column.missing_count += 1;
                count += 1;
            }
        }
        count
    }

    /// Returns a hash of the files, to check that all ranks have read the same files.
    pub(crate) fn content_digest(&self) -> u64 {
        let first_test_block = self.first_test_block.unwrap_or(self.block_count) as u64;
        short_digest(&self.content_hasher.clone().chain_update(first_test_block.to_le_bytes()).finalize())
    }

    /// Returns the table with the rows of this rank, and with counts of rows and missing values over all ranks. All
    /// ranks must have read the same files, and must call this function.
    ///
    /// # Errors
    ///
    /// If a collective fails, or if the table has too many values or no rows.
    pub(crate) fn into_raw_table(mut self, group: &mut Group) -> Result<RawTable, TrainError> {
        self.sum_counts_over_ranks(group)?;
        self.check_value_count()?;
        if self.row_count == 0 {
            let problem = match self.more_file_count {
                0 => "has no rows below its header; pass --no-header if its first row holds data".to_owned(),
                count => {
                    format!("this file and {} have no rows below their headers", counted(count, "more file"))
                }
            };
            return Err(DataError::malformed(&self.first_path, problem).into());
        }
        let mut notes = std::mem::take(&mut self.notes);
        let missing_notes = self.describe_missing_values();
        let dropped_rows = self.rows_without_target.saturating_add(self.incomplete_rows);
        let kept_rows = self.row_count.saturating_sub(dropped_rows);
        if kept_rows == 0 {
            return Err(DataError::Unsuitable(format!("no row remains: {}", missing_notes.join("; "))).into());
        }
        notes.extend(missing_notes);
        let mut block_rows = vec![0; self.block_count];
        for &(block, rows) in &self.block_rows {
            block_rows[block] = rows;
        }
        group.all_reduce(&mut block_rows, ReduceOp::Sum)?;
        self.check_block_rows(&block_rows, kept_rows)?;
        let mut ranges: Vec<NumberRange> = self.columns.iter().map(ColumnValues::range).collect();
        merge_ranges(group, &mut ranges)?;
        let target_name = self.columns[self.target_index].name.clone();
        let target =
            self.columns[self.target_index].take_target().expect("`target_index` is the index of the target");
        let features = (0..self.columns.len()).filter(|&index| self.columns[index].is_feature()).collect();
        let layout = TableLayout {
            columns: self.columns.len(),
            target: self.target_index,
            features,
            has_header: self.has_header,
        };
        let columns = self.columns.into_iter().zip(ranges);
        let columns = columns.map(|(column, range)| column.into_feature_column(range));
        let columns: Vec<Option<RawColumn>> = columns.collect::<Result<_, DataError>>()?;
        let columns = columns.into_iter().flatten().collect();
        let first_test_row =
            self.first_test_block.map(|block| block_rows[..block].iter().sum::<u64>() as usize);
        let row_map = RowMap::new(self.share, &block_rows);
        Ok(RawTable { row_map, first_test_row, columns, target_name, target, layout, notes })
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
            &self.first_path,
            "the ranks disagree about the number of rows: the memory of a host or the network corrupted a value; start the job \
             again without --no-checksum",
        ))
    }

    /// Replaces the counts of this rank by their sums over all ranks.
    fn sum_counts_over_ranks(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let row_counts = [&mut self.row_count, &mut self.rows_without_target, &mut self.incomplete_rows];
        let mut counts: Vec<&mut usize> = row_counts
            .into_iter()
            .chain(self.columns.iter_mut().map(|column| &mut column.missing_count))
            .collect();
        let mut sums: Vec<u64> = counts.iter().map(|count| **count as u64).collect();
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        counts.iter_mut().zip(sums).for_each(|(count, sum)| **count = sum as usize);
        Ok(())
    }

    /// Returns messages for the user about rows and columns with missing values.
    fn describe_missing_values(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let (rows, target) = (self.row_count, &self.columns[self.target_index].name);
        if self.rows_without_target > 0 {
            notes.push(format!(
                "dropped {} of {rows} rows, because their target `{target}` is missing",
                self.rows_without_target
            ));
        }
        let columns_with_missing: Vec<&ColumnValues> =
            self.columns.iter().filter(|column| column.missing_count > 0).collect();
        if columns_with_missing.is_empty() {
            return notes;
        }
        let counts: Vec<String> = columns_with_missing
            .iter()
            .take(MISSING_COLUMNS_SHOWN_MAX)
            .map(|column| format!("`{}` {}", column.name, column.missing_count))
            .collect();
        let more = if columns_with_missing.len() > counts.len() { ", ..." } else { "" };
        let counts = format!("{}{more}", counts.join(", "));
        let policy = self.missing_policy;
        notes.push(match policy {
            MissingPolicy::Drop => {
                let dropped = self.incomplete_rows;
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
