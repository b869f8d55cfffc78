//! Reads tables in Parquet files.
//!
//! The footer of a file says how many rows the file has. So each rank reads only its part of the rows, and skips the
//! pages before this part. Each value becomes the same cell as in a table of text, so that both formats give the same model.

mod column_type;
mod file;
mod pages;
mod read_errors;
mod rows;
mod value;

use std::path::{Path, PathBuf};

pub(crate) use self::file::ParquetFile;
pub(crate) use self::value::TypedValue;
use super::column_values::{ColumnKind, ColumnRole};
use super::row_cursor::RowCursor;
use super::rows_of_rank::RowsOfRank;
use super::{BlocksOfRank, DataError, ELEMENTS_MAX, TableOptions};

/// Reads this rank's part of the rows of a table, from one or more files with the same columns. The arguments have the same
/// meaning as those of [`csv::read_rows_of_rank`](super::csv::read_rows_of_rank). The schemas of the files decide whether
/// a column holds numbers, text or dates. [`TableOptions::categorical`] and [`TableOptions::dates`] override the schemas.
///
/// # Errors
///
/// If the fault is in one row or column, the message names this row or column. Possible errors:
///
/// - A file cannot be read or is damaged, or all files together have no rows.
/// - The target or a column that an option names does not exist.
/// - A column that is used is nested, or has a type that is not supported.
/// - A number is not finite, or a value is missing and [`TableOptions::missing`] is
///   [`MissingPolicy::Error`](super::MissingPolicy::Error).
/// - The files have different columns.
pub(crate) fn read_rows_of_rank(
    (paths, train_file_count): (&[PathBuf], usize),
    target: &str,
    options: &TableOptions,
    (share, stream_directory): (BlocksOfRank, Option<&Path>),
) -> Result<RowsOfRank, DataError> {
    let Some((first, more)) = paths.split_first() else {
        return Err(DataError::Unsuitable("the table has no files".into()));
    };
    let (columns, files) = read_footers(first, more)?;
    let error_of_first_file = |problem: String| DataError::malformed(first, problem);
    let row_count = files.iter().try_fold(0, |sum: u64, file| sum.checked_add(file.row_count));
    let value_count = row_count.and_then(|rows| rows.checked_mul(columns.len() as u64));
    match value_count {
        Some(0) => return Err(error_of_first_file("has no rows or no columns".into())),
        Some(count) if count <= ELEMENTS_MAX => {}
        // `RowsOfRank` limits the number of rows.
        Some(_) if stream_directory.is_some() => {}
        _ => {
            return Err(error_of_first_file(format!(
                "holds more than {ELEMENTS_MAX} values; to train on larger tables, pass --stream"
            )));
        }
    }
    let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
    let kind_of = |index: usize| columns[index].kind.unwrap_or(ColumnKind::Numbers);
    let roles = options.column_roles(&names, target, kind_of).map_err(error_of_first_file)?;
    let mut notes = Vec::new();
    for (column, column_role) in columns.iter().zip(&roles) {
        notes.extend(column.check_role(*column_role, first)?);
    }
    let used_columns: Vec<usize> =
        (0..roles.len()).filter(|&index| roles[index] != ColumnRole::Ignored).collect();
    let mut table =
        RowsOfRank::new((first, more.len()), (names, roles), options.missing, (share, stream_directory))?;
    table.notes = notes;
    let (train, test) = files.split_at(train_file_count.min(files.len()));
    read_rows_of_set(&mut table, train, &used_columns)?;
    if !test.is_empty() {
        table.begin_test_set();
        read_rows_of_set(&mut table, test, &used_columns)?;
    }
    Ok(table)
}

/// What the footer of a file says.
struct FileFooter<'a> {
    path: &'a Path,
    /// The number of rows of the file.
    row_count: u64,
    /// See [`ParquetFile::fingerprint`].
    fingerprint: [u8; 32],
}

/// A column of the table, in all files of the table.
struct TableColumn {
    name: String,
    /// The kind of the column. `None` if the column has no values in any file, or if its values cannot be read.
    kind: Option<ColumnKind>,
    /// Why the column cannot be used. `None` if the column can be used.
    fault: Option<ColumnFault>,
}

/// Why a column cannot be used.
struct ColumnFault {
    /// The file with the fault.
    path: PathBuf,
    problem: String,
}

impl TableColumn {
    /// Combines this column with the same column in the file `path`, and records a fault if the kinds differ or if
    /// ringtrain cannot read the column in `path`. `kind_in_file` is the kind of the column in `path`, or `None` if the column
    /// has no values there. An error describes content that ringtrain cannot read. `first` is the first file of the table.
    fn add_kind_in_file(
        &mut self,
        path: &Path,
        kind_in_file: Result<Option<ColumnKind>, &str>,
        first: &Path,
    ) {
        let name = &self.name;
        let problem = match (kind_in_file, self.kind) {
            (Err(content), _) => format!("column `{name}` holds {content}, which ringtrain cannot read"),
            (Ok(None), _) => return,
            (Ok(Some(found)), Some(kind)) if found != kind => {
                let [found, kind] = [found, kind].map(describe_kind);
                format!("column `{name}` holds {found}, but in {} it holds {kind}", first.display())
            }
            (Ok(kind), _) => {
                self.kind = kind;
                return;
            }
        };
        self.fault.get_or_insert(ColumnFault { path: path.to_owned(), problem });
    }

    /// Returns an error if the column cannot have this role. If the column holds dates and is used, returns a message that
    /// tells the user so. `first` is the first file of the table.
    fn check_role(&self, column_role: ColumnRole, first: &Path) -> Result<Option<String>, DataError> {
        let name = &self.name;
        let hint = match column_role {
            ColumnRole::Ignored => return Ok(None),
            ColumnRole::Feature(_) => format!("pass --drop {name} to leave out the column"),
            ColumnRole::Target(_) => "pass another --target".into(),
        };
        if let Some(ColumnFault { path, problem }) = &self.fault {
            return Err(DataError::malformed(path, format!("{problem}; {hint}")));
        }
        match (self.kind, column_role) {
            (Some(ColumnKind::Dates), ColumnRole::Target(_)) => Err(DataError::malformed(
                first,
                format!("column `{name}` holds dates, and the target cannot be a date; {hint}"),
            )),
            (Some(ColumnKind::Dates), ColumnRole::Feature(ColumnKind::Text)) => Err(DataError::malformed(
                first,
                format!(
                    "column `{name}` holds dates, which cannot be names of categories; leave it out of --categorical, or {hint}"
                ),
            )),
            (Some(ColumnKind::Dates), _) => Ok(Some(format!(
                "column `{name}` holds dates: each date becomes the number of days since 1970; to leave out the column, pass \
                 --drop {name}"
            ))),
            _ => Ok(None),
        }
    }
}

/// Returns the name of a kind for error messages.
fn describe_kind(kind: ColumnKind) -> &'static str {
    match kind {
        ColumnKind::Numbers => "numbers",
        ColumnKind::Dates => "dates",
        ColumnKind::Text => "texts or truth values",
    }
}

/// Reads the footers of all files, which must have the same columns. Returns the columns of the table, and the footer of
/// each file. `first` is the first file, and `more` holds the other files.
fn read_footers<'a>(
    first: &'a Path,
    more: &'a [PathBuf],
) -> Result<(Vec<TableColumn>, Vec<FileFooter<'a>>), DataError> {
    let mut footers = Vec::with_capacity(1 + more.len());
    let mut columns: Vec<TableColumn> = Vec::new();
    let mut names = Vec::new();
    for path in std::iter::once(first).chain(more.iter().map(PathBuf::as_path)) {
        let file = ParquetFile::open(path)?;
        if footers.is_empty() {
            names = file.column_names();
            columns = names
                .iter()
                .map(|name| TableColumn { name: name.clone(), kind: None, fault: None })
                .collect();
        }
        file.check_column_names(&names, first)?;
        for (column, column_in_file) in columns.iter_mut().zip(&file.columns) {
            let kind = column_in_file.content.as_ref().map(|(_, column_type)| column_type.kind());
            column.add_kind_in_file(path, kind.map_err(String::as_str), first);
        }
        footers.push(FileFooter { path, row_count: file.row_count, fingerprint: file.fingerprint });
    }
    Ok((columns, footers))
}

/// Reads this rank's part of the rows of one set: the training set or the test set. `files` are the files of this set. The
/// rows of the set form one block for each rank. `used_columns` holds the indices of the columns to read.
fn read_rows_of_set(
    table: &mut RowsOfRank,
    files: &[FileFooter<'_>],
    used_columns: &[usize],
) -> Result<(), DataError> {
    let share = table.share();
    let first_block = table.block_count();
    let part = share.range_of(files.iter().map(|file| file.row_count).sum());
    let mut rows_in_earlier_files = 0;
    for footer in files {
        let bounds = [part.start, part.end]
            .map(|bound| bound.saturating_sub(rows_in_earlier_files).min(footer.row_count));
        rows_in_earlier_files += footer.row_count;
        if bounds[0] < bounds[1] {
            let file = ParquetFile::open(footer.path)?;
            if file.fingerprint != footer.fingerprint {
                return Err(file.error("was changed while it was read; start the job again"));
            }
            let mut rows = file.into_rows(used_columns, Some(bounds[0]..bounds[1]))?;
            while rows.advance()? {
                table.add_current_row(&rows, first_block + share.rank)?;
            }
        }
        table.end_file(first_block + share.ranks, &footer.fingerprint);
    }
    Ok(())
}
