//! Builds an ONNX graph: inputs, constants, nodes and outputs. A name identifies each value of the graph.

use std::collections::BTreeSet;

use super::onnx_proto::attribute_proto::AttributeType;
use super::onnx_proto::tensor_proto::DataType;
use super::onnx_proto::tensor_shape_proto::Dimension;
use super::onnx_proto::tensor_shape_proto::dimension::Length;
use super::onnx_proto::type_proto::Kind;
use super::onnx_proto::{
    AttributeProto, GraphProto, NodeProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use super::{ML_OPERATORS, OnnxValue};

/// The symbolic dimension for the number of rows in the shapes of inputs and outputs.
const ROWS_DIMENSION: &str = "rows";

/// The elements of a constant.
#[derive(Clone, Copy, Debug)]
pub(super) enum ConstantValues<'a> {
    Floats(&'a [f32]),
    Doubles(&'a [f64]),
    Integers(&'a [i64]),
    Texts(&'a [String]),
}

/// A graph under construction. Nodes must be added in the order in which they run.
#[derive(Debug)]
pub(super) struct GraphBuilder {
    graph: GraphProto,
    inputs: Vec<OnnxValue>,
    outputs: Vec<OnnxValue>,
    /// The names of all values in the graph, and the names that are reserved for the outputs.
    used_names: BTreeSet<String>,
}

impl GraphBuilder {
    /// Creates an empty graph. The names in `outputs` are reserved for the outputs.
    pub(super) fn new(outputs: &[&str]) -> Self {
        Self {
            graph: GraphProto { name: "ringtrain".into(), ..GraphProto::default() },
            inputs: Vec::new(),
            outputs: Vec::new(),
            used_names: outputs.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    pub(super) fn inputs(&self) -> &[OnnxValue] {
        &self.inputs
    }

    pub(super) fn outputs(&self) -> &[OnnxValue] {
        &self.outputs
    }

    /// Appends underscores to `name` until no other value has the name. Reserves and returns the new name.
    fn reserve_unused_name(&mut self, mut name: String) -> String {
        while !self.used_names.insert(name.clone()) {
            name.push('_');
        }
        name
    }

    /// Adds an input with the shape (rows, `columns`). Returns its name.
    pub(super) fn add_input(
        &mut self,
        name: String,
        element_type: DataType,
        columns: usize,
        documentation: String,
    ) -> String {
        let name = self.reserve_unused_name(name);
        let value =
            OnnxValue { name: name.clone(), element_type: type_name(element_type), columns: Some(columns) };
        self.graph.input.push(make_value_info(&value, element_type, documentation));
        self.inputs.push(value);
        name
    }

    /// Adds a constant with the dimensions `dims`, and returns its name.
    pub(super) fn add_constant(
        &mut self,
        name: &str,
        dims: &[usize],
        elements: ConstantValues<'_>,
    ) -> String {
        let name = self.reserve_unused_name(format!("ringtrain/{name}"));
        let (data_type, raw_data, string_data) = match elements {
            ConstantValues::Floats(values) => {
                (DataType::Float, bytemuck::cast_slice(values).to_vec(), Vec::new())
            }
            ConstantValues::Doubles(values) => {
                (DataType::Double, bytemuck::cast_slice(values).to_vec(), Vec::new())
            }
            ConstantValues::Integers(values) => {
                (DataType::Int64, bytemuck::cast_slice(values).to_vec(), Vec::new())
            }
            ConstantValues::Texts(values) => (DataType::String, Vec::new(), texts_to_bytes(values)),
        };
        self.graph.initializer.push(TensorProto {
            dims: dims.iter().map(|&length| length as i64).collect(),
            data_type: data_type.into(),
            string_data,
            name: name.clone(),
            raw_data,
        });
        name
    }

    /// Adds a node, and returns the name of its result.
    pub(super) fn add_node(
        &mut self,
        operator: &str,
        inputs: &[&str],
        attributes: Vec<AttributeProto>,
    ) -> String {
        let result_name = self.reserve_unused_name(format!("ringtrain/{operator}_{}", self.graph.node.len()));
        self.push_node(operator, "", inputs, attributes, result_name)
    }

    /// Adds a node with an operator of `ai.onnx.ml`, and returns the name of its result.
    pub(super) fn add_ml_node(
        &mut self,
        operator: &str,
        inputs: &[&str],
        attributes: Vec<AttributeProto>,
    ) -> String {
        let result_name = self.reserve_unused_name(format!("ringtrain/{operator}_{}", self.graph.node.len()));
        self.push_node(operator, ML_OPERATORS.0, inputs, attributes, result_name)
    }

    /// Adds a node whose result is the output `output` of the graph.
    pub(super) fn add_output_node(
        &mut self,
        operator: &str,
        inputs: &[&str],
        attributes: Vec<AttributeProto>,
        (output, element_type, columns): (&str, DataType, Option<usize>),
    ) {
        let name = self.push_node(operator, "", inputs, attributes, output.to_owned());
        let value = OnnxValue { name, element_type: type_name(element_type), columns };
        self.graph.output.push(make_value_info(&value, element_type, String::new()));
        self.outputs.push(value);
    }

    /// Adds a node whose result has the name `result_name`, and returns this name.
    fn push_node(
        &mut self,
        operator: &str,
        domain: &str,
        inputs: &[&str],
        attribute: Vec<AttributeProto>,
        result_name: String,
    ) -> String {
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|&name| name.to_owned()).collect(),
            output: vec![result_name.clone()],
            name: result_name.clone(),
            op_type: operator.to_owned(),
            domain: domain.to_owned(),
            attribute,
        });
        result_name
    }

    /// Returns whether a node has an operator of `ai.onnx.ml`.
    pub(super) fn uses_ml_operators(&self) -> bool {
        self.graph.node.iter().any(|node| node.domain == ML_OPERATORS.0)
    }

    /// Returns the graph.
    pub(super) fn into_graph(self) -> GraphProto {
        self.graph
    }
}

/// Returns an attribute whose value is an integer.
pub(super) fn integer_attribute(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        r#type: AttributeType::Int.into(),
        i: value,
        ..AttributeProto::default()
    }
}

/// Returns an attribute whose value is a list of integers.
pub(super) fn integers_attribute(name: &str, values: Vec<i64>) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        r#type: AttributeType::Ints.into(),
        ints: values,
        ..AttributeProto::default()
    }
}

/// Returns an attribute whose value is a list of texts.
pub(super) fn texts_attribute(name: &str, values: &[String]) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        r#type: AttributeType::Strings.into(),
        strings: texts_to_bytes(values),
        ..AttributeProto::default()
    }
}

/// Returns the attribute `to` of the operator `Cast`.
pub(super) fn target_type_attribute(data_type: DataType) -> Vec<AttributeProto> {
    vec![integer_attribute("to", i64::from(i32::from(data_type)))]
}

fn texts_to_bytes(texts: &[String]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.clone().into_bytes()).collect()
}

fn type_name(data_type: DataType) -> &'static str {
    match data_type {
        DataType::Undefined => "undefined",
        DataType::Float => "float",
        DataType::Int64 => "int64",
        DataType::String => "string",
        DataType::Double => "double",
    }
}

fn make_value_info(value: &OnnxValue, data_type: DataType, doc_string: String) -> ValueInfoProto {
    let rows = Length::DimParam(ROWS_DIMENSION.into());
    let lengths = std::iter::once(rows).chain(value.columns.map(|columns| Length::DimValue(columns as i64)));
    let dim = lengths.map(|length| Dimension { length: Some(length) }).collect();
    let tensor = TensorTypeProto { elem_type: data_type.into(), shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto {
        name: value.name.clone(),
        r#type: Some(TypeProto { kind: Some(Kind::TensorType(tensor)) }),
        doc_string,
    }
}
