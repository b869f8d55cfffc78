//! The ranks' processes: starting them, seeing them end, and leaving nothing behind.
//!
//! Each rank leads a process group, so that the processes that it starts can be killed with it. ringrun is also the reaper of its
//! descendants: those that leave their group, or lose their parent, become its children and are found in the end.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, set_child_subreaper, wait, waitid,
    waitpid,
};
use signal_hook::consts::SIGKILL;

use super::outcome::RankEnd;
use super::processes;
use super::shim::ShimSocket;
use super::watchdog::Watchdog;
use crate::types::Rank;

/// The process of one rank.
#[derive(Debug)]
struct RankProcess {
    pid: Pid,
    line: ShimSocket,
    running: bool,
}

/// All processes of the job. Dropping it kills them.
#[derive(Debug)]
pub(super) struct RankProcesses {
    processes: Vec<RankProcess>,
    watchdog: Watchdog,
    watchdog_ended: bool,
}

/// The streams of a rank that has been started.
#[derive(Debug)]
pub(super) struct RankStreams {
    pub(super) stdout: ChildStdout,
    pub(super) stderr: ChildStderr,
}

impl RankProcesses {
    pub(super) fn new(watchdog: Watchdog) -> Self {
        // Refused by some sandboxes: descendants that leave their group are then the watchdog's affair alone.
        let _ = set_child_subreaper(Some(getpid()));
        Self { processes: Vec::new(), watchdog, watchdog_ended: false }
    }

    /// Starts the next rank. It must be called on a thread that lives as long as the job: the kernel ties a child's request to
    /// die with its parent to the parent's thread.
    pub(super) fn start(&mut self, mut command: Command) -> io::Result<RankStreams> {
        let (line, theirs) = ShimSocket::pair()?;
        let mut child =
            command.stdin(theirs).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()?;
        // Our copy of the rank's end of the socket goes with the command.
        drop(command);
        let pid = Pid::from_child(&child);
        self.watchdog.add(pid);
        line.go();
        self.processes.push(RankProcess { pid, line, running: true });
        let stdout = child.stdout.take().expect("its stdout was asked for");
        let stderr = child.stderr.take().expect("its stderr was asked for");
        Ok(RankStreams { stdout, stderr })
    }

    /// The processes' numbers, by rank.
    pub(super) fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.pid.as_raw_nonzero().get()).collect()
    }

    /// Sends `signal` to the group of each rank that still runs.
    pub(super) fn signal(&self, signal: i32) {
        for process in self.processes.iter().filter(|process| process.running) {
            processes::signal_group(process.pid, signal);
        }
    }

    /// The ranks that have ended since the last call. What a rank leaves in its process group is killed.
    pub(super) fn reap(&mut self) -> Vec<(Rank, RankEnd)> {
        let mut batch = Vec::new();
        for index in 0..self.processes.len() {
            let process = &self.processes[index];
            if !process.running {
                continue;
            }
            // Only looked at, not yet reaped: until then neither its number nor its group's can come to mean another.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            let Ok(Some(status)) = retry(|| waitid(WaitId::Pid(process.pid), options)) else { continue };
            let pid = process.pid;
            let ended = self.bury(index, status.exit_status(), status.terminating_signal());
            let _ = retry(|| waitpid(Some(pid), WaitOptions::NOHANG));
            batch.push((Rank::new(index as u32), ended));
        }
        self.reap_orphans(&mut batch);
        batch
    }

    /// Reaps what has become our child because its own parent ended.
    fn reap_orphans(&mut self, batch: &mut Vec<(Rank, RankEnd)>) {
        while let Ok(Some((pid, status))) = retry(|| wait(WaitOptions::NOHANG)) {
            if pid == self.watchdog.pid() {
                self.watchdog_ended = true;
                self.watchdog.lost();
            }
            // A rank that ended since we looked.
            let found = self.processes.iter().position(|process| process.running && process.pid == pid);
            if let Some(index) = found {
                let ended = self.bury(index, status.exit_status(), status.terminating_signal());
                batch.push((Rank::new(index as u32), ended));
            }
        }
    }

    /// A rank has ended: kills the rest of its group and says how it ended.
    fn bury(&mut self, index: usize, code: Option<i32>, signal: Option<i32>) -> RankEnd {
        let process = &mut self.processes[index];
        process.running = false;
        processes::signal_group(process.pid, SIGKILL);
        self.watchdog.remove(process.pid);
        match (process.line.exec_error(), code) {
            (Some(errno), _) => RankEnd::NotRun(errno),
            (None, Some(code)) => RankEnd::Exited(code as u8),
            (None, None) => RankEnd::Killed(signal.unwrap_or(SIGKILL)),
        }
    }

    /// Whether the watchdog ended before its time.
    pub(super) fn watchdog_ended(&self) -> bool {
        self.watchdog_ended
    }

    /// Kills what the ranks have left behind outside of their groups, and says how many there were, including dead ones that were
    /// not waited for. To be called again, after the next SIGCHLD and `reap`, until there are none: a killed process hands
    /// its children to us.
    ///
    /// They are our children and only we reap them, so their numbers cannot come to mean others.
    pub(super) fn kill_leftovers(&self) -> usize {
        let watchdog = self.watchdog.pid();
        let leftovers = processes::children(getpid());
        leftovers.iter().filter(|&&pid| pid != watchdog && kill_process(pid, Signal::KILL).is_ok()).count()
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        self.signal(SIGKILL);
        if self.processes.iter().all(|process| !process.running) && !self.watchdog_ended {
            self.watchdog.dismiss();
        }
    }
}

/// A call that a signal interrupts is made again.
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
