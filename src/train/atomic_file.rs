//! Files that are there whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Replaces the file at `path`: writes a temporary file beside it, syncs it, renames it, syncs the directory. On an error
/// the old file is untouched and the temporary one is gone.
///
/// What is no regular file (a pipe, a terminal, `/dev/null`) is written to as it is.
///
/// # Errors
///
/// Whatever the operating system refuses.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // Through a symbolic link to the file itself, so that the link stays.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if fs::metadata(&target).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        return fs::OpenOptions::new().write(true).open(&target)?.write_all(bytes);
    }
    let directory = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = directory.join(name);
    let replaced = write_and_sync(&temporary, bytes).and_then(|()| fs::rename(&temporary, &target));
    if let Err(error) = replaced {
        // The first error is the one to report; the file may not even exist.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    File::open(directory)?.sync_all()
}

fn write_and_sync(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_whole_and_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let blocked = directory.path().join("directory");
        fs::create_dir(&blocked).unwrap();
        assert!(write(&blocked, b"three").is_err());
        assert!(write(&directory.path().join("absent/file"), b"three").is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file stays");
        write(Path::new("/dev/null"), b"gone").unwrap();
    }
}
