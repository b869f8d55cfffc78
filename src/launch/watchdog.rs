//! The watchdog: a second process of ringrun that kills the job's processes if ringrun is killed by SIGKILL.
//!
//! ringrun writes the job's process groups to a pipe, and only ringrun can write to this pipe. If the pipe closes
//! before the line `done` arrives, ringrun has died. After ringrun's death, the watchdog kills the job's process
//! groups, and all processes that have the job's id in their environment. By the environment, the watchdog also
//! finds a rank whose process group ringrun has not written to the pipe yet.
//!
//! The watchdog runs in a new session, under a different name than ringrun, and without the job's environment. The
//! watchdog also ignores the signals that stop jobs. Ctrl-C, `killall ringrun` and `systemctl stop` therefore do not
//! end the watchdog before ringrun.

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

use super::environment::HOST_JOB_VARIABLE;
use super::processes;

/// The name (`argv[0]`) under which ringrun's executable runs as the watchdog.
pub const WATCHDOG_NAME: &str = "ring-watchdog";

/// The watchdog searches again while it finds processes to kill, but for at most this time.
const KILL_SWEEP_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between two searches for processes.
const KILL_SWEEP_PAUSE: Duration = Duration::from_millis(5);

/// The handle with which ringrun controls the watchdog.
#[derive(Debug)]
pub(super) struct Watchdog {
    pid: Pid,
    /// `None` after the watchdog has ended.
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Starts the watchdog and waits until signals of the terminal no longer reach the watchdog.
    pub(super) fn start(job_id: &str) -> io::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg0(WATCHDOG_NAME)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut ready = [0];
        child.stdout.take().expect("stdout was set to a pipe").read_exact(&mut ready)?;
        let mut watchdog = Self { pid: Pid::from_child(&child), pipe: child.stdin.take() };
        watchdog.send_line(&format!("job {job_id}"));
        Ok(watchdog)
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Adds a rank's process group to the process groups that the watchdog kills if ringrun dies.
    pub(super) fn watch_group(&mut self, group: Pid) {
        self.send_line(&format!("+{group}"));
    }

    /// Tells the watchdog to forget a process group that has been killed, because the kernel may reuse the group's
    /// number.
    pub(super) fn forget_group(&mut self, group: Pid) {
        self.send_line(&format!("-{group}"));
    }

    /// Ends the watchdog, because the job is over. Also sends SIGKILL, because a watchdog that SIGSTOP has stopped does
    /// not read the pipe.
    pub(super) fn end_watchdog(&mut self) {
        self.send_line("done");
        self.pipe = None;
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }

    /// Closes the pipe, because the watchdog has ended unexpectedly.
    pub(super) fn close_pipe(&mut self) {
        self.pipe = None;
    }

    /// Sends one line. A line is short enough for an atomic write, so the watchdog never reads half a line. A pipe
    /// has space for several thousand lines, and ringrun sends fewer lines. So ringrun does not block if SIGSTOP has
    /// stopped the watchdog.
    fn send_line(&mut self, line: &str) {
        if let Some(pipe) = &mut self.pipe
            && pipe.write_all(format!("{line}\n").as_bytes()).is_err()
        {
            self.pipe = None;
        }
    }
}

/// The state of the job, which the watchdog learns from the lines that ringrun sends.
#[derive(Default, Debug, PartialEq, Eq)]
struct WatchedJob {
    job_id: Option<String>,
    /// The process groups of the ranks that still run.
    groups: BTreeSet<i32>,
    /// Whether ringrun has sent the line `done`: all ranks have ended.
    is_done: bool,
}

impl WatchedJob {
    /// Applies one line that ringrun has sent.
    fn update_from_line(&mut self, line: &str) {
        if line == "done" {
            self.is_done = true;
        } else if let Some(job) = line.strip_prefix("job ") {
            self.job_id = Some(job.to_owned());
        } else if let Some(group) = line.strip_prefix('+').and_then(|group| group.parse().ok()) {
            self.groups.insert(group);
        } else if let Some(group) = line.strip_prefix('-').and_then(|group| group.parse().ok()) {
            self.groups.remove(&group);
        }
    }

    /// Kills all processes of the job.
    fn kill_job(&self) {
        for group in self.groups.iter().filter_map(|&group| Pid::from_raw(group)) {
            processes::signal_group(group, SIGKILL);
        }
        let Some(job) = &self.job_id else { return };
        let entry = format!("{HOST_JOB_VARIABLE}={job}");
        let until = Instant::now() + KILL_SWEEP_TIMEOUT;
        // A process can fork while it is being killed, so search again until no process is left.
        while processes::kill_by_environment(entry.as_bytes()) > 0 && Instant::now() < until {
            thread::sleep(KILL_SWEEP_PAUSE);
        }
    }
}

/// Runs the watchdog.
pub(super) fn main() -> ExitCode {
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let _ = rustix::process::setsid();
    // The watchdog may be stopped (SIGSTOP) together with the job. The parent death signal makes the kernel continue
    // the watchdog with SIGCONT when ringrun dies.
    let _ = set_parent_process_death_signal(Some(Signal::CONT));
    processes::set_process_name(WATCHDOG_NAME);
    if env::args_os().len() > 1 || io::stdout().write_all(b".").and_then(|()| io::stdout().flush()).is_err() {
        return ExitCode::FAILURE;
    }
    let mut watched = WatchedJob::default();
    for line in io::stdin().lock().lines() {
        match line {
            Ok(line) => watched.update_from_line(&line),
            Err(_) => break,
        }
    }
    if !watched.is_done {
        watched.kill_job();
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_change_the_state_of_the_job() {
        let mut watched = WatchedJob::default();
        for line in ["job abc", "+12", "+13", "-12", "", "nonsense", "+x", "-99"] {
            watched.update_from_line(line);
        }
        assert_eq!(
            watched,
            WatchedJob { job_id: Some("abc".to_owned()), groups: [13].into(), is_done: false }
        );
        watched.update_from_line("done");
        assert!(watched.is_done);
    }
}
