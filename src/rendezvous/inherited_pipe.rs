//! A pipe that this process has inherited from its launcher.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::{FdFlags, fcntl_setfd};

/// The highest number of the standard streams, which belong to the standard library.
const STANDARD_ERROR: RawFd = 2;

/// Whether this process has taken over its pipe.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The write end of a pipe that the launcher has made for this process.
pub(super) struct InheritedPipe {
    write_end: OwnedFd,
    inode: u64,
}

impl InheritedPipe {
    /// Takes over the write end of the pipe `inode`, which this process has inherited under the file descriptor `number`.
    /// From now on, programs that this process executes do not inherit the pipe.
    ///
    /// Returns `None` if `number` is not the write end of this pipe: another process between the launcher and this
    /// process may have closed the pipe, and may have opened another file under this number. Also returns `None` if this
    /// process has already taken over a pipe.
    pub(super) fn take(number: RawFd, inode: u64) -> Option<Self> {
        if number <= STANDARD_ERROR {
            return None;
        }
        // SAFETY: `number` is not -1. `is_write_end` changes nothing, and returns false if no open file has this number.
        let is_valid = is_write_end(unsafe { BorrowedFd::borrow_raw(number) }, inode);
        if !is_valid || IS_TAKEN.swap(true, Ordering::AcqRel) {
            return None;
        }
        // SAFETY: The file is the write end of the pipe that the launcher has made for this process alone. No other code
        // of this process owns it, because this process has inherited it, and because this line runs at most once.
        let write_end = unsafe { OwnedFd::from_raw_fd(number) };
        fcntl_setfd(&write_end, FdFlags::CLOEXEC).ok()?;
        Some(Self { write_end, inode })
    }

    /// Writes at most 4096 bytes, in one piece.
    ///
    /// # Errors
    ///
    /// If the pipe is full or has no reader. Also if the program has closed all its files: another file may then have the
    /// number of the pipe.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        if !is_write_end(self.write_end.as_fd(), self.inode) {
            return Err(io::ErrorKind::NotFound.into());
        }
        rustix::io::write(&self.write_end, bytes)?;
        Ok(())
    }
}

/// Returns whether `file` is the write end of the pipe `inode`.
fn is_write_end(file: BorrowedFd<'_>, inode: u64) -> bool {
    let is_pipe = fstat(file).is_ok_and(|status| {
        FileType::from_raw_mode(status.st_mode) == FileType::Fifo && status.st_ino == inode
    });
    is_pipe && fcntl_getfl(file).is_ok_and(|flags| (flags & OFlags::ACCMODE) == OFlags::WRONLY)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, pipe};
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};

    use rustix::io::{dup2, fcntl_getfd};

    use super::*;

    #[test]
    fn only_the_write_end_of_the_given_pipe_is_taken_and_only_once() {
        let (mut reader, writer) = pipe().unwrap();
        let (_other_reader, other_writer) = pipe().unwrap();
        let inode = fstat(&writer).unwrap().st_ino;
        let number = writer.into_raw_fd();
        // SAFETY: The file is open and stays open until the end of the test.
        let inherited = unsafe { BorrowedFd::borrow_raw(number) };
        fcntl_setfd(inherited, FdFlags::empty()).unwrap();
        for (case, number, inode) in [
            ("the read end", reader.as_raw_fd(), inode),
            ("another pipe", other_writer.as_raw_fd(), inode),
            ("another inode", number, inode + 1),
            ("no open file", 1_000_000, inode),
            ("a standard stream", 1, fstat(std::io::stdout()).unwrap().st_ino),
            ("no file descriptor", -1, inode),
        ] {
            assert!(InheritedPipe::take(number, inode).is_none(), "{case}");
        }
        assert_eq!(fcntl_getfd(inherited).unwrap(), FdFlags::empty());
        let mut pipe = InheritedPipe::take(number, inode).unwrap();
        assert_eq!(fcntl_getfd(&pipe.write_end).unwrap(), FdFlags::CLOEXEC);
        assert!(InheritedPipe::take(number, inode).is_none());
        pipe.write(b"record").unwrap();
        // The program closes the pipe and opens another file, which gets the same number.
        let other = tempfile::tempfile().unwrap();
        dup2(&other, &mut pipe.write_end).unwrap();
        assert!(pipe.write(b"record").is_err());
        assert_eq!(File::metadata(&other).unwrap().len(), 0);
        let mut written = String::new();
        reader.read_to_string(&mut written).unwrap();
        assert_eq!(written, "record");
    }
}
