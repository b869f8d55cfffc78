use std::fs;
use std::path::Path;

use super::storage::{decode_model, encode_model};
use super::*;
use crate::train::data::{ColumnEncoding, ColumnInputs, MissingPolicy, Standardizer, TableLayout, Task};
use crate::train::model::Prediction;

fn number_column(name: &str) -> ColumnEncoding {
    ColumnEncoding {
        name: name.into(),
        is_date: false,
        inputs: ColumnInputs::Number { fill: None, indicator: false },
    }
}

/// The JSON object of the second column in [`example_description`].
const COLUMN_B: &str = "{\"name\":\"b\",\"inputs\":{\"number\":{\"fill\":null,\"indicator\":false}}}";

/// Returns the description of a classifier with two columns and two classes.
pub(super) fn example_description() -> ModelDescription {
    ModelDescription {
        written_by: "ringtrain 0.0.0".into(),
        task: Task::Classification,
        model: "mlp:2".into(),
        columns_from: ColumnOrigin::Header,
        columns: vec![number_column("a"), number_column("b")],
        layout: Some(TableLayout { columns: 4, target: 0, features: vec![1, 3], has_header: false }),
        missing: MissingPolicy::Error,
        image: None,
        text: None,
        pixel_divisor: Some(16.0),
        target: TargetDescription { name: Some("y".into()), mean: 0.0, deviation: 1.0 },
        classes: vec!["no".into(), "yes".into()],
        training: TrainingRecord { data: "a.csv".into(), train_loss: 0.5, ..TrainingRecord::default() },
    }
}

pub(super) fn example_model() -> SavedModel {
    let standardizer = Standardizer { mean: vec![1.0, 2.0], inverse_deviation: vec![0.5, 0.0] };
    let parameters = (0..12).map(|index| index as f32 * 0.25 - 1.0).collect();
    SavedModel::new(example_description(), None, Some(standardizer), parameters).unwrap()
}

#[test]
fn a_loaded_model_equals_the_saved_model() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m");
    let saved = example_model();
    save_model(&path, &saved).unwrap();
    let loaded = SavedModel::load(&path).unwrap();
    assert_eq!(loaded.description(), saved.description());
    assert_eq!(loaded.parameters(), saved.parameters());
    assert_eq!(loaded.standardizer(), saved.standardizer());
    let plain = SavedModel::new(example_description(), None, None, saved.parameters().to_vec()).unwrap();
    save_model(&path, &plain).unwrap();
    assert_eq!(SavedModel::load(&path).unwrap().standardizer(), None);
}

#[test]
fn a_file_that_is_truncated_or_has_a_flipped_bit_is_refused() {
    let load_bytes = |bytes: &[u8]| decode_model(Path::new("m"), bytes);
    let complete = encode_model(&example_model()).unwrap();
    for len in 0..complete.len() {
        let error = load_bytes(&complete[..len]).unwrap_err();
        assert!(matches!(error, ModelFileError::Corrupt { .. }), "{len}: {error}");
    }
    assert!(load_bytes(&[complete.as_slice(), &[0]].concat()).is_err());
    for index in 0..complete.len() {
        let mut bytes = complete.clone();
        bytes[index] ^= 1 << (index % 8);
        let error = load_bytes(&bytes).expect_err(&format!("byte {index}"));
        let is_expected = matches!(
            error,
            ModelFileError::Corrupt { .. }
                | ModelFileError::NotModelFile { .. }
                | ModelFileError::NewerVersion { .. }
        );
        assert!(is_expected, "{index}: {error}");
    }
}

#[test]
fn errors_name_the_format_or_the_version_of_a_file_that_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m");
    let complete = encode_model(&example_model()).unwrap();
    let edit = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = complete.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        [&complete[..at], to.as_bytes(), &complete[at + to.len()..]].concat()
    };
    let cases: [(Vec<u8>, &str); 6] = [
        (
            b"a,b,y\n1,2,3\n4,5,6\n".to_vec(),
            "is not a model file (it does not start like a safetensors file)",
        ),
        (
            edit("\"version\":\"1\"", "\"version\":\"9\""),
            "has version 9 of the format of model files, but this ringtrain only reads",
        ),
        (edit("\"version\":\"1\"", "\"version\":\"x\""), "its version is missing or is not a number"),
        (edit("ringtrain-model", "pytorch-modules"), "its format is `pytorch-modules`"),
        (edit("\"format\"", "\"formal\""), "its metadata has no format"),
        (Vec::new(), "it is empty"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        let error = SavedModel::load(&path).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(path.to_str().unwrap()), "{error}");
    }
    assert!(SavedModel::load(directory.path()).unwrap_err().to_string().contains("it is a directory"));
    assert!(SavedModel::load(&path.join("absent")).unwrap_err().to_string().contains("cannot read"));
}

/// The checksums are right, so only the check of a field can refuse a file.
#[test]
fn a_description_with_a_wrong_field_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m");
    let text = serde_json::to_string(&example_description()).unwrap();
    let cases = [
        ("\"mlp:2\"", "\"mlp:0\"", "the number 0 must be from 1 to 65536"),
        ("\"mlp:2\"", "\"tree\"", "the model tree"),
        ("\"mlp:2\"", "\"linear\"", "cannot predict classes"),
        ("\"mlp:2\"", "\"mlp:3\"", "has the shape [2, 2] and not [3, 2]"),
        ("\"mlp:2\"", "\"softmax\"", "the tensor layers.1.bias does not belong to the model softmax"),
        ("\"mlp:2\"", "\"mlp:2,2\"", "the tensor layers.2.weight is missing"),
        ("\"mlp:2\"", "\"mlp:65536,65536\"", "too many parameters"),
        ("\"no\",\"yes\"", "\"no\"", "has 1 class,"),
        ("\"no\",\"yes\"", "\"no\",\"no\"", "two classes have the same name"),
        ("\"classification\"", "\"regression\"", "predicts numbers"),
        ("\"classification\"", "\"ranking\"", "unknown variant `ranking`"),
        ("\"name\":\"b\"", "\"name\":\"a\"", "two columns have the same name"),
        ("b\",\"inputs\":{\"number\"", "b\",\"inputs\":{\"image\"", "unknown variant `image`"),
        (
            COLUMN_B,
            "{\"name\":\"b\",\"inputs\":{\"one-hot\":{\"categories\":[\"x\",\"x\"]}}}",
            "are not sorted, or two are equal",
        ),
        (COLUMN_B, "{\"name\":\"b\",\"inputs\":{\"hashed\":{\"buckets\":0}}}", "has 0 buckets"),
        (
            COLUMN_B,
            "{\"name\":\"b\",\"inputs\":{\"hashed\":{\"buckets\":4294967295}}}",
            "has 4294967295 buckets",
        ),
        (
            COLUMN_B,
            "{\"name\":\"b\",\"inputs\":{\"shifted-number\":{\"offset\":null,\"fill\":null,\"indicator\":false}}}",
            "null",
        ),
        ("\"missing\":\"error\"", "\"missing\":\"guess\"", "unknown variant `guess`"),
        ("16.0", "0.0", "are divided by 0"),
        ("16.0", "1e999", "number out of range"),
        ("\"deviation\":1.0", "\"deviation\":0.0", "the deviation 0"),
        ("\"deviation\":1.0", "\"deviation\":null", "null"),
        (
            "\"columns\":[",
            "\"columns\":[{\"name\":\"c\",\"inputs\":{\"hashed\":{\"buckets\":1}}},",
            "its layout is not valid: it must have 3 feature columns",
        ),
        ("[1,3]", "[3,1]", "its layout is not valid"),
        ("[1,3]", "[1,4]", "its layout is not valid"),
        ("\"target\":0", "\"target\":1", "its layout is not valid"),
        ("\"header\"", "\"guess\"", "unknown variant `guess`"),
    ];
    for (from, to, expected) in cases {
        assert_eq!(text.matches(from).count(), 1, "{from}");
        storage::tests::write_model_file(&path, &text.replace(from, to), &example_model());
        let error = SavedModel::load(&path).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("corrupt"), "{to}: {error}");
    }
    storage::tests::write_model_file(
        &path,
        &text.replace("{\"written_by\"", "{\"later\":[1],\"written_by\""),
        &example_model(),
    );
    assert_eq!(SavedModel::load(&path).unwrap().description(), &example_description());
}

#[test]
fn a_tensor_with_a_value_that_is_not_finite_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m");
    let mut parameters = example_model().parameters().to_vec();
    parameters[3] = f32::NAN;
    save_model(&path, &SavedModel::new(example_description(), None, None, parameters).unwrap()).unwrap();
    let error = SavedModel::load(&path).unwrap_err().to_string();
    assert!(error.contains("the tensor layers.0.weight holds NaN"), "{error}");
}

/// A negative variance would make a prediction NaN.
#[test]
fn a_negative_running_variance_is_refused() {
    let description = ModelDescription { model: "mlp:2,batchnorm".into(), ..example_description() };
    let mut parameters = vec![0.5; 18];
    assert!(SavedModel::new(description.clone(), None, None, parameters.clone()).is_ok());
    // The running variances follow 4 weights of the dense layer and 6 other parameters of the normalization.
    parameters[11] = -0.5;
    let error = SavedModel::new(description, None, None, parameters).unwrap_err();
    assert_eq!(error, "the tensor layers.1.running_var has a negative variance");
}

#[test]
fn predictions_follow_the_documentation_of_the_format() {
    let mut model = example_model();
    // The second column is constant, so its input is 0.
    let rows = [[3.0, 8.0], [-1.0, 16.0]];
    for (values, mut inputs) in rows.iter().zip(model.inputs_mut().rows_mut()) {
        inputs.assign(&ndarray::aview1(values));
    }
    let parameters = model.parameters().to_vec();
    for (row, prediction) in rows.iter().zip(model.predict(2).unwrap()) {
        let input = (row[0] - 1.0) * 0.5;
        let hidden = [0, 1].map(|unit| (parameters[2 * unit] * input + parameters[4 + unit]).max(0.0));
        let outputs = [0, 1].map(|class| {
            let at = 6 + 2 * class;
            f64::from(parameters[at] * hidden[0] + parameters[at + 1] * hidden[1] + parameters[10 + class])
        });
        let Prediction::Class { class, probabilities } = prediction else { panic!("not a class") };
        let expected = 1.0 / (1.0 + (outputs[0] - outputs[1]).exp());
        assert!((probabilities[1] - expected).abs() < 1e-6, "{probabilities:?} {expected}");
        assert_eq!(class, usize::from(expected > 0.5));
    }
}
