//! Trains on Fashion-MNIST with four ranks. Reads the IDX files of the Debian package `dataset-fashion-mnist`.

use std::path::Path;
use std::process::Command;

const FASHION_MNIST_DIRECTORY: &str = "/usr/share/datasets/fashion-mnist";

/// To save time, the test trains for only one epoch. Ten epochs reach an accuracy of 0.88 and take nearly a minute on
/// two cores.
#[test]
#[ignore = "runs with tools/test --full"]
fn fashion_mnist_trains_on_four_ranks() {
    if !Path::new(FASHION_MNIST_DIRECTORY).join("train-images-idx3-ubyte.gz").exists() {
        println!(
            "SKIPPED: no Fashion-MNIST in {FASHION_MNIST_DIRECTORY}; install the Debian package dataset-fashion-mnist"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_ringrun"))
        .args([
            "-n",
            "4",
            "ringtrain",
            "--data",
            FASHION_MNIST_DIRECTORY,
            "--model",
            "mlp:64",
            "--epochs",
            "1",
        ])
        .args(["--report", report.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    let accuracy = report["test_accuracy"].as_f64().unwrap();
    assert!(accuracy >= 0.78, "test accuracy {accuracy}");
    assert_eq!(report["history"].as_array().unwrap().len(), 1);
}
