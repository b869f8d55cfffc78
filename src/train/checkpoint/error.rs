//! The errors of checkpoints and reports.

use std::io;
use std::path::{Path, PathBuf};

use crate::types::debug_as_display;

use super::FORMAT_VERSION;
use super::files::LATEST_FILE_NAME;

/// The reason why a checkpoint cannot be read, used or written, or why a report cannot be written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system returned an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action that failed, as a verb, for example `read`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// There is not enough space to save a checkpoint.
    #[error(
        "cannot save checkpoints to {}, which need {bytes} bytes: {source}; free some space or pass another --checkpoint \
         directory",
        path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// The number of bytes that are needed.
        bytes: u64,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file system has no hard links, which are needed to keep several checkpoints.
    #[error(
        "cannot keep several checkpoints in {}: it does not support hard links ({source}); leave out --keep-checkpoints and \
         --keep-best, or pass another --checkpoint directory",
        path.display()
    )]
    NoLinks {
        /// The directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A checkpoint that a run would replace or remove is not a regular file.
    #[error(
        "cannot save checkpoints: {} is {kind}, not a regular file; remove it or replace it by a copy of a checkpoint, or pass \
         another --checkpoint directory",
        path.display()
    )]
    NotRegularFile {
        /// The path of the checkpoint.
        path: PathBuf,
        /// The kind of file at the path, for example `a symbolic link`.
        kind: &'static str,
    },
    /// The checkpoint directory has a file `config.toml` that ringtrain did not write.
    #[error(
        "this run would replace {} by a file with its options, but ringtrain did not write {}; rename the file, or pass \
         another --checkpoint directory",
        path.display(), path.display()
    )]
    OtherOptionsFile {
        /// The path of the file.
        path: PathBuf,
    },
    /// The last checkpoint of a run was not saved.
    #[error(
        "the checkpoint of step {steps}, the last of the run, was not saved: {source}; {latest}; correct the cause and pass \
         --resume to repeat the missing steps"
    )]
    LastNotSaved {
        /// The number of steps of the run.
        steps: u64,
        /// A sentence that says which checkpoint is the latest.
        latest: String,
        /// The reason.
        source: Box<CheckpointError>,
    },
    /// The names of the columns, the categories and the classes are too long for a checkpoint.
    #[error(
        "cannot save checkpoints to {}: the names of the columns, categories and classes need {bytes} bytes, but a checkpoint \
         holds at most {bytes_max}; leave out columns of text (--drop), or leave out --checkpoint",
        path.display()
    )]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// The number of bytes that are needed.
        bytes: u64,
        /// The maximum.
        bytes_max: u64,
    },
    /// The file is damaged.
    #[error(
        "{} is truncated or corrupt ({problem}); replace it by a copy or by an earlier checkpoint of --keep-checkpoints, or pass \
         another --checkpoint directory",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A newer version of ringtrain saved the checkpoint.
    #[error(
        "cannot resume from {}: it has version {version} of the format of checkpoints, but this ringtrain only reads versions \
         up to {FORMAT_VERSION}; install a newer ringtrain, or pass another --checkpoint directory",
        path.display()
    )]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// The version of the checkpoint.
        version: u64,
    },
    /// The checkpoint was saved by a run with different options, or with data of a different size.
    #[error(
        "cannot resume from {}: it was saved with {what} {found}, but this run has {what} {wanted}; resume with the original \
         options, or pass another --checkpoint directory",
        path.display()
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The option or the property of the data that differs.
        what: String,
        /// The value in the checkpoint.
        found: String,
        /// The value in this run.
        wanted: String,
    },
    /// An earlier version of ringtrain saved the checkpoint, and did not record an option that must not change.
    #[error(
        "cannot resume from {}: an earlier version of ringtrain saved it, and did not record {what}; train again with another \
         --checkpoint directory", path.display()
    )]
    NotRecorded {
        /// The file.
        path: PathBuf,
        /// The option that is not recorded.
        what: String,
    },
    /// The checkpoint was saved by a run with other data.
    #[error(
        "cannot resume from {}: it was saved with --data {found}, but --data {wanted} of this run contains different \
         values; resume with the original --data and --test-data, or pass another --checkpoint directory",
        path.display()
    )]
    OtherData {
        /// The file.
        path: PathBuf,
        /// The name of the data with which the checkpoint was saved.
        found: String,
        /// The name of the data of this run.
        wanted: String,
    },
    /// The directory contains checkpoints, but the latest checkpoint is missing.
    #[error(
        "cannot resume: there is {}, but the latest checkpoint, {LATEST_FILE_NAME}, is missing; to continue from another checkpoint of this \
         directory, copy it to {LATEST_FILE_NAME}",
        path.display()
    )]
    NoLatest {
        /// One of the checkpoints in the directory.
        path: PathBuf,
    },
    /// A checkpoint exists, and `--resume` was not given.
    #[error(
        "{} already exists; pass --resume to continue from it, or pass another --checkpoint directory",
        path.display()
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

debug_as_display!(CheckpointError);

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}
