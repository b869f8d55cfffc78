//! ringrun's side of one agent: the ssh that runs it, what the agent has said, and the limits on what it may say.

use std::io::{self, Read as _};
use std::net::IpAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::{Child, ChildStderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpid};

use super::agent_messages::{AgentHello, FromAgent, OUTPUT_CREDIT_BYTES, TEXT_CHARS_MAX, ToAgent};
use super::error::HostError;
use super::frame_link::FrameLink;
use super::frames::{AgentFrame, FrameReader, encode_input, encode_message};
use super::message::LaunchMessage;
use super::outcome::{RankEnd, RankPlace};
use super::output_messages::OutputCommandSender;
use super::plan::RemoteHost;
use super::ssh::AgentStarter;
use crate::exit::Exit;
use crate::types::Rank;
use crate::wire::{EXIT_RECORD_BYTES_MAX, ExitRecord};

/// The most messages for the user that ringrun prints for one host, in addition to one for each rank.
const NOTES_MAX: usize = 16;

/// A rank has a standard output and a standard error.
const STREAMS_PER_RANK: usize = 2;

/// How long ssh may take to end after the agent has closed its output.
const SSH_END_TIMEOUT: Duration = Duration::from_secs(2);

/// How far the start of an agent has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum AgentPhase {
    /// ssh connects.
    Connecting,
    /// The agent has said hello.
    Greeted,
    /// The agent has found the directory and the program.
    Ready,
    /// The ranks run.
    Started,
    /// All ranks have ended, and the agent has sent everything.
    Finished,
}

/// How ssh has ended: its exit code, or `None` if a signal killed it.
#[derive(Clone, Copy, Debug)]
struct SshEnd(Option<i32>);

/// ringrun's side of one agent.
#[derive(Debug)]
pub(super) struct AgentLink {
    pub(super) host: RemoteHost,
    pub(super) phase: AgentPhase,
    /// What the agent has said about itself, after [`AgentPhase::Greeted`].
    pub(super) hello: Option<AgentHello>,
    /// The address of the host and a free port, after [`AgentPhase::Ready`].
    pub(super) master: Option<(IpAddr, u16)>,
    /// The exit records that the agent has sent.
    pub(super) records: Vec<(Rank, ExitRecord)>,
    /// Why the agent is lost; `None` while it is not lost.
    pub(super) failure: Option<HostError>,
    link: FrameLink,
    starter: Arc<AgentStarter>,
    ssh: Pid,
    stderr: ChildStderr,
    /// The end of what ssh has printed.
    printed: Vec<u8>,
    /// How ssh has ended; `None` while it runs.
    ssh_end: Option<SshEnd>,
    /// Since when the output of the agent is closed although ssh has not ended.
    ended_since: Option<Instant>,
    pids: Vec<i32>,
    /// The ranks of the host whose end has not been reported.
    running: Vec<Rank>,
    /// The bytes of output that ringrun has received and not printed yet.
    unprinted_bytes: usize,
    note_count: usize,
    /// The number of streams of ranks that have ended.
    ended_stream_count: usize,
    /// The bytes of the standard input that ringrun has sent, and those that the ranks have taken; `None` if no rank of the host
    /// reads it.
    input_sent: u64,
    input_taken: Option<u64>,
}

impl AgentLink {
    /// Takes over the ssh that `starter` has started.
    pub(super) fn new(
        host: RemoteHost,
        starter: Arc<AgentStarter>,
        mut ssh: Child,
        registry: &Registry,
        tokens: (Token, Token),
    ) -> io::Result<Self> {
        let reader = OwnedFd::from(ssh.stdout.take().expect("stdout was set to a pipe"));
        let writer = OwnedFd::from(ssh.stdin.take().expect("stdin was set to a pipe"));
        let stderr = ssh.stderr.take().expect("stderr was set to a pipe");
        ioctl_fionbio(&stderr, true)?;
        registry.register(&mut SourceFd(&stderr.as_raw_fd()), tokens.0, Interest::READABLE)?;
        let link = FrameLink::new((reader, writer), FrameReader::of_agent())?;
        link.register(registry, tokens)?;
        let running = host.share.ranks().collect();
        Ok(Self {
            host,
            phase: AgentPhase::Connecting,
            hello: None,
            master: None,
            records: Vec::new(),
            failure: None,
            link,
            starter,
            ssh: Pid::from_child(&ssh),
            stderr,
            printed: Vec::new(),
            ssh_end: None,
            ended_since: None,
            pids: Vec::new(),
            running,
            unprinted_bytes: 0,
            note_count: 0,
            ended_stream_count: 0,
            input_sent: 0,
            input_taken: None,
        })
    }

    pub(super) fn mark_readable(&mut self) {
        self.link.mark_readable();
    }

    /// Returns whether there is more to read at once.
    pub(super) fn is_readable(&self) -> bool {
        self.failure.is_none() && self.link.is_readable()
    }

    /// Returns whether ringrun still has output of the host that it has not printed.
    pub(super) fn has_unprinted_output(&self) -> bool {
        self.unprinted_bytes > 0
    }

    /// Returns the time at which [`Self::advance`] must be called although nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ended_since.filter(|_| self.ssh_end.is_none()).map(|since| since + SSH_END_TIMEOUT)
    }

    pub(super) fn send(&mut self, message: &ToAgent) {
        if self.failure.is_none() {
            self.link.send(&encode_message(message));
        }
    }

    /// Allows the agent to send as many bytes as ringrun has printed.
    pub(super) fn add_credit(&mut self, bytes: usize) {
        self.unprinted_bytes = self.unprinted_bytes.saturating_sub(bytes);
        self.send(&ToAgent::OutputCredit(bytes));
    }

    /// Records that ranks of the host read the standard input of ringrun.
    pub(super) fn expect_input(&mut self) {
        self.input_taken = Some(0);
    }

    /// Sends a part of the standard input if ranks of the host read it. No bytes mean that the input has ended.
    pub(super) fn send_input(&mut self, bytes: &[u8]) {
        if self.failure.is_none() && self.input_taken.is_some() {
            self.input_sent += bytes.len() as u64;
            self.link.send(&encode_input(bytes));
        }
    }

    /// Returns how many bytes of the standard input the ranks of the host have taken, or `None` if none of them reads it.
    pub(super) fn input_taken(&self) -> Option<u64> {
        self.input_taken.filter(|_| self.failure.is_none() && self.phase != AgentPhase::Finished)
    }

    /// Returns the place of each rank of the host, for messages.
    pub(super) fn places(&self) -> impl Iterator<Item = RankPlace> {
        self.pids.iter().map(|&pid| RankPlace { pid, host: Some(self.host.name.clone()) })
    }

    /// Records that ssh has ended if `pid` is this ssh.
    pub(super) fn handle_ended_child(&mut self, pid: Pid, code: Option<i32>) {
        if pid == self.ssh {
            self.ssh_end = Some(SshEnd(code));
        }
    }

    /// Reads and writes as much as is possible now, and returns the ranks that have ended. Passes output to `output`, marked
    /// with the number of this agent, `index`.
    pub(super) fn advance(&mut self, index: usize, output: &OutputCommandSender) -> Vec<(Rank, RankEnd)> {
        let mut ended_ranks = Vec::new();
        if self.failure.is_some() {
            return ended_ranks;
        }
        self.link.flush();
        self.read_stderr();
        let result = self.link.receive().and_then(|frames| {
            frames.into_iter().try_for_each(|frame| self.handle_frame(frame, index, output, &mut ended_ranks))
        });
        if let Err(reason) = result {
            self.fail(Exit::Protocol, reason);
        } else if self.link.has_ended() && self.phase != AgentPhase::Finished {
            self.handle_end();
        }
        if self.failure.is_some() {
            ended_ranks.extend(self.running.drain(..).map(|rank| (rank, RankEnd::HostLost)));
        }
        ended_ranks
    }

    /// Keeps the end of what ssh and the agent print to standard error.
    fn read_stderr(&mut self) {
        let mut buffer = [0; 4096];
        // A host that prints without end must not keep ringrun busy.
        for _ in 0..16 {
            let Ok(count @ 1..) = self.stderr.read(&mut buffer) else { break };
            self.printed.extend_from_slice(&buffer[..count]);
            let surplus = self.printed.len().saturating_sub(TEXT_CHARS_MAX);
            self.printed.drain(..surplus);
        }
    }

    /// Waits for the exit code of ssh after the agent has closed its output, and then reports the failure.
    fn handle_end(&mut self) {
        let since = *self.ended_since.get_or_insert_with(Instant::now);
        let printed = self.printed_text();
        if let Some(SshEnd(code)) = self.ssh_end
            && self.phase == AgentPhase::Connecting
        {
            let reason = self.starter.describe_failed_start(&self.host.name, code, &printed);
            self.fail(Exit::Start, reason);
        } else if let Some(SshEnd(code)) = self.ssh_end {
            let reason = match code {
                Some(255) => "the connection broke: ssh ended with exit code 255".to_owned(),
                Some(code) => format!("its agent ended with exit code {code}"),
                None => "a signal killed its ssh".to_owned(),
            };
            let printed = if printed.is_empty() { printed } else { format!(": {printed}") };
            self.fail(Exit::PeerLost, reason + &printed);
        } else if since.elapsed() >= SSH_END_TIMEOUT {
            self.fail(Exit::PeerLost, "its agent closed the connection".to_owned());
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

    /// Gives the agent up.
    pub(super) fn fail(&mut self, exit: Exit, reason: String) {
        let host = self.host.name.clone();
        self.failure.get_or_insert(HostError { host, exit_code: exit as u8, reason });
        self.link.close();
    }

    fn handle_frame(
        &mut self,
        frame: AgentFrame,
        index: usize,
        output: &OutputCommandSender,
        ended_ranks: &mut Vec<(Rank, RankEnd)>,
    ) -> Result<(), String> {
        match frame {
            AgentFrame::Output { rank, stream, bytes } => {
                self.check_rank(rank)?;
                self.unprinted_bytes += bytes.len();
                self.ended_stream_count += usize::from(bytes.is_empty());
                if self.unprinted_bytes > OUTPUT_CREDIT_BYTES
                    || self.ended_stream_count > STREAMS_PER_RANK * self.host.share.count() as usize
                {
                    return Err("it sent more output than ringrun has allowed".to_owned());
                }
                output.add_remote_bytes(index, rank, stream, bytes);
                Ok(())
            }
            AgentFrame::Input(_) => Err("it sent standard input".to_owned()),
            AgentFrame::Message(body) => self.handle_message(AgentFrame::parse(&body)?, output, ended_ranks),
        }
    }

    fn handle_message(
        &mut self,
        message: FromAgent,
        output: &OutputCommandSender,
        ended_ranks: &mut Vec<(Rank, RankEnd)>,
    ) -> Result<(), String> {
        match (self.phase, message) {
            (AgentPhase::Connecting, FromAgent::Hello(hello)) => {
                let own = env!("CARGO_PKG_VERSION");
                if hello.version != own {
                    let version = printable(&hello.version);
                    let reason = format!(
                        "its ringrun has the version {version}, and this ringrun has the version {own}; install the same \
                         version on all hosts"
                    );
                    self.fail(Exit::Version, reason);
                }
                (self.hello, self.phase) = (Some(hello), AgentPhase::Greeted);
            }
            (AgentPhase::Greeted, FromAgent::Ready { address, master_port }) => {
                (self.master, self.phase) = (Some((address, master_port)), AgentPhase::Ready);
            }
            (AgentPhase::Greeted | AgentPhase::Ready, FromAgent::Refused { exit_code, reason }) => {
                let (host, reason) = (self.host.name.clone(), printable(&reason));
                self.failure = Some(HostError { host, exit_code: exit_code.max(1), reason });
            }
            (AgentPhase::Ready, FromAgent::Started { pids })
                if pids.len() == self.host.share.count() as usize =>
            {
                (self.pids, self.phase) = (pids, AgentPhase::Started);
            }
            (
                AgentPhase::Greeted | AgentPhase::Ready | AgentPhase::Started,
                FromAgent::Note { level, text },
            ) if self.note_count < NOTES_MAX + self.host.share.count() as usize => {
                self.note_count += 1;
                let text = format!("host {}: {}", self.host.name, printable(&text));
                output.print_message(LaunchMessage::new(level, text).on_host(Some(&self.host.name)));
            }
            (AgentPhase::Started, FromAgent::Ended { rank, end }) => {
                let rank = Rank::new(rank);
                let index = self.running.iter().position(|&running| running == rank);
                self.running.swap_remove(index.ok_or("it said that a rank has ended that does not run")?);
                ended_ranks.push((rank, end));
            }
            (AgentPhase::Started, FromAgent::InputTaken(taken))
                if taken.is_none_or(|taken| taken <= self.input_sent) =>
            {
                self.input_taken = taken.filter(|_| self.input_taken.is_some());
            }
            (AgentPhase::Started, FromAgent::Record { rank, record }) => {
                let rank = Rank::new(rank);
                self.check_rank(rank)?;
                if record.len() > EXIT_RECORD_BYTES_MAX
                    || self.records.iter().any(|&(known, _)| known == rank)
                {
                    return Err(
                        "it sent an exit record that is too long, or a second one of a rank".to_owned()
                    );
                }
                self.records.extend(ExitRecord::decode_last(&record).map(|record| (rank, record)));
            }
            (AgentPhase::Started, FromAgent::Finished) if self.running.is_empty() => {
                self.phase = AgentPhase::Finished;
            }
            (phase, message) => {
                let text: String = format!("{message:?}").chars().take(200).collect();
                return Err(format!(
                    "it sent a message that is not allowed now ({phase:?}): {}",
                    printable(&text)
                ));
            }
        }
        Ok(())
    }

    fn check_rank(&self, rank: Rank) -> Result<(), String> {
        let is_own = self.host.share.contains(rank);
        if is_own {
            Ok(())
        } else {
            Err(format!("it sent something of rank {rank}, which runs on another host"))
        }
    }

    /// Ends the connection. The agent then stops the ranks that still run.
    pub(super) fn close(&mut self) {
        self.link.close();
    }

    /// Waits until ssh has ended, at most until `deadline`, and then kills it.
    pub(super) fn end_ssh(&mut self, deadline: Instant) {
        while self.ssh_end.is_none() {
            // The job's thread reaps all children, so this ssh may have been reaped already.
            match waitpid(Some(self.ssh), WaitOptions::NOHANG) {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => {
                    let _ = kill_process_group(self.ssh, Signal::KILL);
                    let _ = waitpid(Some(self.ssh), WaitOptions::empty());
                    self.ssh_end = Some(SshEnd(None));
                }
                Ok(Some((_, status))) => self.ssh_end = Some(SshEnd(status.exit_status())),
                Err(_) => self.ssh_end = Some(SshEnd(None)),
            }
        }
    }
}

/// Returns a text of another host without control characters, and not too long.
fn printable(text: &str) -> String {
    let clean =
        |c: char| if c.is_control() && c != '\n' && c != '\t' { char::REPLACEMENT_CHARACTER } else { c };
    // ssh ends its lines with a carriage return and a newline.
    text.chars().take(TEXT_CHARS_MAX).filter(|&c| c != '\r').map(clean).collect()
}
