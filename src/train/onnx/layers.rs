//! Adds the scaling of the inputs, the layers of the model, and the outputs of the graph.

use super::graph::{
    ConstantValues, GraphBuilder, integer_attribute, integers_attribute, target_type_attribute,
};
use super::onnx_proto::AttributeProto;
use super::onnx_proto::tensor_proto::DataType;
use crate::train::data::{Standardizer, Task};
use crate::train::model::{HiddenLayer, ModelSpec, ParameterTensor};
use crate::train::model_file::{ModelDescription, SavedModel};

/// Adds nodes for the scaling of the encoded values, and nodes for the layers. Returns the name of the last layer's
/// outputs.
pub(super) fn add_layers(graph: &mut GraphBuilder, model: &SavedModel, encoded: String) -> String {
    let mut value = encoded;
    if let Some(divisor) = model.description().pixel_divisor {
        let divisor = graph.add_constant("pixel_divisor", &[], ConstantValues::Floats(&[divisor]));
        value = graph.add_node("Div", &[&value, &divisor], Vec::new());
    }
    if let Some(Standardizer { mean, inverse_deviation }) = model.standardizer() {
        let mean = graph.add_constant("features.mean", &[mean.len()], ConstantValues::Floats(mean));
        let inverse = graph.add_constant(
            "features.inverse_deviation",
            &[inverse_deviation.len()],
            ConstantValues::Floats(inverse_deviation),
        );
        value = graph.add_node("Sub", &[&value, &mean], Vec::new());
        value = graph.add_node("Mul", &[&value, &inverse], Vec::new());
    }
    add_network(graph, model, value)
}

/// Adds nodes for the layers of the network. Dropout layers get no node, because they do not change predictions.
fn add_network(graph: &mut GraphBuilder, model: &SavedModel, inputs: String) -> String {
    let spec: ModelSpec = model.description().model.parse().expect("a saved model has a valid model name");
    let mut value = inputs;
    let mut is_image = false;
    if let (ModelSpec::Cnn(_), Some(image)) = (&spec, model.description().image) {
        let lengths = [-1, image.channels as i64, image.height as i64, image.width as i64];
        let shape = graph.add_constant("image", &[4], ConstantValues::Integers(&lengths));
        value = graph.add_node("Reshape", &[&value, &shape], Vec::new());
        is_image = true;
    }
    let tensors = model.network().parameter_tensors();
    let mut layers = tensors.chunk_by(|first, second| layer_name(first) == layer_name(second));
    let mut next_layer = || layers.next().expect("the network has parameters for this layer");
    let transposed = || vec![integer_attribute("transB", 1)];
    let hidden = spec.hidden_layers();
    for (index, layer) in hidden.iter().enumerate() {
        match layer {
            HiddenLayer::Convolution { kernel, .. } => {
                let (size, border) = (*kernel as i64, (*kernel / 2) as i64);
                let attributes = vec![
                    integers_attribute("kernel_shape", vec![size; 2]),
                    integers_attribute("pads", vec![border; 4]),
                ];
                value = add_layer(graph, model, (next_layer(), &value), "Conv", attributes);
            }
            HiddenLayer::Pooling(window) => {
                let size = vec![*window as i64; 2];
                let attributes = vec![
                    integers_attribute("kernel_shape", size.clone()),
                    integers_attribute("strides", size),
                ];
                value = graph.add_node("MaxPool", &[&value], attributes);
            }
            HiddenLayer::Dense(_) => {
                if std::mem::take(&mut is_image) {
                    value = graph.add_node("Flatten", &[&value], Vec::new());
                }
                value = add_layer(graph, model, (next_layer(), &value), "Gemm", transposed());
            }
            HiddenLayer::BatchNorm => {
                // The layer uses the default `epsilon` of the ONNX operator.
                value = add_layer(graph, model, (next_layer(), &value), "BatchNormalization", Vec::new());
            }
            HiddenLayer::Dropout(_) => {}
        }
        let is_normalized = hidden.get(index + 1) == Some(&HiddenLayer::BatchNorm);
        if layer.has_rectifier() && !is_normalized {
            value = graph.add_node("Relu", &[&value], Vec::new());
        }
    }
    if is_image {
        value = graph.add_node("Flatten", &[&value], Vec::new());
    }
    add_layer(graph, model, (next_layer(), &value), "Gemm", transposed())
}

/// Returns the first part of a tensor's name, which all tensors of its layer have in common.
fn layer_name(tensor: &ParameterTensor) -> &str {
    tensor.name.rsplit_once('.').map_or(&tensor.name, |(layer, _)| layer)
}

/// Adds a node whose operands are `value` and the tensors of a layer.
fn add_layer(
    graph: &mut GraphBuilder,
    model: &SavedModel,
    (layer, value): (&[ParameterTensor], &str),
    operator: &str,
    attributes: Vec<AttributeProto>,
) -> String {
    let mut operands = vec![value.to_owned()];
    for ParameterTensor { name, shape, range, .. } in layer {
        let elements = ConstantValues::Floats(&model.parameters()[range.clone()]);
        operands.push(graph.add_constant(name, shape, elements));
    }
    let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
    graph.add_node(operator, &operands, attributes)
}

/// Adds the outputs `prediction` and, for classification, `probabilities`.
pub(super) fn add_prediction(graph: &mut GraphBuilder, description: &ModelDescription, outputs: &str) {
    match description.task {
        Task::Text => unreachable!("models that read texts are not exported"),
        Task::Regression => {
            let target = &description.target;
            let axis = graph.add_constant("column", &[1], ConstantValues::Integers(&[1]));
            let deviation =
                graph.add_constant("target.deviation", &[], ConstantValues::Doubles(&[target.deviation]));
            let mean = graph.add_constant("target.mean", &[], ConstantValues::Doubles(&[target.mean]));
            let numbers = graph.add_node("Squeeze", &[outputs, &axis], Vec::new());
            let numbers = graph.add_node("Cast", &[&numbers], target_type_attribute(DataType::Double));
            let scaled = graph.add_node("Mul", &[&numbers, &deviation], Vec::new());
            let output = ("prediction", DataType::Double, None);
            graph.add_output_node("Add", &[&scaled, &mean], Vec::new(), output);
        }
        Task::Classification => {
            let classes = &description.classes;
            let names = graph.add_constant("classes", &[classes.len()], ConstantValues::Texts(classes));
            let attributes = vec![integer_attribute("axis", 1), integer_attribute("keepdims", 0)];
            let best = graph.add_node("ArgMax", &[outputs], attributes);
            let axis = |axis| vec![integer_attribute("axis", axis)];
            let output = ("prediction", DataType::String, None);
            graph.add_output_node("Gather", &[&names, &best], axis(0), output);
            let output = ("probabilities", DataType::Float, Some(classes.len()));
            graph.add_output_node("Softmax", &[outputs], axis(1), output);
        }
    }
}
