//! Runs the examples under `ringrun`. The examples check their own results.

use std::path::PathBuf;
use std::process::Command;

use crate::util::{FinishedProgram, ringrun, run};

/// Builds an example and returns the path of its program. `cargo test --test launch` does not build examples.
fn build_example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let profile = folder.file_name().and_then(|name| name.to_str()).expect("a plain name");
    let profile = if profile == "debug" { "dev" } else { profile };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--profile", profile, "--example", name]);
    let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo runs");
    assert!(status.success(), "cargo cannot build the example {name}");
    folder.join("examples").join(name)
}

fn run_example(name: &str, n: u32) -> FinishedProgram {
    let path = build_example(name);
    let done = run(&mut ringrun(&["-n", &n.to_string(), "--", path.to_str().expect("a plain path")]));
    assert_eq!(done.code(), Some(0), "{name} with {n} ranks: {done:?}");
    done
}

/// Runs an example in worlds of these sizes, and checks that the example prints `expected`.
fn assert_prints(name: &str, worlds: &[u32], expected: &str) {
    for &n in worlds {
        let done = run_example(name, n);
        assert!(done.stdout().contains(expected), "{name} with {n} ranks: {}", done.stdout());
    }
}

#[test]
fn the_example_model_averaging_runs() {
    assert_prints("model_averaging", &[1, 4], "largest error");
}

#[test]
fn the_example_all_reduce_regression_runs() {
    assert_prints("all_reduce_regression", &[1, 3, 4], "the same model on all");
}

#[test]
fn the_example_pipeline_runs() {
    assert_prints("pipeline", &[1, 2, 4], "stages: loss");
}

#[test]
fn the_example_hybrid_runs() {
    assert_prints("hybrid", &[2, 4], "x 2 ranks");
}

#[test]
fn the_example_own_model_runs() {
    assert_prints("own_model", &[3], "local-sgd:4: 3 ranks, test accuracy 0.9");
}

#[test]
fn the_example_named_tensors_gives_the_same_results_on_all_ranks() {
    let done = run_example("named_tensors", 4);
    let agreed = done.stdout().lines().filter(|line| line.contains("of 4: all results agree")).count();
    assert_eq!(agreed, 4, "{}", done.stdout());
}
