//! `--mpi4py`: `from mpi4py import MPI` imports the Python package `ringtrain` on the ranks. The package has a directory with a
//! package `mpi4py` in it; that directory comes first in the ranks' `PYTHONPATH`. ringrun asks the job's interpreter for it once,
//! before it starts any rank. Without the option a guard comes first, see [`Guard`].

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use signal_hook::consts::SIGKILL;

use super::command::Program;
use super::lines::{LastLines, LineSplitter};
use super::mpi4py_guard::Guard;
use super::outcome::{RankEnd, seconds};
use super::shim::{self, ShimSocket};
use super::{LaunchError, LaunchPlan, Mpi4py, processes};

/// The module that prints the directory when it is run.
const MODULE: &str = "ringtrain.mpi.path";

/// The package in the directory.
const PACKAGE: &str = "mpi4py";

/// The interpreter to ask if the command's name is not one of an interpreter: a shell script, for example, that starts one.
const DEFAULT_INTERPRETER: &str = "python3";

/// The directories that interpreters search for modules before the installed ones.
const PYTHONPATH: &str = "PYTHONPATH";

/// The ranks' working directory and search paths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) directory: &'a Path,
    pub(super) path: Option<&'a OsStr>,
    /// ringrun's own `PYTHONPATH`.
    pub(super) python_path: Option<&'a OsStr>,
}

/// Puts ringtrain's `mpi4py` or the guard before the other entries of the ranks' `PYTHONPATH`, which come from `-x` or from
/// ringrun's own environment. The caller keeps the guard until the job has ended.
pub(super) fn put_first(
    plan: &LaunchPlan,
    around: Surroundings<'_>,
    variables: &mut BTreeMap<OsString, OsString>,
) -> Result<Option<Guard>, LaunchError> {
    let (first, guard) = match plan.mpi4py {
        Mpi4py::Installed => return Ok(None),
        Mpi4py::Ringtrain => (directory(plan, around, variables)?.into_os_string(), None),
        // A system without memory files has no guard, and its ranks run all the same.
        Mpi4py::Refused => match Guard::create() {
            Ok(guard) => (guard.path(), Some(guard)),
            Err(_) => return Ok(None),
        },
    };
    let others = variables.get(OsStr::new(PYTHONPATH)).map(OsString::as_os_str).or(around.python_path);
    let joined = joined(&first, others);
    variables.insert(PYTHONPATH.into(), joined);
    Ok(guard)
}

/// Asks the interpreter for the directory. Waits for the answer as long as the ranks would for each other.
fn directory(
    plan: &LaunchPlan,
    around: Surroundings<'_>,
    variables: &BTreeMap<OsString, OsString>,
) -> Result<PathBuf, LaunchError> {
    let interpreter = interpreter(&plan.program);
    let failed = |why| LaunchError::Mpi4py { interpreter: interpreter.to_owned(), why };
    let program = Program::find(interpreter, around.path, around.directory)
        .map_err(|error| failed(error.to_string()))?;
    let mut command = shim::command(&program, &["-m", MODULE].map(OsString::from), &[]);
    command.current_dir(around.directory).envs(variables);
    let answer = ask(command, plan.limits.start_timeout).map_err(failed)?;
    check(&answer).map_err(failed)
}

/// The job's interpreter: the command, if its name is one of an interpreter.
fn interpreter(command: &OsStr) -> &OsStr {
    let name = Path::new(command).file_name().unwrap_or_default().as_bytes();
    let is_one = [&b"python"[..], b"pypy"].iter().any(|kind| name.starts_with(kind));
    if is_one { command } else { OsStr::new(DEFAULT_INTERPRETER) }
}

/// Runs the command and returns the last line of its output. Afterwards its whole process group has been killed.
fn ask(mut command: Command, timeout: Duration) -> Result<Vec<u8>, String> {
    let cannot = |error: io::Error| format!("it cannot be run: {error}");
    let (line, theirs) = ShimSocket::pair().map_err(cannot)?;
    command.stdin(theirs).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(cannot)?;
    drop(command);
    line.go();
    let pid = Pid::from_child(&child);
    let stdout = child.stdout.take().expect("its stdout was asked for");
    let stderr = child.stderr.take().expect("its stderr was asked for");
    let (sender, receiver) = mpsc::channel();
    let error_line = thread::spawn(move || last_line(stderr));
    thread::spawn(move || {
        let answer = last_line(stdout);
        let error_line = error_line.join().unwrap_or_default();
        // The process is not reaped here, so that its number stays its own until its group is killed.
        let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let _ = sender.send((answer, error_line));
    });
    let received = receiver.recv_timeout(timeout);
    processes::signal_group(pid, SIGKILL);
    let status = child.wait().map_err(cannot)?;
    let Ok((answer, error_line)) = received else {
        return Err(format!("it did not answer within {} (--start-timeout)", seconds(timeout)));
    };
    if let Some(errno) = line.exec_error() {
        return Err(cannot(io::Error::from_raw_os_error(errno)));
    }
    if status.success() { Ok(answer) } else { Err(failure(status, &error_line)) }
}

/// How a failed interpreter ended, with the last line of its standard error.
fn failure(status: ExitStatus, error_line: &[u8]) -> String {
    let ended = match status.code() {
        Some(code) => RankEnd::Exited(code as u8),
        None => RankEnd::Killed(status.signal().unwrap_or(SIGKILL)),
    };
    match printable(error_line) {
        text if text.is_empty() => format!("it {ended} without output"),
        text => format!("it {ended}: {text}"),
    }
}

/// The last line that is not blank.
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
    splitter.finish(|line, _| keep(line));
    last
}

/// Checks the directory that the interpreter printed.
fn check(answer: &[u8]) -> Result<PathBuf, String> {
    if answer.is_empty() {
        return Err("it printed nothing".to_owned());
    }
    let path = Path::new(OsStr::from_bytes(answer));
    let is_wrong = if !path.is_absolute() {
        "is not an absolute path"
    } else if !path.is_dir() {
        "is not a directory"
    } else if !path.join(PACKAGE).is_dir() {
        "does not contain the package mpi4py"
    } else if answer.contains(&b':') {
        "cannot be in PYTHONPATH, because it contains a colon"
    } else {
        return Ok(path.to_owned());
    };
    Err(format!("it printed `{}`, which {is_wrong}", printable(answer)))
}

/// A program's line as text that is safe to print and not too long.
fn printable(line: &[u8]) -> String {
    let mut tail = LastLines::default();
    tail.push(line.trim_ascii());
    tail.into_text().concat()
}

/// `first` before the other entries. An empty entry would mean the current directory.
fn joined(first: &OsStr, others: Option<&OsStr>) -> OsString {
    let mut bytes = first.as_bytes().to_vec();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        bytes.push(b':');
        bytes.extend_from_slice(others.as_bytes());
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
            assert_eq!(interpreter(OsStr::new(command)), expected, "{command}");
        }
    }

    #[test]
    fn the_directory_comes_before_other_entries() {
        for (others, expected) in [(None, "/a"), (Some(""), "/a"), (Some("/b::/c"), "/a:/b::/c")] {
            assert_eq!(joined(OsStr::new("/a"), others.map(OsStr::new)), expected, "{others:?}");
        }
    }

    #[test]
    fn the_answer_is_the_last_line_that_is_not_blank() {
        let long = [b"first\n".to_vec(), vec![b'x'; 1 << 20], b"\nlast\r\n".to_vec()].concat();
        for (text, expected) in [(&b""[..], &b""[..]), (b"one\ntwo", b"two"), (b"one\n \n\n", b"one")] {
            assert_eq!(last_line(text), expected);
        }
        assert_eq!(last_line(&long[..]), b"last\r");
        assert_eq!(printable(b" \x1b[1mred\r "), "\u{fffd}[1mred");
    }

    /// An interpreter that hangs does not delay ringrun longer than its limit, and is killed with its children.
    #[test]
    fn waiting_for_an_answer_has_a_limit() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & sleep 1000"]);
        let error = ask(command, Duration::from_millis(20)).expect_err("there is no answer");
        assert_eq!(error, "it did not answer within 0.0 s (--start-timeout)");
    }

    #[test]
    fn errors_of_interpreters_are_quoted() {
        let ask = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            ask(command, Duration::from_secs(30))
        };
        assert_eq!(ask("echo warning >&2; echo chatter; echo /a/b"), Ok(b"/a/b".to_vec()));
        assert_eq!(
            ask("echo Traceback >&2; echo Wrong: x >&2; exit 1"),
            Err("it exited with code 1: Wrong: x".into())
        );
        assert_eq!(ask("exit 3"), Err("it exited with code 3 without output".into()));
        assert_eq!(ask("kill -9 $$"), Err("it was killed by signal 9 (SIGKILL) without output".into()));
        let error =
            super::ask(Command::new("/nowhere/python3"), Duration::from_secs(30)).expect_err("nowhere");
        assert!(error.starts_with("it cannot be run: No such file"), "{error}");
    }
}
