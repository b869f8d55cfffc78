//! Errors in data.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Data that cannot be used for training. The message names the file and, where possible, line and column.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused to read a file.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file's content is not what its format requires.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// The data does not fit the model, the task or another option.
    #[error("{0}")]
    Unsuitable(String),
}

/// `main` and `unwrap` print errors by `Debug`, so it writes the same sentence as `Display`.
impl fmt::Debug for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl DataError {
    /// A file that the operating system refused to read.
    pub(crate) fn unreadable(path: &Path, source: io::Error) -> Self {
        Self::Unreadable { path: path.to_owned(), source }
    }

    /// A file with wrong content.
    pub(crate) fn malformed(path: &Path, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_owned(), problem: problem.into() }
    }
}
