//! Takes over a pipe that this process has inherited from its launcher.

use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::{FdFlags, fcntl_setfd};

/// The highest number of the standard streams, which belong to the standard library.
const STANDARD_ERROR: RawFd = 2;

/// Whether this process has taken over its pipe.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes over the write end of the pipe `inode`, which this process has inherited under the file descriptor `number`. From
/// now on, programs that this process executes do not inherit the pipe.
///
/// Returns `None` if `number` is not the write end of this pipe: another process between the launcher and this process
/// may have closed the pipe, and may have opened another file under this number. Also returns `None` if this process
/// has already taken over a pipe.
pub(crate) fn take_inherited_pipe(number: RawFd, inode: u64) -> Option<OwnedFd> {
    if number <= STANDARD_ERROR {
        return None;
    }
    // SAFETY: `number` is not -1. `fstat` and `fcntl_getfl` change nothing. If no open file has this number, they return
    // an error.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let status = fstat(borrowed).ok()?;
    let is_pipe = FileType::from_raw_mode(status.st_mode) == FileType::Fifo && status.st_ino == inode;
    let is_writable = (fcntl_getfl(borrowed).ok()? & OFlags::ACCMODE) == OFlags::WRONLY;
    if !is_pipe || !is_writable || IS_TAKEN.swap(true, Ordering::AcqRel) {
        return None;
    }
    // SAFETY: The file is the write end of the pipe that the launcher has made for this process alone. No other code of
    // this process owns it, because this process has inherited it, and because this line runs at most once.
    let pipe = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&pipe, FdFlags::CLOEXEC).ok()?;
    Some(pipe)
}

#[cfg(test)]
mod tests {
    use std::io::pipe;
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};

    use rustix::io::fcntl_getfd;

    use super::*;

    #[test]
    fn only_the_write_end_of_the_given_pipe_is_taken_and_only_once() {
        let (reader, writer) = pipe().unwrap();
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
            assert!(take_inherited_pipe(number, inode).is_none(), "{case}");
        }
        assert_eq!(fcntl_getfd(inherited).unwrap(), FdFlags::empty());
        let pipe = take_inherited_pipe(number, inode).unwrap();
        assert_eq!(fcntl_getfd(&pipe).unwrap(), FdFlags::CLOEXEC);
        assert!(take_inherited_pipe(number, inode).is_none());
    }
}
