//! Checks that a run does not write two outputs to the same file, or an output over an input.

use std::fs;
use std::path::{Path, PathBuf};

use super::checkpoint;
use super::class_weights::ClassWeights;
use super::config::Config;
use super::tensorboard::TensorBoard;

/// Checks that the outputs of a run (report, model file, checkpoint, files with curves) and its input files are all
/// different files.
///
/// # Errors
///
/// If two options name the same file. The error names both options and says what to do.
pub(super) fn check_output_paths(config: &Config) -> Result<(), String> {
    let mut files: Vec<(&str, PathBuf)> = Vec::new();
    let mut add = |option, path: &Path| files.push((option, path.to_owned()));
    for path in config.source.files() {
        add("--data", path);
    }
    for path in config.test_source.iter().flat_map(|source| source.files()) {
        add("--test-data", path);
    }
    if let ClassWeights::File(path) = &config.recipe.class_weights {
        add("--class-weights", path);
    }
    let input_count = files.len();
    let mut add = |option, path: &Path| files.push((option, path.to_owned()));
    if let Some(checkpoint) = &config.checkpoint {
        add("--checkpoint", &checkpoint.directory);
        for name in [checkpoint::LATEST_FILE_NAME, checkpoint::BEST_FILE_NAME, checkpoint::OPTIONS_FILE_NAME]
        {
            add("--checkpoint", &checkpoint.directory.join(name));
        }
    }
    config.report.iter().for_each(|path| add("--report", path));
    config.model_file.iter().for_each(|path| add("--save-model", path));
    config.curves.plot.iter().for_each(|path| add("--plot", path));
    config.curves.html.iter().for_each(|path| add("--html", path));
    // The checkpoint directory may also be the directory of `--tensorboard`, which only adds files with new names.
    let checkpoint = config.checkpoint.as_ref().map(|checkpoint| absolute_path(&checkpoint.directory));
    if let Some(TensorBoard { directory, .. }) = &config.curves.tensorboard
        && checkpoint != Some(absolute_path(directory))
    {
        add("--tensorboard", directory);
    }
    let resolved: Vec<PathBuf> = files.iter().map(|(_, path)| absolute_path(path)).collect();
    for (index, (option, path)) in files.iter().enumerate().skip(input_count) {
        if let Some(other) =
            (0..index).find(|&other| resolved[other] == resolved[index] && !is_pipe_or_device(path))
        {
            return Err(format!(
                "{option} would replace {}, which {} of this run uses; pass another path to {option}",
                path.display(),
                files[other].0
            ));
        }
    }
    Ok(())
}

/// Returns whether writing to `output` replaces `file`.
pub(crate) fn would_replace(output: &Path, file: &Path) -> bool {
    !is_pipe_or_device(output) && absolute_path(output) == absolute_path(file)
}

/// Returns whether `path` is a pipe or a device, such as `/dev/null`. Writing to a pipe or a device replaces no file.
fn is_pipe_or_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

/// Returns the absolute path without symbolic links. The last components of the path need not exist.
fn absolute_path(path: &Path) -> PathBuf {
    if let Ok(found) = fs::canonicalize(path) {
        return found;
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !parent.as_os_str().is_empty() => absolute_path(parent).join(name),
        (_, Some(name)) => absolute_path(Path::new(".")).join(name),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_one_file_resolve_to_the_same_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::create_dir(path("real")).unwrap();
        fs::write(path("real/file"), "").unwrap();
        std::os::unix::fs::symlink(path("real"), path("link")).unwrap();
        for (a, b, equal) in [
            ("real/file", "link/file", true),
            ("real/file", "link/./../real/file", true),
            ("real/new", "link/new", true),
            ("absent/a/new", "absent/a/./new", true),
            ("real/new", "new", false),
        ] {
            assert_eq!(absolute_path(&path(a)) == absolute_path(&path(b)), equal, "{a} {b}");
        }
        assert_eq!(absolute_path(Path::new("absent-file")), absolute_path(Path::new("./absent-file")));
    }
}
