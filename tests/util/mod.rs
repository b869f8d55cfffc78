//! Functions that several test programs use.

#![allow(dead_code, unreachable_pub, reason = "each test program uses only some of these functions")]

pub mod proxy;
pub mod ranks;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtrain::Rank;
use ringtrain::rendezvous::PeersFile;
use ringtrain::wire::Secret;
use ringtrain::wire::handshake::{ConnectionPurpose, Dialer, Handshake as _, Introduction, Job, StreamId};

/// The time after which a test fails if it still waits for a condition. On an idle machine, tests wait for a far
/// shorter time.
pub const TEST_TIMEOUT: Duration = Duration::from_mins(2);

/// The time between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Returns whether the long tests run in addition to the short tests. Under `tools/test --full`, the long tests run.
pub fn runs_long_tests() -> bool {
    std::env::var_os("TEST_FULL").is_some()
}

/// Returns `all` if the long tests run, otherwise `some`.
pub fn if_long_tests_else<T: ?Sized>(all: &'static T, some: &'static T) -> &'static T {
    if runs_long_tests() { all } else { some }
}

/// Waits until `condition` returns true. Panics with the description `what` after [`TEST_TIMEOUT`].
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `find` returns `Some`, and returns the value. Panics with the description `what` after
/// [`TEST_TIMEOUT`].
pub fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out while waiting for: {what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Calls `check` until it does not panic, at most four times. For checks that need a rank to run soon after another rank:
/// on a busy machine the system can suspend a rank for longer. `check` gets the number of the attempt, from 0.
pub fn retry_on_busy_machine(check: impl Fn(u32)) {
    const LAST_ATTEMPT: u32 = 3;
    for attempt in 0..LAST_ATTEMPT {
        if panic::catch_unwind(AssertUnwindSafe(|| check(attempt))).is_ok() {
            return;
        }
    }
    check(LAST_ATTEMPT);
}

/// Returns a command that runs `ringrun` with these arguments and captures the output of `ringrun`.
pub fn ringrun(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringrun"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns a command that runs `ringrun` with these arguments. Each rank runs the shell script `script`.
pub fn ringrun_script(arguments: &[&str], script: &str) -> Command {
    let mut command = ringrun(arguments);
    command.args(["--", "sh", "-c", script]);
    command
}

/// The exit status and the output of a program that has ended.
#[derive(Debug)]
pub struct FinishedProgram {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl FinishedProgram {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Returns the lines of the standard output, sorted, because ranks print in any order.
    pub fn sorted_lines(&self) -> Vec<String> {
        let mut lines: Vec<_> = self.stdout().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

/// Runs a program until it ends.
pub fn run(command: &mut Command) -> FinishedProgram {
    finish(command.spawn().expect("the program starts"))
}

/// Waits until a program ends, and returns its output. Kills the program and panics after [`TEST_TIMEOUT`].
pub fn finish(mut child: Child) -> FinishedProgram {
    let mut stdout = child.stdout.take();
    let mut stderr = child.stderr.take();
    let read_out = thread::spawn(move || read_all(stdout.as_mut().map(|pipe| pipe as &mut dyn io::Read)));
    let read_err = thread::spawn(move || read_all(stderr.as_mut().map(|pipe| pipe as &mut dyn io::Read)));
    let deadline = Instant::now() + TEST_TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().expect("the test started this child") {
            break Some(status);
        }
        if Instant::now() > deadline {
            child.kill().expect("the test started this child");
            child.wait().expect("the test started this child");
            break None;
        }
        thread::sleep(POLL_INTERVAL);
    };
    let (stdout, stderr) = (read_out.join(), read_err.join());
    let (stdout, stderr) = (stdout.expect("the thread reads"), stderr.expect("the thread reads"));
    let text = || format!("{}\n{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let status = status.unwrap_or_else(|| panic!("the program did not end:\n{}", text()));
    FinishedProgram { status, stdout, stderr }
}

fn read_all(pipe: Option<&mut (dyn io::Read + '_)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
    }
    bytes
}

/// Returns whether the process exists and has not ended.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// Waits until the file `path` exists, and returns the process id in this file. A script must write this file with
/// `echo $$ > part && mv part FILE`, so that the file is never incomplete.
pub fn read_pid(path: &Path) -> u32 {
    wait_for(&format!("{} appears", path.display()), || fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// Sends the signal with this name, such as `KILL`, to a process.
pub fn send_signal(name: &str, pid: u32) {
    let status = Command::new("sh").args(["-c", &format!("kill -s {name} {pid}")]).status().expect("sh runs");
    assert!(status.success(), "kill -s {name} {pid}");
}

/// Waits until all of these processes have ended.
pub fn wait_until_gone(pids: &[u32]) {
    for &pid in pids {
        wait_until(&format!("process {pid} is gone"), || !is_alive(pid));
    }
}

/// Returns the processes that were started with the entry `NAME=value` in their environment.
pub fn processes_with_environment(entry: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let pids = entries.filter_map(|found| found.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|found| found == entry.as_bytes())
    })
    .collect()
}

/// Performs the handshake of `rank` with the rendezvous of the job that `file` describes.
pub fn shake_hands(stream: &mut TcpStream, file: &PeersFile, rank: u32, secret: &Secret) {
    let job = Job { id: [0; 16], world: file.world().get(), peers_digest: file.digest() };
    let (from, to) = (Rank::new(rank), Rank::ZERO);
    let introduction =
        Introduction { purpose: ConnectionPurpose::Rendezvous, from, to, stream: StreamId::ONLY };
    let mut dialer = Dialer::new(secret.clone(), &job, introduction, rand::random());
    loop {
        stream.write_all(&dialer.take_output()).expect("the peer listens");
        if dialer.wanted_bytes() == 0 {
            return;
        }
        let mut bytes = vec![0; dialer.wanted_bytes()];
        stream.read_exact(&mut bytes).expect("the peer answers");
        dialer.feed(&bytes).expect("the peer belongs to the job");
    }
}
