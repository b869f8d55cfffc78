//! Replaces files atomically: a reader sees either the complete old content or the complete new content.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags};

/// Replaces the file at `path`: writes the temporary file `.NAME.ringtrain-tmp` in the same directory, syncs the
/// temporary file to the disk and renames it to `path`. The new file has the permissions of the old file.
///
/// If the process is killed, the temporary file remains, and the next call of this function or of [`check_disk_space`]
/// removes that file. If the temporary name already belongs to a link, a pipe or a file of another user, this
/// function changes nothing and returns an error. A lock prevents two processes from writing the temporary file at
/// the same time. If `path` is not a regular file (a pipe, a terminal, `/dev/null`), then this function writes
/// directly to `path`.
///
/// # Errors
///
/// Any error of the operating system. After an error, the old file is unchanged, and the temporary file is removed.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_file_with_sync(path, bytes, File::sync_all)
}

/// Like [`replace_file`], but calls `sync_directory` to write the renamed directory entry to the disk.
fn replace_file_with_sync(
    path: &Path,
    bytes: &[u8],
    sync_directory: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let target = resolve_symlink(path);
    if is_special_file(&target) {
        return OpenOptions::new().write(true).open(&target)?.write_all(bytes);
    }
    let temporary = TemporaryFile::create(&target)?;
    temporary.file().write_all(bytes)?;
    sync_and_rename(temporary, &target, sync_directory)
}

/// Syncs a temporary file to the disk and renames it to `target`.
fn sync_and_rename(
    temporary: TemporaryFile,
    target: &Path,
    sync_directory: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    // Open the directory before the rename, because opening can fail, and after the rename this function must not
    // return an error.
    let directory = File::open(&temporary.directory)?;
    temporary.file().sync_all()?;
    temporary.rename_to(target)?;
    if let Err(error) = sync_directory(&directory) {
        log::warn!("{} was written, but a power failure may undo the write: {error}", target.display());
    }
    Ok(())
}

/// The new content of a file, which the caller writes piece by piece. [`commit`](Self::commit) replaces the old file.
/// If the value is dropped before `commit`, the old file remains.
pub(crate) struct ReplacementFile {
    output: TemporaryOrSpecialFile,
    /// The path of the file that is replaced.
    target: PathBuf,
}

enum TemporaryOrSpecialFile {
    Temporary(TemporaryFile),
    /// A pipe or a device, which is written directly.
    Special(File),
}

impl ReplacementFile {
    /// Opens a temporary file for the new content of the file at `path`. If `path` is a pipe or a device, opens
    /// `path` itself.
    ///
    /// # Errors
    ///
    /// Any error of the operating system.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let target = resolve_symlink(path);
        let output = if is_special_file(&target) {
            TemporaryOrSpecialFile::Special(OpenOptions::new().write(true).open(&target)?)
        } else if target.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        } else {
            TemporaryOrSpecialFile::Temporary(TemporaryFile::create(&target)?)
        };
        Ok(Self { output, target })
    }

    /// Returns the open file, to which the caller writes the new content.
    pub(crate) fn file(&self) -> &File {
        match &self.output {
            TemporaryOrSpecialFile::Temporary(temporary) => temporary.file(),
            TemporaryOrSpecialFile::Special(file) => file,
        }
    }

    /// Replaces the old file by the new content.
    ///
    /// # Errors
    ///
    /// Any error of the operating system. After an error, the old file is unchanged.
    pub(crate) fn commit(self) -> io::Result<()> {
        match self.output {
            TemporaryOrSpecialFile::Temporary(temporary) => {
                sync_and_rename(temporary, &self.target, File::sync_all)
            }
            TemporaryOrSpecialFile::Special(_) => Ok(()),
        }
    }
}

/// Checks that a file of `len` bytes can be written to `path` while the old file still exists. For this check,
/// allocates a temporary file of `len` bytes and then removes the temporary file.
///
/// # Errors
///
/// Any error of the operating system, such as a full disk or a missing permission.
pub(crate) fn check_disk_space(path: &Path, len: u64) -> io::Result<()> {
    let target = resolve_symlink(path);
    if is_special_file(&target) {
        return OpenOptions::new().write(true).open(&target).map(drop);
    }
    if target.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let temporary = TemporaryFile::create(&target)?;
    match rustix::fs::fallocate(temporary.file(), FallocateFlags::empty(), 0, len) {
        // If the file system cannot allocate space in advance, write zeros to the file.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let block = vec![0; 1 << 20];
            let mut left = len;
            while left > 0 {
                let count = left.min(block.len() as u64);
                temporary.file().write_all(&block[..count as usize])?;
                left -= count;
            }
            temporary.file().sync_all()
        }
        result => Ok(result?),
    }
}

/// Returns the path to which a symbolic link points, or `path` itself if `path` is not a link. If a caller replaces the
/// file at the returned path, the link remains.
fn resolve_symlink(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns whether `path` is neither a regular file nor a directory, for example a pipe or a device.
fn is_special_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

/// A temporary file that this process has locked. If [`rename_to`](Self::rename_to) has not renamed the file, drop
/// deletes the file.
struct TemporaryFile {
    /// `None` after the file was renamed.
    file: Option<File>,
    path: PathBuf,
    /// The directory that contains the file.
    directory: PathBuf,
}

impl TemporaryFile {
    /// Creates the temporary file of `target`, with the permissions of `target` if `target` exists. If a killed process
    /// has left its temporary file, replaces that file. If another file has the same name, returns an error.
    fn create(target: &Path) -> io::Result<Self> {
        let directory = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let path = directory.join(temporary_file_name(target)?);
        loop {
            let Some(file) = open_temporary_file(&path, OpenOptions::new().create_new(true))? else {
                remove_stale_temporary_file(&path)?;
                continue;
            };
            lock_temporary_file(&file, &path)?;
            // Before this process acquired the lock, another process may have removed the file as a stale file.
            if is_still_at_path(&file, &path) {
                let temporary = Self { file: Some(file), path, directory };
                if let Ok(old) = fs::metadata(target) {
                    temporary.file().set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))?;
                }
                return Ok(temporary);
            }
        }
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("the file stays open until it is renamed")
    }

    fn rename_to(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.file = None;
        Ok(())
    }
}

/// Returns the name of the temporary file of `target`. The name contains the name of the program, so that it differs
/// from the names of users' files.
fn temporary_file_name(target: &Path) -> io::Result<OsString> {
    let mut name = OsString::from(".");
    name.push(target.file_name().ok_or(io::ErrorKind::InvalidFilename)?);
    name.push(".ringtrain-tmp");
    Ok(name)
}

/// Opens a temporary file for writing. Does not follow a symbolic link, and does not wait for the reader of a pipe.
/// Returns `None` if `options` requires a new file, but `path` already exists.
fn open_temporary_file(path: &Path, options: &mut OpenOptions) -> io::Result<Option<File>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match options.write(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        result => result.map(Some),
    }
}

/// Locks a temporary file. Returns an error if another process has locked the file.
fn lock_temporary_file(file: &File, path: &Path) -> io::Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            let problem = format!("another process is writing {}", path.display());
            Err(io::Error::new(io::ErrorKind::ResourceBusy, problem))
        }
        // If the file system has no locks, continue without a lock.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Returns whether the file at `path` is still the open file `file`.
fn is_still_at_path(file: &File, path: &Path) -> bool {
    let own = file.metadata().map(|own| (own.dev(), own.ino()));
    fs::symlink_metadata(path).is_ok_and(|found| own.is_ok_and(|own| own == (found.dev(), found.ino())))
}

/// Removes the temporary file of a killed process. Returns an error if another process still writes the file. Also
/// returns an error for a link, a pipe, or a file of another user, because this program did not create it.
fn remove_stale_temporary_file(path: &Path) -> io::Result<()> {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let found = match fs::symlink_metadata(path) {
        Err(error) if is_gone(&error) => return Ok(()),
        found => found?,
    };
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() || found.nlink() != 1 {
        let path = path.display();
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!(
                "{path} exists and is not a temporary file of this user; remove {path}, because ringtrain writes its temporary \
                 file to this path"
            ),
        ));
    }
    let file = match open_temporary_file(path, &mut OpenOptions::new()) {
        Err(error) if is_gone(&error) => return Ok(()),
        file => file?,
    };
    if let Some(file) = file {
        lock_temporary_file(&file, path)?;
        if is_still_at_path(&file, path) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            // Ignore an error here: the caller returns the earlier error that prevented the rename.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FileType, Mode};

    use super::*;

    const TEMPORARY_FILE_NAME: &str = ".file.ringtrain-tmp";

    /// Returns the sorted names of the files in a directory.
    fn file_names(directory: &Path) -> Vec<OsString> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn replace_file_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        replace_file(&path, b"one").unwrap();
        check_disk_space(&path, 100_000).unwrap();
        replace_file(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let blocked = directory.path().join("directory");
        fs::create_dir(&blocked).unwrap();
        assert!(replace_file(&blocked, b"three").is_err());
        assert!(check_disk_space(&blocked, 1).is_err());
        for operation in [replace_file, |path: &Path, _: &[u8]| check_disk_space(path, 1)] {
            assert!(operation(&directory.path().join("absent/file"), b"three").is_err());
        }
        assert_eq!(file_names(directory.path()), ["directory", "file"]);
        replace_file(Path::new("/dev/null"), b"gone").unwrap();
        check_disk_space(Path::new("/dev/null"), 1).unwrap();
    }

    /// Regression test: before the fix, the names of temporary files contained the process id, so each killed process
    /// left another file.
    #[test]
    fn the_temporary_file_of_a_killed_process_is_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(directory.path().join(TEMPORARY_FILE_NAME), "a long half-written content").unwrap();
        replace_file(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(file_names(directory.path()), ["file"]);
    }

    /// Regression test: before the fix, a save wrote through a link with the name of the temporary file, and truncated a
    /// user's own file with this name.
    #[test]
    fn other_files_with_the_name_of_a_temporary_file_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (path, temporary) = (directory.path().join("file"), directory.path().join(TEMPORARY_FILE_NAME));
        let own = directory.path().join("own");
        fs::write(&own, "own").unwrap();
        fs::write(directory.path().join("file.tmp"), "own").unwrap();
        let make: [&dyn Fn(); 4] = [
            &|| std::os::unix::fs::symlink(&own, &temporary).unwrap(),
            &|| fs::hard_link(&own, &temporary).unwrap(),
            &|| fs::create_dir(&temporary).unwrap(),
            &|| {
                rustix::fs::mknodat(rustix::fs::CWD, &temporary, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                    .unwrap();
            },
        ];
        for (index, make) in make.iter().enumerate() {
            make();
            for error in [replace_file(&path, b"new").unwrap_err(), check_disk_space(&path, 1).unwrap_err()] {
                assert!(error.to_string().contains("exists and is not a temporary file"), "{index}: {error}");
            }
            assert!(ReplacementFile::create(&path).is_err());
            let is_directory = temporary.is_dir();
            if is_directory { fs::remove_dir(&temporary) } else { fs::remove_file(&temporary) }.unwrap();
        }
        replace_file(&path, b"new").unwrap();
        for name in ["own", "file.tmp"] {
            assert_eq!(fs::read(directory.path().join(name)).unwrap(), b"own");
        }
    }

    /// Regression test: before the fix, a file that only its owner could read was readable for all users after a
    /// write.
    #[test]
    fn a_replaced_file_keeps_its_permissions() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        for mode in [0o600, 0o640, 0o444] {
            replace_file(&path, b"old").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            replace_file(&path, b"new").unwrap();
            let replacement = ReplacementFile::create(&path).unwrap();
            replacement.file().write_all(b"newer").unwrap();
            replacement.commit().unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
            assert_eq!(fs::read(&path).unwrap(), b"newer");
        }
    }

    /// Regression test: before the fix, an error after the rename was returned, so the caller believed that the old
    /// file was still there.
    #[test]
    fn a_failure_after_the_rename_is_not_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        replace_file(&path, b"old").unwrap();
        replace_file_with_sync(&path, b"new", |_| Err(io::Error::other("the disk failed"))).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn a_second_concurrent_writer_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let other = TemporaryFile::create(&path).unwrap();
        let error = replace_file(&path, b"mine").unwrap_err();
        assert!(error.to_string().contains("another process is writing"), "{error}");
        drop(other);
        replace_file(&path, b"mine").unwrap();
    }

    #[test]
    fn check_disk_space_fails_and_leaves_no_file_if_the_disk_is_too_small() {
        let directory = tempfile::tempdir().unwrap();
        assert!(check_disk_space(&directory.path().join("file"), 1 << 60).is_err());
        assert!(file_names(directory.path()).is_empty());
    }
}
