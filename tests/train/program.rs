//! Runs the program `ringtrain` in a directory.

use std::path::Path;
use std::process::{Command, Output};

/// Runs `ringtrain` with the arguments in `line`, which spaces separate, in `directory`.
pub(crate) fn run_ringtrain_in(directory: &Path, line: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_ringtrain");
    Command::new(program).args(line.split_whitespace()).current_dir(directory).output().unwrap()
}

/// Runs `ringtrain`, which must succeed, and returns its standard output.
pub(crate) fn ringtrain_stdout(directory: &Path, line: &str) -> String {
    let output = run_ringtrain_in(directory, line);
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `ringtrain`, which must exit with `code` and write `expected` to standard error, without a panic.
pub(crate) fn assert_fails(directory: &Path, line: &str, code: i32, expected: &str) {
    let output = run_ringtrain_in(directory, line);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}: {stderr}");
    assert!(stderr.contains(expected) && !stderr.contains("panicked"), "{line}: {stderr}");
}
