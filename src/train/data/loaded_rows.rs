//! The samples of a file or a directory, with the origin of each sample.

use std::path::PathBuf;

use super::{DataError, UninterpretedSamples};

/// All samples of a data source, and the origin of each sample. A row is a sample.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct LoadedRows {
    pub(crate) samples: UninterpretedSamples,
    pub(crate) origins: RowOrigins,
    /// Messages for the user.
    pub(crate) notes: Vec<String>,
}

/// Where rows come from.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum RowOrigins {
    /// The rows are lines of one file: the path of the file, and the line number of each row, counted from 1.
    Lines(PathBuf, Vec<u64>),
    /// Each row is a file.
    Files(Vec<PathBuf>),
}

impl RowOrigins {
    /// Returns an error that names the origin of a row: the file and, if the row is a line, the number of the line.
    ///
    /// # Panics
    ///
    /// If `row` is out of range.
    pub(crate) fn error(&self, row: usize, problem: &str) -> DataError {
        match self {
            Self::Lines(path, lines) => DataError::malformed(path, format!("line {}: {problem}", lines[row])),
            Self::Files(paths) => DataError::malformed(&paths[row], problem),
        }
    }
}
