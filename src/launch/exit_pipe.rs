//! The pipe through which a rank tells ringrun why it fails. The [shim](super::shim) passes the write end to the rank's
//! command, and the library in the rank writes an [`ExitRecord`] into it.
//!
//! ringrun reads the pipe once, after the rank has ended, and never waits: a rank writes its record before it ends. So
//! ringrun does not depend on the processes that still hold the write end open.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::fstat;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd, ioctl_fionbio, read, retry_on_intr};

use crate::rendezvous::EXIT_PIPE_VARIABLE;
use crate::types::Rank;
use crate::wire::{EXIT_RECORD_BYTES_MAX, ExitRecord};

/// The lowest number of the file descriptor of the pipe in a rank. Shell scripts redirect lower numbers, for example with
/// `exec 3> FILE`, and would close the pipe.
const DESCRIPTOR_MIN: i32 = 100;

/// The most bytes that ringrun reads from a pipe. A process writes at most three records, but a rank's command may be a
/// script that runs several programs.
const PIPE_BYTES_MAX: usize = 16 * EXIT_RECORD_BYTES_MAX;

/// The read end of the pipe of one rank.
#[derive(Debug)]
pub(super) struct ExitPipe {
    read_end: OwnedFd,
}

impl ExitPipe {
    /// Makes a pipe. Returns ringrun's end and the end for the rank. Reads and writes on the pipe do not block.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let (read_end, write_end) = io::pipe()?;
        let (read_end, write_end) = (OwnedFd::from(read_end), OwnedFd::from(write_end));
        ioctl_fionbio(&read_end, true)?;
        ioctl_fionbio(&write_end, true)?;
        Ok((Self { read_end }, write_end))
    }

    /// Returns the last record that the rank has written. If the pipe contains anything else, returns `None`. Call this
    /// function once, after the rank has ended.
    pub(super) fn read_record(&self, rank: Rank) -> Option<ExitRecord> {
        let mut bytes = vec![0; PIPE_BYTES_MAX];
        let mut count = 0;
        while let Ok(added @ 1..) = retry_on_intr(|| read(&self.read_end, &mut bytes[count..])) {
            count += added;
        }
        let record = ExitRecord::decode_last(&bytes[..count]);
        if record.is_none() && count > 0 {
            log::debug!("rank {rank} wrote {count} bytes that are not an exit record; ringrun ignores them");
        }
        record
    }
}

/// Makes the commands that this process executes inherit `write_end`. Returns the file descriptor that they inherit, and
/// the entry of their environment that names it.
pub(super) fn make_inheritable(write_end: OwnedFd) -> io::Result<(OwnedFd, (&'static str, String))> {
    let inode = fstat(&write_end)?.st_ino;
    // With a low limit on open files, there may be no high number.
    let inherited = fcntl_dupfd_cloexec(&write_end, DESCRIPTOR_MIN).unwrap_or(write_end);
    fcntl_setfd(&inherited, FdFlags::empty())?;
    let value = format!("{}:{inode}", inherited.as_raw_fd());
    Ok((inherited, (EXIT_PIPE_VARIABLE, value)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;
    use crate::wire::CauseKind;

    fn make_record(rank: u32) -> ExitRecord {
        let (host, operation) = ("h".to_owned(), String::new());
        ExitRecord { kind: CauseKind::PeerLost, ranks: vec![Rank::new(rank)], host, operation }
    }

    #[test]
    fn the_last_record_is_read_although_another_process_holds_the_pipe_open() {
        let (first, last) = (make_record(1), make_record(2));
        let two_records = [first.encode(), last.encode()].concat();
        for (case, written, expected) in [
            ("no record", &b""[..], None),
            ("one record", &first.encode()[..], Some(&first)),
            ("two records", &two_records[..], Some(&last)),
            ("other bytes", &b"rank 3 on x was lost: reset\n"[..], None),
            ("half a record", &first.encode()[..10], None),
            ("more bytes than ringrun reads", &first.encode().repeat(1000)[..], None),
        ] {
            let (exit_pipe, write_end) = ExitPipe::new().unwrap();
            let mut writer = File::from(write_end);
            writer.write_all(written).unwrap();
            assert_eq!(exit_pipe.read_record(Rank::ZERO).as_ref(), expected, "{case}");
            drop(writer);
        }
    }

    #[test]
    fn a_full_pipe_does_not_block_the_rank() {
        let (exit_pipe, write_end) = ExitPipe::new().unwrap();
        let mut writer = File::from(write_end);
        let error = std::iter::repeat_with(|| writer.write_all(&[0; 4096])).find_map(Result::err);
        assert_eq!(error.unwrap().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(exit_pipe.read_record(Rank::ZERO), None);
    }
}
