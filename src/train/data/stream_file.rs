//! A temporary file for values that are not held in memory.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Advice, fadvise};

use super::DataError;

/// A file without a name. The operating system deletes the content when the process drops the file or ends.
#[derive(Debug)]
pub(crate) struct StreamFile {
    file: File,
    /// The directory that holds the file, for messages.
    directory: PathBuf,
    /// The number of bytes in the file.
    len: AtomicU64,
}

impl StreamFile {
    /// Creates an empty file in `directory`.
    pub(crate) fn create(directory: &Path) -> Result<Self, DataError> {
        let file = tempfile::tempfile_in(directory).map_err(|source| Self::write_error(directory, source))?;
        Ok(Self { file, directory: directory.to_owned(), len: AtomicU64::new(0) })
    }

    fn write_error(directory: &Path, source: std::io::Error) -> DataError {
        DataError::Unwritable { directory: directory.to_owned(), source }
    }

    /// Returns the number of bytes in the file.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Writes `bytes` at the end of the file. Returns the position of the first byte.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<u64, DataError> {
        let start = self.len.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.file
            .write_all_at(bytes, start)
            .map(|()| start)
            .map_err(|source| Self::write_error(&self.directory, source))
    }

    /// Fills `bytes` with the content of the file from position `start` on.
    pub(crate) fn read_at(&self, bytes: &mut [u8], start: u64) -> Result<(), DataError> {
        self.file
            .read_exact_at(bytes, start)
            .map_err(|source| DataError::unreadable(&self.directory.join("(temporary file)"), source))
    }

    /// Tells the operating system that the process will soon read `len` bytes from position `start` on. The operating system
    /// then starts to read these bytes in large blocks.
    pub(crate) fn prefetch(&self, start: u64, len: u64) {
        // A file system that ignores the advice makes later reads slower, but not wrong.
        let _ = NonZeroU64::new(len).map(|len| fadvise(&self.file, start, Some(len), Advice::WillNeed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_from_where_they_were_written_and_leave_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = StreamFile::create(directory.path()).unwrap();
        assert_eq!((file.append(b"abc").unwrap(), file.append(b"defg").unwrap()), (0, 3));
        file.prefetch(0, 7);
        let mut bytes = [0; 4];
        file.read_at(&mut bytes, 2).unwrap();
        assert_eq!(&bytes, b"cdef");
        assert!(file.read_at(&mut bytes, 4).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let error = StreamFile::create(&directory.path().join("absent")).unwrap_err().to_string();
        assert!(error.contains("absent") && error.contains("--stream"), "{error}");
    }
}
