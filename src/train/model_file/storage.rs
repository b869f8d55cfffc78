//! Writes and reads model files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::{ModelDescription, ModelFileError, SavedModel, StoredTensor, content_digest};
use crate::train::atomic_file;
use crate::train::data::Standardizer;
use crate::train::model::{CANDLE_NEEDED, ModelSpec, OWN_PREFIX, OwnModel, PARAMETERS_MAX, ParameterTensor};

/// The entry `format` in the metadata of a model file.
pub(crate) const MODEL_FORMAT: &str = "ringtrain-model";
/// The version of the model file format that this program writes. This program also reads all earlier versions.
pub(crate) const MODEL_FORMAT_VERSION: u64 = 1;
/// The maximum length in bytes of the header of a safetensors file.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The maximum length in bytes of a model file.
const FILE_BYTES_MAX: u64 = HEADER_BYTES_MAX + 4 * (PARAMETERS_MAX as u64 + (2 * super::COLUMNS_MAX) as u64);
/// The names of the two tensors that hold the scaling of the inputs.
pub(super) const MEAN_TENSOR: &str = "features.mean";
pub(super) const INVERSE_DEVIATION_TENSOR: &str = "features.inverse_deviation";

/// Returns the tensors of a model file: the parameters, and the scaling of the inputs.
fn stored_tensors(model: &SavedModel) -> Vec<StoredTensor<'_>> {
    let bytes = |values| bytemuck::cast_slice::<f32, u8>(values);
    let mut tensors: Vec<_> = model
        .network()
        .parameter_tensors()
        .into_iter()
        .map(|tensor| {
            let ParameterTensor { name, shape, range, .. } = tensor;
            StoredTensor { name, shape, bytes: bytes(&model.parameters()[range]) }
        })
        .collect();
    if let Some(Standardizer { mean, inverse_deviation }) = model.standardizer() {
        for (name, values) in [(MEAN_TENSOR, mean), (INVERSE_DEVIATION_TENSOR, inverse_deviation)] {
            tensors.push(StoredTensor { name: name.into(), shape: vec![values.len()], bytes: bytes(values) });
        }
    }
    tensors
}

/// Returns the bytes of a model file.
pub(super) fn encode_model(model: &SavedModel) -> Result<Vec<u8>, String> {
    let description = serde_json::to_string(model.description()).map_err(|error| error.to_string())?;
    assemble_file(description, &stored_tensors(model))
}

/// Returns the bytes of a model file with the given description and tensors.
fn assemble_file(description: String, tensors: &[StoredTensor<'_>]) -> Result<Vec<u8>, String> {
    let digest = content_digest(&description, tensors);
    let metadata = HashMap::from([
        ("format".to_owned(), MODEL_FORMAT.to_owned()),
        ("version".to_owned(), MODEL_FORMAT_VERSION.to_string()),
        ("description".to_owned(), description),
        ("sha256".to_owned(), digest),
    ]);
    let views = tensors.iter().map(|StoredTensor { name, shape, bytes }| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name.as_str(), view.expect("the number of bytes of a tensor matches its shape"))
    });
    safetensors::serialize(views, Some(metadata)).map_err(|error| error.to_string())
}

/// Writes a model file. Replaces an earlier file at `path` only after the new file is on the disk.
pub(crate) fn save_model(path: &Path, model: &SavedModel) -> Result<(), ModelFileError> {
    let fail = |source| ModelFileError::io("write", path, source);
    let bytes = encode_model(model).map_err(|problem| fail(io::Error::other(problem)))?;
    atomic_file::replace_file(path, &bytes).map_err(fail)
}

/// The metadata and the tensors of a safetensors file.
pub(crate) struct FileEntries {
    pub(crate) metadata: HashMap<String, String>,
    /// All tensors, sorted by name.
    pub(crate) tensors: Vec<FileTensor>,
}

/// A tensor of any type in a safetensors file.
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// Reads a safetensors file: a model file, or for example a checkpoint.
pub(crate) fn read_entries(path: &Path) -> Result<FileEntries, ModelFileError> {
    let fail = |source| ModelFileError::io("read", path, source);
    let file = File::open(path).map_err(fail)?;
    if file.metadata().map_err(fail)?.is_dir() {
        return Err(ModelFileError::not_a_model_file(path, "it is a directory"));
    }
    let mut bytes = Vec::new();
    (&file).take(9).read_to_end(&mut bytes).map_err(fail)?;
    check_file_start(path, &bytes)?;
    (&file).take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let problem = format!("it has more than {FILE_BYTES_MAX} bytes");
        return Err(ModelFileError::not_a_model_file(path, problem));
    }
    parse_entries(path, &bytes)
}

/// Returns an error if a file does not start like a safetensors file: with 8 bytes for the length of the header, and
/// the `{` of a JSON object.
fn check_file_start(path: &Path, bytes: &[u8]) -> Result<(), ModelFileError> {
    match bytes {
        [] => Err(ModelFileError::corrupt(path, "it is empty")),
        [_, _, _, _, _, _, _, _, first, ..] if *first != b'{' => {
            Err(ModelFileError::not_a_model_file(path, "it does not start like a safetensors file"))
        }
        _ => Ok(()),
    }
}

/// Parses the bytes of a safetensors file.
fn parse_entries(path: &Path, bytes: &[u8]) -> Result<FileEntries, ModelFileError> {
    check_file_start(path, bytes)?;
    let corrupt = |error: safetensors::SafeTensorError| ModelFileError::corrupt(path, error.to_string());
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(corrupt)?;
    let views = SafeTensors::deserialize(bytes).map_err(corrupt)?;
    let mut tensors: Vec<_> = views
        .tensors()
        .into_iter()
        .map(|(name, view)| FileTensor {
            name,
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(FileEntries { metadata: header.metadata().clone().unwrap_or_default(), tensors })
}

/// Returns an error if the metadata does not name the format [`MODEL_FORMAT`], or if its version is missing or higher
/// than [`MODEL_FORMAT_VERSION`].
fn check_format(path: &Path, metadata: &HashMap<String, String>) -> Result<(), ModelFileError> {
    match metadata.get("format").map(String::as_str) {
        Some(MODEL_FORMAT) => {}
        Some(other) if other.starts_with("ringtrain-") && metadata.contains_key("state_hash") => {
            return Err(ModelFileError::Checkpoint { path: path.to_owned() });
        }
        Some(other) => {
            let problem =
                format!("its format is `{other}`, but the format of model files is `{MODEL_FORMAT}`");
            return Err(ModelFileError::not_a_model_file(path, problem));
        }
        None => return Err(ModelFileError::not_a_model_file(path, "its metadata has no format")),
    }
    let version = metadata.get("version").and_then(|text| text.parse::<u64>().ok());
    match version {
        None | Some(0) => {
            Err(ModelFileError::corrupt(path, "its version is missing or is not a number above 0"))
        }
        Some(version) if version > MODEL_FORMAT_VERSION => {
            Err(ModelFileError::NewerVersion { path: path.to_owned(), version })
        }
        Some(_) => Ok(()),
    }
}

/// Reads a model file, and checks its content.
pub(super) fn load_model_file(path: &Path, own: Option<&OwnModel>) -> Result<SavedModel, ModelFileError> {
    parse_model(path, &read_entries(path)?, own)
}

/// Parses the bytes of a model file, and checks its content.
#[cfg(test)]
pub(super) fn decode_model(path: &Path, bytes: &[u8]) -> Result<SavedModel, ModelFileError> {
    parse_model(path, &parse_entries(path, bytes)?, None)
}

/// Returns an error if only one of the file and the program has an own model, or if the models have different names.
fn check_own_model(path: &Path, model: &str, own: Option<&OwnModel>) -> Result<(), ModelFileError> {
    let wanted = own.map(|own| ModelSpec::Own(own.clone()).to_string());
    let problem = match wanted {
        Some(wanted) if wanted != model => format!("the program passed the model {wanted}"),
        None if model.starts_with(OWN_PREFIX) => {
            "the file does not hold the layers of a program's own model; load the file in \
                                                  the program with `SavedModel::load_own`"
                .into()
        }
        _ => return Ok(()),
    };
    Err(ModelFileError::OwnModel { path: path.to_owned(), model: model.to_owned(), problem })
}

/// Checks the content of a model file, and returns the model.
fn parse_model(
    path: &Path,
    FileEntries { metadata, tensors }: &FileEntries,
    own: Option<&OwnModel>,
) -> Result<SavedModel, ModelFileError> {
    check_format(path, metadata)?;
    let corrupt = |problem: String| ModelFileError::corrupt(path, problem);
    let value = |key: &str| metadata.get(key).ok_or_else(|| corrupt(format!("its {key} is missing")));
    if let Some(FileTensor { name, dtype, .. }) = tensors.iter().find(|tensor| tensor.dtype != Dtype::F32) {
        return Err(corrupt(format!("the tensor {name} holds {dtype:?} and not F32")));
    }
    let parts: Vec<StoredTensor<'_>> = tensors
        .iter()
        .map(|FileTensor { name, shape, bytes, .. }| StoredTensor {
            name: name.clone(),
            shape: shape.clone(),
            bytes,
        })
        .collect();
    let description = value("description")?;
    if *value("sha256")? != content_digest(description, &parts) {
        return Err(corrupt("its content does not match its checksum".into()));
    }
    let description: ModelDescription = serde_json::from_str(description)
        .map_err(|error| corrupt(format!("its description is not valid: {error}")))?;
    if cfg!(not(feature = "candle")) && description.text.is_some() {
        return Err(ModelFileError::NeedsFeature { path: path.to_owned(), need: CANDLE_NEEDED });
    }
    check_own_model(path, &description.model, own)?;
    let network = description.check(own).map_err(corrupt)?;
    let mut found: HashMap<String, (Vec<usize>, &[u8])> =
        parts.into_iter().map(|part| (part.name, (part.shape, part.bytes))).collect();
    let mut take_tensor = |name: &str, wanted: &[usize]| match found.remove(name) {
        None => Err(corrupt(format!("the tensor {name} is missing"))),
        Some((shape, _)) if shape != wanted => {
            Err(corrupt(format!("the tensor {name} has the shape {shape:?} and not {wanted:?}")))
        }
        Some((_, bytes)) => {
            let values: Vec<f32> =
                bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            match values.iter().find(|value| !value.is_finite()) {
                Some(value) => Err(corrupt(format!("the tensor {name} holds {value}, which is not finite"))),
                None => Ok(values),
            }
        }
    };
    let mut parameters = Vec::with_capacity(network.parameter_count().min(tensors.len() << 20));
    for ParameterTensor { name, shape, .. } in network.parameter_tensors() {
        parameters.extend(take_tensor(&name, &shape)?);
    }
    let inputs = [description.inputs()];
    let has_standardizer = tensors.iter().any(|tensor| tensor.name == MEAN_TENSOR);
    let standardizer = if has_standardizer {
        let (mean, inverse_deviation) =
            (take_tensor(MEAN_TENSOR, &inputs)?, take_tensor(INVERSE_DEVIATION_TENSOR, &inputs)?);
        Some(Standardizer { mean, inverse_deviation })
    } else {
        None
    };
    if let Some(name) = found.keys().min() {
        return Err(corrupt(format!("the tensor {name} does not belong to the model {}", description.model)));
    }
    SavedModel::new(description, own, standardizer, parameters).map_err(corrupt)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Writes a model file with the text `description`, the tensors of `model`, and the right checksum.
    pub(crate) fn write_model_file(path: &Path, description: &str, model: &SavedModel) {
        std::fs::write(path, assemble_file(description.to_owned(), &stored_tensors(model)).unwrap()).unwrap();
    }
}
