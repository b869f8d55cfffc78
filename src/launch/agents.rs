//! The agents on the other hosts of a job. Together with the processes of this host, they are the sources of the events of the
//! job.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Registry, Token};
use rustix::process::Pid;

use super::agent_link::{AgentLink, AgentPhase};
use super::agent_messages::ToAgent;
use super::error::{HostError, LaunchError};
use super::host_connection::HostConnection;
use super::interfaces::{InterfaceFilter, choose_address};
use super::outcome::{RankEnd, RankPlace};
use super::output_messages::OutputCommandSender;
use super::plan::{RemoteHost, StdinReader};
use super::rank_processes::RankProcesses;
use super::relays::Relays;
use super::ssh::{AgentStarter, ssh_command};
use crate::exit::Exit;
use crate::rendezvous::{machine_id, source_address};
use crate::types::Rank;
use crate::wire::ExitRecord;

/// The tokens from this number belong to agents. The numbers below belong to the job's other events.
const FIRST_AGENT_TOKEN: usize = 1 << 16;

/// How long ringrun waits, at the end of a job, for the programs ssh to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// All agents of a job. Dropping this value ends the connections, so the agents stop the ranks that still run.
#[derive(Default, Debug)]
pub(super) struct Agents {
    links: Vec<AgentLink>,
    relays: Relays,
}

impl Agents {
    /// Starts an ssh for each host that ringrun itself reaches. The others are reached through relays.
    pub(super) fn start(
        hosts: &[RemoteHost],
        starter: AgentStarter,
        processes: &mut RankProcesses,
        registry: &Registry,
    ) -> Result<Self, LaunchError> {
        let starter = Arc::new(starter);
        let connect = |index: usize, arguments: &[OsString]| {
            let ssh = processes.start_helper(&mut ssh_command(arguments)).map_err(LaunchError::Ssh)?;
            let first = FIRST_AGENT_TOKEN + 2 * index;
            HostConnection::of_ssh(ssh, registry, (Token(first), Token(first + 1)))
                .map_err(|source| LaunchError::System { resource: "pipes for ssh", source })
        };
        // After an error, dropping `agents` ends the programs ssh that have been started.
        let mut agents = Self::default();
        agents.relays.start(&mut agents.links, hosts, &starter, connect)?;
        Ok(agents)
    }

    /// Records that the poll has reported this token.
    pub(super) fn mark_readable(&mut self, token: Token) {
        if let Some(offset) = token.0.checked_sub(FIRST_AGENT_TOKEN) {
            self.relays.mark_readable(&mut self.links, offset / 2);
        }
    }

    /// Returns how long the job may wait for events.
    pub(super) fn wait_limit(&self) -> Option<Duration> {
        if self.links.iter().any(AgentLink::is_readable) || self.relays.are_readable() {
            return Some(Duration::ZERO);
        }
        let running = self.links.iter().filter(|link| link.failure.is_none());
        let deadlines = running.filter_map(|link| link.connection.deadline());
        let deadline = deadlines.chain(self.relays.deadline()).min()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Reads and writes as much as is possible now, and returns the ranks that have ended. Prints why a host is lost.
    pub(super) fn advance(
        &mut self,
        ended_helpers: &[(Pid, Option<i32>)],
        output: &OutputCommandSender,
    ) -> Vec<(Rank, RankEnd)> {
        let mut ended_ranks = Vec::new();
        for index in 0..self.links.len() {
            for &ended in ended_helpers {
                self.relays.handle_ended_child(&mut self.links, index, ended);
            }
            let link = &self.links[index];
            let was_started = link.phase >= AgentPhase::Started && link.failure.is_none();
            self.relays.advance(&mut self.links, index);
            let link = &mut self.links[index];
            ended_ranks.extend(link.advance(index, output));
            if let Some(failure) = link.failure.as_ref().filter(|_| was_started) {
                output.print_message(failure.message());
            }
        }
        self.relays.pass_on(&mut self.links);
        ended_ranks
    }

    /// Returns the failures of hosts.
    pub(super) fn failures(&self) -> Vec<HostError> {
        self.links.iter().filter_map(|link| link.failure.clone()).collect()
    }

    /// Returns whether every agent that is not lost has reached this phase.
    pub(super) fn have_reached(&self, phase: AgentPhase) -> bool {
        self.links.iter().all(|link| link.phase >= phase || link.failure.is_some())
    }

    /// Gives up the agents that have not reached `phase` within `--start-timeout`.
    pub(super) fn fail_late_agents(&mut self, phase: AgentPhase, waited: Duration) {
        for link in self.links.iter_mut().filter(|link| link.phase < phase && link.failure.is_none()) {
            let step = match link.phase {
                AgentPhase::Connecting => "ssh did not start ringrun there",
                AgentPhase::Greeted => "its agent did not prepare the ranks",
                _ => "its agent did not answer",
            };
            let reason = format!("{step} within {} s (--start-timeout)", waited.as_secs_f64());
            link.fail(Exit::Start, reason);
        }
    }

    /// Refuses hosts that are the same machine under two names, or that are this machine.
    pub(super) fn check_machines(&self, has_own_ranks: bool) -> Result<(), LaunchError> {
        let own = machine_id(None);
        let mut known: Vec<(&str, &str)> =
            if has_own_ranks { vec![(own.as_str(), "this host")] } else { Vec::new() };
        for link in &self.links {
            let Some(hello) = &link.hello else { continue };
            let host = &link.host.name;
            if let Some((_, other)) = known.iter().find(|(machine, _)| *machine == hello.machine) {
                let reason =
                    format!("it is the same machine as {other}; name each machine once, with all its ranks");
                return Err(host_error(host, Exit::Usage, reason));
            }
            known.push((hello.machine.as_str(), &**host));
        }
        Ok(())
    }

    /// Returns the address of this host at which all other hosts can reach it: the source address of the routes to the hosts that
    /// ringrun itself reaches, or an address that `filter` allows. The other hosts check later that they have a route to it:
    /// relays may know them by addresses of networks that this host does not have.
    pub(super) fn find_own_address(&self, filter: Option<&InterfaceFilter>) -> Result<IpAddr, LaunchError> {
        let mut found: Option<(IpAddr, &str)> = None;
        for link in self.links.iter().filter(|link| link.via.is_none()) {
            let host = &link.host.name;
            let Some(remote) = link.hello.as_ref().and_then(|hello| hello.address) else {
                let reason =
                    "its sshd does not say at which address it was reached (SSH_CONNECTION is not set)"
                        .into();
                return Err(host_error(host, Exit::Start, reason));
            };
            let own = source_address(remote).map_err(|error| {
                host_error(host, Exit::Start, format!("there is no route to {remote}: {error}"))
            })?;
            if own.is_loopback() || remote.is_loopback() {
                let reason = format!(
                    "its name leads to the loopback address {remote}, which other hosts cannot reach; use the name or address \
                     that its network interface has"
                );
                return Err(host_error(host, Exit::Start, reason));
            }
            match found {
                Some((other, first)) if other != own && filter.is_none() => {
                    return Err(LaunchError::Address(format!(
                        "host {first} is reached from the address {other} of this host, and host {host} from {own}; all \
                         hosts must reach this host at one address, which --interface can choose"
                    )));
                }
                _ => found = Some((own, &**host)),
            }
        }
        let (route, _) = found.ok_or_else(|| LaunchError::Address("there is no other host".to_owned()))?;
        choose_address(filter, route)
    }

    /// Returns the address and the free port of the host of rank 0, or `None` if rank 0 runs on this host.
    pub(super) fn master(&self) -> Option<SocketAddr> {
        let link = self.links.iter().find(|link| link.host.share.contains(Rank::ZERO))?;
        link.master.map(SocketAddr::from)
    }

    /// Returns the place of each rank on other hosts, with its rank.
    pub(super) fn places(&self) -> impl Iterator<Item = (Rank, RankPlace)> {
        self.links.iter().flat_map(|link| link.host.share.ranks().zip(link.places()))
    }

    /// Sends each agent the message that `message` returns for its host.
    pub(super) fn send(&mut self, mut message: impl FnMut(&RemoteHost) -> ToAgent) {
        for link in &mut self.links {
            let message = message(&link.host);
            link.send(&message);
        }
        self.relays.pass_on(&mut self.links);
    }

    /// Records which hosts have ranks that read the standard input of ringrun. Returns whether there is such a host.
    pub(super) fn expect_input(&mut self, reader: StdinReader) -> bool {
        let reads = |link: &&mut AgentLink| match reader {
            StdinReader::NoRank => false,
            StdinReader::RankZero => link.host.share.contains(Rank::ZERO),
            StdinReader::AllRanks => true,
        };
        self.links.iter_mut().filter(reads).map(AgentLink::expect_input).count() > 0
    }

    /// Sends a part of the standard input to the hosts whose ranks read it.
    pub(super) fn send_input(&mut self, bytes: &[u8]) {
        self.links.iter_mut().for_each(|link| link.send_input(bytes));
        self.relays.pass_on(&mut self.links);
    }

    /// Returns how many bytes of the standard input the ranks on other hosts have taken, or `None` if none of them reads it.
    pub(super) fn input_taken(&self) -> Option<u64> {
        self.links.iter().filter_map(AgentLink::input_taken).min()
    }

    /// Allows an agent to send as many bytes as ringrun has printed.
    pub(super) fn add_credit(&mut self, index: usize, bytes: usize) {
        if let Some(link) = self.links.get_mut(index) {
            link.add_credit(bytes);
        }
        self.relays.pass_on(&mut self.links);
    }

    /// Returns whether ringrun still has output of other hosts that it has not printed.
    pub(super) fn have_unprinted_output(&self) -> bool {
        self.links.iter().any(AgentLink::has_unprinted_output)
    }

    /// Returns the exit records that ranks on other hosts have written.
    pub(super) fn take_records(&mut self) -> Vec<(Rank, ExitRecord)> {
        self.links.iter_mut().flat_map(|link| std::mem::take(&mut link.records)).collect()
    }

    /// Ends all connections, and waits until the programs ssh have ended.
    pub(super) fn close(&mut self) {
        let agents = self.links.iter_mut().map(|link| &mut link.connection);
        let mut connections: Vec<_> = agents.chain(self.relays.connections()).collect();
        for connection in &mut connections {
            connection.link.close();
        }
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        for connection in connections {
            connection.end_ssh(deadline);
        }
        (self.links, self.relays) = (Vec::new(), Relays::default());
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.close();
    }
}

fn host_error(host: &Arc<str>, exit: Exit, reason: String) -> LaunchError {
    LaunchError::Hosts(vec![HostError { host: Arc::clone(host), via: None, exit_code: exit as u8, reason }])
}
