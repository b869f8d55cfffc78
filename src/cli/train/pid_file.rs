//! The file with the id of this process (`--pid-file`).

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// More bytes than a process id and a line feed.
const PID_FILE_BYTES_MAX: u64 = 32;

/// A file with the id of this process. The process holds a lock of the file, so another process can tell whether the file is
/// stale, even if its id now belongs to a third process. The file is removed when the value is dropped.
#[derive(Debug)]
pub(super) struct PidFile {
    path: PathBuf,
    file: File,
}

impl PidFile {
    /// Creates the file, or replaces a file that a dead process has left.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says why the file cannot be used: for example because a live process holds it.
    pub(super) fn create(path: &Path) -> Result<Self, String> {
        Self::try_create(path).map_err(|problem| format!("--pid-file {}: {problem}", path.display()))
    }

    fn try_create(path: &Path) -> Result<Self, String> {
        let mut file = loop {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32)
                .open(path)
                .map_err(|error| error.to_string())?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(format!("process {} is running and holds this file", read_text(file).trim()));
                }
                Err(TryLockError::Error(error)) => return Err(error.to_string()),
            }
            // Between `open` and `try_lock`, the process that held the lock may have removed the file.
            if fs::symlink_metadata(path).is_ok_and(|now| is_same_file(&file, &now)) {
                break file;
            }
        };
        let text = read_text(file.try_clone().map_err(|error| error.to_string())?);
        let is_pid = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) || !is_pid(text.trim()) {
            return Err("this file exists and holds no process id; pass another path".to_owned());
        }
        let write = |file: &mut File| -> io::Result<()> {
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(format!("{}\n", std::process::id()).as_bytes())
        };
        write(&mut file).map_err(|error| error.to_string())?;
        Ok(Self { path: path.to_owned(), file })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another process may have replaced the file after somebody removed it.
        if fs::symlink_metadata(&self.path).is_ok_and(|now| is_same_file(&self.file, &now)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn is_same_file(file: &File, now: &fs::Metadata) -> bool {
    file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (now.dev(), now.ino()))
}

/// Returns the beginning of a file as text.
fn read_text(file: File) -> String {
    let mut bytes = Vec::new();
    let _ = file.take(PID_FILE_BYTES_MAX).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_file_is_replaced_and_a_live_one_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        fs::write(&path, "4194304\n").unwrap();
        let held = PidFile::create(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        let error = PidFile::create(&path).unwrap_err();
        assert!(
            error.ends_with(&format!("process {} is running and holds this file", std::process::id())),
            "{error}"
        );
        drop(held);
        assert!(!path.exists());
        fs::write(&path, "root:x:0").unwrap();
        let error = PidFile::create(&path).unwrap_err();
        assert!(
            error.contains("holds no process id") && fs::read_to_string(&path).unwrap() == "root:x:0",
            "{error}"
        );
        assert!(PidFile::create(&directory.path().join("none/pid")).unwrap_err().contains("No such file"));
        assert!(PidFile::create(Path::new("/dev/null")).unwrap_err().contains("holds no process id"));
    }
}
