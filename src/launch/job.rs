//! The event loop of ringrun. The loop tells the [supervisor](super::supervisor) when a rank ends, when the output is
//! closed, when a signal arrives and when time passes. The supervisor decides which signals to send to the ranks, and
//! the loop sends these signals.
//!
//! The loop waits for all events in a single poll, at most until the supervisor's next deadline. The ranks of this host and the
//! [agents](super::agents) of other hosts are sources of the same events.

use std::io::{self, IsTerminal as _, Write as _};
use std::mem;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};

use super::agent_link::AgentPhase;
use super::agent_messages::{JobDescription, ToAgent};
use super::agents::Agents;
use super::environment::JobVariables;
use super::error::{HostError, LaunchError};
use super::free_ports::check_ports;
use super::host_job::HostJob;
use super::input_feed::InputFeed;
use super::input_reader::InputReader;
use super::interfaces::choose_address;
use super::job_description::describe_job;
use super::job_rendezvous::{JobRendezvous, start_rendezvous_server};
use super::local_ranks::{LocalProcessors, LocalRanks, ReservedPort};
use super::message::LaunchMessage;
use super::nodes::{join_nodes, ranks_of_other_nodes};
use super::outcome::{
    EPIPE, JobOutcome, RankEnd, RankPlace, RankStatus, exit_code, failure_report, format_seconds,
};
use super::output::stdout_incomplete_message;
use super::output_files::OutputFiles;
use super::output_messages::{OutputEvent, OutputSummary, OutputTarget};
use super::plan::{LaunchPlan, Verbosity};
use super::root_cause::{blame_reported_rank, find_report};
use super::ssh::AgentStarter;
use super::status_line;
use super::supervisor::{Supervisor, SupervisorAction};
use super::terminal_writer::progress_bar_columns;
use crate::exit::Exit;
use crate::rendezvous::{MetNodes, Server, source_address};
use crate::types::{Rank, counted};
use crate::wire::ExitRecord;

/// After all ranks have ended, ringrun waits for this time for an agent that says nothing.
const AGENT_END_TIMEOUT: Duration = Duration::from_secs(10);

/// After one host has failed at the start, ringrun waits for this time for the failures of other hosts, to report them
/// together.
const OTHER_FAILURES_TIMEOUT: Duration = Duration::from_millis(500);

/// Runs the job and returns the exit code of ringrun.
pub(super) fn run_job(plan: &LaunchPlan) -> Result<u8, LaunchError> {
    match join_nodes(plan)? {
        Some((plan, met)) => run_part(&plan, Some(met)),
        None => run_part(plan, None),
    }
}

/// Runs the ranks that this ringrun starts. `met` is what it has learned from the ringruns of other nodes.
fn run_part(plan: &LaunchPlan, met: Option<MetNodes>) -> Result<u8, LaunchError> {
    let local_ranks = (plan.share.count() > 0).then(|| LocalRanks::find(plan)).transpose()?;
    let job_id = met.as_ref().map_or_else(rand::random::<[u8; 16]>, |met| met.job_id);
    let mut job = RunningJob::prepare(plan, to_hex(&job_id))?;
    let (address, rendezvous) = job.open_rendezvous(met)?;
    let server = rendezvous.server.as_ref();
    let processors = LocalProcessors::assign(plan, &job.host.output);
    check_ports(plan, address)?;
    let mut variables = JobVariables {
        world: plan.world,
        share: plan.share.clone(),
        rendezvous: rendezvous.address,
        listen: plan.interfaces.as_ref().map(|_| address),
        ports: plan.ports,
        master: rendezvous.address,
        secret: rendezvous.secret,
        job_id: job.job_id.clone(),
        start_timeout: plan.limits.start_timeout,
        exclusive_processors: processors.as_ref().map_or(0, LocalProcessors::exclusive_count),
        omp_threads: processors.as_ref().and_then(|processors| processors.omp_threads(plan.world)),
        // With --output-dir, rank 0 shows no progress bar, because the bar would fill its output file.
        status_columns: status_line::terminal_columns()
            .filter(|_| plan.output_dir.is_none())
            .map(|columns| progress_bar_columns(columns, plan.output_format)),
    };
    job.print_job_and_time_limits(&rendezvous.address);
    job.prepare_hosts(&variables)?;
    let port =
        ReservedPort::new().map_err(|source| LaunchError::System { resource: "a free port", source })?;
    let master_port = plan.nodes.as_ref().map_or(port.port, |nodes| nodes.port);
    variables.master = job.agents.master().unwrap_or(SocketAddr::new(rendezvous.address.ip(), master_port));
    if let (Some(local_ranks), Some(processors)) = (&local_ranks, &processors) {
        local_ranks.start(plan, processors, &variables, &[], &mut job.host)?;
    }
    job.start_remote_ranks(variables.master)?;
    job.start_input()?;
    let mut supervisor = Supervisor::new(plan.limits, plan.failure_policy, job.places());
    supervisor.handle_rank_ends(&ranks_of_other_nodes(plan), Duration::ZERO);
    let (outcome, rank_statuses) = job.run_event_loop(supervisor, server)?;
    if job.finish_hosts()?.is_none() {
        return Ok(exit_code(outcome, &rank_statuses));
    }
    let exit_records = job.take_exit_records();
    let host_failures = job.agents.failures();
    job.agents.close();
    job.host.kill_leftover_processes()?;
    let Some(OutputSummary { last_lines, write_failures }) = job.wait_for_output()? else {
        return Ok(exit_code(outcome, &rank_statuses));
    };
    let outcome = blame_reported_rank(outcome, &rank_statuses, &exit_records);
    let report = find_report(outcome, &exit_records);
    let mut messages = failure_report(outcome, &rank_statuses, (&last_lines, report));
    // Repeat the messages about hosts and failed writes at the end, because the first copies may have scrolled away.
    messages.extend(host_failures.iter().map(HostError::message));
    messages.extend(write_failures.iter().cloned());
    let text: String = messages.iter().map(plan.message_format).collect();
    // Ignore the failure of this write: standard error may be closed.
    let _ = io::stderr().write_all(text.as_bytes());
    let code = exit_code(outcome, &rank_statuses);
    Ok(if code == 0 && !write_failures.is_empty() { Exit::Failure as u8 } else { code })
}

/// A running job.
struct RunningJob<'a> {
    plan: &'a LaunchPlan,
    job_id: String,
    /// The connections to other hosts. They end before the ranks of this host are killed.
    agents: Agents,
    host: HostJob,
    /// The standard input; `None` if no rank reads it, or rank 0 inherits it.
    input: Option<InputReader>,
    /// The ranks that have ended, and that the supervisor does not know yet.
    ended_ranks: Vec<(Rank, RankEnd)>,
    /// The `errno` of a failed write to standard output that the supervisor does not know yet.
    stdout_errno: Option<i32>,
    /// The summary of the output thread, after all output has been written.
    output_summary: Option<OutputSummary>,
}

impl<'a> RunningJob<'a> {
    /// Prepares the job without starting ranks.
    fn prepare(plan: &'a LaunchPlan, job_id: String) -> Result<Self, LaunchError> {
        // The other ringruns write the files of their ranks.
        let ranks: Vec<Rank> =
            if plan.nodes.is_some() { plan.share.ranks().collect() } else { plan.world.ranks().collect() };
        let files = match &plan.output_dir {
            Some(output_dir) => OutputFiles::create(output_dir, ranks.into_iter(), plan.world)
                .map_err(|(path, source)| LaunchError::OutputDir { path, source })?,
            None => OutputFiles::default(),
        };
        let host = HostJob::prepare(
            plan,
            &job_id,
            OutputTarget::Terminal((plan.output_format, plan.message_format), files),
        )?;
        Ok(Self {
            plan,
            job_id,
            agents: Agents::default(),
            input: None,
            host,
            ended_ranks: Vec::new(),
            stdout_errno: None,
            output_summary: None,
        })
    }

    /// Connects to the other hosts and opens the rendezvous, unless the ringruns of all nodes have done so. Also returns
    /// the address on which the ranks of this host listen.
    fn open_rendezvous(&mut self, met: Option<MetNodes>) -> Result<(IpAddr, JobRendezvous), LaunchError> {
        if let Some(MetNodes { rendezvous, server, secret, .. }) = met {
            let own = source_address(rendezvous.ip())
                .and_then(|route| {
                    choose_address(self.plan.interfaces.as_ref(), route).map_err(io::Error::other)
                })
                .map_err(|error| {
                    LaunchError::Address(format!("there is no route to {rendezvous}: {error}"))
                })?;
            return Ok((own, JobRendezvous { address: rendezvous, server, secret }));
        }
        let address = self.reach_hosts()?;
        let secret = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
        let output = self.host.output.command_sender();
        let server = start_rendezvous_server(self.plan, (address, &secret, &self.job_id), output)?;
        Ok((address, JobRendezvous { address: server.address(), server: Some(server), secret }))
    }

    /// Connects to the other hosts. Returns the address of this host for the rendezvous.
    fn reach_hosts(&mut self) -> Result<IpAddr, LaunchError> {
        if self.plan.remote_hosts.is_empty() {
            return Ok(Ipv4Addr::LOCALHOST.into());
        }
        let own_path = std::env::current_exe()
            .map_err(|source| LaunchError::System { resource: "the path of ringrun", source })?;
        let (options, start_timeout) = (self.plan.ssh.clone(), self.plan.limits.start_timeout);
        let starter = AgentStarter { options, own_path, start_timeout };
        let HostJob { rank_processes, poll, .. } = &mut self.host;
        self.agents = Agents::start(&self.plan.remote_hosts, starter, rank_processes, poll.registry())?;
        self.wait_for_agents(AgentPhase::Greeted)?;
        self.agents.check_machines(self.plan.share.count() > 0)?;
        self.agents.find_own_address(self.plan.interfaces.as_ref())
    }

    /// Describes the job to the agents, and waits until they have found its program and its directory.
    fn prepare_hosts(&mut self, variables: &JobVariables) -> Result<(), LaunchError> {
        if self.plan.remote_hosts.is_empty() {
            return Ok(());
        }
        let description = describe_job(self.plan, variables)?;
        let describe = |share| JobDescription { share, ..description.clone() };
        self.agents.send(|host| ToAgent::Prepare(Box::new(describe(host.share.clone()))));
        self.wait_for_agents(AgentPhase::Ready)
    }

    fn start_remote_ranks(&mut self, master: SocketAddr) -> Result<(), LaunchError> {
        self.agents.send(|_| ToAgent::Start { master });
        self.wait_for_agents(AgentPhase::Started)
    }

    /// Starts to copy the standard input to the ranks that read it and cannot inherit it.
    fn start_input(&mut self) -> Result<(), LaunchError> {
        let is_read_here = self.host.input_feed.as_ref().is_some_and(|feed| feed.taken().is_some());
        let is_terminal = io::stdin().is_terminal();
        if (!is_terminal && self.agents.expect_input(self.plan.stdin_reader)) || is_read_here {
            let reader = InputReader::start(Arc::clone(&self.host.waker));
            let error = |source| LaunchError::System { resource: "a thread for the standard input", source };
            self.input = Some(reader.map_err(error)?);
        }
        Ok(())
    }

    /// Passes the standard input to the ranks, and reads on as far as they have taken it.
    fn pass_input(&mut self) {
        let Some(reader) = &mut self.input else { return };
        while let Some(chunk) = reader.next_chunk() {
            let chunk = chunk.unwrap_or_else(|error| {
                self.host
                    .output
                    .print_message(LaunchMessage::error(format!("cannot read the standard input: {error}")));
                Vec::new()
            });
            self.agents.send_input(&chunk);
            self.host.input_feed.iter_mut().for_each(|feed| feed.push(&chunk));
        }
        self.host.input_feed.iter_mut().for_each(InputFeed::advance);
        let own = self.host.input_feed.as_ref().and_then(InputFeed::taken);
        // If no rank reads any more, ringrun stops to read.
        if let Some(taken) = own.into_iter().chain(self.agents.input_taken()).min() {
            reader.release(taken);
        }
    }

    /// Waits until all agents have reached this phase of the start, at most `--start-timeout`.
    fn wait_for_agents(&mut self, phase: AgentPhase) -> Result<(), LaunchError> {
        let start = Instant::now();
        let mut limit = self.plan.limits.start_timeout;
        while !self.agents.have_reached(phase) {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() && self.agents.failures().is_empty() {
                self.agents.fail_late_agents(phase, limit);
            }
            if left.is_zero() {
                break;
            }
            let signals = self.wait_for_events(Some(left))?;
            if let Some(&signal) = signals.iter().find(|signal| ENDING_SIGNALS.contains(signal)) {
                return Err(LaunchError::Interrupted(signal));
            }
            if !self.agents.failures().is_empty() {
                limit = limit.min(start.elapsed().min(limit) + OTHER_FAILURES_TIMEOUT);
            }
        }
        let failures = self.agents.failures();
        if failures.is_empty() { Ok(()) } else { Err(LaunchError::Hosts(failures)) }
    }

    /// Returns the process of each rank, in rank order.
    fn places(&self) -> Vec<RankPlace> {
        let own_pids = self.host.rank_processes.pids().into_iter();
        let own = self.plan.share.ranks().zip(own_pids.map(|pid| RankPlace { pid, host: None }));
        let mut places: Vec<(Rank, RankPlace)> = own.chain(self.agents.places()).collect();
        places.extend(
            ranks_of_other_nodes(self.plan).into_iter().map(|(rank, _)| (rank, RankPlace::default())),
        );
        places.sort_by_key(|(rank, _)| *rank);
        places.into_iter().map(|(_, place)| place).collect()
    }

    /// Runs the event loop until every rank has ended, or some ranks did not end after SIGKILL.
    fn run_event_loop(
        &mut self,
        mut supervisor: Supervisor,
        server: Option<&Server>,
    ) -> Result<(JobOutcome, Vec<RankStatus>), LaunchError> {
        while !supervisor.is_over() {
            let timeout =
                supervisor.deadline().map(|until| until.saturating_sub(self.host.start_time.elapsed()));
            let timeout = if self.ended_ranks.is_empty() { timeout } else { Some(Duration::ZERO) };
            for signal in self.wait_for_events(timeout)? {
                match signal {
                    SIGCHLD => {}
                    // Ctrl-Z stops the ranks and then ringrun. After SIGCONT, ringrun continues the ranks.
                    SIGTSTP => {
                        self.send_signal(SIGTSTP);
                        let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
                    }
                    other => supervisor.handle_signal(other, self.host.start_time.elapsed()),
                }
            }
            let ended_ranks = mem::take(&mut self.ended_ranks);
            // Call `has_job_started` after the ranks have been reaped: if a rank in `ended_ranks` ended after the start of
            // the job, the supervisor must first record the start.
            // Without a server, only the ringrun of node 0 knows whether the job has started.
            if server.is_none_or(Server::has_job_started) {
                supervisor.handle_job_start();
            }
            let now = self.host.start_time.elapsed();
            supervisor.handle_rank_ends(&ended_ranks, now);
            // Tell the server that these ranks can no longer join the job, even if they ended without an error.
            for (rank, ended) in &ended_ranks {
                if let Some(server) = server {
                    server.rank_ended(*rank, format!("it {ended}"));
                }
            }
            if self.plan.verbosity == Verbosity::Verbose {
                for (rank, ended) in ended_ranks {
                    let text = format!("rank {rank} {ended} after {}", format_seconds(now));
                    self.host.output.print_message(LaunchMessage::info(text).about(rank));
                }
            }
            if let Some(errno) = self.stdout_errno.take() {
                supervisor.handle_stdout_failure(errno, now);
            }
            supervisor.tick(now);
            self.perform_actions(&mut supervisor);
            self.host.warn_of_lost_watchdog();
        }
        Ok(supervisor.into_result())
    }

    fn perform_actions(&mut self, supervisor: &mut Supervisor) {
        while let Some(action) = supervisor.poll_action() {
            match action {
                SupervisorAction::Signal(signal) => self.send_signal(signal),
                SupervisorAction::Print(message) => self.host.output.print_message(message),
            }
        }
    }

    /// Sends a signal to all ranks that still run.
    fn send_signal(&mut self, signal: i32) {
        self.host.rank_processes.send_signal(signal);
        self.agents.send(|_| ToAgent::Signal(signal));
    }

    /// Waits until the agents have sent everything. Returns `None` if a signal ends the wait.
    fn finish_hosts(&mut self) -> Result<Option<()>, LaunchError> {
        let mut silent_since = Instant::now();
        while !self.agents.have_reached(AgentPhase::Finished) {
            let left = AGENT_END_TIMEOUT.saturating_sub(silent_since.elapsed());
            // The wait for a slow reader of the output has no deadline.
            let is_reader_slow = self.agents.have_unprinted_output();
            if left.is_zero() && !is_reader_slow {
                self.agents.fail_late_agents(AgentPhase::Finished, AGENT_END_TIMEOUT);
                break;
            }
            let signals = self.wait_for_events((!is_reader_slow).then_some(left))?;
            if signals.iter().any(|signal| ENDING_SIGNALS.contains(signal)) {
                return Ok(None);
            }
            silent_since = Instant::now();
        }
        Ok(Some(()))
    }

    /// Returns the exit record of each rank, in rank order. Call this function once, after the ranks have ended.
    fn take_exit_records(&mut self) -> Vec<Option<ExitRecord>> {
        let mut records: Vec<Option<ExitRecord>> = vec![None; self.plan.world.as_usize()];
        let found = self.host.rank_processes.read_exit_records().into_iter();
        for (rank, record) in found.chain(self.agents.take_records()) {
            records[rank.index()] = Some(record);
        }
        records
    }

    /// Waits until all output is written. Returns `None` if a signal ends the wait. This wait has no deadline,
    /// because a pager may read slowly.
    fn wait_for_output(&mut self) -> Result<Option<OutputSummary>, LaunchError> {
        self.host.output.drain_pipes();
        let mut stdout_errno = None;
        loop {
            // After all ranks have ended, it is no error if the program that reads ringrun's output closes the pipe.
            stdout_errno = stdout_errno.or(self.stdout_errno.take().filter(|&errno| errno != EPIPE));
            if let Some(mut summary) = self.output_summary.take() {
                summary.write_failures.extend(stdout_errno.map(stdout_incomplete_message));
                return Ok(Some(summary));
            }
            let signals = self.wait_for_events(None)?;
            if signals.iter().any(|signal| ENDING_SIGNALS.contains(signal)) {
                return Ok(None);
            }
        }
    }

    /// Waits for events, and returns the signals among them. Records all other events.
    fn wait_for_events(&mut self, timeout: Option<Duration>) -> Result<Vec<i32>, LaunchError> {
        let timeout = [timeout, self.agents.wait_limit()].into_iter().flatten().min();
        let found = self.host.wait_for_events(timeout)?;
        for token in found.tokens {
            self.agents.mark_readable(token);
        }
        self.ended_ranks.extend(self.host.rank_processes.reap_ended_ranks());
        let ended_helpers = self.host.rank_processes.take_ended_helpers();
        let output = self.host.output.command_sender();
        self.ended_ranks.extend(self.agents.advance(&ended_helpers, &output));
        self.pass_input();
        loop {
            match self.host.output.next_event() {
                Ok(OutputEvent::StdoutFailed(errno)) => self.stdout_errno = Some(errno),
                Ok(OutputEvent::Drained(summary)) => self.output_summary = Some(summary),
                Ok(OutputEvent::RemotePrinted { agent, count }) => self.agents.add_credit(agent, count),
                // Only agents get these events.
                Ok(OutputEvent::Forwarded { .. } | OutputEvent::Note(_)) => {}
                Err(TryRecvError::Empty) => return Ok(found.signals),
                Err(TryRecvError::Disconnected) => {
                    self.output_summary.get_or_insert_default();
                    return Ok(found.signals);
                }
            }
        }
    }

    /// With `--verbose`, prints the job's id, its number of ranks and its time limits.
    fn print_job_and_time_limits(&self, rendezvous: &SocketAddr) {
        if self.plan.verbosity == Verbosity::Verbose {
            let limits = &self.plan.limits;
            let job = limits.job_timeout.map_or_else(|| "none".to_owned(), format_seconds);
            let print = |text: String| self.host.output.print_message(LaunchMessage::info(text));
            let ranks = counted(self.plan.world, "rank");
            print(format!("job {} of {ranks}, rendezvous at {rendezvous}", self.job_id));
            print(format!(
                "time limits: start {}; whole job {job}; from a failure to SIGTERM {}; from SIGTERM to SIGKILL {}, or {} if \
                 ringrun itself got SIGTERM",
                format_seconds(limits.start_timeout),
                format_seconds(limits.grace),
                format_seconds(limits.kill_after),
                format_seconds(limits.term_timeout)
            ));
        }
    }
}

/// The signals that end a wait before the ranks have started, and after they have ended.
const ENDING_SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
