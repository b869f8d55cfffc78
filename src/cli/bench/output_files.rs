//! The files that `ringbench` writes at the end: the report and the plot.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use super::plan::{BenchPlan, BenchPlanError};
use super::plot::draw_rows;
use super::report::BenchReport;
use crate::train::atomic_file;

/// The size in bytes of the temporary file that tests whether a file can be written: more than most reports need.
const WRITE_TEST_BYTES: usize = 64 << 10;

/// Returns the options that name files, with the paths.
fn paths(plan: &BenchPlan) -> impl Iterator<Item = (&'static str, &Path)> {
    let options = [("--json", &plan.json), ("--plot", &plan.plot)];
    options.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?)))
}

/// Before the measurement, checks as far as possible that the files can be written. Does not change existing regular
/// files.
///
/// # Errors
///
/// [`BenchPlanError::NoDirectory`] and [`BenchPlanError::FileNotWritable`].
pub(super) fn check_files(plan: &BenchPlan) -> Result<(), BenchPlanError> {
    for (option, path) in paths(plan) {
        if !parent_directory_exists(path) {
            return Err(BenchPlanError::NoDirectory { option, path: path.to_owned() });
        }
        check_writable(path).map_err(|error| BenchPlanError::FileNotWritable {
            option,
            path: path.to_owned(),
            problem: error.to_string(),
        })?;
    }
    Ok(())
}

/// Writes the files. Returns the path of a file that could not be written, and the error of the file system.
pub(super) fn save_files(plan: &BenchPlan, report: &BenchReport) -> Result<(), (PathBuf, io::Error)> {
    if let Some(path) = &plan.json {
        report.save(path).map_err(|error| (path.clone(), error))?;
    }
    if let Some(path) = &plan.plot {
        let picture = draw_rows(report);
        atomic_file::replace_file(path, picture.as_bytes()).map_err(|error| (path.clone(), error))?;
    }
    Ok(())
}

/// Before the measurement, checks as far as possible that a file can be written to `path`. Does not change an
/// existing regular file.
fn check_writable(path: &Path) -> io::Result<()> {
    // `save` follows symbolic links, so this check follows symbolic links too.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    match fs::metadata(&target).map(|metadata| metadata.file_type()) {
        Ok(file_type) if file_type.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // Write a newline to test the device. JSON and SVG allow white space at the beginning.
        Ok(file_type) if file_type.is_char_device() => {
            fs::OpenOptions::new().write(true).open(&target)?.write_all(b"\n")
        }
        // A named pipe is not opened, because opening it would wait for a reader.
        Ok(file_type) if !file_type.is_file() => Ok(()),
        // `save` writes a new file in the directory of the file. Write a temporary file there, to find out whether
        // the directory is writable and has space.
        _ => {
            let mut name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
            name.push(format!(".{}.trial", std::process::id()));
            let test_file = target.with_file_name(name);
            let write_result = fs::write(&test_file, vec![b' '; WRITE_TEST_BYTES]);
            // Ignore an error of the removal: if the write failed, there may be no file to remove.
            let _ = fs::remove_file(&test_file);
            write_result
        }
    }
}

fn parent_directory_exists(path: &Path) -> bool {
    match path.parent() {
        Some(directory) if directory.as_os_str().is_empty() => true,
        Some(directory) => directory.is_dir(),
        None => false,
    }
}
