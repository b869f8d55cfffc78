//! Loads a table on several ranks. Each rank parses a part of the rows.

use std::path::{Path, PathBuf};

use super::csv::{self, TableFiles};
#[cfg(feature = "parquet")]
use super::parquet;
use super::raw_table::EncodedTable;
use super::rows_of_rank::RowsOfRank;
#[cfg(not(feature = "parquet"))]
use super::source::NO_PARQUET_MESSAGE;
use super::standard_input::{STANDARD_INPUT_NAME, share_standard_input};
use super::{BlocksOfRank, DataError, DataSource, LoadOptions};
use crate::group::Group;
use crate::train::rank_checks::{check_all_succeeded, check_same_data};
use crate::train::{RunPhase, TrainError};

/// Reads and encodes a table. Returns the encoded rows that this rank has parsed. All ranks must call this function.
///
/// # Errors
///
/// If a rank cannot read its rows, if the ranks have read different files, or if the table cannot be encoded. If one rank
/// returns an error, all ranks return an error.
pub(crate) fn load_table(
    source: &DataSource,
    options: &LoadOptions,
    group: &mut Group,
) -> Result<EncodedTable, TrainError> {
    let share = BlocksOfRank::of_rank(group);
    let mut paths = paths_of_table(source);
    let train_file_count = paths.len();
    paths.extend(options.test_source.iter().flat_map(paths_of_table));
    let standard_input = match (source, &options.test_source) {
        (DataSource::StandardInput, _) => Some(0),
        (_, Some(DataSource::StandardInput)) => Some(train_file_count),
        _ => None,
    };
    let rows_of_rank = if let Some(index) = standard_input {
        share_standard_input(group, |content| {
            let files =
                TableFiles { paths: &paths, train_file_count, standard_input: Some((index, content)) };
            read_rows(source, files, options, share)
        })
    } else {
        let files = TableFiles { paths: &paths, train_file_count, standard_input: None };
        read_rows(source, files, options, share).map(Some).map_err(TrainError::from)
    };
    let rows_of_rank = check_all_succeeded(group, RunPhase::Data, rows_of_rank)?.ok_or_else(|| {
        let problem = "the memory of a host or the network corrupted a value; start the job again without --no-checksum";
        DataError::malformed(Path::new(STANDARD_INPUT_NAME), problem)
    })?;
    check_same_data(group, &[rows_of_rank.content_digest()], |_| source.to_string())?;
    let table = rows_of_rank.into_raw_table(group)?;
    let sets = options.choose_row_sets(table.row_map.rows(), table.first_test_row)?;
    let columns = (options.table.missing, options.table.categories_max);
    table.encode(&sets, columns, options.stream_directory.as_deref(), group)
}

/// Returns the paths of the files of a table. Standard input has a path that appears only in messages.
fn paths_of_table(source: &DataSource) -> Vec<PathBuf> {
    match source {
        DataSource::StandardInput => vec![STANDARD_INPUT_NAME.into()],
        _ => source.table_files().unwrap_or_default().to_vec(),
    }
}

/// Reads the rows of a table that belong to `share`.
fn read_rows(
    source: &DataSource,
    files: TableFiles<'_>,
    options: &LoadOptions,
    share: BlocksOfRank,
) -> Result<RowsOfRank, DataError> {
    let target = options.target.as_deref().ok_or_else(|| {
        DataError::Unsuitable(format!("{source} is a table: name the column to predict with --target"))
    })?;
    let place = (share, options.stream_directory.as_deref());
    match source {
        #[cfg(feature = "parquet")]
        DataSource::Parquet(_) => {
            parquet::read_rows_of_rank((files.paths, files.train_file_count), target, &options.table, place)
        }
        #[cfg(not(feature = "parquet"))]
        DataSource::Parquet(_) => Err(DataError::Unsuitable(format!("{source} {NO_PARQUET_MESSAGE}"))),
        _ => csv::read_rows_of_rank(files, target, &options.table, place),
    }
}
