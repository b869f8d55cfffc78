//! Tests of convolutional networks: training on one rank and on several ranks, resumption, saved models, and data
//! that does not fit the model.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use ringtrain::Group;
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{Config, ExistingCheckpoint, run};
use serde_json::Value;

use super::library::{StopAfter, checkpoint_in, config, train};
use super::program::{ringtrain_stdout, run_ringtrain_in};
use super::strategies::train_and_compare;

fn cnn_config(layers: &str) -> Config {
    Config {
        model: Some(format!("cnn:{layers}").parse().unwrap()),
        epochs: Some(2),
        batch_size: Some(100),
        rule: Some(Rule::Momentum { momentum: 0.9 }),
        learning_rate: Some(0.05),
        ..config()
    }
}

/// The index of a sample in the batch must affect neither its dropout nor the borders of its image. The run takes 30
/// steps.
#[test]
fn the_parameters_do_not_depend_on_the_number_of_ranks() {
    let config = cnn_config("conv4x3,pool2,dropout0.2,dense12,dropout0.3");
    let expected = train(&config).unwrap();
    assert!(expected.report.train_loss < 2.28, "{}", expected.report.train_loss);
    let found = train_and_compare(3, &config);
    for (found, expected) in found.parameters.iter().zip(&expected.parameters) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

/// Dropout must continue with the random numbers of the next step.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_resumed_run_gives_the_same_bits_as_an_uninterrupted_run() {
    let directory = tempfile::tempdir().unwrap();
    let uninterrupted = cnn_config("conv2x3,pool2,dropout0.5,dense8");
    let expected = train(&uninterrupted).unwrap();
    let stop = AtomicBool::new(false);
    let first = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..uninterrupted.clone()
    };
    let mut observer = StopAfter { steps: 7, stop: &stop };
    assert!(run(&mut Group::solo(), &first, &stop, &mut observer).unwrap().report.stopped);
    let second = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
        ..uninterrupted
    };
    assert_eq!(train(&second).unwrap().parameters, expected.parameters);
}

/// Writes an array of zeros in numpy's format.
fn write_zeros(path: &Path, shape: &[usize]) {
    write_array(path, shape, &vec![0; shape.iter().product()]);
}

/// Writes an array of bytes in numpy's format.
pub(crate) fn write_array(path: &Path, shape: &[usize], values: &[u8]) {
    let lengths: Vec<String> = shape.iter().map(usize::to_string).collect();
    let text = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({},), }}", lengths.join(", "));
    let header = format!("{text:117}\n");
    let length = u16::try_from(header.len()).unwrap().to_le_bytes();
    fs::write(path, [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), values].concat()).unwrap();
}

#[test]
fn a_saved_model_predicts_evaluates_and_prints_its_images() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    ringtrain_stdout(
        place,
        "--model cnn:conv8x3,pool2,conv8x3,pool2,dense32,dropout0.1 --lr 0.01 --epochs 1 --batch-size 32 --test-fraction 0 \
         --save-model m --report r",
    );
    let report: Value = serde_json::from_str(&fs::read_to_string(place.join("r")).unwrap()).unwrap();
    let accuracy = report["train_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.7, "{accuracy}");
    let evaluation: Value =
        serde_json::from_str(&ringtrain_stdout(place, "eval --model m --data digits --json")).unwrap();
    assert_eq!(evaluation["accuracy"], report["train_accuracy"]);
    let text = ringtrain_stdout(place, "inspect m");
    assert!(text.contains("images         1x8x8 (channels, height, width)"), "{text}");
    assert!(text.contains("layers.0.weight      8 x 1 x 3 x 3"), "{text}");
    let write = |name: &str, shape: &[usize]| write_zeros(&place.join(name), shape);
    write("images.npy", &[3, 8, 8]);
    write("rows.npy", &[3, 64]);
    write("other.npy", &[3, 4, 16]);
    let predictions = ringtrain_stdout(place, "predict --model m --data images.npy");
    assert_eq!(predictions.lines().count(), 4);
    assert_eq!(ringtrain_stdout(place, "predict --model m --data rows.npy"), predictions);
    let output = run_ringtrain_in(place, "predict --model m --data other.npy");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(4) && stderr.contains("images of the shape 1x4x16"), "{stderr}");
}

#[test]
fn data_without_images_is_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    fs::write(place.join("t.csv"), "a,b,y\n1,2,0\n3,4,1\n5,6,0\n").unwrap();
    write_zeros(&place.join("x.npy"), &[4, 6, 3]);
    write_zeros(&place.join("y.npy"), &[4]);
    for (line, code, expected) in [
        (
            "--data t.csv --target y --model cnn",
            4,
            "needs images, but a sample has 2 features without height",
        ),
        ("--data synthetic:50x64 --model cnn", 4, "needs images"),
        (
            "--data x.npy,y.npy --model cnn --task regression",
            4,
            "has `pool2` where the image has only 3 x 1 pixels",
        ),
        ("--model cnn:conv8x2", 2, "--model cnn:conv8x2: has `conv8x2`; the kernel must be an odd number"),
    ] {
        let output = run_ringtrain_in(place, line);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && stderr.contains(expected), "{line}: {stderr}");
    }
}
