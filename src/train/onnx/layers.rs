//! Adds the scaling of the inputs, the layers of the model, and the outputs of the graph.

use super::graph::{ConstantValues, GraphBuilder, integer, to_type};
use super::onnx_proto::tensor_proto::DataType;
use crate::train::data::{Standardizer, Task};
use crate::train::model::ModelSpec;
use crate::train::model_file::{ModelDescription, SavedModel};

/// Adds all steps from the encoded values to the outputs of the last layer, and returns the name of these outputs.
pub(super) fn add_layers(graph: &mut GraphBuilder, model: &SavedModel, encoded: String) -> String {
    let mut value = encoded;
    if let Some(divisor) = model.description().pixel_divisor {
        let divisor = graph.constant("pixel_divisor", &[], ConstantValues::Floats(&[divisor]));
        value = graph.node("Div", &[&value, &divisor], Vec::new());
    }
    if let Some(Standardizer { mean, inverse_deviation }) = model.standardizer() {
        let mean = graph.constant("features.mean", &[mean.len()], ConstantValues::Floats(mean));
        let inverse = graph.constant(
            "features.inverse_deviation",
            &[inverse_deviation.len()],
            ConstantValues::Floats(inverse_deviation),
        );
        value = graph.node("Sub", &[&value, &mean], Vec::new());
        value = graph.node("Mul", &[&value, &inverse], Vec::new());
    }
    let spec: ModelSpec =
        model.description().model.parse().expect("a saved model has a name that was parsed before");
    match spec {
        ModelSpec::Linear | ModelSpec::Softmax | ModelSpec::Mlp(_) => add_dense_layers(graph, model, value),
    }
}

/// Adds fully connected layers with rectifiers between them.
fn add_dense_layers(graph: &mut GraphBuilder, model: &SavedModel, inputs: String) -> String {
    let mut value = inputs;
    let tensors = model.network().tensors();
    for (index, layer) in tensors.chunks(2).enumerate() {
        if index > 0 {
            value = graph.node("Relu", &[&value], Vec::new());
        }
        let mut operands = vec![value];
        for (name, shape, range) in layer {
            let elements = ConstantValues::Floats(&model.parameters()[range.clone()]);
            operands.push(graph.constant(name, shape, elements));
        }
        let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
        value = graph.node("Gemm", &operands, vec![integer("transB", 1)]);
    }
    value
}

/// Adds the outputs `prediction` and, for classification, `probabilities`.
pub(super) fn add_prediction(graph: &mut GraphBuilder, description: &ModelDescription, outputs: &str) {
    match description.task {
        Task::Regression => {
            let target = &description.target;
            let axis = graph.constant("column", &[1], ConstantValues::Integers(&[1]));
            let deviation =
                graph.constant("target.deviation", &[], ConstantValues::Doubles(&[target.deviation]));
            let mean = graph.constant("target.mean", &[], ConstantValues::Doubles(&[target.mean]));
            let numbers = graph.node("Squeeze", &[outputs, &axis], Vec::new());
            let numbers = graph.node("Cast", &[&numbers], to_type(DataType::Double));
            let scaled = graph.node("Mul", &[&numbers, &deviation], Vec::new());
            let output = ("prediction", DataType::Double, None);
            graph.output_node("Add", &[&scaled, &mean], Vec::new(), output);
        }
        Task::Classification => {
            let classes = &description.classes;
            let names = graph.constant("classes", &[classes.len()], ConstantValues::Texts(classes));
            let attributes = vec![integer("axis", 1), integer("keepdims", 0)];
            let best = graph.node("ArgMax", &[outputs], attributes);
            let axis = |axis| vec![integer("axis", axis)];
            let output = ("prediction", DataType::String, None);
            graph.output_node("Gather", &[&names, &best], axis(0), output);
            let output = ("probabilities", DataType::Float, Some(classes.len()));
            graph.output_node("Softmax", &[outputs], axis(1), output);
        }
    }
}
