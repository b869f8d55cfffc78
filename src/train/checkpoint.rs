//! Checkpoints: a safetensors file with the parameters under `PyTorch`'s names, the optimiser's memory, and where the run
//! stands, so that it goes on bit for bit as if it had never stopped, on any number of ranks.

use std::collections::{BTreeMap, HashMap};
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
const FORMAT: &str = "ringtrain-1";
/// What names, metadata and history may need beside the tensors.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A checkpoint or report that cannot be used or written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why not.
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
        "{} does not fit: its {what} is {found}, this run's is {wanted}; resume with the arguments it was made \
         with, or name another --checkpoint directory",
        path.display()
    )]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: String,
        /// The checkpoint's.
        found: String,
        /// This run's.
        wanted: String,
    },
    /// There is a checkpoint, and nobody asked to go on from it.
    #[error("{} exists; pass --resume to go on from it, or name another --checkpoint directory", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

/// The sentence, for `main` and `unwrap` print errors by `Debug`, and a person reads them.
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

/// Where a run stands.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Position {
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// The epoch's next step, counted from 0.
    pub step: u64,
    /// Steps taken in all.
    pub steps_total: u64,
    /// Sum of the losses of the epoch's samples so far.
    pub loss_sum: f64,
    /// How many they are.
    pub samples: u64,
}

impl Position {
    /// As numbers that can be broadcast.
    pub(crate) fn to_words(self) -> [u64; 5] {
        [self.epoch, self.step, self.steps_total, self.loss_sum.to_bits(), self.samples]
    }

    /// Back from [`to_words`](Self::to_words).
    pub(crate) fn from_words([epoch, step, steps_total, loss_sum, samples]: [u64; 5]) -> Self {
        Self { epoch, step, steps_total, loss_sum: f64::from_bits(loss_sum), samples }
    }
}

const POSITION_KEYS: [&str; 5] = ["epoch", "step", "steps_total", "epoch_loss_sum_bits", "epoch_samples"];

/// What changes as a run goes on.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct State {
    pub(crate) position: Position,
    pub(crate) parameters: Vec<f32>,
    /// The optimiser's vectors.
    pub(crate) optimizer: Vec<Vec<f32>>,
    pub(crate) history: Vec<EpochRecord>,
}

/// What must be the same for a run to go on.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Identity {
    /// Named values that are compared: model, data, seed, ...
    pub(crate) values: BTreeMap<&'static str, String>,
    /// The names of the optimiser's vectors.
    pub(crate) optimizer_names: &'static [&'static str],
    /// What brings features into the unit of the parameters; saved so that others can use the model.
    pub(crate) standardizer: Option<Standardizer>,
    /// What brings outputs into the target's unit; saved likewise.
    pub(crate) scale: Scale,
    /// The classes' names.
    pub(crate) classes: Vec<String>,
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

/// Writes a checkpoint into `directory`, which is made if it is not there. The previous one stays until the new one is
/// safely on the disk.
pub(crate) fn save(
    directory: &Path,
    network: &Network,
    identity: &Identity,
    state: &State,
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
        identity.values.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    metadata.extend(
        POSITION_KEYS.iter().zip(state.position.to_words()).map(|(k, v)| ((*k).into(), v.to_string())),
    );
    let json = |value| serde_json::to_string(value).expect("strings and numbers are valid JSON");
    metadata.insert("format".into(), FORMAT.into());
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
    fs::create_dir_all(directory)
        .map_err(|error| CheckpointError::io("make the directory", directory, error))?;
    atomic_file::write(&path, &bytes).map_err(|error| fail("write", error))
}

fn state_hash(state: &State) -> String {
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

/// Reads the checkpoint in `directory`; `None` if there is none.
pub(crate) fn load(
    directory: &Path,
    network: &Network,
    identity: &Identity,
) -> Result<Option<State>, CheckpointError> {
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
    let vectors = 1 + identity.optimizer_names.len();
    let standardizer_values = identity.standardizer.as_ref().map_or(0, |standard| 2 * standard.mean.len());
    let tensor_bytes = 4 * (vectors * network.parameter_count() + standardizer_values) as u64;
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
    if value("format")? != FORMAT {
        return Err(unfit("format", value("format")?.clone(), FORMAT.into()));
    }
    for (key, wanted) in &identity.values {
        let found = value(key)?;
        if found != wanted {
            return Err(unfit(key, found.clone(), wanted.clone()));
        }
    }
    let tensor = |name: &str, shape: &[usize]| match tensors.tensor(name) {
        Ok(view) if view.dtype() == Dtype::F32 && view.shape() == shape => Ok(from_bytes(view.data())),
        Ok(view) => {
            Err(unfit(name, format!("{:?} {:?}", view.dtype(), view.shape()), format!("F32 {shape:?}")))
        }
        Err(error) => Err(corrupt(error.to_string())),
    };
    let mut state = State::default();
    for (name, shape, _) in network.tensors() {
        state.parameters.extend(tensor(&name, &shape)?);
    }
    for name in identity.optimizer_names {
        state.optimizer.push(tensor(name, &[network.parameter_count()])?);
    }
    let mut words = [0; POSITION_KEYS.len()];
    for (word, key) in words.iter_mut().zip(POSITION_KEYS) {
        *word = value(key)?.parse().map_err(|_| corrupt(format!("its {key} is not a number")))?;
    }
    state.position = Position::from_words(words);
    state.history = serde_json::from_str(value("history")?).map_err(|error| corrupt(error.to_string()))?;
    if *value("state_hash")? != state_hash(&state) {
        return Err(corrupt("its content does not match its own hash".into()));
    }
    Ok(Some(state))
}

/// The file's first bytes, so many at most: not every file is as long as it says.
fn read_at_most(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::model::Loss;

    fn sample() -> (Network, Identity, State) {
        let network = Network::new(&"mlp:3".parse().unwrap(), 2, 2, Loss::CrossEntropy).unwrap();
        let identity = Identity {
            values: BTreeMap::from([("model", "mlp:3".into()), ("seed", "7".into())]),
            optimizer_names: &["optimizer.velocity"],
            standardizer: None,
            scale: Scale::IDENTITY,
            classes: vec!["a".into(), "b".into()],
        };
        let parameters = network.initialize(1);
        let optimizer = vec![parameters.iter().map(|value| value * 0.5).collect()];
        let position = Position { epoch: 3, step: 2, steps_total: 11, loss_sum: 0.1, samples: 64 };
        (network, identity, State { position, parameters, optimizer, history: Vec::new() })
    }

    #[test]
    fn comes_back_bit_for_bit() {
        let directory = tempfile::tempdir().unwrap();
        let (network, identity, state) = sample();
        let nested = directory.path().join("a/b");
        assert_eq!(load(&nested, &network, &identity).unwrap(), None);
        save(&nested, &network, &identity, &state).unwrap();
        assert_eq!(load(&nested, &network, &identity).unwrap(), Some(state));
        assert_eq!(fs::read_dir(&nested).unwrap().count(), 1);
    }

    #[test]
    fn damage_and_other_runs_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (network, identity, state) = sample();
        save(directory.path(), &network, &identity, &state).unwrap();
        let path = directory.path().join(FILE_NAME);
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            let error = load(directory.path(), &network, &identity).unwrap_err();
            assert!(matches!(error, CheckpointError::Corrupt { .. }), "{len}: {error}");
        }
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&path, &flipped).unwrap();
        assert!(load(directory.path(), &network, &identity).unwrap_err().to_string().contains("hash"));
        fs::write(&path, &whole).unwrap();
        let mut other = identity.clone();
        other.values.insert("seed", "8".into());
        let error = load(directory.path(), &network, &other).unwrap_err().to_string();
        assert!(error.contains("its seed is 7, this run's is 8"), "{error}");
        let wider = Network::new(&"mlp:4".parse().unwrap(), 2, 2, Loss::CrossEntropy).unwrap();
        assert!(matches!(load(directory.path(), &wider, &identity), Err(CheckpointError::Unfit { .. })));
    }
}
