//! Records the commit, the features and the target of a build, which `--version` shows.

use std::env;
use std::path::Path;
use std::process::Command;

/// The files whose changes make a build differ from its commit.
const SOURCES: [&str; 4] = ["src", "Cargo.toml", "Cargo.lock", "build.rs"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=RINGTRAIN_COMMIT={}", describe_commit());
    println!("cargo:rustc-env=RINGTRAIN_FEATURES={}", list_features());
    println!("cargo:rustc-env=RINGTRAIN_TARGET={}", env::var("TARGET").unwrap_or_default());
}

/// Returns the commit of the sources, or why it is unknown.
fn describe_commit() -> String {
    if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        // Otherwise cargo would compile the whole library again after each commit.
        return "unknown (debug builds do not record it)".to_owned();
    }
    // Sources inside another repository, for example a folder of vendored crates, do not belong to its commits.
    let folder = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let is_own_repository = git(&["rev-parse", "--show-toplevel"])
        .is_some_and(|root| Path::new(&root).canonicalize().ok() == Path::new(&folder).canonicalize().ok());
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]).filter(|_| is_own_repository) else {
        return "unknown (built without git)".to_owned();
    };
    // `logs/HEAD` changes with each commit and each checkout.
    let git_file = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|path| Path::new(path).exists());
    for path in SOURCES.into_iter().chain(git_file.as_deref()) {
        println!("cargo:rerun-if-changed={path}");
    }
    let status = [&["status", "--porcelain", "--untracked-files=no", "--"][..], &SOURCES].concat();
    match git(&status) {
        Some(changes) if changes.is_empty() => commit,
        _ => format!("{commit}, with changes that are not committed"),
    }
}

/// Returns the output of a git command, or `None` if git is missing or fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the names of the enabled features.
fn list_features() -> String {
    let variables =
        env::vars().filter_map(|(name, _)| Some(name.strip_prefix("CARGO_FEATURE_")?.to_lowercase()));
    let mut features: Vec<String> = variables.filter(|name| name != "default").collect();
    features.sort();
    if features.is_empty() { "none".to_owned() } else { features.join(", ") }
}
