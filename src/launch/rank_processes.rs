//! Starts the processes of the ranks, detects when they end, and kills all processes that the ranks have started.
//!
//! Each rank leads a process group, so that ringrun can kill a rank together with the processes that the rank has
//! started. ringrun is also the subreaper of its descendants: a process whose parent has ended becomes a child of
//! ringrun, even if the process has left the process group of its rank.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::{io, mem};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, set_child_subreaper, wait, waitid,
    waitpid,
};
use signal_hook::consts::SIGKILL;

use super::exit_pipe::ExitPipe;
use super::outcome::RankEnd;
use super::processes;
use super::shim::ShimSocket;
use super::watchdog::Watchdog;
use crate::types::Rank;
use crate::wire::ExitRecord;

/// The process of one rank.
#[derive(Debug)]
struct RankProcess {
    pid: Pid,
    shim_socket: ShimSocket,
    exit_pipe: ExitPipe,
    is_running: bool,
}

/// The processes of all ranks, and the watchdog. Dropping this value kills the ranks that still run.
#[derive(Debug)]
pub(super) struct RankProcesses {
    processes: Vec<RankProcess>,
    /// The ranks of this host. The first processes of `processes` are the lowest ranks.
    ranks: Vec<Rank>,
    /// The programs that [`Self::start_helper`] has started and that still run.
    helpers: Vec<Pid>,
    /// The helpers that have ended, with their exit codes. The code is `None` if a signal killed the helper.
    ended_helpers: Vec<(Pid, Option<i32>)>,
    watchdog: Watchdog,
    watchdog_ended: bool,
}

/// The output streams of a rank that has been started.
#[derive(Debug)]
pub(super) struct RankStreams {
    pub(super) stdout: ChildStdout,
    pub(super) stderr: ChildStderr,
}

impl RankProcesses {
    /// Prepares the start of these ranks, which are in ascending order.
    pub(super) fn new(watchdog: Watchdog, ranks: Vec<Rank>) -> Self {
        // In a sandbox that refuses `set_child_subreaper`, only the watchdog kills descendants that have left their
        // process group.
        let _ = set_child_subreaper(Some(getpid()));
        Self {
            processes: Vec::new(),
            ranks,
            helpers: Vec::new(),
            ended_helpers: Vec::new(),
            watchdog,
            watchdog_ended: false,
        }
    }

    /// Starts the lowest rank that has not been started yet. `stdin` is the standard input of the rank; `None` stands for
    /// `/dev/null`. Call this function on a thread that lives as long as the job: the kernel kills each rank when its
    /// parent dies, and for the kernel, the parent is the thread that started the rank.
    pub(super) fn start_rank(
        &mut self,
        mut command: Command,
        stdin: Option<BorrowedFd<'_>>,
    ) -> io::Result<RankStreams> {
        let (shim_socket, shim_stdin) = ShimSocket::new_pair()?;
        let (exit_pipe, write_end) = ExitPipe::new()?;
        let mut child = command
            .stdin(shim_stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        // `command` holds a copy of the shim's end of the socket. Close the copy, so that only the shim has this end
        // (see `shim.rs`).
        drop(command);
        let pid = Pid::from_child(&child);
        self.watchdog.watch_group(pid);
        let permission = shim_socket.allow_exec(write_end.as_fd(), stdin);
        // If `allow_exec` failed, dropping `self` kills the shim.
        self.processes.push(RankProcess { pid, shim_socket, exit_pipe, is_running: true });
        permission?;
        let stdout = child.stdout.take().expect("stdout was set to a pipe");
        let stderr = child.stderr.take().expect("stderr was set to a pipe");
        Ok(RankStreams { stdout, stderr })
    }

    /// Returns the process id of each rank, in rank order.
    pub(super) fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.pid.as_raw_nonzero().get()).collect()
    }

    /// Returns the exit records that ranks have written. Call this function once, after the ranks have ended.
    pub(super) fn read_exit_records(&self) -> Vec<(Rank, ExitRecord)> {
        let ranks = self.ranks.iter().copied();
        let records =
            ranks.zip(&self.processes).map(|(rank, process)| (rank, process.exit_pipe.read_record(rank)));
        records.filter_map(|(rank, record)| Some((rank, record?))).collect()
    }

    /// Starts a program that is not a rank, in a process group of its own, so that Ctrl-C does not reach it. The watchdog kills
    /// the group if ringrun is killed.
    pub(super) fn start_helper(&mut self, command: &mut Command) -> io::Result<Child> {
        let child = command.process_group(0).spawn()?;
        let pid = Pid::from_child(&child);
        self.watchdog.watch_group(pid);
        self.helpers.push(pid);
        Ok(child)
    }

    /// Returns the helpers that have ended since the last call, with their exit codes. The code is `None` if a signal killed the
    /// helper.
    pub(super) fn take_ended_helpers(&mut self) -> Vec<(Pid, Option<i32>)> {
        mem::take(&mut self.ended_helpers)
    }

    /// Sends `signal` to the process group of each rank that still runs.
    pub(super) fn send_signal(&self, signal: i32) {
        for process in self.processes.iter().filter(|process| process.is_running) {
            processes::signal_group(process.pid, signal);
        }
    }

    /// Reaps the ranks that have ended since the last call, and returns how each of them ended. Kills the processes
    /// that remain in the process groups of these ranks.
    pub(super) fn reap_ended_ranks(&mut self) -> Vec<(Rank, RankEnd)> {
        let mut ended_ranks = Vec::new();
        for index in 0..self.processes.len() {
            let process = &self.processes[index];
            if !process.is_running {
                continue;
            }
            // With NOWAIT the ended process is not reaped. Its process id is therefore not reused before ringrun has
            // killed the rest of its process group.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            let Ok(Some(status)) = retry_interrupted(|| waitid(WaitId::Pid(process.pid), options)) else {
                continue;
            };
            let pid = process.pid;
            let ended = self.record_rank_end(index, status.exit_status(), status.terminating_signal());
            let _ = retry_interrupted(|| waitpid(Some(pid), WaitOptions::NOHANG));
            ended_ranks.push((self.rank(index), ended));
        }
        self.reap_orphans(&mut ended_ranks);
        ended_ranks
    }

    /// Reaps processes that became children of ringrun because their own parent ended.
    fn reap_orphans(&mut self, ended_ranks: &mut Vec<(Rank, RankEnd)>) {
        while let Ok(Some((pid, status))) = retry_interrupted(|| wait(WaitOptions::NOHANG)) {
            if pid == self.watchdog.pid() {
                self.watchdog_ended = true;
                self.watchdog.close_pipe();
            }
            // `pid` may be a rank that ended after `reap_ended_ranks` checked it.
            let found = self.processes.iter().position(|process| process.is_running && process.pid == pid);
            if let Some(index) = found {
                let ended = self.record_rank_end(index, status.exit_status(), status.terminating_signal());
                ended_ranks.push((self.rank(index), ended));
            } else if let Some(index) = self.helpers.iter().position(|&helper| helper == pid) {
                self.helpers.swap_remove(index);
                self.watchdog.forget_group(pid);
                self.ended_helpers.push((pid, status.exit_status()));
            }
        }
    }

    fn rank(&self, index: usize) -> Rank {
        self.ranks[index]
    }

    /// Records that a rank has ended, kills the rest of its process group, and returns how the rank ended.
    fn record_rank_end(&mut self, index: usize, code: Option<i32>, signal: Option<i32>) -> RankEnd {
        let process = &mut self.processes[index];
        process.is_running = false;
        processes::signal_group(process.pid, SIGKILL);
        self.watchdog.forget_group(process.pid);
        match (process.shim_socket.exec_error(), code) {
            (Some(errno), _) => RankEnd::NotRun(errno),
            (None, Some(code)) => RankEnd::Exited(code as u8),
            (None, None) => RankEnd::Killed(signal.unwrap_or(SIGKILL)),
        }
    }

    /// Returns whether the watchdog ended unexpectedly.
    pub(super) fn watchdog_ended(&self) -> bool {
        self.watchdog_ended
    }

    /// Kills processes that the ranks have left behind outside their process groups, and returns the number of these
    /// processes, including zombies. The children of a killed process become children of ringrun. Therefore call this
    /// function again after the next SIGCHLD and [`Self::reap_ended_ranks`], until the number is 0.
    ///
    /// Only ringrun reaps these processes, so no other process can get their process ids before they are reaped.
    pub(super) fn kill_leftover_processes(&self) -> usize {
        let watchdog = self.watchdog.pid();
        let leftovers = processes::find_children(getpid());
        leftovers.iter().filter(|&&pid| pid != watchdog && kill_process(pid, Signal::KILL).is_ok()).count()
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        self.send_signal(SIGKILL);
        if self.processes.iter().all(|process| !process.is_running) && !self.watchdog_ended {
            self.watchdog.end_watchdog();
        }
    }
}

/// Repeats a system call that a signal interrupts (`EINTR`).
fn retry_interrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
