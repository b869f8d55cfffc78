//! Saves and loads checkpoints. A checkpoint is a safetensors file with the parameters (named as in `PyTorch`), the
//! state of the optimizer and the position of the run. A run that resumes from a checkpoint continues as if it had not
//! been interrupted. The resumed run may have a different number of ranks.

mod compressed_sums;
mod error;
mod files;
mod options;
mod schedule;
mod settings;
mod state;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use self::compressed_sums::{compression_tensors, read_compression_memory};
pub use self::error::CheckpointError;
pub use self::files::LATEST_FILE_NAME;
pub(crate) use self::files::{BEST_FILE_NAME, CheckpointFiles};
pub use self::options::read_options;
pub(crate) use self::options::{OPTIONS_FILE_NAME, write_options};
pub use self::settings::{CheckpointSettings, ExistingCheckpoint};
pub(crate) use self::state::{IdentityEntry, Position, RunIdentity, TrainingState};
pub(crate) use self::writer::CheckpointWriter;
use super::atomic_file;
use super::compression_schedule::NO_MOMENTUM;
use super::data::Standardizer;
use super::early_stopping::BestParameters;
use super::model::{Network, ParameterTensor};
use super::model_file::content_digest;
use super::optimizer::Rule;
use super::report::parameters_hash;
use crate::types::{WORLD_SIZE_MAX, counted};

/// The name of a checkpoint format consists of this prefix and the version of the format.
const FORMAT_PREFIX: &str = "ringtrain-";
/// The version of the checkpoint format that this program writes. This program also reads all earlier versions.
const FORMAT_VERSION: u64 = 3;
/// The name of the checkpoint format with the version [`FORMAT_VERSION`].
const FORMAT_3: &str = "ringtrain-3";
/// The format that earlier versions of ringtrain wrote. Its metadata has no [`METADATA_HASH_KEY`].
const FORMAT_2: &str = "ringtrain-2";
/// The format before [`FORMAT_2`]. It lacks the learning rate and some entries of [`RunIdentity`].
const FORMAT_1: &str = "ringtrain-1";
/// The metadata key of the hash of all other metadata.
const METADATA_HASH_KEY: &str = "metadata_hash";
/// The metadata key of [`RunIdentity::options`].
const OPTIONS_KEY: &str = "options";
/// The name of the tensor that holds [`BestParameters::parameters`].
const BEST_PARAMETERS_TENSOR: &str = "best.parameters";
/// The metadata key of [`CompressionMemory::calls`](super::compression_memory::CompressionMemory::calls).
const COMPRESSION_CALLS_KEY: &str = "compression_calls";
/// The metadata key of [`BestParameters::record`].
const BEST_RECORD_KEY: &str = "best_record";
/// The entry `shuffle` of [`RunIdentity::entries`], if all samples of an epoch are shuffled together.
pub(crate) const SHUFFLE_OF_WHOLE_EPOCH: &str = "as a whole";
/// The keys of [`RunIdentity::entries`] that checkpoints of earlier versions lack. The second text of each pair is the
/// value that every run of these versions had.
const VALUES_OF_MISSING_ENTRIES: [(&str, &str); 11] = [
    ("strategy", "allreduce"),
    ("adam_options", "default"),
    ("schedule", "constant"),
    ("warmup", "0"),
    ("clip_norm", "none"),
    ("label_smoothing", "0"),
    ("class_weights", "none"),
    ("reproducible", "none"),
    ("validation_fraction", "none"),
    ("shuffle", SHUFFLE_OF_WHOLE_EPOCH),
    ("compression_momentum", NO_MOMENTUM),
];
/// The maximum size in bytes of a checkpoint's header, which holds the names of the tensors and the metadata.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The size in bytes that [`estimate_header_bytes`] assumes for the parts of the header that change during a run (the
/// position and the history) and for the names of the tensors.
const VARIABLE_HEADER_BYTES_ASSUMED: u64 = 1 << 16;

/// The metadata keys for the fields of [`Position`], in the order of [`Position::to_words`].
const POSITION_KEYS: [&str; 6] =
    ["epoch", "step", "steps_total", "momentum_start", "epoch_loss_sum_bits", "epoch_samples"];

/// A tensor of 32-bit floats for a checkpoint.
struct CheckpointTensor {
    name: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn to_json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("strings and numbers are valid JSON")
}

fn f32s_to_le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn f32s_from_le_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Returns the bytes of a checkpoint.
fn serialize_checkpoint(
    network: &Network,
    identity: &RunIdentity,
    state: &TrainingState,
) -> io::Result<Vec<u8>> {
    let mut tensors = Vec::new();
    for ParameterTensor { name, shape, range, .. } in network.parameter_tensors() {
        tensors.push(CheckpointTensor { name, shape, bytes: f32s_to_le_bytes(&state.parameters[range]) });
    }
    let optimizer = identity.optimizer_names.iter().zip(&state.optimizer);
    for (name, values) in optimizer.chain(identity.strategy_names.iter().zip(&state.strategy)) {
        tensors.push(CheckpointTensor {
            name: (*name).into(),
            shape: vec![values.len()],
            bytes: f32s_to_le_bytes(values),
        });
    }
    for (name, values) in compression_tensors(&state.compression) {
        let (shape, bytes) = (vec![values.len()], f32s_to_le_bytes(values));
        tensors.push(CheckpointTensor { name, shape, bytes });
    }
    if let Some(BestParameters { parameters, .. }) = &state.best {
        let bytes = f32s_to_le_bytes(parameters);
        tensors.push(CheckpointTensor {
            name: BEST_PARAMETERS_TENSOR.into(),
            shape: vec![parameters.len()],
            bytes,
        });
    }
    if let Some(Standardizer { mean, inverse_deviation }) = &identity.standardizer {
        for (name, values) in [("features.mean", mean), ("features.inverse_deviation", inverse_deviation)] {
            tensors.push(CheckpointTensor {
                name: name.into(),
                shape: vec![values.len()],
                bytes: f32s_to_le_bytes(values),
            });
        }
    }
    let mut metadata = identity_metadata(identity);
    metadata.extend(
        POSITION_KEYS.iter().zip(state.position.to_words()).map(|(k, v)| ((*k).into(), v.to_string())),
    );
    if let Some(rate) = state.learning_rate {
        metadata.insert("learning_rate".into(), rate.to_string());
    }
    metadata.insert("history".into(), to_json(&state.history));
    if state.compression.calls > 0 {
        metadata.insert(COMPRESSION_CALLS_KEY.into(), state.compression.calls.to_string());
    }
    if !state.done_ahead.is_empty() {
        metadata.insert("done_ahead".into(), to_json(&state.done_ahead));
    }
    if let Some(BestParameters { record, .. }) = &state.best {
        metadata.insert(BEST_RECORD_KEY.into(), to_json(record));
    }
    metadata.insert("state_hash".into(), state_hash(state));
    metadata.insert(METADATA_HASH_KEY.into(), metadata_hash(&metadata));
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), &tensor.bytes);
        (tensor.name.as_str(), view.expect("the number of bytes of a tensor matches its shape"))
    });
    safetensors::serialize(views, Some(metadata)).map_err(|error| io::Error::other(error.to_string()))
}

/// Returns the metadata that does not change during a run.
fn identity_metadata(identity: &RunIdentity) -> HashMap<String, String> {
    let mut metadata: HashMap<String, String> =
        identity.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.clone())).collect();
    metadata.insert("format".into(), FORMAT_3.into());
    metadata.insert("data".into(), identity.data_hash.clone());
    metadata.insert("data_name".into(), identity.data_name.clone());
    metadata.insert("classes".into(), serde_json::Value::from(identity.classes.clone()).to_string());
    if let Some(encoding) = &identity.encoding {
        metadata.insert("encoding".into(), encoding.clone());
    }
    if let Some(options) = &identity.options {
        metadata.insert(OPTIONS_KEY.into(), options.clone());
    }
    metadata.insert("target_mean".into(), identity.scale.mean.to_string());
    metadata.insert("target_deviation".into(), identity.scale.deviation.to_string());
    metadata
}

/// Estimates the size in bytes of the header of a checkpoint. Returns an error if the estimate exceeds `bytes_max`.
fn estimate_header_bytes(
    path: &Path,
    identity: &RunIdentity,
    bytes_max: u64,
) -> Result<u64, CheckpointError> {
    let bytes = to_json(&identity_metadata(identity)).len() as u64 + VARIABLE_HEADER_BYTES_ASSUMED;
    if bytes > bytes_max {
        return Err(CheckpointError::HeaderTooLong { path: path.to_owned(), bytes, bytes_max });
    }
    Ok(bytes)
}

fn create_directory(directory: &Path) -> Result<(), CheckpointError> {
    fs::create_dir_all(directory)
        .map_err(|error| CheckpointError::io("create the directory", directory, error))
}

/// Checks that a run can save checkpoints to the directory of `settings`. Creates the directory if it does not exist.
///
/// The disk must have space for all checkpoints that the run keeps, and for one more checkpoint, which the run writes
/// before it removes an old checkpoint. This function allocates a file of this size and deletes the file.
pub(crate) fn check_disk_space(
    settings: &CheckpointSettings,
    network: &Network,
    identity: &RunIdentity,
) -> Result<(), CheckpointError> {
    let files = CheckpointFiles::new(settings);
    let path = files.latest_path();
    let header_bytes = estimate_header_bytes(&path, identity, HEADER_BYTES_MAX)?;
    create_directory(&settings.directory)?;
    files.check_file_types()?;
    let bytes = files.files_to_add_max()? * (tensor_bytes(network, identity) + header_bytes);
    atomic_file::check_disk_space(&path, bytes).map_err(|source| CheckpointError::NoSpace {
        path,
        bytes,
        source,
    })?;
    files.check_hard_links()
}

/// Returns the size in bytes of all tensors in a checkpoint.
fn tensor_bytes(network: &Network, identity: &RunIdentity) -> u64 {
    let vectors = 1
        + identity.optimizer_names.len()
        + identity.strategy_names.len()
        + identity.compression_vectors
        + usize::from(identity.keeps_best);
    let standardizer_values = identity.standardizer.as_ref().map_or(0, |standard| 2 * standard.mean.len());
    4 * (vectors * network.parameter_count() + standardizer_values) as u64
}

/// Returns a hash of the parameters, of the state vectors of the optimizer and the strategy, of the memory of compressed
/// gradients, and of the best parameters.
fn state_hash(state: &TrainingState) -> String {
    let parts: Vec<String> = std::iter::once(&state.parameters)
        .chain(&state.optimizer)
        .chain(&state.strategy)
        .chain(compression_tensors(&state.compression).map(|(_, values)| values))
        .chain(state.best.as_ref().map(|best| &best.parameters))
        .map(|part| parameters_hash(part))
        .collect();
    parts.join("+")
}

/// Returns a hash of all metadata except for [`METADATA_HASH_KEY`].
fn metadata_hash(metadata: &HashMap<String, String>) -> String {
    let sorted: BTreeMap<_, _> = metadata.iter().filter(|(key, _)| *key != METADATA_HASH_KEY).collect();
    content_digest(&to_json(&sorted), &[])
}

/// Returns whether `directory` contains the file [`LATEST_FILE_NAME`].
fn contains_latest_checkpoint(directory: &Path) -> Result<bool, CheckpointError> {
    let path = directory.join(LATEST_FILE_NAME);
    path.try_exists().map_err(|error| CheckpointError::io("look for", &path, error))
}

/// Returns an error if the format of a checkpoint is newer than [`FORMAT_VERSION`] or unknown, or if its metadata does
/// not match its hash.
fn check_metadata(path: &Path, metadata: &HashMap<String, String>) -> Result<(), CheckpointError> {
    let corrupt = |problem: &str| CheckpointError::Corrupt { path: path.to_owned(), problem: problem.into() };
    let format = metadata.get("format").ok_or_else(|| corrupt("its format is missing"))?;
    // This check comes first, because a newer format may compute the hash of the metadata in another way.
    if ![FORMAT_3, FORMAT_2, FORMAT_1].contains(&format.as_str()) {
        let version = format.strip_prefix(FORMAT_PREFIX).and_then(|version| version.parse::<u64>().ok());
        return Err(match version.filter(|&version| version > FORMAT_VERSION) {
            Some(version) => CheckpointError::NewerVersion { path: path.to_owned(), version },
            None => corrupt(&format!("its format is `{format}`, which is not a format of checkpoints")),
        });
    }
    match metadata.get(METADATA_HASH_KEY) {
        None if format == FORMAT_3 => Err(corrupt("its metadata_hash is missing")),
        Some(hash) if *hash != metadata_hash(metadata) => {
            Err(corrupt("its metadata does not match its hash"))
        }
        _ => Ok(()),
    }
}

/// Returns an error if an option or the data of a checkpoint does not match this run.
fn check_identity(
    path: &Path,
    identity: &RunIdentity,
    metadata: &HashMap<String, String>,
) -> Result<(), CheckpointError> {
    let corrupt = |key: &str| CheckpointError::Corrupt {
        path: path.to_owned(),
        problem: format!("its {key} is missing"),
    };
    let is_format_1 = metadata["format"] == FORMAT_1;
    for IdentityEntry { key, option, value } in &identity.entries {
        let earlier = VALUES_OF_MISSING_ENTRIES.iter().find(|(missing, _)| missing == key);
        let found = match (metadata.get(*key), earlier) {
            (Some(found), _) => found.as_str(),
            (None, Some((_, value))) => value,
            (None, None) if is_format_1 => continue,
            (None, None) => {
                return Err(CheckpointError::NotRecorded {
                    path: path.to_owned(),
                    what: (*option).to_owned(),
                });
            }
        };
        // In checkpoints of earlier versions, `nesterov` without --momentum is the accelerated rule.
        let is_nesterov = *key == "optimizer" && found == "nesterov";
        let has_momentum = metadata.get("momentum").is_some_and(|momentum| momentum != "none");
        let found = if is_nesterov && !has_momentum { Rule::Accelerated.name() } else { found };
        if found != value.as_str() {
            return Err(CheckpointError::Mismatch {
                path: path.to_owned(),
                what: (*option).to_owned(),
                found: found.to_owned(),
                wanted: value.clone(),
            });
        }
    }
    if *metadata.get("data").ok_or_else(|| corrupt("data"))? != identity.data_hash {
        let found = metadata.get("data_name").cloned().unwrap_or_else(|| "(name unknown)".into());
        return Err(CheckpointError::OtherData {
            path: path.to_owned(),
            found,
            wanted: identity.data_name.clone(),
        });
    }
    Ok(())
}

/// Reads the latest checkpoint in `directory`. Returns `None` if the file [`LATEST_FILE_NAME`] does not exist.
pub(crate) fn load_checkpoint(
    directory: &Path,
    network: &Network,
    identity: &RunIdentity,
) -> Result<Option<TrainingState>, CheckpointError> {
    if !contains_latest_checkpoint(directory)? {
        return Ok(None);
    }
    let path = directory.join(LATEST_FILE_NAME);
    let corrupt = |problem: String| CheckpointError::Corrupt { path: path.clone(), problem };
    // A run with more ranks may have saved more vectors.
    let compression_bytes_max = 8 * u64::from(WORLD_SIZE_MAX) * network.parameter_count() as u64;
    let bytes = read_file(&path, (tensor_bytes(network, identity), compression_bytes_max))?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| corrupt(error.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| corrupt(error.to_string()))?;
    let metadata = header.metadata().as_ref().ok_or_else(|| corrupt("it has no metadata".into()))?;
    let value = |key: &str| metadata.get(key).ok_or_else(|| corrupt(format!("its {key} is missing")));
    check_metadata(&path, metadata)?;
    check_identity(&path, identity, metadata)?;
    let tensor = |name: &str, shape: &[usize]| match tensors.tensor(name) {
        Ok(view) if view.dtype() == Dtype::F32 && view.shape() == shape => {
            Ok(f32s_from_le_bytes(view.data()))
        }
        Ok(view) => Err(CheckpointError::Mismatch {
            path: path.clone(),
            what: format!("the shape of {name}"),
            found: format!("{:?} {:?}", view.dtype(), view.shape()),
            wanted: format!("F32 {shape:?}"),
        }),
        Err(error) => Err(corrupt(error.to_string())),
    };
    let mut state = TrainingState::default();
    for ParameterTensor { name, shape, .. } in network.parameter_tensors() {
        state.parameters.extend(tensor(&name, &shape)?);
    }
    for name in identity.optimizer_names {
        state.optimizer.push(tensor(name, &[network.parameter_count()])?);
    }
    for name in identity.strategy_names {
        state.strategy.push(tensor(name, &[network.parameter_count()])?);
    }
    let names = tensors.names();
    state.compression = read_compression_memory(&names, |name| tensor(name, &[network.parameter_count()]))?;
    if let Some(calls) = metadata.get(COMPRESSION_CALLS_KEY) {
        let calls =
            calls.parse().map_err(|_| corrupt(format!("its {COMPRESSION_CALLS_KEY} is not a number")));
        state.compression.calls = calls?;
    }
    if let Some(record) = metadata.get(BEST_RECORD_KEY) {
        let record = serde_json::from_str(record).map_err(|error| corrupt(error.to_string()))?;
        let parameters = tensor(BEST_PARAMETERS_TENSOR, &[network.parameter_count()])?;
        state.best = Some(BestParameters { record, parameters });
    }
    let mut words = [0; POSITION_KEYS.len()];
    for (word, key) in words.iter_mut().zip(POSITION_KEYS) {
        if key == "momentum_start" && metadata["format"] == FORMAT_1 {
            continue;
        }
        *word = value(key)?.parse().map_err(|_| corrupt(format!("its {key} is not a number")))?;
    }
    state.position = Position::from_words(words);
    let rate = metadata.get("learning_rate").map(|text| text.parse()).transpose();
    state.learning_rate = rate.map_err(|_| corrupt("its learning_rate is not a number".into()))?;
    state.history = serde_json::from_str(value("history")?).map_err(|error| corrupt(error.to_string()))?;
    if let Some(text) = metadata.get("done_ahead") {
        state.done_ahead = serde_json::from_str(text).map_err(|error| corrupt(error.to_string()))?;
    }
    if *value("state_hash")? != state_hash(&state) {
        return Err(corrupt("its content does not match its hash".into()));
    }
    check_state_is_possible(&state, identity.steps_per_epoch, metadata["format"] == FORMAT_1)
        .map_err(corrupt)?;
    Ok(Some(state))
}

/// Reads a checkpoint whose tensors have `tensor_bytes` bytes, or up to `more_bytes_max` bytes more. Returns an error if the file
/// has more than these and [`HEADER_BYTES_MAX`] bytes.
fn read_file(path: &Path, (tensor_bytes, more_bytes_max): (u64, u64)) -> Result<Vec<u8>, CheckpointError> {
    let read_error = |error| CheckpointError::io("read", path, error);
    let bytes_max = tensor_bytes + more_bytes_max + HEADER_BYTES_MAX;
    let file = File::open(path).map_err(read_error)?;
    let mut len = file.metadata().map_err(read_error)?.len();
    let mut bytes = Vec::new();
    if len <= bytes_max {
        // Limit the read, because a file may be longer than `File::metadata` says.
        file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(read_error)?;
        len = bytes.len() as u64;
    }
    if len > bytes_max {
        return Err(CheckpointError::Mismatch {
            path: path.to_owned(),
            what: "a size in bytes of".into(),
            found: len.to_string(),
            wanted: format!("about {tensor_bytes}"),
        });
    }
    Ok(bytes)
}

/// Returns an error if a run with `steps_per_epoch` steps in each epoch cannot have this state. In checkpoints of the
/// formats 1 and 2, the metadata has no hash, so only this function finds a wrong position. `steps_total` is not
/// checked in format 1, because this format does not record the batch size.
fn check_state_is_possible(
    state: &TrainingState,
    steps_per_epoch: u64,
    is_format_1: bool,
) -> Result<(), String> {
    let Position { epoch, step, steps_total, momentum_start, loss_sum, .. } = state.position;
    if step >= steps_per_epoch {
        return Err(format!("its step is {step}, but an epoch has {}", counted(steps_per_epoch, "step")));
    }
    let batches = epoch.checked_mul(steps_per_epoch).and_then(|steps| steps.checked_add(step));
    let expected = batches.and_then(|batches| batches.checked_add(state.done_ahead.len() as u64));
    if !is_format_1 && expected != Some(steps_total) {
        return Err(format!(
            "its steps_total is {steps_total}, which does not fit step {step} of epoch {epoch} (both counted from 0) with \
             {} in each epoch",
            counted(steps_per_epoch, "step")
        ));
    }
    let is_ahead = |&batch: &u64| batches.is_some_and(|batches| batch > batches);
    if !(state.done_ahead.is_sorted_by(|a, b| a < b) && state.done_ahead.iter().all(is_ahead)) {
        return Err(format!(
            "its done_ahead is {:?}, not an ascending list of batches after its position",
            state.done_ahead
        ));
    }
    if momentum_start > steps_total {
        return Err(format!(
            "its momentum_start is {momentum_start}, but must be at most its steps_total, {steps_total}"
        ));
    }
    if !loss_sum.is_finite() {
        return Err(format!("its sum of losses is {loss_sum}, which is not finite"));
    }
    match state.learning_rate {
        Some(rate) if !(rate.is_finite() && rate > 0.0) => {
            Err(format!("its learning_rate is {rate}, which is not a finite number above 0"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
