use prost::Message as _;

use super::onnx_proto::tensor_proto::DataType;
use super::onnx_proto::tensor_shape_proto::dimension::Length;
use super::onnx_proto::type_proto::Kind;
use super::onnx_proto::{GraphProto, ModelProto, TensorProto, ValueInfoProto};
use super::*;
use crate::train::data::{ColumnEncoding, ColumnInputs, ImageShape, MissingPolicy, Standardizer, Task};
use crate::train::model::ParameterTensor;
use crate::train::model_file::{TargetDescription, TrainingRecord};

fn make_column(name: &str, inputs: ColumnInputs) -> ColumnEncoding {
    ColumnEncoding { name: name.into(), is_date: false, inputs }
}

fn plain_number_column(name: &str) -> ColumnEncoding {
    make_column(name, ColumnInputs::Number { fill: None, indicator: false })
}

/// Returns a model with varied parameters. The model is a classifier if `classes` is not empty.
fn make_model(
    spec: &str,
    columns: Vec<ColumnEncoding>,
    classes: &[&str],
    origin: ColumnOrigin,
) -> SavedModel {
    let task = if classes.is_empty() { Task::Regression } else { Task::Classification };
    let target = match task {
        Task::Regression => TargetDescription { name: None, mean: 1000.5, deviation: 0.25 },
        _ => TargetDescription { name: None, mean: 0.0, deviation: 1.0 },
    };
    let description = ModelDescription {
        written_by: "ringtrain 0.0.0".into(),
        task,
        model: spec.into(),
        columns_from: origin,
        columns,
        layout: None,
        missing: MissingPolicy::Error,
        pixel_divisor: None,
        text: None,
        image: None,
        target,
        classes: classes.iter().map(|&name| name.to_owned()).collect(),
        training: TrainingRecord::default(),
    };
    let inputs = description.inputs();
    let parameters = description.check(None).unwrap().parameter_count();
    let standardizer = Standardizer { mean: vec![1.5; inputs], inverse_deviation: vec![0.5; inputs] };
    let parameters = (0..parameters).map(|index| index as f32 * 0.125 - 1.0).collect();
    SavedModel::new(description, None, Some(standardizer), parameters).unwrap()
}

fn export_graph(model: &SavedModel, inputs: Option<OnnxInputs>) -> (OnnxModel, GraphProto) {
    let exported = OnnxModel::new(model, inputs).unwrap();
    let message = ModelProto::decode(exported.bytes()).unwrap();
    (exported, message.graph.unwrap())
}

/// Returns a text with the name, the type and the shape of an input or an output.
fn describe_value(info: &ValueInfoProto) -> String {
    let Some(Kind::TensorType(tensor)) = info.r#type.clone().unwrap().kind else { panic!("{info:?}") };
    let dims = tensor.shape.unwrap().dim.into_iter().map(|dim| match dim.length.unwrap() {
        Length::DimValue(value) => value.to_string(),
        Length::DimParam(name) => name,
    });
    let element_type = DataType::try_from(tensor.elem_type).unwrap().as_str_name().to_lowercase();
    format!("{}: {element_type} ({})", info.name, dims.collect::<Vec<_>>().join(", "))
}

fn operator_names(graph: &GraphProto) -> String {
    graph.node.iter().map(|node| node.op_type.as_str()).collect::<Vec<_>>().join(" ")
}

fn find_constant<'a>(graph: &'a GraphProto, name: &str) -> &'a TensorProto {
    graph.initializer.iter().find(|tensor| tensor.name == format!("ringtrain/{name}")).unwrap()
}

#[test]
fn a_classifier_has_an_input_for_each_column_and_two_outputs() {
    let inputs = vec![
        make_column("width", ColumnInputs::Number { fill: Some(2.5), indicator: true }),
        make_column("time", ColumnInputs::ShiftedNumber { offset: 1.7e9, fill: Some(0.0), indicator: false }),
        make_column("colour", ColumnInputs::OneHot { categories: vec![String::new(), "red".into()] }),
        make_column("", ColumnInputs::Hashed { buckets: 3 }),
        plain_number_column("prediction"),
    ];
    let model = make_model("mlp:2", inputs, &["no", "yes", "maybe"], ColumnOrigin::Header);
    let (exported, graph) = export_graph(&model, None);
    let found: Vec<String> = graph.input.iter().chain(&graph.output).map(describe_value).collect();
    let expected = [
        "width: float (rows, 1)",
        "time: double (rows, 1)",
        "colour: string (rows, 1)",
        "column_3: int64 (rows, 1)",
        "prediction_: float (rows, 1)",
        "prediction: string (rows)",
        "probabilities: float (rows, 3)",
    ];
    assert_eq!(found, expected);
    let printed = exported.to_string();
    assert_eq!(printed.lines().map(|line| &line[8..]).collect::<Vec<_>>(), expected);
    assert_eq!(
        operator_names(&graph),
        "IsNaN Where Cast Sub Cast IsNaN Where LabelEncoder Equal Cast Equal Cast Concat Sub Mul Gemm Relu Gemm ArgMax \
         Gather Softmax"
    );
    let encoder = graph.node.iter().find(|node| node.op_type == "LabelEncoder").unwrap();
    assert_eq!(encoder.domain, "ai.onnx.ml");
    let index_of = |text: &str| {
        let at = encoder.attribute[0].strings.iter().position(|key| key == text.as_bytes())?;
        Some(encoder.attribute[1].ints[at])
    };
    assert_eq!(["red", "", "NA", "nUlL", "blue"].map(index_of), [Some(1), Some(0), Some(0), Some(0), None]);
    let message = ModelProto::decode(exported.bytes()).unwrap();
    assert_eq!(message.opset_import.len(), 2);
    let description: ModelDescription = serde_json::from_str(&message.metadata_props[0].value).unwrap();
    assert_eq!(&description, model.description());
}

/// Each value must be defined before a node uses it, and no two values may have the same name.
#[test]
fn the_graph_is_sorted_and_its_constants_are_the_tensors_of_the_model() {
    let model = make_model(
        "mlp:4",
        vec![plain_number_column("a"), plain_number_column("b")],
        &[],
        ColumnOrigin::Header,
    );
    let (_, graph) = export_graph(&model, None);
    let mut defined: Vec<&str> = graph.input.iter().map(|info| info.name.as_str()).collect();
    defined.extend(graph.initializer.iter().map(|tensor| tensor.name.as_str()));
    for node in &graph.node {
        for name in &node.input {
            assert!(defined.contains(&name.as_str()), "{name} {}", node.op_type);
        }
        for name in &node.output {
            assert!(!defined.contains(&name.as_str()), "{name}");
            defined.push(name);
        }
    }
    assert_eq!(describe_value(&graph.output[0]), "prediction: double (rows)");
    for ParameterTensor { name, shape, range, .. } in model.network().parameter_tensors() {
        let tensor = find_constant(&graph, &name);
        let shape: Vec<i64> = shape.iter().map(|&length| length as i64).collect();
        assert_eq!(tensor.dims, shape);
        assert_eq!(tensor.raw_data, bytemuck::cast_slice::<f32, u8>(&model.parameters()[range]));
    }
    assert_eq!(find_constant(&graph, "features.mean").raw_data, bytemuck::cast_slice::<f32, u8>(&[1.5, 1.5]));
    assert_eq!(find_constant(&graph, "target.mean").raw_data, 1000.5_f64.to_le_bytes());
}

#[test]
fn a_matrix_input_has_one_column_per_model_column() {
    let filled = |indicator| ColumnInputs::Number { fill: Some(0.5), indicator };
    for (columns, expected, operators_expected, order) in [
        (
            vec![plain_number_column("0"), plain_number_column("1")],
            "x: float (rows, 2)",
            "Sub Mul Gemm",
            None,
        ),
        (
            vec![make_column("0", filled(false)), make_column("1", filled(true))],
            "x: float (rows, 2)",
            "IsNaN Where Cast Concat Gather Sub Mul Gemm",
            Some(vec![0_i64, 1, 3]),
        ),
        (
            vec![make_column("0", filled(true)), make_column("1", filled(true))],
            "x: float (rows, 2)",
            "IsNaN Where Cast Concat Gather Sub Mul Gemm",
            Some(vec![0, 2, 1, 3]),
        ),
        (
            vec![
                plain_number_column("0"),
                make_column("1", ColumnInputs::ShiftedNumber { offset: 5.0, fill: None, indicator: false }),
            ],
            "x: double (rows, 2)",
            "Sub Cast Sub Mul Gemm",
            None,
        ),
    ] {
        let model = make_model("linear", columns, &[], ColumnOrigin::Position);
        let (_, graph) = export_graph(&model, None);
        assert_eq!(graph.input.iter().map(describe_value).collect::<Vec<_>>(), [expected]);
        assert_eq!(operator_names(&graph), format!("{operators_expected} Squeeze Cast Mul Add"));
        if let Some(order) = order {
            assert_eq!(find_constant(&graph, "order").raw_data, bytemuck::cast_slice::<i64, u8>(&order));
        }
        let (_, graph) = export_graph(&model, Some(OnnxInputs::Columns));
        assert_eq!(graph.input.len(), 2);
    }
}

#[test]
fn each_layer_is_exported_as_the_node_of_its_kind() {
    let columns: Vec<ColumnEncoding> = (0..36).map(|index| plain_number_column(&index.to_string())).collect();
    let image = ImageShape { channels: 1, height: 6, width: 6 };
    for (layers, expected) in [
        ("cnn:conv2x3,pool2,dropout0.5,dense3", "Reshape Conv Relu MaxPool Flatten Gemm Relu Gemm"),
        ("cnn:pool2,conv2x1", "Reshape MaxPool Conv Relu Flatten Gemm"),
        (
            "cnn:conv2x3,batchnorm,pool2,dense3,batchnorm",
            "Reshape Conv BatchNormalization Relu MaxPool Flatten Gemm BatchNormalization Relu Gemm",
        ),
        ("mlp:3,dropout0.5,4,batchnorm", "Gemm Relu Gemm BatchNormalization Relu Gemm"),
    ] {
        let template = make_model("linear", columns.clone(), &[], ColumnOrigin::Position);
        let description =
            ModelDescription { model: layers.into(), image: Some(image), ..template.description().clone() };
        let parameters = vec![0.5; description.check(None).unwrap().parameter_count()];
        let model = SavedModel::new(description, None, None, parameters).unwrap();
        let (_, graph) = export_graph(&model, None);
        assert_eq!(operator_names(&graph), format!("{expected} Squeeze Cast Mul Add"));
        for node in graph.node.iter().filter(|node| node.op_type == "BatchNormalization") {
            let names = node.input[1..].iter().map(|name| name.rsplit('.').next().unwrap());
            assert_eq!(names.collect::<Vec<_>>(), ["weight", "bias", "running_mean", "running_var"]);
        }
    }
}

#[test]
fn text_columns_in_a_matrix_and_too_large_files_are_refused() {
    let texts = ColumnInputs::OneHot { categories: vec!["a".into()] };
    let model = make_model(
        "linear",
        vec![plain_number_column("0"), make_column("1", texts)],
        &[],
        ColumnOrigin::Position,
    );
    assert_eq!(export_graph(&model, None).1.input.len(), 2);
    let error = OnnxModel::new(&model, Some(OnnxInputs::Matrix)).unwrap_err().to_string();
    assert!(error.contains("column `1` holds texts"), "{error}");
    assert!(check_file_size(1 << 31).unwrap_err().to_string().contains("needs 2147483648 bytes"));
}
