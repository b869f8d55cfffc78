//! Opens a Parquet file and reads its footer, which describes the columns and the row groups.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ::parquet::basic::{Compression, ConvertedType, Repetition};
use ::parquet::file::metadata::RowGroupMetaData;
use ::parquet::file::reader::FileReader;
use ::parquet::file::serialized_reader::SerializedFileReader;
use ::parquet::schema::types::{SchemaDescriptor, Type};
use sha2::{Digest, Sha256};

use super::column_type::ColumnType;
use super::read_errors::read_part;
use super::rows::{ParquetRows, UsedColumn};
use crate::train::data::DataError;
use crate::types::counted;

/// The maximum size in bytes of a footer.
const FOOTER_BYTES_MAX: u64 = 1 << 28;
/// A file begins and ends with these bytes.
const MARK: [u8; 4] = *b"PAR1";
/// A file with an encrypted footer ends with these bytes.
const MARK_OF_ENCRYPTED_FILES: [u8; 4] = *b"PARE";
/// The size in bytes of the end of a file, which follows the footer: the length of the footer (4 bytes), and [`MARK`].
const END_BYTES: u64 = 8;

/// An open Parquet file.
pub(crate) struct ParquetFile {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    /// The columns of the table, in the order of the schema.
    pub(super) columns: Vec<ParquetColumn>,
    /// The number of rows.
    pub(super) row_count: u64,
    /// A hash of the length and the footer of the file.
    pub(super) fingerprint: [u8; 32],
}

/// A column of the table in a Parquet file.
pub(super) struct ParquetColumn {
    pub(super) name: String,
    /// The index of the column among the leaves of the schema, and the type of the values. If ringtrain cannot read the column,
    /// the error describes the content, for example `lists`.
    pub(super) content: Result<(usize, ColumnType), String>,
}

impl ParquetFile {
    /// Opens a file and reads its footer.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or if it is not a valid Parquet file.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let unreadable = |error| DataError::unreadable(path, error);
        let mut file = File::open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            let problem = "is a directory or a pipe; a Parquet file must be a regular file";
            return Err(DataError::malformed(path, problem));
        }
        let file_bytes = metadata.len();
        let footer =
            read_footer(&mut file, file_bytes).map_err(|problem| DataError::malformed(path, problem))?;
        let fingerprint =
            Sha256::new().chain_update(file_bytes.to_le_bytes()).chain_update(footer).finalize();
        let (reader, columns, row_count) = read_part(path, "the footer of this file", || {
            let reader = SerializedFileReader::new(file)?;
            let columns = table_columns(reader.metadata().file_metadata().schema_descr());
            let groups = reader.metadata().row_groups().iter().map(RowGroupMetaData::num_rows);
            let rows_of_groups = groups.map(|rows| u64::try_from(rows).ok());
            let row_count = rows_of_groups.reduce(|sum, rows| sum?.checked_add(rows?)).unwrap_or(Some(0));
            Ok((reader, columns, row_count))
        })?;
        let row_count = row_count.ok_or_else(|| {
            DataError::malformed(
                path,
                "is corrupt: the numbers of rows of its row groups are negative or too large",
            )
        })?;
        Ok(Self { path: path.to_owned(), reader, columns, row_count, fingerprint: fingerprint.into() })
    }

    /// Returns the names of the columns.
    pub(crate) fn column_names(&self) -> Vec<String> {
        self.columns.iter().map(|column| column.name.clone()).collect()
    }

    /// Returns an error if the columns do not have the names `wanted`, which are the names of the columns in
    /// `first_file`.
    pub(crate) fn check_column_names(&self, wanted: &[String], first_file: &Path) -> Result<(), DataError> {
        let first_file = first_file.display();
        let hint = "the files of a table must have the same columns in the same order";
        let (found, count) = (self.columns.len(), wanted.len());
        if found != count {
            return Err(
                self.error(format!("has {}, but {first_file} has {count}; {hint}", counted(found, "column")))
            );
        }
        let names = self.columns.iter().map(|column| &column.name);
        match names.zip(wanted).enumerate().find(|(_, (name, wanted))| name != wanted) {
            Some((index, (name, wanted))) => Err(self.error(format!(
                "the name of column number {} is `{name}`, but in {first_file} it is `{wanted}`; {hint}",
                index + 1
            ))),
            None => Ok(()),
        }
    }

    /// Returns a cursor over the rows in `range`, counted from 0. If `range` is `None`, the cursor reads all rows.
    /// `used_columns` holds the indices of the columns to read. In all other columns, each cell is
    /// [`Cell::Missing`](crate::train::data::Cell::Missing).
    ///
    /// # Errors
    ///
    /// If a used column has a type or a compression that is not supported.
    pub(crate) fn into_rows(
        self,
        used_columns: &[usize],
        range: Option<Range<u64>>,
    ) -> Result<ParquetRows, DataError> {
        let mut columns = Vec::with_capacity(used_columns.len());
        for &index in used_columns {
            let ParquetColumn { name, content } = &self.columns[index];
            let (leaf_index, column_type) = match content {
                Ok(content) => *content,
                Err(content) => {
                    return Err(
                        self.error(format!("column `{name}` holds {content}, which ringtrain cannot read"))
                    );
                }
            };
            self.check_compression(name, leaf_index)?;
            columns.push(UsedColumn { name: name.clone(), index, leaf_index, column_type });
        }
        let range = range.unwrap_or(0..self.row_count);
        Ok(ParquetRows::new(self.path, self.reader, (columns, self.columns.len()), range))
    }

    /// Returns an error if a row group stores a column with a compression that is not supported. `name` and `leaf_index` are the
    /// name of the column and its index among the leaves of the schema.
    fn check_compression(&self, name: &str, leaf_index: usize) -> Result<(), DataError> {
        for group in self.reader.metadata().row_groups() {
            let compression = read_part(&self.path, "the footer of this file", || {
                Ok(group.column(leaf_index).compression())
            })?;
            let is_supported = matches!(
                compression,
                Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) | Compression::ZSTD(_)
            );
            if !is_supported {
                return Err(self.error(format!(
                    "column `{name}` has the compression {compression}, which ringtrain cannot read; write the file with the \
                     compression snappy, zstd, gzip or none"
                )));
            }
        }
        Ok(())
    }

    /// Returns an error that names this file and the problem.
    pub(super) fn error(&self, problem: impl Into<String>) -> DataError {
        DataError::malformed(&self.path, problem)
    }
}

/// Reads the footer of a file of `file_bytes` bytes. An error says what is wrong with the file.
fn read_footer(file: &mut File, file_bytes: u64) -> Result<Vec<u8>, String> {
    let hint = "download or write the file again";
    let truncated = || format!("is truncated or is not a Parquet file: it does not end with `PAR1`; {hint}");
    let mut read_at = |from_end: u64, len: u64| {
        let start = file_bytes.checked_sub(from_end).ok_or_else(truncated)?;
        let mut part = vec![0; len as usize];
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut part));
        read.map(|()| part).map_err(|error| format!("cannot be read ({error})"))
    };
    let end = read_at(END_BYTES, END_BYTES)?;
    let (length, mark) = end.split_at(4);
    if mark == MARK_OF_ENCRYPTED_FILES {
        return Err("is encrypted, and ringtrain cannot read encrypted Parquet files".into());
    }
    if mark != MARK {
        return Err(truncated());
    }
    let length = length.iter().rev().fold(0, |length, &byte| length << 8 | u64::from(byte));
    if length > FOOTER_BYTES_MAX || length + END_BYTES + MARK.len() as u64 > file_bytes {
        return Err(format!(
            "is corrupt: its end says that the footer has {length} bytes, but the file has only {file_bytes} bytes, and a footer \
             may have at most {FOOTER_BYTES_MAX} bytes; {hint}"
        ));
    }
    read_at(length + END_BYTES, length)
}

/// Returns the columns of the table: the fields at the top level of the schema.
fn table_columns(schema: &SchemaDescriptor) -> Vec<ParquetColumn> {
    let fields = schema.root_schema().get_fields();
    let mut first_leaves = vec![None; fields.len()];
    for leaf_index in (0..schema.num_columns()).rev() {
        first_leaves[schema.get_column_root_idx(leaf_index)] = Some(leaf_index);
    }
    let column = |(field, leaf_index): (&std::sync::Arc<Type>, Option<usize>)| {
        let content = match (describe_nested_field(field), leaf_index) {
            (Some(nested), _) => Err(nested.to_owned()),
            (None, Some(leaf_index)) => {
                ColumnType::of_column(&schema.column(leaf_index)).map(|column_type| (leaf_index, column_type))
            }
            (None, None) => Err("no values".into()),
        };
        ParquetColumn { name: field.name().to_owned(), content }
    };
    fields.iter().zip(first_leaves).map(column).collect()
}

/// Returns what a nested field holds, for example `lists`. Returns `None` if the field is not nested.
fn describe_nested_field(field: &Type) -> Option<&'static str> {
    let info = field.get_basic_info();
    if info.has_repetition() && info.repetition() == Repetition::REPEATED {
        return Some("lists");
    }
    match info.converted_type() {
        _ if field.is_primitive() => None,
        ConvertedType::LIST => Some("lists"),
        ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE => Some("maps"),
        _ => Some("structs"),
    }
}
