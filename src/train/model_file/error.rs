//! The errors of model files.

use std::io;
use std::path::{Path, PathBuf};

use super::storage::MODEL_FORMAT_VERSION;
use crate::types::debug_as_display;

/// The reason why a model file cannot be read or written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// The operating system returned an error.
    #[error("cannot {action} the model file {}: {source}", path.display())]
    Io {
        /// The action that failed, as a verb, for example `read`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is damaged.
    #[error(
        "the model file {} is truncated or corrupt ({problem}); restore it from a copy, or train and save the model again",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The file is not a model file.
    #[error("{} is not a model file ({problem}); pass a file that `ringtrain --save-model FILE` wrote", path.display())]
    NotModelFile {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be a model file.
        problem: String,
    },
    /// The file is a checkpoint.
    #[error(
        "{} is a checkpoint, not a model file; to get a model file, pass --resume --save-model FILE to the training command \
         that saved the checkpoint",
        path.display()
    )]
    Checkpoint {
        /// The file.
        path: PathBuf,
    },
    /// A newer version of ringtrain wrote the file.
    #[error(
        "{} has version {version} of the format of model files, but this ringtrain only reads versions up to \
         {MODEL_FORMAT_VERSION}; install a newer ringtrain",
        path.display()
    )]
    NewerVersion {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        version: u64,
    },
    /// The file holds a program's own model, and the caller passed no model or another model.
    #[error("cannot load the model {model} in {}: {problem}", path.display())]
    OwnModel {
        /// The file.
        path: PathBuf,
        /// The name of the model in the file.
        model: String,
        /// What to do.
        problem: String,
    },
    /// This program was built without a feature that the model needs.
    #[error("the model in {} {need}", path.display())]
    NeedsFeature {
        /// The file.
        path: PathBuf,
        /// The end of the error message, which names the feature and says how to build the program with this feature.
        need: &'static str,
    },
    /// The format of model files cannot hold the model.
    #[error("cannot save the model to {}: {problem}", path.display())]
    Unsuitable {
        /// The file.
        path: PathBuf,
        /// Why the model cannot be saved.
        problem: String,
    },
    /// The model would replace an existing file that is not a model file.
    #[error(
        "--save-model {} would overwrite a file that is not a model file; pass another name, or remove the file",
        path.display()
    )]
    WouldOverwrite {
        /// The file.
        path: PathBuf,
    },
}

debug_as_display!(ModelFileError);

impl ModelFileError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn corrupt(path: &Path, problem: impl Into<String>) -> Self {
        Self::Corrupt { path: path.to_owned(), problem: problem.into() }
    }

    pub(crate) fn not_a_model_file(path: &Path, problem: impl Into<String>) -> Self {
        Self::NotModelFile { path: path.to_owned(), problem: problem.into() }
    }
}
