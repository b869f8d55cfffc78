//! Errors in the data of a run.

use std::io;
use std::path::{Path, PathBuf};

use crate::types::debug_as_display;

/// The reason why data cannot be used for training. If the data is a file, the message names the file and, where
/// possible, the line and the column.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system could not read a file.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The operating system could not write a temporary file of `--stream`.
    #[error(
        "cannot write a temporary file in {}: {source}; free disk space, or pass another directory to --stream",
        directory.display()
    )]
    Unwritable {
        /// The directory of the temporary file.
        directory: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The content of a file does not follow the format, or a path does not name a file of the right kind.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file, or an array in a `.npz` file: `d.npz/x.npy`.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// The data does not fit the model, the task or another option.
    #[error("{0}")]
    Unsuitable(String),
}

debug_as_display!(DataError);

impl DataError {
    /// Returns [`DataError::Unreadable`] for the file at `path`.
    pub(crate) fn unreadable(path: &Path, source: io::Error) -> Self {
        Self::Unreadable { path: path.to_owned(), source }
    }

    /// Returns [`DataError::Malformed`] for the file at `path`.
    pub(crate) fn malformed(path: &Path, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), problem: problem.into() }
    }
}
