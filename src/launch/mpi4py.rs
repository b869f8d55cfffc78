//! The option `--mpi4py`: with this option, `from mpi4py import MPI` imports a module of the package `ringtrain` in
//! the ranks.
//!
//! The package `ringtrain` contains a directory with its own package `mpi4py`. ringrun puts this directory first in
//! the ranks' `PYTHONPATH`. To find the directory, ringrun runs the job's interpreter once, before it starts any
//! rank. Without the option, ringrun instead puts a [`Mpi4pyGuard`] first: a package `mpi4py` whose import fails.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use signal_hook::consts::SIGKILL;

use super::command::LaunchedProgram;
use super::error::LaunchError;
use super::exit_pipe::ExitPipe;
use super::lines::{LastLines, LineSplitter};
use super::mpi4py_guard::Mpi4pyGuard;
use super::outcome::{RankEnd, format_seconds};
use super::plan::{LaunchPlan, Mpi4py};
use super::processes;
use super::shim::{self, ShimSocket};

/// The Python module that `python -m` runs to print the path of the directory with ringtrain's `mpi4py`.
const FIND_MPI4PY_MODULE: &str = "ringtrain.mpi.path";

/// The package that must be in the directory that [`FIND_MPI4PY_MODULE`] prints.
const MPI4PY_PACKAGE: &str = "mpi4py";

/// ringrun asks this interpreter if the command is not an interpreter but, for example, a shell script.
const DEFAULT_INTERPRETER: &str = "python3";

/// The variable with the directories that Python searches before it searches the installed packages.
const PYTHONPATH: &str = "PYTHONPATH";

/// The directories in which to search for the interpreter and for Python modules.
#[derive(Clone, Copy, Debug)]
pub(super) struct SearchPaths<'a> {
    /// The working directory of the ranks.
    pub(super) directory: &'a Path,
    /// The `PATH` of the ranks.
    pub(super) path: Option<&'a OsStr>,
    /// ringrun's own `PYTHONPATH`.
    pub(super) python_path: Option<&'a OsStr>,
}

/// Puts the directory of ringtrain's `mpi4py`, or the guard's archive, at the beginning of the ranks' `PYTHONPATH`. The
/// rest is the `PYTHONPATH` of `-x`, or ringrun's own `PYTHONPATH` if `-x` does not set the variable. The caller must
/// keep the returned guard until the job has ended. Returns `None` if the ranks run without a guard.
pub(super) fn extend_python_path(
    (plan, program): (&LaunchPlan, &OsStr),
    search: SearchPaths<'_>,
    variables: &mut BTreeMap<OsString, OsString>,
) -> Result<Option<Mpi4pyGuard>, LaunchError> {
    let (first_entry, guard) = match plan.mpi4py {
        Mpi4py::Installed => return Ok(None),
        Mpi4py::Ringtrain => {
            (find_mpi4py_directory((plan, program), search, variables)?.into_os_string(), None)
        }
        // If the system cannot create the guard's file in memory, the ranks run without a guard.
        Mpi4py::Refused => match Mpi4pyGuard::create() {
            Ok(guard) => (guard.path(), Some(guard)),
            Err(_) => return Ok(None),
        },
    };
    let other_entries = variables.get(OsStr::new(PYTHONPATH)).map(OsString::as_os_str).or(search.python_path);
    variables.insert(PYTHONPATH.into(), join_search_paths(&first_entry, other_entries));
    Ok(guard)
}

/// Asks the interpreter for the directory of ringtrain's `mpi4py`. Waits at most `--start-timeout` for the answer.
fn find_mpi4py_directory(
    (plan, program): (&LaunchPlan, &OsStr),
    search: SearchPaths<'_>,
    variables: &BTreeMap<OsString, OsString>,
) -> Result<PathBuf, LaunchError> {
    let interpreter = choose_interpreter(program);
    let mpi4py_error = |why| LaunchError::Mpi4py { interpreter: interpreter.to_owned(), why };
    let program = LaunchedProgram::find(interpreter, search.path, search.directory)
        .map_err(|error| mpi4py_error(error.to_string()))?;
    let mut command = shim::shim_command(&program, &["-m", FIND_MPI4PY_MODULE].map(OsString::from), &[]);
    command.current_dir(search.directory).envs(variables);
    let answer = ask_interpreter(command, plan.limits.start_timeout).map_err(mpi4py_error)?;
    check_mpi4py_directory(&answer).map_err(mpi4py_error)
}

/// Returns `command` if its file name begins with `python` or `pypy`. Returns [`DEFAULT_INTERPRETER`] for any other
/// command.
fn choose_interpreter(command: &OsStr) -> &OsStr {
    let name = Path::new(command).file_name().unwrap_or_default().as_bytes();
    let is_interpreter = [&b"python"[..], b"pypy"].iter().any(|prefix| name.starts_with(prefix));
    if is_interpreter { command } else { OsStr::new(DEFAULT_INTERPRETER) }
}

/// Runs the command and returns the last line of its output. Before returning, kills the whole process group of the
/// command.
fn ask_interpreter(mut command: Command, timeout: Duration) -> Result<Vec<u8>, String> {
    let cannot_run = |error: io::Error| format!("it cannot be run: {error}");
    let (shim_socket, shim_stdin) = ShimSocket::new_pair().map_err(cannot_run)?;
    command.stdin(shim_stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(cannot_run)?;
    drop(command);
    // The shim passes an exit pipe to every command. ringrun does not read this one, because the interpreter is no rank.
    let (_exit_pipe, write_end) = ExitPipe::new().map_err(cannot_run)?;
    shim_socket.allow_exec(write_end.as_fd(), None).map_err(cannot_run)?;
    let pid = Pid::from_child(&child);
    let stdout = child.stdout.take().expect("stdout was set to a pipe");
    let stderr = child.stderr.take().expect("stderr was set to a pipe");
    let (sender, receiver) = mpsc::channel();
    let error_line = thread::spawn(move || last_line(stderr));
    thread::spawn(move || {
        let answer = last_line(stdout);
        let error_line = error_line.join().unwrap_or_default();
        // NOWAIT does not reap the command, so no new process can get the command's process id before `signal_group`
        // kills the command's process group.
        let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let _ = sender.send((answer, error_line));
    });
    let received = receiver.recv_timeout(timeout);
    processes::signal_group(pid, SIGKILL);
    let status = child.wait().map_err(cannot_run)?;
    let Ok((answer, error_line)) = received else {
        return Err(format!("it did not answer within {} (--start-timeout)", format_seconds(timeout)));
    };
    if let Some(errno) = shim_socket.exec_error() {
        return Err(cannot_run(io::Error::from_raw_os_error(errno)));
    }
    if status.success() { Ok(answer) } else { Err(describe_failure(status, &error_line)) }
}

/// Describes how a failed interpreter ended, with the last line of its standard error.
fn describe_failure(status: ExitStatus, error_line: &[u8]) -> String {
    let ended = match status.code() {
        Some(code) => RankEnd::Exited(code as u8),
        None => RankEnd::Killed(status.signal().unwrap_or(SIGKILL)),
    };
    match to_printable_text(error_line) {
        text if text.is_empty() => format!("it {ended} without output"),
        text => format!("it {ended}: {text}"),
    }
}

/// Reads the pipe to its end, and returns the last line that is not blank.
fn last_line(mut pipe: impl Read) -> Vec<u8> {
    let (mut splitter, mut last, mut buffer) = (LineSplitter::default(), Vec::new(), [0; 4096]);
    let mut keep = |line: &[u8]| {
        if !line.trim_ascii().is_empty() {
            last = line.to_vec();
        }
    };
    while let Ok(length @ 1..) = pipe.read(&mut buffer) {
        splitter.push(&buffer[..length], |line, _| keep(line));
    }
    splitter.emit_unfinished_line(|line, _| keep(line));
    last
}

/// Checks the directory that the interpreter printed, and returns it as a path. An error says what is wrong.
fn check_mpi4py_directory(answer: &[u8]) -> Result<PathBuf, String> {
    if answer.is_empty() {
        return Err("it printed nothing".to_owned());
    }
    let path = Path::new(OsStr::from_bytes(answer));
    let problem = if !path.is_absolute() {
        "is not an absolute path"
    } else if !path.is_dir() {
        "is not a directory"
    } else if !path.join(MPI4PY_PACKAGE).is_dir() {
        "does not contain the package mpi4py"
    } else if answer.contains(&b':') {
        "cannot be in PYTHONPATH, because it contains a colon"
    } else {
        return Ok(path.to_owned());
    };
    Err(format!("it printed `{}`, which {problem}", to_printable_text(answer)))
}

/// Converts a line that a program printed to text that is safe to print. Shortens long lines.
fn to_printable_text(line: &[u8]) -> String {
    let mut last_lines = LastLines::default();
    last_lines.push(line.trim_ascii());
    last_lines.into_text().concat()
}

/// Joins `first_entry` and `other_entries` with a colon. Adds no empty entry, because for Python an empty entry means
/// the current directory.
fn join_search_paths(first_entry: &OsStr, other_entries: Option<&OsStr>) -> OsString {
    let mut bytes = first_entry.as_bytes().to_vec();
    if let Some(other_entries) = other_entries.filter(|other_entries| !other_entries.is_empty()) {
        bytes.push(b':');
        bytes.extend_from_slice(other_entries.as_bytes());
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interpreter_is_the_command_or_python3() {
        for (command, expected) in [
            ("python", "python"),
            ("python3.12", "python3.12"),
            ("/opt/a b/bin/python3", "/opt/a b/bin/python3"),
            ("venv/bin/pypy3", "venv/bin/pypy3"),
            ("./train.py", "python3"),
            ("bash", "python3"),
            ("/python/bin/jupyter", "python3"),
            ("", "python3"),
        ] {
            assert_eq!(choose_interpreter(OsStr::new(command)), expected, "{command}");
        }
    }

    #[test]
    fn ringtrains_mpi4py_comes_before_other_entries_of_pythonpath() {
        for (others, expected) in [(None, "/a"), (Some(""), "/a"), (Some("/b::/c"), "/a:/b::/c")] {
            assert_eq!(join_search_paths(OsStr::new("/a"), others.map(OsStr::new)), expected, "{others:?}");
        }
    }

    #[test]
    fn the_answer_is_the_last_line_that_is_not_blank() {
        let long = [b"first\n".to_vec(), vec![b'x'; 1 << 20], b"\nlast\r\n".to_vec()].concat();
        for (text, expected) in [(&b""[..], &b""[..]), (b"one\ntwo", b"two"), (b"one\n \n\n", b"one")] {
            assert_eq!(last_line(text), expected);
        }
        assert_eq!(last_line(&long[..]), b"last\r");
        assert_eq!(to_printable_text(b" \x1b[1mred\r "), "\u{fffd}[1mred");
    }

    #[test]
    fn an_interpreter_that_does_not_answer_is_killed_with_its_children() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & sleep 1000"]);
        let error = ask_interpreter(command, Duration::from_millis(20)).expect_err("there was an answer");
        assert_eq!(error, "it did not answer within 0.0 s (--start-timeout)");
    }

    #[test]
    fn failures_of_the_interpreter_are_described() {
        let ask = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            ask_interpreter(command, Duration::from_secs(30))
        };
        assert_eq!(ask("echo warning >&2; echo chatter; echo /a/b"), Ok(b"/a/b".to_vec()));
        assert_eq!(
            ask("echo Traceback >&2; echo Wrong: x >&2; exit 1"),
            Err("it exited with code 1: Wrong: x".into())
        );
        assert_eq!(ask("exit 3"), Err("it exited with code 3 without output".into()));
        assert_eq!(ask("kill -9 $$"), Err("it was killed by signal 9 (SIGKILL) without output".into()));
        let error = ask_interpreter(Command::new("/nowhere/python3"), Duration::from_secs(30))
            .expect_err("the interpreter was found");
        assert!(error.starts_with("it cannot be run: No such file"), "{error}");
    }
}
