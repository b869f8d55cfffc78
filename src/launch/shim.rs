//! The shim: what runs in a rank's process before the rank's own command does.
//!
//! It asks the kernel to kill it when ringrun dies, waits until ringrun has made the rank known to the watchdog, and then turns
//! into the command by `exec`, which keeps that request. What cannot be executed is reported to ringrun with its `errno`, apart
//! from the command's own exit code: a command may well exit with 127 itself.
//!
//! Its standard input is a socket to ringrun: one byte in means go; four bytes out are the `errno`; its end means that the
//! command runs.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::command::Program;
use super::topology::{self, Processor};
use crate::exit::Exit;

/// By this name (`argv[0]`) ringrun's executable acts as the shim.
pub const SHIM: &str = "ring-rank";

/// The byte that means go.
const GO: u8 = b'g';

/// The command that starts a rank by way of the shim, bound to these processors, if there are any.
pub(super) fn command(program: &Program, arguments: &[OsString], processors: &[Processor]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(SHIM).arg(getpid().to_string()).arg(topology::list(processors));
    match program {
        Program::Carried(name) => command.arg("carried").arg(name),
        Program::Named(name) => command.arg("named").arg(name),
    };
    command.args(arguments);
    command
}

/// ringrun's end of the socket.
#[derive(Debug)]
pub(super) struct ShimSocket {
    stream: UnixStream,
}

impl ShimSocket {
    /// Both ends: ours, and the rank's standard input.
    pub(super) fn pair() -> io::Result<(Self, Stdio)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((Self { stream: ours }, Stdio::from(std::os::fd::OwnedFd::from(theirs))))
    }

    /// Lets the rank go. One that has died meanwhile is found dead by the ordinary way.
    pub(super) fn go(&self) {
        let _ = (&self.stream).write_all(&[GO]);
    }

    /// Of a rank that has ended: the `errno` for which its command could not be executed.
    pub(super) fn exec_error(&self) -> Option<i32> {
        let mut errno = [0; 4];
        (&self.stream).read_exact(&mut errno).ok().map(|()| i32::from_le_bytes(errno))
    }
}

/// The shim's program: `ring-rank PARENT PROCESSORS carried|named NAME ARGUMENTS`. Returns only if the command could not be
/// executed.
pub(super) fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let parent = arguments.next().and_then(|parent| parent.to_str()?.parse().ok());
    let processors = arguments.next();
    let kind = arguments.next();
    let (Some(parent), Some(processors), Some(kind), Some(name)) =
        (parent, processors, kind, arguments.next())
    else {
        return Exit::Usage.into();
    };
    // First the request, then the look: a parent that dies in between is seen by one or the other.
    let asked = set_parent_process_death_signal(Some(Signal::KILL));
    if asked.is_err() || getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(parent) {
        return Exit::Start.into();
    }
    let Ok(mut line) = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from) else {
        return Exit::Start.into();
    };
    if line.read_exact(&mut [0]).is_err() {
        return Exit::Start.into();
    }
    bind(&processors);
    let mut command = if kind == "carried" {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(name);
        command
    } else {
        Command::new(name)
    };
    let error = command.args(arguments).stdin(Stdio::null()).exec();
    let errno = error.raw_os_error().unwrap_or_else(|| rustix::io::Errno::INVAL.raw_os_error());
    let _ = line.write_all(&errno.to_le_bytes());
    Exit::CommandNotRun.into()
}

/// Binds this process to the processors, and with it every thread that the command will start. A sandbox may refuse: the
/// rank then runs unbound.
fn bind(processors: &OsStr) {
    let Some(processors) = processors.to_str().and_then(topology::parse_list) else { return };
    let mut set = CpuSet::new();
    for processor in processors {
        set.set(processor);
    }
    let _ = sched_setaffinity(None, &set);
}
