//! Which program the ranks run, looked up once before anything is started, so that a misspelt name is told once and not by
//! every rank.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::LaunchError;

/// The programs that ringrun's own executable carries, so that `ringrun -n 4 ringtrain` works where only ringrun was built or
/// copied, and never meets a trainer of another version.
const CARRIED: [&str; 2] = ["ringtrain", "ringbench"];

/// Where to look if there is no `PATH`, as glibc's `execvp` does.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// What each rank executes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Program {
    /// One of our own programs, carried in ringrun's executable.
    Carried(OsString),
    /// A program on `PATH`, or a path.
    Named(OsString),
}

impl Program {
    /// The program that `name` stands for, if it can be run. `path` is the ranks' `PATH`, `directory` where they run.
    pub(super) fn find(name: &OsStr, path: Option<&OsStr>, directory: &Path) -> Result<Self, LaunchError> {
        if CARRIED.iter().any(|carried| name == *carried) {
            return Ok(Self::Carried(name.to_owned()));
        }
        let candidates = candidates(name, path, directory);
        let mut refused = None;
        for candidate in &candidates {
            match check(candidate) {
                Ok(()) => return Ok(Self::Named(name.to_owned())),
                Err(Some(why)) => refused = refused.or(Some((candidate, why))),
                Err(None) => {}
            }
        }
        match refused {
            Some((candidate, why)) => Err(LaunchError::NotExecutable { path: candidate.clone(), why }),
            None if name.as_bytes().contains(&b'/') => Err(LaunchError::CommandNotFound {
                name: name.to_owned(),
                place: format!("in {}", directory.display()),
            }),
            None => Err(LaunchError::CommandNotFound {
                name: name.to_owned(),
                place: if is_python(name) { "on PATH; start a script as `python SCRIPT`" } else { "on PATH" }
                    .to_owned(),
            }),
        }
    }
}

/// Whether this is a Python script, which torchrun would start by its own interpreter.
fn is_python(name: &OsStr) -> bool {
    name.as_bytes().ends_with(b".py")
}

fn candidates(name: &OsStr, path: Option<&OsStr>, directory: &Path) -> Vec<PathBuf> {
    if name.is_empty() {
        return Vec::new();
    }
    if name.as_bytes().contains(&b'/') {
        return vec![directory.join(name)];
    }
    // An empty entry of PATH means the current directory; `join` makes it so.
    std::env::split_paths(path.unwrap_or(OsStr::new(DEFAULT_PATH)))
        .map(|entry| directory.join(entry).join(name))
        .collect()
}

/// Whether the file can be executed; the error says why not, `None` if there is no such file.
fn check(path: &Path) -> Result<(), Option<&'static str>> {
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
    fn where_a_name_is_looked_for() {
        for (name, path, expected) in [
            ("sh", Some("/a:b::/c"), vec!["/a/sh", "/w/b/sh", "/w/sh", "/c/sh"]),
            ("sh", None, vec!["/bin/sh", "/usr/bin/sh"]),
            ("./sh", Some("/a"), vec!["/w/./sh"]),
            ("/x/sh", Some("/a"), vec!["/x/sh"]),
            ("", Some("/a"), vec![]),
        ] {
            let found = candidates(OsStr::new(name), path.map(OsStr::new), Path::new("/w"));
            assert_eq!(found, expected.iter().map(PathBuf::from).collect::<Vec<_>>(), "{name} {path:?}");
        }
    }

    #[test]
    fn our_own_programs_need_no_path() {
        let found = Program::find(OsStr::new("ringtrain"), Some(OsStr::new("")), Path::new("/")).unwrap();
        assert_eq!(found, Program::Carried("ringtrain".into()));
    }
}
