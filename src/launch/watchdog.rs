//! The watchdog: a second process of ringrun that outlives it by a moment, so that a ringrun killed by SIGKILL leaves no orphan.
//!
//! It holds one end of a pipe whose other end only ringrun has, and learns through it which process groups there are. When the
//! pipe ends without the word `done`, ringrun is gone, and the watchdog kills what ringrun would have killed: those groups, and
//! all other processes that carry the job's id in its environment. The latter also closes the gap between
//! the start of a rank and the
//! announcement of its group.
//!
//! It runs in a new session under another name than ringrun's, has nothing of the job's environment, and ignores the
//! signals by which jobs are stopped: what ends ringrun (Ctrl-C, `killall ringrun`, `systemctl stop`) must not end it first.

use std::collections::BTreeSet;
use std::env;
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};

use super::environment::JOB_ID;
use super::processes;

/// By this name (`argv[0]`) ringrun's executable acts as the watchdog.
pub const WATCHDOG: &str = "ring-watchdog";

/// How long the watchdog goes on killing what keeps appearing.
const SWEEP_TIME: Duration = Duration::from_secs(5);

/// How long it waits for the kernel between two sweeps.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);

/// ringrun's side of the watchdog.
#[derive(Debug)]
pub(super) struct Watchdog {
    pid: Pid,
    /// `None` once it has been lost.
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Starts the watchdog and waits until it is out of the reach of our terminal's signals.
    pub(super) fn start(job_id: &str) -> io::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg0(WATCHDOG)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut ready = [0];
        child.stdout.take().expect("its stdout was asked for").read_exact(&mut ready)?;
        let mut watchdog = Self { pid: Pid::from_child(&child), pipe: child.stdin.take() };
        watchdog.say(&format!("job {job_id}"));
        Ok(watchdog)
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// A rank now runs in this process group.
    pub(super) fn add(&mut self, group: Pid) {
        self.say(&format!("+{group}"));
    }

    /// The group has been killed, and its number may come to mean another.
    pub(super) fn remove(&mut self, group: Pid) {
        self.say(&format!("-{group}"));
    }

    /// Nothing is left to guard. A watchdog that somebody has stopped would not hear it, but it cannot miss a SIGKILL.
    pub(super) fn dismiss(&mut self) {
        self.say("done");
        self.pipe = None;
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }

    /// The watchdog has ended unexpectedly.
    pub(super) fn lost(&mut self) {
        self.pipe = None;
    }

    /// A line is shorter than a pipe's atomic write, so that the watchdog never sees half of one. Several thousand lines fit into
    /// a pipe without a reader, more than there are ranks: a stopped watchdog cannot stop us.
    fn say(&mut self, line: &str) {
        if let Some(pipe) = &mut self.pipe
            && pipe.write_all(format!("{line}\n").as_bytes()).is_err()
        {
            self.pipe = None;
        }
    }
}

/// What the watchdog has been told.
#[derive(Default, Debug, PartialEq, Eq)]
struct WatchedJob {
    job: Option<String>,
    groups: BTreeSet<i32>,
    done: bool,
}

impl WatchedJob {
    fn hear(&mut self, line: &str) {
        if line == "done" {
            self.done = true;
        } else if let Some(job) = line.strip_prefix("job ") {
            self.job = Some(job.to_owned());
        } else if let Some(group) = line.strip_prefix('+').and_then(|group| group.parse().ok()) {
            self.groups.insert(group);
        } else if let Some(group) = line.strip_prefix('-').and_then(|group| group.parse().ok()) {
            self.groups.remove(&group);
        }
    }

    fn kill_all(&self) {
        for group in self.groups.iter().filter_map(|&group| Pid::from_raw(group)) {
            processes::signal_group(group, SIGKILL);
        }
        let Some(job) = &self.job else { return };
        let entry = format!("{JOB_ID}={job}");
        let until = Instant::now() + SWEEP_TIME;
        // A process that forks while it is being killed may leave one more behind, hence again until there is none.
        while processes::kill_by_environment(entry.as_bytes()) > 0 && Instant::now() < until {
            thread::sleep(SWEEP_PAUSE);
        }
    }
}

/// The watchdog's program.
pub(super) fn main() -> ExitCode {
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let _ = rustix::process::setsid();
    // Somebody may have stopped us together with the job. When ringrun dies the kernel then wakes us, and we do our work.
    let _ = set_parent_process_death_signal(Some(Signal::CONT));
    super::name_process(WATCHDOG);
    if env::args_os().len() > 1 || io::stdout().write_all(b".").and_then(|()| io::stdout().flush()).is_err() {
        return ExitCode::FAILURE;
    }
    let mut watched = WatchedJob::default();
    for line in io::stdin().lock().lines() {
        match line {
            Ok(line) => watched.hear(&line),
            Err(_) => break,
        }
    }
    if !watched.done {
        watched.kill_all();
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_hears() {
        let mut watched = WatchedJob::default();
        for line in ["job abc", "+12", "+13", "-12", "", "nonsense", "+x", "-99"] {
            watched.hear(line);
        }
        assert_eq!(watched, WatchedJob { job: Some("abc".to_owned()), groups: [13].into(), done: false });
        watched.hear("done");
        assert!(watched.done);
    }
}
