//! Finds the program that the ranks will execute. ringrun searches for the program before it starts any rank, so that
//! it reports a misspelt name only once.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::error::LaunchError;

/// The programs that are built into ringrun's executable. `ringrun -n 4 ringtrain` always runs the ringtrain of the
/// same version as ringrun.
const BUILT_IN_PROGRAMS: [&str; 3] = ["ringtrain", "ringbench", HOST_CHECK_NAME];

/// The program that `ringrun doctor` starts on each host.
pub const HOST_CHECK_NAME: &str = "ringrun-host-check";

/// The search path if `PATH` is not set, as in glibc's `execvp`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// The program that each rank executes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LaunchedProgram {
    /// A program that is built into ringrun's executable.
    BuiltIn(OsString),
    /// A program that is not built in. The field is the path of the program, or a name to look up on `PATH`.
    Named(OsString),
}

impl LaunchedProgram {
    /// Finds the program with this name and checks that the ranks can execute the program. `path` is the `PATH` of
    /// the ranks, and `directory` is the working directory of the ranks.
    pub(super) fn find(name: &OsStr, path: Option<&OsStr>, directory: &Path) -> Result<Self, LaunchError> {
        if BUILT_IN_PROGRAMS.iter().any(|built_in| name == *built_in) {
            return Ok(Self::BuiltIn(name.to_owned()));
        }
        let candidates = candidate_paths(name, path, directory);
        let mut refused = None;
        for candidate in &candidates {
            match check_executable(candidate) {
                Ok(()) => return Ok(Self::Named(name.to_owned())),
                Err(Some(why)) => refused = refused.or(Some((candidate, why))),
                Err(None) => {}
            }
        }
        match refused {
            Some((candidate, why)) => Err(LaunchError::NotExecutable { path: candidate.clone(), why }),
            None if name.as_bytes().contains(&b'/') => Err(LaunchError::CommandNotFound {
                name: name.to_owned(),
                searched_place: format!("in {}", directory.display()),
            }),
            None => Err(LaunchError::CommandNotFound {
                name: name.to_owned(),
                searched_place: if is_python_script(name) {
                    "on PATH; start a script as `python SCRIPT`"
                } else {
                    "on PATH"
                }
                .to_owned(),
            }),
        }
    }
}

/// Returns whether `name` is the name of a Python script. Users of torchrun start a script by its name, and torchrun
/// adds the interpreter. ringrun does not add an interpreter.
fn is_python_script(name: &OsStr) -> bool {
    name.as_bytes().ends_with(b".py")
}

/// Returns the paths at which to look for the program, in this order.
fn candidate_paths(name: &OsStr, path: Option<&OsStr>, directory: &Path) -> Vec<PathBuf> {
    if name.is_empty() {
        return Vec::new();
    }
    if name.as_bytes().contains(&b'/') {
        return vec![directory.join(name)];
    }
    // An empty entry of PATH means the current directory. For an empty entry, `join` returns `directory`.
    std::env::split_paths(path.unwrap_or(OsStr::new(DEFAULT_PATH)))
        .map(|entry| directory.join(entry).join(name))
        .collect()
}

/// Checks that the file can be executed. Returns `Err(None)` if there is no such file, and `Err(Some(reason))` if the
/// file cannot be executed.
fn check_executable(path: &Path) -> Result<(), Option<&'static str>> {
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => Err(Some("it is a directory")),
        Ok(metadata) if !metadata.is_file() => Err(Some("it is not a regular file")),
        Ok(_) if access(path, Access::EXEC_OK).is_err() => Err(Some("you may not execute it (chmod +x?)")),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Err(Some("permission denied")),
        Err(_) => Err(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_names_are_looked_up_on_path_and_paths_in_the_working_directory() {
        for (name, path, expected) in [
            ("sh", Some("/a:b::/c"), vec!["/a/sh", "/w/b/sh", "/w/sh", "/c/sh"]),
            ("sh", None, vec!["/bin/sh", "/usr/bin/sh"]),
            ("./sh", Some("/a"), vec!["/w/./sh"]),
            ("/x/sh", Some("/a"), vec!["/x/sh"]),
            ("", Some("/a"), vec![]),
        ] {
            let found = candidate_paths(OsStr::new(name), path.map(OsStr::new), Path::new("/w"));
            assert_eq!(found, expected.iter().map(PathBuf::from).collect::<Vec<_>>(), "{name} {path:?}");
        }
    }

    #[test]
    fn built_in_programs_need_no_path() {
        let found =
            LaunchedProgram::find(OsStr::new("ringtrain"), Some(OsStr::new("")), Path::new("/")).unwrap();
        assert_eq!(found, LaunchedProgram::BuiltIn("ringtrain".into()));
    }
}
