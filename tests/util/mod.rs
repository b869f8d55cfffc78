//! What the tests share.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

pub mod proxy;
pub mod ranks;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ringtrain::Rank;
use ringtrain::rendezvous::PeersFile;
use ringtrain::wire::Secret;
use ringtrain::wire::handshake::{Dialer, Handshake as _, Introduction, Job, Purpose, Stream};

/// How long anything may take before a test gives up. Far above what is needed: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Whether the long tests run: `tools/test --full`.
pub fn is_full() -> bool {
    std::env::var_os("TEST_FULL").is_some()
}

/// Returns `all` with `tools/test --full`, otherwise `some`.
pub fn full_or<T: ?Sized>(all: &'static T, some: &'static T) -> &'static T {
    if is_full() { all } else { some }
}

/// Waits until `condition` holds; panics with `what` if it does not in time.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `look` finds something.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "waited in vain: {what}");
        thread::sleep(LOOK);
    }
}

/// `ringrun` with these arguments, its output captured.
pub fn ringrun(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringrun"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `ringrun` with these arguments, each rank running this script.
pub fn ringrun_script(arguments: &[&str], script: &str) -> Command {
    let mut command = ringrun(arguments);
    command.args(["--", "sh", "-c", script]);
    command
}

/// What a program did.
#[derive(Debug)]
pub struct Done {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Done {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// The lines of its standard output, sorted: ranks print in any order.
    pub fn sorted_lines(&self) -> Vec<String> {
        let mut lines: Vec<_> = self.stdout().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

/// Runs it to its end.
pub fn run(command: &mut Command) -> Done {
    finish(command.spawn().expect("the program starts"))
}

/// Waits for its end and takes its output; kills it when it takes too long.
pub fn finish(mut child: Child) -> Done {
    let mut stdout = child.stdout.take();
    let mut stderr = child.stderr.take();
    let read_out = thread::spawn(move || read_all(stdout.as_mut().map(|pipe| pipe as &mut dyn io::Read)));
    let read_err = thread::spawn(move || read_all(stderr.as_mut().map(|pipe| pipe as &mut dyn io::Read)));
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is our child") {
            break Some(status);
        }
        if Instant::now() > until {
            child.kill().expect("it is our child");
            child.wait().expect("it is our child");
            break None;
        }
        thread::sleep(LOOK);
    };
    let (stdout, stderr) = (read_out.join().expect("reads"), read_err.join().expect("reads"));
    let text = || format!("{}\n{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let status = status.unwrap_or_else(|| panic!("it did not end:\n{}", text()));
    Done { status, stdout, stderr }
}

fn read_all(pipe: Option<&mut (dyn io::Read + '_)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
    }
    bytes
}

/// Whether the process exists and has not ended.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

/// The number in the file that a script writes with `echo $$ > part && mv part FILE`, once it is there.
pub fn read_pid(path: &Path) -> u32 {
    wait_for(&format!("{} appears", path.display()), || fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// Sends a signal by name, such as `KILL`.
pub fn signal(name: &str, pid: u32) {
    let status = Command::new("sh").args(["-c", &format!("kill -s {name} {pid}")]).status().expect("sh runs");
    assert!(status.success(), "kill -s {name} {pid}");
}

/// Waits until none of them is alive.
pub fn wait_until_gone(pids: &[u32]) {
    for &pid in pids {
        wait_until(&format!("process {pid} is gone"), || !is_alive(pid));
    }
}

/// The processes that carry this `NAME=value` in the environment that they began with.
pub fn processes_with(entry: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let pids = entries.filter_map(|found| found.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|found| found == entry.as_bytes())
    })
    .collect()
}

/// Proves to be `rank` of the job that `file` describes, as a rank on its way to the rendezvous does.
pub fn shake_hands(stream: &mut TcpStream, file: &PeersFile, rank: u32, secret: &Secret) {
    let job = Job { id: [0; 16], world: file.world().get(), peers_digest: file.digest() };
    let (from, to) = (Rank::new(rank), Rank::ZERO);
    let introduction = Introduction { purpose: Purpose::Rendezvous, from, to, stream: Stream::ONLY };
    let mut dialer = Dialer::new(secret.clone(), &job, introduction, rand::random());
    loop {
        stream.write_all(&dialer.take_output()).expect("the peer listens");
        if dialer.wanted() == 0 {
            return;
        }
        let mut bytes = vec![0; dialer.wanted()];
        stream.read_exact(&mut bytes).expect("the peer answers");
        dialer.feed(&bytes).expect("the peer belongs to the job");
    }
}
