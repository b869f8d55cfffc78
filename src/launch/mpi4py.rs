//! What makes `from mpi4py import MPI` resolve to the Python package `ringtrain` on the ranks: a directory with a package of that
//! name, which `ringtrain` knows, first on their `PYTHONPATH`. The job's own interpreter is asked for it, once, before any
//! rank is started.

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
use super::outcome::{RankEnd, seconds};
use super::shim::{self, ShimSocket};
use super::{LaunchError, LaunchPlan, processes};

/// The module that prints the directory when it is run.
const MODULE: &str = "ringtrain.mpi.path";

/// What the directory holds.
const PACKAGE: &str = "mpi4py";

/// Who is asked where the command is no interpreter by its name: a script of a shell, say, which starts one.
const DEFAULT_INTERPRETER: &str = "python3";

/// The variable that interpreters look for modules in, before what is installed.
const PYTHONPATH: &str = "PYTHONPATH";

/// Where the ranks run and find their programs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) directory: &'a Path,
    pub(super) path: Option<&'a OsStr>,
    /// ringrun's own `PYTHONPATH`.
    pub(super) python_path: Option<&'a OsStr>,
}

/// Puts the directory before all else that the ranks' `PYTHONPATH` has, by `-x` or from ringrun's own environment.
///
/// It waits for an answer as long as the ranks would for each other.
pub(super) fn put_first(
    plan: &LaunchPlan,
    around: Surroundings<'_>,
    variables: &mut BTreeMap<OsString, OsString>,
) -> Result<(), LaunchError> {
    let interpreter = interpreter(&plan.program);
    let failed = |why| LaunchError::Mpi4py { interpreter: interpreter.to_owned(), why };
    let program = Program::find(interpreter, around.path, around.directory)
        .map_err(|error| failed(error.to_string()))?;
    let mut command = shim::command(&program, &["-m", MODULE].map(OsString::from), &[]);
    command.current_dir(around.directory).envs(&*variables);
    let answer = ask(command, plan.limits.start_timeout).map_err(failed)?;
    let found = check(&answer).map_err(failed)?;
    let others = variables.get(OsStr::new(PYTHONPATH)).map(OsString::as_os_str).or(around.python_path);
    let joined = joined(found.as_os_str(), others);
    variables.insert(PYTHONPATH.into(), joined);
    Ok(())
}

/// The job's interpreter: the command, if that is one by its name.
fn interpreter(command: &OsStr) -> &OsStr {
    let name = Path::new(command).file_name().unwrap_or_default().as_bytes();
    let is_one = [&b"python"[..], b"pypy"].iter().any(|kind| name.starts_with(kind));
    if is_one { command } else { OsStr::new(DEFAULT_INTERPRETER) }
}

/// Runs the command, and returns the last line of its output; an error is what to tell the person. Nothing of it is left.
fn ask(mut command: Command, patience: Duration) -> Result<Vec<u8>, String> {
    let cannot = |error: io::Error| format!("it cannot be run: {error}");
    let (line, theirs) = ShimSocket::pair().map_err(cannot)?;
    command.stdin(theirs).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(cannot)?;
    drop(command);
    line.go();
    let pid = Pid::from_child(&child);
    let stdout = child.stdout.take().expect("its stdout was asked for");
    let stderr = child.stderr.take().expect("its stderr was asked for");
    let (tell, told) = mpsc::channel();
    let words = thread::spawn(move || last_line(stderr));
    thread::spawn(move || {
        let answer = last_line(stdout);
        let words = words.join().unwrap_or_default();
        // Only looked at, not yet reaped: until then its number cannot come to mean another.
        let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let _ = tell.send((answer, words));
    });
    let told = told.recv_timeout(patience);
    processes::signal_group(pid, SIGKILL);
    let status = child.wait().map_err(cannot)?;
    let Ok((answer, words)) = told else {
        return Err(format!("it did not answer within {} (--start-timeout)", seconds(patience)));
    };
    if let Some(errno) = line.exec_error() {
        return Err(cannot(io::Error::from_raw_os_error(errno)));
    }
    if status.success() { Ok(answer) } else { Err(complaint(status, &words)) }
}

/// Why an interpreter says that it cannot answer.
fn complaint(status: ExitStatus, words: &[u8]) -> String {
    let ended = match status.code() {
        Some(code) => RankEnd::Exited(code as u8),
        None => RankEnd::Killed(status.signal().unwrap_or(SIGKILL)),
    };
    match printable(words) {
        words if words.is_empty() => format!("it {ended} without a word"),
        words => format!("it {ended}: {words}"),
    }
}

/// The last line that is not blank of all that comes.
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

/// The directory that an interpreter has named, if it can be one.
fn check(answer: &[u8]) -> Result<PathBuf, String> {
    if answer.is_empty() {
        return Err("it printed nothing".to_owned());
    }
    let path = Path::new(OsStr::from_bytes(answer));
    let is_wrong = if !path.is_absolute() {
        "is no absolute path"
    } else if !path.is_dir() {
        "is not a directory"
    } else if !path.join(PACKAGE).is_dir() {
        "holds no package mpi4py"
    } else if answer.contains(&b':') {
        "cannot be in PYTHONPATH, for it has a colon in it"
    } else {
        return Ok(path.to_owned());
    };
    Err(format!("it printed `{}`, which {is_wrong}", printable(answer)))
}

/// A line of a program's as text that is safe to print, and not too long.
fn printable(line: &[u8]) -> String {
    let mut tail = LastLines::default();
    tail.push(line.trim_ascii());
    tail.into_text().concat()
}

/// `first` before what there is. An empty list would come to mean the current directory.
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
    fn whom_to_ask() {
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
    fn before_what_there_is() {
        for (others, expected) in [(None, "/a"), (Some(""), "/a"), (Some("/b::/c"), "/a:/b::/c")] {
            assert_eq!(joined(OsStr::new("/a"), others.map(OsStr::new)), expected, "{others:?}");
        }
    }

    #[test]
    fn the_last_line_that_says_something() {
        let long = [b"first\n".to_vec(), vec![b'x'; 1 << 20], b"\nlast\r\n".to_vec()].concat();
        for (text, expected) in [(&b""[..], &b""[..]), (b"one\ntwo", b"two"), (b"one\n \n\n", b"one")] {
            assert_eq!(last_line(text), expected);
        }
        assert_eq!(last_line(&long[..]), b"last\r");
        assert_eq!(printable(b" \x1b[1mred\r "), "\u{fffd}[1mred");
    }

    /// What hangs is killed with all that it has started, and does not make ringrun wait for longer than it was told to.
    #[test]
    fn an_answer_that_does_not_come_is_not_waited_for() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & sleep 1000"]);
        let error = ask(command, Duration::from_millis(20)).expect_err("there is no answer");
        assert_eq!(error, "it did not answer within 0.0 s (--start-timeout)");
    }

    #[test]
    fn what_interpreters_say() {
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
        assert_eq!(ask("exit 3"), Err("it exited with code 3 without a word".into()));
        assert_eq!(ask("kill -9 $$"), Err("it was killed by signal 9 (SIGKILL) without a word".into()));
        let error =
            super::ask(Command::new("/nowhere/python3"), Duration::from_secs(30)).expect_err("nowhere");
        assert!(error.starts_with("it cannot be run: No such file"), "{error}");
    }
}
