//! Adds the scaling of the inputs, the layers of the model, and the outputs of the graph.

use super::graph::{
    ConstantValues, GraphBuilder, integer_attribute, integers_attribute, target_type_attribute,
};
use super::onnx_proto::AttributeProto;
use super::onnx_proto::tensor_proto::DataType;
use crate::train::data::{ImageShape, Standardizer, Task};
use crate::train::model::{CnnLayer, CnnSpec, ModelSpec, ParameterTensor};
use crate::train::model_file::{ModelDescription, SavedModel};

/// Adds the scaling of the encoded values and the layers. Returns the name of the last layer's outputs.
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
    let spec: ModelSpec =
        model.description().model.parse().expect("a saved model has a name that was parsed before");
    match (spec, model.description().image) {
        (ModelSpec::Cnn(cnn), Some(image)) => add_convolutional_layers(graph, model, (&cnn, image), &value),
        (ModelSpec::Linear | ModelSpec::Softmax | ModelSpec::Mlp(_), _) => {
            add_dense_layers(graph, model, value)
        }
        (ModelSpec::Cnn(_), None) => {
            unreachable!("a model file of a convolutional network has an image shape")
        }
    }
}

/// Adds fully connected layers with rectifiers between them.
fn add_dense_layers(graph: &mut GraphBuilder, model: &SavedModel, inputs: String) -> String {
    let mut value = inputs;
    for (index, layer) in model.network().parameter_tensors().chunks(2).enumerate() {
        if index > 0 {
            value = graph.add_node("Relu", &[&value], Vec::new());
        }
        value = add_linear(graph, model, (layer, &value), "Gemm", vec![integer_attribute("transB", 1)]);
    }
    value
}

/// Adds the layers of a convolutional network. Dropout layers get no node, because they do not change predictions.
fn add_convolutional_layers(
    graph: &mut GraphBuilder,
    model: &SavedModel,
    (cnn, image): (&CnnSpec, ImageShape),
    inputs: &str,
) -> String {
    let lengths = [-1, image.channels as i64, image.height as i64, image.width as i64];
    let shape = graph.add_constant("image", &[4], ConstantValues::Integers(&lengths));
    let mut value = graph.add_node("Reshape", &[inputs, &shape], Vec::new());
    let mut is_image = true;
    let tensors = model.network().parameter_tensors();
    let mut layers = tensors.chunks(2);
    for layer in cnn.layers() {
        match layer {
            CnnLayer::Convolution { kernel, .. } => {
                let (size, border) = (*kernel as i64, (*kernel / 2) as i64);
                let attributes = vec![
                    integers_attribute("kernel_shape", vec![size; 2]),
                    integers_attribute("pads", vec![border; 4]),
                ];
                let layer = layers.next().expect("a convolution has parameters");
                value = add_linear(graph, model, (layer, &value), "Conv", attributes);
                value = graph.add_node("Relu", &[&value], Vec::new());
            }
            CnnLayer::Pooling(window) => {
                let size = vec![*window as i64; 2];
                let attributes = vec![
                    integers_attribute("kernel_shape", size.clone()),
                    integers_attribute("strides", size),
                ];
                value = graph.add_node("MaxPool", &[&value], attributes);
            }
            CnnLayer::Dense(_) => {
                if std::mem::take(&mut is_image) {
                    value = graph.add_node("Flatten", &[&value], Vec::new());
                }
                let layer = layers.next().expect("a dense layer has parameters");
                value =
                    add_linear(graph, model, (layer, &value), "Gemm", vec![integer_attribute("transB", 1)]);
                value = graph.add_node("Relu", &[&value], Vec::new());
            }
            CnnLayer::Dropout(_) => {}
        }
    }
    if is_image {
        value = graph.add_node("Flatten", &[&value], Vec::new());
    }
    let last = layers.next().expect("the last layer has parameters");
    add_linear(graph, model, (last, &value), "Gemm", vec![integer_attribute("transB", 1)])
}

/// Adds a node that multiplies `value` by the weights of a layer and adds the biases.
fn add_linear(
    graph: &mut GraphBuilder,
    model: &SavedModel,
    (layer, value): (&[ParameterTensor], &str),
    operator: &str,
    attributes: Vec<AttributeProto>,
) -> String {
    let mut operands = vec![value.to_owned()];
    for ParameterTensor { name, shape, range } in layer {
        let elements = ConstantValues::Floats(&model.parameters()[range.clone()]);
        operands.push(graph.add_constant(name, shape, elements));
    }
    let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
    graph.add_node(operator, &operands, attributes)
}

/// Adds the outputs `prediction` and, for classification, `probabilities`.
pub(super) fn add_prediction(graph: &mut GraphBuilder, description: &ModelDescription, outputs: &str) {
    match description.task {
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
