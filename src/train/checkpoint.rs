//! Checkpoints: a safetensors file with the parameters under `PyTorch`'s names, the optimiser's state and the position of the
//! run. A resumed run computes the same as one that was never stopped, on any number of ranks.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::atomic_file;
use super::data::Standardizer;
use super::model::{Network, Scale};
use super::report::{EpochRecord, parameters_hash};

/// The file's name within the checkpoint directory.
pub const FILE_NAME: &str = "checkpoint.safetensors";
const FORMAT: &str = "ringtrain-2";
/// The format of earlier versions, which lacks some of the identity's entries and the learning rate.
const FORMAT_1: &str = "ringtrain-1";
/// The most bytes that names, metadata and history may take beside the tensors.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The bytes that they take in a usual run.
const HEADER_BYTES_USUAL: u64 = 1 << 16;

/// A checkpoint or report that cannot be used or written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system returned an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What failed, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A checkpoint cannot be saved.
    #[error(
        "cannot save checkpoints of {bytes} bytes (two at a time) to {}: {source}; free some space or name another --checkpoint \
         directory",
        path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// The bytes that are needed.
        bytes: u64,
        /// The reason.
        source: io::Error,
    },
    /// The file is damaged.
    #[error(
        "{} is truncated or corrupt ({problem}); restore it from a copy, or name another --checkpoint directory",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The checkpoint is from another run.
    #[error(
        "{} does not fit: it was made with {what} {found}, this run has {what} {wanted}; resume with the options that it was \
         made with, or name another --checkpoint directory",
        path.display()
    )]
    Unfit {
        /// The file.
        path: PathBuf,
        /// The option, or the property of the data, that differs.
        what: String,
        /// The checkpoint's value.
        found: String,
        /// This run's value.
        wanted: String,
    },
    /// The checkpoint was made with other data of the same size.
    #[error(
        "{} does not fit: it was made with --data {found}, and --data {wanted} of this run holds other values; resume with \
         the data that it was made with, or name another --checkpoint directory",
        path.display()
    )]
    OtherData {
        /// The file.
        path: PathBuf,
        /// The name of the data it was made with.
        found: String,
        /// The name of this run's data.
        wanted: String,
    },
    /// There is a checkpoint, and `--resume` was not given.
    #[error("{} exists; pass --resume to go on from it, or name another --checkpoint directory", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

/// `main` and `unwrap` print errors by `Debug`, so it writes the same sentence as `Display`.
impl fmt::Debug for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

/// The position of a run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Position {
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// The epoch's next step, counted from 0.
    pub step: u64,
    /// Steps taken since the run began.
    pub steps_total: u64,
    /// Steps taken when the momentum of Nesterov's rule last started from 0.
    pub momentum_start: u64,
    /// Sum of the losses of the epoch's samples so far.
    pub loss_sum: f64,
    /// Number of these samples.
    pub samples: u64,
}

impl Position {
    /// As numbers that can be broadcast.
    pub(crate) fn to_words(self) -> [u64; 6] {
        let Self { epoch, step, steps_total, momentum_start, loss_sum, samples } = self;
        [epoch, step, steps_total, momentum_start, loss_sum.to_bits(), samples]
    }

    /// Back from [`to_words`](Self::to_words).
    pub(crate) fn from_words(words: [u64; 6]) -> Self {
        let [epoch, step, steps_total, momentum_start, loss_sum, samples] = words;
        Self { epoch, step, steps_total, momentum_start, loss_sum: f64::from_bits(loss_sum), samples }
    }
}

const POSITION_KEYS: [&str; 6] =
    ["epoch", "step", "steps_total", "momentum_start", "epoch_loss_sum_bits", "epoch_samples"];

/// Everything that changes as a run goes on.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct TrainingState {
    pub(crate) position: Position,
    /// `None` until it has been decided, and in checkpoints of earlier versions.
    pub(crate) learning_rate: Option<f32>,
    pub(crate) parameters: Vec<f32>,
    /// The optimiser's vectors.
    pub(crate) optimizer: Vec<Vec<f32>>,
    pub(crate) history: Vec<EpochRecord>,
}

/// What must be the same in a checkpoint and in the run that goes on from it.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct RunIdentity {
    /// Compared in this order; the first difference is reported.
    pub(crate) entries: Vec<IdentityEntry>,
    /// The name of the data, for messages: a file may have moved.
    pub(crate) data_name: String,
    /// A hash of the data's content.
    pub(crate) data_hash: String,
    /// The names of the optimiser's vectors.
    pub(crate) optimizer_names: &'static [&'static str],
    /// How features are standardised; saved for programs that use the model.
    pub(crate) standardizer: Option<Standardizer>,
    /// How outputs are brought into the target's unit; saved for the same reason.
    pub(crate) scale: Scale,
    /// The classes' names.
    pub(crate) classes: Vec<String>,
}

/// One value of an [`RunIdentity`].
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct IdentityEntry {
    /// The key in the checkpoint's metadata.
    pub(crate) key: &'static str,
    /// The option that decides it, for messages.
    pub(crate) option: &'static str,
    pub(crate) value: String,
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Writes a checkpoint into `directory`, which is created if it does not exist. The previous checkpoint stays until the new
/// one is safely on the disk.
pub(crate) fn save(
    directory: &Path,
    network: &Network,
    identity: &RunIdentity,
    state: &TrainingState,
) -> Result<(), CheckpointError> {
    let path = directory.join(FILE_NAME);
    let mut tensors = Vec::new();
    for (name, shape, range) in network.tensors() {
        tensors.push(Tensor { name, shape, bytes: to_bytes(&state.parameters[range]) });
    }
    for (name, values) in identity.optimizer_names.iter().zip(&state.optimizer) {
        tensors.push(Tensor { name: (*name).into(), shape: vec![values.len()], bytes: to_bytes(values) });
    }
    if let Some(Standardizer { mean, inverse_deviation }) = &identity.standardizer {
        for (name, values) in [("features.mean", mean), ("features.inverse_deviation", inverse_deviation)] {
            tensors.push(Tensor { name: name.into(), shape: vec![values.len()], bytes: to_bytes(values) });
        }
    }
    let mut metadata: HashMap<String, String> =
        identity.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.clone())).collect();
    metadata.extend(
        POSITION_KEYS.iter().zip(state.position.to_words()).map(|(k, v)| ((*k).into(), v.to_string())),
    );
    let json = |value| serde_json::to_string(value).expect("strings and numbers are valid JSON");
    metadata.insert("format".into(), FORMAT.into());
    metadata.insert("data".into(), identity.data_hash.clone());
    metadata.insert("data_name".into(), identity.data_name.clone());
    if let Some(rate) = state.learning_rate {
        metadata.insert("learning_rate".into(), rate.to_string());
    }
    metadata.insert("classes".into(), serde_json::Value::from(identity.classes.clone()).to_string());
    metadata.insert("target_mean".into(), identity.scale.mean.to_string());
    metadata.insert("target_deviation".into(), identity.scale.deviation.to_string());
    metadata.insert("history".into(), json(&state.history));
    metadata.insert("state_hash".into(), state_hash(state));
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), &tensor.bytes);
        (tensor.name.as_str(), view.expect("a tensor has as many bytes as its shape says"))
    });
    let fail = |action, source| CheckpointError::io(action, &path, source);
    let bytes = safetensors::serialize(views, Some(metadata))
        .map_err(|error| fail("write", io::Error::other(error.to_string())))?;
    create_directory(directory)?;
    atomic_file::write(&path, &bytes).map_err(|error| fail("write", error))
}

fn create_directory(directory: &Path) -> Result<(), CheckpointError> {
    fs::create_dir_all(directory)
        .map_err(|error| CheckpointError::io("create the directory", directory, error))
}

/// Checks that checkpoints can be saved in `directory` while the previous one is still there: creates the directory if it does
/// not exist, and for a moment a file as large as they need.
pub(crate) fn check_space(
    directory: &Path,
    network: &Network,
    identity: &RunIdentity,
) -> Result<(), CheckpointError> {
    create_directory(directory)?;
    let copies = if exists(directory)? { 1 } else { 2 };
    let bytes = copies * (tensor_bytes(network, identity) + HEADER_BYTES_USUAL);
    let path = directory.join(FILE_NAME);
    atomic_file::check_space(&path, bytes).map_err(|source| CheckpointError::NoSpace { path, bytes, source })
}

/// Bytes of all tensors in a checkpoint.
fn tensor_bytes(network: &Network, identity: &RunIdentity) -> u64 {
    let vectors = 1 + identity.optimizer_names.len();
    let standardizer_values = identity.standardizer.as_ref().map_or(0, |standard| 2 * standard.mean.len());
    4 * (vectors * network.parameter_count() + standardizer_values) as u64
}

fn state_hash(state: &TrainingState) -> String {
    let parts: Vec<String> = std::iter::once(&state.parameters)
        .chain(&state.optimizer)
        .map(|part| parameters_hash(part))
        .collect();
    parts.join("+")
}

/// Whether `directory` holds a checkpoint.
pub(crate) fn exists(directory: &Path) -> Result<bool, CheckpointError> {
    let path = directory.join(FILE_NAME);
    path.try_exists().map_err(|error| CheckpointError::io("look for", &path, error))
}

/// The identity entries of a checkpoint that differ from this run's, as an error.
fn check_identity(
    path: &Path,
    identity: &RunIdentity,
    metadata: &HashMap<String, String>,
) -> Result<(), CheckpointError> {
    let corrupt = |key: &str| CheckpointError::Corrupt {
        path: path.to_owned(),
        problem: format!("it does not say its {key}"),
    };
    let format = metadata.get("format").ok_or_else(|| corrupt("format"))?;
    if format != FORMAT && format != FORMAT_1 {
        return Err(CheckpointError::Unfit {
            path: path.to_owned(),
            what: "format".into(),
            found: format.clone(),
            wanted: FORMAT.into(),
        });
    }
    for IdentityEntry { key, option, value } in &identity.entries {
        let found = match metadata.get(*key) {
            Some(found) => found,
            None if format == FORMAT_1 => continue,
            None => return Err(corrupt(key)),
        };
        if found != value {
            return Err(CheckpointError::Unfit {
                path: path.to_owned(),
                what: (*option).to_owned(),
                found: found.clone(),
                wanted: value.clone(),
            });
        }
    }
    if *metadata.get("data").ok_or_else(|| corrupt("data"))? != identity.data_hash {
        let found = metadata.get("data_name").cloned().unwrap_or_else(|| "of an unknown name".into());
        return Err(CheckpointError::OtherData {
            path: path.to_owned(),
            found,
            wanted: identity.data_name.clone(),
        });
    }
    Ok(())
}

/// Reads the checkpoint in `directory`; `None` if there is none.
pub(crate) fn load(
    directory: &Path,
    network: &Network,
    identity: &RunIdentity,
) -> Result<Option<TrainingState>, CheckpointError> {
    if !exists(directory)? {
        return Ok(None);
    }
    let path = directory.join(FILE_NAME);
    let corrupt = |problem: String| CheckpointError::Corrupt { path: path.clone(), problem };
    let unfit = |what: &str, found: String, wanted: String| CheckpointError::Unfit {
        path: path.clone(),
        what: what.to_owned(),
        found,
        wanted,
    };
    let read_error = |error| CheckpointError::io("read", &path, error);
    let file_bytes = fs::metadata(&path).map_err(read_error)?.len();
    let tensor_bytes = tensor_bytes(network, identity);
    let too_long = |bytes: u64| unfit("size in bytes", bytes.to_string(), format!("about {tensor_bytes}"));
    let bytes_max = tensor_bytes + HEADER_BYTES_MAX;
    if file_bytes > bytes_max {
        return Err(too_long(file_bytes));
    }
    let bytes = read_at_most(&path, bytes_max + 1).map_err(read_error)?;
    if bytes.len() as u64 > bytes_max {
        return Err(too_long(bytes.len() as u64));
    }
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| corrupt(error.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| corrupt(error.to_string()))?;
    let metadata = header.metadata().as_ref().ok_or_else(|| corrupt("it has no metadata".into()))?;
    let value = |key: &str| metadata.get(key).ok_or_else(|| corrupt(format!("it does not say its {key}")));
    check_identity(&path, identity, metadata)?;
    let tensor = |name: &str, shape: &[usize]| match tensors.tensor(name) {
        Ok(view) if view.dtype() == Dtype::F32 && view.shape() == shape => Ok(from_bytes(view.data())),
        Ok(view) => {
            let what = format!("the shape of {name}");
            Err(unfit(&what, format!("{:?} {:?}", view.dtype(), view.shape()), format!("F32 {shape:?}")))
        }
        Err(error) => Err(corrupt(error.to_string())),
    };
    let mut state = TrainingState::default();
    for (name, shape, _) in network.tensors() {
        state.parameters.extend(tensor(&name, &shape)?);
    }
    for name in identity.optimizer_names {
        state.optimizer.push(tensor(name, &[network.parameter_count()])?);
    }
    let mut words = [0; POSITION_KEYS.len()];
    for (word, key) in words.iter_mut().zip(POSITION_KEYS) {
        if key == "momentum_start" && metadata["format"] == FORMAT_1 {
            continue;
        }
        *word = value(key)?.parse().map_err(|_| corrupt(format!("its {key} is not a number")))?;
    }
    state.position = Position::from_words(words);
    state.learning_rate = match metadata.get("learning_rate") {
        Some(text) => Some(text.parse().map_err(|_| corrupt("its learning_rate is not a number".into()))?),
        None => None,
    };
    state.history = serde_json::from_str(value("history")?).map_err(|error| corrupt(error.to_string()))?;
    if *value("state_hash")? != state_hash(&state) {
        return Err(corrupt("its content does not match its own hash".into()));
    }
    Ok(Some(state))
}

/// At most the first `bytes_max` bytes of a file. A file may be longer than its metadata says.
fn read_at_most(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
