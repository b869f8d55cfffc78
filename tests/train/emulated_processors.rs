//! Tests of `--reproducible` on processors that this machine does not have. The emulator QEMU runs `ringtrain` on them.

use std::path::Path;
use std::process::{Command, Output};

/// The program that emulates a processor (Debian package `qemu-user`).
const EMULATOR: &str = "qemu-x86_64";

/// A processor with AVX2 and fused multiply-add, but without AVX-512.
const AVX2_PROCESSOR: &str = "Haswell";

/// A processor without fused multiply-add.
const OLD_PROCESSOR: &str = "Nehalem";

/// Returns whether the emulator is installed. If not, prints that the test is skipped.
fn has_emulator() -> bool {
    let is_installed = Command::new(EMULATOR).arg("--version").output().is_ok();
    if !is_installed {
        println!("SKIPPED: there is no {EMULATOR}; install the Debian package qemu-user");
    }
    is_installed
}

/// Runs `ringtrain --reproducible` on an emulated processor, or on the processor of this machine if `processor` is `None`.
fn run_on(processor: Option<&str>, report: &Path, arguments: &[&str]) -> Output {
    let ringtrain = env!("CARGO_BIN_EXE_ringtrain");
    let mut command = match processor {
        Some(processor) => {
            let mut emulator = Command::new(EMULATOR);
            emulator.args(["-cpu", processor, ringtrain]);
            emulator
        }
        None => Command::new(ringtrain),
    };
    command.args(["--reproducible", "--quiet", "--report"]).arg(report).args(arguments).output().unwrap()
}

#[test]
#[ignore = "runs with tools/test --full"]
fn processors_with_avx2_and_with_avx512_compute_the_same_bits() {
    if !has_emulator() {
        return;
    }
    println!("AVX-512 on this machine: {}", has_avx512());
    let directory = tempfile::tempdir().unwrap();
    for arguments in [
        &["--model", "mlp:64", "--epochs", "3"][..],
        &["--model", "cnn:conv4x3,pool2,dense16", "--epochs", "1"],
        &["--data", "synthetic:500x40", "--task", "regression", "--model", "mlp:32", "--epochs", "5"],
    ] {
        let [own, emulated] = [None, Some(AVX2_PROCESSOR)].map(|processor| {
            let report = directory.path().join("report.json");
            let done = run_on(processor, &report, arguments);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
            report["parameters_hash"].as_str().unwrap().to_owned()
        });
        assert_eq!(own, emulated, "{arguments:?}");
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn a_processor_without_fused_multiply_add_is_refused() {
    if !has_emulator() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let done = run_on(Some(OLD_PROCESSOR), &directory.path().join("report.json"), &["--epochs", "1"]);
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success());
    assert!(error.contains("--reproducible needs a processor with fused multiply-add"), "{error}");
}

/// Returns whether this machine's processor has AVX-512.
fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}
