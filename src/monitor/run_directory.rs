//! The directory in which ranks of this host say where they serve their status, so that `ringrun top` finds them. It has one file
//! for each rank. Only the user can read and write the directory.

use std::fs::{self, DirBuilder};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The maximum number of files that a search reads, and the maximum length of a file in bytes.
const ENTRIES_MAX: usize = 4096;
const ENTRY_BYTES_MAX: u64 = 4096;

/// What the file of a rank says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct RunEntry {
    pub(crate) pid: u32,
    /// When the process started, in clock ticks since the host started. Later processes with the same pid have another time.
    pub(crate) process_started: u64,
    pub(crate) job: String,
    pub(crate) rank: u32,
    /// The address at which the rank serves its status.
    pub(crate) address: SocketAddr,
}

/// The directory of the current user.
pub(crate) struct RunDirectory {
    path: PathBuf,
}

/// A rank's file. Dropping this value removes the file.
pub(crate) struct RunRegistration {
    path: PathBuf,
}

impl RunDirectory {
    /// Returns the directory below `runtime_directory`, the value of `XDG_RUNTIME_DIR`. If there is none, returns a directory
    /// below `/tmp`.
    pub(crate) fn new(runtime_directory: Option<PathBuf>) -> Self {
        let path = match runtime_directory.filter(|path| path.is_absolute()) {
            Some(directory) => directory.join("ringtrain"),
            None => format!("/tmp/ringtrain-{}", rustix::process::getuid().as_raw()).into(),
        };
        Self { path }
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file of this process, and creates the directory if it does not exist.
    ///
    /// # Errors
    ///
    /// Also if other users could write to the directory.
    pub(crate) fn register(&self, job: &str, rank: u32, address: SocketAddr) -> io::Result<RunRegistration> {
        match DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => self.check_owner()?,
        }
        let pid = std::process::id();
        let process_started =
            start_of_process(pid).ok_or_else(|| io::Error::other("/proc is not mounted"))?;
        let entry = RunEntry { pid, process_started, job: job.to_owned(), rank, address };
        let path = self.path.join(format!("{pid}.json"));
        let part = self.path.join(format!("{pid}.part"));
        fs::write(&part, serde_json::to_vec(&entry)?)?;
        fs::rename(&part, &path)?;
        Ok(RunRegistration { path })
    }

    /// Returns the entries of the processes that run, sorted by job and rank. Removes the files of processes that have ended.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read, or if other users could write to it. If there is no directory, no rank runs.
    pub(crate) fn find_runs(&self) -> io::Result<Vec<RunEntry>> {
        let files = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            files => files?,
        };
        self.check_owner()?;
        let mut found = Vec::new();
        for file in files.flatten().take(ENTRIES_MAX) {
            let path = file.path();
            let pid = path.file_stem().and_then(|name| name.to_str()?.parse().ok());
            let Some(started) = pid.map(start_of_process) else { continue };
            match read_entry(&path) {
                Some(entry) if Some(entry.process_started) == started => found.push(entry),
                // The process is still writing the file.
                None if started.is_some() => {}
                _ => drop(fs::remove_file(&path)),
            }
        }
        found.sort_by(|a, b| (&a.job, a.rank, a.pid).cmp(&(&b.job, b.rank, b.pid)));
        Ok(found)
    }

    /// Checks that only the current user can write to the directory.
    fn check_owner(&self) -> io::Result<()> {
        let metadata = fs::symlink_metadata(&self.path)?;
        // The lowest six bits of the mode are the rights of the group and of others.
        let is_safe = metadata.is_dir()
            && metadata.uid() == rustix::process::geteuid().as_raw()
            && metadata.mode().trailing_zeros() >= 6;
        if is_safe {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it must be a directory of this user with mode 0700; remove it or correct its mode",
        ))
    }
}

impl Drop for RunRegistration {
    fn drop(&mut self) {
        // A file that remains is removed by the next search.
        let _ = fs::remove_file(&self.path);
    }
}

fn read_entry(path: &Path) -> Option<RunEntry> {
    let is_entry = path.extension().is_some_and(|extension| extension == "json")
        && fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.len() <= ENTRY_BYTES_MAX);
    if !is_entry {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Returns when a process started, in clock ticks since the host started. Returns `None` if there is no such process.
fn start_of_process(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may contain spaces and parentheses. The time is field 22 of proc(5), and field 3 follows the name.
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn files_of_ended_processes_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let directory = RunDirectory::new(Some(parent.path().to_owned()));
        assert_eq!(directory.find_runs().unwrap(), []);
        let address: SocketAddr = "127.0.0.1:9400".parse().unwrap();
        let registration = directory.register("job", 3, address).unwrap();
        let own = directory.find_runs().unwrap();
        assert_eq!((own.len(), own[0].rank, own[0].address), (1, 3, address));
        // Process 1 started at another time, and no process has the highest number.
        for (name, entry) in [("1", RunEntry { pid: 1, ..own[0].clone() }), ("4294967295", own[0].clone())] {
            let path = directory.path().join(format!("{name}.json"));
            fs::write(&path, serde_json::to_vec(&entry).unwrap()).unwrap();
            assert_eq!(directory.find_runs().unwrap(), own);
            assert!(!path.exists(), "{name}");
        }
        fs::write(directory.path().join("notes.txt"), "x").unwrap();
        fs::write(directory.path().join("4294967294.json"), "{").unwrap();
        drop(registration);
        assert_eq!(directory.find_runs().unwrap(), []);
        let left: Vec<_> =
            fs::read_dir(directory.path()).unwrap().flatten().map(|file| file.file_name()).collect();
        assert_eq!(left, ["notes.txt"]);
    }

    #[test]
    fn a_directory_that_others_can_write_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let directory = RunDirectory::new(Some(parent.path().to_owned()));
        fs::create_dir(directory.path()).unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let refused =
            |result: io::Result<()>| result.is_err_and(|error| error.to_string().contains("mode 0700"));
        assert!(refused(directory.find_runs().map(drop)));
        assert!(refused(directory.register("job", 0, "127.0.0.1:1".parse().unwrap()).map(drop)));
    }
}
