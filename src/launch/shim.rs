//! The shim: the program that runs first in a rank's process and then executes the rank's command.
//!
//! The shim asks the kernel to kill the rank's process when ringrun dies. The shim then waits until ringrun has told
//! the [watchdog](super::watchdog) about the rank. Then `exec` replaces the shim by the command. Even after the
//! `exec`, the kernel kills the rank's process when ringrun dies. If `exec` fails, the shim sends the `errno` to
//! ringrun. An exit code could not report the failure of `exec`, because the command itself may exit with 127.
//!
//! The standard input of the shim is a socket to ringrun. ringrun sends one byte, and the shim then executes the
//! command. Together with this byte, ringrun sends the write end of the rank's [exit pipe](super::exit_pipe), and the file
//! that becomes the standard input of the command. Without such a file, the standard input of the command is `/dev/null`.
//! If `exec` fails, the shim sends the 4 bytes of the `errno`. If `exec` succeeds, the socket is closed.

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::iter;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};

use rustix::cmsg_space;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::command::LaunchedProgram;
use super::exit_pipe::make_inheritable;
use super::topology::{self, Processor};
use crate::exit::Exit;
use crate::rendezvous::EXIT_PIPE_VARIABLE;

/// The name (`argv[0]`) under which ringrun's executable runs as the shim.
pub const SHIM_NAME: &str = "ring-rank";

/// The byte with which ringrun tells the shim to execute the command.
const EXEC_PERMISSION_BYTE: u8 = b'g';

/// The most files that ringrun passes to a shim: the exit pipe and the standard input.
const PASSED_FILES_MAX: usize = 2;

/// The argument of the shim which says that the next argument names a program built into ringrun's executable.
const BUILT_IN_PROGRAM_ARGUMENT: &str = "built-in";
/// The argument of the shim which says that the next argument is the path of a program, or its name on `PATH`.
const NAMED_PROGRAM_ARGUMENT: &str = "named";

/// Returns the command that starts a rank through the shim. The rank is bound to `processors`. If `processors` is
/// empty, the rank is not bound.
pub(super) fn shim_command(
    program: &LaunchedProgram,
    arguments: &[OsString],
    processors: &[Processor],
) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(SHIM_NAME).arg(getpid().to_string()).arg(topology::format_processor_list(processors));
    match program {
        LaunchedProgram::BuiltIn(name) => command.arg(BUILT_IN_PROGRAM_ARGUMENT).arg(name),
        LaunchedProgram::Named(name) => command.arg(NAMED_PROGRAM_ARGUMENT).arg(name),
    };
    command.args(arguments);
    command
}

/// ringrun's end of the socket to a shim.
#[derive(Debug)]
pub(super) struct ShimSocket {
    stream: UnixStream,
}

impl ShimSocket {
    /// Makes a socket pair: ringrun's end, and the end that becomes the standard input of the shim.
    pub(super) fn new_pair() -> io::Result<(Self, Stdio)> {
        let (stream, shim_end) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        Ok((Self { stream }, Stdio::from(OwnedFd::from(shim_end))))
    }

    /// Tells the shim to execute the command with the standard input `stdin`. If `stdin` is `None`, the standard input of
    /// the command is `/dev/null`. The command inherits `exit_pipe`.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to pass the files. It is not an error if the shim has died, because the kernel notifies ringrun
    /// when the process of the shim ends.
    pub(super) fn allow_exec(
        &self,
        exit_pipe: BorrowedFd<'_>,
        stdin: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let files: Vec<BorrowedFd<'_>> = iter::once(exit_pipe).chain(stdin).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let permission = [IoSlice::new(&[EXEC_PERMISSION_BYTE])];
        match sendmsg(&self.stream, &permission, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the `errno` if the shim could not execute the command, and `None` if the shim executed it. Call this
    /// function after the rank has ended.
    pub(super) fn exec_error(&self) -> Option<i32> {
        let mut errno = [0; 4];
        (&self.stream).read_exact(&mut errno).ok().map(|()| i32::from_le_bytes(errno))
    }
}

/// Runs the shim: `ring-rank PARENT PROCESSORS built-in|named NAME ARGUMENTS`. Returns only if the command could not
/// be executed.
pub(super) fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let parent = arguments.next().and_then(|parent| parent.to_str()?.parse().ok());
    let processors = arguments.next();
    let kind = arguments.next();
    let (Some(parent), Some(processors), Some(kind), Some(name)) =
        (parent, processors, kind, arguments.next())
    else {
        return Exit::Usage.into();
    };
    // Check that ringrun is still the parent: ringrun may have died before the kernel handled this request.
    let requested = set_parent_process_death_signal(Some(Signal::KILL));
    if requested.is_err() || getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(parent) {
        return Exit::Start.into();
    }
    let Ok(mut socket) = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from) else {
        return Exit::Start.into();
    };
    let Ok(passed) = receive_exec_permission(&socket) else { return Exit::Start.into() };
    bind_to_processors(&processors);
    let mut command = if kind == BUILT_IN_PROGRAM_ARGUMENT {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(name);
        command
    } else {
        Command::new(name)
    };
    // A rank that has no exit pipe still runs: ringrun then knows less about its failure. If ringrun itself runs as a rank
    // of another job, it has inherited the variable of its own pipe.
    command.env_remove(EXIT_PIPE_VARIABLE);
    let inheritable = passed.exit_pipe.and_then(|write_end| make_inheritable(write_end).ok());
    let _inherited = inheritable.map(|(inherited, (name, value))| {
        command.env(name, value);
        inherited
    });
    let error = command.args(arguments).stdin(passed.stdin).exec();
    let errno = error.raw_os_error().unwrap_or_else(|| rustix::io::Errno::INVAL.raw_os_error());
    let _ = socket.write_all(&errno.to_le_bytes());
    Exit::CommandNotFound.into()
}

/// The files that ringrun passes to the shim.
struct PassedFiles {
    exit_pipe: Option<OwnedFd>,
    stdin: Stdio,
}

/// Waits until ringrun allows the shim to execute the command. Returns the files for the command. Returns an error if
/// ringrun has died.
fn receive_exec_permission(socket: &UnixStream) -> io::Result<PassedFiles> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut permission = [0];
    let received = retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut permission)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let mut files = files.next().into_iter().flatten();
    let exit_pipe = files.next();
    Ok(PassedFiles { exit_pipe, stdin: files.next().map_or_else(Stdio::null, Stdio::from) })
}

/// Binds this process to the processors. All threads of the command inherit this binding. If the system refuses the
/// binding, for example in a sandbox, the rank runs unbound.
fn bind_to_processors(processors: &OsStr) {
    let Some(processors) = processors.to_str().and_then(topology::parse_processor_list) else { return };
    let mut set = CpuSet::new();
    for processor in processors {
        set.set(processor);
    }
    let _ = sched_setaffinity(None, &set);
}
