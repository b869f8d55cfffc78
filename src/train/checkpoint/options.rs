//! Reads the options that a checkpoint stores, and writes the options of a run to `config.toml` beside its checkpoints.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;

use serde::Deserialize;

use super::{CheckpointError, HEADER_BYTES_MAX, LATEST_FILE_NAME, OPTIONS_KEY, check_metadata};
use crate::train::atomic_file;
use crate::train::config::Config;
use crate::train::setup::Setup;

/// The name of the file with the options of the run, in the checkpoint directory.
pub(crate) const OPTIONS_FILE_NAME: &str = "config.toml";

/// The beginning of the file with the options. A file without this beginning belongs to the user.
const HEADING: &str = "# The options of the last run that saved checkpoints in this directory.\n";

/// The header of a safetensors file, without the tensors.
#[derive(Deserialize)]
struct CheckpointHeader {
    #[serde(rename = "__metadata__")]
    metadata: HashMap<String, String>,
}

/// Returns the text [`CheckpointSettings::options`](super::CheckpointSettings::options) from the latest checkpoint in
/// `directory`. Returns `None` if there is no checkpoint, or if the checkpoint does not contain this text.
///
/// # Errors
///
/// The checkpoint cannot be read, its format is unknown, or its metadata does not match its hash.
pub fn read_options(directory: &Path) -> Result<Option<String>, CheckpointError> {
    let path = directory.join(LATEST_FILE_NAME);
    let fail = |error| CheckpointError::io("read", &path, error);
    let mut file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(fail)?,
    };
    let corrupt = |problem: String| CheckpointError::Corrupt { path: path.clone(), problem };
    let mut prefix = Vec::new();
    file.by_ref().take(8).read_to_end(&mut prefix).map_err(fail)?;
    let length = prefix.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let length = length.filter(|&length| length <= HEADER_BYTES_MAX);
    let length = length
        .ok_or_else(|| corrupt(format!("its header is missing or has more than {HEADER_BYTES_MAX} bytes")))?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).map_err(fail)?;
    let header: CheckpointHeader =
        serde_json::from_slice(&header).map_err(|error| corrupt(error.to_string()))?;
    check_metadata(&path, &header.metadata)?;
    Ok(header.metadata.get(OPTIONS_KEY).cloned())
}

/// Writes the options of a run to a file in the checkpoint directory. Comments in this file show the values that the
/// run chose for options that were not given.
pub(crate) fn write_options(
    directory: &Path,
    options: &str,
    config: &Config,
    setup: &Setup,
) -> Result<(), CheckpointError> {
    let path = directory.join(OPTIONS_FILE_NAME);
    let fail = |action, error| CheckpointError::io(action, &path, error);
    if !may_replace_options_file(&path).map_err(|error| fail("read", error))? {
        return Err(CheckpointError::OtherOptionsFile { path });
    }
    let mut text = HEADING.to_owned();
    text += "# To start a new run with the same options, pass this file to ringtrain --config.\n\n";
    text += options;
    let settings = &setup.settings;
    let chosen = [
        ("model", config.model.is_none(), format!("\"{}\"", setup.model)),
        ("optimizer", config.rule.is_none(), format!("\"{}\"", settings.rule.name())),
        ("batch-size", config.batch_size.is_none(), settings.batch_size.to_string()),
        ("epochs", config.epochs.is_none(), settings.epochs.to_string()),
    ];
    text += "\n# Values that ringtrain chose for this model and data:\n";
    for (name, _, value) in chosen.iter().filter(|(_, is_chosen, _)| *is_chosen) {
        let _ = writeln!(text, "# {name} = {value}");
    }
    atomic_file::replace_file(&path, text.as_bytes()).map_err(|error| fail("write", error))
}

/// Returns true if the file at `path` does not exist, or if [`write_options`] wrote it.
fn may_replace_options_file(path: &Path) -> io::Result<bool> {
    let mut beginning = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        file => file?.take(HEADING.len() as u64).read_to_end(&mut beginning)?,
    };
    Ok(beginning == HEADING.as_bytes())
}
