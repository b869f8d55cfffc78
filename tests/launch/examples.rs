//! The examples run under `ringrun`, and check their own results.

use std::path::PathBuf;
use std::process::Command;

use crate::util::{Done, ringrun, run};

/// The path of an example, which `cargo test --test launch` alone does not build.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let profile = folder.file_name().and_then(|name| name.to_str()).expect("a plain name");
    let profile = if profile == "debug" { "dev" } else { profile };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--profile", profile, "--example", name]);
    let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo runs");
    assert!(status.success(), "cargo builds the example {name}");
    folder.join("examples").join(name)
}

fn run_example(name: &str, n: u32) -> Done {
    let path = example(name);
    let done = run(&mut ringrun(&["-n", &n.to_string(), "--", path.to_str().expect("a plain path")]));
    assert_eq!(done.code(), Some(0), "{name} with {n} ranks: {done:?}");
    done
}

fn runs(name: &str, worlds: &[u32], said: &str) {
    for &n in worlds {
        let done = run_example(name, n);
        assert!(done.stdout().contains(said), "{name} with {n} ranks: {}", done.stdout());
    }
}

#[test]
fn models_are_averaged() {
    runs("model_averaging", &[1, 4], "largest error");
}

#[test]
fn gradients_are_summed() {
    runs("all_reduce_regression", &[1, 3, 4], "the same model on all");
}

#[test]
fn a_pipeline_learns() {
    runs("pipeline", &[1, 2, 4], "stages: loss");
}

#[test]
fn a_grid_of_two_by_two_learns() {
    runs("hybrid", &[2, 4], "x 2 ranks");
}

#[test]
fn every_rank_agrees_on_tensors_reduced_by_name() {
    let done = run_example("named_tensors", 4);
    let agreed = done.stdout().lines().filter(|line| line.contains("of 4: all results agree")).count();
    assert_eq!(agreed, 4, "{}", done.stdout());
}
