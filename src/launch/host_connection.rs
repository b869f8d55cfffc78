//! ringrun's connection to an agent or a relay on another host: through an ssh that ringrun has started, or through a channel of
//! a relay. Knows how it has ended.

use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::{Child, ChildStderr};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpid};

use super::agent_messages::TEXT_CHARS_MAX;
use super::frame_link::FrameLink;
use super::frames::FrameReader;
use super::ssh::{AgentStarter, SSH_FAILED};
use super::streams::OutputStream;
use crate::exit::Exit;

/// How long the program at the end may take to end after it has closed its output.
const PROGRAM_END_TIMEOUT: Duration = Duration::from_secs(2);

/// How the program has ended: its exit code, or `None` if a signal killed it.
#[derive(Clone, Copy, Debug)]
struct ProgramEnd(Option<i32>);

/// The ssh of a connection, if ringrun has started it.
#[derive(Debug)]
struct SshProcess {
    pid: Pid,
    stderr: ChildStderr,
}

/// The connection.
#[derive(Debug)]
pub(super) struct HostConnection {
    pub(super) link: FrameLink,
    /// `None` for a channel of a relay.
    ssh: Option<SshProcess>,
    /// The end of what ssh and the program at its end have printed to standard error.
    printed: Vec<u8>,
    /// How ssh has ended, or the agent on the host of the relay; `None` while it runs.
    program_end: Option<ProgramEnd>,
    /// Since when the output of the program is closed although the program has not ended.
    ended_since: Option<Instant>,
}

impl HostConnection {
    /// Takes over an ssh that ringrun has started.
    pub(super) fn of_ssh(mut ssh: Child, registry: &Registry, tokens: (Token, Token)) -> io::Result<Self> {
        let reader = OwnedFd::from(ssh.stdout.take().expect("stdout was set to a pipe"));
        let writer = OwnedFd::from(ssh.stdin.take().expect("stdin was set to a pipe"));
        let stderr = ssh.stderr.take().expect("stderr was set to a pipe");
        ioctl_fionbio(&stderr, true)?;
        registry.register(&mut SourceFd(&stderr.as_raw_fd()), tokens.0, Interest::READABLE)?;
        let link = FrameLink::new((reader, writer), FrameReader::of_agent())?;
        link.register(registry, tokens)?;
        let ssh = Some(SshProcess { pid: Pid::from_child(&ssh), stderr });
        Ok(Self { ssh, ..Self::of_link(link) })
    }

    /// Returns a connection through a channel of a relay.
    pub(super) fn of_channel() -> Self {
        Self::of_link(FrameLink::of_channel(FrameReader::of_agent()))
    }

    fn of_link(link: FrameLink) -> Self {
        Self { link, ssh: None, printed: Vec::new(), program_end: None, ended_since: None }
    }

    /// Returns the time at which [`Self::find_end`] must be called although nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ended_since.filter(|_| self.program_end.is_none()).map(|since| since + PROGRAM_END_TIMEOUT)
    }

    /// Records that ssh has ended if `pid` is this ssh.
    pub(super) fn handle_ended_child(&mut self, pid: Pid, code: Option<i32>) {
        if self.ssh.as_ref().is_some_and(|ssh| ssh.pid == pid) {
            self.program_end = Some(ProgramEnd(code));
        }
    }

    /// For a channel: records that the program at its end has ended, as the relay says.
    pub(super) fn handle_ended_program(&mut self, code: Option<i32>) {
        self.link.push_received(&[]);
        self.program_end = Some(ProgramEnd(code));
    }

    /// For a channel: takes bytes that the relay has passed on.
    pub(super) fn push_received(&mut self, stream: OutputStream, bytes: &[u8]) {
        match stream {
            OutputStream::Stdout => self.link.push_received(bytes),
            OutputStream::Stderr => self.keep_printed(bytes),
        }
    }

    /// Writes as much as is possible now, and reads what ssh has printed to standard error.
    pub(super) fn advance(&mut self) {
        self.link.flush();
        let mut buffer = [0; 4096];
        // A host that prints without end must not keep ringrun busy.
        for _ in 0..16 {
            let Some(ssh) = &mut self.ssh else { break };
            let Ok(count @ 1..) = ssh.stderr.read(&mut buffer) else { break };
            self.keep_printed(&buffer[..count]);
        }
    }

    fn keep_printed(&mut self, bytes: &[u8]) {
        self.printed.extend_from_slice(bytes);
        let surplus = self.printed.len().saturating_sub(TEXT_CHARS_MAX);
        self.printed.drain(..surplus);
    }

    /// Returns why the connection has ended, or `None` if this is not known yet. `has_greeted` says whether the agent or relay
    /// has said hello. `host` is the name of the host, and of the host that has run ssh if this is not the host of ringrun.
    pub(super) fn find_end(
        &mut self,
        has_greeted: bool,
        host: (&str, Option<&str>),
        starter: &AgentStarter,
    ) -> Option<(Exit, String)> {
        if !self.link.has_ended() {
            return None;
        }
        let since = *self.ended_since.get_or_insert_with(Instant::now);
        let printed = self.printed_text();
        match self.program_end {
            Some(ProgramEnd(code)) if !has_greeted => {
                Some((Exit::Start, starter.describe_failed_start(host, code, &printed)))
            }
            Some(ProgramEnd(code)) => {
                let reason = match code {
                    Some(SSH_FAILED) => "the connection broke: ssh ended with exit code 255".to_owned(),
                    Some(code) => format!("its agent ended with exit code {code}"),
                    None => "a signal killed its ssh".to_owned(),
                };
                let printed = if printed.is_empty() { printed } else { format!(": {printed}") };
                Some((Exit::PeerLost, reason + &printed))
            }
            None if since.elapsed() >= PROGRAM_END_TIMEOUT => {
                Some((Exit::PeerLost, "its agent closed the connection".to_owned()))
            }
            None => None,
        }
    }

    /// Returns what ssh and the other host have printed, in one line.
    fn printed_text(&self) -> String {
        let text = [self.link.text_before_magic().unwrap_or_default(), &self.printed].concat();
        let start = text.len().saturating_sub(TEXT_CHARS_MAX);
        let text = printable(&String::from_utf8_lossy(&text[start..]));
        // The sentence continues after this text.
        let lines = text.lines().map(|line| line.trim().trim_end_matches('.'));
        lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// Waits until the ssh that ringrun has started has ended, at most until `deadline`, and then kills it.
    pub(super) fn end_ssh(&mut self, deadline: Instant) {
        let Some(ssh) = self.ssh.as_ref().map(|ssh| ssh.pid) else { return };
        while self.program_end.is_none() {
            // The job's thread reaps all children, so this ssh may have been reaped already.
            match waitpid(Some(ssh), WaitOptions::NOHANG) {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => {
                    let _ = kill_process_group(ssh, Signal::KILL);
                    let _ = waitpid(Some(ssh), WaitOptions::empty());
                    self.program_end = Some(ProgramEnd(None));
                }
                Ok(Some((_, status))) => self.program_end = Some(ProgramEnd(status.exit_status())),
                Err(_) => self.program_end = Some(ProgramEnd(None)),
            }
        }
    }
}

/// Returns a text of another host without control characters, and not too long.
pub(super) fn printable(text: &str) -> String {
    let clean =
        |c: char| if c.is_control() && c != '\n' && c != '\t' { char::REPLACEMENT_CHARACTER } else { c };
    // ssh ends its lines with a carriage return and a newline.
    text.chars().take(TEXT_CHARS_MAX).filter(|&c| c != '\r').map(clean).collect()
}
