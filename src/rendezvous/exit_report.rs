//! Tells `ringrun` why a rank fails: writes [`ExitRecord`]s into a pipe that the rank has inherited from `ringrun`. `ringrun`
//! reads the pipe after the rank has ended.

use std::os::fd::RawFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::process::{Pid, getpid};

use super::inherited_pipe::InheritedPipe;
use crate::wire::ExitRecord;

/// The environment variable that names the pipe: the number of the file descriptor, a colon, and the inode of the pipe.
pub(crate) const EXIT_PIPE_VARIABLE: &str = "RING_EXIT_FD";

/// The pipe of this process; `None` if this process has no pipe to `ringrun`.
static EXIT_PIPE: OnceLock<Option<RankExitPipe>> = OnceLock::new();

/// The write end of the pipe to `ringrun`.
struct RankExitPipe {
    pipe: InheritedPipe,
    /// The process that has taken over the pipe. A process that this process forks is not the rank.
    owner: Pid,
    /// The importance of the last record that this process has written.
    written: Mutex<Option<ReportImportance>>,
}

/// How much a record says about the end of a process. A process writes a record only if it is more important than the records
/// before. So a process writes at most one record of each importance, and `ringrun` uses the last record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum ReportImportance {
    /// An isolated group has failed. The program may go on without this group.
    IsolatedGroup,
    /// The job that `ringrun` started has failed.
    Job,
    /// The program of this rank ends, and knows which rank failed.
    Program,
}

/// Takes over the pipe that `variable`, the value of [`EXIT_PIPE_VARIABLE`], names. Only the first call in a process has an
/// effect.
pub(super) fn take_exit_pipe(variable: Option<&str>) {
    EXIT_PIPE.get_or_init(|| {
        let variable = variable?;
        let pipe = parse_exit_pipe(variable).and_then(|(number, inode)| InheritedPipe::take(number, inode));
        if pipe.is_none() {
            log::debug!("{EXIT_PIPE_VARIABLE}={variable} names no pipe of this process, so ringrun gets no exit record");
        }
        pipe.map(|pipe| RankExitPipe { pipe, owner: getpid(), written: Mutex::default() })
    });
}

/// Parses the value of [`EXIT_PIPE_VARIABLE`]. Returns the file descriptor and the inode.
fn parse_exit_pipe(text: &str) -> Option<(RawFd, u64)> {
    let (number, inode) = text.split_once(':')?;
    Some((number.parse().ok()?, inode.parse().ok()?))
}

/// Writes the record, unless this process has written a record that is as important. Does nothing in a process that
/// `ringrun` did not start. Never blocks: if the pipe is full, the record is lost.
pub(crate) fn report_to_launcher(importance: ReportImportance, record: &ExitRecord) {
    let Some(Some(exit_pipe)) = EXIT_PIPE.get() else { return };
    if exit_pipe.owner != getpid() {
        return;
    }
    let mut written = exit_pipe.written.lock().unwrap_or_else(PoisonError::into_inner);
    if *written >= Some(importance) {
        return;
    }
    *written = Some(importance);
    if let Err(error) = exit_pipe.pipe.write(&record.encode()) {
        log::debug!("the exit record could not be written: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_has_a_number_and_an_inode() {
        assert_eq!(parse_exit_pipe("100:4026"), Some((100, 4026)));
        for wrong in ["", "100", "100:", ":1", "100:x", "x:1", "100:-1", "99999999999:1", "1:2:3"] {
            assert_eq!(parse_exit_pipe(wrong), None, "{wrong}");
        }
    }
}
