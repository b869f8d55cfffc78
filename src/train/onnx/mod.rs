//! Exports a trained model in the ONNX format, which other programs can run. `docs/onnx.md` describes the exported
//! graph.

mod columns;
mod graph;
mod layers;
/// The Protobuf messages of ONNX. These commands generate `onnx_proto.rs`:
///
/// ```sh
/// cargo install protoc-gen-prost
/// protoc -I src/train/onnx --prost_out=src/train/onnx --prost_opt=flat_output_dir onnx.proto && cargo fmt
/// ```
#[allow(dead_code, missing_docs, unreachable_pub, clippy::pedantic)]
mod onnx_proto;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use prost::Message as _;

use self::graph::GraphBuilder;
use self::onnx_proto::{ModelProto, OperatorSetIdProto, StringStringEntryProto};
use super::atomic_file;
use super::model::OWN_PREFIX;
use super::model_file::{ColumnOrigin, ModelDescription, SavedModel};
use crate::types::{counted, debug_as_display};

/// The version of the ONNX file format. ONNX 1.10 (2021) introduced this version.
const IR_VERSION: i64 = 8;
/// The version of the standard ONNX operators.
const OPERATORS_VERSION: i64 = 17;
/// The domain of the ONNX operators for texts, and its version.
const ML_OPERATORS: (&str, i64) = ("ai.onnx.ml", 3);
/// The maximum size in bytes of an ONNX file, which is a single Protobuf message.
const FILE_BYTES_MAX: u64 = i32::MAX as u64;
/// The key of the model's description in the metadata of an ONNX file.
const DESCRIPTION_KEY: &str = "ringtrain.description";
/// The maximum number of inputs that [`Display`](fmt::Display) prints for an exported model.
const INPUTS_SHOWN_MAX: usize = 20;

/// How an exported model takes the values of the feature columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnnxInputs {
    /// One input for each column. Each input has the name of its column and the shape (rows, 1).
    Columns,
    /// One input `x` with the shape (rows, columns). All columns must hold numbers.
    Matrix,
}

impl FromStr for OnnxInputs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "columns" => Ok(Self::Columns),
            "matrix" => Ok(Self::Matrix),
            _ => Err("is not one of columns, matrix".into()),
        }
    }
}

/// An input or an output of an exported model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OnnxValue {
    /// The name.
    pub name: String,
    /// The type of the elements: `float`, `double`, `int64` or `string`.
    pub element_type: &'static str,
    /// The number of columns. The shape is (rows, columns). If `None`, the shape is (rows).
    pub columns: Option<usize>,
}

/// A model in the ONNX format.
#[derive(Debug)]
pub struct OnnxModel {
    inputs: Vec<OnnxValue>,
    outputs: Vec<OnnxValue>,
    bytes: Vec<u8>,
}

/// The reason why a model cannot be exported.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A column holds texts, but the caller asked for one matrix of numbers.
    #[error(
        "--inputs matrix needs columns of numbers, but column `{column}` holds texts; pass --inputs columns"
    )]
    TextColumn {
        /// The name of the column.
        column: String,
    },
    /// The model reads texts.
    #[error("the model {model} reads texts, and ringtrain does not export such models to the ONNX format")]
    ReadsTexts {
        /// The name of the model.
        model: String,
    },
    /// The program implements the layers of the model.
    #[error(
        "the model {model} has layers of a program, and ringtrain does not convert such layers to the ONNX format"
    )]
    OwnLayers {
        /// The name of the model.
        model: String,
    },
    /// The model exceeds the limit of the format.
    #[error(
        "the model needs {bytes} bytes in the ONNX format, but an ONNX file holds at most {FILE_BYTES_MAX}; train a smaller model"
    )]
    TooLarge {
        /// The size of the model in bytes.
        bytes: u64,
    },
    /// The file cannot be written.
    #[error("cannot write the ONNX file {}: {source}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

debug_as_display!(ExportError);

impl OnnxModel {
    /// Converts a trained model. The graph contains the encoding and scaling of the columns, the layers of the model,
    /// and the softmax or the scale of the target. If `inputs` is `None`, the graph has [`OnnxInputs::Matrix`] if all
    /// columns hold numbers and have no names, and [`OnnxInputs::Columns`] in all other cases.
    ///
    /// # Errors
    ///
    /// The model reads texts or is a program's own model, `inputs` asks for a matrix but a column holds texts, or the model is
    /// too large for the format.
    pub fn new(model: &SavedModel, inputs: Option<OnnxInputs>) -> Result<Self, ExportError> {
        check_file_size(4 * model.parameters().len() as u64)?;
        let description = model.description();
        if description.text.is_some() {
            return Err(ExportError::ReadsTexts { model: description.model.clone() });
        }
        if description.model.starts_with(OWN_PREFIX) {
            return Err(ExportError::OwnLayers { model: description.model.clone() });
        }
        let mut graph = GraphBuilder::new(&["prediction", "probabilities"]);
        let encoded = match inputs.unwrap_or_else(|| default_inputs(description)) {
            OnnxInputs::Columns => columns::add_column_inputs(&mut graph, &description.columns),
            OnnxInputs::Matrix => columns::add_matrix_input(&mut graph, &description.columns)?,
        };
        let outputs = layers::add_layers(&mut graph, model, encoded);
        layers::add_prediction(&mut graph, description, &outputs);
        let (inputs, outputs) = (graph.inputs().to_vec(), graph.outputs().to_vec());
        let message = make_model_proto(description, graph);
        check_file_size(message.encoded_len() as u64)?;
        Ok(Self { inputs, outputs, bytes: message.encode_to_vec() })
    }

    /// Returns the inputs.
    pub fn inputs(&self) -> &[OnnxValue] {
        &self.inputs
    }

    /// Returns the outputs: `prediction` and, for classification, `probabilities`.
    pub fn outputs(&self) -> &[OnnxValue] {
        &self.outputs
    }

    /// Returns the content of an ONNX file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes an ONNX file. Replaces an earlier file at `path` only after the new file is on the disk.
    ///
    /// # Errors
    ///
    /// [`ExportError::Unwritable`] with the error of the operating system.
    pub fn save(&self, path: &Path) -> Result<(), ExportError> {
        atomic_file::replace_file(path, &self.bytes)
            .map_err(|source| ExportError::Unwritable { path: path.to_owned(), source })
    }
}

/// Writes a line for each output and for each of the first `INPUTS_SHOWN_MAX` inputs.
impl fmt::Display for OnnxModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for input in self.inputs.iter().take(INPUTS_SHOWN_MAX) {
            writeln!(f, "input   {input}")?;
        }
        if self.inputs.len() > INPUTS_SHOWN_MAX {
            writeln!(f, "        and {}", counted(self.inputs.len() - INPUTS_SHOWN_MAX, "more input"))?;
        }
        self.outputs.iter().try_for_each(|output| writeln!(f, "output  {output}"))
    }
}

impl fmt::Display for OnnxValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, element_type, columns } = self;
        match columns {
            Some(columns) => write!(f, "{name}: {element_type} (rows, {columns})"),
            None => write!(f, "{name}: {element_type} (rows)"),
        }
    }
}

fn check_file_size(bytes: u64) -> Result<(), ExportError> {
    if bytes > FILE_BYTES_MAX { Err(ExportError::TooLarge { bytes }) } else { Ok(()) }
}

/// Returns the inputs of an exported model for which the caller chooses no inputs.
fn default_inputs(description: &ModelDescription) -> OnnxInputs {
    let have_names = description.columns_from == ColumnOrigin::Header;
    if have_names || description.columns.iter().any(|column| !column.is_number()) {
        OnnxInputs::Columns
    } else {
        OnnxInputs::Matrix
    }
}

fn make_model_proto(description: &ModelDescription, graph: GraphBuilder) -> ModelProto {
    let mut opset_import = vec![OperatorSetIdProto { domain: String::new(), version: OPERATORS_VERSION }];
    if graph.uses_ml_operators() {
        let (domain, version) = ML_OPERATORS;
        opset_import.push(OperatorSetIdProto { domain: domain.into(), version });
    }
    let description_json =
        serde_json::to_string(description).expect("strings and finite numbers are valid JSON");
    ModelProto {
        ir_version: IR_VERSION,
        opset_import,
        producer_name: "ringtrain".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        doc_string: format!("{} model for {}", description.model, description.training.data),
        graph: Some(graph.into_graph()),
        metadata_props: vec![StringStringEntryProto { key: DESCRIPTION_KEY.into(), value: description_json }],
    }
}
