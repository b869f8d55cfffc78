//! Checks that the library without the features `cli` and `train` needs none of their dependencies. Other tests compile
//! the library only with all default features, because a second build would take too long.

use std::process::Command;

use super::source::Source;
use super::{all_sources, assert_no_violations, repository_root, top_module, violation_at};

/// The crates that belong to a feature, and the modules that may use them.
const CRATES_OF_FEATURES: &[(&[&str], &[&str])] = &[
    (&["clap", "env_logger", "toml"], &["cli"]),
    (&["prost"], &["train", "observe"]),
    (&["if_addrs", "signal_hook"], &["cli", "launch"]),
    (&["glob"], &["launch", "train"]),
    (
        &[
            "csv",
            "flate2",
            "indicatif",
            "memchr",
            "ruzstd",
            "safetensors",
            "tempfile",
            "zip",
            "zune_core",
            "zune_jpeg",
            "zune_png",
        ],
        &["train"],
    ),
];

/// (k) Checks that only the modules of a feature use the crates of this feature.
fn check_crates_of_features(source: &Source) -> Vec<String> {
    let Some(own) = top_module(&source.path) else { return Vec::new() };
    let mut found = Vec::new();
    for (crates, modules) in CRATES_OF_FEATURES.iter().filter(|(_, modules)| !modules.contains(&own)) {
        for name in *crates {
            let path = format!("{name}::");
            let is_crate = |at: usize| {
                let before = source.shipped[..at].chars().next_back();
                before.is_none_or(|c| !c.is_alphanumeric() && !['_', ':'].contains(&c))
            };
            let uses = source.shipped.match_indices(&path).filter(|&(at, _)| is_crate(at));
            found.extend(uses.map(|(at, _)| {
                violation_at(source, at, &format!("only the modules {modules:?} may use `{name}`"))
            }));
        }
    }
    found
}

/// Returns the dependencies with which cargo builds the library, as `cargo tree` prints them.
fn dependencies(arguments: &[&str]) -> String {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none"])
        .args(arguments)
        .current_dir(repository_root())
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    String::from_utf8_lossy(&tree.stdout).into_owned()
}

#[test]
fn only_the_modules_of_a_feature_use_its_crates() {
    assert_no_violations(&all_sources(), check_crates_of_features);
    for (path, text, expected) in [
        ("src/group/mod.rs", "use csv::Reader;", 1),
        ("src/group/mod.rs", "fn f() { toml::from_str(\"\"); a.zip(b); }", 1),
        ("src/group/mod.rs", "#[cfg(test)]\nmod tests { use tempfile::tempdir; }", 0),
        ("src/train/data/mod.rs", "use csv::Reader; use clap::Parser;", 1),
        ("src/launch/job.rs", "use signal_hook::consts; use crate::glob::X;", 0),
    ] {
        assert_eq!(check_crates_of_features(&Source::new(path, text)).len(), expected, "{path}: {text}");
    }
}

#[test]
fn a_build_without_a_feature_does_not_need_its_dependencies() {
    let has = |tree: &str, name: &str| tree.lines().any(|line| line.starts_with(&format!("{name} v")));
    let base = dependencies(&["--package", "ringtrain", "--no-default-features"]);
    let python = dependencies(&["--package", "ringtrain-python"]);
    let all = dependencies(&["--package", "ringtrain"]);
    for name in ["clap", "toml", "signal-hook"] {
        assert!(has(&all, name) && !has(&python, name) && !has(&base, name), "{name}");
    }
    for name in ["csv", "indicatif", "zip", "safetensors"] {
        assert!(has(&all, name) && has(&python, name) && !has(&base, name), "{name}");
    }
}
