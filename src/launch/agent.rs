//! The agent: the ringrun that ssh has started on another host. It starts the ranks of its host, and passes on what happens to
//! them and what they print. It decides nothing about the job, except that it stops the ranks when its connection ends.

use std::env;
use std::ffi::OsString;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use mio::Token;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::agent_messages::{AgentHello, FromAgent, JobDescription, OUTPUT_CREDIT_BYTES, ToAgent};
use super::environment::JobVariables;
use super::error::LaunchError;
use super::frame_link::FrameLink;
use super::frames::{AgentFrame, FrameReader, MAGIC, encode_message, encode_output};
use super::free_ports::check_ports;
use super::host_job::HostJob;
use super::interfaces::choose_address;
use super::job_description::into_plan;
use super::local_ranks::{LocalProcessors, LocalRanks, ReservedPort};
use super::message::LaunchMessage;
use super::outcome::RankPlace;
use super::output_messages::{OutputEvent, OutputTarget};
use super::plan::LaunchPlan;
use super::processes;
use super::supervisor::{Supervisor, SupervisorAction};
use crate::exit::Exit;
use crate::rendezvous::{machine_id, source_address};
use crate::types::Rank;

/// The variable in which sshd describes a connection: the client's address and port, and the server's address and port.
const CONNECTION_VARIABLE: &str = "SSH_CONNECTION";

/// How long the agent waits for the next message of ringrun before the ranks run, and until ringrun has read the last message.
const LAUNCHER_TIMEOUT: Duration = Duration::from_mins(10);

const READ_TOKEN: Token = Token(1 << 16);
const WRITE_TOKEN: Token = Token(READ_TOKEN.0 + 1);

/// Runs the agent.
pub(super) fn main() -> ExitCode {
    processes::set_process_name("ring-agent");
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            // Standard error is closed if the connection has ended.
            let _ = io::Write::write_all(&mut io::stderr(), format!("ringrun agent: {reason}\n").as_bytes());
            Exit::Failure.into()
        }
    }
}

fn run() -> Result<(), String> {
    let no_pipes = |error: io::Error| format!("only ringrun starts an agent, with pipes: {error}");
    let reader = io::stdin().as_fd().try_clone_to_owned().map_err(no_pipes)?;
    let writer = io::stdout().as_fd().try_clone_to_owned().map_err(no_pipes)?;
    let mut link = FrameLink::new((reader, writer), FrameReader::of_launcher()).map_err(no_pipes)?;
    link.send(MAGIC);
    link.send(&encode_message(&FromAgent::Hello(AgentHello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: machine_id(None),
        address: env::var(CONNECTION_VARIABLE)
            .ok()
            .and_then(|connection| connection.split_whitespace().nth(2)?.parse().ok()),
    })));
    let Some(description) = receive_description(&mut link)? else { return Ok(()) };
    let refusal = match Agent::prepare(&mut link, &description) {
        Ok(mut agent) => return agent.run_job(&description).map_err(|error| error.to_string()),
        Err(error) => error,
    };
    send_refusal(&mut link, &refusal);
    Ok(())
}

/// Waits for the description of the job. Returns `None` if ringrun has ended.
fn receive_description(link: &mut FrameLink) -> Result<Option<JobDescription>, String> {
    let deadline = Instant::now() + LAUNCHER_TIMEOUT;
    loop {
        match link.receive()?.into_iter().next() {
            Some(AgentFrame::Message(body)) => match AgentFrame::parse(&body)? {
                ToAgent::Prepare(description) => return Ok(Some(*description)),
                _ => return Err("the first message of ringrun does not describe a job".to_owned()),
            },
            Some(_) => {
                return Err("the first message of ringrun does not describe a job".to_owned());
            }
            None if link.has_ended() => return Ok(None),
            None => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("ringrun did not describe a job in time".to_owned());
        }
        link.wait_until_readable(left).map_err(|error| error.to_string())?;
    }
}

/// Tells ringrun why the ranks of this host cannot be started, and waits until ringrun has ended the connection.
fn send_refusal(link: &mut FrameLink, error: &LaunchError) {
    link.send(&encode_message(&FromAgent::Refused {
        exit_code: error.exit_code(),
        reason: error.to_string(),
    }));
    let deadline = Instant::now() + LAUNCHER_TIMEOUT;
    while !link.has_ended() && Instant::now() < deadline {
        link.flush();
        if link.receive().is_err() || link.wait_until_readable(Duration::from_secs(1)).is_err() {
            break;
        }
    }
}

/// The agent of one host.
struct Agent<'a> {
    link: &'a mut FrameLink,
    plan: LaunchPlan,
    host: HostJob,
    local_ranks: LocalRanks,
    processors: Option<LocalProcessors>,
    /// The address of this host.
    address: IpAddr,
    _port: ReservedPort,
    /// Messages of ringrun that have arrived, and have not been handled.
    messages: Vec<ToAgent>,
    /// How much of the input the ranks have taken, as ringrun knows it.
    reported_input: Option<u64>,
    /// Whether ringrun has ended, or has broken a rule.
    is_alone: bool,
    /// Whether all output has been passed on.
    is_drained: bool,
}

impl<'a> Agent<'a> {
    /// Looks for everything that the ranks need, and tells ringrun that they can be started.
    fn prepare(link: &'a mut FrameLink, description: &JobDescription) -> Result<Self, LaunchError> {
        let system_error = |resource| move |source| LaunchError::System { resource, source };
        let plan = into_plan(description).map_err(LaunchError::Address)?;
        let rendezvous = description.rendezvous.ip();
        let address = source_address(rendezvous).map_err(|error| {
            LaunchError::Address(format!("it has no route to ringrun's address {rendezvous}: {error}"))
        })?;
        if address.is_loopback() {
            return Err(LaunchError::Address(format!(
                "it reaches ringrun's address {rendezvous} only from its loopback address {address}"
            )));
        }
        let address = choose_address(plan.interfaces.as_ref(), address)?;
        check_ports(&plan, address)?;
        let local_ranks = LocalRanks::find(&plan)?;
        let host = HostJob::prepare(&plan, &description.job_id, OutputTarget::Launcher(OUTPUT_CREDIT_BYTES))?;
        link.register(host.poll.registry(), (READ_TOKEN, WRITE_TOKEN))
            .map_err(system_error("the connection to ringrun"))?;
        link.mark_readable();
        let processors = LocalProcessors::assign(&plan, &host.output);
        let port = ReservedPort::new().map_err(system_error("a free port"))?;
        link.send(&encode_message(&FromAgent::Ready { address, master_port: port.port }));
        Ok(Self {
            link,
            plan,
            host,
            local_ranks,
            processors,
            address,
            _port: port,
            messages: Vec::new(),
            reported_input: None,
            is_alone: false,
            is_drained: false,
        })
    }

    /// Waits until ringrun starts the job, and runs the ranks of this host to their end.
    fn run_job(&mut self, description: &JobDescription) -> Result<(), LaunchError> {
        let deadline = Instant::now() + LAUNCHER_TIMEOUT;
        let master = loop {
            let start = self.messages.iter().find_map(|message| match message {
                ToAgent::Start { master } => Some(*master),
                _ => None,
            });
            if let Some(master) = start {
                break master;
            }
            if self.is_alone || Instant::now() > deadline {
                return Ok(());
            }
            self.wait_for_events(Some(LAUNCHER_TIMEOUT))?;
        };
        self.messages.clear();
        let processors = self.processors.as_ref();
        let variables = JobVariables {
            world: self.plan.world,
            share: self.plan.share.clone(),
            rendezvous: description.rendezvous,
            listen: self.plan.interfaces.as_ref().map(|_| self.address),
            ports: self.plan.ports,
            master,
            secret: description.secret.clone(),
            job_id: description.job_id.clone(),
            start_timeout: self.plan.limits.start_timeout,
            exclusive_processors: processors.map_or(0, LocalProcessors::exclusive_count),
            omp_threads: processors.and_then(|processors| processors.omp_threads(self.plan.world)),
            status_columns: description.status_columns,
        };
        if let Err(error) = self.start_ranks(&variables, &description.inherited) {
            send_refusal(self.link, &error);
            return Ok(());
        }
        let pids = self.host.rank_processes.pids();
        let places = pids.iter().map(|&pid| RankPlace { pid, host: None }).collect();
        self.send(&FromAgent::Started { pids });
        self.run_event_loop(Supervisor::new(self.plan.limits, self.plan.failure_policy, places))?;
        self.finish()
    }

    fn start_ranks(
        &mut self,
        variables: &JobVariables,
        inherited: &[(OsString, OsString)],
    ) -> Result<(), LaunchError> {
        let Some(processors) = &self.processors else { return Ok(()) };
        self.local_ranks.start(&self.plan, processors, variables, inherited, &mut self.host)
    }

    fn send(&mut self, message: &FromAgent) {
        self.link.send(&encode_message(message));
    }

    /// Passes on the signals of ringrun until every rank has ended. The supervisor only stops the ranks when this agent is
    /// alone, or gets a signal itself.
    fn run_event_loop(&mut self, mut supervisor: Supervisor) -> Result<(), LaunchError> {
        // The supervisor numbers the ranks of this host from 0.
        supervisor.handle_job_start();
        while !supervisor.is_over() {
            let timeout =
                supervisor.deadline().map(|until| until.saturating_sub(self.host.start_time.elapsed()));
            let signals = self.wait_for_events(timeout)?;
            let ended_ranks = self.host.rank_processes.reap_ended_ranks();
            let now = self.host.start_time.elapsed();
            if self.is_alone
                || signals.iter().any(|signal| [SIGTERM, SIGINT, SIGHUP, SIGQUIT].contains(signal))
            {
                supervisor.handle_signal(SIGTERM, now);
            }
            for message in mem::take(&mut self.messages) {
                if let ToAgent::Signal(signal) = message {
                    self.host.rank_processes.send_signal(signal);
                }
            }
            let local_ends: Vec<_> = ended_ranks
                .iter()
                .map(|&(rank, end)| (Rank::new(self.plan.share.local_rank(rank)), end))
                .collect();
            supervisor.handle_rank_ends(&local_ends, now);
            for (rank, end) in ended_ranks {
                self.send(&FromAgent::Ended { rank: rank.get(), end });
            }
            supervisor.tick(now);
            while let Some(action) = supervisor.poll_action() {
                if let SupervisorAction::Signal(signal) = action {
                    self.host.rank_processes.send_signal(signal);
                }
            }
            self.host.warn_of_lost_watchdog();
        }
        Ok(())
    }

    /// Passes on the rest of the output and the exit records.
    fn finish(&mut self) -> Result<(), LaunchError> {
        self.host.kill_leftover_processes()?;
        self.host.output.drain_pipes();
        while !self.is_drained && !self.is_alone {
            self.wait_for_events(None)?;
        }
        for (rank, record) in self.host.rank_processes.read_exit_records() {
            self.send(&FromAgent::Record { rank: rank.get(), record: record.encode() });
        }
        self.send(&FromAgent::Finished);
        let deadline = Instant::now() + LAUNCHER_TIMEOUT;
        while self.link.unsent_bytes() > 0 && !self.is_alone && Instant::now() < deadline {
            self.wait_for_events(Some(LAUNCHER_TIMEOUT))?;
        }
        Ok(())
    }

    /// Waits for events, and returns the signals among them. Passes on output, and collects the messages of ringrun.
    fn wait_for_events(&mut self, timeout: Option<Duration>) -> Result<Vec<i32>, LaunchError> {
        let timeout = if self.link.is_readable() { Some(Duration::ZERO) } else { timeout };
        let found = self.host.wait_for_events(timeout)?;
        if found.tokens.contains(&READ_TOKEN) {
            self.link.mark_readable();
        }
        self.link.flush();
        let received = self.link.receive();
        let mut is_broken = received.is_err() || self.link.has_ended();
        for frame in received.unwrap_or_default() {
            match frame {
                AgentFrame::Message(body) => match AgentFrame::parse(&body) {
                    Ok(ToAgent::OutputCredit(bytes)) => self.host.output.add_credit(bytes),
                    Ok(message) => self.messages.push(message),
                    Err(_) => is_broken = true,
                },
                AgentFrame::Output { .. } | AgentFrame::Relayed { .. } => is_broken = true,
                AgentFrame::Input(bytes) => {
                    self.host.input_feed.iter_mut().for_each(|feed| feed.push(&bytes));
                }
            }
        }
        if let Some(feed) = &mut self.host.input_feed {
            feed.advance();
            let taken = feed.taken();
            if mem::replace(&mut self.reported_input, taken) != taken {
                self.link.send(&encode_message(&FromAgent::InputTaken(taken)));
            }
        }
        if is_broken && !mem::replace(&mut self.is_alone, true) {
            // The output thread must not wait for ringrun any more.
            self.host.output.add_credit(usize::MAX);
        }
        while let Ok(event) = self.host.output.next_event() {
            match event {
                OutputEvent::Forwarded { rank, stream, bytes } => {
                    self.link.send(&encode_output(rank, stream, &bytes));
                }
                OutputEvent::Note(LaunchMessage { level, text, .. }) => {
                    self.send(&FromAgent::Note { level, text });
                }
                OutputEvent::Drained(_) => self.is_drained = true,
                // Only ringrun gets these events.
                OutputEvent::StdoutFailed(_) | OutputEvent::RemotePrinted { .. } => {}
            }
        }
        Ok(found.signals)
    }
}
