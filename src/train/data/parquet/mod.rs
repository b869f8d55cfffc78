//! Reads tables in Parquet files.
//!
//! The footer of a file says how many rows the file has. So each rank reads only its part of the rows, and skips the
//! pages before it. A value becomes the cell that the same value has in a table of text, so that both formats give the
//! same model.

mod column_type;
mod file;
mod guard;
mod pages;
mod rows;
mod value;

use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) use self::file::ParquetFile;
pub(crate) use self::value::TypedValue;
use super::column_values::{ColumnKind, ColumnRole};
use super::csv::BlocksOfRank;
use super::row_cursor::RowCursor;
use super::rows_of_rank::RowsOfRank;
use super::{DataError, ELEMENTS_MAX, TableOptions};

/// Reads this rank's part of the rows of a table, from one or more files with the same columns. The arguments are those
/// of [`read_rows_of_rank`](super::csv::read_rows_of_rank) for tables of text. The schemas of the files decide whether a
/// column holds numbers, text or dates ([`TableOptions::categorical`] and [`TableOptions::dates`] override this).
///
/// # Errors
///
/// If the fault is in one row or column, the message names this row or column. Possible errors:
///
/// - A file cannot be read, is damaged, or has no rows.
/// - The target or a column that an option names does not exist.
/// - A column that is used is nested, or has a type that is not supported.
/// - A number is not finite, or a value is missing and [`TableOptions::missing`] forbids this.
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
    let (columns, files) = read_footers(first, more)?;
    let problem = |problem: String| DataError::malformed(first, problem);
    let rows = files.iter().try_fold(0, |sum: u64, file| sum.checked_add(file.rows));
    let values = rows.and_then(|rows| rows.checked_mul(columns.len() as u64));
    match values {
        Some(0) => return Err(problem("has no rows or no columns".into())),
        Some(values) if values <= ELEMENTS_MAX => {}
        _ => return Err(problem(format!("holds more than {ELEMENTS_MAX} values"))),
    }
    let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
    let kind_of = |index: usize| columns[index].kind.unwrap_or(ColumnKind::Numbers);
    let roles = options.column_roles(&names, target, kind_of).map_err(problem)?;
    let mut notes = Vec::new();
    for (column, column_role) in columns.iter().zip(&roles) {
        notes.extend(column.check_role(*column_role, first)?);
    }
    let used: Vec<usize> = (0..roles.len()).filter(|&index| roles[index] != ColumnRole::Ignored).collect();
    let mut table = RowsOfRank::new((first, more.len()), (names, roles), options.missing, share);
    table.notes = notes;
    let (train, test) = files.split_at(train_files.min(files.len()));
    read_part_of_files(&mut table, train, &used)?;
    if !test.is_empty() {
        table.begin_test_set();
        read_part_of_files(&mut table, test, &used)?;
    }
    Ok(table)
}

/// The footer of a file of a table.
struct FileFooter<'a> {
    path: &'a Path,
    rows: u64,
    fingerprint: [u8; 32],
}

/// A column of a table that consists of one or more files.
struct TableColumn {
    name: String,
    /// The kind of the column. `None` if no file has a value in this column.
    kind: Option<ColumnKind>,
    /// Why the column cannot be used.
    fault: Option<ColumnFault>,
}

/// Why a column cannot be used.
struct ColumnFault {
    path: PathBuf,
    problem: String,
}

impl TableColumn {
    /// Adds the column of a further file. `first` is the first file.
    fn add_file(&mut self, path: &Path, found: Result<Option<ColumnKind>, &str>, first: &Path) {
        let name = &self.name;
        let problem = match (found, self.kind) {
            (Err(content), _) => format!("column `{name}` holds {content}, which ringtrain cannot read"),
            (Ok(None), _) => return,
            (Ok(Some(found)), Some(kind)) if found != kind => {
                let [found, kind] = [found, kind].map(describe_kind);
                format!("column `{name}` holds {found}, but in {} it holds {kind}", first.display())
            }
            (Ok(found), _) => {
                self.kind = found;
                return;
            }
        };
        self.fault.get_or_insert(ColumnFault { path: path.to_owned(), problem });
    }

    /// Returns an error if the column cannot have this role. May return a message for the user.
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

fn describe_kind(kind: ColumnKind) -> &'static str {
    match kind {
        ColumnKind::Numbers => "numbers",
        ColumnKind::Dates => "dates",
        ColumnKind::Text => "texts or truth values",
    }
}

/// Reads the footers of all files, which must have the same columns.
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
        for (column, in_file) in columns.iter_mut().zip(&file.columns) {
            let kind = in_file.content.as_ref().map(|(_, column_type)| column_type.kind());
            column.add_file(path, kind.map_err(String::as_str), first);
        }
        footers.push(FileFooter { path, rows: file.rows, fingerprint: file.fingerprint });
    }
    Ok((columns, footers))
}

/// Reads this rank's part of the rows of the training set or of the test set. The part is one block.
fn read_part_of_files(
    table: &mut RowsOfRank,
    files: &[FileFooter<'_>],
    used: &[usize],
) -> Result<(), DataError> {
    let share = table.share();
    let first_block = table.block_count();
    let part = part_of_rank(files.iter().map(|file| file.rows).sum(), share);
    let mut rows_before = 0;
    for footer in files {
        let bounds = [part.start, part.end].map(|bound| bound.saturating_sub(rows_before).min(footer.rows));
        rows_before += footer.rows;
        if bounds[0] < bounds[1] {
            let file = ParquetFile::open(footer.path)?;
            if file.fingerprint != footer.fingerprint {
                return Err(file.error("was changed while it was read; start the job again"));
            }
            let mut rows = file.into_rows(used, Some(bounds[0]..bounds[1]))?;
            while rows.advance()? {
                table.read_row(&rows, first_block + share.rank)?;
            }
        }
        table.end_file(first_block + share.ranks, &footer.fingerprint);
    }
    Ok(())
}

/// Returns the rows of a rank if all ranks together have `rows` rows. The numbers of rows of two ranks differ by at most
/// one.
fn part_of_rank(rows: u64, share: BlocksOfRank) -> Range<u64> {
    let bound = |rank: usize| (u128::from(rows) * rank as u128 / share.ranks as u128) as u64;
    bound(share.rank)..bound(share.rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_ranks_cover_all_rows_in_order() {
        for rows in [0, 1, 5, 1_000_003, u64::MAX] {
            for ranks in 1..9 {
                let parts: Vec<_> =
                    (0..ranks).map(|rank| part_of_rank(rows, BlocksOfRank { rank, ranks })).collect();
                assert_eq!((parts[0].start, parts[ranks - 1].end), (0, rows));
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                let sizes = parts.iter().map(|part| part.end - part.start);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }
    }
}
