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
use super::guard::read_part;
use super::rows::{ParquetRows, UsedColumn};
use crate::train::data::DataError;

/// The maximum size in bytes of a footer.
const FOOTER_BYTES_MAX: u64 = 1 << 28;
/// A file begins and ends with these bytes.
const MARK: [u8; 4] = *b"PAR1";
/// A file with an encrypted footer ends with these bytes.
const MARK_OF_ENCRYPTED_FILES: [u8; 4] = *b"PARE";
/// The size in bytes of the end of a file: the length of the footer, and the mark.
const END_BYTES: u64 = 8;

/// An open Parquet file.
pub(crate) struct ParquetFile {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    pub(super) columns: Vec<ParquetColumn>,
    /// The number of rows.
    pub(super) rows: u64,
    /// A hash of the length and the footer of the file.
    pub(super) fingerprint: [u8; 32],
}

/// A column of the table in a Parquet file.
pub(super) struct ParquetColumn {
    pub(super) name: String,
    /// The position of the column among the columns that are not nested, and the type of its values. If the type is
    /// not supported, what the column holds.
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
        let bytes = metadata.len();
        let footer = read_footer(&mut file, bytes).map_err(|problem| DataError::malformed(path, problem))?;
        let fingerprint = Sha256::new().chain_update(bytes.to_le_bytes()).chain_update(footer).finalize();
        let (reader, columns, rows) = read_part(path, "the footer of this file", || {
            let reader = SerializedFileReader::new(file)?;
            let columns = table_columns(reader.metadata().file_metadata().schema_descr());
            let groups = reader.metadata().row_groups().iter().map(RowGroupMetaData::num_rows);
            let rows = groups.map(|rows| u64::try_from(rows).ok());
            let rows = rows.reduce(|sum, rows| sum?.checked_add(rows?)).unwrap_or(Some(0));
            Ok((reader, columns, rows))
        })?;
        let rows =
            rows.ok_or_else(|| DataError::malformed(path, "has a row group with a wrong number of rows"))?;
        Ok(Self { path: path.to_owned(), reader, columns, rows, fingerprint: fingerprint.into() })
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
            return Err(self.error(format!("has {found} columns, but {first_file} has {count}; {hint}")));
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

    /// Returns the rows with the numbers `range`, counted from 0, or all rows. Only the columns with the numbers `used`
    /// are read.
    ///
    /// # Errors
    ///
    /// If a used column has a type or a compression that is not supported.
    pub(crate) fn into_rows(
        self,
        used: &[usize],
        range: Option<Range<u64>>,
    ) -> Result<ParquetRows, DataError> {
        let mut used_columns = Vec::with_capacity(used.len());
        for &index in used {
            let ParquetColumn { name, content } = &self.columns[index];
            let (leaf, column_type) = match content {
                Ok(content) => *content,
                Err(content) => {
                    return Err(
                        self.error(format!("column `{name}` holds {content}, which ringtrain cannot read"))
                    );
                }
            };
            self.check_compression(name, leaf)?;
            used_columns.push(UsedColumn { name: name.clone(), index, leaf, column_type });
        }
        let range = range.unwrap_or(0..self.rows);
        Ok(ParquetRows::new(self.path, self.reader, (used_columns, self.columns.len()), range))
    }

    fn check_compression(&self, name: &str, leaf: usize) -> Result<(), DataError> {
        for group in self.reader.metadata().row_groups() {
            let compression =
                read_part(&self.path, "the footer of this file", || Ok(group.column(leaf).compression()))?;
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

/// Reads the footer of a file of `bytes` bytes. An error says what is wrong with the file.
fn read_footer(file: &mut File, bytes: u64) -> Result<Vec<u8>, String> {
    let hint = "download or write it again";
    let truncated = || format!("is truncated or no Parquet file: it does not end with `PAR1`; {hint}");
    let mut read_at = |from_end: u64, len: u64| {
        let start = bytes.checked_sub(from_end).ok_or_else(truncated)?;
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
    if length > FOOTER_BYTES_MAX || length + END_BYTES + MARK.len() as u64 > bytes {
        return Err(format!("is corrupt: it has {bytes} bytes, and its footer {length}; {hint}"));
    }
    read_at(length + END_BYTES, length)
}

/// Returns the columns of the table: the fields at the top level of the schema.
fn table_columns(schema: &SchemaDescriptor) -> Vec<ParquetColumn> {
    let fields = schema.root_schema().get_fields();
    let mut first_leaves = vec![None; fields.len()];
    for leaf in (0..schema.num_columns()).rev() {
        first_leaves[schema.get_column_root_idx(leaf)] = Some(leaf);
    }
    let column = |(field, leaf): (&std::sync::Arc<Type>, Option<usize>)| {
        let content = match (what_is_nested(field), leaf) {
            (Some(nested), _) => Err(nested.to_owned()),
            (None, Some(leaf)) => {
                ColumnType::of_column(&schema.column(leaf)).map(|column_type| (leaf, column_type))
            }
            (None, None) => Err("no values".into()),
        };
        ParquetColumn { name: field.name().to_owned(), content }
    };
    fields.iter().zip(first_leaves).map(column).collect()
}

/// Returns what a nested field holds. Returns `None` if the field is not nested.
fn what_is_nested(field: &Type) -> Option<&'static str> {
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
