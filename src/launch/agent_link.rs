//! ringrun's side of one agent: what the agent has said, and the limits on what it may say.

use std::net::IpAddr;
use std::sync::Arc;

use super::agent_messages::{AgentHello, FromAgent, OUTPUT_CREDIT_BYTES, ToAgent};
use super::error::HostError;
use super::frames::{AgentFrame, encode_input, encode_message};
use super::host_connection::{HostConnection, printable};
use super::message::LaunchMessage;
use super::outcome::{RankEnd, RankPlace};
use super::output_messages::OutputCommandSender;
use super::plan::RemoteHost;
use super::relay_link::check_version;
use super::ssh::AgentStarter;
use crate::exit::Exit;
use crate::types::Rank;
use crate::wire::{EXIT_RECORD_BYTES_MAX, ExitRecord};

/// The most messages for the user that ringrun prints for one host, in addition to one for each rank.
const NOTES_MAX: usize = 16;

/// A rank has a standard output and a standard error.
const STREAMS_PER_RANK: usize = 2;

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

/// ringrun's side of one agent.
#[derive(Debug)]
pub(super) struct AgentLink {
    pub(super) host: RemoteHost,
    /// The host that reaches this host through ssh; `None` if ringrun itself does.
    pub(super) via: Option<Arc<str>>,
    pub(super) phase: AgentPhase,
    /// What the agent has said about itself, after [`AgentPhase::Greeted`].
    pub(super) hello: Option<AgentHello>,
    /// The address of the host and a free port, after [`AgentPhase::Ready`].
    pub(super) master: Option<(IpAddr, u16)>,
    /// The exit records that the agent has sent.
    pub(super) records: Vec<(Rank, ExitRecord)>,
    /// Why the agent is lost; `None` while it is not lost.
    pub(super) failure: Option<HostError>,
    pub(super) connection: HostConnection,
    starter: Arc<AgentStarter>,
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
    pub(super) fn new(
        host: RemoteHost,
        via: Option<Arc<str>>,
        connection: HostConnection,
        starter: Arc<AgentStarter>,
    ) -> Self {
        let running = host.share.ranks().collect();
        Self {
            host,
            via,
            phase: AgentPhase::Connecting,
            hello: None,
            master: None,
            records: Vec::new(),
            failure: None,
            connection,
            starter,
            pids: Vec::new(),
            running,
            unprinted_bytes: 0,
            note_count: 0,
            ended_stream_count: 0,
            input_sent: 0,
            input_taken: None,
        }
    }

    /// Returns whether there is more to read at once.
    pub(super) fn is_readable(&self) -> bool {
        self.failure.is_none() && self.connection.link.is_readable()
    }

    /// Returns whether ringrun still has output of the host that it has not printed.
    pub(super) fn has_unprinted_output(&self) -> bool {
        self.unprinted_bytes > 0
    }

    pub(super) fn send(&mut self, message: &ToAgent) {
        if self.failure.is_none() {
            self.connection.link.send(&encode_message(message));
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
            self.connection.link.send(&encode_input(bytes));
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

    /// Reads and writes as much as is possible now, and returns the ranks that have ended. Passes output to `output`, marked
    /// with the number of this agent, `index`.
    pub(super) fn advance(&mut self, index: usize, output: &OutputCommandSender) -> Vec<(Rank, RankEnd)> {
        let mut ended_ranks = Vec::new();
        if self.failure.is_none() {
            self.connection.advance();
            let result = self.connection.link.receive().and_then(|frames| {
                frames
                    .into_iter()
                    .try_for_each(|frame| self.handle_frame(frame, index, output, &mut ended_ranks))
            });
            if let Err(reason) = result {
                self.fail(Exit::Protocol, reason);
            } else if self.phase != AgentPhase::Finished {
                let has_greeted = self.phase > AgentPhase::Connecting;
                let host = (&*self.host.name, self.via.as_deref());
                if let Some((exit, reason)) = self.connection.find_end(has_greeted, host, &self.starter) {
                    self.fail(exit, reason);
                }
            }
        }
        if self.failure.is_some() {
            ended_ranks.extend(self.running.drain(..).map(|rank| (rank, RankEnd::HostLost)));
        }
        ended_ranks
    }

    /// Gives the agent up.
    pub(super) fn fail(&mut self, exit: Exit, reason: String) {
        self.refuse(exit as u8, reason);
        self.connection.link.close();
    }

    fn refuse(&mut self, exit_code: u8, reason: String) {
        let (host, via) = (self.host.name.clone(), self.via.clone());
        self.failure.get_or_insert(HostError { host, via, exit_code, reason });
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
            AgentFrame::Input(_) | AgentFrame::Relayed { .. } => {
                Err("it sent a frame that an agent may not send".to_owned())
            }
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
                if let Err(reason) = check_version(&hello.version) {
                    self.fail(Exit::Version, reason);
                }
                (self.hello, self.phase) = (Some(hello), AgentPhase::Greeted);
            }
            (AgentPhase::Greeted, FromAgent::Ready { address, master_port }) => {
                (self.master, self.phase) = (Some((address, master_port)), AgentPhase::Ready);
            }
            (AgentPhase::Greeted | AgentPhase::Ready, FromAgent::Refused { exit_code, reason }) => {
                self.refuse(exit_code.max(1), printable(&reason));
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
}
